-- Groups that were given less than half of what came, counted from the hour of their first delivery.
WITH begun AS (
    SELECT
        usage_groups.tenant AS tenant,
        mailbox,
        group_no,
        min(hour) AS since,
        sum(given) AS given,
        sum(acknowledged) AS acknowledged
    FROM usage_groups
    JOIN asked ON asked.tenant IS NULL OR asked.tenant = usage_groups.tenant
    WHERE hour >= begin_at AND hour < end_at
    GROUP BY usage_groups.tenant, mailbox, group_no
)
SELECT tenant, mailbox, group_no, unix_millis(since) AS since, given, acknowledged, came
FROM (
    SELECT begun.tenant AS tenant, begun.mailbox AS mailbox, group_no, since, given, begun.acknowledged AS acknowledged,
        sum(came) AS came
    FROM begun
    JOIN report_hours ON report_hours.tenant = begun.tenant AND report_hours.mailbox = begun.mailbox
    WHERE inside AND given > 0 AND hour >= since
    GROUP BY begun.tenant, begun.mailbox, group_no, since, given, begun.acknowledged
) AS counted
WHERE given * 2 < came
ORDER BY came - given DESC, tenant, mailbox, group_no
LIMIT 20
