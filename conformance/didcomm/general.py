"""Checks of what every agent answers: trust ping, discover features, and the handshakes by which wallets connect."""

from conformance.checks import Level, NotOfferedError, expect
from conformance.didcomm.session import SUITE, V1, V2, DidcommSession
from pickup.client.handshake import HANDSHAKES

MUST, SHOULD, OWN = Level.MUST, Level.SHOULD, Level.OWN
_SOURCES = {
    "connections/1.0": (
        "RFC 0160 §2. Connection Response",
        "The connection response message is used to complete the connection.",
    ),
    "didexchange/1.0": (
        "RFC 0023 §2. Exchange Response",
        "The exchange response message is used to complete the exchange.",
    ),
    "didexchange/1.1": (
        "RFC 0023 §2. Exchange Response",
        "The exchange response message is used to complete the exchange.",
    ),
}


def _handshake(name: str) -> None:
    source, sentence = _SOURCES[name]

    @SUITE.check(f"didcomm.connect.{name.replace('/', '-')}", MUST, source, sentence)
    async def connects(session: DidcommSession) -> None:
        session.invited(V1)
        if name not in session.handshakes():
            raise NotOfferedError(f"the invitation does not offer {name}")
        await session.wallet(V1, handshake=name)


for _name in reversed(HANDSHAKES):
    _handshake(_name)


@SUITE.check(
    "didcomm.ping.v1",
    MUST,
    "RFC 0048 §Messages",
    "If response_requested is true the receiver must respond with a ping_response in the thread of the ping.",
)
async def ping_of_v1_is_answered(session: DidcommSession) -> None:
    wallet = await session.wallet(V1)
    answer = await wallet.ask("trust_ping/1.0/ping", {"response_requested": True})
    expect(answer.name in ("ping_response", "ping-response"), f"answered with {answer.type}")


@SUITE.check(
    "didcomm.ping.v2",
    MUST,
    "DIDComm v2.1 §Trust Ping Protocol 2.0",
    "With response_requested true, the receiver answers with a ping-response in the thread of the ping.",
)
async def ping_of_v2_is_answered(session: DidcommSession) -> None:
    wallet = await session.wallet(V2)
    answer = await wallet.ask("trust-ping/2.0/ping", {"response_requested": True})
    expect(answer.name == "ping-response", f"answered with {answer.type}")


@SUITE.check(
    "didcomm.discover.v1",
    SHOULD,
    "RFC 0031 §Messages",
    "A disclose message answers a query with the protocols that match.",
)
async def discover_features_of_v1_lists_mediation(session: DidcommSession) -> None:
    wallet = await session.wallet(V1)
    features = await session.features(wallet)
    expect(features, "no protocols were disclosed")
    expect("coordinate-mediation/1.0" in (features or ()), "coordinate-mediation/1.0 is not disclosed")


@SUITE.check(
    "didcomm.discover.v2",
    SHOULD,
    "DIDComm v2.1 §Discover Features Protocol 2.0",
    "A disclose message answers queries with the features that match.",
)
async def discover_features_of_v2_lists_mediation(session: DidcommSession) -> None:
    wallet = await session.wallet(V2)
    features = await session.features(wallet)
    expect(features, "no protocols were disclosed")
    mediation = [each for each in features or () if each.startswith("coordinate-mediation/")]
    expect(mediation, "no version of coordinate-mediation is disclosed")
