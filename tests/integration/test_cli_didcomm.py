"""The commands of the DIDComm door against a running `mediator serve`, with wallets that come by what they print."""

import asyncio
import base64
import json
import re
from typing import Any

import pytest

from pickup.client import ClientError, Holder, Wallet
from pickup.invitations import id_inside
from pickup.rules.names import base58, canonical, from_verkey
from tests.integration.test_cli import Mediator, alone, mediator, service

__all__ = ["alone", "mediator", "service"]


def connect(url: str, *, label: str = "wallet", mediate: bool = True) -> None:
    """Connect a wallet by an invitation, and let it register one key."""

    async def work() -> None:
        async with await Holder.connect(url, wallet=Wallet(), label=label) as holder:
            if mediate:
                await holder.mediate()
                await holder.add_key()

    asyncio.run(work())


def listed(mediator: Mediator) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = mediator("connections", "list", "--json").json["connections"]
    return found


def link_of(text: str, name: str = "link") -> str:
    match = re.search(rf"^{name} +(\S+)$", text, re.MULTILINE)
    assert match is not None, text
    return match[1]


# Invitations.


def test_invite_prints_links_and_a_qr_code_of_80_columns(mediator, service):
    own = f"http://127.0.0.1:{service.http_port}"
    for version, start, parameter in (("--v1", "/i/", "oob"), ("--v2", "/i/?_oobid=", "_oob")):
        shown = mediator("invite", "--label", "Ours", "--ttl", "7d", version)
        assert shown.code == 0
        short, long = link_of(shown.out), link_of(shown.out, "long")
        assert short.startswith(f"{own}{start}")
        assert long.startswith(f"{own}/didcomm?{parameter}=")
        assert re.search(r"^expires  \d{4}-", shown.out, re.MULTILINE)
        code = [line for line in shown.out.splitlines() if "█" in line]
        assert 30 < max(map(len, code)) <= 80
        for url in (short, long):
            connect(url, mediate=False)
        page = id_inside(long.partition("=")[2])
        for path, status in ((short, 302), (long, 200), (f"/invite/{page}", 200)):
            assert service.get_blocking(path.removeprefix(own))[0] == status
    assert service.get_blocking("/didcomm?oob=e30")[0] == 404
    with pytest.raises(ClientError, match="unknown, used up or expired"):
        connect(f"{own}/i/AAAAAAAAAAAAAAAAAAAAAA")


def test_invite_link_prints_a_link_for_other_programs(mediator):
    shown = mediator("invite", "--link").out
    assert re.fullmatch(r"http://\S+/i/[\w-]{22}\n", shown)
    assert re.fullmatch(r"http://\S+/i/\?_oobid=[\w-]{22}\n", mediator("invite", "--link", "--v2").out)


def test_invite_writes_an_image_instead_of_drawing(mediator, tmp_path):
    shown = mediator("invite", "--png", tmp_path / "code.png")
    assert shown.code == 0
    assert "█" not in shown.out
    assert (tmp_path / "code.png").read_bytes().startswith(b"\x89PNG")
    refused = mediator("invite", "--png", tmp_path / "nowhere" / "code.png")
    assert (refused.code, refused.err.count("\n")) == (1, 1)
    assert "No such file" in refused.err


def test_an_invitation_is_limited_to_its_uses_and_removable(mediator):
    made = mediator("invite", "--uses", "1", "--json").json
    assert (made["error"], made["max_uses"], made["uses"], made["expire_at"]) == ("", 1, 0, None)
    connect(made["v1_url"], mediate=False)
    with pytest.raises(Exception, match="used up or expired"):
        connect(made["v1_url"], mediate=False)
    shown = mediator("invitations", "list")
    [row] = [line for line in shown.out.splitlines() if made["id"] in line]
    assert row.split()[-3:] == ["1", "1", "no"]
    assert mediator("invitations", "remove", made["id"]).out == f"removed {made['id']}\n"
    again = mediator("invitations", "remove", made["id"])
    assert (again.code, again.out) == (1, "")
    assert again.err.startswith("mediator: invitation:")
    assert made["id"] not in mediator("invitations", "list").out


@pytest.mark.parametrize("wrong", [("--ttl", "0"), ("--label", "x" * 200), ("--tenant", "nobody")])
def test_what_no_invitation_can_have_is_refused(mediator, wrong):
    refused = mediator("invite", *wrong)
    assert (refused.code, refused.out) == (1, "")
    assert refused.err.startswith(f"mediator: {wrong[0].removeprefix('--')}")


# Connections.


def test_connections_are_listed_shown_and_removed(mediator):
    url = mediator("invite", "--json").json["v1_url"]
    connect(url, label="first")
    connect(url, label="second", mediate=False)
    first, second = [row for row in listed(mediator) if row["label"] in ("first", "second")]
    assert (first["keys"], first["didcomm"], first["messages"]) == (1, "v1", 0)
    assert first["mail_address"]
    assert (second["keys"], second["mail_address"]) == (0, None)

    table = mediator("connections", "list").out
    assert "picked up" in table
    assert "no mediation" in table
    page = mediator("connections", "list", "--limit", "1", "--after", first["connection"] - 1, "--json").json
    assert [row["connection"] for row in page["connections"]] == [first["connection"]]
    assert page["more"]

    shown = mediator("connections", "show", first["connection"])
    assert re.search(rf"^mailbox +{first['mail_address']}$", shown.out, re.MULTILINE)
    view = mediator("connections", "show", first["connection"], "--json").json
    assert canonical(view["callers"][0]) == view["callers"][0]
    assert len(view["routes"]) == 1
    assert view["routes"][0]["mail_address"] == first["mail_address"]

    kept = mediator("mailbox", "show", first["mail_address"])
    assert f"`mediator connections show {first['connection']}`" in kept.out
    assert mediator("mailbox", "show", first["mail_address"], "--json").json["connection"] == first["connection"]
    assert mediator("connections", "remove", first["connection"], "--yes").code == 0
    assert mediator("mailbox", "show", first["mail_address"]).code == 1
    assert first["connection"] not in [row["connection"] for row in listed(mediator)]
    gone = mediator("connections", "show", first["connection"])
    assert (gone.code, gone.err) == (1, f"mediator: connection {first['connection']} does not exist\n")


def test_a_connection_is_not_removed_unasked(mediator):
    connect(mediator("invite", "--json").json["v1_url"], label="kept", mediate=False)
    [kept] = [row for row in listed(mediator) if row["label"] == "kept"]
    assert mediator("connections", "remove", kept["connection"]).code == 1
    assert kept in listed(mediator)


# Keys.


@pytest.mark.rule("D11")
def test_keys_are_attached_to_work_queues_listed_and_detached(mediator):
    address = mediator("mailbox", "create", "--retention", "until_ack", "--json").json["mail_address"]
    raw = bytes(range(32))
    key = from_verkey(raw)
    assert mediator("keys", "attach", base58(raw), address).out == f"attached {key} to {address}\n"
    assert key in mediator("keys", "list").out
    [held] = [row for row in mediator("keys", "list", "--json").json["keys"] if row["key"] == key]
    assert held["mail_address"] == address
    assert mediator("keys", "detach", key).out == f"detached {key}\n"
    assert key not in mediator("keys", "list").out
    assert mediator("keys", "detach", key).err == "mediator: key: is not attached\n"


@pytest.mark.rule("D11")
def test_a_key_needs_a_mailbox_that_is_a_work_queue(mediator, box):
    key = from_verkey(bytes(32))
    refused = mediator("keys", "attach", key, box)
    assert (refused.code, refused.out) == (1, "")
    assert refused.err.startswith("mediator: mail_address: expected a mailbox with retention until_ack")
    assert mediator("keys", "attach", key, "there.is.none").code == 1
    assert mediator("keys", "attach", "no key", box).err.startswith("mediator: key:")


@pytest.fixture
def box(mediator: Mediator) -> str:
    """A mailbox that keeps its messages."""
    address = mediator("mailbox", "create", "--json").json["mail_address"]
    assert isinstance(address, str)
    return address


# Identities.


def test_who_was_connected_before_a_rotation_goes_on(mediator):
    url = mediator("invite", "--json").json["v1_url"]
    wallet = Wallet()

    async def connected() -> None:
        async with await Holder.connect(url, wallet=wallet, label="older") as holder:
            await holder.mediate()

    async def resumed() -> int:
        async with Holder.resume(wallet) as holder:
            return (await holder.status()).count

    asyncio.run(connected())
    before = mediator("invite", "--json").json["v2_url"]
    rotated = mediator("identity", "rotate", "--json").json
    assert canonical(rotated["key"]) == rotated["key"]
    after = mediator("invite", "--json").json["v2_url"]
    froms = [json.loads(_decoded(link))["from"] for link in (before, after)]
    # The DID of an invitation has the keys of the tenant's identity, and one of its own.
    keys = [set(did.split(".")[1:3]) for did in (*froms, rotated["did"])]
    assert keys[0] & keys[2] == set()
    assert keys[1] == keys[2]
    assert asyncio.run(resumed()) == 0
    connect(url, label="newer")


def _decoded(url: str) -> bytes:
    text = url.partition("=")[2]
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def test_without_a_service_every_command_says_so(alone, tmp_path):
    for words in (("invite",), ("connections", "list"), ("keys", "list"), ("identity", "rotate")):
        refused = alone(*words, "--data-dir", tmp_path)
        assert (refused.code, refused.out) == (1, "")
        assert f"start `mediator serve --data-dir {tmp_path}`" in refused.err
