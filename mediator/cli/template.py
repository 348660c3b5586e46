"""The file that ``mediator init`` writes: every option as a comment, generated from the settings."""

import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from mediator.parts import installed_settings

_WIDTH = 110
_HEAD = """\
# Configuration of the mediator. Lines that begin with #: options as they are by default, or examples of them.
# Take the # away from what you change, then run: mediator check --config THIS_FILE
# Each option can also come from the environment (MEDIATOR_MAX_PENDING=500), which wins over this file.
"""
_TENANTS = """\
# [tenants.acme]
# users = [{ name = "acme", password = "change me" }]
"""


def template() -> str:
    """Return the text of the file; without edits it changes nothing."""
    fields = installed_settings().model_fields
    tables = {name: field for name, field in fields.items() if _table(field)}
    parts = [_HEAD]
    parts += [
        "\n".join(_option(name, field)) for name, field in fields.items() if name not in tables and name != "tenants"
    ]
    for name, field in tables.items():
        model = _table(field)
        assert model is not None
        parts.append(f"{_comment(field.description or '')}\n# [{name}]")
        parts += ["\n".join(_option(inner, inside)) for inner, inside in model.model_fields.items()]
    parts.append(f"{_comment(fields['tenants'].description or '')}\n{_TENANTS}")
    return "\n\n".join(parts)


def _table(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _option(name: str, field: FieldInfo) -> Iterator[str]:
    yield _comment(field.description or "")
    yield f"# {name} = {_value(field.examples[0] if field.examples else field.default)}"


def _comment(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _value(default: Any) -> str:
    if isinstance(default, list):
        return f"[{', '.join(map(_value, default))}]"
    if isinstance(default, dict):
        return f"{{ {', '.join(f'{name} = {_value(value)}' for name, value in default.items())} }}"
    if default is PydanticUndefined or default is None:
        raise ValueError("an option without a plain default needs an example")
    if isinstance(default, bool):
        return str(default).lower()
    return str(default) if isinstance(default, int | float) else f'"{default}"'
