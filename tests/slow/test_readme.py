"""The blocks of README.md, run in their order as a reader would run them, do what the README says and print it."""

import re

import pytest

from tests.harness import pages
from tests.harness.pages import Outcome

README = pages.ROOT / "README.md"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """What each block printed."""
    return pages.run_page(README, tmp_path_factory.mktemp("readme"))


def test_blocks_do_what_the_readme_says(printed: list[Outcome]) -> None:
    for outcome in printed:
        outcome.check()


def test_each_block_is_run_or_left_out_for_a_reason() -> None:
    for block in pages.blocks(README):
        if block.left_out:
            assert block.language == "" or block.how.startswith("not: "), block
    assert pages.serve_command() == ".venv/bin/mediator serve"


def test_links_lead_to_files() -> None:
    links = re.findall(r'(?:\]\(|src=")([^)"#]+)', README.read_text(encoding="utf-8"))
    here = [link for link in links if "://" not in link]
    assert len(here) > 20
    assert [link for link in here if not (pages.ROOT / link).exists()] == []


def test_each_way_to_a_mailbox_gets_what_was_sent(printed: list[Outcome]) -> None:
    by_command, by_program = [outcome.out for outcome in printed if "fetch" in outcome.text or "worker" in outcome.text]
    assert "translate this" in by_command
    assert by_program == "urgent {'translate': 'good morning'}\n"
