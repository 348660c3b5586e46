"""Reads evaluation data: a catalog of cards, and requests with the cards that are relevant to them."""

from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from mediator.errors import BadRequestError
from registry.cards.card import read_card
from registry.cards.importing import AddressAssigner, CardSource
from registry.cards.mailbox import mailbox_address

MAX_LINE = 1024 * 1024
"""Bytes of one request with its relevant cards."""
_PREFIX = "card"
"""Prefix of the addresses of cards without a mailbox."""


@dataclass(frozen=True, slots=True)
class CardCatalog:
    """Cards with a mailbox each; the *key* of a card is its ``id`` or, without one, its mailbox."""

    cards: Sequence[bytes]
    keys: Mapping[str, str]
    """The key of each card, by its id and by its mailbox."""


@dataclass(frozen=True, slots=True)
class EvaluationCase:
    """A request, and the keys of the relevant cards."""

    qid: str
    query: str
    relevant: frozenset[str]


def read_catalog(pieces: Iterable[CardSource]) -> CardCatalog:
    """Read cards, and assign an address to those without a mailbox.

    Raises :class:`BadRequestError` naming file and line of an invalid or duplicate card.
    """
    addresses = AddressAssigner(_PREFIX)
    cards: list[bytes] = []
    keys: dict[str, str] = {}
    for piece in pieces:
        if piece.problem or piece.url:
            raise BadRequestError(piece.where, piece.problem or "expected a card")
        try:
            card = addresses.assign(piece.data)
            address = read_card(card).address
        except BadRequestError as error:
            raise BadRequestError(piece.where, str(error)) from None
        key = orjson.loads(card).get("id")
        key = key if isinstance(key, str) and key else address
        for name in {key, address}:
            if name in keys:
                raise BadRequestError(piece.where, f'"{name[:80]}" is the id or the mailbox of another card')
            keys[name] = key
        cards.append(card)
    return CardCatalog(cards, keys)


def read_cases(path: Path, catalog: CardCatalog) -> Iterator[EvaluationCase]:
    """Read requests, JSON lines of ``{"qid", "query", "relevant": [id or mailbox, …]}``.

    Raises :class:`BadRequestError` naming file and line of an invalid request, or of one with a card that is not in the
    catalog.
    """
    seen: set[str] = set()
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE):
            number += 1
            if number == 1:
                line = line.removeprefix(BOM_UTF8)
            if not line.strip():
                continue
            try:
                case = _case(line, catalog.keys)
                if case.qid in seen:
                    raise BadRequestError("qid", f'"{case.qid[:80]}" was there before')
            except BadRequestError as error:
                raise BadRequestError(f"{path}:{number}", str(error)) from None
            seen.add(case.qid)
            yield case


def _case(line: bytes, keys: Mapping[str, str]) -> EvaluationCase:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError:
        fields = None
    if not isinstance(fields, dict):
        raise BadRequestError("request", "expected a JSON object")
    relevant = fields.get("relevant")
    if not isinstance(relevant, list) or not relevant:
        raise BadRequestError("relevant", "expected a list of ids or mailboxes of cards, at least one")
    return EvaluationCase(
        _text(fields, "qid"),
        _text(fields, "query"),
        frozenset(_key(name, keys) for name in relevant),
    )


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value.strip():
        raise BadRequestError(name, "expected a text")
    return value


def _key(name: Any, keys: Mapping[str, str]) -> str:
    if isinstance(name, str):
        if name in keys:
            return keys[name]
        try:
            return keys[mailbox_address(name)]
        except (BadRequestError, KeyError):
            pass
    raise BadRequestError("relevant", f"no card of the catalog is called {str(name)[:80]!r}")
