"""Cards out of files: cut byte for byte, called by where they stand, and given addresses that stay the same."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.errors import BadRequestError
from mediator.mailboxes.address import MAX_ADDRESS, parse_address
from registry.cards.card import MAX_CARD
from registry.cards.sources import AddressAssigner, CardSource, read_sources, size_of, slug

ODD = '{ "mailbox":"a.b",\t"n": 1.50, "t": "\\u00fc ü", "n": 2e3 }'
"""What no parser gives back as it was."""


def read(*sources):
    return list(read_sources(map(str, sources)))


def test_a_file_with_one_card(tmp_path):
    path = tmp_path / "card.json"
    path.write_text(f"\n{ODD}\n")
    assert read(path) == [CardSource(str(path), ODD.encode())]


def test_the_cards_of_an_array_stay_as_they_were_written(tmp_path):
    path = tmp_path / "cards.json"
    path.write_bytes(f"\ufeff [\n {ODD} ,{{}}\n, 7 ] ".encode())
    assert read(path) == [
        CardSource(f"{path}[0]", ODD.encode()),
        CardSource(f"{path}[1]", b"{}"),
        CardSource(f"{path}[2]", b"7"),
    ]


@given(st.lists(st.dictionaries(st.text(), st.text() | st.floats(allow_nan=False) | st.none() | st.lists(st.text()))))
def test_any_array_is_cut_between_its_elements(tmp_path_factory, cards):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(cards, indent=1), encoding="utf-8")
    assert [json.loads(piece.data) for piece in read(path)] == cards


@pytest.mark.parametrize(
    ("text", "good", "said"),
    [
        ("[{}, {", 1, "expected JSON; what follows is not read"),
        ("[{}, ", 1, "expected JSON; what follows is not read"),
        ("[{} {}]", 1, "expected a comma or ] after element 0; what follows is not read"),
        ("[" * 100_000, 0, "expected JSON; what follows is not read"),
        (b"\xff", 0, "expected UTF-8"),
    ],
)
def test_a_broken_array_yields_the_cards_before_the_fault(tmp_path, text, good, said):
    path = tmp_path / "cards.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    found = read(path)
    assert [piece.problem for piece in found] == [""] * good + [said]


def test_cards_line_by_line(tmp_path):
    path = tmp_path / "cards.jsonl"
    path.write_bytes(ODD.encode() + b"\r\n\n{}")
    assert read(path) == [CardSource(f"{path}:1", ODD.encode()), CardSource(f"{path}:3", b"{}")]


def test_a_too_long_line_is_reported_and_skipped(tmp_path):
    path = tmp_path / "cards.jsonl"
    longest = b'{"x": "' + b"x" * (MAX_CARD - 9) + b'"}'
    path.write_bytes(longest + b"\n" + longest * 3 + b"\n{}\n")
    assert read(path) == [
        CardSource(f"{path}:1", longest),
        CardSource(f"{path}:2", problem=f"expected at most {MAX_CARD} bytes"),
        CardSource(f"{path}:3", b"{}"),
    ]


def test_a_folder_is_read_recursively_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "1.json").write_text('{"n": 2}')
    (tmp_path / "a.jsonl").write_text('{"n": 0}\n{"n": 1}')
    (tmp_path / "notes.md").write_text("not a card")
    (tmp_path / "list.txt").write_text("https://example.org/")
    found = read(tmp_path)
    assert [json.loads(piece.data)["n"] for piece in found] == [0, 1, 2]
    assert size_of([str(tmp_path)]) == sum(len(piece.data) for piece in found) + 1


def test_urls_are_given_or_listed(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text("# ours\nhttps://one.example/card.json\n\n HTTP://two.example \nftp://three.example\n")
    assert read("https://zero.example", path) == [
        CardSource("https://zero.example", url="https://zero.example"),
        CardSource("https://one.example/card.json", url="https://one.example/card.json"),
        CardSource("HTTP://two.example", url="HTTP://two.example"),
        CardSource(f"{path}:5", problem='expected a URL, got "ftp://three.example"'),
    ]


def test_unreadable_files_are_reported_the_rest_is_read(tmp_path):
    (tmp_path / "card.json").write_text("{}")
    (tmp_path / "card.yaml").write_text("")
    found = read(tmp_path / "absent.json", tmp_path / "card.yaml", tmp_path / "card.json")
    assert [piece.problem for piece in found] == [
        "cannot be read: No such file or directory",
        "expected .json, .jsonl, a .txt with URLs, a folder or a URL",
        "",
    ]


# Addresses.


def given_to(*cards, prefix="catalog."):
    addresses = AddressAssigner(prefix)
    return [json.loads(addresses.assign(json.dumps(card).encode()))["mailbox"] for card in cards]


def test_an_address_is_made_of_the_id_or_the_name():
    assert given_to(
        {"id": "Tide-Table", "name": "Tides"},
        {"name": "Weather Café (North)"},
        {"id": 7, "name": "天气"},
        {},
    ) == ["catalog.tide.table", "catalog.weather.cafe.north", "catalog.card", "catalog.card.2"]


def test_cards_that_are_called_the_same_are_numbered():
    assert given_to({"name": "Echo"}, {"name": "echo"}, {"name": "ECHO"}) == [
        "catalog.echo",
        "catalog.echo.2",
        "catalog.echo.3",
    ]


def test_a_card_that_names_a_mailbox_keeps_it_byte_for_byte():
    assert AddressAssigner("catalog").assign(ODD.encode()) == ODD.encode()


def test_a_card_that_gets_one_is_otherwise_as_it_was():
    bare = ODD.replace('"mailbox":"a.b",\t', "")
    given = AddressAssigner("catalog").assign(bare.encode()).decode()
    assert json.loads(given)["mailbox"] == "catalog.card"
    assert bare[1:].strip(" }") in given


@pytest.mark.parametrize("card", [b"[]", b"7", b"{", b""])
def test_an_invalid_card_gets_no_address(card):
    with pytest.raises(BadRequestError):
        AddressAssigner("catalog").assign(card)


@pytest.mark.parametrize("prefix", ["", ".", "Catalog", "a-b", "a..b", "x" * 65])
def test_a_prefix_no_address_can_begin_with_is_refused(prefix):
    with pytest.raises(BadRequestError, match=r"^mailbox-prefix: "):
        AddressAssigner(prefix)


@given(st.text())
def test_a_slug_is_an_address_or_nothing(text):
    made = slug(text)[:MAX_ADDRESS].rstrip(".")
    assert made == "" or parse_address(made) == made


@given(st.lists(st.text(min_size=100), min_size=2, max_size=4))
def test_each_card_gets_its_own_address_whatever_its_name(names):
    found = given_to(*({"name": name} for name in names), prefix="x" * 60)
    assert len(set(found)) == len(names)
    for address in found:
        assert parse_address(address) == address
