"""The operator's terms are shown as text, whatever the file holds."""

from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from mediator.errors import SetupError
from pickup.pages import MAX_TERMS_BYTES, TermsPage


async def shown(file: Path | None, **headers: str) -> tuple[int, str, dict[str, str]]:
    app = web.Application()
    TermsPage(file).add_routes(app)
    async with TestClient(TestServer(app)) as client, client.get("/terms", headers=headers) as answer:
        return answer.status, await answer.text(), dict(answer.headers)


async def test_markdown_is_rendered_and_html_is_text(tmp_path: Path):
    file = tmp_path / "terms.md"
    file.write_text(
        "# Our rules\n\n- be **kind**\n\n<script>alert(1)</script>\n\n[a](javascript:alert(1)) [b](https://b.org)"
    )
    status, page, headers = await shown(file)
    assert status == 200
    assert "<h1>Our rules</h1>" in page
    assert "<strong>kind</strong>" in page
    assert "<script>" not in page
    assert 'href="javascript' not in page
    assert 'href="https://b.org"' in page
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert page.count("<h1>") == 1


async def test_plain_text_keeps_its_lines_and_is_escaped(tmp_path: Path):
    file = tmp_path / "terms.txt"
    file.write_text("one\n  two <b>\n")
    _, page, _ = await shown(file)
    assert "one\n  two &lt;b&gt;\n" in page
    assert "<h1>Terms</h1>" in page


async def test_a_byte_order_mark_is_no_part_of_the_terms(tmp_path: Path):
    file = tmp_path / "terms.md"
    file.write_bytes(b"\xef\xbb\xbf# Our rules\n")
    _, page, _ = await shown(file)
    assert "<h1>Our rules</h1>" in page


async def test_unchanged_terms_are_not_sent_again(tmp_path: Path):
    file = tmp_path / "terms.txt"
    file.write_text("one")
    app = web.Application()
    TermsPage(file).add_routes(app)
    async with TestClient(TestServer(app)) as client:
        tag = (await client.get("/terms")).headers["ETag"]
        again = await client.get("/terms", headers={"If-None-Match": tag})
        assert (again.status, await again.read()) == (304, b"")
        file.write_text("two")
        changed = await client.get("/terms", headers={"If-None-Match": tag})
        assert (changed.status, "two" in await changed.text()) == (200, True)
        # Terms that cannot be read any more are shown as they were.
        file.unlink()
        assert "two" in await (await client.get("/terms")).text()


async def test_without_terms_there_is_no_page():
    assert (await shown(None))[0] == 404


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file or directory"),
        (b"\xff", "expected UTF-8"),
        (b"a" * (MAX_TERMS_BYTES + 1), "expected at most"),
    ],
)
def test_terms_that_cannot_be_shown_refuse_the_start(tmp_path: Path, content: bytes | None, problem: str):
    file = tmp_path / "terms.md"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SetupError, match=rf"^didcomm.terms: .*terms.md: {problem}"):
        TermsPage(file)
