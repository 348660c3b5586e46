"""A holder: somebody whose mail a mediator keeps. It registers its keys there and picks its mail up."""

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

from mediator.errors import MediatorError
from mediator.mediation.names import canonical
from mediator.mediation.records import Generation
from pickup.client.errors import ClientError, ProblemError
from pickup.client.introducing import Introduction
from pickup.client.invitation import Invitation
from pickup.client.link import Link
from pickup.client.mail import Grant, Letter, Mail, Status
from pickup.client.plain import Json, Plain, content, write
from pickup.client.talking import Conversation
from pickup.client.tools import Tools
from pickup.client.wallet import Wallet

V1, V2 = Generation.V1, Generation.V2
PICKUPS = {V1: ("2.0", "1.0", "4.0"), V2: ("3.0", "4.0")}
MEDIATIONS = {V1: ("1.0",), V2: ("3.0", "2.0")}
"""Versions that are spoken, the one used by default first."""
OK = frozenset({"success", "no_change"})
DEFAULT = "mediator"
PAGE = 100


class Holder:
    """A client of one mediator; used as ``async with await Holder.connect(…) as holder``.

    What the mediator refuses is a :class:`ProblemError`, an HTTP failure a :class:`RefusedError`, silence a
    :class:`NoAnswerError`.
    """

    def __init__(
        self,
        link: Link,
        tools: Tools,
        *,
        name: str = DEFAULT,
        pickup: str | None = None,
        mediation: str | None = None,
        seconds: float = 10.0,
    ) -> None:
        """Use :meth:`connect` or :meth:`resume`."""
        self._tools = tools
        self._name = name
        self.pickup = _version("messagepickup", pickup, PICKUPS[link.generation])
        """The version of the pickup protocol that is spoken."""
        self._mediation = _version("coordinate-mediation", mediation, MEDIATIONS[link.generation])
        self._talk = Conversation(link, tools.envelopes, tools.session, seconds)
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
        """Meet a mediator by its invitation's URL (v1 or v2), or by its DID (v2).

        ``handshake`` (v1) is one of ``didexchange/1.1``, ``didexchange/1.0``, ``connections/1.0``. ``endpoint`` is
        where this holder takes mail by itself, if anywhere. ``pickup`` and ``mediation`` are versions of the two
        protocols: v1 2.0, 1.0 or 4.0 and 1.0, v2 3.0 or 4.0 and 3.0 or 2.0. ``seconds`` is how long an answer may
        take. ``name`` is what the mediator is called in the wallet.
        """
        parsed = Invitation.parse(invitation)
        tools = Tools(wallet or Wallet())
        try:
            if parsed.generation is V1:
                introduction = Introduction(
                    parsed,
                    tools.wallet,
                    tools.envelopes,
                    tools.session,
                    label=label,
                    endpoint=endpoint,
                    seconds=seconds,
                )
                link = await introduction.make(handshake)
            else:
                link = await _meet(parsed, tools, endpoint)
            holder = cls(link, tools, name=name, pickup=pickup, mediation=mediation, seconds=seconds)
            holder._remember(link)
            return holder
        except MediatorError as error:
            await tools.close()
            raise ClientError(str(error)) from error
        except BaseException:
            await tools.close()
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
        """Go on with a mediator that this wallet met before. Needs a running event loop."""
        if name not in wallet.links:
            raise ClientError(f"the wallet knows no mediator {name!r}")
        link = Link.read(wallet.links[name])
        return cls(link, Tools(wallet), name=name, pickup=pickup, mediation=mediation, seconds=seconds)

    async def __aenter__(self) -> Self:
        """Nothing is done."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Close it."""
        await self.close()

    async def close(self) -> None:
        """Close the connections; what the mediator knows of us stays."""
        await self._tools.close()

    @property
    def wallet(self) -> Wallet:
        """The keys."""
        return self._tools.wallet

    @property
    def link(self) -> Link:
        """What is known of the mediator."""
        return self._talk.link

    @property
    def on_socket(self) -> bool:
        """Whether a WebSocket is open, which carries everything as long as it is."""
        return self._talk.on_socket

    def _remember(self, link: Link) -> None:
        self._talk.link = link
        self.wallet.links[self._name] = link.written()
        self.wallet.save()

    # Anything.

    async def ask(self, type: str, body: Json | None = None, *, route: str | None = "all") -> Plain:
        """Send the mediator a message of any protocol and return the answer in its thread.

        ``type`` is without prefix: ``discover-features/2.0/queries``. ``body`` holds the fields of a v1 message, or
        the ``body`` of one of v2.
        """
        return await self._talk.ask(self._written(type, body, route))

    async def tell(self, type: str, body: Json | None = None) -> None:
        """Send the mediator a message that need not be answered."""
        await self._talk.tell(self._written(type, body, None))

    def _written(self, type: str, body: Json | None, route: str | None) -> Json:
        # A v2 mediator learns by which invitation somebody comes from the parent thread of what is said first.
        pthid = self.link.invitation if self.generation is V2 and not self.link.routing else None
        return write(self.generation, type, body, route=route, pthid=pthid)

    async def ping(self) -> float:
        """Ask for a sign of life; return the seconds it took."""
        started = time.perf_counter()
        family = "trust_ping/1.0" if self.generation is V1 else "trust-ping/2.0"
        await self.ask(f"{family}/ping", {"response_requested": True})
        return time.perf_counter() - started

    # Mediation.

    async def mediate(self) -> Grant:
        """Ask for mediation; what is granted again is the same mailbox."""
        answer = await self.ask(self._coordinate("mediate-request"))
        if answer.name == "mediate-deny":
            raise ProblemError("mediate-deny", "mediation is denied")
        body = _expect(answer, "mediate-grant")
        if self.generation is V1:
            endpoint, routing = str(body["endpoint"]), tuple(filter(None, map(canonical, body["routing_keys"])))
        else:
            said = body["routing_did"]
            routing = (said,) if isinstance(said, str) else tuple(said)
            endpoint = (await self._tools.endpoints(routing[-1]))[0]
        self._remember(self.link.granted(endpoint, routing))
        return Grant(endpoint, routing)

    async def add_key(self, key: str | None = None) -> str:
        """Register a recipient, so that its mail is kept for us: a key (v1) or a DID (v2); return it.

        Without one, one is made; a v2 DID then says that it is reached through the mediator.
        """
        if key is None:
            key = self.wallet.new_key() if self.generation is V1 else self._new_did()
        await self.change_keys([(key, "add")])
        return key

    async def remove_key(self, key: str) -> None:
        """Take a recipient back."""
        await self.change_keys([(key, "remove")])

    async def change_keys(self, changes: Sequence[tuple[str, str]]) -> list[str]:
        """Change several at once (key and ``add`` or ``remove``); return the result of each.

        A result that is neither ``success`` nor ``no_change`` is raised as :class:`ProblemError` with that code.
        """
        updates = [{self._recipient: key, "action": action} for key, action in changes]
        name = "recipient-update" if self._mediation == "3.0" else "keylist-update"
        answer = await self.ask(self._coordinate(name), {"updates": updates})
        updated = _expect(answer, f"{name}-response")["updated"]
        if [(item[self._recipient], item["action"]) for item in updated] != list(changes):
            raise ClientError("the mediator answered other updates than were asked")
        for item in updated:
            if item["result"] not in OK:
                raise ProblemError(item["result"], f"{item['action']} of a key was not done")
        return [item["result"] for item in updated]

    async def keys(self) -> list[str]:
        """Return every registered recipient, as the mediator writes it."""
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
        # The mediator is named by its DID: a sender finds its keys and endpoint there.
        service = {
            "type": "DIDCommMessaging",
            "serviceEndpoint": {"uri": self.link.routing[0], "accept": ["didcomm/v2"]},
        }
        return self.wallet.new_did([service])

    # Pickup.

    async def status(self, key: str | None = None) -> Status:
        """Ask what waits, for all keys or one."""
        return Status.of(_expected(await self.ask(self._messages("status-request"), self._only(key)), "status"))

    async def fetch(self, limit: int = 10, key: str | None = None) -> list[Mail]:
        """Take up to ``limit`` messages, the oldest first. They come again until :meth:`received` names them.

        In version 1.0, which has no acknowledgement, the next call of any kind does that.
        """
        if self.pickup == "1.0":
            body = _expect(await self.ask(self._messages("batch-pickup"), {"batch_size": limit}), "batch")
            return [
                Mail(str(item.get("@id") or item.get("id")), content({"data": {"json": item["message"]}}))
                for item in body["messages~attach"]
            ]
        field = "message_count_limit" if self.pickup == "4.0" else "limit"
        answer = await self.ask(self._messages("delivery-request"), {field: limit, **self._only(key)})
        if answer.name == "status":
            return []
        return _mails(_expected(answer, "delivery"))

    async def received(self, ids: Sequence[str]) -> Status:
        """Acknowledge messages: the mediator forgets them. Unknown ids do no harm."""
        answer = await self.ask(self._messages("messages-received"), {"message_id_list": list(ids)})
        return Status.of(_expected(answer, "status"))

    async def live(self) -> AsyncGenerator[Mail, None]:
        """Yield mail as it arrives, over a WebSocket that is open as long as the iterator.

        What waited before does not come by itself: :meth:`fetch` it, inside the loop or before. Each message stays
        with the mediator until it is acknowledged. Ends with :class:`NoAnswerError` when the socket breaks; end it
        yourself with ``contextlib.aclosing``.
        """
        async with self._talk.socket() as wire:
            change = self._messages("live-delivery-change")
            _expected(await self.ask(change, {"live_delivery": True}), "status")
            async for frame in wire.pushed():
                if frame.plain is not None and frame.plain.name == "delivery":
                    for mail in _mails(frame.plain):
                        yield mail

    async def implicit(self) -> AsyncGenerator[Mail, None]:
        """Yield what waits and what arrives as bare envelopes over a WebSocket, with nothing to acknowledge.

        A message is gone once the socket has carried it.
        """
        async with self._talk.socket() as wire:
            family = "trust_ping/1.0" if self.generation is V1 else "trust-ping/2.0"
            await self._talk.tell(self._written(f"{family}/ping", {"response_requested": False}, "all"))
            async for frame in wire.pushed():
                if frame.plain is None:
                    yield Mail("", frame.envelope)

    @contextlib.asynccontextmanager
    async def socket(self) -> AsyncIterator[None]:
        """Send everything over one WebSocket for the length of the block."""
        async with self._talk.socket():
            yield

    async def open(self, mail: Mail) -> Letter:
        """Open an envelope that was picked up; :class:`ClientError` when no key of the wallet does."""
        try:
            opened = await self._tools.envelopes.open(mail.envelope)
        except MediatorError as error:
            raise ClientError(f"the envelope cannot be opened: {error}") from error
        return Letter(opened.generation, opened.plaintext, opened.sender, opened.recipient)

    def _messages(self, name: str) -> str:
        family = "message-pickup" if self.pickup == "4.0" else "messagepickup"
        return f"{family}/{self.pickup}/{name}"

    def _only(self, key: str | None) -> dict[str, Any]:
        if key is None:
            return {}
        # 4.0 writes recipient_did in both generations.
        return {"recipient_did" if self.pickup == "4.0" else self._recipient: key}


async def _meet(invitation: Invitation, tools: Tools, endpoint: str | None) -> Link:
    assert invitation.did is not None
    service = {"type": "DIDCommMessaging", "serviceEndpoint": {"uri": endpoint or "", "accept": ["didcomm/v2"]}}
    mine = tools.wallet.new_did([service] if endpoint else [])
    return Link(V2, mine, invitation.did, await tools.endpoints(invitation.did), invitation=invitation.id)


def _version(protocol: str, asked: str | None, spoken: tuple[str, ...]) -> str:
    if asked is None:
        return spoken[0]
    if asked not in spoken:
        raise ClientError(f"{protocol}: expected one of {', '.join(spoken)}, got {asked!r}")
    return asked


def _expected(answer: Plain, name: str) -> Plain:
    if answer.name != name:
        raise ClientError(f"expected {name}, the mediator answered {answer.type}")
    return answer


def _expect(answer: Plain, name: str) -> Json:
    return dict(_expected(answer, name).body)


def _mails(delivery: Plain) -> list[Mail]:
    return [Mail(id, envelope) for id, envelope in delivery.attachments]
