"""A holder: the recipient of mediation (RFC 0211). It registers its keys and picks up its mail."""

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Self

from mediator.errors import MediatorError
from pickup.client.conversation import ClientResources, Conversation, UnsolicitedMessage, render_comment
from pickup.client.handshake import ClientHandshake, MediatorInvitation
from pickup.client.plaintext import (
    ClientError,
    DeliveredMessage,
    Grant,
    Json,
    OpenedMessage,
    PickupStatus,
    Plaintext,
    ProblemError,
    content,
    write,
)
from pickup.client.wallet import Link, Wallet
from pickup.rules.names import canonical
from pickup.rules.records import Generation

V1, V2 = Generation.V1, Generation.V2
PICKUPS = {V1: ("2.0", "1.0", "4.0"), V2: ("3.0", "4.0")}
MEDIATIONS = {V1: ("1.0",), V2: ("3.0", "2.0")}
"""Supported versions, the default first."""
OK = frozenset({"success", "no_change"})
DEFAULT = "mediator"
PAGE = 100


class Holder:
    """A client of one mediator; used as ``async with await Holder.connect(…) as holder``.

    What the mediator refuses is a :class:`ProblemError`, an HTTP failure a :class:`HttpStatusError`, silence a
    :class:`NoAnswerError`.
    """

    def __init__(
        self,
        link: Link,
        resources: ClientResources,
        *,
        name: str = DEFAULT,
        pickup: str | None = None,
        mediation: str | None = None,
        seconds: float = 10.0,
    ) -> None:
        """Use :meth:`connect` or :meth:`resume`."""
        self.resources = resources
        """The wallet, the resolver, the envelopes and the HTTP session."""
        self._name = name
        self.pickup = _version("messagepickup", pickup, PICKUPS[link.generation])
        """The version of the pickup protocol."""
        self._mediation = _version("coordinate-mediation", mediation, MEDIATIONS[link.generation])
        self._conversation = Conversation(link, resources, seconds)
        self.generation = link.generation

    @classmethod
    async def connect(
        cls,
        invitation: str,
        *,
        wallet: Wallet | None = None,
        handshake: str = "didexchange/1.1",
        label: str = "holder",
        endpoint: str | None = None,
        name: str = DEFAULT,
        pickup: str | None = None,
        mediation: str | None = None,
        seconds: float = 10.0,
    ) -> Self:
        """Connect to a mediator by its invitation's URL (v1 or v2, long or short), or by its DID (v2).

        ``handshake`` (v1) is one of ``didexchange/1.1``, ``didexchange/1.0``, ``connections/1.0``. ``endpoint`` is
        this holder's own URL, if it has one. ``pickup`` and ``mediation`` are versions of the two
        protocols: v1 2.0, 1.0 or 4.0 and 1.0, v2 3.0 or 4.0 and 3.0 or 2.0. ``seconds`` is the
        timeout of an answer. ``name`` is the mediator's name in the wallet.
        """
        resources = ClientResources(wallet or Wallet())
        try:
            parsed = await MediatorInvitation.load(invitation, resources.session, seconds)
            if parsed.generation is V1:
                introduction = ClientHandshake(parsed, resources, label=label, endpoint=endpoint, seconds=seconds)
                link = await introduction.make(handshake)
            else:
                link = await _link_v2(parsed, resources, endpoint)
            holder = cls(link, resources, name=name, pickup=pickup, mediation=mediation, seconds=seconds)
            holder._save_link(link)
            return holder
        except MediatorError as error:
            await resources.close()
            raise ClientError(str(error)) from error
        except BaseException:
            await resources.close()
            raise

    @classmethod
    def resume(
        cls,
        wallet: Wallet,
        *,
        name: str = DEFAULT,
        pickup: str | None = None,
        mediation: str | None = None,
        seconds: float = 10.0,
    ) -> Self:
        """Continue with a mediator in this wallet. Needs a running event loop."""
        if name not in wallet.links:
            raise ClientError(f"the wallet has no mediator {name!r}")
        link = Link.read(wallet.links[name])
        return cls(link, ClientResources(wallet), name=name, pickup=pickup, mediation=mediation, seconds=seconds)

    async def __aenter__(self) -> Self:
        """Return this holder."""
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Close the connections."""
        await self.close()

    async def close(self) -> None:
        """Close the connections; the mediator keeps the keys and the mail."""
        await self.resources.close()

    @property
    def wallet(self) -> Wallet:
        """The keys."""
        return self.resources.wallet

    @property
    def link(self) -> Link:
        """The mediator's address and DIDs."""
        return self._conversation.link

    @property
    def on_socket(self) -> bool:
        """Whether a WebSocket is open, which then carries everything."""
        return self._conversation.on_socket

    def _save_link(self, link: Link) -> None:
        self._conversation.link = link
        self.wallet.links[self._name] = link.written()
        self.wallet.save()

    # Anything.

    async def ask(self, type: str, body: Json | None = None, *, route: str | None = "all") -> Plaintext:
        """Send a message of any protocol to the mediator and return the reply in its thread.

        ``type`` is without prefix: ``discover-features/2.0/queries``. ``body`` holds the fields of a v1 message, or
        the ``body`` of one of v2.
        """
        return await self._conversation.ask(self._written(type, body, route))

    async def tell(self, type: str, body: Json | None = None) -> None:
        """Send the mediator a message without waiting for a reply."""
        await self._conversation.tell(self._written(type, body, None))

    def _written(self, type: str, body: Json | None, route: str | None) -> Json:
        # The first v2 message names the invitation as its parent thread.
        pthid = self.link.invitation if self.generation is V2 and not self.link.routing else None
        return write(self.generation, type, body, route=route, pthid=pthid)

    async def ping(self) -> float:
        """Send a trust ping; return the seconds until its response."""
        started = time.perf_counter()
        family = "trust_ping/1.0" if self.generation is V1 else "trust-ping/2.0"
        await self.ask(f"{family}/ping", {"response_requested": True})
        return time.perf_counter() - started

    # Mediation.

    async def mediate(self) -> Grant:
        """Request mediation (RFC 0211); a repeated request gets the same mailbox."""
        answer = await self.ask(self._coordinate("mediate-request"))
        if answer.name == "mediate-deny":
            why = render_comment(answer.body) or "mediation is denied"
            raise ProblemError(str(answer.body.get("code", "mediate-deny")), why)
        body = _expect(answer, "mediate-grant")
        if self.generation is V1:
            endpoint, routing = str(body["endpoint"]), tuple(filter(None, map(canonical, body["routing_keys"])))
        else:
            routing_did = body["routing_did"]
            routing = (routing_did,) if isinstance(routing_did, str) else tuple(routing_did)
            endpoint = (await self.resources.endpoints(routing[-1]))[0]
        self._save_link(self.link.granted(endpoint, routing))
        return Grant(endpoint, routing)

    async def add_key(self, key: str | None = None) -> str:
        """Register a key (v1) or a DID (v2) whose mail the mediator keeps for us; return it.

        Without ``key`` a new one is made; a new v2 DID names the mediator as its endpoint.
        """
        if key is None:
            key = self.wallet.new_key() if self.generation is V1 else self._new_did()
        await self.change_keys([(key, "add")])
        return key

    async def remove_key(self, key: str) -> None:
        """Remove a registered key or DID."""
        await self.change_keys([(key, "remove")])

    async def change_keys(self, changes: Sequence[tuple[str, str]]) -> list[str]:
        """Update several keys at once (key and ``add`` or ``remove``); return the result of each.

        Any result but ``success`` and ``no_change`` raises :class:`ProblemError` with that code.
        """
        updates = [{self._recipient: key, "action": action} for key, action in changes]
        name = "recipient-update" if self._mediation == "3.0" else "keylist-update"
        answer = await self.ask(self._coordinate(name), {"updates": updates})
        updated = _expect(answer, f"{name}-response")["updated"]
        if [(item[self._recipient], item["action"]) for item in updated] != list(changes):
            raise ClientError("the mediator answered other updates than requested")
        for item in updated:
            if item["result"] not in OK:
                raise ProblemError(item["result"], f"{item['action']} of a key failed")
        return [item["result"] for item in updated]

    async def keys(self) -> list[str]:
        """Return all registered keys, as the mediator writes them."""
        found: list[str] = []
        query, answer, listed = (
            ("recipient-query", "recipient", "dids")
            if self._mediation == "3.0"
            else ("keylist-query", "keylist", "keys")
        )
        while True:
            page = {"limit": PAGE, "offset": len(found)}
            body = _expect(await self.ask(self._coordinate(query), {"paginate": page}), answer)
            items = [str(item[self._recipient]) for item in body[listed]]
            found += items
            if not items or not (body.get("pagination") or {}).get("remaining"):
                return found

    @property
    def _recipient(self) -> str:
        return "recipient_key" if self.generation is V1 else "recipient_did"

    def _coordinate(self, name: str) -> str:
        return f"coordinate-mediation/{self._mediation}/{name}"

    def _new_did(self) -> str:
        if not self.link.routing:
            raise ClientError("mediation has not been granted yet")
        # The mediator is named by its DID, where senders find its keys and endpoint.
        service = {
            "type": "DIDCommMessaging",
            "serviceEndpoint": {"uri": self.link.routing[0], "accept": ["didcomm/v2"]},
        }
        return self.wallet.new_did([service])

    # Pickup.

    async def status(self, key: str | None = None) -> PickupStatus:
        """Request the status of the queue, for all keys or one."""
        return PickupStatus.of(_expected(await self.ask(self._messages("status-request"), self._only(key)), "status"))

    async def fetch(self, limit: int = 10, key: str | None = None) -> list[DeliveredMessage]:
        """Request up to ``limit`` messages, the oldest first. They come again until :meth:`received` names them.

        In version 1.0, which has no acknowledgement, the next call of any kind does that.
        """
        if self.pickup == "1.0":
            body = _expect(await self.ask(self._messages("batch-pickup"), {"batch_size": limit}), "batch")
            return [
                DeliveredMessage(str(item.get("@id") or item.get("id")), content({"data": {"json": item["message"]}}))
                for item in body["messages~attach"]
            ]
        field = "message_count_limit" if self.pickup == "4.0" else "limit"
        answer = await self.ask(self._messages("delivery-request"), {field: limit, **self._only(key)})
        if answer.name == "status":
            return []
        return _mails(_expected(answer, "delivery"))

    async def received(self, ids: Sequence[str]) -> PickupStatus:
        """Acknowledge messages, which the mediator then removes. Unknown ids are ignored."""
        answer = await self.ask(self._messages("messages-received"), {"message_id_list": list(ids)})
        return PickupStatus.of(_expected(answer, "status"))

    async def live(self) -> AsyncGenerator[DeliveredMessage, None]:
        """Yield mail as it arrives (live mode), over a WebSocket that is open as long as the iterator.

        Older mail is not pushed: :meth:`fetch` it inside the loop, or use :meth:`mail`. Each message stays queued until
        it is acknowledged. Raises :class:`NoAnswerError` when the socket breaks; end it with ``contextlib.aclosing``.
        """
        async with self._conversation.socket() as wire:
            await self._turn_live()
            async for mail in _deliveries(wire.pushed()):
                yield mail

    async def mail(self) -> AsyncGenerator[DeliveredMessage, None]:
        """Yield the mail that waits, the oldest first, and then mail as it arrives; nothing in between is missed.

        Acknowledge each by :meth:`received` before you take the next. The rest is as with :meth:`live`.
        """
        async with self._conversation.socket() as wire:
            await self._turn_live()
            seen: set[str] = set()
            while waiting := [mail for mail in await self.fetch() if mail.id not in seen]:
                for mail in waiting:
                    seen.add(mail.id)
                    yield mail
            async for mail in _deliveries(wire.pushed()):
                if mail.id not in seen:
                    yield mail

    async def _turn_live(self) -> None:
        _expected(await self.ask(self._messages("live-delivery-change"), {"live_delivery": True}), "status")

    async def implicit(self) -> AsyncGenerator[DeliveredMessage, None]:
        """Yield queued and new mail as bare envelopes over a WebSocket (implicit pickup, RFC 0212).

        The mediator removes each message once the socket has confirmed it.
        """
        async with self._conversation.socket() as wire:
            family = "trust_ping/1.0" if self.generation is V1 else "trust-ping/2.0"
            await self._conversation.tell(self._written(f"{family}/ping", {"response_requested": False}, "all"))
            async for frame in wire.pushed():
                if frame.plain is None:
                    yield DeliveredMessage("", frame.envelope)

    @contextlib.asynccontextmanager
    async def socket(self) -> AsyncIterator[None]:
        """Send everything over one WebSocket inside this block."""
        async with self._conversation.socket():
            yield

    async def open(self, mail: DeliveredMessage) -> OpenedMessage:
        """Open an envelope that was picked up; :class:`ClientError` when the wallet has no key for it."""
        try:
            opened = await self.resources.envelopes.open(mail.envelope)
        except MediatorError as error:
            raise ClientError(f"the envelope cannot be opened: {error}") from error
        return OpenedMessage(opened.generation, opened.plaintext, opened.sender, opened.recipient)

    def _messages(self, name: str) -> str:
        family = "message-pickup" if self.pickup == "4.0" else "messagepickup"
        return f"{family}/{self.pickup}/{name}"

    def _only(self, key: str | None) -> dict[str, Any]:
        if key is None:
            return {}
        # 4.0 writes recipient_did in both generations.
        return {"recipient_did" if self.pickup == "4.0" else self._recipient: key}


async def _deliveries(frames: AsyncIterator[UnsolicitedMessage]) -> AsyncGenerator[DeliveredMessage, None]:
    async for frame in frames:
        if frame.plain is not None and frame.plain.name == "delivery":
            for mail in _mails(frame.plain):
                yield mail


async def _link_v2(invitation: MediatorInvitation, resources: ClientResources, endpoint: str | None) -> Link:
    assert invitation.did is not None
    service = {"type": "DIDCommMessaging", "serviceEndpoint": {"uri": endpoint or "", "accept": ["didcomm/v2"]}}
    mine = resources.wallet.new_did([service] if endpoint else [])
    return Link(V2, mine, invitation.did, await resources.endpoints(invitation.did), invitation=invitation.id)


def _version(protocol: str, requested: str | None, supported: tuple[str, ...]) -> str:
    if requested is None:
        return supported[0]
    if requested not in supported:
        raise ClientError(f"{protocol}: expected one of {', '.join(supported)}, got {requested!r}")
    return requested


def _expected(answer: Plaintext, name: str) -> Plaintext:
    if answer.name != name:
        raise ClientError(f"expected {name}, the mediator answered {answer.type}")
    return answer


def _expect(answer: Plaintext, name: str) -> Json:
    return dict(_expected(answer, name).body)


def _mails(delivery: Plaintext) -> list[DeliveredMessage]:
    return [DeliveredMessage(id, envelope) for id, envelope in delivery.attachments]
