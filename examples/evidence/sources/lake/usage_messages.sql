SELECT * EXCLUDE (date) FROM usage_messages
