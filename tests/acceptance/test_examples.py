"""examples/: each program does what it shows, run by the commands that it prints, against a real service."""

import asyncio
import re

from tests.harness.didcomm_service import Door
from tests.harness.examples import FOLDER, run_printed
from tests.harness.service import Service
from tests.harness.stock import Stock


async def test_the_worker_pool_does_every_job(door: Door):
    [out] = await run_printed("worker_pool", door.service)
    done = re.findall(r"^worker \d did '(resize \w+\.png)'", out, re.MULTILINE)
    assert sorted(done) == [f"resize {name}.png" for name in ("broken", "cat", "dog", "logo", "owl")]
    assert "failed at 'resize broken.png'" in out
    assert "did 'resize broken.png' in a second attempt" in out
    assert out.endswith("left: 0\n")


async def test_a_request_and_its_reply_wait_for_their_readers(door: Door):
    said = "asked in message 0\nanswered 'what is 6 * 7?'\nwhat is 6 * 7? 42\n"
    assert await run_printed("request_reply", door.service) == [said]


async def test_agents_are_discovered_by_what_they_can_do(door: Door):
    [out] = await run_printed("discovery", door.service)
    assert "Lingua reads 'please help: translates a letter to English'" in out
    assert "Ledger reads 'please help: books an invoice'" in out
    assert "Pilot reads" not in out


async def test_a_wallet_picks_up_what_came_while_it_was_away(door: Door):
    link = (await door.invite()).v1_short
    [out] = await run_printed("wallet_pickup", door.service, {"$(mediator invite --link)": link})
    assert out.splitlines() == [
        f"connected, reached at {door.url}",
        "picked up: you were away",
        "picked up: now you are there",
    ]


async def test_the_dashboard_shows_what_happens_meanwhile(service: Service, stock: Stock):
    address = await stock.create()
    showing = asyncio.create_task(run_printed("dashboard", service, {"[SECONDS]": "1"}))
    while not showing.done():
        await stock.ask(f"MSG.SEND.{address}", b"hello")
    [out] = await showing
    assert re.search(r"^  stored +\d+\.\d\d$", out, re.MULTILINE)
    assert re.search(r"^  SEND +\d+\.\d\d +\d+\.\d\d$", out, re.MULTILINE)
    assert re.search(r"^  ready +1$", out, re.MULTILINE)


def test_the_list_of_examples_is_complete():
    listed = re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\) \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in FOLDER.glob("*.py"))
