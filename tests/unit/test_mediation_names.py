"""Canonical names: one form for each key and DID, whatever a peer writes (D3)."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pickup.rules import names

# The pair that Aries RFC 0360 shows.
DID_KEY = "did:key:z6MkmjY8GnV5i9YTDtPETC2uUAW6ejw3nk5mXF5yci5ab7th"
BASE58 = "8HH5gYEeNc3z7PYXmd54d4x6qAfCNrqQqEB3nS7Zfu7K"
X25519 = "did:key:z6LSbysY2xFMRpGMhb7tFTLMpeuPRaqaWM1yECx2AtzE3KCc"
SHORT_4 = "did:peer:4zQmd8CpeFPci817KDsbSAKWcXAE2mjvCQSasRewvbSF54Bd"
LONG_4 = (
    f"{SHORT_4}:z2M1k7h4psgp4CmJcnQn2Ljp7Pz7ktsd7oBhMU3dWY5s4fhFNj17qcRTQ427C7QHNT6cQ7T3XfRh35Q2GhaNFZmWHVFq4vL7F8nm"
)
PEER_2 = (
    "did:peer:2.Ez6LSbysY2xFMRpGMhb7tFTLMpeuPRaqaWM1yECx2AtzE3KCc.Vz6MkqRYqQiSgvZQdnBytw86Qbs2ZWUkGv22od935YF4s8M7V"
)


@pytest.mark.rule("D3")
@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        (BASE58, DID_KEY),
        (DID_KEY, DID_KEY),
        (f"{DID_KEY}#z6MkmjY8GnV5i9YTDtPETC2uUAW6ejw3nk5mXF5yci5ab7th", DID_KEY),
        (X25519, X25519),
        (f"{X25519}#z6LSbysY2xFMRpGMhb7tFTLMpeuPRaqaWM1yECx2AtzE3KCc", X25519),
        (LONG_4, SHORT_4),
        (f"{LONG_4}#key-1", SHORT_4),
        (SHORT_4, SHORT_4),
        (f"{SHORT_4}#key-1", SHORT_4),
        (PEER_2, PEER_2),
        (f"{PEER_2}#key-1", PEER_2),
        ("did:web:example.com%3A8443:a?versionId=1#k", "did:web:example.com%3A8443:a"),
        ("did:web:example.com/path#k", "did:web:example.com"),
        ("did:sov:WgWxqztrNooG92RXvxSTWv;service=agent", "did:sov:WgWxqztrNooG92RXvxSTWv"),
    ],
)
def test_each_way_to_write_a_name_becomes_one(written: str, canonical: str) -> None:
    assert names.canonical(written) == canonical


@pytest.mark.rule("D3", "D12")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "did:",
        "did:key",
        "did:key:",
        "did:Key:z6Mk",
        "did:web:",
        "did:web:exa mple.com",
        "did:web:exämple.com",
        "http://example.com",
        BASE58[:-2],
        BASE58 + "1",
        BASE58[:-1] + "0",
        BASE58[:-1] + "l",
        f" {BASE58}",
        f"{BASE58}\n",
        f"{BASE58}#key",
        DID_KEY[:-1],
        DID_KEY + "1",
        DID_KEY[:-1] + "0",
        "did:key:z6Mk",
        "WgWxqztrNooG92RXvxSTWv",
        "did:web:" + "a" * 8192,
        "did:web:" + "a" * 2041,
        "did:peer:4" + "a" * 2039 + ":zlong",
        "1" * 8192,
    ],
)
def test_what_is_no_name_is_none(text: str) -> None:
    assert names.canonical(text) is None


@pytest.mark.rule("D3")
def test_a_name_may_be_as_long_as_an_index_takes() -> None:
    longest = "did:web:" + "a" * 2040
    assert names.canonical(f"{longest}/{'p' * 4000}#k") == longest


@pytest.mark.rule("D3")
@given(st.binary(min_size=32, max_size=32))
def test_a_key_survives_every_form(raw: bytes) -> None:
    key = names.from_verkey(raw)
    assert names.is_ed25519(key)
    assert names.verkey(key) == raw
    assert names.canonical(names.base58(raw)) == key
    assert names.canonical(key) == key
    assert names.canonical(f"{key}#{key[8:]}") == key


@given(st.binary(max_size=80))
def test_base58_gives_back_what_it_was_given(raw: bytes) -> None:
    assert names.unbase58(names.base58(raw)) == raw


@pytest.mark.rule("D12")
@given(st.one_of(st.text(), st.text(string.ascii_letters + string.digits + ":#?.%-").map("did:".__add__)))
def test_a_canonical_name_is_its_own_canonical_name(text: str) -> None:
    name = names.canonical(text)
    assert name is None or names.canonical(name) == name


@pytest.mark.parametrize("name", ["", BASE58, X25519, "did:web:example.com", DID_KEY[:-1], f"{DID_KEY}#x"])
def test_other_names_have_no_verkey(name: str) -> None:
    with pytest.raises(ValueError, match="Ed25519"):
        names.verkey(name)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_verkey_has_32_bytes(size: int) -> None:
    with pytest.raises(ValueError, match="32"):
        names.from_verkey(b"x" * size)


def test_base58_is_bounded() -> None:
    with pytest.raises(ValueError, match="at most"):
        names.unbase58("2" * 8193)
