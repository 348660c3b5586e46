"""The gateway: the public NATS port, which adds subscriptions to stored mail to nats-server (E6, N10)."""
