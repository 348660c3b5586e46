-- A row for each event of the journal, with names in place of codes, and the hours of its times.
SELECT
    tenant,
    mailbox,
    msg_id,
    event_types.name AS event,
    lanes.name AS lane,
    bytes,
    group_no,
    happened_at,
    timestamp_millis(unix_millis(happened_at) - unix_millis(happened_at) % 3600000) AS happened_hour,
    created_at,
    timestamp_millis(unix_millis(created_at) - unix_millis(created_at) % 3600000) AS created_hour
FROM journal_events
JOIN event_types ON event_types.code = journal_events.what
LEFT JOIN lanes ON lanes.code = journal_events.lane
