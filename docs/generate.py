"""Writes the pages of documentation that are made from the program: ``python docs/generate.py``."""

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from mediator.endpoint import Endpoint
from mediator.settings import Settings, Tenant, User
from mediator.settings_sources import CONFIG_VARIABLE, options, variable_name

_HEAD = f"""\
# Configuration

<!-- Made by docs/generate.py from mediator/settings.py; edit there. -->

Every option has a default that works; most installations set a handful. Values come from, the first wins:

1. flags of the command line (`mediator serve --help` lists them),
2. the environment: the variable named with each option; an empty one counts as not set. Tables and lists are JSON,
3. a TOML file: `--config FILE`, or `{CONFIG_VARIABLE}`; an option it does not know is an error,
4. the default.

Tables are merged over the sources key by key, lists are taken whole. A service that is configured wrongly does not
start: it names each wrong option, where its value stands, and what was expected.

```toml
# mediator.toml: an example, open to the network
data_dir = "/var/lib/mediator"
nats = "0.0.0.0:4222"

[quotas]
mailbox_messages = 100000

[tenants.acme]
users = [{{ name = "acme", password = "change me" }}]
```

`mediator serve --nats 0.0.0.0:4300`, `MEDIATOR_NATS=0.0.0.0:4300` and `nats = "0.0.0.0:4300"` say the same;
so do `MEDIATOR_QUOTAS__MAILBOX_MESSAGES=100000` and the table above.
"""


def configuration() -> str:
    """Return docs/configuration.md: each option with its values, default, variable and advice."""
    sections = [_HEAD, "## Options\n"]
    sections += [
        _option(path, field) for path, field in options(Settings) if len(path) == 1 and _table_of(field) is None
    ]
    for path, field in options(Settings):
        if (table := _table_of(field)) is not None:
            sections.append(f"## {path[0]}\n\n{_sentence(table)}\n")
            sections += [_option((*path, *inner), inside) for inner, inside in options(table)]
    sections.append(f"## tenants.NAME\n\n{_sentence(Tenant)}\n")
    sections += [_plain(("tenants", "NAME", *path), field) for path, field in options(Tenant)]
    sections.append(f"## tenants.NAME.users\n\n{_sentence(User)} Each entry of the list has:\n")
    sections += [_plain(path, field) for path, field in options(User)]
    return "\n".join(sections)


PAGES: dict[str, Callable[[], str]] = {"configuration.md": configuration}


def _option(path: tuple[str, ...], field: FieldInfo) -> str:
    facts = f"{_values(field)} · default: {_default(field)} · `{variable_name(path)}`"
    return f"### {'.'.join(path)}\n\n{facts}\n\n{field.description}\n"


def _plain(path: tuple[str, ...], field: FieldInfo) -> str:
    return f"### {'.'.join(path)}\n\n{_values(field)}\n\n{field.description}\n"


def _sentence(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip()


def _table_of(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _default(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "default_text" in extra:
        return str(extra["default_text"])
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is None:
        return "none"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _values(field: FieldInfo) -> str:
    annotation: Any = field.annotation
    if get_origin(annotation) in {Union, types.UnionType}:
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is not None and hasattr(annotation, "__metadata__"):
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{word}`" for word in get_args(annotation))
    if annotation in _KINDS:
        return _KINDS[annotation] + _range(field)
    return {dict: "table", list: "list"}[get_origin(annotation)]


_KINDS: dict[Any, str] = {
    bool: "`true` or `false`",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
    Endpoint: "HOST:PORT",
    SecretStr: "text, secret",
}


def _range(field: FieldInfo) -> str:
    bounds = {name: getattr(rule, name) for rule in field.metadata for name in ("ge", "le") if hasattr(rule, name)}
    if "le" in bounds:
        return f", {bounds['ge']} to {bounds['le']}"
    return f", at least {bounds['ge']}" if "ge" in bounds else ""


if __name__ == "__main__":
    for name, page in PAGES.items():
        Path(__file__).with_name(name).write_text(page(), encoding="utf-8")
