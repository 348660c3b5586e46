"""An example request and answer for each operation, for the document of the admin API: made from its schemas.

Values of texts are by the name of their field, behind that of its operation, of the field around it, or of the
endpoint where one alone is not enough; parts add those of theirs to
:attr:`mediator.operate.operations.Operations.examples`.
"""

from collections.abc import Mapping
from shlex import quote as shell_quote
from typing import Any, Final
from urllib.parse import quote, urlencode

import orjson

from mediator.operate.operations import Answer, Operation, Schema, kinds_of

_AT: Final = 1_767_225_600
"""A time, in Unix seconds."""
_TIMES: Final = frozenset({"at", "since", "until", "next_due", "previous_until", "looked_at"})
_NEVER: Final = frozenset({"ended_at", "error", "previous_until", "paused", "problem"})
"""Fields whose usual value is null or empty."""
_WORDS: Final[Mapping[str, str]] = {
    "accounts": "ACME",
    "action": "fetches",
    "actor": "ada",
    "added": "ben",
    "address": "orders.>",
    "advice": "Have its readers started again.",
    "after": "orders.done",
    "after_tenant": "acme",
    "agents.state": "live",
    "arguments": "--since=2026-01-01",
    "audit.name": "mailbox-delete",
    "backups.name": "mediator-2026-01-01.tar",
    "certificate": "-----BEGIN CERTIFICATE-----\n…\n-----END CERTIFICATE-----\n",
    "changed": "carl",
    "checks": "ok",
    "client": "12",
    "clients.address": "192.0.2.7:50412",
    "code": "lagging_groups",
    "command": "report",
    "copy-rules.name": "audit",
    "copy-rules.state": "ok",
    "data_dir": "/var/lib/mediator",
    "database": "sqlite",
    "dead-resend.payload": "hello",
    "dedup_id": "order-1042",
    "desc": "New orders",
    "description": "What a mailbox may hold.",
    "doors": "nats",
    "durability": "an OK is on this machine's disk",
    "error": "",
    "event": "group lags",
    "folder": "/var/lib/mediator/backups",
    "group_name": "workers",
    "groups.name": "workers",
    "headers": "text/plain",
    "instance": "mediator-1",
    "job": "clean-up",
    "key": "order-1042",
    "kind": "keep",
    "left": "Copies in backups that were made before: remove those.",
    "level": "problem",
    "link": "/mailboxes/default/id:12",
    "log": "running the report",
    "logger": "service",
    "mail_address": "orders.new",
    "mailbox": "orders.new",
    "mailbox-create.name": "orders.new",
    "message-send.payload": "hello",
    "name": "acme",
    "nats": "nats://127.0.0.1:4222",
    "nkey": "UAKL3BZ6K5TY2V5TVZKQZ4JY4M6FDYJ7A3P5H2XKB4N5L3UJ7W6QYV2F",
    "nkeys": "UAKL3BZ6K5TY2V5TVZKQZ4JY4M6FDYJ7A3P5H2XKB4N5L3UJ7W6QYV2F",
    "note": "partner",
    "operation": "mailbox-delete",
    "option": "quotas.mailbox_messages",
    "origin": "database",
    "outcome": "succeeded",
    "passwords": "pV3rYs3cr3t",
    "payload": "aGVsbG8=",
    "payload_start": "aGVsbG8=",
    "prefix": "orders.",
    "priorities": "urgent",
    "problem": "",
    "queue": "workers",
    "recipient": "did:example:bob",
    "removed": "dora",
    "reply_to": "replies.ada",
    "result": "ok",
    "retention": "keep",
    "runs.name": "report",
    "scheduler": "ok",
    "secret": "change-me",
    "send_address": "s.7hkfq2n4c6",
    "source": "/etc/mediator.toml",
    "state": "ok",
    "step": "copying the database",
    "stopped": "",
    "tags": "invoice",
    "tenant": "default",
    "tenants.tenant": "acme",
    "text": "A group lags.",
    "to_address": "orders.audit",
    "to_subject": "audit.orders",
    "to_url": "https://audit.example/mail",
    "token": "reporting",
    "tokens": "reporting",
    "tokens.name": "reporting",
    "user": "ada",
    "users": "ada",
    "users.name": "ada",
    "variable": "MEDIATOR_QUOTAS__MAILBOX_MESSAGES",
    "version": "0.3.0",
    "via": "token",
    "waiting": "http.max_connections",
    "what": "messages",
    "when_full": "drop",
    "why": "their TTL is over",
    "words": "invoices",
}
_KEYS: Final[Mapping[str, str]] = {
    "checks": "store",
    "columns": "requests",
    "fields": "mail_address",
    "headers": "content-type",
    "lanes": "normal",
    "last_removed": "messages",
    "nkeys": "ada",
    "numbers": "messages",
    "own_quotas": "messages",
    "passwords": "ada",
    "queues": "closed",
    "quotas": "messages",
    "removed": "messages",
    "sample": "requests",
    "settled": "normal",
    "sockets": "nats",
    "storage": "database",
    "tenants": "default",
    "tokens": "reporting",
    "usage": "messages",
}
"""A name in an object whose names are not known before."""
_ANY: Final[Mapping[str, Any]] = {"value": 100000, "fields": "orders.new", "status": {"load": 0.2}}


class ExampleWriter:
    """Writes examples with the texts of the parts."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        """``texts``: by the name of a field, with a dot and one of the names above in front where it needs that."""
        self._texts = {**_WORDS, **texts}

    def has(self, operation: Operation, name: str) -> bool:
        """Whether a text field of an operation has an example of its own."""
        return name in _NEVER or self._text(operation, "", name) is not None

    def request(self, operation: Operation) -> Answer:
        """Return the fields of a request: those in the path, those needed, and those that a body says beside."""
        in_query = operation.method in {"GET", "DELETE"}
        return {
            name: self._value(operation, name, schema)
            for name, schema in operation.fields.items()
            if name in (*operation.path_fields, *operation.required)
            or not (in_query or "default" in schema or "null" in kinds_of(schema))
            or operation.method == "PATCH"
        }

    def answer(self, operation: Operation) -> Answer:
        """Return the answer to an actor who may see all of it."""
        found: Answer = self._value(operation, "", operation.answer)
        return found

    def command(self, operation: Operation, prefix: str) -> str:
        """Return the request as a command of curl; ``prefix`` is where the API is below the service's URL."""
        fields = self.request(operation)
        path = (operation.path or "").format_map({name: quote(str(fields.pop(name))) for name in operation.path_fields})
        words = ["curl", '-H "Authorization: Bearer $TOKEN"']
        if operation.method != "GET":
            words.append(f"-X {operation.method}")
        query = ""
        if operation.method in {"GET", "DELETE"}:
            query = f"?{urlencode(fields, doseq=True)}" if fields else ""
        elif fields:
            words += ["--json", shell_quote(orjson.dumps(fields).decode())]
        return " ".join([*words, f"'http://127.0.0.1:8080{prefix}{path}{query}'"])

    def _text(self, operation: Operation, around: str, name: str) -> str | None:
        before = operation.name, around, (operation.path or "/").split("/")[1]
        for key in (*(f"{each}.{name}" for each in before), name):
            if key in self._texts:
                return self._texts[key]
        return None

    def _value(self, operation: Operation, name: str, schema: Schema, around: str = "") -> Any:
        kinds = kinds_of(schema)
        if ("anyOf" in schema or "null" in kinds) and name in _NEVER and around != "ended":
            return None
        if "anyOf" in schema:
            return self._value(operation, name, schema["anyOf"][0], around)
        if "enum" in schema:
            return schema.get("default", schema["enum"][0])
        match kinds[0] if kinds else "":
            case "object":
                if "properties" in schema:
                    return {key: self._value(operation, key, each, name) for key, each in schema["properties"].items()}
                inner = schema.get("additionalProperties", {})
                return {_KEYS.get(name, "name"): self._value(operation, name, inner, around)}
            case "array":
                return [self._value(operation, name, schema.get("items", {}), around)]
            case "string":
                return self._text(operation, around, name) or ""
            case "boolean":
                return schema.get("default", False)
            case "integer" | "number":
                return _number(name, schema)
        return _ANY.get(name, {})


def _number(name: str, schema: Schema) -> float:
    if schema.get("default") is not None:
        default: float = schema["default"]
        return default
    if name.endswith("_at") or name in _TIMES or "Unix seconds" in schema.get("description", ""):
        return _AT
    lowest, highest = schema.get("minimum", 0), schema.get("maximum", 2**53)
    return int(max(lowest, min(_NUMBERS.get(name, 1), highest)))


_NUMBERS: Final[Mapping[str, int]] = {
    "ack_wait_ms": 30_000,
    "default_ack_wait_ms": 30_000,
    "bytes": 2048,
    "database": 40_960,
    "delay": 60,
    "free": 10_737_418_240,
    "grace_ms": 3_600_000,
    "http_port": 8080,
    "messages": 12,
    "number": 12,
    "pid": 4711,
    "rate": 100,
    "size": 512,
    "ttl_ms": 86_400_000,
    "ttl_seconds": 86_400,
}
