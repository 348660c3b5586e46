"""Addresses: which texts are one, how they are made and how they are shown (A1, A7)."""

import random
import re

import pytest

from mediator.errors import BadRequestError
from mediator.mailboxes.address import new_address, parse_address, redact, writable_address


@pytest.mark.rule("A1")
@pytest.mark.parametrize("text", ["a", "0", "task", "task.001.callback", "a.b.c", "a" * 128, ".".join("a" * 64)])
def test_an_address_is_lowercase_with_single_dots(text: str) -> None:
    assert parse_address(text) == text
    assert writable_address(text) == text


@pytest.mark.rule("A1", "N3")
@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        ".a",
        "a.",
        "a..b",
        "A",
        "m-uuid-001",
        "a_b",
        "a b",
        "a%20b",
        "a/b",
        "a*",
        "a.>",
        "a\n",
        "\na",
        "é",
        "١",
        "ⅸ",
        "a" * 129,
    ],
)
def test_any_other_text_is_refused_and_the_field_is_named(text: str) -> None:
    with pytest.raises(BadRequestError, match=r"\Aname: ") as raised:
        parse_address(text, "name")
    assert raised.value.field == "name"


@pytest.mark.rule("A1")
def test_public_is_read_but_never_created_or_written() -> None:
    assert parse_address("public") == "public"
    with pytest.raises(BadRequestError, match="reserved"):
        writable_address("public")
    assert writable_address("public.a") == "public.a"
    assert writable_address("publics") == "publics"


@pytest.mark.rule("A1", "A7")
def test_a_generated_address_holds_128_random_bits() -> None:
    rng = random.Random(7)
    asked: list[int] = []

    def bits(count: int) -> bytes:
        asked.append(count)
        return rng.randbytes(count)

    made = [new_address(bits) for _ in range(200)]
    assert all(re.fullmatch("[a-z2-7]+", address) for address in made)
    assert all(parse_address(address) == address for address in made)
    assert len(set(made)) == len(made)
    assert all(count * 8 >= 128 for count in asked)
    # Five bits a character, and every character takes all of its 32 values.
    assert min(map(len, made)) * 5 >= 128
    for place in range(len(made[0])):
        assert len({address[place] for address in made}) > 16


@pytest.mark.rule("A7")
def test_a_shown_address_tells_no_more_than_a_prefix_and_a_hash() -> None:
    address = new_address(random.Random(1).randbytes)
    shown = redact(address)
    assert shown.startswith(address[:4])
    assert address[4:8] not in shown
    assert len(shown) < len(address)
    assert redact(address) == shown
    assert redact(address[:-1] + ("a" if address[-1] != "a" else "b")) != shown
