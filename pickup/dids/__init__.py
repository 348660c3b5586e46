"""DIDs: documents of others resolved and cached, and the mediator's own with their secrets."""
