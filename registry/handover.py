"""Takes cards and vectors that were read by a model elsewhere, in bulk, over the control socket (G1)."""

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import numpy as np

from mediator.agents.records import Embedded
from mediator.broker import Broker
from mediator.errors import BadRequestError
from mediator.mailboxes.address import DEFAULT_TENANT
from mediator.operators.control import MAX_LONG, ControlServer
from mediator.operators.requests import Request, text
from registry.cards import Card
from registry.directory import Directory
from registry.embedding.spaces import Space
from registry.meanings import Meanings
from registry.packing import HalfFloats, unpack_rows
from registry.texts import MAX_SKILLS, TEMPLATE

MAX_TOGETHER = 256
"""Cards of one request: they are one transaction, for which senders may have to wait."""
MAX_SPACE = 1024
_FAR = 0.01
"""By how much the length of a vector may differ from one, in half precision and more."""


class Handover:
    """The commands ``agents-put`` and ``agents-embed``."""

    def __init__(self, broker: Broker, directory: Directory, meanings: Meanings | None) -> None:
        self._broker = broker
        self._directory = directory
        self._meanings = meanings

    def register(self, control: ControlServer) -> None:
        """Teach the control socket."""
        control.register("agents-put", self._put, longest=MAX_LONG)
        control.register("agents-embed", self._embed, longest=MAX_LONG)

    async def _put(self, request: Request) -> dict[str, Any]:
        """``agents``: lists of a card as text and its vectors, packed and in base64."""
        space = self._own_space(text(request, "space"))
        dims = _dims(space)
        agents = _rows(request, "agents", (str, str))
        cards = [card.encode() for card, _ in agents]

        def packed(at: int, card: Card) -> bytes:
            vectors = _packed(f"agents[{at}]", agents[at][1])
            wanted = 1 + len(card.skills[:MAX_SKILLS])
            found = _unpacked(f"agents[{at}]", vectors, dims)
            if len(found) != wanted:
                raise BadRequestError(f"agents[{at}]", f"expected {wanted} vectors, got {len(found)}")
            return vectors

        taken = await self._directory.take(text(request, "tenant") or DEFAULT_TENANT, space, cards, packed)
        return taken._asdict()

    async def _embed(self, request: Request) -> dict[str, Any]:
        """``agents``: lists of number, card revision, and the vectors of that card, packed and in base64.

        The space may be one that the service does not use yet.
        """
        space = text(request, "space")
        dims = _dims(space)
        made = []
        for at, (no, revision, told) in enumerate(_rows(request, "agents", (int, int, str))):
            vectors = _packed(f"agents[{at}]", told)
            _unpacked(f"agents[{at}]", vectors, dims)
            made.append(Embedded(no, revision, vectors))
        return {"embedded": await self._broker.chore(lambda tx, _now: tx.vectors.put(space, made))}

    def _own_space(self, space: str) -> str:
        if self._meanings is None:
            raise BadRequestError("space", "expected none, registry.semantic is turned off")
        own = self._meanings.encoder.space
        if own is None:
            raise BadRequestError("space", f"not known yet: {self._meanings.encoder.problem}")
        if space != str(own):
            raise BadRequestError("space", f'expected that of the configured model, {own}, got "{space[:MAX_SPACE]}"')
        return space


def _dims(space: str) -> int:
    """Return how long the vectors of a space are, whose texts are of the form that is used here."""
    try:
        parsed = Space.parse(space)
    except ValueError as error:
        raise BadRequestError("space", str(error)) from None
    if parsed.template != TEMPLATE or len(space) > MAX_SPACE:
        raise BadRequestError("space", f'expected one of texts in form {TEMPLATE}, got "{space[:MAX_SPACE]}"')
    return parsed.dims


def _rows(request: Request, name: str, kinds: tuple[type, ...]) -> Sequence[Any]:
    rows = request.get(name)
    if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_TOGETHER:
        raise BadRequestError(name, f"expected a list of 1 to {MAX_TOGETHER}")
    for at, row in enumerate(rows):
        if not isinstance(row, list) or tuple(map(type, row)) != kinds:
            raise BadRequestError(f"{name}[{at}]", f"expected [{', '.join(kind.__name__ for kind in kinds)}]")
        if any(isinstance(value, int) and not 0 <= value < 2**63 for value in row):
            raise BadRequestError(f"{name}[{at}]", "expected numbers from 0 to 2**63 - 1")
    return rows


def _packed(name: str, told: str) -> bytes:
    try:
        return base64.b64decode(told, validate=True)
    except (binascii.Error, ValueError):
        raise BadRequestError(name, "expected vectors in base64") from None


def _unpacked(name: str, vectors: bytes, dims: int) -> HalfFloats:
    try:
        rows = unpack_rows(vectors)
    except (ValueError, IndexError):
        raise BadRequestError(name, "expected packed vectors") from None
    if not len(rows) or rows.shape[1] != dims:
        raise BadRequestError(name, f"expected vectors of {dims} numbers, got {rows.shape[1]}")
    # Not within a bound is also what is no number.
    if not (np.abs(np.linalg.norm(rows.astype(np.float32), axis=1) - 1) < _FAR).all():
        raise BadRequestError(name, "expected vectors of length one")
    return rows
