-- A row for each message that a group was given or acknowledged, with the first time of each.
SELECT
    tenant,
    mailbox,
    group_no,
    msg_id,
    created_at,
    created_hour,
    min(happened_at) FILTER (WHERE event IN ('delivered', 'leased')) AS delivered_at,
    min(happened_at) FILTER (WHERE event = 'acknowledged') AS acknowledged_at
FROM events
WHERE group_no > 0 AND event IN ('delivered', 'leased', 'acknowledged')
GROUP BY tenant, mailbox, group_no, msg_id, created_at, created_hour
