-- Percentiles of the waits of the messages that became visible in each step (an hour, day or week), and how many of
-- them waited less than the goal.
WITH counts AS (
    SELECT
        unix_millis(hour) - (unix_millis(hour) + step_shift) % step_length AS step,
        wait,
        at_least,
        sum(messages) AS messages
    FROM usage_wait_counts
    JOIN asked ON asked.tenant IS NULL OR asked.tenant = usage_wait_counts.tenant
    WHERE hour >= begin_at AND hour < end_at
    GROUP BY unix_millis(hour) - (unix_millis(hour) + step_shift) % step_length, wait, at_least
),
running AS (
    SELECT
        *,
        sum(messages) OVER (PARTITION BY step, wait ORDER BY at_least) AS so_far,
        sum(messages) OVER (PARTITION BY step, wait) AS total
    FROM counts
)
SELECT
    step,
    wait,
    max(total) AS messages,
    min(at_least) FILTER (WHERE so_far >= 0.5 * total) AS p50,
    min(at_least) FILTER (WHERE so_far >= 0.95 * total) AS p95,
    min(at_least) FILTER (WHERE so_far >= 0.99 * total) AS p99,
    coalesce(sum(messages) FILTER (WHERE at_least < goal), 0) AS within
FROM running
CROSS JOIN asked
GROUP BY step, wait
