"""Reads cards to register from files and folders, and gives those an address that name no mailbox."""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from mediator.errors import BadRequestError
from mediator.mailboxes.address import MAX_ADDRESS, parse_address
from registry.cards import MAX_CARD, read_card
from registry.fetching import with_mailbox

MAX_FILE = 256 * 1024 * 1024
"""Bytes of a .json file, which is read as a whole; JSON lines may be as many as they like."""
MAX_URLS = 16 * 1024 * 1024
"""Bytes of a file that lists URLs."""
MAX_PREFIX = 64
"""Characters; an address has twice as many."""
_LINES = frozenset({".jsonl", ".ndjson"})
_CARDS = _LINES | {".json"}
_URL = re.compile(r"https?://", re.IGNORECASE)


class Piece(NamedTuple):
    """A card to register: its bytes, the URL it lies at, or the problem that there was."""

    where: str
    """As a person finds it: ``cards.jsonl:17``, ``cards.json[3]``."""
    data: bytes = b""
    url: str = ""
    problem: str = ""


def pieces(sources: Iterable[str]) -> Iterator[Piece]:
    """Read URLs, files and folders, one card after the other; what cannot be read is a piece that says so.

    A ``.json`` file holds a card or an array of cards, a ``.jsonl`` file a card a line, a ``.txt`` file a URL a line;
    of a folder, with those inside, the first two are read.
    """
    for source in sources:
        if _URL.match(source):
            yield Piece(source, url=source)
        else:
            for path in _files(source):
                yield from _file(path)


def size_of(sources: Iterable[str]) -> int:
    """Return about how many bytes :func:`pieces` will read."""
    paths = (path for source in sources if not _URL.match(source) for path in _files(source))
    return sum(path.stat().st_size for path in paths if path.is_file())


class Addresses:
    """Gives cards that name no mailbox an address made of a prefix and their ``id`` or ``name``.

    The same cards in the same order get the same addresses, so that importing them again replaces them.
    """

    def __init__(self, prefix: str) -> None:
        """``prefix`` may end in a dot. Raises :class:`BadRequestError` for what no address can begin with."""
        self._prefix = parse_address(prefix.removesuffix("."), "mailbox-prefix")
        if len(self._prefix) > MAX_PREFIX:
            raise BadRequestError("mailbox-prefix", f"expected at most {MAX_PREFIX} characters")
        self._given: Counter[str] = Counter()

    def give(self, card: bytes) -> bytes:
        """Return a card with a mailbox, its own where it has one; :class:`BadRequestError` where it is no card."""
        try:
            read_card(card)
        except BadRequestError as error:
            if error.field != "mailbox":
                raise
            return with_mailbox(card, self._new(orjson.loads(card)))
        return card

    def _new(self, card: Mapping[str, Any]) -> str:
        names = (slug(name) for field in ("id", "name") if isinstance(name := card.get(field), str))
        name = next(filter(None, names), "card")
        # Room for the count of those that are called the same.
        address = f"{self._prefix}.{name}"[: MAX_ADDRESS - 8].rstrip(".")
        self._given[address] += 1
        return address if self._given[address] == 1 else f"{address}.{self._given[address]}"


def slug(text: str) -> str:
    """Return text as parts of an address: ``Tide Table (North)`` is ``tide.table.north``; "" when nothing is left."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return ".".join(re.findall(r"[a-z0-9]+", plain))


def _files(source: str) -> list[Path]:
    path = Path(source)
    if not path.is_dir():
        return [path]
    return sorted(inside for inside in path.rglob("*") if inside.suffix.lower() in _CARDS and inside.is_file())


def _file(path: Path) -> Iterator[Piece]:
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
            yield Piece(where, problem="expected .json, .jsonl, a .txt with URLs, a folder or a URL")
    except OSError as error:
        yield Piece(where, problem=f"cannot be read: {error.strerror}")


def _read(path: Path, limit: int, advice: str) -> bytes:
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(0, f"larger than {limit >> 20} MiB, {advice}")
    return data


def _json_lines(path: Path) -> Iterator[Piece]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_CARD + 2):
            number += 1
            where = f"{path}:{number}"
            if len(line) > MAX_CARD + 1 and not line.endswith(b"\n"):
                yield Piece(where, problem=f"expected at most {MAX_CARD} bytes")
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_CARD)
            elif card := line.strip():
                yield Piece(where, card)


def _json(where: str, data: bytes) -> Iterator[Piece]:
    """An array is cut between its elements, so that each card stays as it was written, byte for byte."""
    try:
        text = data.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        yield Piece(where, problem="expected UTF-8")
        return
    if not text.startswith("["):
        yield Piece(where, text.encode())
        return
    read = json.JSONDecoder().raw_decode
    at, number = _after_space(text, 1), 0
    while text[at : at + 1] != "]":
        try:
            end = read(text, at)[1]
        except (ValueError, RecursionError):
            yield Piece(f"{where}[{number}]", problem="expected JSON; what follows is not read")
            return
        yield Piece(f"{where}[{number}]", text[at:end].encode())
        number += 1
        at = _after_space(text, end)
        if text[at : at + 1] == ",":
            at = _after_space(text, at + 1)
        elif text[at : at + 1] != "]":
            yield Piece(where, problem=f"expected a comma or ] after element {number - 1}; what follows is not read")
            return


_SPACE = re.compile(r"[ \t\r\n]*")


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _urls(where: str, data: bytes) -> Iterator[Piece]:
    for number, line in enumerate(data.decode("utf-8-sig", "replace").splitlines(), 1):
        url = line.strip()
        if _URL.match(url):
            yield Piece(url, url=url)
        elif url and not url.startswith("#"):
            yield Piece(f"{where}:{number}", problem=f'expected a URL, got "{url[:40]}"')
