"""Shows a JSON schema in the cell of a table."""

from collections.abc import Mapping
from typing import Any


def kind_of(schema: Mapping[str, Any], *, bounds: bool = False) -> str:
    """Return what values are allowed, in words, with their limits if ``bounds``; a named schema is a link."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(kind_of(each, bounds=bounds) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{word}`" for word in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`" if schema["const"] else '`""`'
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {kind_of(schema['items'], bounds=bounds)}" if schema.get("items") else "list"
    shown = " or ".join(kind) if isinstance(kind, list) else str(kind)
    return shown + _bounds(schema) if bounds else shown


def _bounds(schema: Mapping[str, Any]) -> str:
    shown = f", from {schema['minimum']}" if "minimum" in schema else ""
    shown += f" to {schema['maximum']}" if "maximum" in schema else ""
    shown += f", lowered to {schema['x-lowered-to']}" if "x-lowered-to" in schema else ""
    return shown + (f", at most {schema['maxLength']} characters" if "maxLength" in schema else "")
