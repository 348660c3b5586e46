"""The older editions of mq9 over the same mailboxes, one module each; subject and body say which one is spoken (E)."""
