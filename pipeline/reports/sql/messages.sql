-- A row for each message. One that came under two names is one message; msg_ids are given again after a restore, to
-- messages that became visible at another time. stored is false where the beginning is lost. Waits are milliseconds,
-- and 0 where the clock was set back; they are null before the message is delivered or acknowledged.
SELECT
    *,
    CASE WHEN delivered_at IS NOT NULL
        THEN greatest(unix_millis(delivered_at) - unix_millis(created_at), 0) END AS delivery_wait,
    CASE WHEN acknowledged_at IS NOT NULL
        THEN greatest(unix_millis(acknowledged_at) - unix_millis(created_at), 0) END AS ack_wait
FROM (
    SELECT
        tenant,
        mailbox,
        msg_id,
        created_at,
        created_hour,
        max(lane) AS lane,
        max(bytes) AS bytes,
        bool_or(event IN ('stored', 'released')) AS stored,
        bool_or(event = 'released') AS delayed,
        count(*) FILTER (WHERE event IN ('delivered', 'leased')) AS deliveries,
        min(happened_at) FILTER (WHERE event IN ('delivered', 'leased')) AS delivered_at,
        min(happened_at) FILTER (WHERE event = 'acknowledged') AS acknowledged_at,
        min(happened_at) FILTER (WHERE event IN ('expired', 'compacted', 'deleted')) AS removed_at,
        min(event) FILTER (WHERE event IN ('expired', 'compacted', 'deleted')) AS removed
    FROM events
    WHERE msg_id >= 0 AND event IN (
        'stored', 'released', 'delivered', 'leased', 'acknowledged', 'expired', 'compacted', 'deleted')
    GROUP BY tenant, mailbox, msg_id, created_at, created_hour
) AS each_message
