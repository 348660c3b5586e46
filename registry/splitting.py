"""Splits a request that asks for several things into its parts, so that each may find an agent of its own."""

import re
from collections.abc import Iterator

from registry.opaque import without_data

MAX_PARTS = 12
"""Each is one more text to encode and to look up; what more a longer request asks for is only in its whole."""
MAX_REQUEST = 8192
"""Characters of a request that are read; the rest of a longer one is not, since none is refused for its length."""

_FEWEST = 3
"""Words of a part: a shorter sentence, such as a greeting, goes with the one before it."""
_END = re.compile(
    r"[.!?;…؟।]{1,4}[\"'”’»)\]]{0,3}(?=\s)"  # There is no space in 3.5, example.org, or v1.2.
    r"|[。！？；][”」』）]?"
    r"|[\r\n]+"
)
_MARK = re.compile(r"(?:[-*•–]|\(?\d{1,2}[.)])\s+")
"""Before an item of a list."""
_SHORTENED = re.compile(
    r"(?:^|[\s(.])(?:[^\W\d_]|approx|cf|co|corp|dr|est|etc|fig|inc|jr|ltd|mr|mrs|ms|no|prof|sr|st|vs)\.$"
    r"|^\s*\(?\d{1,2}\.$",
    re.IGNORECASE,
)
"""A full stop that ends no sentence, as in "e.g.", "U.S.", "Dr.", or behind the number of a list item."""
_WORD = re.compile(r"\w+")
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff]")
"""Scripts whose words are not set apart by spaces: a character counts as one."""


def pieces(request: str) -> list[str]:
    """Return the texts that a request is searched by: the whole, without data such as base64, and its parts."""
    request = request[:MAX_REQUEST]
    whole = without_data(request) or request
    return [whole, *parts(whole)]


def parts(request: str) -> list[str]:
    """Return the sentences and list items of a request, its first ``MAX_PARTS``; none when it is a single one."""
    found: list[str] = []
    begun = ""
    for sentence in _sentences(request[:MAX_REQUEST]):
        if found and _length(sentence) < _FEWEST:
            found[-1] += f" {sentence}"
        elif _length(begun + sentence) < _FEWEST:
            begun += f"{sentence} "
        else:
            found.append(begun + sentence)
            begun = ""
    return found[:MAX_PARTS] if len(found) > 1 else []


def _sentences(text: str) -> Iterator[str]:
    start = 0
    for end in _END.finditer(text):
        if not _SHORTENED.search(text[max(start, end.end() - 8) : end.end()]):
            yield from _bare(text[start : end.end()])
            start = end.end()
    yield from _bare(text[start:])


def _bare(piece: str) -> Iterator[str]:
    piece = piece.strip()
    if mark := _MARK.match(piece):
        piece = piece[mark.end() :]
    if _WORD.search(piece):
        yield piece


def _length(text: str) -> int:
    return len(_WORD.findall(text)) + len(_UNSPACED.findall(text))
