"""Checks of what every agent answers: handshakes, pings, return routes, problem reports, features, preflights."""

import asyncio
import contextlib
from typing import Any

import aiohttp
import orjson

from conformance.checks import CannotTryError, CheckFailedError, Level, NotOfferedError, expect
from conformance.didcomm.session import SUITE, V1, V2, DidcommSession, answers, written
from pickup.client import Holder, NoAnswerError
from pickup.client.handshake import HANDSHAKES
from pickup.client.plaintext import Json
from pickup.rules.records import Generation

MUST, SHOULD, OWN = Level.MUST, Level.SHOULD, Level.OWN
GENERATIONS = (V1, V2)
PING = {V1: "trust_ping/1.0/ping", V2: "trust-ping/2.0/ping"}
PING_SOURCE = {V1: "RFC 0048 §Messages", V2: "DIDComm v2.1 §Trust Ping Protocol 2.0"}
REPORT_SOURCE = {V1: "RFC 0035 §Error While Processing a Received Message", V2: "DIDComm v2.1 §Problem Reports"}
REPORT = "The recipient should send the sender a problem-report message detailing the issue."
ROUTE_SOURCE = {V1: "RFC 0092 §Reference", V2: "return_route extension §Reference"}


# Handshakes.


def _handshake(name: str, source: str, sentence: str) -> None:
    @SUITE.check(f"didcomm.connect.{name.replace('/', '-')}", MUST, source, sentence)
    async def connects(session: DidcommSession) -> None:
        if name not in session.handshakes():
            raise NotOfferedError(f"the invitation does not offer {name}")
        wallet = await session.wallet(V1, handshake=name)
        # The connection is one: the key that was named in the response answers, once the mediator has read `complete`.
        for _ in range(3):
            with contextlib.suppress(NoAnswerError):
                await wallet.ping()
                return
            await asyncio.sleep(0.5)
        raise CheckFailedError("the handshake was made, and the key in the response answers no ping")


_handshake(
    "connections/1.0",
    "RFC 0160 §2. Connection Response",
    "The connection response message is used to complete the connection; its connection attribute is signed by the key "
    "of the invitation.",
)
for _name in ("didexchange/1.0", "didexchange/1.1"):
    assert _name in HANDSHAKES
    _handshake(
        _name,
        "RFC 0023 §2. Exchange Response",
        "The exchange response message is used to complete the exchange; its attachment is signed by the key of the "
        "invitation.",
    )


@SUITE.check(
    "didcomm.connect.reuse-of-an-invitation",
    OWN,
    "docs/protocol.md Connecting",
    "An invitation that is open connects as many wallets as it allows.",
)
async def two_wallets_connect(session: DidcommSession) -> None:
    one, other = await session.wallet(V1), await session.wallet(V1)
    expect(one.link.mine != other.link.mine, "two wallets have one connection")
    await one.ping()
    await other.ping()


# Trust ping.


for _generation in GENERATIONS:

    @SUITE.check(
        f"didcomm.ping.{_generation}",
        MUST,
        PING_SOURCE[_generation],
        "The receiver should reply as quickly as possible with a ping response in the thread of the ping.",
    )
    async def ping_is_answered(session: DidcommSession, generation: Generation = _generation) -> None:
        wallet = await session.wallet(generation)
        ping = written(wallet, PING[generation], {"response_requested": True})
        answer = await session.request(wallet, ping)
        expect(answer is not None and answer.name in ("ping_response", "ping-response"), f"answered with {answer}")
        expect(answer is not None and answers(answer, ping), "the response is not in the thread of the ping")

    @SUITE.check(
        f"didcomm.ping.{_generation}-unanswered",
        MUST if _generation is V1 else SHOULD,
        PING_SOURCE[_generation],
        "If response_requested is false, then the receiver MUST NOT respond."
        if _generation is V1
        else "response_requested: if false, no response is asked for.",
    )
    async def ping_without_response(session: DidcommSession, generation: Generation = _generation) -> None:
        wallet = await session.wallet(generation)
        ping = written(wallet, PING[generation], {"response_requested": False})
        answer = await session.request(wallet, ping)
        expect(answer is None, f"answered with {answer and answer.type}")

    # Return routes.

    @SUITE.check(
        f"didcomm.return-route.{_generation}-all",
        MUST,
        ROUTE_SOURCE[_generation],
        "all: Send all messages for this key over the connection. Required for agents wishing to connect with client "
        "based agents.",
    )
    async def route_all(session: DidcommSession, generation: Generation = _generation) -> None:
        wallet = await session.wallet(generation)
        answer = await session.request(wallet, written(wallet, PING[generation], {"response_requested": True}))
        expect(answer is not None, "the answer did not come over the connection")

    @SUITE.check(
        f"didcomm.return-route.{_generation}-none",
        SHOULD,
        ROUTE_SOURCE[_generation],
        "none: Default. No messages should be returned over this connection.",
    )
    async def route_none(session: DidcommSession, generation: Generation = _generation) -> None:
        wallet = await session.wallet(generation)
        for route in ("none", None):
            ping = written(wallet, PING[generation], {"response_requested": True}, route=route)
            answer = await session.request(wallet, ping)
            expect(answer is None, f"with return route {route}, {answer and answer.type} came over the connection")

    @SUITE.check(
        f"didcomm.return-route.{_generation}-thread",
        OWN,
        "docs/protocol.md D5",
        "The return route thread returns the thread that return_route_thread names, else that of the message.",
    )
    async def route_thread(session: DidcommSession, generation: Generation = _generation) -> None:
        wallet = await session.wallet(generation)
        ping = written(wallet, PING[generation], {"response_requested": True}, route="thread")
        answer = await session.request(wallet, ping)
        expect(answer is not None and answers(answer, ping), f"answered with {answer}")

    # Problem reports.

    @SUITE.check(f"didcomm.problems.{_generation}-unknown-type", SHOULD, REPORT_SOURCE[_generation], REPORT)
    async def unknown_type(session: DidcommSession, generation: Generation = _generation) -> None:
        wallet = await session.wallet(generation)
        await _reported(session, wallet, written(wallet, "no-such-protocol/1.0/no-such-message"))

    @SUITE.check(f"didcomm.problems.{_generation}-unknown-version", SHOULD, REPORT_SOURCE[_generation], REPORT)
    async def unknown_version(session: DidcommSession, generation: Generation = _generation) -> None:
        wallet = await session.wallet(generation)
        type = PING[generation].replace("/1.0/", "/99.0/").replace("/2.0/", "/99.0/")
        await _reported(session, wallet, written(wallet, type, {"response_requested": True}))

    @SUITE.check(f"didcomm.problems.{_generation}-malformed-field", SHOULD, REPORT_SOURCE[_generation], REPORT)
    async def malformed_field(session: DidcommSession, generation: Generation = _generation) -> None:
        mailbox = await session.mailbox(generation)
        type = "coordinate-mediation/1.0/keylist-update"
        if generation is V2:
            type = "coordinate-mediation/3.0/recipient-update"
        await _reported(session, mailbox.holder, written(mailbox.holder, type, {"updates": "none"}))

    @SUITE.check(
        f"didcomm.problems.{_generation}-names-its-thread",
        MUST if _generation is V2 else SHOULD,
        REPORT_SOURCE[_generation],
        "The pthid header MUST be included with problem reports."
        if _generation is V2
        else "The ~thread.pthid (parent thread id) here would be the @id of the triggering message.",
    )
    async def names_its_thread(session: DidcommSession, generation: Generation = _generation) -> None:
        wallet = await session.wallet(generation)
        message = written(wallet, "no-such-protocol/1.0/no-such-message")
        answer = await session.request(wallet, message)
        if answer is None or answer.name != "problem-report":
            raise CannotTryError("it sends no problem reports for an unknown message type")
        expect(
            answer.pthid == (message.get("@id") or message.get("id")), f"pthid is {answer.pthid}, thid is {answer.thid}"
        )

    @SUITE.check(
        f"didcomm.problems.{_generation}-reports-get-none",
        OWN,
        "docs/protocol.md Problem reports",
        "One message gets one report at most, and a problem report never gets one.",
    )
    async def reports_get_none(session: DidcommSession, generation: Generation = _generation) -> None:
        wallet = await session.wallet(generation)
        body: Json = {"code": "e.p.msg", "comment": "?"}
        type = "report-problem/2.0/problem-report"
        if generation is V1:
            body, type = {"description": {"code": "e.p.msg", "en": "?"}}, "report-problem/1.0/problem-report"
        for told in (body, {}):
            answer = await session.request(wallet, written(wallet, type, told))
            expect(answer is None, f"a problem report is answered with {answer and answer.type}")

    # Discover features.

    @SUITE.check(
        f"didcomm.discover.{_generation}",
        SHOULD,
        "RFC 0031 §Messages" if _generation is V1 else "DIDComm v2.1 §Discover Features Protocol 2.0",
        "A disclose message answers a query with the protocols that match.",
    )
    async def discloses(session: DidcommSession, generation: Generation = _generation) -> None:
        wallet = await session.wallet(generation)
        features = await session.features(wallet)
        expect(features, "no protocols were disclosed")
        mediation = [each for each in features or () if each.startswith("coordinate-mediation/")]
        expect(mediation, "no version of coordinate-mediation is disclosed")


async def _reported(session: DidcommSession, wallet: Holder, message: Json) -> None:
    answer = await session.request(wallet, message)
    expect(answer is not None and answer.name == "problem-report", f"answered with {answer and answer.type}")


@SUITE.check(
    "didcomm.problems.v2-comment-is-the-same",
    MUST,
    "DIDComm v2.1 §Problem Reports",
    "The text MUST be statically associated with code, meaning that each time circumstances trigger a problem with the "
    "same code, the value of comment will be the same.",
)
async def comment_is_the_same(session: DidcommSession) -> None:
    wallet = await session.wallet(V2)
    comments: dict[str, Any] = {}
    for type in ("no-such-protocol/1.0/this", "another-protocol/2.0/that"):
        answer = await session.request(wallet, written(wallet, type))
        if answer is None or answer.name != "problem-report":
            raise CannotTryError("it sends no problem reports for an unknown message type")
        code, comment = str(answer.body.get("code")), answer.body.get("comment")
        expect(
            comments.setdefault(code, comment) == comment, f"{code} has the comments {comments[code]!r}, {comment!r}"
        )


@SUITE.check(
    "didcomm.problems.v2-code",
    MUST,
    "DIDComm v2.1 §Problem Codes",
    "code: REQUIRED. Its leftmost component is e or w, then a scope and descriptors follow.",
)
async def code_has_its_form(session: DidcommSession) -> None:
    wallet = await session.wallet(V2)
    answer = await session.request(wallet, written(wallet, "no-such-protocol/1.0/this"))
    if answer is None or answer.name != "problem-report":
        raise CannotTryError("it sends no problem reports for an unknown message type")
    code = str(answer.body.get("code"))
    expect(code.partition(".")[0] in ("e", "w") and code.count(".") >= 2, f"the code is {code}")


@SUITE.check(
    "didcomm.discover.v1-2.0",
    OWN,
    "docs/protocol.md The rest",
    "discover-features/2.0/queries are answered in v1 by disclosures.",
)
async def discover_features_2_of_v1(session: DidcommSession) -> None:
    wallet = await session.wallet(V1)
    queries = [{"feature-type": "protocol", "match": "https://didcomm.org/coordinate-mediation/1.*"}]
    answer = await wallet.ask("discover-features/2.0/queries", {"queries": queries})
    said = orjson.dumps(answer.body.get("disclosures") or []).decode()
    expect("coordinate-mediation/1.0" in said and "trust_ping" not in said, f"the query brought {said[:200]}")


@SUITE.check(
    "didcomm.discover.v1-no-match",
    OWN,
    "docs/protocol.md The rest",
    "What nobody speaks is disclosed as an empty list.",
)
async def nothing_matches(session: DidcommSession) -> None:
    wallet = await session.wallet(V1)
    answer = await wallet.ask("discover-features/1.0/query", {"query": "https://didcomm.org/no-such-protocol/*"})
    expect(answer.body.get("protocols") == [], f"the query brought {answer.body.get('protocols')}")


# For wallets in browsers.


@SUITE.check(
    "didcomm.http.preflight",
    OWN,
    "docs/protocol.md Where",
    "OPTIONS answers the preflights of web pages (didcomm.cors_origins).",
)
async def preflight(session: DidcommSession) -> None:
    generation = V1 if V1 in session.target.invitations else V2
    wallet = await session.wallet(generation)
    asked = {
        "Origin": "https://wallet.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    url = wallet.link.url("http", "https")
    try:
        async with session.http.options(url, headers=asked) as answer:
            headers = {name.lower(): value for name, value in answer.headers.items()}
            session.transcript.came(f"HTTP {answer.status}", headers)
    except aiohttp.ClientError as error:
        raise CannotTryError(f"{url}: {error}") from error
    expect(answer.status < 300, f"a preflight is answered with HTTP {answer.status}")
    expect(headers.get("access-control-allow-origin") in ("*", "https://wallet.example"), "the origin is not allowed")
    expect("POST" in headers.get("access-control-allow-methods", ""), "POST is not allowed")
    expect("content-type" in headers.get("access-control-allow-headers", "").lower(), "Content-Type is not allowed")
