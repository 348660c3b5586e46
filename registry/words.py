"""Words of cards and of requests: both are read the same way, so that they meet in the keyword index."""

import re
import threading
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import orjson
import Stemmer

from registry.cards import Card
from registry.opaque import without_data

MAX_TEXT = 20_000
"""Characters of one text that are read."""
MAX_WORDS = 2_048
"""Words of one card that are counted, the weightiest fields first."""
MAX_LENGTH = 40
"""Characters of a word; what is longer is data rather than language, and is cut."""
MAX_COUNT = 255
"""More of the same word in one card says nothing more."""

_VERSION = b"\x02"
"""Of packed terms, and of how words are made: another way of reading makes others."""


def words(text: str) -> list[str]:
    """Return the words of a text as the index knows them, in its order, of at most :data:`MAX_TEXT` characters.

    They are in lower case without accents, English ones stemmed and function words left out, unless there is nothing
    else. An identifier is the words it is made of, and a short one is itself besides. Scripts without spaces are cut
    into pairs of characters. Data such as base64 is left out.
    """
    # An accent that stands alone is none when it is folded.
    found = [word for word in _words(text) if word]
    telling = [word for word in found if word not in _FUNCTION_WORDS]
    return [_stem(word) for word in telling or found]


@dataclass(frozen=True, slots=True)
class Terms:
    """What keyword search knows of a card."""

    weights: Mapping[str, int]
    """By word, how often it is there, each time with the weight of the field: 1 to :data:`MAX_COUNT`."""

    @classmethod
    def of(cls, card: Card) -> "Terms":
        """Return the terms of a card."""
        weights: Counter[str] = Counter()
        left = MAX_WORDS
        for text, weight in _fields(card):
            found = words(text)[:left]
            for word in found:
                weights[word] += weight
            left -= len(found)
            if not left:
                break
        return cls({word: min(weight, MAX_COUNT) for word, weight in weights.items()})

    def pack(self) -> bytes:
        """Return them as they are kept in a store."""
        return _VERSION + orjson.dumps(self.weights)

    @classmethod
    def unpack(cls, data: bytes) -> "Terms":
        """Read what :meth:`pack` wrote; :class:`ValueError` for another version or damage, then read the card again."""
        if data[:1] != _VERSION:
            raise ValueError("terms of another version")
        weights = orjson.loads(data[1:])
        if not isinstance(weights, dict) or any(type(weight) is not int for weight in weights.values()):
            raise ValueError("expected an object of whole numbers")
        if weights and not (min(weights.values()) >= 1 and max(weights.values()) <= MAX_COUNT):
            raise ValueError("a weight is out of bounds")
        return cls(weights)


def _fields(card: Card) -> Iterator[tuple[str, int]]:
    """Yield the texts of a card, those that say most first, and what a word there counts."""
    yield card.name, 4
    yield card.description, 2
    for tag in card.tags:
        yield tag, 1
    for skill in card.skills:
        yield skill.name or skill.id, 4
    for skill in card.skills:
        yield skill.description, 1
        for tag in skill.tags:
            yield tag, 1
        for example in skill.examples:
            yield example, 1


_MARKS = "".join(chr(code) for code in range(0x300, 0x10000) if unicodedata.category(chr(code)) in {"Mn", "Mc"})
_RUN = re.compile(rf"\w[\w{_MARKS}-]*")
"""A word, or several that make one identifier."""
_SEAM = re.compile(r"[_-]+|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_SHORTENED = re.compile(r"['’](?:s|t|d|m|re|ve|ll)\b", re.IGNORECASE)
_UNSPACED = re.compile("([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff]+)")
"""Thai, Lao, Burmese, Khmer, Chinese, Japanese, Korean."""
_ACCENTS = re.compile("[\u0300-\u036f]+")
_PIECE = 256
"""Characters brought into one form at once."""
MAX_JOINED = 3
"""Words of an identifier that is also known as a whole."""


def _words(text: str) -> Iterator[str]:
    for run in _RUN.findall(_SHORTENED.sub("", _plain(without_data(text)[:MAX_TEXT]))):
        if run.isascii() and run.isalnum() and run.islower():
            yield run[:MAX_LENGTH]
            continue
        parts = [part for part in _SEAM.split(run) if part]
        if 1 < len(parts) <= MAX_JOINED:
            yield _folded("".join(parts))
        for part in parts:
            if part.isascii():
                yield part.lower()[:MAX_LENGTH]
                continue
            for place, piece in enumerate(_UNSPACED.split(part)):
                if place % 2:
                    yield from (piece[start : start + 2] for start in range(max(1, len(piece) - 1)))
                elif piece:
                    yield _folded(piece)


def _plain(text: str) -> str:
    """Return a text with each character in one form, of at most :data:`MAX_TEXT`."""
    if text.isascii():
        return text
    # Accents are put in order by moving each past all before it: a row of thousands would take a second.
    pieces = (unicodedata.normalize("NFKC", text[at : at + _PIECE]) for at in range(0, len(text), _PIECE))
    return "".join(pieces)[:MAX_TEXT]


def _folded(word: str) -> str:
    if word.isascii():
        return word.lower()[:MAX_LENGTH]
    bare = _ACCENTS.sub("", unicodedata.normalize("NFD", word[:_PIECE].casefold()))
    return unicodedata.normalize("NFC", bare)[:MAX_LENGTH]


_stemmers = threading.local()


@lru_cache(maxsize=50_000)
def _stem(word: str) -> str:
    # A stemmer has a buffer of its own, which two threads must not share.
    if not hasattr(_stemmers, "english"):
        _stemmers.english = Stemmer.Stemmer("english", 0)
    stemmed: str = _stemmers.english.stemWord(word)
    return stemmed


_FUNCTION_WORDS = frozenset(
    """
    a about after all also am an and any are as at be because been before being both but by can could did do does
    doing don during each either else few for from further had has have having he her here hers herself him himself his
    how i if in into is it its itself just me more most my myself neither no nor not of off on once only or other our
    ours ourselves out over own same shall she should so some such than that the their theirs them themselves then there
    these they this those through to too under until up upon us very was we were what when where which while who whom
    whose why will with would you your yours yourself yourselves
    d s t aren couldn didn doesn hadn hasn haven isn shouldn wasn weren won wouldn
    able assist give hello help hey hi know let like look looking need needs please provide show tell thank thanks want
    wants
    """.split()  # noqa: SIM905
)
"""English words that hold a sentence together, and those by which one asks for something."""
