-- A row for each mailbox and hour in which something happened. Events count in the hour in which they happened, or in
-- which their message became visible if a clock set back puts that later, since depths must not be negative; waits
-- count in the hour in which the message became visible. What expired before it was released never was there.
WITH flows AS (
    SELECT
        tenant, mailbox, created_hour AS hour, msg_id, bytes,
        CASE WHEN delayed THEN 'released' ELSE 'stored' END AS event
    FROM messages
    WHERE stored
    UNION ALL
    SELECT tenant, mailbox, greatest(happened_hour, created_hour) AS hour, msg_id, bytes, event
    FROM events
    WHERE event NOT IN ('stored', 'released', 'operated')
),
counts AS (
    SELECT
        tenant,
        mailbox,
        hour,
        count(*) FILTER (WHERE event IN ('stored', 'delayed')) AS sent,
        count(*) FILTER (WHERE event = 'delayed') AS delayed,
        count(*) FILTER (WHERE event = 'delivered') AS delivered,
        count(*) FILTER (WHERE event = 'leased') AS leased,
        count(*) FILTER (WHERE event = 'acknowledged') AS acknowledged,
        count(*) FILTER (WHERE event = 'expired') AS expired,
        count(*) FILTER (WHERE event = 'deleted') AS deleted,
        count(*) FILTER (WHERE event = 'compacted') AS compacted,
        count(*) FILTER (WHERE event = 'dead') AS dead,
        sum(bytes) FILTER (WHERE event IN ('stored', 'delayed')) AS bytes_in,
        count(*) FILTER (WHERE event IN ('stored', 'released')) AS came,
        sum(bytes) FILTER (WHERE event IN ('stored', 'released')) AS came_bytes,
        count(*) FILTER (WHERE event IN ('expired', 'compacted', 'deleted') AND msg_id >= 0) AS went,
        sum(bytes) FILTER (WHERE event IN ('expired', 'compacted', 'deleted') AND msg_id >= 0) AS went_bytes,
        bool_or(event IN ('mailbox expired', 'mailbox deleted')) AS ended
    FROM flows
    GROUP BY tenant, mailbox, hour
),
percentiles AS (
    SELECT
        tenant,
        mailbox,
        created_hour AS hour,
        percentile_cont(0.5) WITHIN GROUP (ORDER BY delivery_wait) AS first_p50,
        percentile_cont(0.95) WITHIN GROUP (ORDER BY delivery_wait) AS first_p95,
        percentile_cont(0.99) WITHIN GROUP (ORDER BY delivery_wait) AS first_p99,
        percentile_cont(0.5) WITHIN GROUP (ORDER BY ack_wait) AS ack_p50,
        percentile_cont(0.95) WITHIN GROUP (ORDER BY ack_wait) AS ack_p95,
        percentile_cont(0.99) WITHIN GROUP (ORDER BY ack_wait) AS ack_p99,
        count(delivery_wait) AS first_count,
        count(ack_wait) AS ack_count
    FROM messages
    WHERE delivery_wait IS NOT NULL OR ack_wait IS NOT NULL
    GROUP BY tenant, mailbox, created_hour
)
SELECT
    tenant,
    mailbox,
    hour,
    coalesce(sent, 0) AS sent,
    coalesce(delayed, 0) AS delayed,
    coalesce(delivered, 0) AS delivered,
    coalesce(leased, 0) AS leased,
    coalesce(acknowledged, 0) AS acknowledged,
    coalesce(expired, 0) AS expired,
    coalesce(deleted, 0) AS deleted,
    coalesce(compacted, 0) AS compacted,
    coalesce(dead, 0) AS dead,
    coalesce(bytes_in, 0) AS bytes_in,
    coalesce(came, 0) AS came,
    coalesce(came_bytes, 0) AS came_bytes,
    coalesce(went, 0) AS went,
    coalesce(went_bytes, 0) AS went_bytes,
    coalesce(ended, false) AS ended,
    first_p50, first_p95, first_p99, ack_p50, ack_p95, ack_p99,
    coalesce(first_count, 0) AS first_count,
    coalesce(ack_count, 0) AS ack_count,
    CAST(hour AS DATE) AS date
FROM counts
FULL JOIN percentiles USING (tenant, mailbox, hour)
