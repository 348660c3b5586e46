"""The tables of the domain in SQL that SQLite and PostgreSQL share."""
