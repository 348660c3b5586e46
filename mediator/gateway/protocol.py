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

Below it are :mod:`.session`, which has the subscriptions to stored mail, and :mod:`.streams`, which has the bytes.
"""

import itertools
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import orjson

from mediator.gateway.identity import ClientIdentity
from mediator.gateway.inboxes import InboxHolder, ReplyInboxes, ReplySubscription, may_match
from mediator.gateway.session import (
    AccountNamed,
    GatewayContext,
    IdentityRequested,
    PushSession,
    ReadingResumed,
    ShortWayOpened,
    SubscriptionEnded,
    SubscriptionMade,
)
from mediator.gateway.subscription import Subscription
from mediator.nats import frames, subjects
from mediator.nats.client import ClientInfo, Request
from mediator.nats.editions import is_python_client
from mediator.nats.frames import CRLF, MAX_CONNECT, MAX_LINE, ProtocolViolationError

MAX_SERVER_LINE: Final = 1 << 20
MAX_INSPECTED: Final = 256 * 1024
"""Bytes of a publish that is looked into: nats-server takes no longer metadata of a stream than half of this."""
MAX_SHORT_WAY: Final = 256 * 1024
"""Bytes of headers and payload of a request that wait in the gateway until they are whole."""

_API: Final = subjects.API.encode()
_IDENTIFY: Final = f"{subjects.API}{subjects.OPEN}".encode()
_IDENTIFY_VIOLATION: Final = f'Permissions Violation for Publish to "{_IDENTIFY.decode()}"'
_PROBE: Final = f"{subjects.PUSH}gateway."
"""What the subject begins with on which nats-server is asked for the client's rights."""
_PROBE_SID: Final = b"mq9gateway"
_PROBE_VIOLATION: Final = subjects.violation(_PROBE).rstrip('"')
"""What the server's refusal of such a subscription begins with."""
_TOO_MANY: Final = "maximum subscriptions exceeded"
_WITH_INFO: Final = 1
"""The version of the clients' protocol with INFO at any time."""

_PUBLISH: Final = frames.publish_pattern(rb"\$(?:JS\.|SYS\.|mq9\.)|mq9ctl\.")
_MESSAGE: Final = frames.message_pattern()
_TOKENS: Final = rb"[^ \t\r\n.*>]++(?:\.[^ \t\r\n.*>]++)*"
_REQUEST: Final = re.compile(
    rb"(H?)PUB (\$mq9\.AI\.(?!PUSH\.)%b) (?:(_INBOX\.%b) )?(?:(\d{1,9}) )?(\d{1,9})\r\n" % (_TOKENS, _TOKENS)
)
"""A request to the service as most clients write it: headers or none, verb, reply subject, sizes.

nats-server has answers of its own for subjects with wildcards or empty tokens.
"""
_numbers = itertools.count(1)


class GatewayProtocol(PushSession):
    """The state of one connection.

    Whoever feeds it handles its events, in their order, and writes what it has for both sides.
    """

    waiting = False
    """Whether nothing more can be read from the client for now; :class:`ReadingResumed` ends that."""

    name = ""
    """The client's name in its CONNECT."""
    headers = False
    """Whether the client takes headers."""
    unread_answers = 0
    """Bytes of answers that may wait for the client to read; lowered by who writes them."""
    _asked = False
    """Whether the service was asked who the client is, for its subscriptions."""
    _hides_info = False
    """Whether the client expects one INFO only."""

    # The short way.
    _may_go_short = False
    """Whether the client and its options allow the short way."""
    _prefix = ""
    """What nats-server puts before the subjects of requests."""
    _slow_requests_pending = True
    """Whether a request may be under way through nats-server, which the next one would overtake."""
    _asking = ""
    """The token of the question whose answer opens the short way; nothing more is read until it comes."""
    _question = b""
    _max_payload = 0
    """Bytes that nats-server takes."""

    def __init__(self, context: GatewayContext, client_ip: str, wake: Callable[[], None]) -> None:
        """``wake`` is called when there is something to write, or an event, that does not follow from bytes."""
        super().__init__(context.unfinished, wake)
        self._context = context
        self._client_ip = client_ip
        self._client = ClientInfo(f"gateway {next(_numbers)}")
        self._inbox_holder = InboxHolder(self.probe, self._resume)
        self._inboxes = ReplyInboxes()

    @property
    def login(self) -> str:
        """The client's login, empty until the service was asked who it is."""
        return self._client.login

    # Bytes and events.

    def receive_from_client(self, data: bytes) -> None:
        """Take what the client wrote; raises :class:`ProtocolViolationError`."""
        self.waiting = False
        asking, up = self._asking, self._up
        start = len(up.out)
        up.feed(data)
        # Nothing changes for a client whom the server has let in and whose commands are whole.
        if not self._heard or up.unfinished != self._unfinished:
            self._count_unfinished(up.out[start:])
        if self._asking is not asking:
            # Behind the frames that were read so far, so that its answer says that they have arrived.
            self._insert_command(self._question)
        if up.violation is not None:
            raise up.violation

    def hang_up(self) -> None:
        """Send the server what the client wrote last, if that still waits; the client has gone."""
        if self.waiting:
            self._may_go_short = False
            with suppress(ProtocolViolationError):
                self.receive_from_client(b"")

    def close(self) -> None:
        """End all subscriptions, since the connection is over."""
        super().close()
        self._context.claims.leave(self._inbox_holder)

    # Answers to questions and requests.

    def identified(self, token: str, identity: ClientIdentity | None) -> None:
        """Take the service's answer, and go on with what waits for it.

        None: there is none. It is asked again for subscriptions; requests go the long way.
        """
        if identity is None:
            if token == self._asking:
                self._asking, self._may_go_short = "", False
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
            self._slow_requests_pending = False
            if not self.closed:
                self.events.append(ShortWayOpened(name))
            self._resume()
        else:
            self._wake()

    def answer(self, to: ReplySubscription, reply: bytes, data: bytes) -> bool:
        """Write the answer to a request; False: nobody waits for it any more."""
        if self.closed:
            return False
        if to.max_answers is not None and to.answers >= to.max_answers:
            # As with nats-server, one that was made meanwhile gets it.
            found = self._inboxes.find(reply)
            if found is None:
                return False
            to = found
            to.requests += 1
        to.answers += 1
        frame = frames.encode_message(reply, to.sid, data)
        self.unread_answers += len(frame)
        self._down.insert(frame)
        self._wake()
        return True

    # Frames from the client.

    def _read_client_frames(self, data: bytes, at: int, mark: int) -> tuple[int, int]:
        quick, request, size, stream = _PUBLISH.match, _REQUEST.match, len(data), self._up
        out = stream.out
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
            end = data.find(b"\n", at, at + MAX_LINE + 1) + 1
            frame = data[at:end] if end else self._long_line(data, at)
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
                    mark = at = stream.drop(data, at, end + length + 2, mark)
                    continue
                answerable = subjects.without_empty_tokens(subject)
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
        return mark, at

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

    def _long_line(self, data: bytes, at: int) -> bytes | None:
        """Return the line that begins there, with its end, or None if that has not come; CONNECT may be long."""
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
        self._may_go_short = not self._verbose and options.get("pedantic", True) is False
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
            self._down.insert(frames.encode_error(found.text))
            return b""
        if sid in self._by_sid:
            # As with nats-server, the first one stays. The client's subject must not reach the server under this sid.
            return self._succeed()
        group = queue.decode("utf-8", "replace")
        if isinstance(found, subjects.PlainSubject):
            if may_match(text):
                allowed = self._context.claims.claim(self._inbox_holder, sid, text, group)
                self.waiting = allowed is None
                if self.waiting:
                    return None
                if not allowed:
                    self._down.insert(frames.encode_error(subjects.violation(text)))
                    return b""
                claim = self._context.claims.find(self._inbox_holder, sid)
                self._may_go_short = self._inboxes.add(sid, subject, queue, claim) and self._may_go_short
            return self._command(frame)
        if len(self._by_sid) >= self._context.address.max_subscriptions:
            self._down.insert(frames.encode_error(subjects.violation(text, _TOO_MANY)))
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

    def _unsubscribe(self, frame: bytes, sid: bytes, max_msgs: int) -> bytes:
        """End a subscription after ``max_msgs`` messages in all; 0: now."""
        subscription = self._by_sid.get(sid)
        if subscription is None:
            # With a maximum it ends by itself once its replies have come, which the gateway does not count.
            self._context.claims.release(self._inbox_holder, sid)
            by_server = self._inboxes.remove(sid, max_msgs)
            return self._command(frame if by_server == max_msgs else frames.encode_unsubscribe(sid, by_server))
        subscription.max_messages = max_msgs
        if not max_msgs:
            self._down.insert(self._forget(subscription))
            self.events.append(SubscriptionEnded(subscription, "unsub"))
        elif max_msgs <= subscription.pushed:
            del self._by_sid[sid]
            self._end_if_read(subscription)
        return self._succeed()

    # Publishes, and requests that take the short way.

    def _may_publish(
        self, data: bytes, start: int, subject: bytes, reply: bytes, head: int, length: int
    ) -> bool | None:
        """Return whether a publish passes, by :mod:`mediator.nats.subjects`; None: its body is not there yet."""
        for each in (subject, reply):
            if not subjects.is_for_clients(each):
                return self._refuse_publish(each)
        if not subjects.can_be_answered(subject, reply):
            return self._refuse_publish(reply)
        if subjects.makes_stream(subject):
            if length > MAX_INSPECTED:
                return self._refuse_publish(subject)
            end = start + length
            missing = end + 2 - len(data)
            if missing > 0:
                if not self._may_wait(MAX_LINE + length):
                    return self._refuse_publish(subject)
                self._up.missing = missing
                return None
            if not subjects.is_stream_config_allowed(data[start + head : end]):
                return self._refuse_publish(subject)
        elif subject.startswith(_API):
            # No later request may overtake it.
            self._slow_requests_pending = True
        return True

    def _refuse_publish(self, subject: bytes) -> bool:
        text = f'Permissions Violation for Publish to "{subject.decode("utf-8", "replace")}"'
        self._down.insert(frames.encode_error(text))
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
        if not (
            self._may_go_short and self._context.short_way and length <= MAX_SHORT_WAY and length <= self._max_payload
        ):
            return 0
        reply = asked[3] or b""
        route = self._inboxes.find(reply) if reply else None
        if (reply and route is None) or (head is not None and not self.headers):
            return 0
        if self._slow_requests_pending:
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

    # Frames from the server.

    def _read_server_frames(self, data: bytes, at: int, mark: int) -> tuple[int, int]:
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
                stream.out += (data[mark:at], instead)
                mark = end
            at = end
        return mark, at

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
            self._may_go_short = False
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

    # Inside.

    def _ask(self) -> tuple[str, bytes]:
        """Return the token of a question about the client, and the frame that asks it."""
        token, body = self._context.make_identity_request()
        self.events.append(IdentityRequested(token))
        return token, frames.encode_publish(_IDENTIFY, body)

    def _resume(self) -> None:
        self.events.append(ReadingResumed())
        self._wake()

    def _succeed(self) -> bytes:
        """Return a command without effect in place of one of a verbose client, so that the server answers +OK."""
        return self._command(frames.encode_unsubscribe(_PROBE_SID)) if self._verbose else b""


def _drop_answer(_data: bytes) -> None:
    """Answer a request that wants no answer."""
