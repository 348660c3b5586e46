"""The DIDComm door: wallets and agents, v1 and v2, over HTTP and WebSocket, use the mailboxes as their mediator."""
