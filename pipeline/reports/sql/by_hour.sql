-- What happened in each hour, also before the report, and by how much it changed what is there.
SELECT
    unix_millis(hour) AS hour,
    sum(sent) AS sent,
    sum(delayed) AS delayed,
    sum(delivered) AS delivered,
    sum(leased) AS leased,
    sum(acknowledged) AS acknowledged,
    sum(expired) AS expired,
    sum(deleted) AS deleted,
    sum(compacted) AS compacted,
    sum(dead) AS dead,
    sum(bytes_in) AS bytes_in,
    sum(change) AS change,
    sum(change_bytes) AS change_bytes
FROM report_hours
GROUP BY hour
