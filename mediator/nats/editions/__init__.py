"""The older editions of mq9 over the same mailboxes; subject and body tell which one a client speaks (E)."""
