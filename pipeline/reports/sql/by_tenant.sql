-- Each tenant's sums over the time of the report, its mailboxes with events, and what is there at the end.
SELECT
    tenant,
    count(DISTINCT mailbox) FILTER (WHERE inside) AS mailboxes,
    coalesce(sum(sent) FILTER (WHERE inside), 0) AS sent,
    coalesce(sum(delayed) FILTER (WHERE inside), 0) AS delayed,
    coalesce(sum(delivered) FILTER (WHERE inside), 0) AS delivered,
    coalesce(sum(leased) FILTER (WHERE inside), 0) AS leased,
    coalesce(sum(acknowledged) FILTER (WHERE inside), 0) AS acknowledged,
    coalesce(sum(expired) FILTER (WHERE inside), 0) AS expired,
    coalesce(sum(deleted) FILTER (WHERE inside), 0) AS deleted,
    coalesce(sum(compacted) FILTER (WHERE inside), 0) AS compacted,
    coalesce(sum(dead) FILTER (WHERE inside), 0) AS dead,
    coalesce(sum(bytes_in) FILTER (WHERE inside), 0) AS bytes_in,
    sum(change) AS depth,
    sum(change_bytes) AS depth_bytes
FROM report_hours
GROUP BY tenant
HAVING count(*) FILTER (WHERE inside) > 0 OR sum(change) > 0
ORDER BY bytes_in DESC, tenant
