"""The doors of the registry: NATS verbs, REST, and the OpenAPI document."""
