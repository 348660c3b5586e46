"""One client's connection through the gateway: which frames are changed, and the state this needs (E6, E7, N10).

A subscription to stored mail goes to nats-server under a secret subject, followed by an OPEN for the service on the
same connection; the client sees only its own subject. A PONG of the server waits until the service has replied for all
subscriptions before it, so a client that has flushed knows the outcome. After pushes the gateway sends the client a
PING, whose PONG confirms that the client has read them. Pure: bytes in, bytes out, and calls to a
:class:`SubscriptionRegistry`.
"""

import base64
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import orjson

from mediator.nats import frames, subjects
from mediator.push import protocol
from mediator.push.gateway import inboxes, publish_policy
from mediator.push.gateway.inboxes import InboxClaims
from mediator.push.gateway.streams import ClientStream, ServerStream

_NORMAL: Final = b"normal"
_OPEN_SUBJECT: Final = f"$mq9.AI.{subjects.OPEN}"
_TOO_MANY: Final = "maximum subscriptions exceeded"


def new_token() -> str:
    """Return a name that cannot be guessed: 130 random bits in lowercase base32."""
    return base64.b32encode(secrets.token_bytes(17)).decode().lower()[:26]


@dataclass(slots=True, eq=False)
class GatewaySubscription:
    """One subscription of a client to stored mail."""

    token: str
    sid: bytes
    subject: str
    queue: str
    session: "GatewaySession"
    frame: bytes = b""
    """The SUB that goes to nats-server in place of the client's."""
    number: int = 0
    """Its place among the subscriptions of the connection, from 1."""
    owner: str = ""
    """The instance that serves it; empty: none has replied yet."""
    since: float = 0.0
    """When it was made, by the gateway's clock."""
    asked: float = 0.0
    """When the last OPEN was sent."""
    pause: float = 0.0
    """Seconds from one OPEN to the next."""
    pushed: int = 0
    confirmed: int = 0
    counted_from: int = 0
    """How many messages were pushed before the present owner was asked."""
    most: int = 0
    """How many messages the client takes in all; 0: no limit."""
    after: dict[bytes, bytes] = field(default_factory=dict)
    """The msg_id of the last push, by lane."""


class SubscriptionRegistry(Protocol):
    """Keeps the subscriptions of all sessions, and reports them to the service."""

    def subscribed(self, subscription: GatewaySubscription) -> None:
        """Add a subscription whose OPEN is on the way; :meth:`GatewaySession.answered` is called when it is time."""

    def confirmed(self, subscription: GatewaySubscription) -> None:
        """Take note that ``confirmed`` has grown."""

    def ended(self, subscription: GatewaySubscription, how: str) -> None:
        """Remove a subscription; ``how`` as in :class:`protocol.Heartbeat`."""


@dataclass(frozen=True, slots=True)
class PublicAddress:
    """What INFO tells clients about the gateway, and how many subscriptions each connection may have."""

    gateway: str
    host: str
    port: int
    tls: bool
    max_subscriptions: int


class GatewaySession:
    """The state of one connection."""

    def __init__(
        self,
        registry: SubscriptionRegistry,
        inboxes: InboxClaims,
        public: PublicAddress,
        client_ip: str,
        token: Callable[[], str] = new_token,
    ) -> None:
        self._registry = registry
        self._inboxes = inboxes
        self._public = public
        self._client_ip = client_ip
        self._token = token
        self._up = ClientStream(self)
        self._down = ServerStream(self)
        self._to_server: list[bytes] = []
        self._to_client: list[bytes] = []
        self._by_sid: dict[bytes, GatewaySubscription] = {}
        """Subscriptions whose sids are in use: not ended by the client, nor by the maximum of messages."""
        self._made = 0
        self._unanswered: dict[GatewaySubscription, None] = {}
        """Subscriptions that the service has not replied to yet, in their order."""
        self._held_pongs: deque[list[int]] = deque()
        """PONGs that wait: up to which number the subscriptions must have their reply, and how many PONGs."""
        self._unconfirmed: set[GatewaySubscription] = set()
        self._pings: deque[dict[GatewaySubscription, int] | Callable[[], None] | None] = deque()
        """What the client's next PONGs answer: None is a PING of the server, anything else is one of the gateway's."""
        self._pinging = False
        self._verbose = True
        self._commands = 0
        self._results = 0
        self._own_commands: deque[int] = deque()
        self.changed: Callable[[], None] = _nothing
        """Called when there is something to write that does not follow from bytes of the client or the server."""
        self.resume: Callable[[], None] = _nothing
        """Called when reading from the client can continue."""
        self.waiting = False
        """Whether nothing more can be read from the client for now."""
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

    def take(self) -> tuple[bytes, bytes, int]:
        """Return what is to be written to the server and to the client, and how many bytes for the client must wait.

        The latter wait for the end of a payload.
        """
        return _taken(self._to_server), _taken(self._to_client), self._down.held

    # Calls from the registry, and the end.

    def open_again(self, subscription: GatewaySubscription) -> None:
        """Send the OPEN again."""
        self._insert_command(self._open_frame(subscription))
        self.changed()

    def answered(self, subscription: GatewaySubscription) -> None:
        """Release the PONGs that wait for a subscription: the service accepted it, or took too long."""
        if subscription in self._unanswered:
            self._write_client(self._released_by(subscription))
            self.changed()

    def probe(self, answered: Callable[[], None]) -> None:
        """Send the client a PING; ``answered`` is called when its PONG comes."""
        self._pings.append(answered)
        self._write_client(frames.PING)
        self.changed()

    def refuse(self, subscription: GatewaySubscription, text: str) -> None:
        """End a subscription that the service refused."""
        if self._by_sid.get(subscription.sid) is subscription:
            self._write_client(self._refused(subscription, text))
            self.changed()
        else:
            self.answered(subscription)

    def close(self) -> None:
        """End all subscriptions, since the connection is over."""
        self._inboxes.leave(self)
        for subscription in {*self._by_sid.values(), *self._unconfirmed, *self._awaited()}:
            self._registry.ended(subscription, "broken")
        self._by_sid.clear()
        self._unanswered.clear()
        self._held_pongs.clear()
        self._unconfirmed.clear()
        self._pings.clear()

    # Frames from the client.

    def connect(self, frame: bytes, options: bytes) -> bytes:
        """Read the client's options; the server checks them."""
        self.connected = True
        try:
            found = orjson.loads(options)
        except orjson.JSONDecodeError:
            return frame
        # For nats-server, verbose is the default.
        self._verbose = not isinstance(found, dict) or found.get("verbose", True) is not False
        self._up.count_publishes = self._verbose
        return self._command(frame)

    def subscribe(self, frame: bytes, subject: bytes, queue: bytes, sid: bytes) -> bytes | None:
        """Rewrite a subscription to stored mail; pass any other on."""
        text = subject.decode("utf-8", "replace")
        found = subjects.classify(text)
        if isinstance(found, subjects.RefusedSubject):
            self._write_client(frames.encode_error(found.text))
            return b""
        first = self._by_sid.get(sid)
        if first is not None:
            # As with nats-server, the first one stays. The client's subject must not reach the server under this sid.
            return self._command(first.frame)
        if isinstance(found, subjects.PlainSubject):
            if inboxes.may_match(text):
                allowed = self._inboxes.claim(self, sid, text, queue.decode("utf-8", "replace"))
                self.waiting = allowed is None
                if self.waiting:
                    return None
                if not allowed:
                    self._write_client(frames.encode_error(subjects.violation(text)))
                    return b""
            return self._command(frame)
        if len(self._by_sid) >= self._public.max_subscriptions:
            self._write_client(frames.encode_error(_TOO_MANY))
            return b""
        self._made += 1
        token = self._token()
        pattern = found.pattern if isinstance(found, subjects.BroadcastSubject) else text
        secret = frames.encode_subscribe(f"{subjects.PUSH}{token}.{pattern}".encode(), sid)
        made = GatewaySubscription(token, sid, text, queue.decode("utf-8", "replace"), self, secret, self._made)
        self._by_sid[sid] = made
        self._unanswered[made] = None
        self._registry.subscribed(made)
        return self._command(secret) + self._own_command(self._open_frame(made))

    def unsubscribe(self, frame: bytes, sid: bytes, most: int) -> bytes:
        """End a subscription, now or later."""
        subscription = self._by_sid.get(sid)
        if subscription is None:
            # With a maximum it ends by itself once its replies have come, which the gateway does not count.
            self._inboxes.release(self, sid)
            return self._command(frame)
        subscription.most = most
        if not most:
            self._write_client(self._forget(subscription))
            self._registry.ended(subscription, "unsub")
        elif most <= subscription.pushed:
            del self._by_sid[sid]
            self._end_if_over(subscription)
            # The server may have counted fewer: it does not count what comes from another account.
            frame = frames.encode_unsubscribe(sid)
        return self._command(frame)

    def pong(self, frame: bytes) -> bytes:
        """Take the PONG if it answers a PING of the gateway."""
        confirms = self._pings.popleft() if self._pings else None
        if confirms is None:
            return frame
        if not isinstance(confirms, dict):
            confirms()
            return b""
        self._pinging = False
        for subscription, count in confirms.items():
            subscription.confirmed = count
            self._registry.confirmed(subscription)
            self._end_if_over(subscription)
        self._ask_for_confirmation()
        return b""

    def publishing(self) -> None:
        """Count a publish, which the server answers with +OK."""
        self._commands += 1

    def may_publish(self, subject: bytes, reply: bytes) -> bool | None:
        """Check a publish by its subjects; see :mod:`.publish_policy`."""
        for each in (subject, reply):
            if not publish_policy.is_for_clients(each):
                self._refuse_publish(each)
                return False
        return None if publish_policy.makes_stream(subject) else True

    def may_contain(self, subject: bytes, body: bytes | None) -> bool:
        """Check a request for a stream by its configuration."""
        if body is not None and publish_policy.is_stream_allowed(body):
            return True
        self._refuse_publish(subject)
        return False

    # Frames from the server.

    def info(self, frame: bytes) -> bytes:
        """Describe the gateway in place of the server."""
        try:
            options: dict[str, Any] = orjson.loads(frame[5:])
        except orjson.JSONDecodeError:
            return frame
        self.greeted = True
        account = options.get("remote_account")
        if isinstance(account, str):
            self.account = account
        for name in ("connect_urls", "ws_connect_urls", "tls_available", "tls_verify", "tls_required"):
            options.pop(name, None)
        options |= {"host": self._public.host, "port": self._public.port, "client_ip": self._client_ip}
        if self._public.tls:
            options["tls_required"] = True
        return frames.encode_info(orjson.dumps(options))

    def ping(self, frame: bytes) -> bytes:
        """Take note that one of the client's next PONGs is for the server."""
        self._pings.append(None)
        return frame

    def succeeded(self, frame: bytes) -> bytes:
        """Drop a +OK that answers a command of the gateway."""
        return b"" if self._answers_own() else frame

    def failed(self, frame: bytes) -> bytes:
        """Name the client's own subject in a refusal."""
        text = frame.strip()[4:].strip().strip(b"'").decode("utf-8", "replace")
        if text.startswith("Permissions Violation"):
            self._answers_own()
        if text == f'Permissions Violation for Publish to "{_OPEN_SUBJECT}"':
            refused = [each for each in self._by_sid.values() if not each.owner]
            for subscription in refused:
                self._registry.ended(subscription, "unsub")
            return b"".join([self._refused(each, subjects.violation(each.subject)) for each in refused])
        for subscription in self._by_sid.values() if subjects.PUSH in text else ():
            if subscription.token in text:
                self._registry.ended(subscription, "unsub")
                return frames.encode_error(subjects.violation(subscription.subject)) + self._forget(subscription)
        return frame

    def flushed(self, frame: bytes) -> bytes:
        """Hold a PONG until all subscriptions so far have a reply, also those that came behind its PING (N10)."""
        if not self._unanswered:
            return frame
        if self._held_pongs and self._held_pongs[-1][0] == self._made:
            self._held_pongs[-1][1] += 1
        else:
            self._held_pongs.append([self._made, 1])
        return b""

    def pushed(self, token: bytes, sid: bytes, msg_id: bytes | None, lane: bytes | None) -> bool:
        """Count a push and note its msg_id; drop it if its subscription has ended."""
        subscription = self._by_sid.get(sid)
        if subscription is None or subscription.token != token.decode():
            return False
        subscription.pushed += 1
        self._unconfirmed.add(subscription)
        if msg_id is not None:
            subscription.after[lane or _NORMAL] = msg_id
        if subscription.pushed == subscription.most:
            del self._by_sid[sid]
            self._insert_command(frames.encode_unsubscribe(sid))
        return True

    # Inside.

    def _open_frame(self, subscription: GatewaySubscription) -> bytes:
        after = {lane.decode(): int(msg_id) for lane, msg_id in subscription.after.items()}
        request = protocol.OpenRequest(
            self._public.gateway, subscription.token, subscription.subject, subscription.queue, after
        )
        body = protocol.encode(request)
        return frames.encode_publish(_OPEN_SUBJECT.encode(), body)

    def _ask_for_confirmation(self) -> None:
        if self._unconfirmed and not self._pinging:
            self._pinging = True
            self._pings.append({each: each.pushed for each in self._unconfirmed})
            self._unconfirmed.clear()
            self._to_client.append(self._down.insert(frames.PING))

    def _forget(self, subscription: GatewaySubscription) -> bytes:
        """Remove a subscription, and return the PONGs that waited for it; unconfirmed pushes count as not received."""
        del self._by_sid[subscription.sid]
        self._unconfirmed.discard(subscription)
        for confirms in self._pings:
            if isinstance(confirms, dict):
                confirms.pop(subscription, None)
        return self._released_by(subscription)

    def _refused(self, subscription: GatewaySubscription, text: str) -> bytes:
        """Remove a subscription, and return the frames for the client."""
        self._insert_command(frames.encode_unsubscribe(subscription.sid))
        return frames.encode_error(text) + self._forget(subscription)

    def _released_by(self, subscription: GatewaySubscription) -> bytes:
        """Return the PONGs for which this was the last reply missing."""
        self._unanswered.pop(subscription, None)
        count = 0
        while self._held_pongs and not (
            self._unanswered and next(iter(self._unanswered)).number <= self._held_pongs[0][0]
        ):
            count += self._held_pongs.popleft()[1]
        return frames.PONG * count

    def _end_if_over(self, subscription: GatewaySubscription) -> None:
        """End a subscription whose client has read all messages that it asked for."""
        if 0 < subscription.most <= subscription.confirmed:
            # Pushes may come before the answer does.
            self._write_client(self._released_by(subscription))
            self._registry.ended(subscription, "unsub")

    def _awaited(self) -> set[GatewaySubscription]:
        return {each for confirms in self._pings if isinstance(confirms, dict) for each in confirms}

    def _command(self, frame: bytes) -> bytes:
        """Count a command that the server answers with +OK if the client is verbose."""
        self._commands += 1
        return frame

    def _own_command(self, frame: bytes) -> bytes:
        if self._verbose:
            self._own_commands.append(self._commands)
        return self._command(frame)

    def _insert_command(self, frame: bytes) -> None:
        self._to_server.append(self._up.insert(self._own_command(frame)))

    def _answers_own(self) -> bool:
        """Count an answer of the server; return whether it answers a command of the gateway."""
        number = self._results
        self._results += 1
        if self._own_commands and self._own_commands[0] == number:
            self._own_commands.popleft()
            return True
        return False

    def _write_client(self, frames: bytes) -> None:
        """Write frames to the client; not while frames of the server are being read, whose handlers return theirs."""
        if frames:
            self._to_client.append(self._down.insert(frames))

    def _refuse_publish(self, subject: bytes) -> None:
        self._write_client(
            frames.encode_error(f'Permissions Violation for Publish to "{subject.decode("utf-8", "replace")}"')
        )


def _nothing() -> None:
    """Do nothing: the session has no connection yet."""


def _taken(parts: list[bytes]) -> bytes:
    taken = parts[0] if len(parts) == 1 else b"".join(parts)
    parts.clear()
    return taken
