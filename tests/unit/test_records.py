"""Records: schema, JSON and columns follow from the annotations of their fields."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated

import pytest

from mediator.mailboxes import lanes
from mediator.mailboxes.mailbox import Retention
from mediator.operate.operations import COUNT, FLAG, LANE, RIGHT, TEXT, TIME
from mediator.operate.records import (
    INTERNAL,
    PAYLOAD,
    Address,
    Bytes,
    Column,
    Lane,
    Record,
    Time,
    described,
)


@dataclass(frozen=True, slots=True)
class Stop(Record):
    name: str
    at: Time | None


@dataclass(frozen=True, slots=True)
class Parcel(Record):
    mail_address: Annotated[Address, Column("address")]
    lane: Lane
    retention: Retention
    weight: Annotated[int, described("In grams.")]
    fragile: bool
    stops: Sequence[Stop]
    taxes: Mapping[str, int]
    content: Annotated[bytes, PAYLOAD]
    bytes: Annotated[Bytes, Column("size")]
    opened_at: Annotated[Time | None, Column("opened", absent="never")]
    checked: Annotated[SimpleNamespace | None, INTERNAL] = None


PARCEL = Parcel(
    "agent.inbox", lanes.Lane.LOW, Retention.KEEP, 70, True, (Stop("here", 1500),), {"vat": 19}, b"\0", 3, None
)


def test_the_schema_says_what_the_annotations_say() -> None:
    schema = Parcel.schema()
    assert schema["required"] == list(schema["properties"])
    assert "checked" not in schema["properties"]
    fields = schema["properties"]
    assert (fields["lane"], fields["retention"], fields["fragile"]) == (LANE, TEXT, FLAG)
    assert fields["weight"] == {**COUNT, "description": "In grams."}
    assert fields["stops"]["items"]["properties"]["at"] == {**TIME, "type": ["number", "null"]}
    assert fields["taxes"]["additionalProperties"] == COUNT
    assert fields["content"][RIGHT] == "read-payload"


def test_json_has_seconds_words_and_lists() -> None:
    assert PARCEL.to_json() == {
        "mail_address": "agent.inbox",
        "lane": "low",
        "retention": "keep",
        "weight": 70,
        "fragile": True,
        "stops": [{"name": "here", "at": 1.5}],
        "taxes": {"vat": 19},
        "content": "AA==",
        "bytes": 3,
        "opened_at": None,
    }


def test_columns_have_the_titles_of_the_record_or_those_given() -> None:
    columns = Parcel.columns("mail_address", "weight", "bytes", "opened_at", weight="grams")
    assert [column.heading for column in columns] == ["address", "grams#", "size#", "opened"]
    with pytest.raises(KeyError):
        Parcel.columns("checked")


def test_a_record_takes_the_attributes_of_another_object() -> None:
    assert Stop.of(SimpleNamespace(name="there", at=3, more=1), at=None) == Stop("there", None)
