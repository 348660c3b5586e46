"""The documentation comes along with the console, for whoever may see the console."""

import re
from pathlib import Path

import pytest

from tests.harness.console_site import console_site


async def test_each_page_links_to_its_documentation(tmp_path: Path) -> None:
    async with console_site(tmp_path) as site:
        site.role = "read"
        for page in ("", "/mailboxes", "/settings"):
            (link,) = re.findall(
                r'href="(/console/docs/[^"]*)">Documentation of this page', await site.read(f"/console{page}")
            )
            assert '<article class="prose">' in await site.read(link)
        assert "<title>Back up and restore – mediator</title>" in await site.read("/console/docs/howto/backup")
        assert 'href="/console/docs/howto/backup"' in await site.read("/console/docs")
        picture = await site.get("/console/docs/pictures/overview.svg")
        assert (picture.status, picture.content_type) == (200, "image/svg+xml")


@pytest.mark.parametrize(
    "path",
    ["..%2F..%2Fpyproject", "%2E%2E/%2E%2E/README", "pictures/..%2Fconf.py", "conf.py", "howto", "%2Fetc%2Fpasswd"],
)
async def test_nothing_beside_the_documentation_is_shown(tmp_path: Path, path: str) -> None:
    async with console_site(tmp_path) as site:
        assert (await site.get(f"/console/docs/{path}")).status == 404


async def test_strangers_are_asked_to_sign_in(tmp_path: Path) -> None:
    async with console_site(tmp_path) as site:
        for path in ("docs", "docs/howto/backup", "docs/pictures/overview.svg"):
            answer = await site.session.get(site.server.make_url(f"/console/{path}"), allow_redirects=False)
            assert (answer.status, answer.headers["Location"][:16]) == (303, "/console/sign-in")
