"""A registry for a trial: a catalog in memory, asked as the service would be, and gone afterwards."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from registry.cases import Catalog

DEPTH = 10
"""Answers of each request."""


class Trial:
    """A catalog that can be asked; answers are keys of cards, best first."""

    async def by_text(self, query: str) -> list[str]:
        """Ask as DISCOVER does with ``text``."""
        raise NotImplementedError

    async def by_meaning(self, query: str) -> list[str]:
        """Ask as DISCOVER does with ``semantic``."""
        raise NotImplementedError

    async def by_vectors(self, query: str) -> list[str]:
        """Ask by vectors alone, which no door offers: it shows what the model itself adds."""
        raise NotImplementedError


@asynccontextmanager
async def trial(
    catalog: Catalog, model: str | None, data_dir: Path, told: Callable[[str, int], None]
) -> AsyncIterator[Trial]:
    """Register a catalog and wait until it can be asked.

    ``model`` is one of sentence-transformers, None for keywords alone; ``data_dir`` is where the service keeps what it
    made of a model. ``told`` hears how many cards are ``registered`` and ``embedded``. Raises
    :class:`mediator.errors.UnavailableError` when the model cannot be had.
    """
    del catalog, model, data_dir, told
    yield Trial()
