"""The OpenAPI 3.1 document of the admin API, written from the operations."""

import re
from collections.abc import Iterable
from typing import Any

from mediator import __version__
from mediator.ops.operations import Operation
from mediator.ops.schemas import Schema

Json = dict[str, Any]

_IN_PATH = re.compile(r"{(\w+)}")
_ERROR: Json = {
    "description": "Refused, with a code of the table of errors.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}


def path_fields(operation: Operation) -> tuple[str, ...]:
    """Return the fields of an operation that are in its path."""
    return tuple(_IN_PATH.findall(operation.path or ""))


def write_document(operations: Iterable[Operation], prefix: str) -> Json:
    """Return the document of those operations that have a path."""
    paths: dict[str, Json] = {}
    for operation in operations:
        if operation.path is not None:
            paths.setdefault(operation.path, {})[operation.method.lower()] = _describe(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Mediator: admin API",
            "version": __version__,
            "description": "Everything that the console and the operator's commands do. Rights: `read`, `operate`, "
            "`read-payload`, `admin`. What changes something, and who reads a payload, stands in the audit log.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": prefix}],
        "security": [{"token": []}, {"session": []}],
        "paths": dict(sorted(paths.items())),
        "components": {
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "A token of an operator."},
                "session": {
                    "type": "apiKey",
                    "in": "cookie",
                    "name": "mediator",
                    "description": "A session of the console; changes also need the header X-CSRF-Token.",
                },
            },
            "schemas": {
                "Error": {
                    "type": "object",
                    "properties": {"error": {"type": "string"}, "code": {"type": "string"}},
                    "required": ["error", "code"],
                }
            },
        },
    }


def _describe(operation: Operation) -> Json:
    in_path = path_fields(operation)
    others = {name: schema for name, schema in operation.fields.items() if name not in in_path}
    described: Json = {
        "operationId": operation.name,
        "summary": operation.summary,
        "description": f"Needs the right `{operation.right}`.",
        "tags": [(operation.path or "/").split("/")[1]],
        "x-right": operation.right.value,
        "parameters": [_parameter(name, operation.fields[name], "path", True) for name in in_path],
        "responses": {
            "200": {
                "description": "Done.",
                "content": {"application/json": {"schema": _answer(operation.answer)}},
            },
            "default": _ERROR,
        },
    }
    if operation.method in {"GET", "DELETE"}:
        described["parameters"] += [
            _parameter(name, schema, "query", name in operation.required) for name, schema in others.items()
        ]
    elif others:
        required = [name for name in operation.required if name not in in_path]
        schema = {"type": "object", "properties": others, "additionalProperties": False, "required": required}
        described["requestBody"] = {
            "required": bool(required),
            "content": {"application/json": {"schema": schema}},
        }
    return described


def _parameter(name: str, schema: Schema, place: str, required: bool) -> Json:
    inner = {key: value for key, value in schema.items() if key != "description"}
    if place == "query" and isinstance(inner.get("type"), list):
        # A query has no null: the parameter is left out.
        inner["type"] = next(kind for kind in inner["type"] if kind != "null")
    if place == "path" and inner.get("type") == "string":
        inner.setdefault("minLength", 1)
    return {
        "name": name,
        "in": place,
        "required": required,
        "schema": inner,
        **({"description": schema["description"]} if "description" in schema else {}),
    }


def _answer(schema: Schema) -> Schema:
    """Return the schema of an answer in which what only some may see can be missing."""
    shown = dict(schema)
    if "properties" in shown:
        kept = {name for name, inner in shown["properties"].items() if "x-right" not in inner}
        shown["properties"] = {name: _answer(inner) for name, inner in shown["properties"].items()}
        shown["required"] = [name for name in shown.get("required", ()) if name in kept]
    if "items" in shown:
        shown["items"] = _answer(shown["items"])
    return shown
