"""``mediator conformance``: checks that anybody can run against any mediator or mq9 broker, knowing only its address.

A check is one async function with a decorator that says which sentence of which specification it holds::

    @SUITE.check("didcomm.ping.v1", Level.MUST, "RFC 0048 §Messages", "… must respond with a ping_response …")
    async def ping_is_answered(session: DidcommSession) -> None:
        wallet = await session.wallet(Generation.V1)
        answer = await wallet.ask("trust_ping/1.0/ping", {"response_requested": True})
        expect(answer.name == "ping_response", f"answered with {answer.type}")

It is handed a *session* made for it alone, and passes when it returns. ``expect`` fails it, as does what the client
raises: a refusal, no answer, a malformed one. ``raise NotOfferedError(why)`` where the mediator does not claim to speak
the protocol, and ``raise CannotTryError(why)`` where what the check needs first could not be had. What the session
sends and receives is recorded, and shown where the check fails. The session removes what the check made.

:mod:`conformance.checks` says what a check and a suite are, :mod:`conformance.running` runs them,
:mod:`conformance.report` writes what came of it; each protocol is a package with a session and files of checks.
"""
