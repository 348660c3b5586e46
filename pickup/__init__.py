"""DIDComm: wallets and agents (v1 and v2) use the service as their mediator, over HTTP and WebSocket.

How a message travels: :mod:`.transports` (HTTP POST) or :mod:`.websocket` reads an envelope, :mod:`.receiver` has it
opened by :mod:`.envelope` and finds the sender's connection, :mod:`.dispatcher` gives the plaintext to the handler of
its protocol in :mod:`.protocols`. By :mod:`.broker` the handler runs a rule of :mod:`.rules` in one transaction over
its tables. The receiver seals the reply and sends it back on the same channel, or through :mod:`.outbound` to the
sender's endpoint.

Beside that way: :mod:`.live_sessions` pushes mail in live mode, :mod:`.endpoint_relay` sends mail on to holders with an
endpoint, :mod:`.protocols.push_notification` wakes phones, :mod:`.dids` resolves DIDs and keeps our own keys,
:mod:`.operate` answers operators, :mod:`.client` is a wallet for scripts. A *holder* is the recipient of mediation
(RFC 0211); *v1* is DIDComm as in Aries (RFC 0019), *v2* that of didcomm.org.
"""
