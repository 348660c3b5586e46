SELECT * EXCLUDE (date) FROM usage_hourly
