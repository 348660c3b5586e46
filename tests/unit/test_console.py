"""The console's small parts: forms, formats, events, and percentiles."""

import asyncio

import pytest
from multidict import MultiDict

from mediator.console import pages
from mediator.console.console import read_form
from mediator.console.streams import Broadcast, event
from mediator.errors import BadRequestError
from mediator.operate.activity import percentile
from mediator.operate.operations import (
    COUNT,
    FLAG,
    TEXT,
    Operation,
    OperationRequest,
    Right,
    many,
    object_schema,
    or_null,
)


async def refuse(_request: OperationRequest) -> dict[str, object]:
    raise AssertionError


OPERATION = Operation(
    "act",
    refuse,
    Right.READ,
    "Do it",
    object_schema(),
    fields={
        "name": TEXT,
        "number": or_null(COUNT),
        "ids": or_null(many(COUNT)),
        "sure": FLAG,
        "note": or_null(TEXT),
        "of": object_schema(low=or_null(COUNT), high=or_null(COUNT)),
    },
)


@pytest.mark.parametrize(
    ("form", "request_"),
    [
        ([("name", ""), ("number", "")], {"name": ""}),
        ([("number", "7"), ("ids", "1"), ("ids", "2"), ("sure", "on")], {"number": 7, "ids": [1, 2], "sure": True}),
        ([("note", ""), ("of.low", "0"), ("of.high", "")], {"of": {"low": 0, "high": None}}),
        ([("csrf", "x"), ("ids", ""), ("sure", "no")], {"ids": [], "sure": False}),
    ],
)
def test_a_form_becomes_a_request(form: list[tuple[str, str]], request_: dict[str, object]) -> None:
    assert read_form(OPERATION, MultiDict(form)) == request_


def test_a_wrong_field_of_a_form_is_named() -> None:
    with pytest.raises(BadRequestError, match="number: expected integer or null"):
        read_form(OPERATION, MultiDict([("number", "seven")]))


def test_percentiles_lie_between_the_bounds_of_buckets() -> None:
    buckets = [(0.001, 50.0), (0.01, 99.0), (float("inf"), 100.0)]
    assert percentile(buckets, 0.5) == pytest.approx(0.001)
    assert percentile(buckets, 0.745) == pytest.approx(0.0055)
    assert percentile(buckets, 0.999) == 0.01
    assert percentile([(0.001, 0.0), (float("inf"), 0.0)], 0.5) is None


def test_what_is_shown_has_no_markup_of_others() -> None:
    assert pages.prose("a `<b>` & c") == "a <code>&lt;b&gt;</code> &amp; c"
    assert "&lt;b&gt;" in pages.hidden({"name": "<b>", "none": None, "ids": [1, 2]})
    assert pages.hidden({"ids": [1, 2], "none": None}).count("<input") == 2
    assert pages.rate(None) == pages.NONE
    assert (pages.rate(0), pages.rate(0.0123), pages.rate(1234.5)) == ("0", "0.0123", "1,234")


async def test_a_follower_gets_the_latest_alone() -> None:
    live = Broadcast()
    follower = live.follow()
    first = asyncio.ensure_future(anext(follower))
    await asyncio.sleep(0)
    live.publish(event("a", "one\ntwo"))
    live.publish(event("b", "three"))
    assert await first == b"event: b\ndata: three\n\n"
    await follower.aclose()  # type: ignore[attr-defined]
    assert live.followers == 0
