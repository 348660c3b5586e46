"""AgentCards: read, checked against A2A, fetched and imported."""
