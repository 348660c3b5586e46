SELECT * EXCLUDE (date) FROM usage_groups
