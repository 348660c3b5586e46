"""QR codes of invitations, as an image and for a terminal."""

import io
from functools import lru_cache

import segno

_BORDER = 4
"""Modules of white around the code; scanners need them."""
_SCALE = 8
"""Pixels of an image for each module."""
_COLUMNS = 80
"""Characters across a terminal, each a module wide."""


def png(text: str) -> bytes:
    """Return a PNG image of a text of at most 2953 bytes; ValueError for a longer one."""
    image = io.BytesIO()
    _encode(text).save(image, kind="png", scale=_SCALE, border=_BORDER)
    return image.getvalue()


@lru_cache(maxsize=64)
def cached_png(text: str) -> bytes | None:
    """Return what :func:`png` does, from a cache; None for a text too long for a code."""
    try:
        return png(text)
    except ValueError:
        return None


def terminal(text: str) -> str:
    """Return lines of at most 80 block characters, two modules each; ValueError for a text too long for that."""
    code, lines = _encode(text), io.StringIO()
    if code.symbol_size(border=_BORDER)[0] > _COLUMNS:
        raise ValueError(f"does not fit into {_COLUMNS} columns")
    code.terminal(lines, border=_BORDER, compact=True)
    return lines.getvalue()


def _encode(text: str) -> segno.QRCode:
    # The fewest modules, so that each is large; then as much correction as fits among them.
    return segno.make_qr(text, error="l", boost_error=True)
