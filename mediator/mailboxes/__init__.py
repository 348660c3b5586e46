"""The rules of mailboxes, in pure Python: no I/O, no clock, no database."""
