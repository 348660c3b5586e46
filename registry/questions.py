"""Reads what a registry is judged by: a catalog of cards, and requests that say which of them are right."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from mediator.errors import BadRequestError


@dataclass(frozen=True, slots=True)
class Question:
    """A request, and the keys of the cards that answer it: their ``id``, or their mailbox where they have none."""

    qid: str
    query: str
    relevant: frozenset[str]


def read_questions(lines: Iterable[bytes], where: str, keys: Mapping[str, str]) -> list[Question]:
    """Read requests, JSON lines of ``{"qid", "query", "relevant": [id or mailbox, …]}``.

    ``keys`` gives the key of each card by its id and by its mailbox. Raises :class:`BadRequestError` that names
    ``where`` and the line.
    """
    raise NotImplementedError
