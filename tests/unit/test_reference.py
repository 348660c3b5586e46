"""Holds the reference in docs/ to the code: what is public is in it, and what is generated is up to date."""

import re
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest

from docs import generate
from docs.generators import asyncapi, didcomm, metrics
from mediator.errors import BadRequestError
from mediator.fields import Fields
from mediator.mailboxes.lanes import LANES
from mediator.nats import protocol
from mediator.nats.editions import EditionVerbs
from mediator.nats.verbs import MailboxVerbs
from mediator.parts import installed_settings
from mediator.settings.sources import options
from registry.api.doors import add_verbs
from registry.records import NO_MEMORY

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = asyncapi.document()


@pytest.mark.parametrize("name", generate.PAGES)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == generate.PAGES[name](), "run: python docs/generate.py"


def test_every_setting_has_a_heading() -> None:
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    for path, field in options(installed_settings()):
        inner = getattr(field.annotation, "model_fields", {})
        for name in [".".join((*path, each)) for each in inner] or [".".join(path)]:
            assert f"### {name}\n" in page or f"## {name}" in page, name


def verbs_of_registry() -> set[str]:
    found: set[str] = set()
    add_verbs(SimpleNamespace(add_verb=lambda subject, *_: found.add(subject)), None, NO_MEMORY, None)
    return found


def test_every_verb_has_a_channel() -> None:
    others = {"MSG.BATCH.", "BROADCAST."}
    verbs = {*MailboxVerbs(None).table, *EditionVerbs(None, "", {}).table, *verbs_of_registry(), *others}
    described = {re.sub(r"{.*", "", subject) for subject in asyncapi.subjects()}
    assert described == verbs


def test_every_verb_of_the_current_edition_has_a_section() -> None:
    page = (DOCS / "protocol.md").read_text(encoding="utf-8")
    for subject in (*MailboxVerbs(None).table, "MSG.BATCH."):
        assert f"\n## {subject.rstrip('.')}\n" in page


def test_every_reference_of_the_document_resolves() -> None:
    def references(part: object) -> list[str]:
        if isinstance(part, dict):
            own = [part["$ref"]] if "$ref" in part else []
            return own + [each for value in part.values() for each in references(value)]
        return [each for value in part for each in references(value)] if isinstance(part, list) else []

    found = references(DOCUMENT)
    assert len(found) > 50
    for reference in found:
        part = DOCUMENT
        for key in reference.removeprefix("#/").split("/"):
            part = part[key]


def schema_of(message: str) -> dict:
    return {**DOCUMENT["components"]["messages"][message]["payload"], "components": DOCUMENT["components"]}


@pytest.mark.parametrize("message", DOCUMENT["components"]["messages"])
def test_payloads_have_valid_schemas(message: str) -> None:
    jsonschema.Draft7Validator.check_schema(schema_of(message))


@pytest.mark.parametrize(
    ("message", "body", "read"),
    [
        ("MailboxCreateRequest", {"ttl": -1}, protocol.read_create),
        ("MailboxCreateRequest", {"type": "other"}, protocol.read_create),
        ("MailboxCreateRequest", {"tags": 3}, protocol.read_create),
        ("MailboxCreateRequest", {"name": 3}, protocol.read_create),
        ("MsgFetchRequest", {"deliver": "soon"}, lambda *args: protocol.read_fetch(args[0], "a", args[1], 1)),
        ("MsgFetchRequest", {"from_time": 10**12}, lambda *args: protocol.read_fetch(args[0], "a", args[1], 1)),
        ("MsgAckRequest", {"msg_ids": [-1]}, lambda *args: protocol.read_ack(args[0], "a", args[1])),
    ],
)
def test_what_a_schema_refuses_the_service_refuses(message: str, body: dict, read: object) -> None:
    assert not jsonschema.Draft7Validator(schema_of(message)).is_valid(body)
    with pytest.raises(BadRequestError):
        read("default", Fields(body))


def test_the_list_of_protocols_is_that_of_the_dispatcher() -> None:
    page = (DOCS / "didcomm-protocols.md").read_text(encoding="utf-8")
    spoken = didcomm.protocols().protocols()
    assert len(spoken) > 15
    for version in spoken:
        assert f"| `{version}` |" in page


def test_series_with_labels_are_read_whole() -> None:
    found = {series.name: series for series in metrics.find_series()}
    assert found["mediator_messages_total"].labels == ("event", "lane")
    assert found["mediator_check_ok"].labels == ("check",)
    assert found["mediator_request_seconds"].kind == "histogram"


def test_the_priorities_of_the_document_are_lanes() -> None:
    headers = DOCUMENT["components"]["messages"]["MsgSendRequest"]["headers"]["properties"]
    assert {lane.name.lower() for lane in LANES} <= {*re.findall(r"\w+", headers["mq9-priority"]["description"])}
