"""Routing 1.0 and 2.0: what is queued for whom, that nothing is answered, and that nothing is told (D4, D9, D12)."""

import base64
from typing import Any

import orjson
import pytest

from mediator.errors import BadRequestError, MediatorError, UnsupportedMessageError
from mediator.mailboxes.bounds import DAY, Bounds
from mediator.operate.diagnosis import Level
from mediator.store.writer import Committed
from pickup import metrics
from pickup.message import DIDCOMM, OLD, read
from pickup.protocols import routing
from pickup.rules.records import Generation, MediationRules
from tests.harness.broker import TENANT
from tests.harness.mediation import key
from tests.harness.protocols import OURS, V1, V2, V2_DID, Door, Json, Wire, base58, envelope, open_door

HELD, OTHER = key(500), key(501)
DID = "did:web:held.example"


def old(to: object, msg: object, prefix: str = DIDCOMM) -> Json:
    return {"@type": f"{prefix}routing/1.0/forward", "@id": "f", "to": to, "msg": msg}


def new(next: object, *data: Json, **body: Any) -> Json:
    attachments = [{"id": str(place), "data": one} for place, one in enumerate(data)]
    return {
        "id": "f",
        "type": f"{DIDCOMM}routing/2.0/forward",
        "body": {"next": next, **body},
        "attachments": attachments,
    }


def bits(payload: bytes, *, url: bool = True) -> Json:
    encode = base64.urlsafe_b64encode if url else base64.b64encode
    return {"base64": encode(payload).decode().rstrip("=" if url else "")}


async def forward(door: Door, plaintext: Json, sender: str | None = None) -> None:
    """Have it forwarded by who seals it, or by nobody; nothing must be answered."""
    wire = Wire()
    generation = V1 if "@type" in plaintext else V2
    await door.receive(plaintext, generation, sender, wire)
    assert wire.frames == []
    assert door.outbox.sent == []


async def refused(door: Door, plaintext: Json) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        await forward(door, plaintext)
    return caught.value


MAIL = orjson.loads(envelope())


@pytest.mark.rule("D4")
@pytest.mark.parametrize("to", [HELD, base58(500), f"{HELD}#z6Mk", [HELD]])
@pytest.mark.parametrize("msg", [MAIL, envelope().decode()], ids=["object", "text"])
@pytest.mark.parametrize("prefix", [DIDCOMM, OLD])
async def test_a_v1_forward_accepts_every_form_of_recipient(door: Door, to: object, msg: object, prefix: str) -> None:
    peer = await door.holder(1, HELD)
    await forward(door, old(to, msg, prefix))
    assert await peer.queued() == [envelope()]
    assert door.meter("mediator_didcomm_forwards_total", outcome="queued") == 1


@pytest.mark.rule("D4")
@pytest.mark.parametrize("next", [DID, f"{DID}#key-1", [DID]])
@pytest.mark.parametrize(
    "data", [{"json": MAIL}, {"json": envelope().decode()}, bits(envelope()), bits(envelope(), url=False)]
)
async def test_a_v2_forward_is_queued_however_it_is_attached(door: Door, next: object, data: Json) -> None:
    peer = await door.holder(1, DID, generation=V2)
    await forward(door, new(next, data))
    assert await peer.queued() == [envelope()]


@pytest.mark.rule("D4", "D9")
@pytest.mark.parametrize("sender", [None, "did:example:anybody"])
async def test_who_forwards_does_not_matter(door: Door, sender: str | None) -> None:
    peer = await door.holder(1, DID, generation=V2)
    await forward(door, new(DID, bits(envelope())), sender)
    assert await peer.queued() == [envelope()]


@pytest.mark.rule("D4")
async def test_bytes_are_queued_verbatim_and_objects_compactly(door: Door) -> None:
    peer = await door.holder(1, HELD, DID)
    spaced = orjson.dumps(MAIL, option=orjson.OPT_INDENT_2) + b"\n"
    await forward(door, new(DID, bits(spaced), {"json": MAIL}))
    await forward(door, old(HELD, spaced.decode()))
    await forward(door, old(HELD, MAIL))
    assert await peer.queued() == [spaced, envelope(), spaced, envelope()]


@pytest.mark.rule("D4")
async def test_each_recipient_gets_each_message_once(door: Door) -> None:
    one, two = await door.holder(1, HELD), await door.holder(2, OTHER)
    await forward(door, old([HELD, OTHER, base58(500)], MAIL))
    assert (len(await one.queued()), len(await two.queued())) == (1, 1)
    await forward(door, new([HELD, OTHER], *[bits(envelope(mark)) for mark in "abc"]))
    assert await one.queued() == await two.queued() == [envelope(), *(envelope(mark) for mark in "abc")]


@pytest.mark.rule("D9")
@pytest.mark.parametrize("to", [key(999), "did:web:nobody.example", "no key", "", "\0", "did:key:z6Mknonsense"])
async def test_a_recipient_that_leads_nowhere_is_counted_and_not_told(door: Door, to: str) -> None:
    if to:
        await forward(door, old(to, MAIL))
        assert door.meter("mediator_didcomm_forwards_total", outcome="unroutable") == 1
    await forward(door, old([to or "x", key(998)], MAIL))
    assert door.meter("mediator_didcomm_forwards_total", outcome="unroutable") == (3 if to else 2)


@pytest.mark.rule("D9")
async def test_a_full_queue_is_counted_and_not_told() -> None:
    async with open_door(MediationRules(max_messages=1)) as door:
        peer = await door.holder(1, HELD)
        for _ in range(2):
            await forward(door, old(HELD, MAIL))
        assert len(await peer.queued()) == 1
        assert door.meter("mediator_didcomm_forwards_total", outcome="full") == 1
        (found,) = await door.context.metrics.dropped.examine()
        assert found.level is Level.PROBLEM
        assert found.text.startswith("Dropped within 10m: 1 message for wallets whose queues are full, the last in ")
        assert (found.link, "…" in found.text, "(tenant default)" in found.text) == ("/queues", True, True)


@pytest.mark.rule("D9", "D12")
@pytest.mark.parametrize("to", [HELD, key(999)], ids=["known", "unknown"])
async def test_too_large_a_message_is_refused_for_any_recipient(to: str) -> None:
    async with open_door(bounds=Bounds(max_message=1000)) as door:
        await door.holder(1, HELD)
        assert (await refused(door, old(to, envelope("x" * 1000).decode()))).code == "message_too_large"


MALFORMED = [
    (old(None, MAIL), "to"),
    (old("", MAIL), "to"),
    (old([], MAIL), "to"),
    (old([HELD, 1], MAIL), "to"),
    (old([HELD] * 65, MAIL), "to"),
    (old("x" * 8193, MAIL), "to"),
    (old({"did": HELD}, MAIL), "to"),
    (old(HELD, None), "msg"),
    (old(HELD, {}), "msg"),
    (old(HELD, [MAIL]), "msg"),
    (old(HELD, "plain"), "msg"),
    (old(HELD, "\ud800"), "msg"),
    (old(HELD, {**MAIL, "iv": "\ud800"}), "msg"),
    (old(HELD, {**MAIL, "iv": 1}), "msg"),
    (old(HELD, {**MAIL, "big": 10**30}), "msg"),
    (old(HELD, {"@type": "https://didcomm.org/basicmessage/1.0/message"}), "msg"),
    (new(None, bits(envelope())), "next"),
    (new([HELD] * 65, bits(envelope())), "next"),
    (new(HELD), "attachments"),
    (new(HELD, *[bits(envelope())] * 65), "attachments"),
    (new(HELD, bits(b"plain")), "attachments"),
    (new(HELD, bits(envelope()), {"json": {}}), "attachments"),
    (new(HELD, {"base64": "%%%"}), "attachments"),
    (new(HELD, {"json": "text"}), "attachments"),
    (new(HELD, {"links": ["http://127.0.0.1/"], "hash": "x"}), "attachments"),
    (new(HELD, {"jws": {}}), "attachments"),
    ({**new(HELD), "attachments": {}}, "attachments"),
    ({**new(HELD), "attachments": [1]}, "attachments"),
    (new(HELD, bits(envelope()), delay_milli="soon"), "delay_milli"),
    (new(HELD, bits(envelope()), delay_milli=True), "delay_milli"),
    (new(HELD, bits(envelope()), delay_milli=8 * DAY), "delay_milli"),
    (new(HELD, bits(envelope()), delay_milli=-8 * DAY), "delay_milli"),
    (new(HELD, bits(envelope()), expires_time="soon"), "expires_time"),
    (new(HELD, bits(envelope()), expires_time=1.5), "expires_time"),
    (new(HELD, bits(envelope()), expires_time=1_767_225_600_000), "expires_time"),
    ({**new(HELD, bits(envelope())), "expires_time": 1_767_225_600_000}, "expires_time"),
]


@pytest.mark.rule("D12")
@pytest.mark.parametrize(("plaintext", "field"), MALFORMED)
async def test_a_malformed_forward_names_the_field_and_queues_nothing(door: Door, plaintext: Json, field: str) -> None:
    peer = await door.holder(1, HELD)
    assert (await refused(door, plaintext)).field == field
    assert await peer.queued() == []


@pytest.mark.rule("D12")
@pytest.mark.parametrize(("plaintext", "field"), MALFORMED)
async def test_a_known_sender_gets_a_report_of_a_bad_forward(door: Door, plaintext: Json, field: str) -> None:
    peer, wire = await door.holder(1, HELD), Wire()
    plaintext = {**plaintext, "~transport": {"return_route": "all"}, "return_route": "all"}
    await door.receive(plaintext, V1 if "@type" in plaintext else V2, peer.sender, wire)
    (answer,) = wire.answers
    assert answer.problem[1].startswith(f"{field}: ")
    assert await peer.queued() == []


@pytest.mark.rule("D12")
@pytest.mark.parametrize(("generation", "version"), [(V1, "2.0"), (V2, "1.0"), (V1, "3.0"), (V2, "3.0")])
async def test_a_forward_of_the_other_generation_is_not_supported(
    door: Door, generation: Generation, version: str
) -> None:
    plaintext = old(HELD, MAIL) if generation is V1 else new(HELD, bits(envelope()))
    plaintext["@type" if generation is V1 else "type"] = f"{DIDCOMM}routing/{version}/forward"
    with pytest.raises(UnsupportedMessageError):
        await door.receive(plaintext, generation, None, Wire())


@pytest.mark.rule("D9", "D10")
async def test_a_forward_for_ourselves_is_not_opened(door: Door) -> None:
    """It is queued if a key of ours is somebody's, which nobody has, and never handled in turn."""
    peer = await door.holder(1, HELD)
    inner = new(HELD, bits(envelope()))
    sealed = {**MAIL, "plaintext": inner, "generation": "v2", "recipient": f"{V2_DID}#key-1", "sender": None}
    for to in (OURS, V2_DID):
        await forward(door, new(to, {"json": sealed}))
    assert await peer.queued() == []
    await forward(door, new(HELD, {"json": sealed}))
    assert [orjson.loads(one) for one in await peer.queued()] == [sealed]


@pytest.mark.rule("D4")
@pytest.mark.parametrize("where", ["header", "body", "both"])
async def test_expires_time_ends_a_message(door: Door, where: str) -> None:
    """The earlier of header and body holds."""
    peer = await door.holder(1, DID, generation=V2)
    seconds = door.now // 1000
    plaintext = new(DID, bits(envelope()))
    if where != "header":
        plaintext["body"]["expires_time"] = seconds + 60
    if where != "body":
        plaintext["expires_time"] = seconds + (60 if where == "header" else 120)
    await forward(door, plaintext)
    door.now += 59_999
    assert len((await peer.ask("messagepickup/3.0/delivery-request", {"limit": 1})).attached) == 1
    door.now += 1
    assert (await peer.ask("messagepickup/3.0/delivery-request", {"limit": 1})).name == "status"


@pytest.mark.rule("D4", "D12")
async def test_the_clock_of_a_sender_may_be_five_minutes_late(door: Door) -> None:
    peer = await door.holder(1, DID, generation=V2)
    await forward(door, new(DID, bits(envelope()), expires_time=door.now // 1000 - 299))
    assert len(await peer.queued()) == 1
    door.now += 1_000
    assert (await peer.ask("messagepickup/3.0/status-request")).body["message_count"] == 0


@pytest.mark.rule("D4", "D9")
async def test_what_expired_before_it_came_is_not_queued(door: Door) -> None:
    peer = await door.holder(1, DID, generation=V2)
    await forward(door, new(DID, bits(envelope()), expires_time=door.now // 1000 - 300))
    assert await peer.queued() == []
    assert door.meter("mediator_didcomm_forwards_total", outcome="unroutable") == 1


@pytest.mark.rule("D4")
@pytest.mark.parametrize(("delay", "least", "most"), [(60_000, 60_000, 60_000), (-60_000, 0, 60_000), (0, 0, 0)])
async def test_delay_milli_delays_and_a_negative_one_at_random(door: Door, delay: int, least: int, most: int) -> None:
    peer = await door.holder(1, DID, generation=V2)
    sent_at = door.now
    marks = 1 if delay >= 0 else 50
    for _ in range(marks):
        await forward(door, new(DID, bits(envelope()), delay_milli=delay))
    with door.store.reading() as tx:
        due = [one.due_at - sent_at for one in tx.delays.due(sent_at + DAY, 1000, 1 << 20)]
    assert len(due) + len(await peer.queued()) == marks
    assert all(least <= one <= most for one in due)
    if delay < 0:
        assert len(set(due)) > 10


@pytest.mark.rule("D9")
async def test_please_ack_and_return_route_on_a_forward_are_ignored(door: Door) -> None:
    """`please_ack` SHOULD NOT be on forwards and MUST NOT be honoured; return_route is not allowed on them."""
    peer = await door.holder(1, DID, generation=V2)
    asking = {**new(DID, bits(envelope())), "please_ack": ["f"], "return_route": "all"}
    await forward(door, asking, peer.sender)
    decorated = {**old(DID, MAIL), "~please_ack": {"on": ["RECEIPT"]}, "~transport": {"return_route": "all"}}
    await forward(door, decorated, key(1))
    assert len(await peer.queued()) == 2


@pytest.mark.rule("D9")
async def test_known_and_unknown_recipients_both_wait_for_a_commit(door: Door) -> None:
    """The answer takes equally long."""
    await door.holder(1, HELD)
    commits: list[Committed] = []
    door.broker.listen(commits.append)
    for to in (HELD, key(999), "no key"):
        before = len(commits)
        outcome = await routing.forward(door.context, TENANT, read(old(to, MAIL), V1))
        assert outcome.queued == (1 if to == HELD else 0)
        assert len(commits) == before + 1


@pytest.mark.rule("D12")
async def test_a_store_that_is_away_is_told_to_the_transport(door: Door) -> None:
    await door.broker.close()
    with pytest.raises(MediatorError):
        await forward(door, old(HELD, MAIL))


async def test_dropped_mail_is_told_for_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now)
    dropped = metrics.DroppedMail()
    assert await dropped.examine() == []
    for number in range(2000):
        dropped.record(1, [("acme", f"wallet{number}")])
    (found,) = await dropped.examine()
    assert "1,000 messages" in found.text
    assert found.text.count("tenant acme") == metrics.NAMED
    now += metrics.RECENT_SECONDS + 1
    assert await dropped.examine() == []
