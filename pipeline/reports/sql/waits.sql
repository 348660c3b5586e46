-- A row for each wait of a message in milliseconds: for its first delivery to a group, and for its first ACK.
SELECT tenant, mailbox, msg_id, created_at, created_hour, 'delivery' AS wait, delivery_wait AS milliseconds
FROM messages
WHERE delivery_wait IS NOT NULL
UNION ALL
SELECT tenant, mailbox, msg_id, created_at, created_hour, 'ack' AS wait, ack_wait AS milliseconds
FROM messages
WHERE ack_wait IS NOT NULL
