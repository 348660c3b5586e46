"""Describes the NATS verbs in AsyncAPI 3.0: each verb runs on a body that records which fields it reads, and how.

Descriptions of fields are those of docs/protocol.md and docs/editions.md, so a field without a row there is an error.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson

from mediator import __version__
from mediator.fields import MAX_NUMBER, MILLISECONDS_FROM, Fields, FieldTable
from mediator.mailboxes.address import MAX_ADDRESS
from mediator.mailboxes.bounds import MAX_DEDUP_ID, MAX_KEY
from mediator.nats.client import Request
from mediator.nats.editions import EditionVerbs
from mediator.nats.protocol import SEND_HEADERS
from mediator.nats.subjects import API
from mediator.nats.verbs import MailboxVerbs, StoreVerb, Verb
from registry.api import codec
from registry.api.openapi import explanation
from registry.cards.card import MAX_CARD

Json = dict[str, Any]

DOCS = Path(__file__).parents[1]
ADDRESS = "a.b"
"""An address for verbs to run on."""
_TABLE_ROW = re.compile(r"^\| (?P<names>`[^|]+) \| (?P<cells>.+) \|$", re.MULTILINE)
_TYPES: Mapping[str, Json] = {
    "string": {"type": "string"},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer"},
    "Unix seconds": {"type": "integer"},
    "object": {"type": "object"},
    "object of strings": {"type": "object", "additionalProperties": {"type": "string"}},
    "list": {"type": "array"},
    "list of integers": {"type": "array", "items": {"type": "integer"}},
    "list of strings": {"type": "array", "items": {"type": "string"}},
}
"""The words for types in the tables of replies."""


class RecordingFields(Fields):
    """A body with every field: notes the schema of each field that a verb reads, and returns a value that fits it."""

    def __init__(self, path: str = "") -> None:
        super().__init__({"mail_address": ADDRESS}, path)
        self.schema: Json = {}

    def has(self, name: str) -> bool:  # noqa: D102
        return True

    def read(self, table: FieldTable) -> dict[str, Any]:  # noqa: D102
        return {name: read(self, name) for name, read in table.items()}

    def _note(self, name: str, schema: Json) -> None:
        self.schema[name] = schema

    def text(self, name: str, max_length: int, *, lines: bool = False) -> str | None:  # noqa: D102
        self._note(name, {"type": "string", "maxLength": max_length})
        return ADDRESS

    def prose(self, name: str, max_length: int) -> str | None:  # noqa: D102
        self._note(name, {"type": "string"})
        return "words"

    def words(self, name: str, max_count: int, max_length: int) -> tuple[str, ...] | None:  # noqa: D102
        each = {"type": "string", "maxLength": max_length}
        self._note(name, {"anyOf": [{"type": "array", "items": each, "maxItems": max_count}, {"type": "string"}]})
        return ("word",)

    def flag(self, name: str) -> bool | None:  # noqa: D102
        self._note(name, {"type": "boolean"})
        return True

    def number(  # noqa: D102
        self, name: str, lowest: int, highest: int | None, *, zero_is_absent: bool = False
    ) -> int | None:
        least = 0 if zero_is_absent else lowest
        bound = {"maximum": MAX_NUMBER} if highest is None else {"x-lowered-to": highest}
        self._note(name, {"type": "integer", "minimum": least, **bound})
        return lowest if highest is None else highest

    def fraction(self, name: str) -> float | None:  # noqa: D102
        self._note(name, {"type": "number", "minimum": 0, "x-lowered-to": 1})
        return 1.0

    def numbers(self, name: str, max_count: int) -> list[int] | None:  # noqa: D102
        each = {"type": "integer", "minimum": 0, "maximum": MAX_NUMBER}
        self._note(name, {"type": "array", "items": each, "maxItems": max_count})
        return [0]

    def time(self, name: str) -> int | None:  # noqa: D102
        self._note(name, {"type": "integer", "minimum": 0, "maximum": MILLISECONDS_FROM})
        return 1

    def choice(self, name: str, words: tuple[str, ...]) -> str | None:  # noqa: D102
        self._note(name, {"enum": [str(word) for word in words]})
        return str(words[0])

    def choices(self, name: str, words: tuple[str, ...]) -> tuple[str, ...] | None:  # noqa: D102
        each = {"enum": [str(word) for word in words]}
        self._note(name, {"anyOf": [{"type": "array", "items": each}, {"type": "string"}]})
        return (str(words[0]),)

    def fields(self, name: str) -> "Fields":  # noqa: D102
        inner = RecordingFields(f"{self.path(name)}.")
        self._note(name, {"type": "object", "properties": inner.schema})
        return inner


class _Read(Exception):
    """The body was read, and the verb went on to its use case."""


class _Recorder:
    """In place of the broker: whatever is asked of it ends the verb."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def stop(*_: Any) -> None:
            raise _Read

        return stop


def read_fields(verb: Verb | StoreVerb) -> Json:
    """Return the schema of each field that a verb reads of its body."""
    fields = RecordingFields()
    replies = SimpleNamespace(budget=1 << 20, room=lambda: 1 << 20)
    tail = f"{ADDRESS}.0" if verb.name == "DELETE" else ADDRESS
    known = {"tenant": "default", "tail": tail, "connection_name": ""}
    message = Request("", b"", b"", None)
    pending: Any = SimpleNamespace(**known, fields=fields, replies=replies, message=message)
    try:
        if isinstance(verb, StoreVerb):
            verb.submit(pending, print)
        else:
            verb.answer(pending).send(None)  # type: ignore[attr-defined]
    except _Read:
        return fields.schema
    raise AssertionError(f"{verb.name} answered without its broker")


def document() -> Json:
    """Return the document."""
    channels: Json = {}
    operations: Json = {}
    for operation in _operations():
        name, subject = operation["name"], operation["subject"]
        channels[name] = {
            "address": subject,
            "messages": {"request": _ref("messages", f"{name}Request")},
            **({"parameters": _parameters(subject)} if "{" in subject else {}),
        }
        channels[f"{name}Reply"] = {"address": None, "messages": {"reply": _ref("messages", f"{name}Reply")}}
        operations[name] = {
            "action": "receive",
            "summary": operation["summary"],
            "tags": [{"name": operation["tag"]}],
            "channel": {"$ref": f"#/channels/{name}"},
            "messages": [{"$ref": f"#/channels/{name}/messages/request"}],
            "reply": {
                "address": {"location": "$message.header#/reply", "description": "The reply subject of the request."},
                "channel": {"$ref": f"#/channels/{name}Reply"},
                "messages": [{"$ref": f"#/channels/{name}Reply/messages/reply"}],
            },
        }
    messages: Json = {}
    for operation in _operations():
        headers = {"headers": operation["headers"]} if operation["headers"] else {}
        request = {"contentType": operation["type"], **headers, "payload": operation["payload"]}
        messages[f"{operation['name']}Request"] = request
        messages[f"{operation['name']}Reply"] = {"contentType": "application/json", "payload": operation["reply"]}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Mediator",
            "version": __version__,
            "description": "The NATS verbs of the mediator: requests, each answered with one JSON object. null and "
            "empty strings mean absent (N4). x-lowered-to is the number to which larger ones are lowered.",
            "license": {"name": "Apache-2.0"},
        },
        "servers": {
            "local": {"host": "127.0.0.1:4222", "protocol": "nats", "description": "What mediator serve listens on."}
        },
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": operations,
        "components": {"messages": messages, "schemas": {"Message": _message()}},
    }


def write() -> str:
    """Return docs/asyncapi.json."""
    return orjson.dumps(document(), option=orjson.OPT_INDENT_2).decode() + "\n"


def subjects() -> dict[str, str]:
    """Return the name of the operation on each subject behind the prefix."""
    return {str(operation["subject"]).removeprefix(API): str(operation["name"]) for operation in _operations()}


def _operations() -> Iterable[Json]:
    current, older = MailboxVerbs(_Recorder()).table, EditionVerbs(_Recorder(), "", {}).table  # type: ignore[arg-type]
    for subject, verb in current.items():
        heading = subject.rstrip(".")
        if heading == "MSG.SEND":
            continue
        payload = _body(_described("protocol.md", heading, "Request field", read_fields(verb)))
        yield _operation("mailboxes", subject, heading, payload, _reply("protocol.md", heading, verb.empty))
    for heading, empty in (("MSG.SEND", {"msg_id": -1}), ("MSG.BATCH", {"msg_ids": [], "errors": {}})):
        payload = {"description": "Any bytes." if heading == "MSG.SEND" else "Messages framed as in HMSG of NATS (S8)."}
        headers = _headers() if heading == "MSG.SEND" else None
        reply = _reply("protocol.md", heading, empty)
        yield _operation("mailboxes", f"{heading}.", heading, payload, reply, headers)
    for name, payload, reply in _agents():
        yield _operation("agents", f"AGENT.{name}", f"AGENT.{name}", payload, reply)
    for subject, verb in older.items():
        if isinstance(verb, StoreVerb):
            continue
        payload = _body(read_fields(verb))
        reply = _object({"error": _ERROR, **_CODES, **_inferred(verb.empty)}, ["error", *verb.empty])
        yield _operation("older editions", subject, subject.rstrip("."), payload, reply)
    sent = _object({"error": _ERROR, **_CODES, "msg_id": {"type": "integer"}}, ["error", "msg_id"])
    for subject in ("INBOX.{addr}.{lane}", "MAILBOX.MSG.{addr}.{lane}", "BROADCAST.{domain}.{event}"):
        heading = subject.partition(".{")[0]
        yield _operation("older editions", subject, heading, {"description": "Any bytes."}, sent, _headers())


def _operation(tag: str, subject: str, heading: str, payload: Json, reply: Json, headers: Json | None = None) -> Json:
    if subject.endswith("."):
        subject += "{addr}.{msg_id}" if "DELETE" in subject else "{addr}"
    return {
        "name": "".join(word.capitalize() for word in heading.split(".")),
        "tag": tag,
        "subject": API + subject,
        "summary": heading,
        "payload": payload,
        "type": "application/octet-stream" if "properties" not in payload and "anyOf" not in payload else _JSON,
        "reply": reply,
        "headers": headers,
    }


_JSON = "application/json"
_ERROR: Json = {"type": "string", "description": "Empty on success, else what is wrong."}
_CODES: Json = {
    "error_code": {"type": "string", "description": "The code of the error in errors.md; absent on success."},
    "request_id": {"type": "string", "description": "With the code internal: names the request in the service's log."},
}


def _agents() -> Iterable[tuple[str, Json, Json]]:
    mailbox = {"type": "string", "description": "The mailbox of the agent: mq9://…/{addr}, or the address."}
    name = {"type": "string", "description": "The name of the agent, where exactly one has it."}
    named = {"type": "object", "anyOf": [_object({"mailbox": mailbox}, ["mailbox"]), _object({"name": name}, ["name"])]}
    card = {
        **_object({"mailbox": mailbox, "name": {"type": "string", "description": "Identifies it without a mailbox."}}),
        "description": f"Any JSON object of at most {MAX_CARD} bytes (G1).",
    }
    done = _object({"error": _ERROR, **_CODES, "mailbox": {"type": "string"}}, ["error"])
    warnings = {"type": "array", "items": {"type": "string"}, "description": "What is wrong with a card of A2A."}
    fields = RecordingFields()
    codec.parse_discover(fields)
    page = {
        "agents": {"type": "array", "items": {"type": "object"}, "description": "Cards as they were registered."},
        "mode": {"enum": ["list", "text", "semantic"], "description": "How they were found."},
        "total": {"type": "integer", "description": "How many were found."},
        "next": {"type": "string", "description": "The cursor of the next page."},
        "note": {"type": "string", "description": "Why a semantic search was answered by keywords."},
        "scores": {"type": "array", "items": {"type": "number"}},
        "states": {"type": "array", "items": {"type": "object"}},
        "explanations": {"type": "array", "items": explanation()},
        "query_id": {"type": "string", "description": "Names the search for AGENT.FEEDBACK (G5)."},
    }
    said = {"query_id": page["query_id"], "mailbox": mailbox, "useful": {"type": "boolean"}}
    counted = {"type": "boolean", "description": "Whether the vote counts (G6)."}
    note = {"type": "string", "description": "That nobody can send to an agent without a mailbox (G1)."}
    removed = {"type": "boolean", "description": "Whether it was registered (G2)."}
    yield "REGISTER", card, _object({**done["properties"], "warnings": warnings, "note": note}, ["error"])
    yield "UNREGISTER", named, _object({**done["properties"], "removed": removed}, ["error"])
    yield "REPORT", named, done
    yield "FEEDBACK", _object(said, [*said]), _object({**done["properties"], "counted": counted}, ["error"])
    yield (
        "DISCOVER",
        _object(fields.schema),
        _object({"error": _ERROR, **_CODES, **page}, ["error", "agents"]),
    )


def _headers() -> Json:
    rows = _rows("protocol.md", "MSG.SEND", "Request header")
    max_length = {"mq9-key": MAX_KEY, "mq9-dedup-id": MAX_DEDUP_ID, "nats-msg-id": MAX_DEDUP_ID}
    properties: Json = {}
    for header in sorted(SEND_HEADERS):
        value, _, meaning = rows["mq9-dedup-id" if header == "nats-msg-id" else header]
        bound = {"maxLength": max_length[header]} if header in max_length else {}
        properties[header] = {"type": "string", **bound, "description": f"{_plain(meaning)} Value: {_plain(value)}."}
    return {"type": "object", "properties": properties, "additionalProperties": {"type": "string"}}


def _message() -> Json:
    """Return the schema of a message in a reply, from the table of its fields."""
    rows = {names: cells for names, cells in _rows("protocol.md", "MSG.FETCH", "Field").items() if len(cells) == 3}
    always = [name for name, (_, present, _) in rows.items() if present == "always"]
    return _object(
        {name: _TYPES[kind] | {"description": _plain(text)} for name, (kind, _, text) in rows.items()}, always
    )


def _reply(page: str, heading: str, empty: Mapping[str, Any]) -> Json:
    rows = _rows(page, heading, "Reply field")
    if missing := {*empty} - {*rows}:
        raise AssertionError(f"{page}, {heading}: no row for {sorted(missing)} of the reply")
    properties = {name: _TYPES[kind] | {"description": _plain(text)} for name, (kind, text) in rows.items()}
    if "messages" in properties:
        properties["messages"] = properties["messages"] | {"items": {"$ref": "#/components/schemas/Message"}}
    required = ["error", *(name for name in empty)]
    return _object({**properties, "error": _ERROR, **_CODES}, required)


def _described(page: str, heading: str, column: str, schema: Json) -> Json:
    """Add what the page says of each field; a field on one side only is an error."""
    rows = _rows(page, heading, column)
    flat = {*schema} | {f"{outer}.{name}" for outer in schema for name in schema[outer].get("properties", {})}
    flat -= {outer for outer in schema if "properties" in schema[outer]}
    if flat != {*rows} - {"any other"}:
        raise AssertionError(f"{page}, {heading}: read {sorted(flat)}, described {sorted(rows)}")
    described: Json = {}
    for name, each in schema.items():
        if "properties" in each:
            inner = {
                key: value | {"description": _plain(rows[f"{name}.{key}"][-1])}
                for key, value in each["properties"].items()
            }
            described[name] = each | {"properties": inner}
        else:
            described[name] = each | {"description": _plain(rows[name][-1])}
    return described


def _rows(page: str, heading: str, column: str) -> dict[str, Sequence[str]]:
    """Return the rows of the table with this first column below a heading: by name, the other cells."""
    text = (DOCS / page).read_text(encoding="utf-8")
    section = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)
    if section is None or f"| {column} |" not in section[1]:
        return {}
    table = section[1].partition(f"| {column} |")[2].partition("\n\n")[0]
    rows = {}
    for row in _TABLE_ROW.finditer(table):
        for name in re.findall(r"`([^`]+)`", row["names"]):
            rows[name] = row["cells"].split(" | ")
    return rows


def _plain(text: str) -> str:
    """Return text without the marks of Markdown, and without the rule numbers that only the page explains."""
    text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text.replace("`", "").replace("*(extension)*", ""))
    return text.strip()


def _inferred(empty: Mapping[str, Any]) -> Json:
    kinds = {str: "string", bool: "boolean", int: "integer", list: "array"}
    return {name: {"type": kinds[type(value)]} for name, value in empty.items()}


def _body(properties: Json) -> Json:
    return _object(properties) if properties else {"description": "Not read."}


def _object(properties: Json, required: Sequence[str] = ()) -> Json:
    return {"type": "object", "properties": properties, **({"required": [*required]} if required else {})}


def _parameters(subject: str) -> Json:
    meanings = {
        "addr": f"The mail address, of at most {MAX_ADDRESS} characters: its dots are those of the subject (A1).",
        "msg_id": "The number of the message, in canonical decimal (Q2).",
        "lane": "The lane, in the words of the edition (E1).",
        "domain": "The first token of a broadcast.",
        "event": "The rest of a broadcast's subject.",
    }
    return {name: {"description": meanings[name]} for name in re.findall(r"{(\w+)}", subject)}


def _ref(kind: str, name: str) -> Json:
    return {"$ref": f"#/components/{kind}/{name}"}
