"""One client's connection through the gateway, without I/O: bytes in, bytes and events out (E6, E7, N10).

Bytes of both sides pass as they came, but for the few frames that matter here. A line is passed on only when it is
whole, a payload as it comes, so the gateway can insert a frame of its own wherever no payload is under way. The
protocol must see exactly the frames that nats-server sees, or a client could hide one from it: what is not plainly one
of them is refused.

A subscription to stored mail does not reach nats-server: it is asked once whether the client may subscribe, by a
subscription that ends at once, and the messages come from the service straight to the client's socket. A PONG of the
server waits until all subscriptions before it are decided, so a client that has flushed knows the outcome. After pushes
the gateway sends the client a PING, whose PONG confirms that the client has read them.

A request to the service takes the *short way*: it is an event, and its answer goes to the client's socket. Otherwise
it would cross nats-server twice, and its frame would be read five times. The short way is taken only where the client
cannot tell: nats-server vouches for the client's account (:mod:`.identity`), no permissions of the user's own limit
what it may publish, and the answer goes to one plain subscription of the same connection, to an inbox that no other
connection may listen to. Everything else goes through nats-server, and no request overtakes one that did.
"""

import itertools
import re
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import orjson

from mediator.gateway import permissions
from mediator.gateway.identity import ClientIdentity
from mediator.gateway.permissions import InboxClaims, InboxHolder
from mediator.gateway.streams import FrameStream, UnfinishedCommands
from mediator.gateway.subscription import Subscription
from mediator.nats import frames, subjects
from mediator.nats.client import ClientInfo, Request
from mediator.nats.editions import is_python_client
from mediator.nats.frames import CRLF, MAX_CONNECT, MAX_LINE, ProtocolViolationError

MAX_UNHEARD: Final = 512 * 1024
"""Bytes of a client, at most, that wait for a server that has not answered its CONNECT."""
MAX_SERVER_LINE: Final = 1 << 20
MAX_INSPECTED: Final = 256 * 1024
"""Bytes of a publish that is looked into: nats-server takes no longer metadata of a stream than half of this."""
MAX_SHORT_WAY: Final = 256 * 1024
"""Bytes of headers and payload of a request that wait in the gateway until they are whole."""
MAX_INBOXES: Final = 1000
"""Subscriptions of one connection that may match inboxes; one that has made more sends all requests the long way."""
MAX_PINGS: Final = 4
"""PINGs behind pushes that may be under way at the same time: the next ones come while the client reads."""

_API: Final = subjects.API.encode()
_IDENTIFY: Final = f"{subjects.API}{subjects.OPEN}".encode()
_IDENTIFY_VIOLATION: Final = f'Permissions Violation for Publish to "{_IDENTIFY.decode()}"'
_PROBE: Final = f"{subjects.PUSH}gateway."
"""What the subject begins with on which nats-server is asked for the client's rights."""
_PROBE_SID: Final = b"mq9gateway"
_PROBE_VIOLATION: Final = subjects.violation(_PROBE).rstrip('"')
"""What the server's refusal of such a subscription begins with."""
_TOO_MANY: Final = "maximum subscriptions exceeded"
_ANY_LAST: Final = b".*"
_WITH_INFO: Final = 1
"""The version of the clients' protocol with INFO at any time."""

_PUBLISH: Final = frames.publish_pattern(rb"\$(?:JS\.|SYS\.|mq9\.)|mq9ctl\.")
_MESSAGE: Final = frames.message_pattern()
_TOKENS: Final = rb"[^ \t\r\n.*>]++(?:\.[^ \t\r\n.*>]++)*+"
_REQUEST: Final = re.compile(
    rb"(H?)PUB (\$mq9\.AI\.(?!PUSH\.)%b) (?:(_INBOX\.%b) )?(?:(\d{1,9}) )?(\d{1,9})\r\n" % (_TOKENS, _TOKENS)
)
"""A request to the service as most clients write it: headers or none, verb, reply subject, sizes.

nats-server has answers of its own for subjects with wildcards or empty tokens.
"""
_numbers = itertools.count(1)


# Events. A request that takes the short way is one as it is: :class:`Request`.


class SubscriptionMade(NamedTuple):
    """The client subscribes to stored mail; nats-server is asked whether it may."""

    subscription: Subscription


class SubscriptionPermitted(NamedTuple):
    """The client may subscribe, and its tenant is known: the subscription is to be opened."""

    subscription: Subscription


class SubscriptionEnded(NamedTuple):
    """A subscription has ended: ``unsub`` or ``broken``."""

    subscription: Subscription
    how: str


class PushesConfirmed(NamedTuple):
    """The client has read so many messages of a subscription since its opening."""

    subscription: Subscription
    total: int


class IdentityRequested(NamedTuple):
    """The service was asked who the client is: :meth:`GatewayProtocol.identified` takes the answer."""

    token: str


class AccountNamed(NamedTuple):
    """The account of the client is known."""

    account: str


class ShortWayOpened(NamedTuple):
    """Requests of the client come from now on, from a connection of this name."""

    connection: str


class ReadingResumed(NamedTuple):
    """What the client wrote can be read again, after ``waiting`` was set."""


Event = (
    Request
    | SubscriptionMade
    | SubscriptionPermitted
    | SubscriptionEnded
    | PushesConfirmed
    | IdentityRequested
    | AccountNamed
    | ShortWayOpened
    | ReadingResumed
)


@dataclass(frozen=True, slots=True)
class PublicAddress:
    """What INFO tells clients about the gateway, and how many subscriptions each connection may have."""

    host: str
    port: int
    tls: bool
    tls_verify: bool
    """Whether clients show a certificate of their own."""
    max_subscriptions: int


@dataclass(slots=True)
class GatewayContext:
    """What all connections of a gateway share."""

    address: PublicAddress
    make_question: Callable[[], tuple[str, bytes]]
    """Returns a new token, and the body of the question who a client is."""
    claims: InboxClaims
    find_alias: Callable[[str, str], str | None] | None = None
    """Returns the login in place of a user and a password that rotates; None: connections need no account."""
    unfinished: UnfinishedCommands = field(default_factory=UnfinishedCommands)
    short_way: bool = False
    """Whether somebody takes requests now."""


@dataclass(slots=True, eq=False)
class ReplySubscription:
    """A plain subscription to an inbox, and the answers that take the short way to it."""

    sid: bytes
    subject: bytes
    """As it is, wildcard included."""
    requests: int = 0
    """How many there are, under way included."""
    answers: int = 0
    """How many it got."""
    max_answers: int | None = None
    """How many it takes, once it is to end; None: all."""


class _ReplyInboxes:
    """The subscriptions of one connection that may match an inbox."""

    def __init__(self) -> None:
        self._by_sid: dict[bytes, ReplySubscription] = {}
        self._by_subject: dict[bytes, list[ReplySubscription]] = {}
        self._others: set[bytes] = set()
        """Sids of those that answers cannot be handed to: of queue groups, and with wildcards elsewhere."""

    def add(self, sid: bytes, subject: bytes, queue: bytes) -> bool:
        """Add one; False: there are too many."""
        if sid in self._by_sid or sid in self._others:
            return True
        if len(self._by_sid) + len(self._others) >= MAX_INBOXES:
            return False
        exact = subject.removesuffix(_ANY_LAST)
        if queue or b"*" in exact or b">" in exact:
            self._others.add(sid)
        else:
            made = self._by_sid[sid] = ReplySubscription(sid, subject)
            self._by_subject.setdefault(subject, []).append(made)
        return True

    def remove(self, sid: bytes, most: int) -> int:
        """End one after ``most`` messages in all, 0: now; return how many may come through nats-server."""
        self._others.discard(sid)
        found = self._by_sid.pop(sid, None)
        if found is None:
            return most
        same = self._by_subject[found.subject]
        same.remove(found)
        if not same:
            del self._by_subject[found.subject]
        # Answers to what was asked before still come the short way.
        found.max_answers = min(most, found.requests)
        return most - found.max_answers

    def find(self, reply: bytes) -> ReplySubscription | None:
        """Return the one that a reply subject leads to; None: there is none, or more than one."""
        if self._others:
            return None
        exact = self._by_subject.get(reply)
        wild = self._by_subject.get(reply.rpartition(b".")[0] + _ANY_LAST)
        found = exact if wild is None else wild
        return None if found is None or len(found) > 1 or (exact and wild) else found[0]


class GatewayProtocol:
    """The state of one connection.

    Whoever feeds it handles its events, in their order, and writes what it has for both sides.
    """

    closed = False
    waiting = False
    """Whether nothing more can be read from the client for now; :class:`ReadingResumed` ends that."""

    connected = False
    """Whether the client has sent its CONNECT."""
    name = ""
    """The client's name in its CONNECT."""
    headers = False
    """Whether the client takes headers."""
    tenant: str | None = None
    """None: the client is not identified."""
    unread_answers = 0
    """Bytes of answers that may wait for the client to read; lowered by who writes them."""
    _asked = False
    """Whether the service was asked who the client is, for its subscriptions."""
    _hides_info = False
    """Whether the client expects one INFO only."""

    # Commands that nats-server answers if the client is verbose.
    _verbose = True
    """As nats-server has it until CONNECT says otherwise."""
    _commands = 0
    _commands_answered = 0

    # Bytes that are counted for all clients.
    _unfinished = 0
    _unheard = 0
    """Bytes that passed to the server, which has not answered the client's CONNECT yet."""
    _heard = False

    # Subscriptions to stored mail.
    _made = 0
    _full = False
    """Whether the client reads more slowly than it is written to."""
    _pings_under_way = 0

    # The short way.
    _plain = False
    """Whether the client and its options allow the short way."""
    _prefix = ""
    """What nats-server puts before the subjects of requests."""
    _overtakes = True
    """Whether a request may be under way through nats-server, which the next one would overtake."""
    _asking = ""
    """The token of the question whose answer opens the short way; nothing more is read until it comes."""
    _question = b""
    _max_payload = 0
    """Bytes that nats-server takes."""

    def __init__(self, context: GatewayContext, client_ip: str, wake: Callable[[], None]) -> None:
        """``wake`` is called when there is something to write, or an event, that does not follow from bytes."""
        self._context = context
        self._client_ip = client_ip
        self._wake = wake
        self._up, self._down = FrameStream(self._read_client_frames), FrameStream(self._read_server_frames)
        self._to_server: list[bytes] = []
        self._to_client: list[bytes] = []
        self.events: deque[Event] = deque()
        """What has happened and is still to be handled, by who takes it out."""
        self._client = ClientInfo(f"gateway {next(_numbers)}")
        self._inbox_holder = InboxHolder(self.probe, self._resume)
        self._inboxes = _ReplyInboxes()
        self._own_commands: deque[int] = deque()
        """Numbers of the commands whose answers the client must not see."""
        self._by_sid: dict[bytes, Subscription] = {}
        """Subscriptions whose sids are in use: not ended by the client, nor by the maximum of messages."""
        self._undecided: dict[Subscription, None] = {}
        """In their order."""
        self._blocked: set[Subscription] = set()
        """Subscriptions that have more to push when the client reads again."""
        self._unconfirmed: set[Subscription] = set()
        """Subscriptions with pushes that no PING has followed."""
        self._server_pongs: deque[Subscription | None] = deque()
        """What the next PONGs of the server answer: may the client subscribe; None: a PING of the client."""
        self._held_pongs: deque[list[int]] = deque()
        """PONGs that wait: up to which number the subscriptions must be decided, and how many PONGs."""
        self._client_pongs: deque[dict[Subscription, int] | Callable[[], None] | None] = deque()
        """How many messages of each subscription a PONG confirms; what it calls; None: a PING of the server."""

    @property
    def subscriptions(self) -> int:
        """How many subscriptions to stored mail there are."""
        return len(self._by_sid)

    # Bytes and events.

    def receive_from_client(self, data: bytes) -> None:
        """Take what the client wrote; raises :class:`ProtocolViolationError`."""
        self.waiting = False
        asking = self._asking
        passed = self._up.feed(data)
        self._to_server += passed
        if not self._count_unfinished(passed):
            raise ProtocolViolationError("Authorization Timeout")
        if self._asking is not asking:
            # Behind the frames that were read so far, so that its answer says that they have arrived.
            self._insert_command(self._question)
        if self._up.violation is not None:
            raise self._up.violation

    def receive_from_server(self, data: bytes) -> None:
        """Take what the server wrote; raises :class:`ProtocolViolationError`."""
        if self.connected and not self._heard:
            self._heard = True
            self._context.unfinished.total -= self._unheard
            self._unfinished -= self._unheard
        self._to_client += self._down.feed(data)
        if self._down.violation is not None:
            raise self._down.violation

    def data_to_send(self) -> tuple[bytes, bytes, int]:
        """Return what is to be written to the server and to the client, and how many bytes for the client must wait.

        The latter wait for the end of a payload.
        """
        to_server, to_client = b"".join(self._to_server), b"".join(self._to_client)
        self._to_server.clear()
        self._to_client.clear()
        return to_server, to_client, self._down.held

    def hang_up(self) -> None:
        """Send the server what the client wrote last, if that still waits; the client has gone."""
        if self.waiting:
            self._plain = False
            with suppress(ProtocolViolationError):
                self.receive_from_client(b"")

    def close(self) -> None:
        """End all subscriptions, since the connection is over."""
        self.closed = True
        self._context.unfinished.total -= self._unfinished
        self._unfinished = 0
        self._context.claims.leave(self._inbox_holder)
        unconfirmed = self._unconfirmed.union(*(each for each in self._client_pongs if isinstance(each, dict)))
        for subscription in unconfirmed.union(self._by_sid.values()):
            self.events.append(SubscriptionEnded(subscription, "broken"))
        for kept in (self._by_sid, self._blocked, self._undecided, self._held_pongs, self._client_pongs):
            kept.clear()
        self._unconfirmed.clear()

    # Calls about subscriptions and requests.

    def identified(self, token: str, identity: ClientIdentity | None) -> None:
        """Take the service's answer, and go on with what waits for it.

        None: there is none. It is asked again for subscriptions; requests go the long way.
        """
        if identity is None:
            if token == self._asking:
                self._asking, self._plain = "", False
                self._resume()
            elif self.tenant is None and not self.closed:
                self._insert_command(self._ask()[1])
                self._wake()
            return
        first, self.tenant = self.tenant is None, identity.tenant
        if identity.account is not None:
            # The server has named it already, unless the client has sent no PING.
            self.events.append(AccountNamed(identity.account))
        for subscription in list(self._by_sid.values()) if first else ():
            if subscription.permitted:
                self._permit(subscription)
        if token == self._asking:
            self._asking = ""
            name = identity.connection or self._client.connection
            self._client = self._client._replace(login=identity.user, connection=name)
            self._prefix = "" if identity.account is None else f"mq9.{identity.account}."
            self._overtakes = False
            if not self.closed:
                self.events.append(ShortWayOpened(name))
            self._resume()
        else:
            self._wake()

    def accept(self, subscription: Subscription) -> None:
        """Start a subscription that was opened; release the PONGs that wait for it."""
        if subscription.closed:
            subscription.close("broken")
            return
        self.answered(subscription)
        subscription.start()

    def answered(self, subscription: Subscription) -> None:
        """Release the PONGs that wait for a subscription: it is open, or takes too long."""
        self._write_client(self._decide(subscription))
        self._wake()

    def refuse(self, subscription: Subscription, reason: str) -> None:
        """End a subscription that the service refused."""
        if self._by_sid.get(subscription.sid) is subscription:
            self._write_client(self._refused(subscription, subjects.violation(subscription.text, reason)))
        else:
            self._write_client(self._decide(subscription))
        self._wake()

    def push(self, subscription: Subscription, pushes: Sequence[bytes]) -> None:
        """Write pushes of a subscription, at most as many as it takes, and ask for their confirmation."""
        if not pushes or self._by_sid.get(subscription.sid) is not subscription:
            return
        if subscription.max_messages:
            pushes = pushes[: subscription.max_messages - subscription.pushed]
        subscription.pushed += len(pushes)
        self._unconfirmed.add(subscription)
        if subscription.pushed == subscription.max_messages:
            del self._by_sid[subscription.sid]
        self._write_client(b"".join(pushes))
        self._ask_for_confirmation()
        self._wake()

    def is_full(self, subscription: Subscription) -> bool:
        """Return whether a subscription must wait until the client has read."""
        if self._full:
            self._blocked.add(subscription)
        return self._full

    def set_full(self, full: bool) -> set[Subscription]:
        """Take note that the client reads too slowly, or has read; return the subscriptions that can be resumed."""
        self._full = full
        if full:
            return set()
        blocked, self._blocked = self._blocked, set()
        return blocked

    def probe(self, answered: Callable[[], None]) -> None:
        """Send the client a PING; ``answered`` is called when its PONG comes."""
        self._client_pongs.append(answered)
        self._write_client(frames.PING)
        self._wake()

    def answer(self, to: ReplySubscription, reply: bytes, data: bytes) -> bool:
        """Write the answer to a request; False: nobody waits for it any more."""
        if self.closed:
            return False
        if to.max_answers is not None and to.answers >= to.max_answers:
            # As with nats-server, one that was made meanwhile gets it.
            found = self._find_route(reply)
            if found is None:
                return False
            to = found
            to.requests += 1
        to.answers += 1
        frame = frames.encode_message(reply, to.sid, data)
        self.unread_answers += len(frame)
        self._write_client(frame)
        self._wake()
        return True

    # Frames from the client.

    def _read_client_frames(self, data: bytes, at: int, mark: int, out: list[bytes]) -> None:
        quick, request, size, stream = _PUBLISH.match, _REQUEST.match, len(data), self._up
        stream.missing = 0
        while at < size:
            found = quick(data, at) if self.connected else None
            if found is not None:
                at = found.end() + int(found[1]) + 2
                self._commands += 1
                continue
            stream.good = mark, at
            if self.connected and (asked := request(data, at)) is not None:
                after = self._take_request(data, at, asked)
                if after is None:
                    break
                if after:
                    out.append(data[mark:at])
                    mark = at = after
                    continue
            frame = self._client_line(data, at)
            if frame is None:
                break
            end = at + len(frame)
            verb, words = frames.decode_command(frame[:-1])
            if not self.connected and verb not in (b"CONNECT", b"PING", b"PONG"):
                # Who has not said who it is keeps nothing waiting here; as nats-server words it.
                raise ProtocolViolationError("Authorization Violation")
            if verb in (b"PUB", b"HPUB"):
                subject, reply, head, length = frames.decode_publish(verb, words)
                passes = self._may_publish(data, end, subject, reply, head, length)
                if passes is None:
                    break
                if not passes:
                    mark = at = stream.drop(data, at, end + length + 2, mark, out)
                    continue
                answerable = permissions.without_empty_tokens(subject)
                if answerable is not subject:
                    out += (data[mark:at], frame.replace(subject, answerable, 1))
                    mark = end
                at = end + length + 2
                self._commands += 1
                continue
            instead = self._client_frame(verb, words, frame)
            if instead is None:
                break
            if instead is not frame:
                out += (data[mark:at], instead)
                mark = end
            at = end
        stream.end(data, at, mark, out)

    def _client_frame(self, verb: bytes, words: list[bytes], frame: bytes) -> bytes | None:
        """Return what passes to the server in place of a frame; None: not decided yet, as for :meth:`_subscribe`."""
        if verb == b"SUB" and len(words) in (2, 3):
            return self._subscribe(frame, words[0], words[1] if len(words) == 3 else b"", words[-1])
        if verb == b"UNSUB" and len(words) in (1, 2):
            return self._unsubscribe(frame, words[0], frames.decode_count(words[1]) if len(words) == 2 else 0)
        if verb == b"CONNECT":
            return self._connect(frame, frame[7:].strip())
        if verb == b"PONG":
            return self._pong(frame)
        if verb == b"PING":
            self._server_pongs.append(None)
            return frame
        raise ProtocolViolationError("Unknown Protocol Operation")

    def _client_line(self, data: bytes, at: int) -> bytes | None:
        """Return the line that begins there, with its end, or None if that has not come."""
        end = data.find(b"\n", at, at + MAX_CONNECT)
        size = (end if end >= 0 else min(len(data), at + MAX_CONNECT)) - at
        if size > MAX_LINE:
            may_be_long = size < MAX_CONNECT and data[at : at + 7].upper() == b"CONNECT"
            if not may_be_long or not (end >= 0 or self._may_wait(size)):
                raise ProtocolViolationError("maximum control line exceeded")
        return data[at : end + 1] if end >= 0 else None

    def _connect(self, frame: bytes, text: bytes) -> bytes:
        """Read the client's options; the server checks them. Only once: a client stays who it is."""
        if self.connected:
            raise ProtocolViolationError("Unknown Protocol Operation")
        self.connected = True
        try:
            options = orjson.loads(text)
        except orjson.JSONDecodeError:
            return frame
        if not isinstance(options, dict):
            options = {}
        # For nats-server, verbose is the default, and so is pedantic: it has +OK and refusals of its own for them.
        self._verbose = options.get("verbose", True) is not False
        self._plain = not self._verbose and options.get("pedantic", True) is False
        self.headers = options.get("headers") is True
        name = options.get("name")
        self.name = name if isinstance(name, str) else ""
        self._client = self._client._replace(name=self.name)
        return self._command(self._with_account(frame, options))

    def _with_account(self, frame: bytes, options: dict[str, object]) -> bytes:
        """Return the client's CONNECT as the server gets it, where tenants have accounts (S7).

        It asks for the INFO that names the account, also for clients of a protocol without that, and has the login that
        the client's password is valid for while passwords are being rotated.
        """
        find_alias = self._context.find_alias
        if find_alias is None:
            return frame
        changed: dict[str, object] = {}
        if options.get("protocol") != _WITH_INFO:
            changed["protocol"] = _WITH_INFO
            self._hides_info = True
        user, password = options.get("user"), options.get("pass")
        if isinstance(user, str) and isinstance(password, str):
            alias = find_alias(user, password)
            if alias is not None:
                changed["user"] = alias
        return b"CONNECT " + orjson.dumps({**options, **changed}) + CRLF if changed else frame

    def _subscribe(self, frame: bytes, subject: bytes, queue: bytes, sid: bytes) -> bytes | None:
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
        group = queue.decode("utf-8", "replace")
        if isinstance(found, subjects.PlainSubject):
            if permissions.may_match(text):
                allowed = self._context.claims.claim(self._inbox_holder, sid, text, group)
                self.waiting = allowed is None
                if self.waiting:
                    return None
                if not allowed:
                    self._write_client(frames.encode_error(subjects.violation(text)))
                    return b""
                self._plain = self._inboxes.add(sid, subject, queue) and self._plain
            return self._command(frame)
        if len(self._by_sid) >= self._context.address.max_subscriptions:
            self._write_client(frames.encode_error(subjects.violation(text, _TOO_MANY)))
            return b""
        python = is_python_client(self.name)
        made = Subscription(sid, text, found, group, self.push, self.is_full, python, not self.headers)
        self._made += 1
        made.number = self._made
        self._by_sid[sid] = made
        self._undecided[made] = None
        self._server_pongs.append(made)
        self.events.append(SubscriptionMade(made))
        # With NATS's wildcards, whatever the client wrote.
        pattern = found.pattern if isinstance(found, subjects.BroadcastSubject) else text
        asked = self._command(frames.encode_subscribe(f"{_PROBE}{pattern}".encode(), _PROBE_SID))
        asked += self._own_command(frames.encode_unsubscribe(_PROBE_SID))
        if self.tenant is None and not self._asked:
            self._asked = True
            asked += self._own_command(self._ask()[1])
        return asked + frames.PING

    def _unsubscribe(self, frame: bytes, sid: bytes, most: int) -> bytes:
        """End a subscription after ``most`` messages in all; 0: now."""
        subscription = self._by_sid.get(sid)
        if subscription is None:
            # With a maximum it ends by itself once its replies have come, which the gateway does not count.
            self._context.claims.release(self._inbox_holder, sid)
            by_server = self._inboxes.remove(sid, most)
            return self._command(frame if by_server == most else frames.encode_unsubscribe(sid, by_server))
        subscription.max_messages = most
        if not most:
            self._write_client(self._forget(subscription))
            self.events.append(SubscriptionEnded(subscription, "unsub"))
        elif most <= subscription.pushed:
            del self._by_sid[sid]
            self._end_if_read(subscription)
        return self._succeed()

    def _pong(self, frame: bytes) -> bytes:
        """Take the PONG if it answers a PING of the gateway."""
        answers = self._client_pongs.popleft() if self._client_pongs else None
        if answers is None:
            return frame
        if not isinstance(answers, dict):
            answers()
            return b""
        self._pings_under_way -= 1
        for subscription, total in answers.items():
            subscription.confirmed = total
            self.events.append(PushesConfirmed(subscription, total))
            self._end_if_read(subscription)
        self._ask_for_confirmation()
        return b""

    # Publishes, and requests that take the short way.

    def _may_publish(
        self, data: bytes, start: int, subject: bytes, reply: bytes, head: int, length: int
    ) -> bool | None:
        """Return whether a publish passes, as :mod:`.permissions` has it; None: its body is not there yet."""
        for each in (subject, reply):
            if not permissions.is_for_clients(each):
                return self._refuse_publish(each)
        if not permissions.can_be_answered(subject, reply):
            return self._refuse_publish(reply)
        if permissions.makes_stream(subject):
            if length > MAX_INSPECTED:
                return self._refuse_publish(subject)
            end = start + length
            missing = end + 2 - len(data)
            if missing > 0:
                if not self._may_wait(MAX_LINE + length):
                    return self._refuse_publish(subject)
                self._up.missing = missing
                return None
            if not permissions.is_stream_allowed(data[start + head : end]):
                return self._refuse_publish(subject)
        elif subject.startswith(_API):
            # No later request may overtake it.
            self._overtakes = True
        return True

    def _refuse_publish(self, subject: bytes) -> bool:
        text = f'Permissions Violation for Publish to "{subject.decode("utf-8", "replace")}"'
        self._write_client(frames.encode_error(text))
        return False

    def _take_request(self, data: bytes, at: int, asked: re.Match[bytes]) -> int | None:
        """Take a request if it goes the short way, and return where it ends.

        0: it may pass to the server, like any publish; None: not decided yet, or not whole.
        """
        head, length, start = asked[4], int(asked[5]), asked.end()
        if bool(asked[1]) is (head is None) or start - at > MAX_LINE:
            return 0
        after = start + length + 2
        if after > len(data) and not self._may_wait(after - at):
            # nats-server reads it piece by piece.
            return 0
        if not (self._plain and self._context.short_way and length <= MAX_SHORT_WAY and length <= self._max_payload):
            return 0
        reply = asked[3] or b""
        route = self._find_route(reply) if reply else None
        if (reply and route is None) or (head is not None and not self.headers):
            return 0
        if self._overtakes:
            # Once those before it have arrived.
            self.waiting = True
            if not self._asking:
                self._asking, self._question = self._ask()
            return None
        if after > len(data):
            self._up.missing = after - len(data)
            return None
        middle = start + int(head or 0)
        if middle > after - 2 or data[after - 2 : after] != CRLF:
            raise ProtocolViolationError("Unknown Protocol Operation")
        answer: Callable[[bytes], object] = _drop_answer
        if route is not None:
            route.requests += 1
            answer = partial(self.answer, route, reply)
        headers = frames.decode_headers(data[start:middle].partition(CRLF)[2]) if middle > start else None
        name = f"{self._prefix}{asked[2].decode('utf-8', 'replace')}"
        self.events.append(Request(name, reply, data[middle : after - 2], headers, self._client, answer))
        return after

    def _find_route(self, reply: bytes) -> ReplySubscription | None:
        """Return the one subscription that a reply subject leads to, if nobody else can listen to it."""
        found = self._inboxes.find(reply)
        return found if found is not None and self._context.claims.holds(self._inbox_holder, found.sid) else None

    # Frames from the server.

    def _read_server_frames(self, data: bytes, at: int, mark: int, out: list[bytes]) -> None:
        quick, size, stream = _MESSAGE.match, len(data), self._down
        while at < size:
            found = quick(data, at)
            if found is not None:
                at = found.end() + int(found[1]) + 2
                continue
            stream.good = mark, at
            end = data.find(CRLF, at) + 2
            if end < 2:
                if size - at > MAX_SERVER_LINE:
                    raise ProtocolViolationError("the server's line is too long")
                break
            frame = data[at:end]
            instead = self._server_frame(frame)
            if instead is not frame:
                out += (data[mark:at], instead)
                mark = end
            at = end
        stream.end(data, at, mark, out)

    def _server_frame(self, frame: bytes) -> bytes:
        """Return what passes to the client in place of a frame."""
        verb = frame[:4].upper()
        if verb == b"PING":
            self._client_pongs.append(None)
            return frame
        if verb == b"-ERR":
            return self._failed(frame)
        if verb == b"INFO":
            return self._info(frame)
        if verb == b"+OK\r":
            return b"" if self._answers_own_command() else frame
        if verb == b"PONG":
            return self._flushed(frame)
        raise ProtocolViolationError("unknown operation of the server")

    def _info(self, frame: bytes) -> bytes:
        """Describe the gateway in place of the server."""
        try:
            options: dict[str, Any] = orjson.loads(frame[5:])
        except orjson.JSONDecodeError:
            return frame
        account = options.get("remote_account")
        if isinstance(account, str):
            self._inbox_holder.account = account
            self.events.append(AccountNamed(account))
        self._max_payload = int(options.get("max_payload", 0))
        if self._hides_info:
            return b""
        for name in ("connect_urls", "ws_connect_urls", "tls_available", "tls_verify", "tls_required"):
            options.pop(name, None)
        address = self._context.address
        options |= {"host": address.host, "port": address.port, "client_ip": self._client_ip}
        if address.tls:
            options["tls_required"] = True
            if address.tls_verify:
                options["tls_verify"] = True
        return frames.encode_info(orjson.dumps(options))

    def _failed(self, frame: bytes) -> bytes:
        """Name the client's own subject in a refusal, which has no code: nats-server tells it by its text only."""
        text = frame.strip()[4:].strip().strip(b"'").decode("utf-8", "replace")
        if not text.startswith("Permissions Violation"):
            return frame
        own = self._answers_own_command()
        if text == _IDENTIFY_VIOLATION:
            # Who may not ask is not served.
            self._plain = False
            left = list(self._by_sid.values())
            return b"".join([self._refused(each, subjects.violation(each.text)) for each in left])
        if text.startswith(_PROBE_VIOLATION):
            # The server words subjects in its own way, but answers in order: the first probe that waits is meant.
            refused = next((each for each in self._server_pongs if each is not None), None)
            if refused is None:
                return b""
            text = subjects.violation(refused.text)
            if self._by_sid.get(refused.sid) is refused:
                return self._refused(refused, text)
            return b"" if refused.refused else frames.encode_error(text)
        return b"" if own else frame

    def _flushed(self, frame: bytes) -> bytes:
        """Hold a PONG until all subscriptions so far are decided, also those that came behind its PING (N10)."""
        allowed = self._server_pongs.popleft() if self._server_pongs else None
        if allowed is not None:
            allowed.permitted = True
            if self.tenant is not None and self._by_sid.get(allowed.sid) is allowed:
                self._permit(allowed)
            return b""
        if not self._undecided:
            return frame
        if self._held_pongs and self._held_pongs[-1][0] == self._made:
            self._held_pongs[-1][1] += 1
        else:
            self._held_pongs.append([self._made, 1])
        return b""

    # Inside.

    def _permit(self, subscription: Subscription) -> None:
        subscription.tenant = self.tenant or ""
        self.events.append(SubscriptionPermitted(subscription))

    def _decide(self, subscription: Subscription) -> bytes:
        """Return the PONGs for which this was the last decision missing."""
        self._undecided.pop(subscription, None)
        first = next(iter(self._undecided), None)
        count = 0
        while self._held_pongs and (first is None or first.number > self._held_pongs[0][0]):
            count += self._held_pongs.popleft()[1]
        return frames.PONG * count

    def _forget(self, subscription: Subscription) -> bytes:
        """Remove a subscription, and return the PONGs that waited for it; unconfirmed pushes count as not received."""
        self._by_sid.pop(subscription.sid, None)
        self._unconfirmed.discard(subscription)
        for answers in self._client_pongs:
            if isinstance(answers, dict):
                answers.pop(subscription, None)
        self._blocked.discard(subscription)
        return self._decide(subscription)

    def _refused(self, subscription: Subscription, text: str) -> bytes:
        """Remove a subscription, and return the frames for the client."""
        subscription.refused = True
        self.events.append(SubscriptionEnded(subscription, "unsub"))
        return frames.encode_error(text) + self._forget(subscription)

    def _end_if_read(self, subscription: Subscription) -> None:
        """End a subscription whose client has read all messages that it asked for."""
        if 0 < subscription.max_messages <= subscription.confirmed:
            self.events.append(SubscriptionEnded(subscription, "unsub"))

    def _ask_for_confirmation(self) -> None:
        if self._unconfirmed and self._pings_under_way < MAX_PINGS:
            self._pings_under_way += 1
            self._client_pongs.append({each: each.pushed for each in self._unconfirmed})
            self._unconfirmed.clear()
            self._write_client(frames.PING)

    def _ask(self) -> tuple[str, bytes]:
        """Return the token of a question about the client, and the frame that asks it."""
        token, body = self._context.make_question()
        self.events.append(IdentityRequested(token))
        return token, frames.encode_publish(_IDENTIFY, body)

    def _resume(self) -> None:
        self.events.append(ReadingResumed())
        self._wake()

    def _may_wait(self, size: int) -> bool:
        """Return whether a command of so many bytes may wait here until it is whole."""
        return self._context.unfinished.has_room(size - self._unfinished)

    def _count_unfinished(self, passed: Sequence[bytes]) -> bool:
        """Count what waits, and what passed to the server; return whether the client may go on.

        It may not if all have too much waiting and the server has not let it in yet.
        """
        size = self._up.unfinished
        if not self._heard:
            # More than this is not written to a server that does not read.
            self._unheard = min(self._unheard + sum(map(len, passed)), MAX_UNHEARD)
            size += self._unheard
        if size != self._unfinished:
            self._context.unfinished.total += size - self._unfinished
            self._unfinished = size
        return self._heard or not size or self._context.unfinished.has_room(0)

    def _command(self, frame: bytes) -> bytes:
        """Count a command that the server answers."""
        self._commands += 1
        return frame

    def _own_command(self, frame: bytes) -> bytes:
        """Count a command of the gateway, whose answer the client must not see."""
        if self._verbose:
            self._own_commands.append(self._commands)
        self._commands += 1
        return frame

    def _answers_own_command(self) -> bool:
        """Count an answer; return whether it answers a command of the gateway."""
        number = self._commands_answered
        self._commands_answered += 1
        if self._own_commands and self._own_commands[0] == number:
            self._own_commands.popleft()
            return True
        return False

    def _succeed(self) -> bytes:
        """Return a command without effect in place of one of a verbose client, so that the server answers +OK."""
        return self._command(frames.encode_unsubscribe(_PROBE_SID)) if self._verbose else b""

    def _insert_command(self, frame: bytes) -> None:
        self._to_server.append(self._up.insert(self._own_command(frame)))

    def _write_client(self, data: bytes) -> None:
        """Write frames to the client; not while frames of the server are being read, whose handlers return theirs."""
        if data:
            self._to_client.append(self._down.insert(data))


def _drop_answer(_data: bytes) -> None:
    """Answer a request that wants no answer."""
