-- A row for each mailbox with events: when it was created and when it ended, null where the journal does not say.
SELECT
    tenant,
    mailbox,
    min(happened_at) FILTER (WHERE event = 'mailbox created') AS created_at,
    max(happened_at) FILTER (WHERE event IN ('mailbox expired', 'mailbox deleted')) AS ended_at,
    max(event) FILTER (WHERE event IN ('mailbox expired', 'mailbox deleted')) AS ended
FROM events
WHERE event <> 'operated'
GROUP BY tenant, mailbox
