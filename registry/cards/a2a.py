"""Checks AgentCards against A2A 0.3 and 1.0, by the table of fields at the end.

Security schemes and signatures concern those who call the agent, and are not checked.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Any

MAX_WARNINGS = 20
"""Of one card; further ones are left out."""
MAX_ITEMS = 256
"""Of each list; further ones are not checked."""


class CardFormat(StrEnum):
    """The format that a card claims to follow."""

    A2A_0_3 = "a2a 0.3"
    A2A_1_0 = "a2a 1.0"
    OTHER = "other"


def detect_format(card: Mapping[str, Any]) -> CardFormat:
    """Return the format that a card claims to follow, by the fields that only one version has."""
    version = card.get("protocolVersion")
    version = version if isinstance(version, str) else ""
    if "supportedInterfaces" in card or version.startswith("1."):
        return CardFormat.A2A_1_0
    # protocolVersion is also a field of MCP, where it is a date; and a url is in many formats.
    if version.startswith("0.") or "preferredTransport" in card or "additionalInterfaces" in card:
        return CardFormat.A2A_0_3
    if "url" in card and ("defaultInputModes" in card or "defaultOutputModes" in card):
        return CardFormat.A2A_0_3
    return CardFormat.OTHER


def check(card: Mapping[str, Any], format: CardFormat) -> list[str]:
    """Return the faults of a card against its format, each with the field's path; a fault is never an error.

    At most :data:`MAX_WARNINGS`.
    """
    return list(islice(_faults(card, _CARDS[format], format is CardFormat.A2A_1_0), MAX_WARNINGS))


@dataclass(frozen=True, slots=True)
class _Field:
    kind: type[Any]
    required: bool = False
    item: type[Any] = object
    """Type of the items of a list."""
    inside: "Mapping[str, _Field]" = field(default_factory=dict)
    """Fields of the object, or of each object of a list."""


_Fields = Mapping[str, _Field]
_EXPECTED = {str: "a string", bool: "true or false", list: "a list", dict: "an object"}


def _faults(values: Mapping[str, Any], fields: _Fields, filled: bool) -> Iterator[str]:
    """Yield the faults of an object; ``filled``: required fields must not be empty."""
    for name, spec in fields.items():
        value = values.get(name)
        if value is None:
            if spec.required:
                yield f"{name}: missing"
        elif not isinstance(value, spec.kind):
            yield f"{name}: expected {_EXPECTED[spec.kind]}"
        elif spec.kind is dict:
            for fault in _faults(value, spec.inside, filled):
                yield f"{name}.{fault}"
        elif not value and spec.required and filled:
            yield f"{name}: expected {'at least one' if spec.kind is list else 'some text'}"
        elif spec.kind is list:
            for fault in _faults_of_items(value, spec, filled):
                yield f"{name}{fault}"


def _faults_of_items(values: list[Any], spec: _Field, filled: bool) -> Iterator[str]:
    for position, value in enumerate(values[:MAX_ITEMS]):
        if not isinstance(value, spec.item):
            yield f"[{position}]: expected {_EXPECTED[spec.item]}"
        elif spec.inside:
            for fault in _faults(value, spec.inside, filled):
                yield f"[{position}].{fault}"


_TEXT = _Field(str)
_FLAG = _Field(bool)
_NEEDED = _Field(str, required=True)
_TEXTS = _Field(list, item=str)
_NEEDED_TEXTS = _Field(list, required=True, item=str)
_EXTENSION = {"description": _TEXT, "required": _FLAG, "params": _Field(dict)}
_CAPABILITIES = {"streaming": _FLAG, "pushNotifications": _FLAG}
_SHARED = {
    "name": _NEEDED,
    "description": _NEEDED,
    "version": _NEEDED,
    "provider": _Field(dict, inside={"url": _NEEDED, "organization": _NEEDED}),
    "documentationUrl": _TEXT,
    "iconUrl": _TEXT,
    "defaultInputModes": _NEEDED_TEXTS,
    "defaultOutputModes": _NEEDED_TEXTS,
    "skills": _Field(
        list,
        required=True,
        item=dict,
        inside={
            "id": _NEEDED,
            "name": _NEEDED,
            "description": _NEEDED,
            "tags": _NEEDED_TEXTS,
            "examples": _TEXTS,
            "inputModes": _TEXTS,
            "outputModes": _TEXTS,
        },
    ),
}
_CARDS: Mapping[CardFormat, _Fields] = {
    CardFormat.A2A_0_3: {
        **_SHARED,
        "url": _NEEDED,
        "preferredTransport": _TEXT,
        "protocolVersion": _TEXT,
        "additionalInterfaces": _Field(list, item=dict, inside={"url": _NEEDED, "transport": _NEEDED}),
        "supportsAuthenticatedExtendedCard": _FLAG,
        "capabilities": _Field(
            dict,
            required=True,
            inside={
                **_CAPABILITIES,
                "stateTransitionHistory": _FLAG,
                "extensions": _Field(list, item=dict, inside={**_EXTENSION, "uri": _NEEDED}),
            },
        ),
    },
    CardFormat.A2A_1_0: {
        **_SHARED,
        "supportedInterfaces": _Field(
            list,
            required=True,
            item=dict,
            inside={"url": _NEEDED, "protocolBinding": _NEEDED, "protocolVersion": _NEEDED, "tenant": _TEXT},
        ),
        "capabilities": _Field(
            dict,
            required=True,
            inside={
                **_CAPABILITIES,
                "extendedAgentCard": _FLAG,
                "extensions": _Field(list, item=dict, inside={**_EXTENSION, "uri": _TEXT}),
            },
        ),
    },
    CardFormat.OTHER: {},
}
