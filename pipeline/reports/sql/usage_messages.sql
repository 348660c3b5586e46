-- What has become of the messages that became visible in an hour; each counts once, whenever it happened.
SELECT
    tenant,
    mailbox,
    created_hour AS hour,
    count(*) AS came,
    count(delivered_at) AS delivered,
    count(acknowledged_at) AS acknowledged,
    count(*) FILTER (WHERE removed = 'expired') AS expired,
    count(*) FILTER (WHERE removed = 'expired' AND delivered_at IS NULL) AS expired_unread,
    count(*) FILTER (WHERE delivered_at IS NULL AND acknowledged_at IS NULL AND removed_at IS NULL) AS unread,
    min(created_at) FILTER (WHERE delivered_at IS NULL AND acknowledged_at IS NULL AND removed_at IS NULL) AS oldest_unread,
    CAST(created_hour AS DATE) AS date
FROM messages
WHERE stored
GROUP BY tenant, mailbox, created_hour
