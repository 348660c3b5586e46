"""HTTP: the application, its server and limits, health, tenants, and the guard for outgoing requests."""
