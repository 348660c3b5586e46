"""The console's small parts: forms, formats, events, and percentiles."""

import asyncio
import csv
import io
import json
import re
from pathlib import Path

import pytest
from markupsafe import escape
from multidict import MultiDict
from yarl import URL

import mediator
import pickup
import pipeline
import registry
from mediator.console import tables
from mediator.console.console import read_form
from mediator.console.pages import Page, PageContent, PageRequest
from mediator.console.streams import Broadcast, event
from mediator.errors import BadRequestError
from mediator.operate.activity import percentile
from mediator.operate.operations import (
    COUNT,
    FLAG,
    ROLES,
    TEXT,
    Operation,
    OperationRequest,
    Right,
    many,
    object_schema,
    or_null,
)
from mediator.operate.records import Column, Kind


async def refuse(_request: OperationRequest) -> dict[str, object]:
    raise AssertionError


PACKAGES = (mediator, pickup, pipeline, registry)
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
    assert tables.prose("a `<b>` & c") == "a <code>&lt;b&gt;</code> &amp; c"
    assert "&lt;b&gt;" in tables.hidden({"name": "<b>", "none": None, "ids": [1, 2]})
    assert tables.hidden({"ids": [1, 2], "none": None}).count("<input") == 2
    assert tables.rate(None) == tables.NONE
    assert (tables.rate(0), tables.rate(0.0123), tables.rate(1234.5)) == ("0", "0.0123", "1,234")
    assert [*map(tables.milliseconds, (None, 0, 0.0125, 2.5))] == [tables.NONE, "0", "12.5", "2,500"]
    assert [*map(tables.seconds, (0.00001, 0.9996, 1.95, 5, 90))] == ["< 0.1 ms", "1,000 ms", "1.95s", "5s", "1m 30s"]


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


ROWS = [
    {"name": "b", "messages": 1, "at": 3.0, "tags": ["x"], "key": "=1+1"},
    {"name": "a", "messages": 20, "at": None, "tags": [], "key": "<b>"},
    {"name": "C", "messages": 3, "at": 1.0, "tags": ["y", "z"], "key": "long " * 40},
]
COLUMNS = [
    Column("name", field="name", link="/things/{name}", link_right=Right.OPERATE),
    Column("messages", field="messages", kind=Kind.NUMBER),
    Column("seen", field="at", kind=Kind.TIME, absent="never"),
    Column("tags", field="tags"),
    Column("key", field="key", right=Right.READ_PAYLOAD),
]


def made(
    query: str, column: Column, rows: list[dict[str, object]], older: dict[str, int] | None = None
) -> tables.Table:
    """Return a table of one column."""
    request = tables.TableRequest("things", "/", URL(query).query, {})
    return tables.Table.of(request, "Things", [column], rows, ROLES["read"], empty="", total=None, older=older)


def table(query: str, *roles: str, orders: dict[str, str] | None = None, total: int | None = None) -> tables.Table:
    """Return a table of the rows, as the query and the roles have it."""
    request = tables.TableRequest("things", "/console/things", URL(f"/?{query}").query, orders or {})
    rights = frozenset().union(*(ROLES[role] for role in roles or ("read",)))
    return tables.Table.of(request, "Things", COLUMNS, ROWS, rights, empty="None.", total=total, older=None)


def file(query: str, *roles: str) -> str:
    """Return the file of the rows."""
    return str(table(query, *roles).file().text)


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("", "baC"),
        ("things.sort=name", "abC"),
        ("things.sort=-messages", "aCb"),
        ("things.sort=at", "Cba"),
        ("things.sort=-at", "bCa"),
        ("things.filter=X", "b"),
        ("things.filter=y+z", "C"),
        ("things.filter=1970-01-01", "bC"),
        ("things.filter=never", "a"),
        ("things.filter=none", ""),
        ("other.sort=name", "baC"),
        ("things.skip=2", "C"),
    ],
)
def test_a_table_is_sorted_filtered_and_paged(query: str, names: str) -> None:
    assert "".join(row["name"] for row in table(query).shown) == names


def test_lanes_are_sorted_by_their_priority() -> None:
    rows: list[dict[str, object]] = [{"lane": lane} for lane in ("low", "normal", "critical", "urgent")]
    sorted_rows = made("?things.sort=lane", Column("lane", field="lane", kind=Kind.LANE), rows).rows
    assert [row["lane"] for row in sorted_rows] == ["critical", "urgent", "normal", "low"]


@pytest.mark.parametrize(("query", "field"), [("things.sort=key", "things.sort"), ("things.skip=x", "things.skip")])
def test_what_a_table_cannot_do_is_refused_by_name(query: str, field: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        table(query)
    assert refused.value.field == field


def test_who_may_not_see_a_column_gets_it_nowhere() -> None:
    """Neither on the page, nor by sorting, filtering, or in a file."""
    assert [column.field for column in table("").columns] == ["name", "messages", "at", "tags"]
    assert table("things.filter=1%2B1").shown == []
    assert "1+1" not in file("download=things.csv")
    assert all("key" not in row for row in json.loads(file("download=things.json")))
    assert "'=1+1" in file("download=things.csv", "read-payload")


def test_a_file_has_all_rows_in_the_order_of_the_page() -> None:
    lines = file("download=things.csv&things.sort=-messages&things.skip=2").splitlines()
    assert lines[:2] == ["name,messages,at,tags", "a,20,,[]"]
    assert lines[3] == 'b,1,1970-01-01T00:00:03+00:00,"[""x""]"'
    assert [row["name"] for row in json.loads(file("download=things.json&things.sort=name"))] == ["a", "b", "C"]
    attached = table("download=things.json").file().headers["Content-Disposition"]
    assert attached == 'attachment; filename="things.json"'
    assert table("download=others.csv").request.format == ""


def test_a_refreshed_part_keeps_order_and_filters() -> None:
    """Order, words and page are in the address."""
    templates = [path for package in PACKAGES for path in Path(package.__file__ or "").parent.rglob("*.html")]
    asked = re.findall(
        r'hx-get="([^"]+)" hx-trigger="every', "".join(path.read_text(encoding="utf-8") for path in templates)
    )
    assert len(asked) > 5
    assert set(asked) == {"{{ page_request.request.path_qs }}"}


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("=1+1", "'=1+1"),
        (" -1", "' -1"),
        ("\t@x", "\t'@x"),
        ("\n+1", "\n'+1"),
        ("\uff1d1", "'\uff1d1"),
        ("a;=1+1;b", "a;'=1+1;b"),
        ("a\r\n=1", "a\r\n'=1"),
        ("a=1; b-2", "a=1; b-2"),
    ],
)
def test_no_cell_of_a_file_is_computed(text: str, written: str) -> None:
    """Wallets choose their labels; where the comma is for decimals, spreadsheets begin a cell at a semicolon."""
    file = made("?download=things.csv", Column("label", field="label"), [{"label": text}]).file()
    assert list(csv.reader(io.StringIO(str(file.text), newline="")))[1:] == [[written]]


def test_a_heading_sorts_and_turns_round() -> None:
    name, messages, seen, _ = table("").columns
    assert table("").sort_url(messages) == "/console/things?things.sort=-messages#things"
    assert table("things.sort=-messages&a=1").sort_url(messages) == "/console/things?a=1&things.sort=messages#things"
    assert table("things.sort=name").sort_url(name) == "/console/things?things.sort=-name#things"
    assert table("things.sort=-at").direction(seen) == "descending"
    assert table("", orders={"at": "age"}).sort_url(seen).endswith("things.sort=-at#things")
    assert table("things.sort=name", orders={"at": "age"}).sort_url(seen).endswith("things.sort=at#things")


def test_an_operation_pages_what_it_orders() -> None:
    orders = {"-messages": "depth"}
    assert table("things.skip=50", orders=orders, total=120).request.window == {"skip": 50, "limit": 50}
    turned = table("things.skip=50", orders=orders, total=120)
    assert [word for word, _ in turned.turns()] == ["Previous", "Next"]
    assert [row["name"] for row in turned.shown] == ["b", "a", "C"]
    whole = table("things.sort=name", orders=orders, total=120)
    assert whole.request.window == {"skip": 0, "limit": tables.MAX_ROWS}
    assert (whole.caption, list(whole.turns())) == ("Things, the first 3 of 120", [])


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("before", [("Newest", "/?#things"), ("Older", "/?before=7#things")]),
        ("after", [("First", "/?#things"), ("Next", "/?after=7#things")]),
    ],
)
def test_a_pager_speaks_of_the_order_of_its_list(name: str, turns: list[tuple[str, str]]) -> None:
    """Times go back, and names go on."""
    column, rows = Column("no", field="no"), [{"no": 7}]
    assert list(made(f"?{name}=9", column, rows, {name: 7}).turns()) == turns
    assert list(made("?", column, rows, {name: 7}).turns()) == turns[1:]


def test_a_filter_tells_that_it_did_not_look_at_all_rows() -> None:
    column, rows = Column("no", field="no"), [{"no": 7}]
    cut = made("?things.filter=8", column, rows * 2, {"before": 7})
    assert cut.caption == "Things; 2 were looked at, and there are more"
    assert made("?", column, rows, {"before": 7}).caption == "Things"
    assert made("?things.filter=8", column, rows).caption == "Things"


def test_values_are_shown_by_their_kind_and_as_text() -> None:
    shown = table("", "admin")
    row = ROWS[1]
    name, messages, seen, tags, key = shown.columns
    assert shown.cell(row, name) == '<a id="/console/things/a" href="/console/things/a">a</a>'
    assert table("").cell(row, name) == "a"
    assert [escape(shown.cell(row, each)) for each in (messages, seen, tags, key)] == ["20", "never", "–", "&lt;b&gt;"]
    assert shown.cell(ROWS[2], key).startswith("<details><summary>long long")
    fields = {"ttl_ms": 604800000, "users": None, "label": "<b>"}
    assert tables.text(fields) == "<div>ttl <code>7d</code></div><div>label <code>&lt;b&gt;</code></div>"
    assert tables.text({"msg_id": 0}) == "<div>msg id <code>0</code></div>"
    assert tables.counts({"dead_leases": 1200, "none": 0}) == "dead leases 1,200"
    assert tables.state("no <b>") == '<span class="bad">no &lt;b&gt;</span>'
    colours = {"info": "", "warning": "warn", "error": "bad", "ok": "good"}
    assert {word: tables.state(word).split('"')[1] for word in colours} == colours


def test_an_empty_table_has_a_command_to_copy() -> None:
    shown = tables.next_step("No <mailboxes> yet:", "mediator mailbox create NAME")
    name = "command-mediator-mailbox-create"
    assert f'No &lt;mailboxes&gt; yet: <code id="{name}">mediator mailbox create NAME</code>' in shown
    assert f'data-copy="{name}"' in shown


def test_each_page_names_a_guide_that_there_is() -> None:
    docs = Path(mediator.__file__).parents[1] / "docs"
    named = {Page("/x", "X", _nothing).guide}
    for package in (mediator, pickup, registry, pipeline):
        for file in Path(package.__file__).parent.rglob("*.py"):
            named |= set(re.findall(r'(?:\bguide=|_GUIDE: Final = )"([^"]+)"', file.read_text()))
    assert len(named) > 8
    assert [each for each in named if not (docs / f"{each}.md").is_file()] == []


async def _nothing(_page_request: PageRequest) -> PageContent:
    return {}
