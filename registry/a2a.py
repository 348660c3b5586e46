"""A2A AgentCards: which version a card claims to follow, and where it falls short of it.

What secures an agent and its signatures are for those who call it, and are not looked at.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Any

from registry.lenient import MAX_WARNINGS

MAX_ITEMS = 256
"""Of each list; those behind are not looked at."""


class Kind(StrEnum):
    """What a card claims to be."""

    A2A_0_3 = "a2a 0.3"
    A2A_1_0 = "a2a 1.0"
    OTHER = "other"


def recognise(card: Mapping[str, Any]) -> Kind:
    """Return what a card claims to be, by the fields that only one version has."""
    version = card.get("protocolVersion")
    version = version if isinstance(version, str) else ""
    if "supportedInterfaces" in card or version.startswith("1."):
        return Kind.A2A_1_0
    # MCP has a version of the same name, which is a date; and many things have a URL.
    if version.startswith("0.") or "preferredTransport" in card or "additionalInterfaces" in card:
        return Kind.A2A_0_3
    if "url" in card and ("defaultInputModes" in card or "defaultOutputModes" in card):
        return Kind.A2A_0_3
    return Kind.OTHER


def check(card: Mapping[str, Any], kind: Kind) -> list[str]:
    """Return where a card falls short of what it claims to be, each with the field's path; never an error.

    At most :data:`registry.lenient.MAX_WARNINGS`.
    """
    return list(islice(_faults(card, _CARDS[kind], kind is Kind.A2A_1_0), MAX_WARNINGS))


@dataclass(frozen=True, slots=True)
class _Field:
    kind: type[Any]
    required: bool = False
    item: type[Any] = object
    """Of what type the items of a list are."""
    inside: "Mapping[str, _Field]" = field(default_factory=dict)
    """What an object has, or each object of a list."""


_Fields = Mapping[str, _Field]
_EXPECTED = {str: "a string", bool: "true or false", list: "a list", dict: "an object"}


def _faults(values: Mapping[str, Any], fields: _Fields, filled: bool) -> Iterator[str]:
    """Go through the faults of an object; ``filled``: a required field may not be empty."""
    for name, wanted in fields.items():
        value = values.get(name)
        if value is None:
            if wanted.required:
                yield f"{name}: missing"
        elif not isinstance(value, wanted.kind):
            yield f"{name}: expected {_EXPECTED[wanted.kind]}"
        elif wanted.kind is dict:
            for fault in _faults(value, wanted.inside, filled):
                yield f"{name}.{fault}"
        elif not value and wanted.required and filled:
            yield f"{name}: expected {'at least one' if wanted.kind is list else 'some text'}"
        elif wanted.kind is list:
            for fault in _faults_of_items(value, wanted, filled):
                yield f"{name}{fault}"


def _faults_of_items(values: list[Any], wanted: _Field, filled: bool) -> Iterator[str]:
    for no, value in enumerate(values[:MAX_ITEMS]):
        if not isinstance(value, wanted.item):
            yield f"[{no}]: expected {_EXPECTED[wanted.item]}"
        elif wanted.inside:
            for fault in _faults(value, wanted.inside, filled):
                yield f"[{no}].{fault}"


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
_CARDS: Mapping[Kind, _Fields] = {
    Kind.A2A_0_3: {
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
    Kind.A2A_1_0: {
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
    Kind.OTHER: {},
}
