"""Backups and checks of the database that operators start in a running service: each a child process, one at a time."""
