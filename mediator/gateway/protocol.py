"""One client's connection through the gateway: which frames are changed, and the state this needs (E6, E7, N10).

A subscription to stored mail does not reach nats-server: it is asked once whether the client may subscribe, by a
subscription that ends at once, and the messages come from the service straight to the client's socket. A PONG of the
server waits until all subscriptions before it are decided, so a client that has flushed knows the outcome. After pushes
the gateway sends the client a PING, whose PONG confirms that the client has read them. Requests to the service take the
short way, in memory, where nobody can tell the difference (:mod:`.short_way`). Pure: bytes in, bytes out, and calls.
"""

import itertools
import re
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import orjson

from mediator.broker import Broker
from mediator.gateway import permissions
from mediator.gateway.identity import ClientIdentities, ClientIdentity, TenantGate, TenantMembership
from mediator.gateway.permissions import InboxClaims
from mediator.gateway.subscription import Subscription
from mediator.nats import frames, subjects
from mediator.nats.client import ClientInfo, Request
from mediator.nats.editions import python_client
from mediator.nats.frames import CRLF, MAX_CONNECT, MAX_LINE, ProtocolViolationError, decode_headers
from mediator.nats.subjects import API

if TYPE_CHECKING:
    from mediator.gateway.subscriptions import Subscriptions

MAX_UNFINISHED: Final = 64 * 1024 * 1024
"""Bytes for which :class:`UnfinishedCommands` has room."""
MAX_UNHEARD: Final = 512 * 1024
"""Bytes of a client, at most, that wait for a server that has not answered its CONNECT."""


class CommandCounter:
    """Tells which of these answers are for commands of the gateway, which the client must not see."""

    def __init__(self) -> None:
        self.verbose = True
        """As nats-server has it until CONNECT says otherwise."""
        self._sent = 0
        self._answered = 0
        self._own: deque[int] = deque()

    def note(self, frame: bytes) -> bytes:
        """Count a command that the server answers."""
        self._sent += 1
        return frame

    def note_own(self, frame: bytes) -> bytes:
        """Count a command of the gateway."""
        if self.verbose:
            self._own.append(self._sent)
        return self.note(frame)

    def answers_own(self) -> bool:
        """Count an answer; return whether it answers a command of the gateway."""
        number = self._answered
        self._answered += 1
        if self._own and self._own[0] == number:
            self._own.popleft()
            return True
        return False


class UnfinishedCommands:
    """Counts the bytes that all clients have the gateway hold: of commands that are not whole, and before their login.

    For a command whose size is known these are all of its bytes, sent or not, so that what is accepted finds room.
    """

    def __init__(self, limit: int = MAX_UNFINISHED) -> None:
        self._limit = limit
        self.total = 0

    def has_room(self, size: int) -> bool:
        """Return whether so many bytes more may wait."""
        return self.total + size <= self._limit


class UnfinishedInput:
    """What one connection has there."""

    def __init__(self, everybody: UnfinishedCommands) -> None:
        self._everybody = everybody
        self._counted = 0
        self._unheard = 0
        """Bytes that passed to the server, which has not answered the client's CONNECT yet."""
        self._answered = False

    def may_wait(self, size: int) -> bool:
        """Return whether a command of so many bytes may wait until it is whole."""
        return self._everybody.has_room(size - self._counted)

    def count(self, unfinished: int, passed: Sequence[bytes]) -> bool:
        """Count what waits, and what passed to the server; return whether the client may go on.

        It may not if all have too much waiting and the server has not let it in yet.
        """
        if not self._answered:
            # More than this is not written to a server that does not read.
            self._unheard = min(self._unheard + sum(map(len, passed)), MAX_UNHEARD)
        size = unfinished + self._unheard
        if size != self._counted:
            self._everybody.total += size - self._counted
            self._counted = size
        return self._answered or not size or self._everybody.has_room(0)

    def answered(self) -> None:
        """Take note that the server has answered the client's CONNECT."""
        if not self._answered:
            self._answered = True
            self._everybody.total -= self._unheard
            self._counted -= self._unheard
            self._unheard = 0

    def close(self) -> None:
        """Count nothing of this connection any more."""
        self._everybody.total -= self._counted
        self._counted = 0


MAX_PINGS: Final = 4
"""PINGs behind pushes that may be under way at the same time: the next ones come while the client reads."""

Confirmed = dict[Subscription, int]
"""How many messages of each subscription a PONG confirms, counted from its beginning."""


class ClientPings:
    """The PINGs that the client gets, and what its next PONGs answer."""

    def __init__(self) -> None:
        self._waiting: deque[Confirmed | Callable[[], None] | None] = deque()
        """None is a PING of the server."""
        self._unconfirmed: set[Subscription] = set()
        self._under_way = 0

    def by_server(self) -> None:
        """Note a PING of the server."""
        self._waiting.append(None)

    def probe(self, answered: Callable[[], None]) -> None:
        """Note a PING whose PONG calls ``answered``."""
        self._waiting.append(answered)

    def pushed(self, subscription: Subscription) -> None:
        """Note that something was pushed to a subscription."""
        self._unconfirmed.add(subscription)

    def is_due(self) -> bool:
        """Return whether a PING has to follow what was pushed; it is noted then."""
        if not self._unconfirmed or self._under_way >= MAX_PINGS:
            return False
        self._under_way += 1
        self._waiting.append({each: each.pushed for each in self._unconfirmed})
        self._unconfirmed.clear()
        return True

    def pong(self) -> Confirmed | None:
        """Take a PONG of the client, and return what it confirms; None: it is for the server."""
        answers = self._waiting.popleft() if self._waiting else None
        if isinstance(answers, dict):
            self._under_way -= 1
            return answers
        if answers is None:
            return None
        answers()
        return {}

    def forget(self, subscription: Subscription) -> None:
        """Have what a subscription has not confirmed count as not received."""
        self._unconfirmed.discard(subscription)
        for answers in self._waiting:
            if isinstance(answers, dict):
                answers.pop(subscription, None)

    def end(self) -> set[Subscription]:
        """Forget everything, since the connection is over; return the subscriptions with unconfirmed messages."""
        left = self._unconfirmed.union(*(each for each in self._waiting if isinstance(each, dict)))
        self._waiting.clear()
        self._unconfirmed.clear()
        return left


class ServerPings:
    """The PINGs that the server gets: the client's, and one behind each question about a subscription.

    The client's PONGs are held until all subscriptions before them are decided.
    """

    def __init__(self) -> None:
        self._waiting: deque[Subscription | None] = deque()
        """None is a PING of the client."""
        self._undecided: dict[Subscription, None] = {}
        """In their order."""
        self._made = 0
        self._held: deque[list[int]] = deque()
        """PONGs that wait: up to which number the subscriptions must be decided, and how many PONGs."""

    def by_client(self) -> None:
        """Note a PING of the client."""
        self._waiting.append(None)

    def ask(self, subscription: Subscription) -> None:
        """Note a PING behind the question whether a client may subscribe."""
        self._made += 1
        subscription.number = self._made
        self._undecided[subscription] = None
        self._waiting.append(subscription)

    @property
    def asked(self) -> Subscription | None:
        """The first subscription whose question is not answered."""
        return next((each for each in self._waiting if each is not None), None)

    def pong(self) -> tuple[Subscription | None, bool]:
        """Take a PONG of the server: the subscription that is allowed, if any, and whether the PONG is passed on."""
        allowed = self._waiting.popleft() if self._waiting else None
        if allowed is not None:
            return allowed, False
        if not self._undecided:
            return None, True
        # It waits also for those that came behind its PING.
        if self._held and self._held[-1][0] == self._made:
            self._held[-1][1] += 1
        else:
            self._held.append([self._made, 1])
        return None, False

    def decide(self, subscription: Subscription) -> int:
        """Take note that a subscription is decided; return how many PONGs are released."""
        self._undecided.pop(subscription, None)
        first = next(iter(self._undecided), None)
        count = 0
        while self._held and (first is None or first.number > self._held[0][0]):
            count += self._held.popleft()[1]
        return count

    def end(self) -> None:
        """Forget everything, since the connection is over."""
        self._undecided.clear()
        self._held.clear()


MAX_BYTES: Final = 256 * 1024
"""Bytes of headers and payload that wait in the gateway until they are whole."""
MAX_SUBSCRIPTIONS: Final = 1000
"""Subscriptions of one connection that may match inboxes; one that has made more sends all requests the long way."""
_API: Final = API.encode()
_ANY_LAST: Final = b".*"
_numbers = itertools.count(1)

RequestHandler = Callable[[Request], None]


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
    most: int | None = None
    """How many it takes, once it is to end; None: all."""

    @property
    def ended(self) -> bool:
        """Whether it takes no more answers."""
        return self.most is not None and self.answers >= self.most


class ShortWay:
    """The short way of one connection."""

    def __init__(self, find_door: Callable[[], RequestHandler | None], holds: Callable[[bytes], bool]) -> None:
        """``find_door`` returns the door while it is open; ``holds`` whether a sid holds its inbox alone."""
        self._find_door = find_door
        self._holds = holds
        self._client = ClientInfo(f"gateway {next(_numbers)}")
        self._usable = False
        self._headers = False
        self._prefix: str | None = None
        self._by_sid: dict[bytes, ReplySubscription] = {}
        self._by_subject: dict[bytes, list[ReplySubscription]] = {}
        self._others: set[bytes] = set()
        """Sids of subscriptions that may match an inbox in another way."""
        self._behind = True
        """Whether a request may be under way through nats-server."""
        self._route: ReplySubscription | None = None
        """Where the answer to the next request goes."""
        self.max_payload = 0
        """Bytes that nats-server takes."""

    def connected(self, name: str, *, verbose: bool, pedantic: bool, headers: bool) -> None:
        """Take the options of CONNECT; +OK comes from nats-server, and so do the refusals for pedantic clients."""
        self._usable = not (verbose or pedantic)
        self._headers = headers
        self._client = self._client._replace(name=name)

    def open(self, account: str | None, user: str, connection: str = "") -> str:
        """Take requests from now on: no earlier one is under way. Return the name of the connection.

        ``account``: the client's, where tenants have one. ``connection``: how requests that go through nats-server name
        it, where they do.
        """
        name = connection or self._client.connection
        self._client = self._client._replace(login=user, connection=name)
        self._prefix = "" if account is None else f"mq9.{account}."
        self._behind = False
        return name

    def close(self) -> None:
        """Take no requests any more."""
        self._usable = False

    # The subscriptions that answers go to.

    def subscribed(self, sid: bytes, subject: bytes, queue: bytes) -> None:
        """Add a subscription that may match an inbox."""
        if sid in self._by_sid or sid in self._others:
            return
        if len(self._by_sid) + len(self._others) >= MAX_SUBSCRIPTIONS:
            self.close()
            return
        exact = subject.removesuffix(_ANY_LAST)
        if queue or b"*" in exact or b">" in exact:
            self._others.add(sid)
            return
        made = self._by_sid[sid] = ReplySubscription(sid, subject)
        self._by_subject.setdefault(subject, []).append(made)

    def unsubscribed(self, sid: bytes, most: int) -> int:
        """End a subscription after ``most`` messages in all, 0: now; return how many may come through nats-server."""
        self._others.discard(sid)
        found = self._by_sid.pop(sid, None)
        if found is None:
            return most
        same = self._by_subject[found.subject]
        same.remove(found)
        if not same:
            del self._by_subject[found.subject]
        # Answers to what was asked before still come the short way.
        found.most = min(most, found.requests)
        return most - found.most

    def find_taker(self, to: ReplySubscription, reply: bytes) -> ReplySubscription | None:
        """Return the subscription that gets an answer, and count it; None: the client waits for it no more."""
        if to.ended:
            # As with nats-server, one that was made meanwhile gets it.
            found = self._find_route(reply)
            if found is None:
                return None
            to = found
            to.requests += 1
        to.answers += 1
        return to

    # Requests.

    def takes(self, reply: bytes, length: int, headers: bool) -> bool | None:
        """Return whether a request takes the short way; None: yes, once those before it have arrived."""
        if not self._usable or self._find_door() is None or length > min(MAX_BYTES, self.max_payload):
            return False
        self._route = self._find_route(reply) if reply else None
        if (headers and not self._headers) or (reply and self._route is None):
            return False
        return None if self._behind else True

    def request(self, session: "GatewaySession", subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        """Hand a request to the door, right after :meth:`takes` said that it can be."""
        door = self._find_door()
        assert door is not None
        answer: Callable[[bytes], object] = _nobody
        if self._route is not None:
            self._route.requests += 1
            answer = partial(session.answer, self._route, reply)
        found = decode_headers(headers.partition(CRLF)[2]) if headers else None
        name = f"{self._prefix}{subject.decode('utf-8', 'replace')}"
        door(Request(name, reply, payload, found, self._client, answer))

    def passed(self, subject: bytes) -> None:
        """Take note that a publish goes through nats-server."""
        if subject.startswith(_API):
            self._behind = True

    def _find_route(self, reply: bytes) -> ReplySubscription | None:
        """Return the one subscription that a reply subject leads to."""
        if self._others:
            return None
        exact, wild = self._by_subject.get(reply), self._by_subject.get(reply.rpartition(b".")[0] + _ANY_LAST)
        found = exact if wild is None else wild
        if found is None or len(found) > 1 or (exact and wild) or not self._holds(found[0].sid):
            return None
        return found[0]


def _nobody(_data: bytes) -> None:
    """Answer a request that wants no answer."""


MAX_SERVER_LINE: Final = 1 << 20
MAX_INSPECTED: Final = 256 * 1024
"""Bytes of a payload that the session is shown: nats-server takes no longer metadata of a stream than half of this."""

_PUBLISH: Final = frames.publish_pattern(rb"\$(?:JS\.|SYS\.|mq9\.)|mq9ctl\.")
_MESSAGE: Final = frames.message_pattern()
_TOKENS: Final = rb"[^ \t\r\n.*>]++(?:\.[^ \t\r\n.*>]++)*+"
_REQUEST: Final = re.compile(
    rb"(H?)PUB (\$mq9\.AI\.(?!PUSH\.)%b) (?:(_INBOX\.%b) )?(?:(\d{1,9}) )?(\d{1,9})\r\n" % (_TOKENS, _TOKENS)
)
"""A request to the service as most clients write it: headers or none, verb, reply subject, sizes.

nats-server has answers of its own for subjects with wildcards or empty tokens.
"""


class _Stream:
    """Where the last chunk ended, and inserted frames that wait for the end of a payload."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._missing = 0
        """Bytes that are missing at least before the kept ones make a frame."""
        self._left = 0
        """Bytes of a payload that are still to come."""
        self._dropping = 0
        """Bytes of a refused payload that are still to come."""
        self._waiting: list[bytes] = []
        self._so_far = 0, 0
        self.unfinished = 0
        """Bytes of a frame that waits to be whole, or of what is known of it."""
        self.held = 0
        """Bytes of the inserted frames that wait."""
        self.violation: ProtocolViolationError | None = None
        """What was wrong behind the frames that were passed on last; nothing more may be fed."""

    def insert(self, frame: bytes) -> bytes:
        """Return a frame if it can be inserted now; otherwise :meth:`feed` inserts it as soon as possible."""
        if not self._left:
            return frame
        self._waiting.append(frame)
        self.held += len(frame)
        return b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take a chunk and return what to pass on; sets ``violation``."""
        if self._dropping:
            dropped = min(self._dropping, len(data))
            self._dropping -= dropped
            data = data[dropped:]
            if not data:
                return []
        if self._rest:
            self._rest.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return []
            data = b"".join(self._rest)
            self._rest.clear()
            self.unfinished = 0
        out: list[bytes] = []
        mark = at = min(self._left, len(data))
        self._left -= at
        if self._waiting and not self._left:
            out += (data[:at], *self._waiting)
            self._waiting.clear()
            self.held = 0
        else:
            mark = 0
        try:
            self._frames(data, at, mark, out)
        except ProtocolViolationError as error:
            self.violation = error
            mark, at = self._so_far
            out.append(data[mark:at])
        return out

    def _frames(self, data: bytes, at: int, mark: int, out: list[bytes]) -> None:
        """Read frames from ``at`` on; the bytes from ``mark`` to ``at`` are still to be passed on.

        Raises :class:`ProtocolViolationError`, having set how far the data was good.
        """
        raise NotImplementedError

    def _drop(self, data: bytes, at: int, end: int, mark: int, out: list[bytes]) -> int:
        """Pass on the bytes before ``at``, drop those up to ``end``, and return where to continue."""
        out.append(data[mark:at])
        self._dropping = max(0, end - len(data))
        return min(end, len(data))

    def _end(self, data: bytes, at: int, mark: int, out: list[bytes]) -> None:
        """Pass on up to ``at``, which may be in a later chunk, and keep the rest."""
        if at > len(data):
            self._left = at - len(data)
        elif at < len(data):
            self._rest.append(data[at:])
            self.unfinished = len(data) - at + self._missing
        if mark < at:
            out.append(data[mark:at] if mark or at < len(data) else data)


class ClientStream(_Stream):
    """Reads what a client writes."""

    def __init__(self, session: "GatewaySession") -> None:
        super().__init__()
        self._session = session
        self.count_publishes = True
        """Whether the session is told of each publish."""

    def _frames(self, data: bytes, at: int, mark: int, out: list[bytes]) -> None:
        quick, request, size, session = _PUBLISH.match, _REQUEST.match, len(data), self._session
        self._missing = 0
        while at < size:
            found = quick(data, at) if session.connected else None
            if found is not None:
                at = found.end() + int(found[1]) + 2
                if self.count_publishes:
                    session.publishing()
                continue
            self._so_far = mark, at
            if session.connected and (asked := request(data, at)) is not None:
                after = self._request(data, at, asked)
                if after is None:
                    break
                if after:
                    out.append(data[mark:at])
                    mark = at = after
                    continue
            end = data.find(b"\n", at, at + MAX_CONNECT)
            line = data[at : end if end >= 0 else at + MAX_CONNECT]
            self._so_far = mark, at
            if len(line) > MAX_LINE and not self._may_be_long(line, end >= 0):
                raise ProtocolViolationError("maximum control line exceeded")
            if end < 0:
                break
            verb, words = self._decode(line)
            frame = data[at : end + 1]
            if verb in (b"PUB", b"HPUB"):
                subject, reply, head, length = frames.decode_publish(verb, words)
                after, passes = self._publish(data, end + 1, subject, reply, head, length)
                if passes is None:
                    break
                if not passes:
                    mark = at = self._drop(data, at, after, mark, out)
                    continue
                mark, at = self._mend(data, at, end + 1, subject, mark, out), after
                if self.count_publishes:
                    session.publishing()
                continue
            instead = self._instead(verb, words, frame)
            if instead is None:
                break
            if instead is not frame:
                out += (data[mark:at], instead)
                mark = end + 1
            at = end + 1
        self._end(data, at, mark, out)

    def _decode(self, line: bytes) -> tuple[bytes, list[bytes]]:
        verb, words = frames.decode_command(line)
        if not self._session.connected and verb not in (b"CONNECT", b"PING", b"PONG"):
            # Who has not said who it is keeps nothing waiting here; as nats-server words it.
            raise ProtocolViolationError("Authorization Violation")
        return verb, words

    def _may_be_long(self, line: bytes, whole: bool) -> bool:
        return (
            len(line) < MAX_CONNECT and line[:7].upper() == b"CONNECT" and (whole or self._session.may_wait(len(line)))
        )

    def _request(self, data: bytes, at: int, asked: re.Match[bytes]) -> int | None:
        """Hand a request to the session, if it takes it, and return where it ends.

        0: it may pass to the server, like any publish; None: not decided yet, or not whole.
        """
        head, length, start = asked[4], int(asked[5]), asked.end()
        if bool(asked[1]) is (head is None) or start - at > MAX_LINE:
            return 0
        after = start + length + 2
        if after > len(data) and not self._session.may_wait(after - at):
            # nats-server reads it piece by piece.
            return 0
        reply = asked[3] or b""
        taken = self._session.takes(reply, length, head is not None)
        if not taken:
            return None if taken is None else 0
        if after > len(data):
            self._missing = after - len(data)
            return None
        middle = start + int(head or 0)
        if middle > after - 2 or data[after - 2 : after] != CRLF:
            raise ProtocolViolationError("Unknown Protocol Operation")
        self._session.request(asked[2], reply, data[start:middle], data[middle : after - 2])
        return after

    def _publish(
        self, data: bytes, start: int, subject: bytes, reply: bytes, head: int, length: int
    ) -> tuple[int, bool | None]:
        """Return where a publish ends, and whether it passes; None: its body is not there yet."""
        end = start + length
        passes = self._session.may_publish(subject, reply)
        if passes is None and length <= MAX_INSPECTED:
            missing = end + 2 - len(data)
            if missing <= 0:
                passes = self._session.may_contain(subject, data[start + head : end])
            elif self._session.may_wait(MAX_LINE + length):
                self._missing = missing
                return end + 2, None
            else:
                passes = self._session.may_contain(subject, None)
        elif passes is None:
            passes = self._session.may_contain(subject, None)
        if passes:
            self._session.passing(subject)
        return end + 2, passes

    def _mend(self, data: bytes, at: int, end: int, subject: bytes, mark: int, out: list[bytes]) -> int:
        """Pass on the line of a publish up to ``end`` if nobody could answer it as it is; return the new ``mark``."""
        answerable = permissions.without_empty_tokens(subject)
        if answerable is subject:
            return mark
        out += (data[mark:at], data[at:end].replace(subject, answerable, 1))
        return end

    def _instead(self, verb: bytes, words: list[bytes], frame: bytes) -> bytes | None:
        session = self._session
        if verb == b"SUB" and len(words) in (2, 3):
            return session.subscribe(frame, words[0], words[1] if len(words) == 3 else b"", words[-1])
        if verb == b"UNSUB" and len(words) in (1, 2):
            return session.unsubscribe(frame, words[0], frames.decode_count(words[1]) if len(words) == 2 else 0)
        if verb == b"CONNECT":
            return session.connect(frame, frame[7:].strip())
        if verb == b"PONG":
            return session.pong(frame)
        if verb == b"PING":
            session.pinging()
            return frame
        raise ProtocolViolationError("Unknown Protocol Operation")


class ServerStream(_Stream):
    """Reads what a server writes."""

    def __init__(self, session: "GatewaySession") -> None:
        super().__init__()
        self._session = session

    def _frames(self, data: bytes, at: int, mark: int, out: list[bytes]) -> None:
        quick = _MESSAGE.match
        size = len(data)
        while at < size:
            found = quick(data, at)
            if found is not None:
                at = found.end() + int(found[1]) + 2
                continue
            self._so_far = mark, at
            end = data.find(b"\r\n", at) + 2
            if end < 2:
                if size - at > MAX_SERVER_LINE:
                    raise ProtocolViolationError("the server's line is too long")
                break
            frame = data[at:end]
            instead = self._instead(frame)
            if instead is not frame:
                out += (data[mark:at], instead)
                mark = end
            at = end
        self._end(data, at, mark, out)

    def _instead(self, frame: bytes) -> bytes:
        verb = frame[:4].upper()
        if verb == b"PING":
            return self._session.ping(frame)
        if verb == b"-ERR":
            return self._session.failed(frame)
        if verb == b"INFO":
            return self._session.info(frame)
        if verb == b"+OK\r":
            return self._session.succeeded(frame)
        if verb == b"PONG":
            return self._session.flushed(frame)
        raise ProtocolViolationError("unknown operation of the server")


_IDENTIFY: Final = f"{subjects.API}{subjects.OPEN}".encode()
_PROBE: Final = f"{subjects.PUSH}gateway."
"""What the subject begins with on which nats-server is asked for the client's rights."""
_PROBE_SID: Final = b"mq9gateway"
_PROBE_VIOLATION: Final = subjects.violation(_PROBE).rstrip('"')
"""What the server's refusal of such a subscription begins with."""
_TOO_MANY: Final = "maximum subscriptions exceeded"


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
        self._by_sid: dict[bytes, Subscription] = {}
        """Subscriptions whose sids are in use: not ended by the client, nor by the maximum of messages."""
        self._server_pings = ServerPings()
        self._client_pings = ClientPings()
        self._blocked: set[Subscription] = set()
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
                subscription.tenant = identity.tenant
                self._subscriptions.open(self, subscription)
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

    def accept(self, subscription: Subscription) -> None:
        """Start a subscription that was opened; release the PONGs that wait for it."""
        if subscription.closed:
            subscription.close("broken")
            return
        self.answered(subscription)
        subscription.start()

    def answered(self, subscription: Subscription) -> None:
        """Release the PONGs that wait for a subscription: it is open, or takes too long."""
        self._write_client(self._released_by(subscription))
        self.changed()

    def refuse(self, subscription: Subscription, reason: str) -> None:
        """End a subscription that the service refused."""
        if self._by_sid.get(subscription.sid) is subscription:
            self._write_client(self._refused(subscription, subjects.violation(subscription.text, reason)))
        else:
            self._write_client(self._released_by(subscription))
        self.changed()

    def push(self, subscription: Subscription, pushes: Sequence[bytes]) -> None:
        """Write pushes of a subscription, at most as many as it takes, and ask for their confirmation."""
        if not pushes or self._by_sid.get(subscription.sid) is not subscription:
            return
        if subscription.max_messages:
            pushes = pushes[: subscription.max_messages - subscription.pushed]
        subscription.pushed += len(pushes)
        self._client_pings.pushed(subscription)
        if subscription.pushed == subscription.max_messages:
            del self._by_sid[subscription.sid]
        self._write_client(b"".join(pushes))
        self._ask_for_confirmation()
        self.changed()

    def is_full(self, subscription: Subscription) -> bool:
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
                subscription.resume()

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
            if permissions.may_match(text):
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
        # With NATS's wildcards, whatever the client wrote.
        pattern = found.pattern if isinstance(found, subjects.BroadcastSubject) else text
        made = Subscription(
            sid, text, found, queue.decode("utf-8", "replace"), self.push, self.is_full, self.python, not self.headers
        )
        self._by_sid[sid] = made
        self._server_pings.ask(made)
        self._subscriptions.add(self, made)
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
        subscription.max_messages = most
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
            subscription.confirm(count)
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
        """Check a publish by its subjects; None: that depends on its body. See :mod:`.permissions`."""
        for each in (subject, reply):
            if not permissions.is_for_clients(each):
                self._refuse_publish(each)
                return False
        if not permissions.can_be_answered(subject, reply):
            self._refuse_publish(reply)
            return False
        return None if permissions.makes_stream(subject) else True

    def may_contain(self, subject: bytes, body: bytes | None) -> bool:
        """Check a request for a stream by its configuration; None: it is too long to be looked into."""
        if body is not None and permissions.is_stream_allowed(body):
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
                [self._refused(each, subjects.violation(each.text)) for each in list(self._by_sid.values())]
            )
        if text.startswith(_PROBE_VIOLATION):
            # The server words subjects in its own way, but answers in order: the first probe that waits is meant.
            refused = self._server_pings.asked
            if refused is None:
                return b""
            text = subjects.violation(refused.text)
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
                allowed.tenant = self.tenant
                self._subscriptions.open(self, allowed)
        return frame if passes else b""

    # Inside.

    def _ask(self) -> tuple[str, bytes]:
        """Return the token of a question about the client, and the frame that asks it."""
        token, body = self._identities.ask(self)
        return token, frames.encode_publish(_IDENTIFY, body)

    def _ask_for_confirmation(self) -> None:
        if self._client_pings.is_due():
            self._write_client(frames.PING)

    def _forget(self, subscription: Subscription) -> bytes:
        """Remove a subscription, and return the PONGs that waited for it; unconfirmed pushes count as not received."""
        self._by_sid.pop(subscription.sid, None)
        self._client_pings.forget(subscription)
        self._blocked.discard(subscription)
        return self._released_by(subscription)

    def _refused(self, subscription: Subscription, text: str) -> bytes:
        """Remove a subscription, and return the frames for the client."""
        subscription.refused = True
        self._subscriptions.end(subscription, "unsub")
        return frames.encode_error(text) + self._forget(subscription)

    def _released_by(self, subscription: Subscription) -> bytes:
        """Return the PONGs for which this was the last decision missing."""
        return frames.PONG * self._server_pings.decide(subscription)

    def _end_if_over(self, subscription: Subscription) -> None:
        """End a subscription whose client has read all messages that it asked for."""
        if 0 < subscription.max_messages <= subscription.confirmed:
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
