"""The blocks of the pages in docs/, run in their order as a reader would run them, do what the pages say."""

from pathlib import Path

import pytest

from tests.harness.pages import ROOT, run_page

GUIDES = sorted(
    str(page.relative_to(ROOT)) for kind in ("tutorials", "howto") for page in (ROOT / "docs" / kind).glob("*.md")
)

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("page", GUIDES)
def test_a_page_does_what_it_prints(page: str, tmp_path: Path) -> None:
    for outcome in run_page(ROOT / page, tmp_path):
        outcome.check()
