"""Operations of the registry: its status, and agents to list, search, show, remove, and register in bulk (G1).

Lists show agents as others see them (G4). Other operations take an agent's own or send-only address, or its number.
"""

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Annotated, Any, Final

import numpy as np
import orjson

from mediator.broker import Broker
from mediator.errors import BadRequestError
from mediator.fields import Fields
from mediator.mailboxes.address import DEFAULT_TENANT, is_generated, is_send_only, redact
from mediator.operate.operations import (
    ADDRESS,
    ANY,
    COUNT,
    FLAG,
    MAX_LONG_REQUEST,
    TENANT,
    TEXT,
    TEXTS,
    TIME,
    Answer,
    OperationRequest,
    Right,
    about,
    is_allowed,
    limit,
    many,
    object_schema,
    operation,
    or_null,
    read_numbered,
    table,
    whole,
)
from mediator.operate.records import PAYLOAD, Address, JsonSchema, Record, described
from registry.api import codec
from registry.api.openapi import explanation
from registry.cards.card import Card, agent_address, read_card
from registry.directory import Directory
from registry.embedding.models import EmbeddingSpace
from registry.embedding.switching import EmbeddingModels
from registry.embedding.texts import MAX_SKILLS, TEMPLATE
from registry.index.updater import IndexUpdater
from registry.index.vectors import Halves, unpack_rows
from registry.records import Agent, CardVectors, State
from registry.requests import MAX_PAGE, AgentRecord, AgentReference, EmbeddingState
from registry.tables import RegistryTables

BUDGET = 512 * 1024
"""Bytes of cards and reports on a page."""

Seconds = Annotated[int, JsonSchema(TIME)]


@dataclass(frozen=True, slots=True)
class AgentView(Record):
    """An agent with its card, as the actor may see it."""

    mailbox: Address
    number: Annotated[int, described("`id:` and this number stand for its mailbox in other requests.")]
    name: str
    edition: Annotated[int, described("How many different cards there were.")]
    registered_at: Seconds
    updated_at: Seconds
    card: Annotated[
        Mapping[str, Any],
        JsonSchema(table({})),
        described("As it was registered; without the right `read-payload`, with its mailbox shortened."),
    ]
    state: Annotated[State, described(f"One of {', '.join(State)}.")]
    last_seen: Seconds
    status: Annotated[Any, described("The last report, null if there is none.")]


@dataclass(frozen=True, slots=True)
class ListedAgent(AgentView):
    """An agent in a list; a search gives each a score."""

    score: float
    explanation: Annotated[Any, JsonSchema(or_null(about(explanation(), "Null unless `explain` asked for it.")))]


@dataclass(frozen=True, slots=True)
class AgentDetails(AgentView):
    """An agent with its card as it was registered, and how it is found."""

    text: Annotated[str, described("The card, byte for byte as it was registered."), PAYLOAD]
    warnings: Sequence[str]
    send_address: (
        Annotated[Address, described("The send-only address of its mailbox, null if no such mailbox lives here.")]
        | None
    )
    mailbox_number: Annotated[int, described("The number of its mailbox, null likewise.")] | None
    embedding: Annotated[Any, JsonSchema({"enum": [*EmbeddingState]}), described("Whether it is found by meaning.")]
    vectors: Annotated[int, described("How many its card has: one of the whole, one for each skill.")]


_WORD = re.compile(r"[a-z0-9]+(?:[.-][a-z0-9]+)*")
_MAILBOX = about(
    ADDRESS, "The mailbox of an agent, its send-only address, `id:` and the agent's number, or `name:` and its name."
)
_ONE = {"tenant": TENANT, "mailbox": _MAILBOX}
MAX_TOGETHER = 256
"""Cards of one request: they are one transaction, for which senders may have to wait."""
MAX_SPACE = 1024
_NORM_TOLERANCE = 0.01
"""How far the length of a vector may be from one; half precision needs less."""

_IN_BULK = {"space": TEXT, "agents": many(ANY)}


class RegistryOperations:
    """What operators can ask of the registry."""

    def __init__(
        self, broker: Broker, directory: Directory, updater: IndexUpdater, models: EmbeddingModels | None
    ) -> None:
        self._broker = broker
        self._directory = directory
        self._updater = updater
        self._models = models

    @operation(
        "agent-list",
        Right.READ,
        "Agents of a tenant, all or those that a search finds, best first",
        object_schema(
            agents=many(ListedAgent.schema()),
            mode=TEXT,
            total=COUNT,
            next=or_null(about(TEXT, "The cursor of the next page.")),
            note=TEXT,
        ),
        fields={
            "tenant": TENANT,
            "text": about(TEXT, "Search by words."),
            "semantic": about(TEXT, "Search by meaning."),
            "state": about(many({"type": "string", "enum": [*State]}), "All but gone agents if it is absent."),
            "tags": about(TEXTS, "Tags that an agent must have, its own or those of its skills."),
            "skills": about(TEXTS, "Skills that an agent must have, by id or name."),
            "explain": about(FLAG, "Say why each agent is found where it is."),
            "cursor": about(TEXT, "`next` of the page before."),
            "page": whole("The page, from 1.", 1, codec.MAX_PAGES, default=1),
            "limit": limit(MAX_PAGE),
        },
        path="/agents",
    )
    async def _list(self, request: OperationRequest) -> Answer:
        fields: dict[str, Any] = {name: request.get(name) or None for name in ("text", "semantic", "cursor")}
        fields |= {"limit": request["limit"], "page": request["page"]}
        wanted = {name: request.get(name) for name in ("state", "tags", "skills")}
        fields |= {"explain": request.get("explain"), "filter": wanted, "with_state": True}
        query = codec.parse_discover(Fields(fields))
        page = await self._directory.searcher.discover(_tenant(request), query, BUDGET)
        agents = [
            ListedAgent(
                **_describe(agent, state),
                score=round(score, 4),
                explanation=None if why is None else codec.encode_explanation(why),
            ).to_json()
            for agent, state, score, why in zip(
                page.agents, page.states, page.scores, page.explanations or repeat(None, len(page.agents)), strict=True
            )
        ]
        return {"agents": agents, "mode": page.mode, "total": page.total, "next": page.next, "note": page.note}

    @operation(
        "agent-show",
        Right.READ,
        "One agent with its card",
        AgentDetails.schema(),
        fields=_ONE,
        path="/agents/{mailbox}",
    )
    async def _show(self, request: OperationRequest) -> Answer:
        found = await self._find(request)
        return AgentDetails(
            **_describe(found.agent, found.state),
            text=found.agent.card.decode(),
            warnings=read_card(found.agent.card).warnings,
            send_address=found.send_address,
            mailbox_number=found.mailbox_id,
            embedding=found.embedding,
            vectors=found.vectors,
        ).to_json()

    @operation(
        "agent-unregister",
        Right.OPERATE,
        "Remove an agent from the registry",
        object_schema(mailbox=ADDRESS, removed=FLAG),
        fields=_ONE,
        method="DELETE",
        path="/agents/{mailbox}",
    )
    async def _unregister(self, request: OperationRequest) -> Answer:
        address = (await self._find(request)).agent.address
        await self._directory.unregister(_tenant(request), AgentReference(address=address))
        return {"mailbox": address, "removed": True}

    async def _find(self, request: OperationRequest) -> AgentRecord:
        text = request.get("mailbox", "")
        number = read_numbered(text)
        return await self._directory.inspect(_tenant(request), agent_address(text) if number is None else number)

    @operation(
        "agent-forget-use",
        Right.ADMIN,
        "Forget which requests agents served, those of one agent or all of a tenant",
        object_schema(forgotten=about(COUNT, "Votes on the agent, or requests of the tenant.")),
        fields={"tenant": TENANT, "mailbox": about(ADDRESS, "The mailbox of the agent; all agents without one.")},
        method="POST",
        path="/registry/forget-use",
    )
    async def _forget_use(self, request: OperationRequest) -> Answer:
        mailbox = request.get("mailbox", "")
        address = agent_address(mailbox) if mailbox else None
        return {"forgotten": await self._directory.forget_use(_tenant(request), address)}

    @operation(
        "registry",
        Right.READ,
        "The index of agents, and the model that embeds them",
        object_schema(
            loaded=FLAG,
            problem=or_null(TEXT),
            agents=COUNT,
            embedded=COUNT,
            space=or_null(TEXT),
            model=or_null(
                object_schema(name=TEXT, runs=TEXT, space=or_null(TEXT), problem=or_null(TEXT), embedded=COUNT)
            ),
        ),
        path="/registry",
    )
    async def _status(self, _request: OperationRequest) -> dict[str, Any]:
        updater, models = self._updater, self._models
        return {
            "loaded": updater.loaded,
            "problem": await updater.check(),
            "agents": updater.agents,
            "embedded": updater.embedded,
            "space": updater.space,
            "model": None
            if models is None
            else {
                "name": models.model,
                "runs": models.encoder.model,
                "space": None if models.encoder.space is None else str(models.encoder.space),
                "problem": models.encoder.problem,
                "embedded": await models.count_embedded(),
            },
        }

    @operation(
        "agents-put",
        Right.ADMIN,
        "Register agents with their vectors",
        object_schema(),
        fields={"tenant": TENANT, **_IN_BULK},
        method="POST",
        longest=MAX_LONG_REQUEST,
    )
    async def _put(self, request: OperationRequest) -> dict[str, Any]:
        """Register cards with their vectors; ``agents``: lists of a card as text and its packed vectors in base64."""
        space = self._own_space(request.get("space", ""))
        dims = _dims(space)
        agents = _rows(request, "agents", (str, str))
        cards = [card.encode() for card, _ in agents]

        def packed(at: int, card: Card) -> bytes:
            vectors, rows = _vectors(f"agents[{at}]", agents[at][1], dims)
            expected = 1 + len(card.skills[:MAX_SKILLS])
            if len(rows) != expected:
                raise BadRequestError(f"agents[{at}]", f"expected {expected} vectors, got {len(rows)}")
            return vectors

        tenant = request.get("tenant", "") or DEFAULT_TENANT
        return (await self._directory.register_many(tenant, space, cards, packed))._asdict()

    @operation(
        "agents-embed",
        Right.ADMIN,
        "Keep vectors of agents",
        object_schema(embedded=COUNT),
        fields=_IN_BULK,
        method="POST",
        audited=False,
        longest=MAX_LONG_REQUEST,
    )
    async def _embed(self, request: OperationRequest) -> dict[str, Any]:
        """Keep vectors; ``agents``: lists of number, card revision, and the packed vectors of that card in base64.

        The space may be one that the service does not use yet.
        """
        space = request.get("space", "")
        dims = _dims(space)
        rows = enumerate(_rows(request, "agents", (int, int, str)))
        vectors = [
            CardVectors(agent_id, revision, _vectors(f"agents[{at}]", told, dims)[0])
            for at, (agent_id, revision, told) in rows
        ]
        # Behind all requests: such vectors come by thousands.
        embedded = await self._broker.write_background(
            lambda tx, _now: tx.table(RegistryTables).vectors.save(space, vectors)
        )
        return {"embedded": embedded}

    def _own_space(self, space: str) -> str:
        if self._models is None:
            raise BadRequestError("space", "expected none, registry.semantic is turned off")
        own = self._models.encoder.space
        if own is None:
            raise BadRequestError("space", f"not known yet: {self._models.encoder.problem}")
        if space != str(own):
            raise BadRequestError("space", f'expected that of the configured model, {own}, got "{space[:MAX_SPACE]}"')
        return space


def _tenant(request: OperationRequest) -> str:
    return request.get("tenant", "") or DEFAULT_TENANT


def _describe(agent: Agent, state: State) -> dict[str, Any]:
    """Return the fields of :class:`AgentView`."""
    return {
        **codec.encode_history(agent),
        "name": _as_seen(agent.name, agent.address),
        "number": agent.id,
        "card": _as_seen(orjson.loads(agent.card), agent.address),
        "state": state,
        "last_seen": agent.seen_at // 1000,
        "status": None if agent.status is None else _as_seen(orjson.loads(agent.status), agent.address),
    }


def _as_seen(value: Any, address: str, name: str = "") -> Any:
    """Return JSON of an agent as the actor may see it: its address redacted without the right to payloads (A7)."""
    if is_allowed(Right.READ_PAYLOAD):
        return value
    if isinstance(value, dict):
        return {key: _as_seen(item, address, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_seen(item, address, name) for item in value]
    if not isinstance(value, str):
        return value
    # A chosen address may be a word of a text as well.
    chosen = (name == "mailbox" or "/" in value) and not is_generated(address)
    return _WORD.sub(lambda word: _redact_address(word[0], address if chosen else ""), value)


def _redact_address(word: str, chosen: str) -> str:
    return redact(word) if word == chosen or is_generated(word) or is_send_only(word) else word


def _dims(space: str) -> int:
    """Return how many dimensions the vectors of a space have; its texts must be of the current template."""
    try:
        parsed = EmbeddingSpace.parse(space)
    except ValueError as error:
        raise BadRequestError("space", str(error)) from None
    if parsed.template != TEMPLATE or len(space) > MAX_SPACE:
        raise BadRequestError("space", f'expected one of texts in form {TEMPLATE}, got "{space[:MAX_SPACE]}"')
    return parsed.dims


def _rows(request: OperationRequest, name: str, kinds: tuple[type, ...]) -> Sequence[Any]:
    rows = request.get(name)
    if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_TOGETHER:
        raise BadRequestError(name, f"expected a list of 1 to {MAX_TOGETHER}")
    for at, row in enumerate(rows):
        if not isinstance(row, list) or tuple(map(type, row)) != kinds:
            raise BadRequestError(f"{name}[{at}]", f"expected [{', '.join(kind.__name__ for kind in kinds)}]")
        if any(isinstance(value, int) and not 0 <= value < 2**63 for value in row):
            raise BadRequestError(f"{name}[{at}]", "expected numbers from 0 to 2**63 - 1")
    return rows


def _vectors(name: str, encoded: str, dims: int) -> tuple[bytes, Halves]:
    """Decode and check vectors: packed as the store keeps them, and as rows."""
    try:
        packed = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise BadRequestError(name, "expected vectors in base64") from None
    try:
        rows = unpack_rows(packed)
    except (ValueError, IndexError):
        raise BadRequestError(name, "expected packed vectors") from None
    if not len(rows) or rows.shape[1] != dims:
        raise BadRequestError(name, f"expected vectors of {dims} numbers, got {rows.shape[1]}")
    # NaN is not within any bound either.
    if not (np.abs(np.linalg.norm(rows.astype(np.float32), axis=1) - 1) < _NORM_TOLERANCE).all():
        raise BadRequestError(name, "expected vectors of length one")
    return packed, rows


EXAMPLES: Final[Mapping[str, str]] = {
    "agents.id": "invoices",
    "agents.mode": "sparse",
    "agents.name": "Clerk",
    "agents.next": "eyJhIjoxfQ",
    "agents.text": "Pays invoices.",
    "agents.warnings": "provider: expected text, was left out",
    "cursor": "eyJhIjoxfQ",
    "registry.runs": "onnx",
    "semantic": "ready",
    "skills": "invoices",
    "space": "all-MiniLM-L6-v2-agents",
}
"""What texts of these records look like, for the document of the admin API."""
