"""QR codes of invitations, as an image and for a terminal."""

import io

import segno

_BORDER = 4
"""Modules of white around the code; scanners need them."""
_SCALE = 5


def png(text: str) -> bytes:
    """Return a PNG image of a text of at most 2953 bytes; ValueError for a longer one."""
    image = io.BytesIO()
    _made(text).save(image, kind="png", scale=_SCALE, border=_BORDER)
    return image.getvalue()


def terminal(text: str) -> str:
    """Return lines of block characters, two modules each; ValueError as for :func:`png`."""
    lines = io.StringIO()
    _made(text).terminal(lines, border=_BORDER, compact=True)
    return lines.getvalue()


def _made(text: str) -> segno.QRCode:
    # The lowest correction keeps the modules large: invitations are long, and screens are clean.
    return segno.make_qr(text, error="l", boost_error=False)
