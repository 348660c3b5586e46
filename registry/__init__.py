"""The registry: agents publish AgentCards, others find them by keyword and by meaning."""
