-- The bytes that came in by hour, of the seven tenants with most of them; of all others together the tenant is null.
WITH largest AS (
    SELECT tenant, sum(bytes_in) AS bytes
    FROM report_hours
    WHERE inside
    GROUP BY tenant
    ORDER BY bytes DESC, tenant
    LIMIT 7
)
SELECT largest.tenant AS tenant, unix_millis(hour) AS hour, sum(bytes_in) AS bytes_in
FROM report_hours
LEFT JOIN largest ON largest.tenant = report_hours.tenant
WHERE inside
GROUP BY largest.tenant, hour
