"""What search takes for language in cards and requests: words of identifiers and scripts, but no encoded data.

Base64, hashes and data URIs say nothing about what an agent does.
"""

import re

MIN_RUN = 32
"""Characters from which a run may be data: the length of the shortest hash in common use."""
LONGEST_WORD = 64
"""Letters or digits in a row that may still be one word."""
_MIN_PART = 3.0
"""Average characters in a part of an identifier, at least; the parts of random base64 have two."""
_MAX_SEGMENT = 5.0
"""Average characters in a segment of a path or list of codes, at most; the segments of random base64 have thirty."""
_URI = re.compile(r"\bdata:[\w.+-]{1,64}/[\w.+-]{1,64}(?:;[\w.=-]{1,64}){0,8},\S*")
_RUN = re.compile(rf"[A-Za-z0-9+/=_-]{{{MIN_RUN},}}")
_HEXADECIMAL = re.compile(r"(?:0x)?[0-9a-fA-F-]+")
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_SEPARATOR = re.compile(r"[+/_-]")
_WORD_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[_-]+|\s+")

UNSPACED = "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff]"
"""Pattern of a character of a script without spaces: Thai, Lao, Burmese, Khmer, Chinese, Japanese, Korean."""


def split_identifier(text: str) -> list[str]:
    """Return the words that an identifier, in camel case, snake case or with hyphens, is made of."""
    return [word for word in _WORD_BOUNDARY.split(text) if word]


def without_data(text: str) -> str:
    """Return a text without data URIs and without long runs of base64 characters that are not made of words."""
    return _RUN.sub(lambda run: " " if _is_data(run[0]) else run[0], _URI.sub(" ", text)).strip()


def _is_data(run: str) -> bool:
    if _HEXADECIMAL.fullmatch(run):
        return True
    lengths = [len(part) for part in _PART.findall(run)]
    if not lengths or max(lengths) > LONGEST_WORD:
        return True
    segments = len(_SEPARATOR.findall(run)) + 1
    return len(run) + 1 >= (_MAX_SEGMENT + 1) * segments and sum(lengths) < _MIN_PART * len(lengths)
