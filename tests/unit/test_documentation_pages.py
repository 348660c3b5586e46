"""The documentation in the console: each page is listed, each link leads to a page and a heading that there are."""

import re

import pytest

from mediator import __version__
from mediator.console import documentation


def links(text: str) -> set[str]:
    return set(re.findall(r' (?:href|src)="([^"]*)"', text))


@pytest.mark.parametrize("name", sorted(documentation.names()))
def test_links_lead_to_headings_and_pictures(name: str) -> None:
    text = documentation.read(name)
    assert "{toctree}" not in text
    for link in links(text):
        path, _, anchor = link.partition("#")
        meant = path.removeprefix(f"{documentation.ROUTE}/") or name
        if not path.startswith("http") and meant not in documentation.pictures():
            assert meant in documentation.names(), link
            assert not anchor or f' id="{anchor}"' in documentation.read(meant), link


@pytest.mark.parametrize("name", sorted(documentation.names()))
def test_wheels_and_images_are_named_with_the_version(name: str) -> None:
    named = re.findall(r"agent[-_]mediator(?:[-_][a-z]+)*[-:](\d+\.\d+\.\d+)", documentation.read(name))
    assert set(named) <= {__version__}


def test_every_page_is_listed_once() -> None:
    listed = [name for pages in documentation.contents().values() for name, _ in pages]
    assert sorted([documentation.INDEX, *listed]) == sorted(documentation.names())


def test_what_does_not_come_along_is_no_link() -> None:
    assert "examples/push_webhook.py" in documentation.read("howto/push")
    assert not [link for link in links(documentation.read("howto/push")) if "examples" in link]


def test_links_to_pages_and_pictures_lead_to_the_console() -> None:
    found = links(documentation.read("index"))
    assert {"/console/docs/howto/install", "/console/docs/pictures/overview.svg"} <= found
