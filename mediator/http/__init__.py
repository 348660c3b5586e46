"""HTTP: the application and routes beside it, server and limits, health, who a caller is, and outgoing requests."""
