"""The commands that are NATS clients: send, fetch, ack, nack, extend, query, delete."""

import base64
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mediator.cli import output
from mediator.cli.client import ClientOptions
from mediator.cli.options import (
    Address,
    CommandError,
    CommandGroup,
    Group,
    Ids,
    earlier,
    later,
    one_word,
    seconds,
    span,
    timed,
)
from mediator.errors import MediatorError

if TYPE_CHECKING:
    from mediator.client import Client


LONGEST_WAIT = 4500
"""Milliseconds one FETCH may wait; the service lowers larger values (F2)."""
AGAIN_SECONDS = 1.0


class Priority(StrEnum):
    """The lanes, by their names in SEND."""

    CRITICAL = "critical"
    HIGH = "high"
    URGENT = "urgent"
    NORMAL = "normal"
    LOW = "low"


class StartPosition(StrEnum):
    """Where a FETCH without a position starts."""

    LATEST = "latest"
    EARLIEST = "earliest"


app = CommandGroup()


@app.command(epilog="Example: mediator send agent.inbox 'hello' --priority urgent --ttl 2h")
def send(
    address: Address,
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="The payload; - reads standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the payload from this file.")] = None,
    priority: Annotated[Priority, one_word(Priority, "The lane.")] = Priority.NORMAL,
    key: Annotated[str | None, typer.Option(help="Replace the older message that has this key.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Tag to find it by; give several.")] = None,
    delay: Annotated[int | None, timed(seconds, "Visible after this time.")] = None,
    ttl: Annotated[int | None, timed(seconds, "Expires after this time.")] = None,
    send_at: Annotated[int | None, timed(later, "Visible at this time.")] = None,
    expire_at: Annotated[int | None, timed(later, "Expires at this time.")] = None,
    dedup_id: Annotated[str | None, typer.Option(help="Store it once, however often it is sent.")] = None,
    reply_to: Annotated[str | None, typer.Option(help="Mail address for the answer.")] = None,
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME:VALUE", help="Header of your own; give several.")
    ] = None,
    archive: Annotated[bool, typer.Option("--archive", help="Archive this message.")] = False,
    *,
    options: ClientOptions,
) -> None:
    """Send a message; prints its msg_id once it is on disk (-1 while it is delayed)."""
    ours = {
        "mq9-priority": None if priority is Priority.NORMAL else priority.value,
        "mq9-key": key,
        "mq9-tags": ",".join(tag) if tag else None,
        "mq9-delay": delay,
        "mq9-ttl": ttl,
        "mq9-send-at": send_at,
        "mq9-expire-at": expire_at,
        "mq9-dedup-id": dedup_id,
        "mq9-reply-to": reply_to,
        "mq9-storage": "archive" if archive else None,
    }
    headers = own_headers(header or ()) | {name: str(value) for name, value in ours.items() if value is not None}
    for name, value in headers.items():
        # nats-py would silently turn a new line into a space.
        if not value.isprintable():
            raise CommandError(f"{name}: expected no control characters")
    payload = _payload(text, file)
    answer = options.request(f"MSG.SEND.{address}", payload, headers=headers)
    msg_id = answer["msg_id"]
    if options.as_json:
        output.print_json(answer)
    elif msg_id >= 0:
        output.print_line(f"sent, msg_id {msg_id}")
    else:
        output.print_line("stored, msg_id -1: it gets its number when it becomes visible")


def own_headers(given: Iterable[str]) -> dict[str, str]:
    """Parse headers written ``NAME:VALUE``."""
    headers = {}
    for item in given:
        name, colon, value = item.partition(":")
        if not colon or not name.strip():
            raise typer.BadParameter(f'expected NAME:VALUE, got "{item[:40]}"', param_hint="--header")
        headers[name.strip()] = value.strip()
    return headers


def _payload(text: str | None, file: Path | None) -> bytes:
    if (text is None) == (file is None):
        raise typer.BadParameter("expected TEXT, or - for standard input, or --file", param_hint="TEXT")
    if file is not None:
        try:
            return file.read_bytes()
        except OSError as error:
            raise CommandError(f"cannot read {file}: {error.strerror}") from None
    if text == "-":
        return sys.stdin.buffer.read()
    assert text is not None
    return text.encode("utf-8", "surrogateescape")


@app.command(epilog="Example: mediator fetch agent.inbox --group workers --deliver earliest --ack")
def fetch(
    address: Address,
    group: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Consumer group, whose position is kept; without it none is."),
    ] = None,
    deliver: Annotated[StartPosition | None, one_word(StartPosition, "Where to start without a position.")] = None,
    from_time: Annotated[int | None, timed(earlier, "Start at this time.")] = None,
    from_id: Annotated[int | None, typer.Option(min=0, help="Start with this msg_id.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Reset the group's position.")] = False,
    num: Annotated[int, typer.Option(min=1, max=1000, help="At most this many messages.")] = 100,
    wait: Annotated[
        int, timed(span, "Wait this long for the first message, at most 4.5 s.", show_default="500ms")
    ] = 500,
    ack_wait: Annotated[int | None, timed(span, "Lease the messages for this time; 0: no lease.")] = None,
    max_deliver: Annotated[
        int | None, typer.Option(min=1, help="Leased deliveries after which a message is dead for the group.")
    ] = None,
    acknowledge: Annotated[bool, typer.Option("--ack", help="Acknowledge the printed messages.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Run until interrupted; needs --group and --ack.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Write the payloads and nothing else, each as it is and on a line of its own.")
    ] = False,
    *,
    options: ClientOptions,
) -> None:
    """Fetch messages: critical ones first, oldest first in each lane."""
    if acknowledge and group is None:
        raise typer.BadParameter("only a group can acknowledge, give --group", param_hint="--ack")
    if follow and not acknowledge:
        raise typer.BadParameter(
            "needs --group and --ack, without them the same messages come each time", param_hint="--follow"
        )
    if raw and options.as_json:
        raise typer.BadParameter("give one of --raw and --json", param_hint="--raw")
    if sum(given is not None for given in (deliver, from_time, from_id)) > 1:
        raise typer.BadParameter("give one of --deliver, --from-time and --from-id", param_hint="--deliver")
    start = "from_time" if from_time is not None else "from_id" if from_id is not None else deliver
    wait = LONGEST_WAIT if follow else wait
    bounds = {"num_msgs": num, "max_wait_ms": wait, "ack_wait_ms": ack_wait, "max_deliver": max_deliver}
    fields = {"group_name": group, "deliver": start, "from_time": from_time, "from_id": from_id}
    body = _given({**fields, "config": _given(bounds)})
    first = {**body, "force_deliver": True} if force else body

    async def once(client: "Client", request: dict[str, Any]) -> bool:
        answer = await client.request(f"MSG.FETCH.{address}", request, wait=min(wait, LONGEST_WAIT) / 1000)
        messages = answer["messages"]
        if raw:
            _write_payloads(messages)
        elif messages or not follow:
            _print(answer, as_json=options.as_json)
        if answer.get("note") and not options.as_json:
            output.print_hint(answer["note"])
        if acknowledge and messages:
            ids = [message["msg_id"] for message in messages]
            await client.request(f"MSG.ACK.{address}", {"group_name": group, "msg_ids": ids})
        return bool(messages)

    async def work(client: "Client") -> None:
        if follow:
            await _follow(client, once, first, body)
        elif not await once(client, first) and not options.as_json and start in (None, StartPosition.LATEST):
            output.print_hint(
                "Without a position a FETCH sees only what comes from now on: "
                "--deliver earliest begins with the oldest message."
            )

    options.run(work, lasting=follow)


async def _follow(client: "Client", once: Any, first: dict[str, Any], body: dict[str, Any]) -> None:
    """Fetch for ever, also across restarts of the service and while it is busy."""
    import asyncio

    away = False
    request = first
    while True:
        try:
            await once(client, request)
        except MediatorError as error:
            if not error.retry:
                raise
            if not away:
                output.print_hint(f"{error}; waiting for it")
            away = True
            await asyncio.sleep(AGAIN_SECONDS)
        else:
            away, request = False, body


def _write_payloads(messages: Sequence[Mapping[str, Any]]) -> None:
    for message in messages:
        payload = base64.b64decode(message["payload"])
        sys.stdout.buffer.write(payload if payload.endswith(b"\n") else payload + b"\n")
    sys.stdout.flush()


def _print(answer: dict[str, Any], *, as_json: bool, headers_only: bool = False) -> None:
    messages = answer["messages"]
    if as_json:
        output.print_json(answer)
    elif messages:
        output.print_messages(messages, headers_only=headers_only)
    else:
        output.print_line("no messages")
    sys.stdout.flush()


@app.command(epilog="Example: mediator ack agent.inbox --group workers 17 18")
def ack(address: Address, ids: Ids, group: Group, options: ClientOptions) -> None:
    """Acknowledge messages for a group; without leases also everything delivered before them."""
    answer = options.request(f"MSG.ACK.{address}", {"group_name": group, "msg_ids": ids})
    options.print(answer, f"{answer['acknowledged']} acknowledged")


@app.command(epilog="Example: mediator nack agent.inbox --group workers 17 --delay 30s")
def nack(
    address: Address,
    ids: Ids,
    group: Group,
    delay: Annotated[int, timed(span, "Deliver them again only after this time.")] = 0,
    *,
    options: ClientOptions,
) -> None:
    """Return leased messages, so that another member of the group gets them."""
    body = {"group_name": group, "msg_ids": ids, "delay_ms": delay}
    answer = options.request(f"MSG.NACK.{address}", body)
    options.print(answer, f"{answer['returned']} given back")


@app.command(epilog="Example: mediator extend agent.inbox --group workers 17 --ack-wait 10m")
def extend(
    address: Address,
    ids: Ids,
    group: Group,
    ack_wait: Annotated[int, timed(span, "The new lease, counted from now.")],
    options: ClientOptions,
) -> None:
    """Extend leases that have not ended."""
    body = {"group_name": group, "msg_ids": ids, "ack_wait_ms": ack_wait}
    answer = options.request(f"MSG.EXTEND.{address}", body)
    options.print(answer, f"{answer['extended']} made longer")


@app.command(epilog="Example: mediator query agent.inbox --tag billing --since 2h")
def query(
    address: Address,
    key: Annotated[str | None, typer.Option(help="Only the message with this key.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Only messages that have this tag; give several.")] = None,
    since: Annotated[int | None, timed(earlier, "Only messages visible since then.")] = None,
    before: Annotated[int | None, typer.Option(min=0, help="Only messages with a smaller msg_id.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Show at most this many, newest first.")] = 100,
    headers_only: Annotated[bool, typer.Option("--headers-only", help="Do not show payloads.")] = False,
    *,
    options: ClientOptions,
) -> None:
    """Show messages without moving any group."""
    body = _given({"key": key, "tags": tag, "since": since, "before_id": before, "limit": limit})
    answer = options.request(f"MSG.QUERY.{address}", {**body, "headers_only": headers_only})
    _print(answer, as_json=options.as_json, headers_only=headers_only)


@app.command(epilog="Example: mediator delete agent.inbox 17")
def delete(
    address: Address,
    msg_id: Annotated[int, typer.Argument(metavar="ID", min=0, help="The msg_id.")],
    options: ClientOptions,
) -> None:
    """Delete one message."""
    answer = options.request(f"MSG.DELETE.{address}.{msg_id}")
    options.print(answer, "deleted")


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
