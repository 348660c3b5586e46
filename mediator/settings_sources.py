"""Where values of options come from (flags, environment, TOML file) and what is said about a wrong one."""

import difflib
import os
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

OptionPath = tuple[int | str, ...]

_ENVIRONMENT = "the environment"
_SECRETS = frozenset(
    {"password", "api_tokens", "database_url", "nats_url", "key", "control_key", "public_url", "push_webhook"}
)
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
    """The values one source gives, and how an operator would call it."""

    values: Mapping[str, Any]
    where: str

    def names(self, path: OptionPath) -> bool:
        """Whether this source says anything about the option at ``path``, or about a part of it."""
        here: Any = self.values
        for depth, step in enumerate(path):
            try:
                here = here[step]
            except (KeyError, IndexError, TypeError):
                return depth > 0 and not isinstance(here, Mapping)
        return True


class Environment(EnvSettingsSource):
    """The environment, collecting what cannot be read instead of stopping at the first."""

    def __init__(self, settings: type[BaseSettings]) -> None:
        super().__init__(settings)
        self.problems: list[str] = []

    def prepare_field_value(self, field_name: str, field: FieldInfo, value: Any, value_is_complex: bool) -> Any:
        """Read one option; a value that should be JSON and is not is kept as a problem."""
        try:
            return super().prepare_field_value(field_name, field, value, value_is_complex)
        except ValueError:
            self.problems.append(f"{field_name}: expected JSON (from {_variable((field_name,))})")
            return None

    def source(self) -> Source:
        """The values that are set."""
        return Source(self(), _ENVIRONMENT)


def read_file(path: Path | None) -> Source:
    """Read the TOML file at ``path``, else at MEDIATOR_CONFIG; SetupError if it is named and cannot be read."""
    if path is None:
        if not (named := os.environ.get(CONFIG_VARIABLE)):
            return Source({}, "no file")
        path = Path(named)
    try:
        return Source(tomllib.loads(path.read_text(encoding="utf-8")), str(path))
    except OSError as error:
        raise SetupError(f"config: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SetupError(f"config: {path} is not UTF-8, byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        # The parser's text may quote the line it stumbled over, and with it a password: only its place is told.
        place = str(error).rpartition("(")[2].rstrip(")")
        raise SetupError(f"config: {path} is not TOML, {place}") from None


def merge(sources: tuple[Source, ...]) -> dict[str, Any]:
    """Merge tables key by key, the first source winning; lists and values are taken whole."""
    merged: dict[str, Any] = {}
    for source in reversed(sources):
        merged = _over(merged, source.values)
    return merged


def explain(error: ValidationError, sources: tuple[Source, ...], model: type[BaseModel]) -> list[str]:
    """One line for each problem: the option, what was expected, what stood there unless it is secret, and where."""
    details = [detail for detail in error.errors() if detail["type"] != "default_factory_not_called"]
    return [line for detail in details for line in _lines(detail, sources, model)]


def options(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every option of ``model`` with its path, a group before what is in it."""
    for name, field in model.model_fields.items():
        yield (*above, name), field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from options(field.annotation, (*above, name))


def variable_name(path: OptionPath) -> str:
    """The environment variable for the option at ``path``."""
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
        # A rule over several options: its text already is a line for each problem, beginning with the option.
        for line in str(detail["ctx"]["error"]).split("\n"):
            yield line + _origin(tuple(line.partition(":")[0].split(".")), sources)
        return
    place = path[:-1] if detail["type"] == "missing" else path
    yield f"{'.'.join(map(str, path))}: {_expected(detail, model)}{_found(detail, path)}{_origin(place, sources)}"


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


def _found(detail: ErrorDetails, path: OptionPath) -> str:
    value = detail["input"]
    if detail["type"] == "extra_forbidden" or not isinstance(value, str | int | float) or path[0] == "tenants":
        return ""
    return "" if _SECRETS.intersection(map(str, path)) else f", got {str(value)[:80]!r}"


def _origin(path: OptionPath, sources: tuple[Source, ...]) -> str:
    for source in sources:
        if source.names(path):
            return f" (from {_variable(path) if source.where == _ENVIRONMENT else source.where})"
    return ""


def _variable(path: OptionPath) -> str:
    """The variable that is set and says most exactly what stands at ``path``."""
    names = {name.upper() for name in os.environ}
    candidates = (variable_name(path[:length]) for length in range(len(path), 0, -1))
    return next((name for name in candidates if name in names), _ENVIRONMENT)
