"""What a DIDComm check is given: wallets and correspondents made for it, and raw requests for the malformed ones."""

import contextlib
import io
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from conformance.checks import CannotTryError, NotOfferedError, Suite, Transcript
from conformance.didcomm.target import Target
from mediator.errors import MediatorError
from pickup.client import ClientError, DeliveredMessage, Grant, Holder, Sender, Wallet
from pickup.client.conversation import MEDIA_TYPES, ClientResources
from pickup.client.handshake import ClientHandshake
from pickup.client.plaintext import Json, Plaintext, id_of, read, write
from pickup.client.wallet import Link
from pickup.envelope import Envelopes, OpenedEnvelope
from pickup.envelope.reading import Jws
from pickup.message import encode
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

    async def send(self, text: str, key: str | None = None) -> None:
        """Send a basic message through the mediator, to ``key`` if not to the key that the wallet began with."""
        to, generation = key or self.key, self.holder.generation
        if generation is V1:
            message = write(V1, "basicmessage/1.0/message", {"content": text})
            await self.sender.send_v1(to, self.grant.routing, self.grant.endpoint, message)
        else:
            message = write(V2, "basicmessage/2.0/message", {"content": text})
            await self.sender.send_v2(to, self.grant.routing[0], self.grant.endpoint, message)

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
        reasons = []
        for handshake in self.handshakes():
            try:
                return await made.make(handshake)
            except ClientError as error:
                reasons.append(f"{handshake}: {error}")
        raise CannotTryError(f"no handshake works: {'; '.join(reasons)}")

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
        if pickup is not None:
            family = "message-pickup" if pickup == "4.0" else "messagepickup"
            await self.offered(holder, f"{family}/{pickup}")
        try:
            grant = await holder.mediate()
            key = await holder.add_key()
        except ClientError as error:
            raise CannotTryError(f"no mediation: {error}") from error
        mailbox = Mailbox(holder, grant, key, await self.sender())
        self._mailboxes.append(mailbox)
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
                came = await answer.content.read(MAX_BODY)
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


def written(holder: Holder, type: str, body: Json | None = None, *, route: str | None = "all", **headers: Any) -> Json:
    """Write a plaintext of the wallet's generation; ``headers`` are added, or replace what is there."""
    return {**write(holder.generation, type, body, route=route), **headers}


def answers(answer: Plaintext, message: Json) -> bool:
    """Whether a message is in the thread of another one, or below it."""
    return id_of(message) in (answer.thid, answer.pthid)


async def _empty(mailbox: Mailbox) -> None:
    """Take all mail, and remove the key."""
    holder = mailbox.holder
    while mails := await holder.fetch(limit=100):
        if holder.pickup == "1.0":
            # The next request of any kind removes a batch.
            continue
        if not (await holder.received([mail.id for mail in mails])).count:
            break
    for key in {mailbox.key, *(await holder.keys())}:
        await holder.remove_key(key)
