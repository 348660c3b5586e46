"""Agents that are registered by URL: their cards are fetched, once, from where agents publish them."""

from mediator.http.guard import Guard


async def fetch_card(guard: Guard, url: str, seconds: float) -> bytes:
    """Return the card at a URL, a JSON object of at most :data:`registry.cards.MAX_CARD` bytes, as it came.

    An origin or a folder means the well-known place below it. All requests together take at most ``seconds``.
    :class:`mediator.errors.AddressRefusedError` for an address that is not called,
    :class:`mediator.errors.UnreachableError` when no card is to be had there,
    :class:`mediator.errors.BadRequestError` naming ``url`` when what is there is no JSON object.
    """
    raise NotImplementedError


def with_mailbox(data: bytes, address: str) -> bytes:
    """Return a card with a mailbox, given by its address; all other bytes stay as they are.

    A card that names this mailbox already is returned as it came; :class:`mediator.errors.BadRequestError` naming
    ``mailbox`` when it names another, or is no JSON object.
    """
    raise NotImplementedError
