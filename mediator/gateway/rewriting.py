"""One client's connection through the gateway: what is changed on the way, and what is known of it (E6, E7, N10).

A subscription to stored mail goes to nats-server under a private subject, with an OPEN for the service behind it on
the same connection; the client sees its own subject only. A PONG of the server waits until the service has answered
for all subscriptions before it, so who has flushed knows. After pushes the client gets a PING of ours, whose PONG says
that it has read them. Pure: bytes in, bytes out, and told to an :class:`Owner`.
"""

import base64
import json
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import orjson

from mediator.gateway import inboxes
from mediator.gateway.frames import ClientStream, ServerStream
from mediator.gateway.inboxes import Inboxes
from mediator.nats import control, pushwire, stored

MAX_ERROR: Final = 512
"""Characters of an error that a client is told."""
_PING: Final = b"PING\r\n"
_PONG: Final = b"PONG\r\n"
_NORMAL: Final = b"normal"
_OPEN_SUBJECT: Final = f"$mq9.AI.{pushwire.OPEN}"
_STREAM_VERBS: Final = ("API.STREAM.CREATE.", "API.STREAM.UPDATE.", "API.STREAM.RESTORE.")
_NOT_FOR_CLIENTS: Final = (
    b"$mq9.AI.PUSH.",
    # nats-server answers some of these for the account of whoever asks, with all that its clients subscribe to.
    b"$SYS.",
    *(each.encode() for each in (pushwire.PRIVATE, control.ROOT)),
)
_TOO_MANY: Final = "maximum subscriptions exceeded"


def new_token() -> str:
    """Make a name that cannot be guessed: 130 random bits in lowercase base32."""
    return base64.b32encode(secrets.token_bytes(17)).decode().lower()[:26]


@dataclass(slots=True, eq=False)
class Subscription:
    """One subscription of a client to stored mail."""

    token: str
    sid: bytes
    subject: str
    queue: str
    session: "Session"
    number: int = 0
    """Its place among all that the connection had."""
    owner: str = ""
    """The instance that serves it; empty: none has answered yet."""
    since: float = 0.0
    """When it was made, as the gateway's clock has it."""
    asked: float = 0.0
    """When an OPEN was sent last."""
    pause: float = 0.0
    """Seconds until the next."""
    pushed: int = 0
    confirmed: int = 0
    counted_from: int = 0
    """What was pushed when the present owner was asked."""
    most: int = 0
    """How many messages the client takes in all; 0: no end."""
    after: dict[bytes, bytes] = field(default_factory=dict)
    """The msg_id of the last push, by its lane."""


class Owner(Protocol):
    """Who runs sessions, and tells the service of their subscriptions."""

    def subscribed(self, subscription: Subscription) -> None:
        """Learn of a subscription; its OPEN is on the way. Calls :meth:`Session.answered`, at the latest in a while."""

    def confirmed(self, subscription: Subscription) -> None:
        """Learn that ``confirmed`` has grown."""

    def ended(self, subscription: Subscription, how: str) -> None:
        """Learn that a subscription is over, and how, as :class:`pushwire.Signs` has it."""


@dataclass(frozen=True, slots=True)
class Front:
    """What clients are told of where they are connected, and what each of them may have."""

    gateway: str
    host: str
    port: int
    tls: bool
    max_subscriptions: int


class Session:
    """The state of one connection."""

    def __init__(
        self, owner: Owner, inboxes: Inboxes, front: Front, client_ip: str, token: Callable[[], str] = new_token
    ) -> None:
        self._owner = owner
        self._inboxes = inboxes
        self._front = front
        self._client_ip = client_ip
        self._token = token
        self._up = ClientStream(self)
        self._down = ServerStream(self)
        self._to_server: list[bytes] = []
        self._to_client: list[bytes] = []
        self._by_sid: dict[bytes, Subscription] = {}
        """Those whose sids the client may not use again: it has not ended them, nor had all that it asked for."""
        self._made = 0
        self._unanswered: dict[Subscription, None] = {}
        """Those that the service has not answered yet, in their order."""
        self._held: deque[list[int]] = deque()
        """PONGs that wait: for the subscription with this number and all before it, and how many do."""
        self._unconfirmed: set[Subscription] = set()
        self._pings: deque[dict[Subscription, int] | Callable[[], None] | None] = deque()
        """What the client's next PONGs answer: None is a PING of the server, else one of ours, and what it is for."""
        self._pinging = False
        self._verbose = True
        self._commands = 0
        self._results = 0
        self._own_commands: deque[int] = deque()
        self.changed: Callable[[], None] = _nothing
        """Called when there is something to write that no bytes have brought about."""
        self.resume: Callable[[], None] = _nothing
        """Called when reading from the client can go on."""
        self.waiting = False
        """Whether nothing more of what the client writes can be read for now."""
        self.account = ""
        """The client's account, once the server has named it."""
        self.connected = False
        """Whether the client has sent its CONNECT."""
        self.greeted = False
        """Whether the server has sent its INFO."""

    @property
    def subscriptions(self) -> int:
        """How many subscriptions to stored mail there are."""
        return len(self._by_sid)

    @property
    def held(self) -> int:
        """How many bytes the client is not told before the payload that is on its way has come."""
        return self._down.held

    # Bytes.

    def from_client(self, data: bytes) -> None:
        """Take what the client wrote; raises :class:`ProtocolViolationError`."""
        self._to_server += self._up.feed(data)
        if self._up.violation is not None:
            raise self._up.violation

    def from_server(self, data: bytes) -> None:
        """Take what the server wrote; raises :class:`ProtocolViolationError`."""
        self._to_client += self._down.feed(data)
        if self._down.violation is not None:
            raise self._down.violation
        self._ask_for_confirmation()

    def take_to_server(self) -> bytes:
        """Return what is to be written to the server."""
        return _taken(self._to_server)

    def take_to_client(self) -> bytes:
        """Return what is to be written to the client."""
        return _taken(self._to_client)

    # What the service says of a subscription, and the end.

    def open_again(self, subscription: Subscription) -> None:
        """Ask for an owner once more."""
        self._insert_command(self._open_frame(subscription))
        self.changed()

    def answered(self, subscription: Subscription) -> None:
        """Release the PONGs that wait for a subscription: the service has accepted it, or took too long."""
        if subscription in self._unanswered:
            self._tell(self._released_by(subscription))
            self.changed()

    def probe(self, answered: Callable[[], None]) -> None:
        """Send the client a PING of ours; ``answered`` is called when its PONG comes."""
        self._pings.append(answered)
        self._tell(_PING)
        self.changed()

    def refuse(self, subscription: Subscription, text: str) -> None:
        """End a subscription that the service does not take."""
        if self._by_sid.get(subscription.sid) is subscription:
            self._tell(self._refused(subscription, text))
            self.changed()
        else:
            self.answered(subscription)

    def close(self) -> None:
        """End all subscriptions, since the connection is over."""
        self._inboxes.leave(self)
        for subscription in {*self._by_sid.values(), *self._unconfirmed, *self._awaited()}:
            self._owner.ended(subscription, "broken")
        self._by_sid.clear()
        self._unanswered.clear()
        self._held.clear()
        self._unconfirmed.clear()
        self._pings.clear()

    # What the client says.

    def connect(self, frame: bytes, options: bytes) -> bytes:
        """Learn the client's options; the server judges them."""
        self.connected = True
        try:
            found = orjson.loads(options)
        except orjson.JSONDecodeError:
            return frame
        # A client that does not say is verbose for nats-server.
        self._verbose = not isinstance(found, dict) or found.get("verbose", True) is not False
        self._up.count_publishes = self._verbose
        return self._command(frame)

    def subscribe(self, frame: bytes, subject: bytes, queue: bytes, sid: bytes) -> bytes | None:
        """Make a subscription to stored mail private; hand another one on."""
        text = subject.decode("utf-8", "replace")
        found = stored.classify(text)
        if isinstance(found, stored.Refused):
            self._tell(_error(found.text))
            return b""
        first = self._by_sid.get(sid)
        if first is not None:
            # As with nats-server, the first one stays. The client's subject must not reach the server under this sid.
            return self._command(_private_frame(first))
        if isinstance(found, stored.Plain):
            if inboxes.may_match(text):
                allowed = self._inboxes.claim(self, sid, text, queue.decode("utf-8", "replace"))
                self.waiting = allowed is None
                if self.waiting:
                    return None
                if not allowed:
                    self._tell(_error(stored.violation(text)))
                    return b""
            return self._command(frame)
        if len(self._by_sid) >= self._front.max_subscriptions:
            self._tell(_error(_TOO_MANY))
            return b""
        self._made += 1
        made = Subscription(self._token(), sid, text, queue.decode("utf-8", "replace"), self, self._made)
        self._by_sid[sid] = made
        self._unanswered[made] = None
        self._owner.subscribed(made)
        return self._command(_private_frame(made)) + self._own_command(self._open_frame(made))

    def unsubscribe(self, frame: bytes, sid: bytes, most: int) -> bytes:
        """End a subscription, now or later."""
        subscription = self._by_sid.get(sid)
        if subscription is None:
            # One that ends by itself has had its answer then, and the gateway does not count those.
            self._inboxes.release(self, sid)
            return self._command(frame)
        subscription.most = most
        if not most:
            self._tell(self._forget(subscription))
            self._owner.ended(subscription, "unsub")
        elif most <= subscription.pushed:
            del self._by_sid[sid]
            self._end_if_over(subscription)
            # The server may have counted fewer: it does not count what comes from another account.
            frame = b"UNSUB %b\r\n" % sid
        return self._command(frame)

    def pong(self, frame: bytes) -> bytes:
        """Keep the answer to a PING of ours."""
        confirms = self._pings.popleft() if self._pings else None
        if confirms is None:
            return frame
        if not isinstance(confirms, dict):
            confirms()
            return b""
        self._pinging = False
        for subscription, count in confirms.items():
            subscription.confirmed = count
            self._owner.confirmed(subscription)
            self._end_if_over(subscription)
        self._ask_for_confirmation()
        return b""

    def publishing(self) -> None:
        """Count a publish, which the server answers."""
        self._commands += 1

    def may_publish(self, subject: bytes, reply: bytes) -> bool | None:
        """Keep clients from speaking as a gateway or as the service does, and from storing requests and replies."""
        for each in (subject, reply):
            if each.startswith(_NOT_FOR_CLIENTS):
                self._refuse_publish(each)
                return False
        return None if _makes_a_stream(subject) else True

    def may_contain(self, subject: bytes, body: bytes | None) -> bool:
        """Refuse a stream that would take in requests, pushes or replies."""
        subjects = None if body is None else _stream_subjects(body)
        if subjects is not None and all(isinstance(each, str) and stored.stream_allowed(each) for each in subjects):
            return True
        self._refuse_publish(subject)
        return False

    # What the server says.

    def info(self, frame: bytes) -> bytes:
        """Tell of the gateway where the server tells of itself."""
        try:
            told: dict[str, Any] = orjson.loads(frame[5:])
        except orjson.JSONDecodeError:
            return frame
        self.greeted = True
        account = told.get("remote_account")
        if isinstance(account, str):
            self.account = account
        for name in ("connect_urls", "ws_connect_urls", "tls_available", "tls_verify", "tls_required"):
            told.pop(name, None)
        told |= {"host": self._front.host, "port": self._front.port, "client_ip": self._client_ip}
        if self._front.tls:
            told["tls_required"] = True
        return b"INFO %b \r\n" % orjson.dumps(told)

    def ping(self, frame: bytes) -> bytes:
        """Remember that the next PONG is the server's."""
        self._pings.append(None)
        return frame

    def succeeded(self, frame: bytes) -> bytes:
        """Keep the server's answers to commands of ours."""
        return b"" if self._answers_own() else frame

    def failed(self, frame: bytes) -> bytes:
        """Word a refusal with the subject that the client knows."""
        text = frame.strip()[4:].strip().strip(b"'").decode("utf-8", "replace")
        if text.startswith("Permissions Violation"):
            self._answers_own()
        if text == f'Permissions Violation for Publish to "{_OPEN_SUBJECT}"':
            refused = [each for each in self._by_sid.values() if not each.owner]
            for subscription in refused:
                self._owner.ended(subscription, "unsub")
            return b"".join([self._refused(each, stored.violation(each.subject)) for each in refused])
        for subscription in self._by_sid.values() if pushwire.PRIVATE in text else ():
            if subscription.token in text:
                self._owner.ended(subscription, "unsub")
                return _error(stored.violation(subscription.subject)) + self._forget(subscription)
        return frame

    def flushed(self, frame: bytes) -> bytes:
        """Hold a PONG until all subscriptions before it are answered, also those that came behind its PING (N10)."""
        if not self._unanswered:
            return frame
        if self._held and self._held[-1][0] == self._made:
            self._held[-1][1] += 1
        else:
            self._held.append([self._made, 1])
        return b""

    def pushed(self, token: bytes, sid: bytes, msg_id: bytes | None, lane: bytes | None) -> bool:
        """Count a push, and remember how far it goes; drop it if its subscription has ended."""
        subscription = self._by_sid.get(sid)
        if subscription is None or subscription.token != token.decode():
            return False
        subscription.pushed += 1
        self._unconfirmed.add(subscription)
        if msg_id is not None:
            subscription.after[lane or _NORMAL] = msg_id
        if subscription.pushed == subscription.most:
            del self._by_sid[sid]
            self._insert_command(b"UNSUB %b\r\n" % sid)
        return True

    # Inside.

    def _open_frame(self, subscription: Subscription) -> bytes:
        after = {lane.decode(): int(msg_id) for lane, msg_id in subscription.after.items()}
        asked = pushwire.Open(self._front.gateway, subscription.token, subscription.subject, subscription.queue, after)
        body = pushwire.pack(asked)
        return b"PUB %b %d\r\n%b\r\n" % (_OPEN_SUBJECT.encode(), len(body), body)

    def _ask_for_confirmation(self) -> None:
        if self._unconfirmed and not self._pinging:
            self._pinging = True
            self._pings.append({each: each.pushed for each in self._unconfirmed})
            self._unconfirmed.clear()
            self._to_client.append(self._down.insert(_PING))

    def _forget(self, subscription: Subscription) -> bytes:
        """End a subscription, and return the PONGs that waited for it; unconfirmed pushes count as not received."""
        del self._by_sid[subscription.sid]
        self._unconfirmed.discard(subscription)
        for confirms in self._pings:
            if isinstance(confirms, dict):
                confirms.pop(subscription, None)
        return self._released_by(subscription)

    def _refused(self, subscription: Subscription, text: str) -> bytes:
        """End a subscription, and return what to tell the client."""
        self._insert_command(b"UNSUB %b\r\n" % subscription.sid)
        return _error(text) + self._forget(subscription)

    def _released_by(self, subscription: Subscription) -> bytes:
        """Return the PONGs that waited for this subscription last."""
        self._unanswered.pop(subscription, None)
        count = 0
        while self._held and not (self._unanswered and next(iter(self._unanswered)).number <= self._held[0][0]):
            count += self._held.popleft()[1]
        return _PONG * count

    def _end_if_over(self, subscription: Subscription) -> None:
        """End a subscription whose client has read all that it asked for."""
        if 0 < subscription.most <= subscription.confirmed:
            # Pushes may come before the answer does.
            self._tell(self._released_by(subscription))
            self._owner.ended(subscription, "unsub")

    def _awaited(self) -> set[Subscription]:
        return {each for confirms in self._pings if isinstance(confirms, dict) for each in confirms}

    def _command(self, frame: bytes) -> bytes:
        """Count a command that the server answers if the client is verbose."""
        self._commands += 1
        return frame

    def _own_command(self, frame: bytes) -> bytes:
        if self._verbose:
            self._own_commands.append(self._commands)
        return self._command(frame)

    def _insert_command(self, frame: bytes) -> None:
        self._to_server.append(self._up.insert(self._own_command(frame)))

    def _answers_own(self) -> bool:
        """Take note that the server has answered a command; say whether it was one of ours."""
        number = self._results
        self._results += 1
        if self._own_commands and self._own_commands[0] == number:
            self._own_commands.popleft()
            return True
        return False

    def _tell(self, frames: bytes) -> None:
        """Write frames to the client; not to be used while frames of the server are being read, which return theirs."""
        if frames:
            self._to_client.append(self._down.insert(frames))

    def _refuse_publish(self, subject: bytes) -> None:
        self._tell(_error(f'Permissions Violation for Publish to "{subject.decode("utf-8", "replace")}"'))


def _nothing() -> None:
    """Write nothing: the session has no connection."""


def _taken(parts: list[bytes]) -> bytes:
    taken = parts[0] if len(parts) == 1 else b"".join(parts)
    parts.clear()
    return taken


def _error(text: str) -> bytes:
    return b"-ERR '%b'\r\n" % " ".join(text[:MAX_ERROR].split()).encode("utf-8", "replace")


def _private_frame(subscription: Subscription) -> bytes:
    subject = f"{pushwire.PRIVATE}{subscription.token}.{stored.delivered_on(subscription.subject)}"
    return b"SUB %b %b\r\n" % (subject.encode(), subscription.sid)


def _makes_a_stream(subject: bytes) -> bool:
    """Whether this asks JetStream, in whatever domain, for a stream."""
    words = subject.decode("utf-8", "replace").split(".", 2)
    if words[0] != "$JS" or len(words) < 3:
        return False
    return any(rest.startswith(_STREAM_VERBS) for rest in (f"{words[1]}.{words[2]}", words[2]))


def _stream_subjects(body: bytes) -> list[object] | None:
    """Return all subjects that nats-server may find in a stream's configuration; None: nobody knows what it finds.

    It takes names in any case, keeps what is said twice of one object, and reads what is no UTF-8.
    """
    found: list[object] = []

    def note(pairs: list[tuple[str, object]]) -> None:
        for name, value in pairs:
            if name.casefold() == "subjects":
                found.extend(value if isinstance(value, list) else [value])

    try:
        json.loads(body.decode("utf-8", "replace"), object_pairs_hook=note)
    except (ValueError, RecursionError):
        return None
    return [each for each in found if each is not None]
