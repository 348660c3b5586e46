"""Where cards come from: URLs, files and folders; and mailboxes for those without one."""

import asyncio
import json
import re
import unicodedata
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from yarl import URL

from mediator.errors import AddressRefusedError, BadRequestError, UnreachableError
from mediator.http.guard import Guard
from mediator.mailboxes.address import MAX_ADDRESS, parse_address
from registry.cards.card import MAX_CARD, find_mailbox, mailbox_address, parse_card, read_card

MAX_FILE = 256 * 1024 * 1024
"""Bytes of a .json file, which is read as a whole; .jsonl files have no limit."""
MAX_URLS = 16 * 1024 * 1024
"""Bytes of a .txt file with URLs."""
MAX_PREFIX = 64
"""Characters; an address may have twice as many."""
_LINES = frozenset({".jsonl", ".ndjson"})
_CARDS = _LINES | {".json"}
_URL = re.compile(r"https?://", re.IGNORECASE)


class CardSource(NamedTuple):
    """A card to register: its bytes, its URL, or the problem in reading it."""

    where: str
    """For people: ``cards.jsonl:17``, ``cards.json[3]``."""
    data: bytes = b""
    url: str = ""
    problem: str = ""


def read_sources(sources: Iterable[str]) -> Iterator[CardSource]:
    """Read URLs, files and folders, card by card; what cannot be read is yielded with its problem.

    A ``.json`` file has a card or an array of cards, a ``.jsonl`` file a card per line, a ``.txt`` file a URL per line.
    In a folder, and in those inside it, the first two are read.
    """
    for source in sources:
        if _URL.match(source):
            yield CardSource(source, url=source)
        else:
            for path in _files(source):
                yield from _file(path)


def size_of(sources: Iterable[str]) -> int:
    """Return about how many bytes :func:`read_sources` will read."""
    paths = (path for source in sources if not _URL.match(source) for path in _files(source))
    return sum(path.stat().st_size for path in paths if path.is_file())


class AddressAssigner:
    """Assigns cards without a mailbox an address made of a prefix and their ``id`` or ``name``.

    The same cards in the same order get the same addresses, so that importing them again replaces them.
    """

    def __init__(self, prefix: str) -> None:
        """``prefix`` may end in a dot. Raises :class:`BadRequestError` when no address can begin with it."""
        self._prefix = parse_address(prefix.removesuffix("."), "mailbox-prefix")
        if len(self._prefix) > MAX_PREFIX:
            raise BadRequestError("mailbox-prefix", f"expected at most {MAX_PREFIX} characters")
        self._used: Counter[str] = Counter()

    def assign(self, card: bytes) -> bytes:
        """Return a card with a mailbox, its own if it has one; :class:`BadRequestError` when it is no card."""
        fields = parse_card(card)
        if find_mailbox(fields) is None:
            return with_mailbox(card, self._new(fields))
        read_card(card)
        return card

    def _new(self, card: Mapping[str, Any]) -> str:
        names = (slug(name) for field in ("id", "name") if isinstance(name := card.get(field), str))
        name = next(filter(None, names), "card")
        # Leave room for the number that tells cards of the same name apart.
        address = f"{self._prefix}.{name}"[: MAX_ADDRESS - 8].rstrip(".")
        self._used[address] += 1
        return address if self._used[address] == 1 else f"{address}.{self._used[address]}"


def slug(text: str) -> str:
    """Convert text to parts of an address, maybe none: ``Tide Table (North)`` becomes ``tide.table.north``."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return ".".join(re.findall(r"[a-z0-9]+", plain))


def _files(source: str) -> list[Path]:
    path = Path(source)
    if not path.is_dir():
        return [path]
    return sorted(inside for inside in path.rglob("*") if inside.suffix.lower() in _CARDS and inside.is_file())


def _file(path: Path) -> Iterator[CardSource]:
    where = str(path)
    suffix = path.suffix.lower()
    try:
        if suffix in _LINES:
            yield from _json_lines(path)
        elif suffix == ".json":
            yield from _json(where, _read(path, MAX_FILE, "write the cards as .jsonl"))
        elif suffix == ".txt":
            yield from _urls(where, _read(path, MAX_URLS, "split the list"))
        else:
            yield CardSource(where, problem="expected .json, .jsonl, a .txt with URLs, a folder or a URL")
    except OSError as error:
        yield CardSource(where, problem=f"cannot be read: {error.strerror}")


def _read(path: Path, limit: int, advice: str) -> bytes:
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(0, f"larger than {limit >> 20} MiB, {advice}")
    return data


def _json_lines(path: Path) -> Iterator[CardSource]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_CARD + 2):
            number += 1
            if number == 1:
                line = line.removeprefix(BOM_UTF8)
            where = f"{path}:{number}"
            if len(line) > MAX_CARD + 1 and not line.endswith(b"\n"):
                yield CardSource(where, problem=f"expected at most {MAX_CARD} bytes")
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_CARD)
            elif card := line.strip():
                yield CardSource(where, card)


def _json(where: str, data: bytes) -> Iterator[CardSource]:
    """Read a card or an array, which is cut between its elements so that each card keeps its exact bytes."""
    try:
        text = data.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        yield CardSource(where, problem="expected UTF-8")
        return
    if not text.startswith("["):
        yield CardSource(where, text.encode())
        return
    read = json.JSONDecoder().raw_decode
    at, number = _after_space(text, 1), 0
    while text[at : at + 1] != "]":
        try:
            end = read(text, at)[1]
        except (ValueError, RecursionError):
            yield CardSource(f"{where}[{number}]", problem="expected JSON; what follows is not read")
            return
        yield CardSource(f"{where}[{number}]", text[at:end].encode())
        number += 1
        at = _after_space(text, end)
        if text[at : at + 1] == ",":
            at = _after_space(text, at + 1)
        elif text[at : at + 1] != "]":
            yield CardSource(
                where, problem=f"expected a comma or ] after element {number - 1}; what follows is not read"
            )
            return


_SPACE = re.compile(r"[ \t\r\n]*")


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _urls(where: str, data: bytes) -> Iterator[CardSource]:
    for number, line in enumerate(data.decode("utf-8-sig", "replace").splitlines(), 1):
        url = line.strip()
        if _URL.match(url):
            yield CardSource(url, url=url)
        elif url and not url.startswith("#"):
            yield CardSource(f"{where}:{number}", problem=f'expected a URL, got "{url[:40]}"')


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
