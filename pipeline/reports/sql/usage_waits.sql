-- Exact percentiles of the waits of each hour's messages, for each tenant, and with tenant null for all tenants.
SELECT
    tenant,
    created_hour AS hour,
    percentile_cont(0.5) WITHIN GROUP (ORDER BY delivery_wait) AS first_p50,
    percentile_cont(0.95) WITHIN GROUP (ORDER BY delivery_wait) AS first_p95,
    percentile_cont(0.99) WITHIN GROUP (ORDER BY delivery_wait) AS first_p99,
    percentile_cont(0.5) WITHIN GROUP (ORDER BY ack_wait) AS ack_p50,
    percentile_cont(0.95) WITHIN GROUP (ORDER BY ack_wait) AS ack_p95,
    percentile_cont(0.99) WITHIN GROUP (ORDER BY ack_wait) AS ack_p99,
    count(delivery_wait) AS first_count,
    count(ack_wait) AS ack_count,
    CAST(created_hour AS DATE) AS date
FROM messages
WHERE delivery_wait IS NOT NULL OR ack_wait IS NOT NULL
GROUP BY GROUPING SETS ((tenant, created_hour), (created_hour))
