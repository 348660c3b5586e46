"""Text analysis for the keyword index: tokenizes, folds, filters and stems cards and queries alike."""

import re
import threading
import unicodedata
from collections.abc import Iterator
from functools import lru_cache

import Stemmer

from registry.cards.language import UNSPACED, split_identifier, without_data

MAX_TEXT = 20_000
"""Characters of one text that are analyzed."""
MAX_LENGTH = 40
"""Characters of a word; longer ones are truncated, since they are data rather than language."""


def analyze(text: str) -> list[str]:
    """Return the index terms of the first :data:`MAX_TEXT` characters of a text, in their order.

    They are folded to lower case without accents; English ones are stemmed, and stop words are removed, unless there
    is nothing else. An identifier becomes the words it is made of, a short one also a term of its own. Scripts without
    spaces become bigrams. Data such as base64 is left out.
    """
    return [_stem(token) for token in _telling(text)]


def spell(text: str) -> dict[str, str]:
    """Return the index terms of a text, each with the word that it was made of, folded as the term is."""
    return {_stem(token): token for token in _telling(text)}


def _telling(text: str) -> list[str]:
    # Folding leaves nothing of an accent without a letter.
    tokens = [token for token in _tokenize(text) if token]
    return [token for token in tokens if token not in _STOP_WORDS] or tokens


_MARKS = "".join(chr(code) for code in range(0x300, 0x10000) if unicodedata.category(chr(code)) in {"Mn", "Mc"})
_RUN = re.compile(rf"\w[\w{_MARKS}-]*")
"""A word, or several that form one identifier."""
_CONTRACTION = re.compile(r"['’](?:s|t|d|m|re|ve|ll)\b", re.IGNORECASE)
_UNSPACED = re.compile(f"({UNSPACED}+)")
_ACCENTS = re.compile("[\u0300-\u036f]+")
_CHUNK = 256
"""Characters normalized at once."""
MAX_JOINED = 3
"""Words of an identifier that is also a term as a whole."""


def _tokenize(text: str) -> Iterator[str]:
    for run in _RUN.findall(_CONTRACTION.sub("", _normalize(without_data(text)[:MAX_TEXT]))):
        if run.isascii() and run.isalnum() and run.islower():
            yield run[:MAX_LENGTH]
            continue
        parts = split_identifier(run)
        if 1 < len(parts) <= MAX_JOINED:
            yield _fold("".join(parts))
        for part in parts:
            if part.isascii():
                yield part.lower()[:MAX_LENGTH]
                continue
            for place, piece in enumerate(_UNSPACED.split(part)):
                if place % 2:
                    yield from (piece[start : start + 2] for start in range(max(1, len(piece) - 1)))
                elif piece:
                    yield _fold(piece)


def _normalize(text: str) -> str:
    """Return a text in Unicode form NFKC, truncated to :data:`MAX_TEXT` characters."""
    if text.isascii():
        return text
    # In pieces: ordering combining characters is quadratic, thousands in a row would take a second.
    pieces = (unicodedata.normalize("NFKC", text[at : at + _CHUNK]) for at in range(0, len(text), _CHUNK))
    return "".join(pieces)[:MAX_TEXT]


def _fold(word: str) -> str:
    if word.isascii():
        return word.lower()[:MAX_LENGTH]
    bare = _ACCENTS.sub("", unicodedata.normalize("NFD", word[:_CHUNK].casefold()))
    return unicodedata.normalize("NFC", bare)[:MAX_LENGTH]


_stemmers = threading.local()


@lru_cache(maxsize=50_000)
def _stem(word: str) -> str:
    # A stemmer has a buffer that two threads must not share.
    if not hasattr(_stemmers, "english"):
        _stemmers.english = Stemmer.Stemmer("english", 0)
    stemmed: str = _stemmers.english.stemWord(word)
    return stemmed


_STOP_WORDS = frozenset(
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
"""English function words, and words by which people ask for something."""
