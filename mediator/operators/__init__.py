"""What operators ask of a running service, and the socket they ask it through."""
