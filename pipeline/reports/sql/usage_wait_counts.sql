-- How many of the messages that became visible in an hour waited so many milliseconds, rounded down to two digits: all
-- that percentiles and shares over any time need.
SELECT
    tenant,
    mailbox,
    created_hour AS hour,
    wait,
    milliseconds - milliseconds
        % CAST(pow(10, greatest(length(CAST(milliseconds AS STRING)) - 2, 0)) AS BIGINT) AS at_least,
    count(*) AS messages,
    CAST(created_hour AS DATE) AS date
FROM waits
GROUP BY tenant, mailbox, created_hour, wait, at_least
