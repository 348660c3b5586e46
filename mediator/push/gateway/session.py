"""One client's connection through the gateway: which frames are changed, and the state this needs (E6, E7, N10).

A subscription to stored mail does not reach nats-server: it is asked once whether the client may subscribe, by a
subscription that ends at once, and the messages come from the service straight to the client's socket. A PONG of the
server waits until all subscriptions before it are decided, so a client that has flushed knows the outcome. After pushes
the gateway sends the client a PING, whose PONG confirms that the client has read them. Requests to the service take the
short way, in memory, where nobody can tell the difference (:mod:`.short_way`). Pure: bytes in, bytes out, and calls.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import orjson

from mediator.broker import Broker
from mediator.nats import frames, subjects
from mediator.nats.editions import python_client
from mediator.nats.frames import ProtocolViolationError
from mediator.push.gateway import inboxes, publish_policy
from mediator.push.gateway.commands import CommandCounter, UnfinishedCommands, UnfinishedInput
from mediator.push.gateway.identities import ClientIdentities, ClientIdentity
from mediator.push.gateway.inboxes import InboxClaims
from mediator.push.gateway.pings import ClientPings, ServerPings
from mediator.push.gateway.short_way import ReplySubscription, RequestHandler, ShortWay
from mediator.push.gateway.streams import ClientStream, ServerStream
from mediator.push.gateway.tenant_gate import TenantGate, TenantMembership
from mediator.push.subscriber import ServedSubscription

if TYPE_CHECKING:
    from mediator.push.gateway.subscriptions import Subscriptions

_IDENTIFY: Final = f"{subjects.API}{subjects.OPEN}".encode()
_PROBE: Final = f"{subjects.PUSH}gateway."
"""What the subject begins with on which nats-server is asked for the client's rights."""
_PROBE_SID: Final = b"mq9gateway"
_PROBE_VIOLATION: Final = subjects.violation(_PROBE).rstrip('"')
"""What the server's refusal of such a subscription begins with."""
_TOO_MANY: Final = "maximum subscriptions exceeded"


@dataclass(slots=True, eq=False)
class GatewaySubscription:
    """One subscription of a client to stored mail, and where its pushes go (:class:`PushTarget`)."""

    session: "GatewaySession"
    sid: bytes
    subject: str
    queue: str
    pattern: str
    """Its subject, with NATS's wildcards whatever the client wrote."""
    number: int = 0
    """Its place among the subscriptions of the connection, from 1."""
    permitted: bool = False
    """Whether nats-server has allowed it."""
    refused: bool = False
    """Whether the client was told that it may not have it."""
    since: float = 0.0
    """When it was made, by the gateway's clock."""
    pushed: int = 0
    confirmed: int = 0
    most: int = 0
    """How many messages the client takes in all; 0: no limit."""
    served: ServedSubscription | None = None
    """What serves it, once it is open."""

    @property
    def bare(self) -> bool:
        """Whether the client takes no headers."""
        return not self.session.headers

    @property
    def full(self) -> bool:
        """Whether the client reads too slowly for more pushes now; ``served`` is resumed when that ends."""
        return self.session.is_full(self)

    def push(self, pushes: Sequence[bytes]) -> None:
        """Write frames to the client, at most as many as it takes."""
        self.session.push(self, pushes)


@dataclass(frozen=True, slots=True)
class PublicAddress:
    """What INFO tells clients about the gateway, and how many subscriptions each connection may have."""

    host: str
    port: int
    tls: bool
    tls_verify: bool
    """Whether clients show a certificate of their own."""
    max_subscriptions: int


class GatewaySession:
    """The state of one connection."""

    def __init__(
        self,
        subscriptions: "Subscriptions",
        identities: ClientIdentities,
        find_door: Callable[[], RequestHandler | None],
        inboxes: InboxClaims,
        public: PublicAddress,
        client_ip: str,
        gate: TenantGate | None = None,
        broker: Broker | None = None,
        unfinished: UnfinishedCommands | None = None,
    ) -> None:
        """``find_door`` returns what takes requests the short way; None: nothing does now.

        Without a ``gate``, connections are not counted by tenant. ``broker`` is told which connections there are (F9).
        ``unfinished`` counts for all connections.
        """
        self.membership = TenantMembership(gate)
        self._subscriptions, self._identities = subscriptions, identities
        self._inboxes = inboxes
        self._public = public
        self._client_ip = client_ip
        self._broker = broker
        self._connection = ""
        """The name under which the service knows the connection; empty: it does not."""
        self._short_way = ShortWay(find_door, partial(inboxes.holds, self))
        self._up, self._down = ClientStream(self), ServerStream(self)
        self._to_server: list[bytes] = []
        self._to_client: list[bytes] = []
        self._by_sid: dict[bytes, GatewaySubscription] = {}
        """Subscriptions whose sids are in use: not ended by the client, nor by the maximum of messages."""
        self._server_pings = ServerPings()
        self._client_pings = ClientPings()
        self._blocked: set[GatewaySubscription] = set()
        """Subscriptions that have more to push when the client reads again."""
        self._commands = CommandCounter()
        self._input = UnfinishedInput(unfinished or UnfinishedCommands())
        self.name = ""
        """The client's name in its CONNECT."""
        self.headers = False
        """Whether the client takes headers."""
        self.tenant: str | None = None
        """None: the client is not identified."""
        self._asked = False
        """Whether the service was asked who the client is, for its subscriptions."""
        self._asking = ""
        """The token of the question whose answer opens the short way; nothing more is read until it comes."""
        self._question = b""
        self.full = False
        """Whether the client reads more slowly than it is written to."""
        self.unread_answers = 0
        """Bytes of answers that may wait for the client to read."""
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
        self.closed = False

    @property
    def subscriptions(self) -> int:
        """How many subscriptions to stored mail there are."""
        return len(self._by_sid)

    @property
    def python(self) -> bool:
        """Whether the client expects the shapes of ``robustmq-mq9-python`` (E11)."""
        return self.name.startswith(python_client.NAME)

    # Bytes.

    def from_client(self, data: bytes) -> None:
        """Take what the client wrote; raises :class:`ProtocolViolationError`."""
        self.waiting = False
        asking = self._asking
        passed = self._up.feed(data)
        self._to_server += passed
        if not self._input.count(self._up.unfinished, passed):
            raise ProtocolViolationError("Authorization Timeout")
        if self._asking is not asking:
            # Behind the frames that were read so far, so that its answer says that they have arrived.
            self._insert_command(self._question)
        if self._up.violation is not None:
            raise self._up.violation

    def hang_up(self) -> None:
        """Send the server what the client wrote last, if that still waits; the client has gone."""
        if self.waiting:
            self._short_way.close()
            with suppress(ProtocolViolationError):
                self.from_client(b"")

    def from_server(self, data: bytes) -> None:
        """Take what the server wrote; raises :class:`ProtocolViolationError`."""
        if self.connected:
            self._input.answered()
        self._to_client += self._down.feed(data)
        if self._down.violation is not None:
            raise self._down.violation

    def take(self) -> tuple[bytes, bytes, int]:
        """Return what is to be written to the server and to the client, and how many bytes for the client must wait.

        The latter wait for the end of a payload.
        """
        return _taken(self._to_server), _taken(self._to_client), self._down.held

    # Calls from the gateway, and the end.

    def identified(self, token: str, identity: ClientIdentity) -> None:
        """Take the service's answer, and open what waits for it."""
        first, self.tenant = self.tenant is None, identity.tenant
        if identity.account is not None:
            # The server has named it already, unless the client has sent no PING.
            self.membership.enter(identity.account)
        for subscription in list(self._by_sid.values()) if first else ():
            if subscription.permitted:
                self._subscriptions.open(subscription, identity.tenant)
        if token == self._asking:
            self._asking = ""
            name = self._short_way.open(identity.account, identity.user, identity.connection)
            if self._broker is not None and not self.closed:
                self._connection = name
                self._broker.connection_opened(name)
            self.resume()

    def unidentified(self, token: str) -> None:
        """Take note that the service does not answer; ask again for subscriptions, and send requests the long way."""
        if token == self._asking:
            self._asking = ""
            self._short_way.close()
            self.resume()
        elif self.tenant is None and not self.closed:
            self._insert_command(self._ask()[1])
            self.changed()

    def accept(self, subscription: GatewaySubscription, served: ServedSubscription) -> None:
        """Take what serves a subscription; release the PONGs that wait for it."""
        if self._by_sid.get(subscription.sid) is not subscription:
            served.close("broken")
            return
        subscription.served = served
        self.answered(subscription)
        served.start()

    def answered(self, subscription: GatewaySubscription) -> None:
        """Release the PONGs that wait for a subscription: it is open, or takes too long."""
        self._write_client(self._released_by(subscription))
        self.changed()

    def refuse(self, subscription: GatewaySubscription, reason: str) -> None:
        """End a subscription that the service refused."""
        if self._by_sid.get(subscription.sid) is subscription:
            self._write_client(self._refused(subscription, subjects.violation(subscription.subject, reason)))
        else:
            self._write_client(self._released_by(subscription))
        self.changed()

    def push(self, subscription: GatewaySubscription, pushes: Sequence[bytes]) -> None:
        """Write pushes of a subscription and ask for their confirmation; :class:`GatewaySubscription` describes it."""
        if not pushes or self._by_sid.get(subscription.sid) is not subscription:
            return
        if subscription.most:
            pushes = pushes[: subscription.most - subscription.pushed]
        subscription.pushed += len(pushes)
        self._client_pings.pushed(subscription)
        if subscription.pushed == subscription.most:
            del self._by_sid[subscription.sid]
        self._write_client(b"".join(pushes))
        self._ask_for_confirmation()
        self.changed()

    def is_full(self, subscription: GatewaySubscription) -> bool:
        """Return whether a subscription must wait until the client has read."""
        if self.full:
            self._blocked.add(subscription)
        return self.full

    def set_full(self, full: bool) -> None:
        """Take note that the client reads too slowly, or has read."""
        self.full = full
        if not full:
            blocked, self._blocked = self._blocked, set()
            for subscription in blocked:
                if subscription.served is not None:
                    subscription.served.resume()

    def probe(self, answered: Callable[[], None]) -> None:
        """Send the client a PING; ``answered`` is called when its PONG comes."""
        self._client_pings.probe(answered)
        self._write_client(frames.PING)
        self.changed()

    def answer(self, to: ReplySubscription, reply: bytes, data: bytes) -> bool:
        """Write the answer to a request; False: nobody waits for it any more."""
        taker = None if self.closed else self._short_way.find_taker(to, reply)
        if taker is None:
            return False
        frame = frames.encode_message(reply, taker.sid, data)
        self.unread_answers += len(frame)
        self._write_client(frame)
        self.changed()
        return True

    def close(self) -> None:
        """End all subscriptions, since the connection is over."""
        self.closed = True
        if self._broker is not None and self._connection:
            self._broker.connection_ended(self._connection)
        self._input.close()
        self.membership.leave()
        self._inboxes.leave(self)
        for subscription in self._client_pings.end().union(self._by_sid.values()):
            self._subscriptions.end(subscription, "broken")
        self._by_sid.clear()
        self._blocked.clear()
        self._server_pings.end()

    # Frames from the client.

    def connect(self, frame: bytes, options: bytes) -> bytes:
        """Read the client's options; the server checks them. Only once: a client stays who it is."""
        if self.connected:
            raise ProtocolViolationError("Unknown Protocol Operation")
        self.connected = True
        try:
            found = orjson.loads(options)
        except orjson.JSONDecodeError:
            return frame
        if not isinstance(found, dict):
            found = {}
        # For nats-server, verbose is the default, and so is pedantic.
        verbose = self._commands.verbose = found.get("verbose", True) is not False
        self.headers = found.get("headers") is True
        name = found.get("name")
        self.name = name if isinstance(name, str) else ""
        self._up.count_publishes = verbose
        pedantic = found.get("pedantic", True) is not False
        self._short_way.connected(self.name, verbose=verbose, pedantic=pedantic, headers=self.headers)
        frame = self.membership.connect(frame, found)
        return self._commands.note(frame)

    def subscribe(self, frame: bytes, subject: bytes, queue: bytes, sid: bytes) -> bytes | None:
        """Take a subscription to stored mail; pass any other on.

        None: not decided yet. Nothing behind it is read, and it comes again with each chunk until it is decided.
        """
        text = subject.decode("utf-8", "replace")
        found = subjects.classify(text)
        if isinstance(found, subjects.RefusedSubject):
            self._write_client(frames.encode_error(found.text))
            return b""
        if sid in self._by_sid:
            # As with nats-server, the first one stays. The client's subject must not reach the server under this sid.
            return self._succeed()
        if isinstance(found, subjects.PlainSubject):
            if inboxes.may_match(text):
                allowed = self._inboxes.claim(self, sid, text, queue.decode("utf-8", "replace"))
                self.waiting = allowed is None
                if self.waiting:
                    return None
                if not allowed:
                    self._write_client(frames.encode_error(subjects.violation(text)))
                    return b""
                self._short_way.subscribed(sid, subject, queue)
            return self._commands.note(frame)
        if len(self._by_sid) >= self._public.max_subscriptions:
            self._write_client(frames.encode_error(subjects.violation(text, _TOO_MANY)))
            return b""
        pattern = found.pattern if isinstance(found, subjects.BroadcastSubject) else text
        made = GatewaySubscription(self, sid, text, queue.decode("utf-8", "replace"), pattern)
        self._by_sid[sid] = made
        self._server_pings.ask(made)
        self._subscriptions.add(made)
        asked = self._commands.note(frames.encode_subscribe(f"{_PROBE}{pattern}".encode(), _PROBE_SID))
        asked += self._commands.note_own(frames.encode_unsubscribe(_PROBE_SID))
        if self.tenant is None and not self._asked:
            self._asked = True
            asked += self._commands.note_own(self._ask()[1])
        return asked + frames.PING

    def unsubscribe(self, frame: bytes, sid: bytes, most: int) -> bytes:
        """End a subscription, now or later."""
        subscription = self._by_sid.get(sid)
        if subscription is None:
            # With a maximum it ends by itself once its replies have come, which the gateway does not count.
            self._inboxes.release(self, sid)
            by_server = self._short_way.unsubscribed(sid, most)
            if by_server != most:
                frame = frames.encode_unsubscribe(sid, by_server)
            return self._commands.note(frame)
        subscription.most = most
        if not most:
            self._write_client(self._forget(subscription))
            self._subscriptions.end(subscription, "unsub")
        elif most <= subscription.pushed:
            del self._by_sid[sid]
            self._end_if_over(subscription)
        return self._succeed()

    def pong(self, frame: bytes) -> bytes:
        """Take the PONG if it answers a PING of the gateway."""
        confirms = self._client_pings.pong()
        if confirms is None:
            return frame
        for subscription, count in confirms.items():
            subscription.confirmed = count
            if subscription.served is not None:
                subscription.served.confirm(count)
            self._end_if_over(subscription)
        self._ask_for_confirmation()
        return b""

    def pinging(self) -> None:
        """Take note that one of the server's next PONGs is for the client."""
        self._server_pings.by_client()

    def publishing(self) -> None:
        """Count a publish, which the server answers with +OK."""
        self._commands.note(b"")

    def may_wait(self, size: int) -> bool:
        """Return whether a command of so many bytes may wait here until it is whole."""
        return self._input.may_wait(size)

    def may_publish(self, subject: bytes, reply: bytes) -> bool | None:
        """Check a publish by its subjects; None: that depends on its body. See :mod:`.publish_policy`."""
        for each in (subject, reply):
            if not publish_policy.is_for_clients(each):
                self._refuse_publish(each)
                return False
        if not publish_policy.can_be_answered(subject, reply):
            self._refuse_publish(reply)
            return False
        return None if publish_policy.makes_stream(subject) else True

    def may_contain(self, subject: bytes, body: bytes | None) -> bool:
        """Check a request for a stream by its configuration; None: it is too long to be looked into."""
        if body is not None and publish_policy.is_stream_allowed(body):
            return True
        self._refuse_publish(subject)
        return False

    def takes(self, reply: bytes, length: int, headers: bool) -> bool | None:
        """Return whether a request takes the short way; None while it is being opened, as for :meth:`subscribe`."""
        taken = self._short_way.takes(reply, length, headers)
        self.waiting = taken is None
        if self.waiting and not self._asking:
            self._asking, self._question = self._ask()
        return taken

    def request(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        """Hand a request to the service."""
        self._short_way.request(self, subject, reply, headers, payload)

    def passing(self, subject: bytes) -> None:
        """Take note that a publish passes to the server: no later request may overtake it."""
        self._short_way.passed(subject)

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
            self.membership.enter(account)
        self._short_way.max_payload = int(options.get("max_payload", 0))
        if self.membership.hides_info:
            return b""
        for name in ("connect_urls", "ws_connect_urls", "tls_available", "tls_verify", "tls_required"):
            options.pop(name, None)
        options |= {"host": self._public.host, "port": self._public.port, "client_ip": self._client_ip}
        if self._public.tls:
            options["tls_required"] = True
            if self._public.tls_verify:
                options["tls_verify"] = True
        return frames.encode_info(orjson.dumps(options))

    def ping(self, frame: bytes) -> bytes:
        """Take note that one of the client's next PONGs is for the server."""
        self._client_pings.by_server()
        return frame

    def succeeded(self, frame: bytes) -> bytes:
        """Drop a +OK that answers a command of the gateway."""
        return b"" if self._commands.answers_own() else frame

    def failed(self, frame: bytes) -> bytes:
        """Name the client's own subject in a refusal."""
        text = frame.strip()[4:].strip().strip(b"'").decode("utf-8", "replace")
        if not text.startswith("Permissions Violation"):
            return frame
        own = self._commands.answers_own()
        if text == f'Permissions Violation for Publish to "{_IDENTIFY.decode()}"':
            # Who may not ask is not served.
            self._short_way.close()
            return b"".join(
                [self._refused(each, subjects.violation(each.subject)) for each in list(self._by_sid.values())]
            )
        if text.startswith(_PROBE_VIOLATION):
            # The server words subjects in its own way, but answers in order: the first probe that waits is meant.
            refused = self._server_pings.asked
            if refused is None:
                return b""
            text = subjects.violation(refused.subject)
            if self._by_sid.get(refused.sid) is refused:
                return self._refused(refused, text)
            return b"" if refused.refused else frames.encode_error(text)
        return b"" if own else frame

    def flushed(self, frame: bytes) -> bytes:
        """Hold a PONG until all subscriptions so far are decided, also those that came behind its PING (N10)."""
        allowed, passes = self._server_pings.pong()
        if allowed is not None:
            allowed.permitted = True
            if self.tenant is not None and self._by_sid.get(allowed.sid) is allowed:
                self._subscriptions.open(allowed, self.tenant)
        return frame if passes else b""

    # Inside.

    def _ask(self) -> tuple[str, bytes]:
        """Return the token of a question about the client, and the frame that asks it."""
        token, body = self._identities.ask(self)
        return token, frames.encode_publish(_IDENTIFY, body)

    def _ask_for_confirmation(self) -> None:
        if self._client_pings.is_due():
            self._write_client(frames.PING)

    def _forget(self, subscription: GatewaySubscription) -> bytes:
        """Remove a subscription, and return the PONGs that waited for it; unconfirmed pushes count as not received."""
        self._by_sid.pop(subscription.sid, None)
        self._client_pings.forget(subscription)
        self._blocked.discard(subscription)
        return self._released_by(subscription)

    def _refused(self, subscription: GatewaySubscription, text: str) -> bytes:
        """Remove a subscription, and return the frames for the client."""
        subscription.refused = True
        self._subscriptions.end(subscription, "unsub")
        return frames.encode_error(text) + self._forget(subscription)

    def _released_by(self, subscription: GatewaySubscription) -> bytes:
        """Return the PONGs for which this was the last decision missing."""
        return frames.PONG * self._server_pings.decide(subscription)

    def _end_if_over(self, subscription: GatewaySubscription) -> None:
        """End a subscription whose client has read all messages that it asked for."""
        if 0 < subscription.most <= subscription.confirmed:
            self._subscriptions.end(subscription, "unsub")

    def _succeed(self) -> bytes:
        """Return a command without effect in place of one of a verbose client, so that the server answers +OK."""
        return self._commands.note(frames.encode_unsubscribe(_PROBE_SID)) if self._commands.verbose else b""

    def _insert_command(self, frame: bytes) -> None:
        self._to_server.append(self._up.insert(self._commands.note_own(frame)))

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
