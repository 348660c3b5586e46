"""The blocks of the pages in docs/, run in their order as a reader would run them, do what the pages say."""

from pathlib import Path

import pytest

from tests.harness.pages import ROOT, RUN, blocks, run_page

GUIDES = sorted(
    str(page.relative_to(ROOT)) for kind in ("tutorials", "howto") for page in (ROOT / "docs" / kind).glob("*.md")
)
REFERENCE = ("docs/protocol.md", "docs/registry.md")
"""Pages whose examples need a service beside them."""
ELSEWHERE = {
    "extend.md": "tests/unit/test_architecture_page.py runs the part",
    "benchmarks.md": "hours; tests/unit/test_benchmark_pages.py holds the tables",
    "client.md": "parts of programs; tests/integration has the client's tests",
    "cluster.md": "needs a cluster; tests/slow/spark runs jobs on one of this machine",
    "conformance.md": "needs a mediator's address; tests/acceptance/test_conformance.py gives it this service's",
    "didcomm.md": "tests/acceptance/didcomm and the guide for wallets",
    "editions.md": "tests/acceptance/editions, by clients of each edition",
    "index.md": "the blocks are README's, which tests/slow/test_readme.py runs",
    "high-availability.md": "needs machines; tests/slow/ha kills each kind of them",
    "operations.md": "needs root; the guides run the same on a folder",
    "pipeline.md": "needs a Java; tests/slow/spark",
}
"""Pages of docs/ whose blocks are not run as printed, and why or what runs them."""

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("page", GUIDES)
def test_a_page_does_what_it_prints(page: str, tmp_path: Path) -> None:
    for outcome in run_page(ROOT / page, tmp_path):
        outcome.check()


@pytest.mark.parametrize("page", REFERENCE)
def test_examples_of_the_reference_do_what_they_print(page: str, tmp_path: Path) -> None:
    for outcome in run_page(ROOT / page, tmp_path, served=True):
        outcome.check()


def test_every_page_with_commands_is_run_or_listed() -> None:
    with_commands = {
        page.name
        for page in (ROOT / "docs").glob("*.md")
        if any(block.language in RUN and not block.left_out for block in blocks(page))
    }
    assert with_commands == {page.removeprefix("docs/") for page in REFERENCE} | {*ELSEWHERE}
