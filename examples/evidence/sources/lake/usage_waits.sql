SELECT * EXCLUDE (date) FROM usage_waits
