-- The twenty mailboxes with the worst hours, by the 95th percentile of the waits for the first delivery; all_p95 and
-- within, how many waited less than the goal, are of all their messages.
WITH worst AS (
    SELECT tenant, mailbox, hour, first_p50, first_p95, first_p99, first_count
    FROM (
        SELECT
            *,
            row_number() OVER (PARTITION BY tenant, mailbox ORDER BY first_p95 DESC, hour DESC) AS place
        FROM report_hours
        WHERE inside AND first_count > 0
    ) AS by_place
    WHERE place = 1
    ORDER BY first_p95 DESC, tenant, mailbox
    LIMIT 20
),
running AS (
    SELECT
        worst.tenant AS tenant,
        worst.mailbox AS mailbox,
        at_least,
        goal,
        messages,
        sum(messages) OVER (PARTITION BY worst.tenant, worst.mailbox ORDER BY at_least) AS so_far,
        sum(messages) OVER (PARTITION BY worst.tenant, worst.mailbox) AS total
    FROM worst
    JOIN usage_wait_counts
        ON usage_wait_counts.tenant = worst.tenant AND usage_wait_counts.mailbox = worst.mailbox
    CROSS JOIN asked
    WHERE wait = 'delivery' AND usage_wait_counts.hour >= begin_at AND usage_wait_counts.hour < end_at
),
every_wait AS (
    SELECT
        tenant,
        mailbox,
        max(total) AS waited,
        min(at_least) FILTER (WHERE so_far >= 0.95 * total) AS all_p95,
        coalesce(sum(messages) FILTER (WHERE at_least < goal), 0) AS within
    FROM running
    GROUP BY tenant, mailbox
)
SELECT
    tenant, mailbox, unix_millis(hour) AS hour, first_p50, first_p95, first_p99, first_count, waited, all_p95, within
FROM worst
JOIN every_wait USING (tenant, mailbox)
ORDER BY first_p95 DESC, tenant, mailbox
