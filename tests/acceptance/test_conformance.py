"""Every mq9 check of the conformance suite passes against this service, and finds the fault of a broken broker."""

import itertools
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from conformance.checks import Check, Level
from conformance.mq9 import SUITE, BrokerSession
from conformance.running import Outcome, run_checks
from tests.harness.faulty_broker import Fault, Frame, faulty_broker
from tests.harness.service import Service, Services

PATIENCE = 20.0
"""Seconds for what has to come; the machine may be busy."""
IMPATIENCE = 2.0
"""Seconds for what a broken broker never sends."""
PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"
CHECKS = {check.id: check for check in SUITE}


@pytest.mark.parametrize("check", list(SUITE), ids=lambda check: check.id)
async def test_a_check_passes(service: Service, check: Check[BrokerSession]):
    (result,) = await run_checks([check], partial(BrokerSession.open, service.nats_url, seconds=PATIENCE))
    assert result.outcome is Outcome.PASSED, f"{result.detail}\n{check.source}: {check.sentence}\n{result.transcript}"


def plain(text: str) -> str:
    """Return Markdown as it reads, in lower case."""
    return re.sub(r"\]\([^)]*\)|\*\(extension\)\* |[`*\[]", "", text).lower()


def test_own_checks_quote_the_rules_of_the_page():
    page = plain(PROTOCOL.read_text(encoding="utf-8"))
    for check in SUITE:
        if check.level is Level.OWN:
            assert f"\n- {check.source.removeprefix('docs/protocol.md ').lower()} " in page, check.id
            parts = re.split(r"…|\. ", plain(check.sentence))
            assert [part for part in parts if part.strip(" .") not in page] == [], check.id


async def test_a_server_without_mq9_is_one_failure(services: Services):
    url = await services.nats_server()
    results = await run_checks(SUITE, partial(BrokerSession.open, url, seconds=IMPATIENCE))
    outcomes = {result.check.id: result.outcome for result in results}
    native = next(result for result in results if result.check.id == "mq9.first.native")
    assert native.outcome is Outcome.PASSED, native
    assert [name for name, outcome in outcomes.items() if outcome is Outcome.FAILED] == ["mq9.verbs"]
    assert [name for name, outcome in outcomes.items() if outcome is Outcome.PASSED] == ["mq9.first.native"]
    assert Counter(outcomes.values())[Outcome.NOT_OFFERED] > 100


# Brokers that are broken on purpose.

Change = Callable[[Frame], None]


def no_fault(_frame: Frame) -> None:
    """Pass everything on."""


def on(kind: str, verb: str, change: Change) -> Fault:
    """Change each frame of a kind and a verb."""

    def fault(frame: Frame) -> None:
        if frame.kind == kind and frame.verb.startswith(verb):
            change(frame)

    return fault


def drops_header(name: str, verb: str = "MSG.SEND") -> Fault:
    return on("request", verb, lambda frame: frame.headers.pop(name, None))


def drops_field(verb: str, name: str) -> Fault:
    """Forget a field of a request, or of its config."""

    def change(frame: Frame) -> None:
        body = frame.body
        body.pop(name, None)
        body.get("config", {}).pop(name, None)
        frame.body = body

    return on("request", verb, change)


def reads(verb: str, **fields: Any) -> Fault:
    """Put fields into each request."""

    def change(frame: Frame) -> None:
        frame.body = {**frame.body, **fields}

    return on("request", verb, change)


def config(**fields: Any) -> Fault:
    """Put fields into the config of each FETCH."""

    def change(frame: Frame) -> None:
        body = frame.body
        frame.body = {**body, "config": {**body.get("config", {}), **fields}}

    return on("request", "MSG.FETCH", change)


def says(verb: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Fault:
    """Change each reply."""

    def changed(frame: Frame) -> None:
        frame.body = change(frame.body)

    return on("reply", verb, changed)


def pretends(verb: str, **reply: Any) -> Fault:
    """Answer and do nothing."""

    def fault(frame: Frame) -> list[Frame] | None:
        return [frame.answer(**reply)] if frame.kind == "request" and frame.verb.startswith(verb) else None

    return fault


def pushes(change: Callable[[Frame], list[Frame]]) -> Fault:
    """Change what is pushed."""
    return lambda frame: change(frame) if frame.kind == "push" else None


def of_each_message(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def changed(reply: dict[str, Any]) -> dict[str, Any]:
        for message in reply.get("messages", []):
            change(message)
        return reply

    return changed


def held(frames: int) -> Fault:
    """Push so many messages in the opposite order."""
    waiting: list[Frame] = []

    def change(frame: Frame) -> list[Frame]:
        waiting.insert(0, frame)
        if len(waiting) < frames:
            return []
        ready, waiting[:] = list(waiting), []
        return ready

    return pushes(change)


def pushes_once() -> Fault:
    """Push each message to the first that subscribes, and never again."""
    pushed: set[tuple[str, bytes]] = set()

    def change(frame: Frame) -> list[Frame]:
        message = (frame.verb, frame.payload)
        if message in pushed:
            return []
        pushed.add(message)
        return [frame]

    return pushes(change)


def without(part: bytes) -> Fault:
    """Push no message that has this in it."""
    return pushes(lambda frame: [] if part in frame.payload else [frame])


def moves_groups_by_query() -> Fault:
    """Find nothing for groups once somebody asked what a mailbox holds."""
    asked: list[bool] = []

    def fault(frame: Frame) -> list[Frame] | None:
        if frame.verb.startswith("MSG.QUERY"):
            asked.append(True)
        if asked and frame.kind == "request" and frame.verb.startswith("MSG.FETCH"):
            return [frame.answer(error="", messages=[])]
        return None

    return fault


def forgets_queues(frame: Frame) -> None:
    """Give everybody everything, whatever queue group they are in."""
    if frame.kind == "sub" and len(frame.words) == 3:
        del frame.words[1]


numbers = itertools.count()


def to_lower_case(frame: Frame) -> None:
    body = frame.body
    frame.body = {**body, "name": str(body.get("name", "")).lower().replace("-", ".")}


def has_a_group_for_each_fetch(frame: Frame) -> None:
    frame.body = {**frame.body, "group_name": f"g{next(numbers)}"}


def cuts_names(frame: Frame) -> None:
    body = frame.body
    frame.body = {**body, "name": str(body.get("name", ""))[:64]}


def moves_to_the_bare_subject(frame: Frame) -> list[Frame]:
    frame.words[0] = frame.words[0].removesuffix(".critical").removesuffix(".urgent")
    return [frame]


def counts_by_two(reply: dict[str, Any]) -> dict[str, Any]:
    return {**reply, "msg_id": reply["msg_id"] // 2}


def swapped(reply: dict[str, Any]) -> dict[str, Any]:
    return {**reply, "messages": reply["messages"][::-1]}


def wraps_cards(reply: dict[str, Any]) -> dict[str, Any]:
    return {**reply, "agents": [{"card": card, **card} for card in reply["agents"]]}


def without_error(reply: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in reply.items() if name != "error" or value}


def wordless(reply: dict[str, Any]) -> dict[str, Any]:
    return {**reply, "error": reply["error"] and "bad request"}


FAULTS: dict[str, Fault] = {
    "mq9.create.name": drops_field("MAILBOX.CREATE", "name"),
    "mq9.create.generated": reads("MAILBOX.CREATE", name="generated", public=False),
    "mq9.create.duplicate": reads("MAILBOX.CREATE", public=False),
    "mq9.create.malformed": on("request", "MAILBOX.CREATE", to_lower_case),
    "mq9.create.ttl": drops_field("MAILBOX.CREATE", "ttl"),
    "mq9.create.reserved": pretends("MAILBOX.CREATE", error="", mail_address="public"),
    "mq9.send.reply": pretends("MSG.SEND", error="", msg_id=0),
    "mq9.send.unknown": says("MSG.SEND", wordless),
    "mq9.send.ids": says("MSG.SEND", counts_by_two),
    "mq9.send.unique": says("MSG.SEND", counts_by_two),
    "mq9.send.bytes": on("request", "MSG.SEND", lambda f: setattr(f, "payload", f.payload.partition(b"\x00")[0])),
    "mq9.send.key": drops_header("mq9-key"),
    "mq9.send.delay": drops_header("mq9-delay"),
    "mq9.send.ttl": drops_header("mq9-ttl"),
    "mq9.send.tags": drops_header("mq9-tags"),
    "mq9.query.key": drops_field("MSG.QUERY", "key"),
    "mq9.query.limit": drops_field("MSG.QUERY", "limit"),
    "mq9.query.since": drops_field("MSG.QUERY", "since"),
    "mq9.delete": pretends("MSG.DELETE", error="", deleted=True),
    "mq9.delete.unknown": pretends("MSG.DELETE", error="", deleted=False),
    "mq9.fetch.fields": says("MSG.FETCH", of_each_message(lambda message: message.pop("create_time"))),
    "mq9.fetch.priority": drops_header("mq9-priority"),
    "mq9.fetch.fifo": says("MSG.FETCH", swapped),
    "mq9.fetch.earliest": reads("MSG.FETCH", deliver="latest"),
    "mq9.fetch.latest": reads("MSG.FETCH", deliver="earliest"),
    "mq9.fetch.from-id": reads("MSG.FETCH", deliver="earliest"),
    "mq9.fetch.from-time": reads("MSG.FETCH", deliver="earliest"),
    "mq9.fetch.num-msgs": drops_field("MSG.FETCH", "num_msgs"),
    "mq9.fetch.wait": config(max_wait_ms=0),
    "mq9.fetch.wait.none": config(max_wait_ms=500),
    "mq9.group.resume": pretends("MSG.ACK", error=""),
    "mq9.group.unacknowledged": config(ack_wait_ms=60_000),
    "mq9.group.shared": on("request", "MSG.FETCH", has_a_group_for_each_fetch),
    "mq9.group.reconnect": pretends("MSG.ACK", error=""),
    "mq9.group.independent": reads("MSG.FETCH", group_name="one"),
    "mq9.group.force": drops_field("MSG.FETCH", "force_deliver"),
    "mq9.group.latest": reads("MSG.FETCH", deliver="earliest"),
    "mq9.ack.reply": pretends("MSG.ACK", error="no such group"),
    "mq9.reply.error": says("MSG.QUERY", without_error),
    "mq9.agent.register": pretends("AGENT.REGISTER", error=""),
    "mq9.agent.raw": says("AGENT.DISCOVER", wraps_cards),
    "mq9.agent.text": drops_field("AGENT.DISCOVER", "text"),
    "mq9.agent.semantic": drops_field("AGENT.DISCOVER", "semantic"),
    "mq9.agent.list": reads("AGENT.DISCOVER", text="nobody has this word"),
    "mq9.agent.pages": drops_field("AGENT.DISCOVER", "page"),
    "mq9.agent.unregister": pretends("AGENT.UNREGISTER", error=""),
    "mq9.agent.report": pretends("AGENT.REPORT", error="no such agent"),
    "mq9.first.offline": pushes(lambda frame: [] if frame.payload == b'{"n": 1}' else [frame]),
    "mq9.first.priority": held(4),
    "mq9.first.lane": on("request", "INBOX", lambda frame: frame.words.__setitem__(0, frame.words[0][:-6] + "urgent")),
    "mq9.first.latest": reads("MAILBOX.CREATE", type="standard"),
    "mq9.first.token": says("MAILBOX.QUERY", lambda reply: {**reply, "error": ""}),
    "mq9.first.broadcast.forgotten": drops_header("persist", "BROADCAST"),
    "mq9.first.broadcast.queue": forgets_queues,
    "mq9.second.create": drops_field("MAILBOX.CREATE", "public"),
    "mq9.second.replay": held(2),
    "mq9.second.once": pushes(lambda frame: [frame, frame] if frame.payload == b"77" else [frame]),
    "mq9.second.queue": forgets_queues,
    "mq9.second.delete": pretends("MAILBOX.DELETE", error="", deleted=True),
    "mq9.second.public": reads("MAILBOX.CREATE", public=True),
    "mq9.design.dedup": drops_header("dedup_id", "MAILBOX.MSG"),
    "mq9.design.send-at": drops_header("send_at", "MAILBOX.MSG"),
    "mq9.design.expire-at": drops_header("expire_at", "MAILBOX.MSG"),
    "mq9.design.tags": drops_field("MAILBOX.LIST", "tag"),
    "mq9.design.list": drops_field("MAILBOX.LIST", "max_count"),
    "mq9.design.queue": forgets_queues,
    "mq9.design.queue.turn": forgets_queues,
    "mq9.create.format": on("request", "MAILBOX.CREATE", cuts_names),
    "mq9.query.all": says("MSG.QUERY", lambda reply: {**reply, "messages": reply["messages"][1:]}),
    "mq9.query.passive": moves_groups_by_query(),
    "mq9.fetch.unknown": says("MSG.FETCH", lambda reply: {**reply, "error": ""}),
    "mq9.first.create": says("MAILBOX.CREATE", lambda reply: {**reply, "token": "the same"}),
    "mq9.first.query": says("MAILBOX.QUERY", lambda reply: {**reply, "unread": 0}),
    "mq9.first.broadcast": without(b"other"),
    "mq9.second.replay.each": pushes_once(),
    "mq9.second.lane": pushes(moves_to_the_bare_subject),
    "mq9.second.crash": pushes_once(),
    "mq9.design.priority": held(6),
    "mq9.design.dedup.ends": pretends("MAILBOX.DELETE", error="", deleted=True),
    "mq9.design.public": without(b'"desc":"new"'),
    "mq9.design.public.ends": drops_field("MAILBOX.CREATE", "ttl"),
    "mq9.design.public.read-only": pretends("MSG.SEND", error="", msg_id=0),
    "mq9.push.older-headers": drops_header("dedup_id", "MAILBOX.MSG"),
    "mq9.request.bounds": says("MSG.QUERY", lambda reply: {**reply, "error": ""}),
    "mq9.malformed.fetch": says("MSG.FETCH", wordless),
    "mq9.malformed.send": says("MSG.SEND", wordless),
    "mq9.lease": drops_field("MSG.FETCH", "ack_wait_ms"),
}
"""Faults by the check that finds each."""


async def test_replies_of_older_editions_need_no_error(service: Service):
    checks = [check for check in SUITE if check.id.startswith(("mq9.first", "mq9.second"))]
    async with faulty_broker(service.nats_port, says("MAILBOX", without_error)) as url:
        results = await run_checks(checks, partial(BrokerSession.open, url, seconds=PATIENCE))
    assert {result.check.id: result.detail for result in results if result.outcome is not Outcome.PASSED} == {}


def test_every_sentence_of_the_texts_has_a_fault():
    sentences = {check.id for check in SUITE if check.level is Level.MUST}
    # Those that a server without mq9 is tried by.
    assert sentences - FAULTS.keys() == {"mq9.verbs", "mq9.first.native"}


@pytest.mark.parametrize("name", FAULTS)
async def test_a_check_finds_its_fault_and_no_other(service: Service, name: str):
    for fault, seconds, outcome in ((no_fault, PATIENCE, Outcome.PASSED), (FAULTS[name], IMPATIENCE, Outcome.FAILED)):
        async with faulty_broker(service.nats_port, fault) as url:
            (result,) = await run_checks([CHECKS[name]], partial(BrokerSession.open, url, seconds=seconds))
        assert result.outcome is outcome, result
        assert "did not end" not in result.detail
