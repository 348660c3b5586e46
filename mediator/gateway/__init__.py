"""The gateway: the public NATS port, before nats-server, where subscriptions to stored mail are made private (E6)."""
