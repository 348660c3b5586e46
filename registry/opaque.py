"""Removes data from texts: base64, hashes and data URIs say nothing about what an agent does."""

import re

FEWEST = 32
"""Characters of a run that may be data: those of the shortest hash in common use."""
LONGEST_WORD = 64
"""Letters or digits in a row that may still be a word."""
_USUAL = 3.0
"""Characters that the parts of an identifier have on average, at least; those of random base64 have two."""
_APART = 5.0
"""Characters of a segment of a path or a list of codes, on average at most; those of random base64 have thirty."""
_URI = re.compile(r"\bdata:[\w.+-]{1,64}/[\w.+-]{1,64}(?:;[\w.=-]{1,64}){0,8},\S*")
_RUN = re.compile(rf"[A-Za-z0-9+/=_-]{{{FEWEST},}}")
_HEXADECIMAL = re.compile(r"(?:0x)?[0-9a-fA-F-]+")
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_SEPARATOR = re.compile(r"[+/_-]")


def without_data(text: str) -> str:
    """Return a text without data URIs and without long runs of base64's characters that are not made of words."""
    return _RUN.sub(lambda run: " " if _is_data(run[0]) else run[0], _URI.sub(" ", text)).strip()


def _is_data(run: str) -> bool:
    if _HEXADECIMAL.fullmatch(run):
        return True
    lengths = [len(part) for part in _PART.findall(run)]
    if not lengths or max(lengths) > LONGEST_WORD:
        return True
    segments = len(_SEPARATOR.findall(run)) + 1
    return len(run) + 1 >= (_APART + 1) * segments and sum(lengths) < _USUAL * len(lengths)
