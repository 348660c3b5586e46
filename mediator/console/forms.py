"""Reads the fields of an operation from a form, as its JSON schemas say."""

import json
from collections.abc import Sequence
from typing import Any

from multidict import MultiMapping

from mediator.errors import BadRequestError
from mediator.ops.operations import Operation
from mediator.ops.schemas import Schema

_TRUE = frozenset({"on", "true", "1"})


def read_form(operation: Operation, form: MultiMapping[str]) -> dict[str, Any]:
    """Return the request; an empty field is absent, unless it is a list, or text that cannot be null.

    Properties of an object are fields of their own, ``quotas.messages``, where an empty one stands for null. Raises
    :class:`BadRequestError`.
    """
    found: dict[str, Any] = {}
    for name, schema in operation.fields.items():
        given = form.getall(name, [])
        types = _types(schema)
        if "properties" in schema:
            parts = {key: (f"{name}.{key}", kind) for key, kind in schema["properties"].items()}
            texts = {key: form[field] for key, (field, _) in parts.items() if field in form}
            if texts:
                found[name] = {
                    key: _read(parts[key][0], text, parts[key][1]) if text else None for key, text in texts.items()
                }
        elif "array" in types:
            if name in form:
                found[name] = [_read(name, value, schema.get("items", {})) for value in given if value]
        elif given and (given[0] or ("string" in types and "null" not in types)):
            found[name] = _read(name, given[0], schema)
    return found


def _types(schema: Schema) -> Sequence[str]:
    types: str | Sequence[str] = schema.get("type", "object")
    return [types] if isinstance(types, str) else types


def _read(name: str, text: str, schema: Schema) -> Any:
    types = _types(schema)
    if "string" in types:
        return text
    if "boolean" in types:
        return text in _TRUE
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadRequestError(name, f"expected {' or '.join(types)}") from None
