-- The hours of every mailbox that was asked for until the end of the report; inside are those since its beginning.
-- change is by how much the messages that are there became more in the hour; a mailbox that ends takes all of them.
WITH endings AS (
    SELECT tenant, mailbox, min(hour) AS end_hour
    FROM usage_hourly
    WHERE ended
    GROUP BY tenant, mailbox
),
last_depths AS (
    SELECT
        usage_hourly.tenant AS tenant,
        usage_hourly.mailbox AS mailbox,
        end_hour,
        sum(came - went) FILTER (WHERE hour < end_hour) AS messages,
        sum(came_bytes - went_bytes) FILTER (WHERE hour < end_hour) AS bytes
    FROM usage_hourly
    JOIN endings ON endings.tenant = usage_hourly.tenant AND endings.mailbox = usage_hourly.mailbox
    GROUP BY usage_hourly.tenant, usage_hourly.mailbox, end_hour
)
SELECT
    usage_hourly.tenant AS tenant,
    usage_hourly.mailbox AS mailbox,
    hour,
    sent, delayed, delivered, leased, acknowledged, expired, deleted, compacted, dead, bytes_in, came, ended,
    first_p50, first_p95, first_p99, first_count,
    CASE WHEN end_hour IS NULL OR hour < end_hour THEN came - went
        WHEN hour = end_hour THEN -coalesce(messages, 0) ELSE 0 END AS change,
    CASE WHEN end_hour IS NULL OR hour < end_hour THEN came_bytes - went_bytes
        WHEN hour = end_hour THEN -coalesce(bytes, 0) ELSE 0 END AS change_bytes,
    hour >= begin_at AS inside
FROM usage_hourly
JOIN asked ON asked.tenant IS NULL OR asked.tenant = usage_hourly.tenant
LEFT JOIN last_depths ON last_depths.tenant = usage_hourly.tenant AND last_depths.mailbox = usage_hourly.mailbox
WHERE hour < end_at
