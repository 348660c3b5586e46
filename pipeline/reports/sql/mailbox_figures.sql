-- A row for each mailbox: what was done with it in the report's time, what became of the messages that became visible
-- in it, what is there at its end, and its oldest unread message.
WITH sums AS (
    SELECT
        tenant,
        mailbox,
        coalesce(sum(sent) FILTER (WHERE inside), 0) AS sent,
        coalesce(sum(delivered + leased + acknowledged) FILTER (WHERE inside), 0) AS taken,
        coalesce(sum(expired) FILTER (WHERE inside), 0) AS expired,
        coalesce(sum(dead) FILTER (WHERE inside), 0) AS dead,
        coalesce(sum(change) FILTER (WHERE inside), 0) AS growth,
        coalesce(sum(change_bytes) FILTER (WHERE inside), 0) AS growth_bytes,
        sum(change) AS depth,
        sum(change_bytes) AS depth_bytes,
        bool_or(ended) AS ended
    FROM report_hours
    GROUP BY tenant, mailbox
),
fates AS (
    SELECT
        usage_messages.tenant AS tenant,
        mailbox,
        sum(came) FILTER (WHERE hour >= begin_at) AS came,
        sum(delivered) FILTER (WHERE hour >= begin_at) AS delivered,
        sum(acknowledged) FILTER (WHERE hour >= begin_at) AS acknowledged,
        sum(expired) FILTER (WHERE hour >= begin_at) AS came_expired,
        sum(expired_unread) FILTER (WHERE hour >= begin_at) AS expired_unread,
        sum(unread) AS unread,
        min(oldest_unread) AS oldest_unread
    FROM usage_messages
    JOIN asked ON asked.tenant IS NULL OR asked.tenant = usage_messages.tenant
    WHERE hour < end_at
    GROUP BY usage_messages.tenant, mailbox
)
SELECT
    sums.*,
    coalesce(came, 0) AS came,
    coalesce(delivered, 0) AS delivered,
    coalesce(acknowledged, 0) AS acknowledged,
    coalesce(came_expired, 0) AS came_expired,
    coalesce(expired_unread, 0) AS expired_unread,
    CASE WHEN ended THEN 0 ELSE coalesce(unread, 0) END AS unread,
    CASE WHEN ended THEN NULL ELSE unix_millis(oldest_unread) END AS oldest_unread
FROM sums
LEFT JOIN fates USING (tenant, mailbox)
