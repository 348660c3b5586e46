"""The NATS door: any NATS client speaks mq9 to the mailboxes."""
