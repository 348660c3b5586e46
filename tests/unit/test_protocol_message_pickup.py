"""Message pickup 2.0, 3.0 and 4.0: one test for each MUST of their texts, and what this service adds (D1–D3, D6)."""

import asyncio
import re
from datetime import UTC, datetime

import pytest

from pickup.message import OLD
from pickup.rules.records import Generation
from tests.harness.mediation import key
from tests.harness.protocols import (
    LIVE_LEASE,
    SECONDS,
    V1,
    V2,
    Answer,
    Door,
    Json,
    Peer,
    Wire,
    base58,
    envelope,
)

HELD, OTHER = key(500), key(501)
SECOND = 1000


class Version:
    """One version in one generation, and the names it has for things."""

    def __init__(self, number: str, generation: Generation) -> None:
        self.number, self.generation = number, generation
        self.protocol = f"{'message-pickup' if number == '4.0' else 'messagepickup'}/{number}"
        self.limit = "message_count_limit" if number == "4.0" else "limit"
        self.recipient = "recipient_key" if number == "2.0" else "recipient_did"

    async def status(self, peer: Peer, recipient: str | None = None, wire: Wire | None = None) -> Answer:
        body = {} if recipient is None else {self.recipient: recipient}
        return await peer.ask(f"{self.protocol}/status-request", body, wire=wire)

    async def fetch(
        self, peer: Peer, limit: object = 10, recipient: str | None = None, wire: Wire | None = None
    ) -> Answer:
        body: Json = {self.limit: limit}
        if recipient is not None:
            body[self.recipient] = recipient
        return await peer.ask(f"{self.protocol}/delivery-request", body, wire=wire)

    async def received(self, peer: Peer, *ids: str, wire: Wire | None = None) -> Answer:
        return await peer.ask(f"{self.protocol}/messages-received", {"message_id_list": list(ids)}, wire=wire)

    async def live(self, peer: Peer, wire: Wire, on: object = True) -> Answer:
        return await peer.ask(f"{self.protocol}/live-delivery-change", {"live_delivery": on}, wire=wire)


TWO, THREE = Version("2.0", V1), Version("3.0", V2)
FOUR_V1, FOUR_V2 = Version("4.0", V1), Version("4.0", V2)
ALL = [TWO, THREE, FOUR_V1, FOUR_V2]
each = pytest.mark.parametrize("version", ALL, ids=lambda one: f"{one.number}-{one.generation.value}")


async def holder(door: Door, version: Version, *recipients: str, number: int = 1) -> Peer:
    return await door.holder(number, *(recipients or (HELD, OTHER)), generation=version.generation)


# Status.


@each
@pytest.mark.rule("D1")
async def test_message_count_is_required(door: Door, version: Version) -> None:
    """`message_count` is the only REQUIRED attribute of a status."""
    peer = await holder(door, version)
    await door.forward(HELD, envelope("a"), envelope("b"))
    answer = await version.status(peer)
    assert answer.name == "status"
    assert answer.body["message_count"] == 2
    assert answer.body["total_bytes"] == 2 * len(envelope("a"))
    assert answer.thid == peer.last


@each
@pytest.mark.rule("D3")
async def test_a_status_for_one_recipient_is_only_of_that_recipient(door: Door, version: Version) -> None:
    """When specified, the Mediator MUST only return status related to that recipient."""
    peer = await holder(door, version)
    await door.forward([HELD, HELD, OTHER])
    assert (await version.status(peer, HELD)).body["message_count"] == 2
    assert (await version.status(peer, OTHER)).body["message_count"] == 1
    assert (await version.status(peer, key(999))).body["message_count"] == 0


@each
@pytest.mark.rule("D3")
@pytest.mark.parametrize("written", [HELD, f"{HELD}#z6Mk", base58(500), "no key at all", "nul\0"])
async def test_the_recipient_asked_for_is_echoed_as_it_was_written(door: Door, version: Version, written: str) -> None:
    """If a recipient was specified, the matching value MUST be specified in the status message."""
    peer = await holder(door, version)
    await door.forward(HELD)
    answer = await version.status(peer, written)
    assert answer.body[version.recipient] == written
    assert answer.body["message_count"] == (0 if written in ("no key at all", "nul\0") else 1)
    assert version.recipient not in (await version.status(peer)).body


@each
@pytest.mark.rule("D2")
async def test_a_status_is_never_queued_nor_sent_to_who_is_not_there(door: Door, version: Version) -> None:
    """A status message MUST NOT be put on the pending message queue and MUST only be sent when the Recipient is
    actively connected."""
    peer = await holder(door, version)
    door.phonebook.endpoints[peer.sender] = "https://peer.example"
    assert await peer.tell(f"{version.protocol}/status-request", wire=Wire(alive=False)) == []
    assert await peer.queued() == []
    assert door.outbox.sent == []


@pytest.mark.rule("D1")
async def test_times_are_text_seconds_or_milliseconds_by_version(door: Door) -> None:
    """`newest_received_time` and `oldest_received_time` are expressed in UTC Epoch Seconds (3.0); 2.0 shows text."""
    v1, v2 = await door.holder(1, HELD), await door.holder(2, "did:example:held", generation=V2)
    first = door.now = door.now + 7
    await door.forward([HELD, "did:example:held"])
    newest = door.now = first + 5 * SECOND
    await door.forward([HELD, "did:example:held"])
    door.now = first + 61 * SECOND + 999

    two, three, four = (await TWO.status(v1)).body, (await THREE.status(v2)).body, (await FOUR_V2.status(v2)).body
    for field, at in (("oldest_received_time", first), ("newest_received_time", newest)):
        assert two[field] == datetime.fromtimestamp(at // 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        assert three[field] == at // 1000
        assert four[field] == at
    assert two["longest_waited_seconds"] == three["longest_waited_seconds"] == 61
    assert "longest_waited_seconds" not in four


@each
@pytest.mark.rule("D1")
async def test_an_empty_queue_has_no_times(door: Door, version: Version) -> None:
    body = (await version.status(await holder(door, version))).body
    assert body["message_count"] == body["total_bytes"] == body.get("longest_waited_seconds", 0) == 0
    assert "oldest_received_time" not in body
    assert "newest_received_time" not in body


# Delivery.


@each
@pytest.mark.rule("D1")
async def test_up_to_limit_messages_are_delivered_the_oldest_first(door: Door, version: Version) -> None:
    """The Mediator SHOULD deliver up to the limit indicated."""
    peer = await holder(door, version)
    await door.forward(HELD, *(envelope(mark) for mark in "abc"))
    answer = await version.fetch(peer, 2)
    assert answer.name == "delivery"
    assert answer.marks == ["a", "b"]
    assert answer.thid == peer.last
    assert version.recipient not in answer.body


@each
@pytest.mark.rule("D2", "D12")
@pytest.mark.parametrize("limit", [None, 0, -1, True, 1.5, "0", "1.5", "ten", [10]])
async def test_limit_is_required(door: Door, version: Version, limit: object) -> None:
    """`limit` is a REQUIRED attribute."""
    peer = await holder(door, version)
    await door.forward(HELD)
    code, text = (await version.fetch(peer, limit)).problem
    assert code == "e.p.msg"
    assert text.startswith(f"{version.limit}: ")
    assert len(await peer.queued()) == 1


@each
@pytest.mark.rule("D6")
async def test_live_delivery_may_be_text(door: Door, version: Version) -> None:
    peer, wire = await holder(door, version), Wire(persistent=True)
    for written, on in (("true", True), ("false", False)):
        assert (await version.live(peer, wire, written)).body["live_delivery"] is on
    assert (await version.live(peer, wire, "yes")).problem[1] == "live_delivery: expected true or false"


@each
@pytest.mark.rule("D2", "N4")
@pytest.mark.parametrize("limit", ["1", 1.0, "1.0"])
async def test_a_limit_may_be_text_or_a_whole_float(door: Door, version: Version, limit: object) -> None:
    """Identus for iOS writes text, and gives up at a problem report."""
    peer = await holder(door, version)
    await door.forward(HELD, envelope("a"), envelope("b"))
    assert len((await version.fetch(peer, limit)).attached) == 1


@each
@pytest.mark.rule("D2")
async def test_a_limit_above_the_highest_is_clamped(door: Door, version: Version) -> None:
    peer = await holder(door, version)
    for _ in range(16):
        await door.forward(HELD, *[envelope("")] * 64)
    assert len((await version.fetch(peer, 10**30)).attached) == 1000


@each
@pytest.mark.rule("D3")
async def test_a_delivery_for_one_recipient_has_only_its_messages(door: Door, version: Version) -> None:
    """When specified, the Mediator MUST only return messages sent to that recipient."""
    peer = await holder(door, version)
    await door.forward(OTHER, envelope("other"))
    await door.forward(HELD, envelope("held"))
    answer = await version.fetch(peer, recipient=base58(500))
    assert answer.marks == ["held"]
    assert answer.body[version.recipient] == base58(500)


@pytest.mark.parametrize("version", [TWO, THREE], ids=lambda one: one.number)
@pytest.mark.rule("D2")
async def test_an_empty_queue_answers_status(door: Door, version: Version) -> None:
    """If no messages are available to be sent, a `status` message MUST be sent immediately (2.0, 3.0)."""
    peer = await holder(door, version)
    await door.forward(OTHER)
    answer = await version.fetch(peer, recipient=HELD)
    assert answer.name == "status"
    assert answer.body["message_count"] == 0
    assert answer.body[version.recipient] == HELD
    assert answer.thid == peer.last


@pytest.mark.parametrize("version", [FOUR_V1, FOUR_V2], ids=lambda one: one.generation.value)
@pytest.mark.rule("D2")
async def test_an_empty_queue_answers_an_empty_delivery_in_4_0(door: Door, version: Version) -> None:
    """If no messages are available, an empty `delivery` is sent (4.0)."""
    answer = await version.fetch(await holder(door, version))
    assert answer.name == "delivery"
    assert answer.raw["~attach" if version.generation is V1 else "attachments"] == []


@pytest.mark.parametrize("version", [FOUR_V1, FOUR_V2], ids=lambda one: one.generation.value)
@pytest.mark.rule("D2")
@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"limit": 1}, 1),
        ({"message_count_limit": 2, "limit": 1}, 2),
        ({"message_count_limit": None, "limit": 1}, 1),
        ({"limit": 0}, "limit: "),
        ({"message_count_limit": 0, "limit": 1}, "message_count_limit: "),
    ],
)
async def test_4_0_reads_the_limit_under_both_names(door: Door, version: Version, body: Json, count: int | str) -> None:
    peer = await holder(door, version)
    await door.forward(HELD, *(envelope(mark) for mark in "abc"))
    answer = await peer.ask(f"{version.protocol}/delivery-request", body)
    if isinstance(count, str):
        assert answer.problem[1].startswith(count)
    else:
        assert len(answer.attached) == count


@pytest.mark.parametrize("version", [TWO, FOUR_V1], ids=lambda one: one.number)
@pytest.mark.rule("D2")
async def test_status_and_delivery_ask_for_the_return_route_too(door: Door, version: Version) -> None:
    """Each message sent MUST use the `~transport` decorator with return route `all`."""
    peer, wire = await holder(door, version), Wire(persistent=True)
    await version.live(peer, wire)
    await door.forward(HELD)
    await wire.count(2)
    await door.sessions.left(wire)
    answers = [*wire.answers, await version.fetch(peer), await version.received(peer)]
    assert [answer.name for answer in answers] == ["status", "delivery", "delivery", "status"]
    assert all(answer.raw["~transport"] == {"return_route": "all"} for answer in answers)


@each
@pytest.mark.rule("D2")
async def test_delivered_messages_stay_until_they_are_acknowledged(door: Door, version: Version) -> None:
    """Delivered messages MUST NOT be deleted until delivery is acknowledged by a `messages-received` message."""
    peer = await holder(door, version)
    await door.forward(HELD, envelope("a"), envelope("b"))
    first = await version.fetch(peer)
    again = await version.fetch(peer)
    assert again.attached == first.attached
    assert (await version.status(peer)).body["message_count"] == 2


@each
@pytest.mark.rule("D3")
async def test_attachments_are_the_envelopes_with_own_ids(door: Door, version: Version) -> None:
    """The ONLY valid type of attachment for this message is a DIDComm Message in encrypted form."""
    one, two = await holder(door, version, HELD), await holder(door, version, OTHER, number=2)
    sent = b'{ "protected" : "e30", "recipients":[{"header":{"kid":"k"}}],"iv":"","ciphertext":"\\u00e9","tag":""}\n'
    await door.forward([HELD, OTHER], sent)
    first, second = (await version.fetch(one)).attached, (await version.fetch(two)).attached
    assert list(first.values()) == list(second.values()) == [sent]
    assert set(first).isdisjoint(second)


@each
@pytest.mark.rule("D1")
async def test_a_delivery_stops_at_its_budget_but_holds_at_least_one(door: Door, version: Version) -> None:
    peer = await holder(door, version)
    small, large = envelope("s" * 50_000), envelope("l" * 1_500_000)
    await door.forward(HELD, *[small] * 3)
    await door.forward(HELD, large)
    two = (await version.fetch(peer)).attached
    assert list(two.values()) == [small, small]
    await version.received(peer, *two)
    await version.received(peer, *(await version.fetch(peer)).attached)
    assert list((await version.fetch(peer)).attached.values()) == [large]


@each
@pytest.mark.rule("D3")
async def test_attachment_ids_are_message_ids_that_wallets_take(door: Door, version: Version) -> None:
    peer, wire = await holder(door, version), Wire(persistent=True)
    await version.live(peer, wire)
    await door.forward(HELD, envelope("live"))
    await wire.count(2)
    await door.sessions.left(wire)
    delivered = (await version.fetch(peer)).attached
    assert wire.answers[1].attached == delivered
    assert all(re.fullmatch(r"[-_./a-zA-Z0-9]{8,64}", id) for id in delivered)


# Acknowledgement.


@each
@pytest.mark.rule("D1", "D2")
async def test_messages_received_removes_exactly_what_it_names(door: Door, version: Version) -> None:
    """The Mediator SHOULD send an updated `status` message reflecting the changes to the queue."""
    peer = await holder(door, version)
    await door.forward(HELD, *(envelope(mark) for mark in "abc"))
    ids = list((await version.fetch(peer)).attached)
    answer = await version.received(peer, ids[1])
    assert (answer.name, answer.body["message_count"], answer.thid) == ("status", 2, peer.last)
    assert (await version.fetch(peer)).marks == ["a", "c"]


@each
@pytest.mark.rule("D2", "D3")
async def test_ids_that_are_unknown_or_of_others_are_ignored(door: Door, version: Version) -> None:
    mine, theirs = await holder(door, version, HELD), await holder(door, version, OTHER, number=2)
    await door.forward([HELD, OTHER])
    (other,) = (await version.fetch(theirs)).attached
    (own,) = (await version.fetch(mine)).attached
    answer = await version.received(mine, other, "", "nonsense", "1-2-3", "9" * 300, f"{own}0")
    assert answer.body["message_count"] == 1
    assert (await version.received(mine, own, own)).body["message_count"] == 0
    assert (await version.received(mine, own)).body["message_count"] == 0
    assert (await version.status(theirs)).body["message_count"] == 1


@each
@pytest.mark.rule("D3")
async def test_attachment_ids_of_earlier_releases_are_accepted(door: Door, version: Version) -> None:
    peer = await holder(door, version)
    await door.forward(HELD, envelope("a"))
    mailbox_id = (await peer.connected()).mailbox_id
    assert (await version.received(peer, f"{mailbox_id}-0")).body["message_count"] == 0


@each
@pytest.mark.rule("D12")
@pytest.mark.parametrize("listed", [None, "1-0", {}, [1], [None], ["x"] * 1001, ["x" * 10_000]])
async def test_a_list_of_ids_that_is_none_is_refused(door: Door, version: Version, listed: object) -> None:
    peer = await holder(door, version)
    await door.forward(HELD)
    answer = await peer.ask(f"{version.protocol}/messages-received", {"message_id_list": listed})
    assert answer.problem[1].startswith("message_id_list: ")
    assert len(await peer.queued()) == 1


@each
@pytest.mark.rule("D4")
async def test_each_of_several_recipients_has_a_message_of_its_own(door: Door, version: Version) -> None:
    """The message MUST be queued for each Recipient independently. If one of the addressed Recipients retrieves a
    message and indicates it has been received, that message MUST still be held and then removed by the other."""
    one, two = await holder(door, version, HELD), await holder(door, version, OTHER, number=2)
    await door.forward([HELD, OTHER], envelope("both"))
    await version.received(one, *(await version.fetch(one)).attached)
    assert (await version.status(one)).body["message_count"] == 0
    answer = await version.fetch(two)
    assert answer.marks == ["both"]
    assert (await version.received(two, *answer.attached)).body["message_count"] == 0


# Live mode.


@each
@pytest.mark.rule("D6")
async def test_live_mode_is_off_until_the_recipient_turns_it_on(door: Door, version: Version) -> None:
    """It is disabled by default and only activated by the Recipient. Messages that arrive when Live Mode is off MUST
    be stored in the queue."""
    peer, wire = await holder(door, version), Wire(persistent=True)
    assert (await version.status(peer, wire=wire)).body["live_delivery"] is False
    await door.forward(HELD)
    assert len(await peer.queued()) == 1
    assert len(wire.frames) == 1, "but for the status nothing is sent"


@each
@pytest.mark.rule("D6")
async def test_turning_live_mode_on_or_off_is_answered_with_status(door: Door, version: Version) -> None:
    """Upon receiving the `live_delivery_change` message, the Mediator MUST respond with a `status` message."""
    peer, wire = await holder(door, version), Wire(persistent=True)
    await door.forward(HELD)
    for on in (True, False):
        answer = await version.live(peer, wire, on)
        assert (answer.name, answer.thid) == ("status", peer.last)
        assert answer.body["live_delivery"] is on
        assert answer.body["message_count"] == 1
        assert (await version.status(peer, wire=wire)).body["live_delivery"] is on


@each
@pytest.mark.rule("D6")
async def test_what_is_queued_already_must_be_requested(door: Door, version: Version) -> None:
    """Messages already in the queue are not affected by Live Mode; they MUST still be requested with
    `delivery-request` messages."""
    peer, wire = await holder(door, version), Wire(persistent=True)
    await door.forward(HELD, envelope("before"))
    await version.live(peer, wire)
    await door.forward(HELD, envelope("after"))
    await wire.count(2)
    assert wire.answers[1].marks == ["after"]
    assert (await version.fetch(peer)).marks == ["before"]


@each
@pytest.mark.rule("D6")
async def test_live_mail_is_delivered_and_stays_until_acked(door: Door, version: Version) -> None:
    """If Live Mode is active, messages still MUST be delivered via a `delivery` message; if a message is not
    acknowledged, the message MUST be added to the queue for later pickup (4.0)."""
    peer, wire = await holder(door, version), Wire(persistent=True)
    await version.live(peer, wire)
    await door.forward(HELD, envelope("live"))
    await wire.count(2)
    pushed = wire.answers[1]
    assert pushed.type.endswith(f"{version.protocol}/delivery")
    assert pushed.marks == ["live"]
    assert pushed.thid is None
    assert len(await peer.queued()) == 1
    await version.received(peer, *pushed.attached)
    assert await peer.queued() == []


OVER = pytest.mark.parametrize("over", ["http", "socket"])


@each
@OVER
@pytest.mark.rule("D6")
async def test_unacknowledged_live_mail_is_leased_to_the_session(door: Door, version: Version, over: str) -> None:
    """It is not counted in a `status` for its holder nor handed out again, until the lease ends."""
    peer, wire = await holder(door, version), Wire(persistent=True)
    await door.forward(HELD, envelope("backlog"))
    await version.live(peer, wire)
    door.now += SECOND
    await door.forward(HELD, envelope("live"))
    await wire.count(2)
    (id,) = wire.answers[1].attached

    def way() -> Wire:
        return wire if over == "socket" else Wire()

    body = (await version.status(peer, wire=way())).body
    assert body["live_delivery"] is True
    assert (body["message_count"], body["total_bytes"]) == (1, len(envelope("backlog")))
    assert body["oldest_received_time"] == body["newest_received_time"]
    assert body.get("longest_waited_seconds", 1) == 1
    assert (await version.status(peer, HELD, wire=way())).body["message_count"] == 1
    assert (await version.status(peer, OTHER, wire=way())).body["message_count"] == 0
    for _ in range(2):
        first = await version.fetch(peer, wire=way())
        assert first.marks == ["backlog"], "what was there before is delivered until it is acknowledged"
    door.now += LIVE_LEASE - SECOND
    body = (await version.received(peer, *first.attached, wire=way())).body
    assert (body["message_count"], body["total_bytes"]) == (0, 0)
    assert "oldest_received_time" not in body
    assert (await version.fetch(peer, wire=way())).attached == {}

    door.now += SECOND
    assert (await version.status(peer, wire=way())).body["message_count"] == 1
    again = await version.fetch(peer, wire=way())
    assert list(again.attached) == [id]
    assert (await version.status(peer, wire=way())).body["message_count"] == 0
    pushed = [answer for answer in wire.answers if answer.name == "delivery" and answer.thid is None]
    assert len(pushed) == 1, "nothing is pushed twice"


@each
@pytest.mark.rule("D6")
@pytest.mark.parametrize("end", ["socket", "off", "again"])
async def test_a_lease_ends_at_once_with_its_session(door: Door, version: Version, end: str) -> None:
    peer, wire = await holder(door, version), Wire(persistent=True)
    await version.live(peer, wire)
    await door.forward(HELD, envelope("live"))
    await wire.count(2)
    assert (await version.status(peer)).body["message_count"] == 0
    if end == "socket":
        await door.sessions.left(wire)
    else:
        answer = await version.live(peer, wire if end == "off" else Wire(persistent=True), end == "again")
        assert answer.body["message_count"] == 1
    assert (await version.status(peer)).body["message_count"] == 1
    assert (await version.fetch(peer)).marks == ["live"]


@each
@pytest.mark.rule("D6")
async def test_mail_that_is_asked_for_while_it_is_pushed_goes_one_way(door: Door, version: Version) -> None:
    peer, wire = await holder(door, version), Wire(persistent=True)
    await version.live(peer, wire)
    sent = [str(number) for number in range(60)]
    forwarding = asyncio.gather(*(door.forward(HELD, envelope(mark)) for mark in sent))
    shown: list[str] = []

    def pushed() -> list[str]:
        return [mark for answer in wire.answers if answer.name == "delivery" for mark in answer.marks]

    async with asyncio.timeout(SECONDS):
        while len(shown) + len(pushed()) < len(sent):
            asked = await asyncio.gather(*(version.fetch(peer, 3) for _ in range(4)))
            shown += [mark for answer in asked for mark in answer.attached and answer.marks]
    await forwarding
    assert sorted(shown + pushed(), key=int) == sent
    assert shown, "something was asked for"
    assert pushed(), "something was pushed"


@each
@pytest.mark.rule("D6")
async def test_a_delivery_that_could_not_be_sent_is_not_leased(door: Door, version: Version) -> None:
    peer, wire = await holder(door, version), Wire(persistent=True)
    await version.live(peer, wire)
    await door.forward(HELD, envelope("a"))
    await wire.count(2)
    door.now += LIVE_LEASE
    await peer.tell(f"{version.protocol}/delivery-request", {version.limit: 1}, wire=Wire(alive=False))
    assert (await version.status(peer)).body["message_count"] == 1
    assert (await version.fetch(peer)).marks == ["a"]


@each
@pytest.mark.rule("D6")
async def test_without_live_mode_nothing_is_leased(door: Door, version: Version) -> None:
    """Also mail that is delivered on a socket comes again as soon as it is asked for."""
    peer, wire = await holder(door, version), Wire(persistent=True)
    await door.forward(HELD, envelope("a"))
    for _ in range(2):
        assert (await version.fetch(peer, wire=wire)).marks == ["a"]
        assert (await version.status(peer, wire=wire)).body["message_count"] == 1


@each
@pytest.mark.rule("D6")
async def test_an_envelope_that_comes_again_leases_nothing(door: Door, version: Version) -> None:
    peer, wire = await holder(door, version), Wire(persistent=True)
    await version.fetch(peer)
    old = door.last
    await version.live(peer, wire)
    await door.forward(HELD, envelope("a"))
    await wire.count(2)
    door.now += LIVE_LEASE
    await door.receiver.receive(old, Wire())
    assert (await version.status(peer)).body["message_count"] == 1


@each
@pytest.mark.rule("D6")
async def test_live_mode_ends_with_its_connection(door: Door, version: Version) -> None:
    """If Live Mode is active, and the connection is broken, a new inbound connection starts with Live Mode
    disabled."""
    peer, wire = await holder(door, version), Wire(persistent=True)
    await version.live(peer, wire)
    await door.sessions.left(wire)
    new = Wire(persistent=True)
    assert (await version.status(peer, wire=new)).body["live_delivery"] is False
    await door.forward(HELD)
    assert len(await peer.queued()) == 1
    assert len(new.frames) == 1


@each
@pytest.mark.rule("D6")
async def test_live_mode_needs_a_persistent_transport(door: Door, version: Version) -> None:
    """Live Mode MUST only be enabled when a persistent transport is used; else a problem report SHOULD be sent."""
    peer = await holder(door, version)
    answer = await peer.ask(
        f"{version.protocol}/live-delivery-change", {"live_delivery": True}, thid="thread", wire=Wire()
    )
    text = "Connection does not support Live Delivery"
    match version.number, version.generation:
        case "2.0", _:
            assert answer.type == "https://didcomm.org/notification/1.0/problem-report"
            assert answer.body == {"description": text}
            assert answer.pthid == peer.last, "the id of the message that was refused"
        case "3.0", _:
            assert answer.type == "https://didcomm.org/report-problem/2.0/problem-report"
            assert answer.body == {"code": "e.m.live-mode-not-supported", "comment": text}
            assert answer.pthid == "thread"
        case "4.0", _:
            assert answer.type == "https://didcomm.org/message-pickup/4.0/problem-report"
            assert answer.problem == ("e.m.live-mode-not-supported", text)
            assert answer.pthid == "thread"
            assert ("description" in answer.body) == (version.generation is V1)
    assert not door.sessions.has((await peer.connected()).id)
    assert door.meter("mediator_didcomm_problem_reports_total", code="live_mode_not_supported") == 1


@each
@pytest.mark.rule("D6")
async def test_live_mode_can_be_turned_off_anywhere(door: Door, version: Version) -> None:
    answer = await version.live(await holder(door, version), Wire(), on=False)
    assert (answer.name, answer.body["live_delivery"]) == ("status", False)


@each
@pytest.mark.rule("D12")
@pytest.mark.parametrize("on", [None, 1, "yes", []])
async def test_live_delivery_is_true_or_false(door: Door, version: Version, on: object) -> None:
    answer = await version.live(await holder(door, version), Wire(persistent=True), on)
    assert answer.problem[1].startswith("live_delivery: ")


# Who may.


@each
@pytest.mark.rule("D8", "D12")
async def test_who_has_no_mediation_is_told_so(door: Door, version: Version) -> None:
    peer = await door.connect(1, version.generation)
    asked = [
        await version.status(peer),
        await version.fetch(peer),
        await version.received(peer),
        await version.live(peer, Wire(persistent=True)),
    ]
    assert {answer.problem[0] for answer in asked} == {"e.p.trust.not-enrolled"}


@pytest.mark.rule("D2")
async def test_old_prefixes_are_answered_in_kind(door: Door) -> None:
    peer = await door.holder(1, HELD)
    answer = await peer.ask("messagepickup/2.0/status-request", prefix=OLD)
    assert answer.type == f"{OLD}messagepickup/2.0/status"


@pytest.mark.rule("D12")
@pytest.mark.parametrize(
    ("generation", "type"),
    [
        (V1, "messagepickup/3.0/status-request"),
        (V2, "messagepickup/2.0/status-request"),
        (V2, "messagepickup/1.0/status-request"),
        (V1, "messagepickup/2.1/status-request"),
        (V1, "messagepickup/4.0/status-request"),
        (V1, "messagepickup/2.0/nonsense"),
    ],
)
async def test_versions_and_messages_that_are_not_spoken_are_refused(
    door: Door, generation: Generation, type: str
) -> None:
    peer = await door.holder(1, generation=generation)
    assert (await peer.ask(type)).problem[0] == "e.p.msg.unsupported"


@pytest.mark.rule("D10")
async def test_no_queued_mail_comes_with_another_reply(door: Door) -> None:
    peer, wire = await door.holder(1, HELD), Wire(persistent=True)
    await door.forward(HELD)
    await TWO.status(peer, wire=wire)
    await peer.ask("trust_ping/1.0/ping", {"response_requested": True}, wire=wire)
    assert [answer.name for answer in wire.answers] == ["status", "ping_response"]
