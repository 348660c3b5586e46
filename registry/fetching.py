"""Agents that are registered by URL: their cards are fetched, once, from where agents publish them."""

import asyncio

from yarl import URL

from mediator.errors import AddressRefusedError, BadRequestError, UnreachableError
from mediator.http.guard import Guard
from registry.addresses import find_mailbox, mailbox_address
from registry.cards import MAX_CARD, parse_card

WELL_KNOWN = (".well-known/agent-card.json", ".well-known/agent.json")
"""Where A2A agents publish their cards below their own URL, now and before A2A 0.3."""


async def fetch_card(guard: Guard, url: str, seconds: float) -> bytes:
    """Return the card at a URL, a JSON object of at most :data:`registry.cards.MAX_CARD` bytes, as it came.

    An origin or a folder means the well-known places below it; a URL that does not end in ``/``, ``.json`` or a query
    is tried as a folder first. Redirects are not followed. All requests together take at most ``seconds``.
    :class:`AddressRefusedError` for an address that is not called, :class:`UnreachableError` when no card is to be had
    there; the text tells of the first place that was tried.
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
    """Return a card with a mailbox, given by its address; all other bytes stay as they are.

    A card that names this mailbox already is returned as it came. :class:`BadRequestError` naming ``mailbox`` when the
    card names another, or has something else there; naming ``card`` when it is none.
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
    """Return where to look for the card, in order."""
    try:
        parsed = URL(url)
    except (ValueError, IndexError):
        return [url]  # which the guard refuses
    path = parsed.raw_path
    if parsed.raw_query_string or path.endswith(".json") or not parsed.raw_authority:
        return [url]
    folder = parsed.with_fragment(None)
    below = [str(folder.with_path(f"{path.rstrip('/')}/{place}", encoded=True)) for place in WELL_KNOWN]
    return below if path.endswith("/") or not path else [*below, str(folder)]
