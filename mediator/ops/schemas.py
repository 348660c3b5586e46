"""JSON schemas of what operations take and answer: short words for what many of them share."""

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

RIGHT = "x-right"
"""Marks a part of an answer that only actors with this right see."""

REDACTED = "x-redacted"
"""Marks a text that only actors with this right see whole; others, and the audit log, get its beginning and a hash."""

LOGIN = "x-login"
"""Marks URLs whose user and password leave by the control socket alone."""

ONCE = "x-once"
"""Marks secrets of an answer that nobody can ask for again; the console shows them where the form was sent, once."""

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
TIME: Schema = {"type": "number", "description": "Unix seconds"}
TEXTS: Schema = {"type": "array", "items": TEXT}
ANY: Schema = {}
TENANT: Schema = {"type": "string", "description": "The tenant; `default` if it is absent."}
ADDRESS: Schema = {"type": "string", REDACTED: "read-payload"}
"""An address, which is the right to read (A7)."""
MAIL_ADDRESS: Schema = {
    **ADDRESS,
    "minLength": 1,
    "description": "The address of a mailbox, or `id:` and its number.",
}
INVITATION: Schema = {"type": "string", REDACTED: "operate"}
"""The id of an invitation, of which its links are made."""
GROUP_NAME: Schema = {"type": "string", "description": "A consumer group; the default group if it is absent."}
PLACE: Mapping[str, Schema] = {"tenant": TENANT, "mail_address": MAIL_ADDRESS}
"""The fields of an operation on one mailbox."""
LANE: Schema = {"type": "string", "enum": ["critical", "urgent", "normal", "low"]}
FINDINGS: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"level": TEXT, "text": TEXT, "advice": TEXT},
        "required": ["level", "text", "advice"],
    },
}


def about(schema: Schema, description: str, **more: Any) -> Schema:
    """Return a schema with a description, and perhaps more words."""
    return {**schema, "description": description, **more}


def whole(description: str, lowest: int, highest: int, **more: Any) -> Schema:
    """Return the schema of a whole number within bounds."""
    return {"type": "integer", "minimum": lowest, "maximum": highest, "description": description, **more}


def limit(highest: int) -> Schema:
    """Return the schema of how many items to list at most, 100 by default."""
    return whole("List at most this many.", 1, highest, default=min(100, highest))


def or_null(schema: Schema) -> Schema:
    """Return a schema that also allows null."""
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def obj(**properties: Schema) -> Schema:
    """Return the schema of an object that has all these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def many(items: Schema) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": items}


def table(values: Schema) -> Schema:
    """Return the schema of an object whose names are not known before."""
    return {"type": "object", "additionalProperties": values}


def once(schema: Schema) -> Schema:
    """Return the schema of secrets that were made for this answer, and are in no other."""
    return {**schema, ONCE: True}


def payload(schema: Schema) -> Schema:
    """Return the schema of a property that only actors with the right ``read-payload`` see; others' answers lack it."""
    return {**schema, RIGHT: "read-payload"}
