"""What a DIDComm check is given: wallets and correspondents made for it, and raw requests for the malformed ones."""

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from conformance.checks import CannotTryError, CheckFailedError, NotOfferedError, Suite, Transcript
from conformance.didcomm.target import Target
from mediator.errors import MediatorError
from mediator.http.bodies import read_body
from pickup.client import ClientError, DeliveredMessage, Grant, Holder, HttpStatusError, Sender, Wallet
from pickup.client.conversation import MEDIA_TYPES, ClientResources
from pickup.client.handshake import ClientHandshake
from pickup.client.plaintext import Json, Plaintext, id_of, read, write
from pickup.client.sender import forward_v1, forward_v2
from pickup.client.wallet import Link
from pickup.envelope import Envelopes, OpenedEnvelope
from pickup.envelope.reading import Jws
from pickup.message import encode
from pickup.rules.names import base58, canonical, verkey
from pickup.rules.records import Generation

V1, V2 = Generation.V1, Generation.V2
LABEL = "mediator conformance"
DISCOVER = {
    V1: ("discover-features/2.0/queries", "discover-features/1.0/query"),
    V2: ("discover-features/2.0/queries",),
}
MAX_BODY = 16 * 1024 * 1024

SUITE: "Suite[DidcommSession]" = Suite("didcomm")


class RecordingEnvelopes:
    """Records each plaintext that is sealed or opened; implements :class:`pickup.envelope.Envelopes`."""

    def __init__(self, envelopes: Envelopes, transcript: Transcript) -> None:
        self._envelopes = envelopes
        self._transcript = transcript

    async def open(self, data: bytes) -> OpenedEnvelope:
        """Open an envelope."""
        opened = await self._envelopes.open(data)
        message = opened.plaintext
        self._transcript.came(str(message.get("@type") or message.get("type")), dict(message))
        return opened

    async def verify(self, jws: Jws) -> str:
        """Verify a signature."""
        return await self._envelopes.verify(jws)

    async def seal_v1(self, plaintext: bytes, to: Sequence[str], sender: str | None) -> bytes:
        """Seal for v1."""
        with contextlib.suppress(ValueError):
            message = orjson.loads(plaintext)
            self._transcript.sent(str(message.get("@type")), message)
        return await self._envelopes.seal_v1(plaintext, to, sender)

    async def seal_v2(self, plaintext: Mapping[str, Any], to: str, sender: str | None) -> bytes:
        """Seal for v2."""
        self._transcript.sent(str(plaintext.get("type")), dict(plaintext))
        return await self._envelopes.seal_v2(plaintext, to, sender)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """What came for an envelope that was posted."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(slots=True)
class Mailbox:
    """A wallet with mediation, a key for which it gets mail, and somebody who writes to it."""

    holder: Holder
    grant: Grant
    key: str
    sender: Sender
    picks_up: bool
    """Whether the mediator speaks the pickup protocol of the wallet."""

    async def send(self, text: str, key: str | None = None) -> None:
        """Send a basic message through the mediator, to ``key`` if not to the key that the wallet began with."""
        to, generation = key or self.key, self.holder.generation
        if generation is V1:
            message = write(V1, "basicmessage/1.0/message", {"content": text})
            await self.sender.send_v1(to, self.grant.routing, self.grant.endpoint, message)
        else:
            message = write(V2, "basicmessage/2.0/message", {"content": text})
            await self.sender.send_v2(to, self.grant.routing[0], self.grant.endpoint, message)

    async def try_to_send(self, text: str, key: str) -> None:
        """Send a message that the mediator may refuse."""
        with contextlib.suppress(HttpStatusError):
            await self.send(text, key)

    async def add_key(self) -> str:
        """Register another key and return it."""
        return await self.holder.add_key()

    async def seal(self, text: str, key: str | None = None) -> bytes:
        """Seal a basic message for the wallet, without a forward."""
        to, message = key or self.key, write(self.holder.generation, "basicmessage/1.0/message", {"content": text})
        if self.holder.generation is V1:
            return await self.sender.pack_v1(to, (), message)
        return await self.sender.pack_v2(to, None, message)

    async def forward(self, envelope: bytes, to: str) -> None:
        """Send an envelope through the mediator by a forward that names ``to``."""
        await self.sender.deliver(await self.wrap(envelope, to), self.grant.endpoint, self.holder.generation)

    async def wrap(self, envelope: bytes, to: str, **headers: Any) -> bytes:
        """Seal a forward for the mediator, anonymously; ``headers`` are added to its plaintext."""
        envelopes = self.sender.resources.envelopes
        if self.holder.generation is V1:
            key = canonical(to)
            to = base58(verkey(key)) if key is not None and key.startswith("did:key:z6Mk") and "#" not in to else to
            return await envelopes.seal_v1(encode({**forward_v1(to, envelope), **headers}), self.grant.routing, None)
        routing = self.grant.routing[0]
        return await envelopes.seal_v2(forward_v2(to, [envelope], routing, **headers), routing, None)

    async def text(self, mail: DeliveredMessage) -> str:
        """Open mail of :meth:`send` and return its text."""
        message = (await self.holder.open(mail)).message
        return str(message["content"] if "content" in message else message["body"]["content"])

    async def texts(self, mails: Sequence[DeliveredMessage]) -> list[str]:
        """Open several."""
        return [await self.text(mail) for mail in mails]


class DidcommSession:
    """A check's own wallets at one mediator, closed and emptied with it."""

    def __init__(
        self, target: Target, transcript: Transcript, http: aiohttp.ClientSession, seconds: float, stack: AsyncExitStack
    ) -> None:
        """``seconds`` is the timeout of each answer. Use :meth:`open`."""
        self.target = target
        self.transcript = transcript
        self.http = http
        """For requests that no client would make."""
        self.seconds = seconds
        self._stack = stack
        self._mailboxes: list[Mailbox] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, target: Target, transcript: Transcript, seconds: float = 10.0
    ) -> AsyncIterator["DidcommSession"]:
        """Make a session, and remove its keys and mail at the end; the mediator keeps the empty connections."""
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(seconds)))
            session = cls(target, transcript, http, seconds, stack)
            try:
                yield session
            finally:
                for mailbox in session._mailboxes:
                    with contextlib.suppress(ClientError):
                        await _empty(mailbox)

    def invited(self, generation: Generation) -> None:
        """Raise :class:`NotOfferedError` without an invitation of this generation."""
        if generation not in self.target.invitations:
            raise NotOfferedError(f"no invitation for DIDComm {generation} was given or found")

    def resources(self) -> ClientResources:
        """Return a client of its own, whose messages are recorded."""
        resources = ClientResources(Wallet())
        self._stack.push_async_callback(resources.close)
        resources.envelopes = RecordingEnvelopes(resources.envelopes, self.transcript)
        return resources

    async def wallet(
        self,
        generation: Generation,
        *,
        handshake: str = "",
        endpoint: str | None = None,
        pickup: str | None = None,
        mediation: str | None = None,
    ) -> Holder:
        """Connect a wallet: by ``handshake``, or in v1 by the first that works.

        Raises :class:`NotOfferedError` without an invitation, :class:`CannotTryError` when no handshake works; a
        handshake that is named fails as it fails.
        """
        self.invited(generation)
        invitation, resources = self.target.invitations[generation], self.resources()
        if generation is V2:
            assert invitation.did is not None
            uri = {"uri": endpoint or "", "accept": ["didcomm/v2"]}
            service = {"type": "DIDCommMessaging", "serviceEndpoint": uri}
            mine = resources.wallet.new_did([service] if endpoint else [])
            try:
                endpoints = await resources.endpoints(invitation.did)
            except MediatorError as error:
                raise CannotTryError(f"the mediator's DID leads nowhere: {error}") from error
            link = Link(V2, mine, invitation.did, endpoints, invitation=invitation.id)
        else:
            made = ClientHandshake(invitation, resources, label=LABEL, endpoint=endpoint, seconds=self.seconds)
            link = await (made.make(handshake) if handshake else self._connect(made))
        return Holder(link, resources, pickup=pickup, mediation=mediation, seconds=self.seconds)

    async def _connect(self, made: ClientHandshake) -> Link:
        # What works once is not sought again, and neither is what does not: each try may take until its timeout.
        if self.target.handshake is None:
            self.target.handshake, reasons = "", []
            for handshake in self.handshakes():
                try:
                    link = await made.make(handshake)
                except ClientError as error:
                    reasons.append(f"{handshake}: {error}")
                else:
                    self.target.handshake = handshake
                    return link
            self.target.unusable = f"no handshake works: {'; '.join(reasons)}"
        if not self.target.handshake:
            raise CannotTryError(self.target.unusable)
        try:
            return await made.make(self.target.handshake)
        except ClientError as error:
            raise CannotTryError(f"{self.target.handshake}: {error}") from error

    def handshakes(self) -> list[str]:
        """Return the handshakes that the v1 invitation offers, of those that the client makes, the newest first."""
        self.invited(V1)
        raw = self.target.invitations[V1].raw
        if "handshake_protocols" not in raw:
            return ["connections/1.0"]
        offered = {
            str(each).removesuffix("/").partition("didcomm.org/")[2] for each in raw["handshake_protocols"] or []
        }
        known = ("didexchange/1.1", "didexchange/1.0", "connections/1.0")
        return [name for name in known if name in offered or (name[:-1] + "x") in offered]

    async def mailbox(
        self, generation: Generation, *, pickup: str | None = None, mediation: str | None = None
    ) -> Mailbox:
        """Connect a wallet, get mediation, register a key, and make a correspondent.

        Raises :class:`NotOfferedError` where the protocols are not disclosed, :class:`CannotTryError` where one of the
        steps fails, which checks of their own try.
        """
        holder = await self.wallet(generation, pickup=pickup, mediation=mediation)
        family = "message-pickup" if pickup == "4.0" else "messagepickup"
        if pickup is not None:
            await self.offered(holder, f"{family}/{pickup}")
        if mediation is not None:
            await self.offered(holder, f"coordinate-mediation/{mediation}")
        try:
            grant = await holder.mediate()
            key = await holder.add_key()
        except ClientError as error:
            raise CannotTryError(f"no mediation: {error}") from error
        mailbox = Mailbox(holder, grant, key, await self.sender(), pickup is not None)
        self._mailboxes.append(mailbox)
        if pickup is not None and await self.features(holder) is None:
            try:
                await holder.status()
            except ClientError as error:
                mailbox.picks_up = False
                raise NotOfferedError(f"it discloses no protocols, and to status-request: {error}") from error
        return mailbox

    async def sender(self) -> Sender:
        """Make somebody who writes from keys of its own."""
        sender = await self._stack.enter_async_context(Sender(seconds=self.seconds))
        sender.resources.envelopes = RecordingEnvelopes(sender.resources.envelopes, self.transcript)
        return sender

    # What the mediator says that it speaks.

    async def features(self, holder: Holder) -> frozenset[str] | None:
        """Return the protocols that the mediator discloses, as ``messagepickup/2.0``; None where it does not say."""
        known, generation = self.target.features, holder.generation
        if generation not in known:
            known[generation] = await self._discover(holder)
        return known[generation]

    async def _discover(self, holder: Holder) -> frozenset[str] | None:
        for type in DISCOVER[holder.generation]:
            query = (
                {"query": "*"} if type.endswith("query") else {"queries": [{"feature-type": "protocol", "match": "*"}]}
            )
            with contextlib.suppress(ClientError):
                body = (await holder.ask(type, query)).body
                listed = body.get("disclosures") or body.get("protocols") or []
                found = [str(item.get("id") or item.get("pid")) for item in listed if isinstance(item, dict)]
                if found:
                    return frozenset(each.removesuffix("/").partition("didcomm.org/")[2] or each for each in found)
        return None

    async def offered(self, holder: Holder, protocol: str) -> None:
        """Raise :class:`NotOfferedError` where the mediator discloses its protocols and this one is not among them."""
        features = await self.features(holder)
        if features is not None and protocol not in features:
            raise NotOfferedError(f"it does not disclose {protocol}")

    @contextlib.asynccontextmanager
    async def socket(self, holder: Holder) -> AsyncIterator["Socket"]:
        """Open a WebSocket; leaving the block drops its connection without a close frame, as a phone does.

        Raises :class:`NotOfferedError` where the mediator names none, or opens none.
        """
        async with aiohttp.ClientSession() as http:
            try:
                async with asyncio.timeout(self.seconds):
                    opened = await http.ws_connect(holder.link.url("ws", "wss"), max_msg_size=MAX_BODY)
            except (aiohttp.ClientError, TimeoutError, ClientError) as error:
                raise NotOfferedError(f"no WebSocket: {error or type(error).__name__}") from error
            yield Socket(opened, self, holder)

    # Raw requests.

    async def seal(self, holder: Holder, message: Json) -> bytes:
        """Seal a plaintext for the mediator; ``from`` and ``to`` of v2 are filled in unless the message has them."""
        link, envelopes = holder.link, holder.resources.envelopes
        if holder.generation is V1:
            return await envelopes.seal_v1(encode(message), [link.theirs], link.mine)
        return await envelopes.seal_v2({"from": link.mine, "to": [link.theirs], **message}, link.theirs, link.mine)

    async def post(self, url: str, body: bytes, generation: Generation, **headers: str) -> HttpAnswer:
        """Post bytes as they are, and return whatever comes; :class:`CannotTryError` where nothing does."""
        sent = {"Content-Type": MEDIA_TYPES[generation], **headers}
        try:
            async with self.http.post(url, data=io.BytesIO(body), headers=sent, allow_redirects=False) as answer:
                came = await read_body(answer, MAX_BODY)
                self.transcript.came(f"HTTP {answer.status}", came)
                return HttpAnswer(answer.status, dict(answer.headers), came)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise CannotTryError(f"{url}: {error or type(error).__name__}") from error

    async def request(self, holder: Holder, message: Json) -> Plaintext | None:
        """Send a plaintext as it is over HTTP, and return the answer, a problem report too; None without one."""
        url = holder.link.url("http", "https")
        answer = await self.post(url, await self.seal(holder, message), holder.generation)
        if not answer.body or answer.status >= 300:
            return None
        try:
            opened = await holder.resources.envelopes.open(answer.body)
        except MediatorError:
            return None
        return read(opened.plaintext, opened.generation)


@dataclass(frozen=True, slots=True)
class PushedMessage:
    """What came on a WebSocket unasked: a message of the mediator, or (``plain`` is None) somebody's bare envelope."""

    plain: Plaintext | None
    envelope: bytes

    @property
    def mails(self) -> list[DeliveredMessage]:
        """The mail in it: the attachments of a delivery, or the envelope itself."""
        if self.plain is None:
            return [DeliveredMessage("", self.envelope)]
        return mails(self.plain) if self.plain.name == "delivery" else []


class Socket:
    """A wallet's WebSocket; what is no answer is kept in order."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, session: DidcommSession, holder: Holder) -> None:
        """Use :meth:`DidcommSession.socket`."""
        self._socket = socket
        self._session = session
        self._holder = holder
        self._pushed: list[PushedMessage] = []
        self._mails: list[DeliveredMessage] = []

    async def tell(self, message: Json) -> None:
        """Send a plaintext."""
        await self._socket.send_bytes(await self._session.seal(self._holder, message))

    async def ask(self, message: Json) -> Plaintext:
        """Send a plaintext and return the answer in its thread, a problem report too."""
        await self.tell(message)
        async with asyncio.timeout(self._session.seconds):
            while True:
                frame = await self._receive()
                if frame.plain is not None and answers(frame.plain, message):
                    return frame.plain
                self._pushed.append(frame)

    async def pushed(self) -> PushedMessage:
        """Return what was pushed next; raises :class:`CheckFailedError` when nothing is in time."""
        if self._pushed:
            return self._pushed.pop(0)
        try:
            async with asyncio.timeout(self._session.seconds):
                return await self._receive()
        except TimeoutError:
            raise CheckFailedError(f"nothing was pushed within {self._session.seconds:g} s") from None

    async def mail(self) -> DeliveredMessage:
        """Return the next mail that was pushed, several of which may come in one delivery."""
        while not self._mails:
            self._mails += (await self.pushed()).mails
        return self._mails.pop(0)

    async def pushed_so_far(self, question: Json) -> list[PushedMessage]:
        """Return what was pushed before the answer to a question that is asked now."""
        await self.ask(question)
        return self._pushed

    async def _receive(self) -> PushedMessage:
        frame = await self._socket.receive()
        if frame.type not in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT):
            raise CheckFailedError(f"the mediator closed the WebSocket with {self._socket.close_code}")
        envelope = frame.data if isinstance(frame.data, bytes) else str(frame.data).encode()
        with contextlib.suppress(MediatorError):
            opened = await self._holder.resources.envelopes.open(envelope)
            if opened.sender is not None and canonical(opened.sender) == canonical(self._holder.link.theirs):
                return PushedMessage(read(opened.plaintext, opened.generation), envelope)
        return PushedMessage(None, envelope)

    async def close(self) -> None:
        """Close it as the protocol of WebSockets has it."""
        await self._socket.close()


def mails(delivery: Plaintext) -> list[DeliveredMessage]:
    """Return the messages in a delivery."""
    return [DeliveredMessage(id, envelope) for id, envelope in delivery.attachments]


def written(holder: Holder, type: str, body: Json | None = None, *, route: str | None = "all", **headers: Any) -> Json:
    """Write a plaintext of the wallet's generation; ``headers`` are added, or replace what is there."""
    return {**write(holder.generation, type, body, route=route), **headers}


def answers(answer: Plaintext, message: Json) -> bool:
    """Whether a message is in the thread of another one, or below it."""
    return id_of(message) in (answer.thid, answer.pthid)


async def eventually(mailbox: Mailbox, count: int) -> None:
    """Wait until so many messages wait at the mediator, which may take a moment after it has taken a forward."""
    deadline = asyncio.get_running_loop().time() + mailbox.sender.seconds
    while (status := await mailbox.holder.status()).count != count:
        if asyncio.get_running_loop().time() > deadline:
            raise CheckFailedError(f"{count} messages have to be waiting, message_count is {status.count}")
        await asyncio.sleep(0.05)


async def delivered(mailbox: Mailbox) -> list[DeliveredMessage]:
    """Ask for the mail that waits."""
    return await mailbox.holder.fetch(limit=100)


async def _empty(mailbox: Mailbox) -> None:
    """Take all mail, and remove the keys."""
    holder = mailbox.holder
    while mailbox.picks_up and (left := await holder.fetch(limit=100)):
        # The next request of any kind removes a batch of 1.0.
        if holder.pickup != "1.0" and not (await holder.received([mail.id for mail in left])).count:
            break
    for key in {mailbox.key, *(await holder.keys())}:
        await holder.remove_key(key)
