"""The sources of options (flags, environment, TOML file), and error messages for wrong values."""

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource

from mediator.errors import SetupError

ENV_PREFIX = "MEDIATOR_"
CONFIG_VARIABLE = f"{ENV_PREFIX}CONFIG"

NO_FILE = "no file"
"""Stands for the file where none is named."""

OptionPath = tuple[int | str, ...]

_ENVIRONMENT = "the environment"
_NAMED = re.compile(r"[a-z_]+: ")
"""How the error of a section begins when it concerns one of its options."""
_EXPECTED = {
    "missing": "expected a value, there is none",
    "int_parsing": "expected a whole number",
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "int_parsing_size": "expected a whole number",
    "float_parsing": "expected a number",
    "float_type": "expected a number",
    "finite_number": "expected a number",
    "bool_parsing": "expected true or false",
    "bool_type": "expected true or false",
    "list_type": "expected a list",
    "dict_type": "expected a table of options",
    "model_type": "expected a table of options",
    "model_attributes_type": "expected a table of options",
    "string_type": "expected text",
    "path_type": "expected text",
    "dataclass_type": "expected HOST:PORT",
    "dataclass_exact_type": "expected HOST:PORT",
}


class Source(NamedTuple):
    """The values of one source, and its name for operators."""

    values: Mapping[str, Any]
    where: str

    def names(self, path: OptionPath) -> bool:
        """Whether this source sets the option at ``path``, or a part of it."""
        here: Any = self.values
        for depth, step in enumerate(path):
            try:
                here = here[step]
            except (KeyError, IndexError, TypeError):
                return depth > 0 and not isinstance(here, Mapping)
        return True


class Environment(EnvSettingsSource):
    """The environment; it collects problems instead of stopping at the first."""

    def __init__(self, settings: type[BaseSettings]) -> None:
        super().__init__(settings)
        self.problems: list[str] = []

    def prepare_field_value(self, field_name: str, field: FieldInfo, value: Any, value_is_complex: bool) -> Any:
        """Read one option; a value that should be JSON but is not becomes a problem."""
        try:
            return super().prepare_field_value(field_name, field, value, value_is_complex)
        except ValueError:
            self.problems.append(f"{field_name}: expected JSON (from {_variable((field_name,))})")
            return None

    def source(self) -> Source:
        """Return the values that are set."""
        return Source(self(), _ENVIRONMENT)


def read_file(path: Path | None) -> Source:
    """Read the TOML file at ``path``, else at MEDIATOR_CONFIG; SetupError if it is named and cannot be read."""
    if path is None:
        if not (named := os.environ.get(CONFIG_VARIABLE)):
            return Source({}, NO_FILE)
        path = Path(named)
    try:
        return Source(tomllib.loads(path.read_text(encoding="utf-8-sig")), str(path))
    except OSError as error:
        raise SetupError(f"config: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SetupError(f"config: {path} is not UTF-8, byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        # The parser's text may quote a line with a password, so only the place is shown.
        place = str(error).rpartition("(")[2].rstrip(")")
        raise SetupError(f"config: {path} is not TOML, {place}") from None


def merge(sources: tuple[Source, ...]) -> dict[str, Any]:
    """Merge tables key by key, the first source wins; lists and values are taken whole."""
    merged: dict[str, Any] = {}
    for source in reversed(sources):
        merged = _over(merged, source.values)
    return merged


def explain(error: ValidationError, sources: tuple[Source, ...], model: type[BaseModel]) -> list[str]:
    """Return a line for each problem: the option, what was expected, the value unless it is secret, and its source."""
    details = [detail for detail in error.errors() if detail["type"] != "default_factory_not_called"]
    return [line for detail in details for line in _lines(detail, sources, model)]


def options(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Yield every option of ``model`` with its path, a section before its options."""
    for name, field in model.model_fields.items():
        yield (*above, name), field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from options(field.annotation, (*above, name))


def variable_name(path: OptionPath) -> str:
    """Return the environment variable of the option at ``path``."""
    return ENV_PREFIX + "__".join(str(step).upper() for step in path)


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        merged[name] = _over(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _lines(detail: ErrorDetails, sources: tuple[Source, ...], model: type[BaseModel]) -> Iterator[str]:
    path = tuple(step for step in detail["loc"] if step != "[key]")
    if not path:
        # A rule over several options; its text has a line for each problem, which begins with the option.
        for line in str(detail["ctx"]["error"]).split("\n"):
            yield line + _origin(tuple(line.partition(":")[0].split(".")), sources)
        return
    expected = _expected(detail, model)
    if detail["type"] == "value_error" and _NAMED.match(expected):
        option, _, expected = expected.partition(": ")
        path = (*path, option)
    place = path[:-1] if detail["type"] == "missing" else path
    yield f"{'.'.join(map(str, path))}: {expected}{_found(detail, path, model)}{_origin(place, sources)}"


def _expected(detail: ErrorDetails, model: type[BaseModel]) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    match kind:
        case "value_error":
            return str(context["error"])
        case "extra_forbidden":
            *above, last = detail["loc"]
            siblings = [path[-1] for path, _ in options(model) if path[:-1] == tuple(above)]
            near = difflib.get_close_matches(str(last), siblings, n=1)
            return (
                f"unknown option, did you mean {'.'.join([*map(str, above), near[0]])}?" if near else "unknown option"
            )
        case "greater_than_equal":
            return f"expected at least {context['ge']:.15g}"
        case "less_than_equal":
            return f"expected at most {context['le']:.15g}"
        case "literal_error" | "enum":
            return f"expected {context['expected']}".replace("'", "")
        case "string_pattern_mismatch":
            return f"expected text that matches {context['pattern']}"
        case "too_short" | "string_too_short":
            return f"expected at least {context['min_length']} characters"
    return _EXPECTED.get(kind) or f"expected otherwise: {detail['msg']}"


def _found(detail: ErrorDetails, path: OptionPath, model: type[BaseModel]) -> str:
    value = detail["input"]
    if detail["type"] == "extra_forbidden" or not isinstance(value, str | int | float) or path[0] == "tenants":
        return ""
    return "" if is_secret(path, model) else f", got {str(value)[:80]!r}"


def is_secret(path: OptionPath, model: type[BaseModel]) -> bool:
    """Whether an option on the way to ``path`` holds a secret; one that the settings do not know may."""
    known: dict[OptionPath, FieldInfo] = dict(options(model))
    field = next((known[path[:length]] for length in range(len(path), 0, -1) if path[:length] in known), None)
    if field is None:
        return True
    marked = isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get("secret"))
    return marked or "SecretStr" in str(field.annotation)


def origin(path: OptionPath, sources: tuple[Source, ...]) -> str:
    """Return the source that an option's value comes from: its variable, a file, or the command line; else empty."""
    for source in sources:
        if source.names(path):
            return _variable(path) if source.where == _ENVIRONMENT else source.where
    return ""


def _origin(path: OptionPath, sources: tuple[Source, ...]) -> str:
    return f" (from {found})" if (found := origin(path, sources)) else ""


def _variable(path: OptionPath) -> str:
    """Return the most specific variable that is set for ``path``."""
    names = {name.upper() for name in os.environ}
    candidates = (variable_name(path[:length]) for length in range(len(path), 0, -1))
    return next((name for name in candidates if name in names), _ENVIRONMENT)
