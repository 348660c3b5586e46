"""The mailboxes and the registry of a mediator, as an agent with an event loop uses them."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, Self, Unpack
from weakref import WeakSet

from mediator.client.connection import Connection, Reply
from mediator.client.login import LoginOptions, read_login
from mediator.client.message import Message, Outgoing, Payload, SendOptions, encode_bodies, message_fields, unix_seconds
from mediator.client.registry import Agent, Registration, card_address
from mediator.errors import (
    BadRequestError,
    MailboxExistsError,
    MediatorError,
    NoSuchMessageError,
    PartlyRefusedError,
    error_of_reply,
)
from mediator.login import Login

PATIENCE = 30.0
"""Seconds for which a request is tried again while nobody answers."""
LONGEST_WAIT = 4.5
"""Seconds that one FETCH may wait (F2)."""
FOREVER = 10 * 365 * 24 * 3600.0
BATCH_MESSAGES = 1000
BATCH_ROOM = 64 * 1024
"""Bytes of a request that a batch leaves free."""
PAGE = 1000

LONGEST_RETRY = 60.0
"""Seconds for which a message that failed stays hidden at most: 1 after the first time, doubled each time."""

Retention = Literal["keep", "until_ack"]
Start = Literal["earliest", "latest"] | int | datetime
"""Where a group without a position begins: a msg_id, or a time, which are both included."""


log = logging.getLogger("mediator.client")


@dataclass(frozen=True)
class Delivery(Message):
    """A message that is leased to this client until it is acknowledged or given back.

    As a block, ``async with message:``, it is acknowledged when the block succeeds and given back when the block
    raises, and its lease is extended while the block runs. Blocks may run at the same time, in tasks of their own.
    """

    leases: "ConsumerLeases" = field(repr=False, compare=False)

    @classmethod
    def read(cls, item: Mapping[str, Any], leases: "ConsumerLeases") -> Self:
        """Read an item of a FETCH."""
        return cls(**message_fields(item), leases=leases)

    async def ack(self) -> None:
        """Acknowledge the message: it is done. This counts also after the lease ended (K3)."""
        await self.leases.mailbox.ack(self, group=self.leases.group)
        self.leases.settled(self.msg_id)

    async def nack(self, delay: float = 0) -> None:
        """Give the message back: a member of the group gets it after ``delay`` seconds (F6)."""
        await self.leases.mailbox.nack(self, group=self.leases.group, delay=delay)
        self.leases.settled(self.msg_id)

    async def extend(self, lease: float) -> None:
        """Lengthen the lease to this many seconds from now; a block does so by itself."""
        await self.leases.mailbox.extend(self, group=self.leases.group, lease=lease)

    async def __aenter__(self) -> Self:
        self.leases.keep(self.msg_id)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            if not self.leases.is_open(self.msg_id):
                return
            if error is None:
                await self.ack()
                return
            # A failure is tried again later and later; what is only interrupted, at once.
            failed = isinstance(error, Exception)
            try:
                await self.nack(min(2.0 ** max(self.deliveries - 1, 0), LONGEST_RETRY) if failed else 0)
            except MediatorError as why:
                log.warning("message %d was not given back, its lease will end by itself: %s", self.msg_id, why)
        finally:
            self.leases.release(self.msg_id)


class ConsumerLeases:
    """The leases that one consumer holds."""

    def __init__(self, mailbox: "Mailbox", group: str, lease: float) -> None:
        """``lease``: seconds."""
        self.mailbox = mailbox
        self.group = group
        self._lease = lease
        self._waiting: dict[int, Delivery] = {}
        self._open: set[int] = set()
        self._kept: set[int] = set()
        self._extending: asyncio.Task[None] | None = None

    def add(self, items: Sequence[Mapping[str, Any]]) -> None:
        """Take the messages of a FETCH; each is extended until it is taken by :meth:`next`."""
        for item in items:
            delivery = Delivery.read(item, self)
            self._waiting[delivery.msg_id] = delivery
            self._open.add(delivery.msg_id)
            if len(items) > 1:
                self.keep(delivery.msg_id)

    def next(self) -> Delivery | None:
        """Return the next message that nobody has taken; its lease then runs until a block takes it."""
        if not self._waiting:
            return None
        delivery = self._waiting.pop(next(iter(self._waiting)))
        self.release(delivery.msg_id)
        return delivery

    def is_open(self, msg_id: int) -> bool:
        """Whether the message was neither acknowledged nor given back."""
        return msg_id in self._open

    def settled(self, msg_id: int) -> None:
        """Forget a message that was acknowledged or given back."""
        self._open.discard(msg_id)
        self._kept.discard(msg_id)

    def keep(self, msg_id: int) -> None:
        """Extend the lease of a message until :meth:`release`."""
        self._kept.add(msg_id)
        if self._extending is None:
            self._extending = asyncio.create_task(self._extend())

    def release(self, msg_id: int) -> None:
        """Extend the lease of a message no more."""
        self._kept.discard(msg_id)

    async def close(self) -> None:
        """Give back the messages that nobody has taken."""
        waiting, self._waiting = tuple(self._waiting.values()), {}
        if waiting:
            try:
                await self.mailbox.nack(*waiting, group=self.group)
            except MediatorError as why:
                log.warning("%d messages were not given back, their leases will end: %s", len(waiting), why)
            for delivery in waiting:
                self.settled(delivery.msg_id)

    async def _extend(self) -> None:
        """Lengthen the leases three times within each, while there are any."""
        try:
            while True:
                await asyncio.sleep(self._lease / 3)
                if not self._kept:
                    return
                try:
                    await self.mailbox.extend(*self._kept, group=self.group, lease=self._lease)
                except MediatorError as why:
                    log.warning("leases of %d messages were not extended: %s", len(self._kept), why)
        finally:
            self._extending = None


class Client:
    """A connection to a mediator, used as ``async with``; it connects again by itself, for as long as it is open."""

    def __init__(
        self,
        url: str | Login,
        *,
        patience: float = PATIENCE,
        name: str = "mediator client",
        **login: Unpack[LoginOptions],
    ) -> None:
        """``url``: ``nats://HOST:PORT``, several joined by commas, or a login as the commands make it.

        ``name`` is what monitoring of NATS shows.

        ``patience``: seconds for which a request is tried again while nobody answers it, or the service is too busy.

        Raises :class:`SetupError` naming the option that is wrong.
        """
        self._connection = Connection(*read_login(url, login), patience=patience, name=name)
        self._leases: WeakSet[ConsumerLeases] = WeakSet()

    async def __aenter__(self) -> Self:
        """Connect; raises :class:`LoginRefusedError`, or :class:`UnreachableError` when patience is over."""
        await self._connection.open()
        return self

    async def __aexit__(self, *failure: object) -> None:
        """Give back what consumers hold, and disconnect."""
        for leases in list(self._leases):
            await leases.close()
        await self._connection.close()

    @property
    def max_payload(self) -> int:
        """Bytes that the NATS server takes in one request."""
        return self._connection.max_payload

    def track(self, leases: ConsumerLeases) -> None:
        """Give back what a consumer holds when the client is closed."""
        self._leases.add(leases)

    async def request(
        self,
        verb: str,
        body: bytes | Mapping[str, Any] = b"",
        *,
        headers: Mapping[str, str] | None = None,
        wait: float = 0.0,
        repeatable: bool = True,
        patience: float | None = None,
        done_error: type[MediatorError] | None = None,
    ) -> Reply:
        """Send any request, such as ``MAILBOX.UPDATE.agent.inbox``, and return the fields of its reply.

        ``wait``: seconds for which the service itself may wait. While nobody knows whether it was carried out, it is
        sent again, for ``patience`` seconds, unless it is not ``repeatable``. ``done_error`` is what the service then
        answers if it was, as :class:`NoSuchMessageError` to a DELETE: that is a success, whose reply is empty.

        Raises the error of :mod:`mediator.errors` that the service sent, :class:`UnreachableError` when nobody is
        there, and :class:`NoReplyError` or :class:`UncertainError` when nobody knows whether it was carried out.
        """
        return await self._connection.request(
            verb,
            body,
            headers=headers,
            wait=wait,
            repeatable=repeatable,
            patience=patience,
            done_error=done_error,
        )

    # Mailboxes.

    def mailbox(self, address: str) -> "Mailbox":
        """Return a mailbox by its address, without asking whether it is there."""
        return Mailbox(self, address)

    async def create(
        self,
        address: str | None = None,
        *,
        ttl: float | None = None,
        desc: str = "",
        tags: Sequence[str] = (),
        retention: Retention = "keep",
        archive: bool = False,
        lease: float | None = None,
        exist_ok: bool = False,
    ) -> "Mailbox":
        """Create a mailbox; without an address it gets one that nobody can guess (M1).

        ``ttl``: seconds after which it is gone with all in it, 0 for never, None for what the service is configured
        to. ``lease``: seconds for which a FETCH that names no lease gets one (F8). With ``exist_ok`` a mailbox that is
        there is used as it is. Raises :class:`MailboxExistsError`.
        """
        fields = {
            "name": address,
            "ttl": None if ttl is None else math.ceil(ttl),
            "desc": desc,
            "tags": list(tags),
            "retention": retention,
            "archive": archive,
            "ack_wait_ms": _milliseconds(lease),
        }
        try:
            # What was created without an answer would be there already, and a generated address be made twice.
            repeatable = exist_ok and address is not None
            reply = await self.request("MAILBOX.CREATE", _given(fields), repeatable=repeatable)
        except MailboxExistsError:
            if not exist_ok or address is None:
                raise
            return Mailbox(self, address)
        return Mailbox(
            self,
            reply["mail_address"],
            send_address=reply.get("send_address") or None,
            token=reply.get("token") or None,
        )

    # The registry.

    async def register(self, card: Mapping[str, Any]) -> str:
        """Register an agent by its card, again to replace it; return the address, or its id if it has none (G1)."""
        return str((await self.request("AGENT.REGISTER", card))["mailbox"])

    async def unregister(self, address: str) -> bool:
        """Remove an agent from the registry, and return whether it was there (G2)."""
        return bool((await self.request("AGENT.UNREGISTER", {"mailbox": address})).get("removed", True))

    async def report(self, address: str, status: Mapping[str, Any] | None = None) -> None:
        """Give a sign of life for an agent, with any status; raises :class:`NoSuchAgentError` (G2)."""
        await self.request("AGENT.REPORT", {**(status or {}), "mailbox": address})

    @asynccontextmanager
    async def registered(self, card: Mapping[str, Any], *, ttl: float = 60.0) -> AsyncIterator[Registration]:
        """Keep an agent registered while the block runs: it reports three times in ``ttl`` seconds.

        When the program ends without leaving the block, others see the agent as stale after ``ttl``, and later as gone.
        """
        card = {**card, "ttl": math.ceil(ttl)}

        async def register() -> None:
            await self.register(card)

        registration = Registration(await self.register(card), register, self.report)
        reporting = asyncio.create_task(registration.report_every(ttl / 3))
        try:
            yield registration
        finally:
            reporting.cancel()
            with suppress(MediatorError):
                await self.unregister(registration.address)

    async def discover(
        self,
        text: str = "",
        *,
        limit: int = 10,
        by_words: bool = False,
        tags: Sequence[str] = (),
        skills: Sequence[str] = (),
        min_score: float | None = None,
        explain: bool = False,
    ) -> list[Agent]:
        """Find agents by what they can do, best first: by meaning, or ``by_words`` alone. Without a text: all (G3).

        ``tags`` and ``skills``: an agent must have all of them. ``min_score``: 0 to 1. ``explain``: say why each agent
        is found where it is, in :attr:`Agent.explanation`.
        """
        fields = {
            "text" if by_words else "semantic": text,
            "limit": min(limit, PAGE),
            "filter": _given({"tags": list(tags), "skills": list(skills)}),
            "min_score": min_score,
            "with_scores": bool(text),
            "explain": explain,
        }
        request = _given(fields)
        found: list[Agent] = []
        while True:
            reply = await self.request("AGENT.DISCOVER", request)
            scores = reply.get("scores") or [None] * len(reply["agents"])
            reasons = reply.get("explanations") or [None] * len(reply["agents"])
            found += [
                Agent(card, score=score, explanation=why)
                for card, score, why in zip(reply["agents"], scores, reasons, strict=True)
            ]
            # A page also ends where the reply is full.
            if len(found) >= limit or not reply.get("next"):
                return found[:limit]
            request = {name: fields[name] for name in ("with_scores", "explain")}
            request |= {"cursor": reply["next"], "limit": min(limit - len(found), PAGE)}


class Mailbox:
    """A mailbox; who knows its address may send to it, read it and delete from it."""

    def __init__(
        self, client: Client, address: str, *, send_address: str | None = None, token: str | None = None
    ) -> None:
        self.client = client
        self.address = address
        self.send_address = send_address
        """An address of the same mailbox that takes mail and nothing else, to be handed out; None where unknown."""
        self.token = token
        """Given once, to whom created the mailbox; the verb MAILBOX.UPDATE asks for it (M3)."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        url: str,
        address: str | None = None,
        *,
        create: bool = False,
        patience: float = PATIENCE,
        **login: Unpack[LoginOptions],
    ) -> AsyncIterator[Self]:
        """Connect for one mailbox; ``create`` makes it if it is not there, and without an address a new one.

        For more about a mailbox than that it is there, use :meth:`Client.create`. Raises as ``async with Client``.
        """
        async with Client(url, patience=patience, **login) as client:
            if create or address is None:
                made = await client.create(address, exist_ok=True)
                yield cls(client, made.address, send_address=made.send_address, token=made.token)
            else:
                yield cls(client, address)

    def __repr__(self) -> str:
        return f"<Mailbox {self.address[:4]}…>"

    def mailbox(self, address: str) -> "Mailbox":
        """Return another mailbox, reached by the same connection."""
        return Mailbox(self.client, address)

    # Sending.

    async def send(self, payload: Payload, **options: Unpack[SendOptions]) -> int | None:
        """Send a message; return its msg_id once it is on disk, or None while it is delayed.

        Raises :class:`NoReplyError` or :class:`UncertainError` when nobody knows whether it was stored; with a
        ``dedup_id`` it is then sent again by itself.
        """
        message = Outgoing(payload, **options)
        data, headers = message.encode()
        reply = await self.client.request(
            f"MSG.SEND.{self.address}", data, headers=headers, repeatable=message.repeatable
        )
        return _msg_id(reply["msg_id"])

    async def send_many(self, messages: Iterable[Payload | Outgoing]) -> list[int | None]:
        """Send messages in as few requests as they fit into; return as :meth:`send` for each (S8).

        Raises :class:`PartlyRefusedError`, which says what became of each message, when some were refused; when the
        first request as a whole was, its error.
        """
        outgoing = [message if isinstance(message, Outgoing) else Outgoing(message) for message in messages]
        bodies = encode_bodies([message.encode() for message in outgoing])
        room = self.client.max_payload - BATCH_ROOM
        max_per_batch = max(min(BATCH_MESSAGES, room // 1024), 1)
        ids: list[int | None] = []
        errors: dict[int, MediatorError] = {}
        while len(ids) < len(bodies):
            start = len(ids)
            end, size = start + 1, len(bodies[start])
            while end < min(len(bodies), start + max_per_batch) and size + len(bodies[end]) <= room:
                size += len(bodies[end])
                end += 1
            try:
                reply = await self.client.request(
                    f"MSG.BATCH.{self.address}",
                    b"".join(bodies[start:end]),
                    repeatable=all(message.repeatable for message in outgoing[start:end]),
                )
            except MediatorError as error:
                if not start:
                    raise
                errors |= dict.fromkeys(range(start, len(bodies)), error)
                ids += [None] * (len(bodies) - start)
                break
            codes = reply.get("error_codes", {})
            for position, text in reply["errors"].items():
                errors[start + int(position)] = error_of_reply(text, {"error_code": codes.get(position)})
            ids += map(_msg_id, reply["msg_ids"])
        if not errors:
            return ids
        refused = PartlyRefusedError(len(errors), len(ids), str(next(iter(errors.values()))))
        refused.msg_ids, refused.errors = ids, errors
        raise refused

    async def reply(self, message: Message, payload: Payload, **options: Unpack[SendOptions]) -> int | None:
        """Send an answer to where the sender of ``message`` wants it; raises as :meth:`send`."""
        if message.reply_to is None:
            raise BadRequestError("reply_to", f"message {message.msg_id} asks for no answer")
        return await self.mailbox(message.reply_to).send(payload, **options)

    # Receiving.

    async def consume(
        self,
        *,
        group: str,
        lease: float = 30.0,
        start: Start = "earliest",
        prefetch: int = 1,
        max_deliver: int | None = None,
    ) -> AsyncGenerator[Delivery, None]:
        """Yield messages, for ever: those that wait, then those that come; members of a group share them.

        Each is leased for ``lease`` seconds (1 to 43 200). Take it as a block, which acknowledges it when the block
        succeeds, gives it back when the block raises, and extends its lease while the block runs::

            async for message in box.consume(group="workers", lease=30):
                async with message:
                    await work_on(message)

        What no block takes is not acknowledged: its lease ends and it comes again. A loop that ends early gives back
        what it fetched ahead. ``start`` is where a group begins that has no position yet. ``prefetch``: messages that
        are fetched at once; more than 1 is faster, where each takes little time. ``max_deliver``: deliveries after
        which a message is dead for the group (F7). Then each is fetched alone, since one that was fetched ahead and
        given back was delivered, and might be dead though nobody saw it.

        A service that is away is waited for; raises what no waiting mends, as :class:`NoSuchMailboxError`.
        """
        leases = ConsumerLeases(self, group, lease)
        self.client.track(leases)
        try:
            while True:
                items = await self._fetch(
                    group=group,
                    limit=prefetch if max_deliver is None else 1,
                    wait=LONGEST_WAIT,
                    lease=lease,
                    start=start,
                    max_deliver=max_deliver,
                    patience=FOREVER,
                )
                leases.add(items)
                while (delivery := leases.next()) is not None:
                    yield delivery
        finally:
            await leases.close()

    async def work(
        self,
        handler: Callable[[Delivery], Awaitable[object]],
        *,
        group: str,
        lease: float = 30.0,
        concurrency: int = 1,
        start: Start = "earliest",
        max_deliver: int | None = None,
    ) -> None:
        """Call ``handler`` with each message, for ever; up to ``concurrency`` at the same time.

        A message is acknowledged when the handler returns. When it raises, that is logged, and the message comes again
        a second later, then two, four, up to a minute. The rest is as with :meth:`consume`.
        """
        slots = asyncio.Semaphore(concurrency)

        async def handle(delivery: Delivery) -> None:
            try:
                async with delivery:
                    await handler(delivery)
            except Exception:
                log.exception("message %d of a mailbox failed", delivery.msg_id)
            finally:
                slots.release()

        messages = self.consume(group=group, lease=lease, start=start, max_deliver=max_deliver)
        try:
            async with aclosing(messages), asyncio.TaskGroup() as tasks:
                while True:
                    await slots.acquire()
                    tasks.create_task(handle(await anext(messages)))
        except ExceptionGroup as failures:
            # No handler raises, so it holds what the consumer raised.
            error = failures.exceptions[0]
            raise error from error.__cause__

    async def fetch(
        self,
        *,
        group: str | None = None,
        limit: int = 100,
        wait: float = 0.5,
        lease: float | None = None,
        start: Start = "earliest",
        reset: bool = False,
        max_deliver: int | None = None,
    ) -> list[Message]:
        """Fetch once: urgent messages first, oldest first among equals (F3); waits for the first one, up to 4.5 s.

        A ``group`` keeps a position, which :meth:`ack` moves; without one, the same messages come again. ``reset``
        sets it to ``start`` anew. With a ``lease``, in seconds, no other member of the group gets them meanwhile.
        """
        items = await self._fetch(
            group=group, limit=limit, wait=wait, lease=lease, start=start, reset=reset, max_deliver=max_deliver
        )
        return [Message(**message_fields(item)) for item in items]

    async def _fetch(
        self,
        *,
        group: str | None,
        limit: int,
        wait: float,
        lease: float | None,
        start: Start,
        max_deliver: int | None,
        reset: bool = False,
        patience: float | None = None,
    ) -> list[dict[str, Any]]:
        wait = min(wait, LONGEST_WAIT)
        bounds = {
            "num_msgs": limit,
            "max_wait_ms": _milliseconds(wait),
            "ack_wait_ms": _milliseconds(lease),
            "max_deliver": max_deliver,
        }
        fields = {"group_name": group, "force_deliver": reset or None, **_start(start), "config": _given(bounds)}
        reply = await self.client.request(f"MSG.FETCH.{self.address}", _given(fields), wait=wait, patience=patience)
        messages: list[dict[str, Any]] = reply["messages"]
        if reply.get("note") and not messages:
            log.warning("group %s got no message: %s", group, reply["note"])
        return messages

    async def ack(self, *messages: Message | int, group: str) -> int:
        """Acknowledge messages for a group; return how many that settled.

        Under a lease just these (K3); otherwise also what was delivered before them (K2).
        """
        return await self._settle("ACK", "acknowledged", messages, group)

    async def nack(self, *messages: Message | int, group: str, delay: float = 0) -> int:
        """Give leased messages back, to be delivered after ``delay`` seconds; return how many still were leased."""
        return await self._settle("NACK", "returned", messages, group, delay_ms=_milliseconds(delay))

    async def extend(self, *messages: Message | int, group: str, lease: float) -> int:
        """Lengthen leases to ``lease`` seconds from now; return how many still ran."""
        return await self._settle("EXTEND", "extended", messages, group, ack_wait_ms=_milliseconds(lease))

    async def _settle(self, verb: str, count: str, messages: Sequence[Message | int], group: str, **fields: Any) -> int:
        if not messages:
            return 0
        ids = [message if isinstance(message, int) else message.msg_id for message in messages]
        reply = await self.client.request(f"MSG.{verb}.{self.address}", {"group_name": group, "msg_ids": ids, **fields})
        return int(reply.get(count, 0))

    # Looking and deleting.

    async def query(
        self,
        *,
        key: str | None = None,
        tags: Sequence[str] = (),
        since: datetime | None = None,
        before_id: int | None = None,
        limit: int = 100,
        headers_only: bool = False,
        dead_for: str | None = None,
    ) -> list[Message]:
        """Look at messages without moving any group: the newest ``limit``, oldest first (Q1).

        All filters must fit. ``before_id`` pages back. ``headers_only``: without payloads. ``dead_for`` names a group,
        whose dead messages are shown instead (F7).
        """
        fields = {
            "key": key,
            "tags": list(tags),
            "since": None if since is None else unix_seconds("since", since),
            "before_id": before_id,
            "limit": limit,
            "headers_only": headers_only,
            "dead": dead_for is not None,
            "group_name": dead_for,
        }
        reply = await self.client.request(f"MSG.QUERY.{self.address}", _given(fields))
        return [Message(**message_fields(item)) for item in reply["messages"]]

    async def delete(self, message: Message | int) -> None:
        """Delete a message for everybody; raises :class:`NoSuchMessageError` when it is not there (Q2)."""
        msg_id = message if isinstance(message, int) else message.msg_id
        await self.client.request(f"MSG.DELETE.{self.address}.{msg_id}", done_error=NoSuchMessageError)

    # The registry.

    async def register(self, card: Mapping[str, Any]) -> str:
        """Register an agent that is reached at this mailbox, unless its card names another; return the address."""
        return await self.client.register(self.with_mailbox(card))

    @asynccontextmanager
    async def registered(self, card: Mapping[str, Any], *, ttl: float = 60.0) -> AsyncIterator[Registration]:
        """Keep an agent that is reached at this mailbox registered, as :meth:`Client.registered`."""
        async with self.client.registered(self.with_mailbox(card), ttl=ttl) as registration:
            yield registration

    async def discover(
        self,
        text: str = "",
        *,
        limit: int = 10,
        by_words: bool = False,
        tags: Sequence[str] = (),
        skills: Sequence[str] = (),
        min_score: float | None = None,
        explain: bool = False,
    ) -> list[Agent]:
        """Find agents, as :meth:`Client.discover`; ``box.mailbox(agent.address)`` is where they are reached."""
        return await self.client.discover(
            text, limit=limit, by_words=by_words, tags=tags, skills=skills, min_score=min_score, explain=explain
        )

    def with_mailbox(self, card: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the card, naming this mailbox unless it names one."""
        return card if card_address(card) else {**card, "mailbox": self.send_address or self.address}


def _start(start: Start) -> dict[str, Any]:
    match start:
        case datetime():
            return {"deliver": "from_time", "from_time": unix_seconds("start", start)}
        case int():
            return {"deliver": "from_id", "from_id": start}
    return {"deliver": start}


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what means nothing to the service (N4)."""
    return {name: value for name, value in fields.items() if value or (value == 0 and value is not False)}


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else math.ceil(seconds * 1000)


def _msg_id(number: int) -> int | None:
    return number if number >= 0 else None
