"""Forwards copies of mail out of the service: to JetStream and to webhooks (C7, C8)."""
