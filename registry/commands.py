"""Operations of the registry: its status, and cards and vectors in bulk from a model elsewhere (G1)."""

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import numpy as np

from mediator.errors import BadRequestError
from mediator.mailboxes.address import DEFAULT_TENANT
from mediator.ops.operations import MAX_LONG_REQUEST, OperationRequest, Right, operation, read_text
from mediator.ops.schemas import ANY, COUNT, FLAG, TENANT, TEXT, many, obj, or_null
from registry.agents.records import CardVectors
from registry.cards.card import Card
from registry.directory import Directory
from registry.embedding.space import EmbeddingSpace
from registry.embedding.switching import EmbeddingModels
from registry.embedding.texts import MAX_SKILLS, TEMPLATE
from registry.index.packing import HalfFloats, unpack_rows
from registry.index.updater import IndexUpdater

MAX_TOGETHER = 256
"""Cards of one request: they are one transaction, for which senders may have to wait."""
MAX_SPACE = 1024
_NORM_TOLERANCE = 0.01
"""How far the length of a vector may be from one; half precision needs less."""

_IN_BULK = {"space": TEXT, "agents": many(ANY)}


class RegistryOperations:
    """The operations ``registry``, ``agents-put`` and ``agents-embed``."""

    def __init__(self, directory: Directory, updater: IndexUpdater, models: EmbeddingModels | None) -> None:
        self._directory = directory
        self._updater = updater
        self._models = models

    @operation(
        "registry",
        Right.READ,
        "The index of agents, and the model that embeds them",
        obj(
            loaded=FLAG,
            problem=or_null(TEXT),
            agents=COUNT,
            embedded=COUNT,
            space=or_null(TEXT),
            model=or_null(obj(name=TEXT, runs=TEXT, space=or_null(TEXT), problem=or_null(TEXT), embedded=COUNT)),
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
        obj(),
        fields={"tenant": TENANT, **_IN_BULK},
        method="POST",
        longest=MAX_LONG_REQUEST,
    )
    async def _put(self, request: OperationRequest) -> dict[str, Any]:
        """Register cards with their vectors; ``agents``: lists of a card as text and its packed vectors in base64."""
        space = self._own_space(read_text(request, "space"))
        dims = _dims(space)
        agents = _rows(request, "agents", (str, str))
        cards = [card.encode() for card, _ in agents]

        def packed(at: int, card: Card) -> bytes:
            vectors, rows = _vectors(f"agents[{at}]", agents[at][1], dims)
            expected = 1 + len(card.skills[:MAX_SKILLS])
            if len(rows) != expected:
                raise BadRequestError(f"agents[{at}]", f"expected {expected} vectors, got {len(rows)}")
            return vectors

        tenant = read_text(request, "tenant") or DEFAULT_TENANT
        return (await self._directory.register_many(tenant, space, cards, packed))._asdict()

    @operation(
        "agents-embed",
        Right.ADMIN,
        "Keep vectors of agents",
        obj(embedded=COUNT),
        fields=_IN_BULK,
        method="POST",
        audited=False,
        longest=MAX_LONG_REQUEST,
    )
    async def _embed(self, request: OperationRequest) -> dict[str, Any]:
        """Keep vectors; ``agents``: lists of number, card revision, and the packed vectors of that card in base64.

        The space may be one that the service does not use yet.
        """
        space = read_text(request, "space")
        dims = _dims(space)
        rows = enumerate(_rows(request, "agents", (int, int, str)))
        vectors = [
            CardVectors(no, revision, _vectors(f"agents[{at}]", told, dims)[0]) for at, (no, revision, told) in rows
        ]
        return {"embedded": await self._directory.put_vectors(space, vectors)}

    def _own_space(self, space: str) -> str:
        if self._models is None:
            raise BadRequestError("space", "expected none, registry.semantic is turned off")
        own = self._models.encoder.space
        if own is None:
            raise BadRequestError("space", f"not known yet: {self._models.encoder.problem}")
        if space != str(own):
            raise BadRequestError("space", f'expected that of the configured model, {own}, got "{space[:MAX_SPACE]}"')
        return space


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


def _vectors(name: str, encoded: str, dims: int) -> tuple[bytes, HalfFloats]:
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
