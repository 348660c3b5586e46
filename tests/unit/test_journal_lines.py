"""Lines of the journal: what goes in comes out, one line for each tenant, each event with a name of its own."""

from itertools import count

import orjson
from hypothesis import given
from hypothesis import strategies as st

from mediator.journal.segments import encode, expand
from mediator.mailboxes.events import Event, EventType
from mediator.mailboxes.lanes import LANES, Lane

NUMBERS = st.integers(-1, 2**53 - 1)
EVENTS = st.lists(
    st.builds(
        Event,
        st.sampled_from(EventType),
        st.sampled_from([1000, 2000]),
        st.sampled_from(["default", "ä-b"]),
        NUMBERS,
        st.sampled_from([*LANES, -1]),
        NUMBERS,
        NUMBERS,
        NUMBERS,
        NUMBERS,
    )
)


def _lines(events: list[Event], after: int | None = 6, mark: int | None = None) -> list[dict[str, object]]:
    data, last = encode(events, instance="host-1", seqs=count(7), after=after, mark=mark)
    lines = [orjson.loads(line) for line in data.splitlines(keepends=True)]
    assert last == lines[-1]["seq"]
    return lines


@given(EVENTS)
def test_events_come_back_as_they_were(events: list[Event]) -> None:
    read = [event for line in _lines(events) for event in expand(line)]
    names = ("what", "at", "tenant", "mailbox", "lane", "msg_id", "bytes", "created_at", "group")
    assert sorted(tuple(event[name] for name in names) for event in read) == sorted(map(tuple, events))
    assert len({(event["instance"], event["seq"], event["position"]) for event in read}) == len(events)


@given(EVENTS)
def test_lines_are_a_chain_and_the_last_has_the_mark(events: list[Event]) -> None:
    lines = _lines(events, mark=0)
    assert [line["after"] for line in lines] == [6, *(line["seq"] for line in lines[:-1])]
    assert [line.get("mark") for line in lines] == [None] * (len(lines) - 1) + [0]


def test_one_tenant_is_one_line() -> None:
    events = [Event(EventType.STORED, 1, "default", 3, Lane.LOW, number, 10, 1) for number in range(100)]
    (line,) = _lines(events, after=None)
    assert line["after"] is None
    assert line["at"] == [1] * 100
    assert line["msg_id"] == list(range(100))


def test_a_line_has_a_bounded_length() -> None:
    events = [Event(EventType.STORED, 1, "default", 3, Lane.LOW, number, 10, 1) for number in range(2500)]
    lines = _lines(events)
    assert [len(line["what"]) for line in lines] == [1000, 1000, 500]


def test_a_commit_without_events_still_makes_its_mark() -> None:
    (line,) = _lines([], mark=12)
    assert (line["at"], line["mark"], line["what"]) == ([], 12, [])
    assert list(expand(line)) == []
