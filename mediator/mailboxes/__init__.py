"""The mailboxes: what they are and every rule they follow; no I/O, no clock, no database."""
