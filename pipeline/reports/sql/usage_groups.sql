-- How many of the messages that became visible in an hour each group was given and acknowledged; each counts once.
SELECT
    tenant,
    mailbox,
    group_no,
    created_hour AS hour,
    count(delivered_at) AS given,
    count(acknowledged_at) AS acknowledged,
    CAST(created_hour AS DATE) AS date
FROM groups
GROUP BY tenant, mailbox, group_no, created_hour
