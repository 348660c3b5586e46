"""A mediator for software agents: durable mailboxes behind several doors."""

__version__ = "0.3.0"
