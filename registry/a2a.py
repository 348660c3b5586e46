"""A2A AgentCards: which version a card claims to follow, and where it falls short of it."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

MAX_WARNINGS = 20


class Kind(StrEnum):
    """What a card claims to be."""

    A2A_0_3 = "a2a 0.3"
    A2A_1_0 = "a2a 1.0"
    OTHER = "other"


def recognise(card: Mapping[str, Any]) -> Kind:
    """Return what a card claims to be, by the fields that only one version has."""
    raise NotImplementedError


def check(card: Mapping[str, Any], kind: Kind) -> list[str]:
    """Return what the card lacks of its version's required fields, each with the field's path; never an error.

    At most :data:`MAX_WARNINGS`. Signatures are not looked at.
    """
    raise NotImplementedError
