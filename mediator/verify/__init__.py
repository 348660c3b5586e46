"""``mediator verify``: the database, its counters and the journal against each other; docs/howto/verify.md."""
