"""Fetches the cards of agents that are registered by URL."""

import asyncio

from yarl import URL

from mediator.errors import AddressRefusedError, BadRequestError, UnreachableError
from mediator.http.guard import Guard
from registry.cards.card import MAX_CARD, parse_card
from registry.cards.mailbox import find_mailbox, mailbox_address

WELL_KNOWN = (".well-known/agent-card.json", ".well-known/agent.json")
"""Where A2A agents publish their cards below their URL, since A2A 0.3 and before."""


async def fetch_card(guard: Guard, url: str, seconds: float) -> bytes:
    """Return the card at a URL, a JSON object of at most :data:`registry.cards.card.MAX_CARD` bytes, as it came.

    For an origin or a folder the well-known paths below it are tried; a URL that does not end in ``/``, ``.json`` or a
    query is tried as a folder first. Redirects are not followed. All requests together take at most ``seconds``.
    Raises :class:`AddressRefusedError` for an address that the guard refuses, :class:`UnreachableError` when there is
    no card; its text is about the first URL that was tried.
    """
    clock = asyncio.get_running_loop().time
    left, until = seconds, clock() + seconds
    failures: list[str] = []
    for place in _places(url):
        try:
            data = await guard.get(place, MAX_CARD, left)
            parse_card(data)
        except AddressRefusedError as error:
            raise AddressRefusedError(f"url: {error}") from error
        except (UnreachableError, BadRequestError) as error:
            failures.append(str(error))
            left = until - clock()
            if left <= 0:
                break
        else:
            return data
    raise UnreachableError(f"url: {failures[0]}")


def with_mailbox(data: bytes, address: str) -> bytes:
    """Return a card with the mailbox ``address`` added; all other bytes stay the same.

    A card that has this mailbox already is returned unchanged. Raises :class:`BadRequestError` naming ``mailbox`` when
    the card has another or an invalid one, naming ``card`` when it is no card.
    """
    address = mailbox_address(address)
    card = parse_card(data)
    named = mailbox_address(card["mailbox"]) if "mailbox" in card else find_mailbox(card)
    if named == address:
        return data
    if named is not None:
        raise BadRequestError("mailbox", f"the card names another, {named}")
    start = data.index(b"{") + 1
    return b'%b"mailbox":"%b"%b%b' % (data[:start], address.encode(), b"," if card else b"", data[start:])


def _places(url: str) -> list[str]:
    """Return the URLs to try for a card, in order."""
    try:
        parsed = URL(url)
    except (ValueError, IndexError):
        return [url]  # the guard will refuse it
    path = parsed.raw_path
    if parsed.raw_query_string or path.endswith(".json") or not parsed.raw_authority:
        return [url]
    folder = parsed.with_fragment(None)
    below = [str(folder.with_path(f"{path.rstrip('/')}/{place}", encoded=True)) for place in WELL_KNOWN]
    return below if path.endswith("/") or not path else [*below, str(folder)]
