"""Splits a request that asks for several things into parts, so that each part can find its own agent."""

import re
from collections.abc import Iterator

from registry.cards.language import UNSPACED, without_data

MAX_PARTS = 12
"""Each part is one more text to encode and search by; further parts count only in the whole request."""
MAX_REQUEST = 8192
"""Characters of a request that are read; a longer one is truncated, not refused."""

_MIN_WORDS = 3
"""Words of a part; a shorter sentence, such as a greeting, joins the one before it."""
_END = re.compile(
    r"[.!?;…؟।]{1,4}[\"'”’»)\]]{0,3}(?=\s)"  # There is no space in 3.5, example.org, or v1.2.
    r"|[。！？；][”」』）]?"
    r"|[\r\n]+"
)
_MARK = re.compile(r"(?:[-*•–]|\(?\d{1,2}[.)])\s+")
"""The bullet or number before a list item."""
_SHORTENED = re.compile(
    r"(?:^|[\s(.])(?:[^\W\d_]|approx|cf|co|corp|dr|est|etc|fig|inc|jr|ltd|mr|mrs|ms|no|prof|sr|st|vs)\.$"
    r"|^\s*\(?\d{1,2}\.$",
    re.IGNORECASE,
)
"""A full stop that ends no sentence, as in "e.g.", "U.S.", "Dr.", or after the number of a list item."""
_WORD = re.compile(r"\w+")
_UNSPACED = re.compile(UNSPACED)
"""Each of these characters counts as a word."""


def search_texts(request: str) -> list[str]:
    """Return the texts to search a request by: the whole, without data such as base64, then its parts."""
    request = request[:MAX_REQUEST]
    whole = without_data(request) or request
    return [whole, *split_request(whole)]


def split_request(request: str) -> list[str]:
    """Return the first ``MAX_PARTS`` sentences and list items of a request; none when there is only one."""
    found: list[str] = []
    begun = ""
    for sentence in _sentences(request[:MAX_REQUEST]):
        if found and _length(sentence) < _MIN_WORDS:
            found[-1] += f" {sentence}"
        elif _length(begun + sentence) < _MIN_WORDS:
            begun += f"{sentence} "
        else:
            found.append(begun + sentence)
            begun = ""
    return found[:MAX_PARTS] if len(found) > 1 else []


def _sentences(text: str) -> Iterator[str]:
    start = 0
    for end in _END.finditer(text):
        if not _SHORTENED.search(text[max(start, end.end() - 8) : end.end()]):
            yield from _without_mark(text[start : end.end()])
            start = end.end()
    yield from _without_mark(text[start:])


def _without_mark(piece: str) -> Iterator[str]:
    piece = piece.strip()
    if mark := _MARK.match(piece):
        piece = piece[mark.end() :]
    if _WORD.search(piece):
        yield piece


def _length(text: str) -> int:
    return len(_WORD.findall(text)) + len(_UNSPACED.findall(text))
