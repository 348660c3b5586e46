"""The short way of requests: from a client's connection to the NATS door in memory, and the answer back.

Without it a request crosses nats-server twice, and its frame is read five times. It is taken only where the client
cannot tell: nats-server vouches for the client's account (:mod:`.identities`), no permissions of the user's own limit
what it may publish, and the answer goes to one plain subscription of the same connection, to an inbox that no other
connection may listen to. Everything else goes through nats-server, and no request overtakes one that did.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from mediator.nats.client import ClientInfo, Request
from mediator.nats.frames import CRLF, decode_headers
from mediator.nats.subjects import API

if TYPE_CHECKING:
    from mediator.push.gateway.session import GatewaySession

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
