"""Checks of mq9 brokers by a stock NATS client; :data:`SUITE` holds them all, the current edition first."""

from conformance.mq9 import messages, groups, requests, agents, editions, subscriptions  # noqa: I001 - in this order
from conformance.mq9.session import SUITE, BrokerSession

__all__ = ["SUITE", "BrokerSession", "agents", "editions", "groups", "messages", "requests", "subscriptions"]
