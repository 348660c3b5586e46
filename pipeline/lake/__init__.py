"""The lake: Delta tables that any tool can read."""
