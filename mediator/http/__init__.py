"""The HTTP side of the service: health and metrics."""
