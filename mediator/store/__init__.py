"""How mailboxes are kept: in memory, in SQLite, in PostgreSQL."""
