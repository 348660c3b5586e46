"""The MCP server: assistants use mailboxes and the registry as tools, over stdio or HTTP. It is a client over NATS."""
