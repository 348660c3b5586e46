"""Forwards copies of mail out of the service: to JetStream (C7)."""
