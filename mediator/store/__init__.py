"""The store: unit of work, group commit, SQLite and PostgreSQL."""
