"""What an mq9 check is given: a stock NATS client, names that nobody else uses, and a helper for each verb.

It uses nats-py alone and nothing of this project's own client. Mailboxes are created with a time to live, since no verb
of mq9 deletes one; agents are unregistered at the end of the check.
"""

import asyncio
import base64
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

from conformance.checks import CannotTryError, CheckFailedError, Level, NotOfferedError, Suite, Transcript, expect

SUITE: Final[Suite["BrokerSession"]] = Suite("mq9")

Run = Callable[["BrokerSession"], Awaitable[None]]

PREFIX = "$mq9.AI."
LONGEST_WAIT = 4.5
"""Seconds a FETCH of a check waits; an answer may take so much longer."""
QUIET = 0.4
"""Seconds in which nothing comes where nothing may come."""
MAILBOX_TTL = 600
"""Seconds the mailboxes of a check live."""
SHOWN = 300
"""Characters of what came that a failure shows."""
OLDER = ("MAILBOX.QUERY", "MAILBOX.LIST", "MAILBOX.DELETE", "MAILBOX.MSG", "INBOX", "BROADCAST", "PUBLIC")
"""How subjects of the older editions begin, whose texts know no ``error`` in replies."""

# Decorators of checks, by the text that their sentences are from.


def current(id: str, sentence: str) -> Callable[[Run], Run]:
    """Add a check of the current edition."""
    return SUITE.check(id, Level.MUST, "mq9 protocol, current edition", sentence)


def first(id: str, sentence: str) -> Callable[[Run], Run]:
    """Add a check of the first edition."""
    return SUITE.check(id, Level.MUST, "mq9 protocol, first edition", sentence)


def second(id: str, sentence: str) -> Callable[[Run], Run]:
    """Add a check of the second edition."""
    return SUITE.check(id, Level.MUST, "mq9 core features, second edition", sentence)


def design(id: str, sentence: str, level: Level = Level.MUST) -> Callable[[Run], Run]:
    """Add a check of the questions and answers."""
    return SUITE.check(id, level, "mq9 protocol design, questions and answers", sentence)


def own(id: str, rule: str, sentence: str) -> Callable[[Run], Run]:
    """Add a check of a rule of this project."""
    return SUITE.check(id, Level.OWN, f"docs/protocol.md {rule}", sentence)


Body = bytes | Mapping[str, Any]
Reply = dict[str, Any]


class BrokerSession:
    """A check's own connections, mailboxes and agents at one broker."""

    def __init__(self, url: str, transcript: Transcript, seconds: float, options: Mapping[str, Any]) -> None:
        """``seconds`` is the timeout of what has to come; ``options`` go to :func:`nats.connect`. Use :meth:`open`."""
        self.url = url
        self.transcript = transcript
        self.seconds = seconds
        self.options = options
        self.refusals: list[str] = []
        """What the broker said to connections of this session in ``-ERR``."""
        self.prefix = f"conformance.{secrets.token_hex(6)}"
        self._names = 0
        self._silent: set[str] = set()
        self._stack = AsyncExitStack()
        self.client: Client

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, url: str, transcript: Transcript, seconds: float = 10.0, options: Mapping[str, Any] | None = None
    ) -> AsyncIterator["BrokerSession"]:
        """Make a session; its agents are unregistered and its connections closed at the end."""
        session = cls(url, transcript, seconds, options or {})
        async with session._stack:
            session.client = await session.connect()
            yield session

    async def connect(self, **options: Any) -> Client:
        """Open a connection that ends with the check."""

        async def refused(error: Exception) -> None:
            self.refusals.append(str(error))
            self.transcript.came("-ERR", str(error))

        # With 1, nats-py tries twice and then gives up; with 0 it never does.
        once = {"allow_reconnect": False, "max_reconnect_attempts": 1, "reconnect_time_wait": 0}
        chosen: dict[str, Any] = {
            "error_cb": refused,
            "connect_timeout": self.seconds,
            **once,
            **self.options,
            **options,
        }
        try:
            client = await nats.connect(self.url, **chosen)
        except (NatsError, OSError, TimeoutError) as error:
            reason = self.refusals[-1] if self.refusals else str(error)
            raise CannotTryError(f"no connection to the broker: {reason}") from error
        self._stack.push_async_callback(_close, client)
        return client

    def new_name(self, last: str = "") -> str:
        """Return an address that nobody else uses."""
        self._names += 1
        return f"{self.prefix}.{self._names}{'.' if last else ''}{last}"

    # Requests.

    async def request(
        self, verb: str, body: Body = b"", headers: Mapping[str, str] | None = None, client: Client | None = None
    ) -> Reply:
        """Make a request, and return the reply, whatever it says."""
        reply = await self.request_any(verb, body, headers, client)
        if not isinstance(reply, dict):
            raise CheckFailedError(f"{verb}: expected an object, got {json.dumps(reply)[:SHOWN]}")
        if verb.startswith(OLDER) or (
            verb == "MAILBOX.CREATE" and isinstance(body, dict) and {"type", "public"} & set(body)
        ):
            reply.setdefault("error", "")
        error = reply.get("error")
        if not isinstance(error, str):
            raise CheckFailedError(f"{verb}: expected a string as error, got {error!r}")
        if error.startswith("unknown subject"):
            raise NotOfferedError(f"{verb}: {error}")
        return reply

    async def request_any(
        self, verb: str, body: Body = b"", headers: Mapping[str, str] | None = None, client: Client | None = None
    ) -> Any:
        """Make a request, and return any JSON that is answered."""
        payload = _bytes(body)
        self.transcript.sent(_line(verb, headers), payload)
        try:
            answer = await (client or self.client).request(
                PREFIX + verb, payload, timeout=self.seconds + LONGEST_WAIT, headers=dict(headers) if headers else None
            )
        except NoRespondersError:
            raise NotOfferedError(f"nobody answers {PREFIX}{verb}") from None
        except (NatsTimeoutError, TimeoutError):
            raise CheckFailedError(f"{verb}: no answer within {self.seconds + LONGEST_WAIT:g} s") from None
        self.transcript.came(f"reply to {verb}", answer.data)
        try:
            return json.loads(answer.data)
        except ValueError:
            raise CheckFailedError(f"{verb}: the answer is no JSON: {_text(answer.data)}") from None

    async def ask(
        self, verb: str, body: Body = b"", headers: Mapping[str, str] | None = None, client: Client | None = None
    ) -> Reply:
        """Make a request that has to succeed."""
        reply = await self.request(verb, body, headers, client)
        expect(reply["error"] == "", f"{verb}: expected success, got {reply['error']!r}")
        return reply

    async def refused(self, verb: str, body: Body = b"", headers: Mapping[str, str] | None = None) -> str:
        """Make a request that has to fail, and return why it did."""
        reply = await self.request(verb, body, headers)
        expect(reply["error"] != "", f"{verb}: expected an error, got {json.dumps(reply)[:SHOWN]}")
        return str(reply["error"])

    async def put(self, verb: str, payload: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Publish as the older editions do, which promise no answer; whatever is answered is not looked at.

        The first publish to a kind of subject asks for an answer, which shows whether anybody takes it at all.
        """
        kind = verb.partition(".")[0]
        self.transcript.sent(_line(verb, headers), payload)
        chosen = dict(headers) if headers else None
        if kind in self._silent:
            await self.client.publish(PREFIX + verb, payload, headers=chosen)
            await flush(self.client)
            return
        try:
            await self.client.request(PREFIX + verb, payload, timeout=2, headers=chosen)
        except NoRespondersError:
            raise NotOfferedError(f"nobody takes {PREFIX}{verb}") from None
        except (NatsTimeoutError, TimeoutError):
            self._silent.add(kind)

    # Mailboxes and messages.

    async def create(self, **fields: Any) -> Reply:
        """Create a mailbox that ends by itself, and return the reply."""
        return await self.ask("MAILBOX.CREATE", _given({"name": self.new_name(), "ttl": MAILBOX_TTL, **fields}))

    async def mailbox(self, *payloads: bytes, **fields: Any) -> str:
        """Create a mailbox that ends by itself, for the rest of the check, and return its address."""
        try:
            mailbox = (await self.create(**fields)).get("mail_address")
        except CheckFailedError as error:
            raise CannotTryError(f"no mailbox to try it with: {error}") from error
        if not isinstance(mailbox, str) or not mailbox:
            raise CannotTryError(f"no mailbox to try it with: CREATE: expected a mail_address, got {mailbox!r}")
        for payload in payloads:
            await self.send(mailbox, payload)
        return mailbox

    async def send(
        self, mailbox: str, payload: bytes = b"", headers: Mapping[str, str] | None = None, client: Client | None = None
    ) -> int:
        """Send a message, and return its number."""
        msg_id = (await self.ask(f"MSG.SEND.{mailbox}", payload, headers, client)).get("msg_id")
        if not isinstance(msg_id, int) or isinstance(msg_id, bool):
            raise CheckFailedError(f"SEND: expected a whole number as msg_id, got {msg_id!r}")
        return msg_id

    async def fetch(
        self,
        mailbox: str,
        group: str | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        client: Client | None = None,
        **fields: Any,
    ) -> list[Reply]:
        """Fetch, from the oldest message and without a wait unless the fields say otherwise."""
        asked = _given({"max_wait_ms": 0, **(config or {})})
        body = _given({"group_name": group, "deliver": "earliest", **fields, "config": asked})
        return _messages("FETCH", await self.ask(f"MSG.FETCH.{mailbox}", body, client=client))

    async def ack(self, mailbox: str, group: str, msg_id: int, client: Client | None = None) -> Reply:
        """Acknowledge a message."""
        body = {"group_name": group, "mail_address": mailbox, "msg_id": msg_id}
        return await self.ask(f"MSG.ACK.{mailbox}", body, client=client)

    async def query(self, mailbox: str, **fields: Any) -> list[Reply]:
        """Look at what a mailbox holds."""
        return _messages("QUERY", await self.ask(f"MSG.QUERY.{mailbox}", fields))

    async def until(self, is_true: Callable[[], Awaitable[bool]], what: str) -> None:
        """Ask again until it holds; a failure says what did not."""
        end = time.monotonic() + self.seconds
        while not await is_true():
            if time.monotonic() > end:
                raise CheckFailedError(f"expected within {self.seconds:g} s: {what}")
            await asyncio.sleep(0.05)

    async def is_gone(self, mailbox: str) -> bool:
        """Whether the broker says that there is no such mailbox."""
        reply = await self.request(f"MSG.QUERY.{mailbox}", {})
        return bool(reply["error"] == f"mailbox {mailbox} does not exist")

    async def register(self, card: Mapping[str, Any]) -> Reply:
        """Register an agent until the end of the check."""
        body = json.dumps({"mailbox": card["mailbox"]}).encode()
        self._stack.push_async_callback(self._unregister, body)
        return await self.ask("AGENT.REGISTER", card)

    async def _unregister(self, body: bytes) -> None:
        with contextlib.suppress(NatsError, TimeoutError):
            await self.client.request(f"{PREFIX}AGENT.UNREGISTER", body, self.seconds)

    # Subscriptions.

    async def subscribe(self, subject: str, queue: str = "", client: Client | None = None) -> Subscription:
        """Subscribe, and wait until the broker has the subscription."""
        client = client or self.client
        self.transcript.sent(f"SUB {PREFIX}{subject} {queue}".rstrip())
        subscription = await client.subscribe(PREFIX + subject, queue=queue)
        await flush(client)
        return subscription

    async def pushes(self, subscription: Subscription, count: int) -> list[Msg]:
        """Return the next so many messages."""
        got: list[Msg] = []
        try:
            async with asyncio.timeout(self.seconds):
                while len(got) < count:
                    message = await subscription.next_msg(timeout=None)
                    self.transcript.came(f"MSG {message.subject}", message.data)
                    got.append(message)
        except TimeoutError:
            shown = [message.data[:40] for message in got]
            raise CheckFailedError(
                f"{subscription.subject}: expected {count} messages within {self.seconds:g} s, got {shown}"
            ) from None
        return got

    async def bodies(self, subscription: Subscription, count: int) -> list[bytes]:
        """Return the payloads of the next so many messages."""
        return [message.data for message in await self.pushes(subscription, count)]

    async def silent(self, *subscriptions: Subscription) -> None:
        """Expect that nothing comes for a moment."""
        await asyncio.sleep(QUIET)
        for subscription in subscriptions:
            if subscription.pending_msgs:
                message = await subscription.next_msg(timeout=1)
                raise CheckFailedError(
                    f"{subscription.subject}: expected nothing, got {message.subject} {_text(message.data)}"
                )


def equal(what: str, got: object, wanted: object) -> None:
    """Fail the check unless both are the same."""
    expect(got == wanted, f"{what}: expected {wanted!r:.{SHOWN}}, got {got!r:.{SHOWN}}")


async def flush(client: Client) -> None:
    """Wait until the broker has all that the client sent; the first PING passes what nats-py still holds back."""
    await client.flush()
    await client.flush()


async def _close(client: Client) -> None:
    if not client.is_closed:
        await client.close()


def payload_of(message: Mapping[str, Any]) -> bytes:
    """Return the bytes of a message in a reply: base64, or a list of numbers; the text of mq9 does not say which."""
    payload = message.get("payload")
    if isinstance(payload, list):
        return bytes(payload)
    if not isinstance(payload, str):
        raise CheckFailedError(f"message {message.get('msg_id')}: expected a payload, got {payload!r}")
    try:
        return base64.b64decode(payload, validate=True)
    except ValueError:
        return payload.encode()


def payloads(messages: Iterable[Mapping[str, Any]]) -> list[bytes]:
    """Return the bytes of messages in a reply."""
    return [payload_of(message) for message in messages]


def ids(messages: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the numbers of messages in a reply."""
    return [message.get("msg_id") for message in messages]


def _messages(verb: str, reply: Reply) -> list[Reply]:
    messages = reply.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise CheckFailedError(f"{verb}: expected messages as a list of objects, got {json.dumps(messages)[:SHOWN]}")
    return messages


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _bytes(body: Body) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def _line(verb: str, headers: Mapping[str, str] | None) -> str:
    shown = "".join(f" {name}:{value}" for name, value in (headers or {}).items())
    return f"{PREFIX}{verb[:SHOWN]}{shown[:SHOWN]}"


def _text(payload: bytes) -> str:
    text = payload[:SHOWN].decode(errors="replace")
    return text if len(payload) <= SHOWN else f"{text}… ({len(payload)} bytes)"


def duplicates(values: Sequence[Any]) -> list[Any]:
    """Return what is there more than once."""
    return sorted({value for value in values if values.count(value) > 1})
