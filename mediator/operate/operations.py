"""What operators can ask of a running service: one registry for the control socket, the admin API and the console.

An :class:`Operation` takes a JSON object and returns one. It says which right it needs, and describes its fields and
its answer as JSON schemas, from which the admin API and its OpenAPI document are made. Most are methods that the
decorator :func:`operation` describes. :meth:`Operations.run` checks the right and the request, runs the operation,
removes from its answer what the actor may not see, and audits what changes something; doors call nothing else.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypedDict, TypeVar, Unpack

from mediator.endpoint import without_login
from mediator.errors import BadRequestError, MediatorError, NoSuchMailboxError, NotAllowedError, SetupError
from mediator.fields import decimal_number, whole_number
from mediator.mailboxes.address import DEFAULT_TENANT, MAX_ADDRESS, NUMBERED, redact

MAX_REQUEST = 64 * 1024
"""Bytes of a request, unless its operation allows more, up to :data:`MAX_LONG_REQUEST`."""
MAX_LONG_REQUEST = 4 * 1024 * 1024
OPERATION_SECONDS = 25.0
_MAX_DIGITS = 18
DESCRIBED = "describe_operation"
"""The attribute of a method that an operation is made of."""
"""The attribute of a method that makes its :class:`Operation`."""

_IN_PATH = re.compile(r"{(\w+)}")

C = TypeVar("C", bound=Callable[..., Any])

OperationRequest = dict[str, Any]
Answer = dict[str, Any]
Command = Callable[[OperationRequest], Awaitable[Answer]]
"""Gets the request, returns the fields of the answer, raises :class:`MediatorError` to refuse."""
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
ADDRESS_FIELDS = ("mail_address", "to_address")
"""Fields in which the number of a mailbox may stand in place of its address."""
LANE: Schema = {"type": "string", "enum": ["critical", "urgent", "normal", "low"]}


class Right(StrEnum):
    """What an operation needs its actor to be allowed."""

    READ = "read"
    OPERATE = "operate"
    READ_PAYLOAD = "read-payload"
    ADMIN = "admin"


ROLES: Mapping[str, frozenset[Right]] = {
    "read": frozenset({Right.READ}),
    "operate": frozenset({Right.READ, Right.OPERATE}),
    "read-payload": frozenset({Right.READ, Right.READ_PAYLOAD}),
    "admin": frozenset(Right),
}
"""The rights of each role; who has several roles has the rights of all."""


@dataclass(frozen=True, slots=True)
class Actor:
    """Who asks: a name for the audit log, rights, and the way in.

    That is ``socket``, ``token``, ``session``, ``local``, ``signal``, or ``command`` where no service runs.
    """

    name: str
    rights: frozenset[Right]
    via: str


_NOBODY = Actor("", frozenset(), "")
_actor: ContextVar[Actor] = ContextVar("actor", default=_NOBODY)


def is_allowed(right: Right) -> bool:
    """Whether the actor of the operation that runs has a right."""
    return right in _actor.get().rights


def show_secret(text: str, right: Right) -> str:
    """Return what the actor of the operation that runs sees of a text: all of it with a right, else a part (A7)."""
    return text if is_allowed(right) else redact(text)


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that operators can ask for."""

    name: str
    """The command of the control socket, such as ``mailbox-show``."""
    run: Command
    right: Right
    summary: str
    answer: Schema
    fields: Mapping[str, Schema] = field(default_factory=dict)
    """The schema of each field. One with a ``default`` gets it when the request has none; the audit log does not keep
    one that is ``writeOnly``, nor one with password, secret, token or payload in its name."""
    required: tuple[str, ...] = ()
    """Fields that the request must have, beside those in the path."""
    method: str = "GET"
    path: str | None = None
    """The path below ``/api/v1``, with fields in braces; None: on the control socket alone."""
    audited: bool = True
    """Whether it goes to the audit log, if it changes something or shows payloads; steps of jobs have their history."""
    within: float = OPERATION_SECONDS
    """Seconds after which it is given up."""
    longest: int = MAX_REQUEST
    """Bytes of a request, at most :data:`MAX_LONG_REQUEST`."""

    @property
    def path_fields(self) -> tuple[str, ...]:
        """The fields in its path."""
        return tuple(_IN_PATH.findall(self.path or ""))

    @property
    def is_act(self) -> bool:
        """Whether it changes something or shows payloads, and so goes to the audit log."""
        return self.audited and (self.method != "GET" or self.right is Right.READ_PAYLOAD)

    def secrets_of(self, answer: Answer) -> Answer:
        """Return what an answer shows this once and never again."""
        shown = self.answer.get("properties", {})
        return {name: value for name, value in answer.items() if value and ONCE in shown.get(name, {})}


class OperationOptions(TypedDict, total=False):
    """The fields of :class:`Operation` that have defaults."""

    fields: Mapping[str, Schema]
    required: tuple[str, ...]
    method: str
    path: str | None
    audited: bool
    within: float
    longest: int


def operation(
    name: str, right: Right, summary: str, answer: Schema, **options: Unpack[OperationOptions]
) -> Callable[[C], C]:
    """Describe the operation that the decorated method runs; :meth:`Operations.add_methods` adds it."""

    def describe(method: C) -> C:
        setattr(method, DESCRIBED, lambda run: Operation(name, run, right, summary, answer, **options))
        return method

    return describe


Audit = Callable[[Actor, Operation, OperationRequest, str], Awaitable[None]]
"""Keeps an act and its result: ``ok``, or the code of the error."""
FindAddress = Callable[[str, int], Awaitable[str | None]]
"""Returns the address of a tenant's mailbox by its number; None if there is none."""


class Operations:
    """The operations of a service. Used on the event loop."""

    def __init__(self, audit: Audit | None = None, find_address: FindAddress | None = None) -> None:
        self.examples: dict[str, str] = {}
        """Texts for examples of the parts' fields; see :mod:`mediator.operate.examples`."""
        self._operations: dict[str, Operation] = {}
        self._audit = audit
        self._find_address = find_address

    def add(self, *operations: Operation) -> None:
        """Answer more operations; :class:`SetupError` when a name, or a method on a path, is taken."""
        for one in operations:
            for other in self._operations.values():
                if other.name == one.name or (one.path and (other.method, other.path) == (one.method, one.path)):
                    raise SetupError(f"two parts bring the operation {one.name}; uninstall one of them")
            self._operations[one.name] = one

    def add_methods(self, owner: object) -> None:
        """Add the operations that methods of ``owner`` are decorated as; raises as :meth:`add`."""
        for name, method in vars(type(owner)).items():
            if (describe := getattr(method, DESCRIBED, None)) is not None:
                self.add(describe(getattr(owner, name)))

    def all(self) -> list[Operation]:
        """Return the operations in order of their names."""
        return [self._operations[name] for name in sorted(self._operations)]

    def get(self, name: object) -> Operation:
        """Return an operation; :class:`BadRequestError` lists those that exist."""
        if not isinstance(name, str) or name not in self._operations:
            raise BadRequestError("command", f"expected one of {', '.join(sorted(self._operations))}")
        return self._operations[name]

    async def run(self, actor: Actor, name: object, request: OperationRequest) -> Answer:
        """Return the answer, without what the actor may not see.

        Raises :class:`MediatorError` when the operation is unknown, refused or fails, :class:`TimeoutError` when it
        takes too long.
        """
        operation, request = self.get(name), dict(request)
        if not operation.is_act or self._audit is None:
            return await self._run(actor, operation, request)
        result = "internal"
        try:
            answer = await self._run(actor, operation, request)
            result = "ok"
        except MediatorError as error:
            result = error.code
            raise
        except TimeoutError:
            result = "timeout"
            raise
        finally:
            await self._audit(actor, operation, request, result)
        return answer

    async def record(self, actor: Actor, operation: Operation, result: str) -> None:
        """Keep in the audit log what somebody did without :meth:`run`."""
        if self._audit is not None:
            await self._audit(actor, operation, {}, result)

    async def _run(self, actor: Actor, operation: Operation, request: OperationRequest) -> Answer:
        """Run an operation; ``request``, which is audited, gets its fields as they were read.

        A number in place of an address becomes the address.
        """
        if operation.right not in actor.rights:
            raise NotAllowedError(operation.right)
        named = {name: request[name] for name in ADDRESS_FIELDS if isinstance(request.get(name), str)}
        checked = request
        before = _actor.set(actor)
        try:
            async with asyncio.timeout(operation.within):
                checked = check_request(operation, request)
                for name, text in named.items():
                    if text.startswith(NUMBERED) and self._find_address is not None:
                        checked[name] = await self._get_address(checked, text)
                request |= {name: checked[name] for name in request}
                answer: Answer = _as_seen(await operation.run(checked), operation.answer)
                return answer
        except NoSuchMailboxError as error:
            if not named:
                raise
            # The error may know an address that the actor does not.
            asked = {checked[name]: text for name, text in named.items()}
            raise NoSuchMailboxError(asked.get(error.address, next(iter(named.values())))[:MAX_ADDRESS]) from None
        finally:
            _actor.reset(before)

    async def _get_address(self, request: OperationRequest, named: str) -> str:
        assert self._find_address is not None
        number, tenant = read_numbered(named), request.get("tenant") or DEFAULT_TENANT
        address = None if number is None else await self._find_address(tenant, number)
        if address is None:
            raise NoSuchMailboxError(named)
        return address


def _as_seen(value: Any, schema: Schema) -> Any:
    """Return a copy of a part of an answer as the actor may see it, as its schema says."""
    if isinstance(value, str):
        if REDACTED in schema:
            return show_secret(value, Right(schema[REDACTED]))
        return without_login(value) if LOGIN in schema and _actor.get().via != "socket" else value
    for choice in schema.get("anyOf", ()):
        value = _as_seen(value, choice)
    if isinstance(value, dict):
        shown, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        return {
            name: _as_seen(item, shown.get(name, others))
            for name, item in value.items()
            if RIGHT not in shown.get(name, {}) or is_allowed(Right(shown[name][RIGHT]))
        }
    if isinstance(value, list) and "items" in schema:
        return [_as_seen(item, schema["items"]) for item in value]
    return value


_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def kinds_of(schema: Schema) -> tuple[str, ...]:
    """Return the types that a schema names, none if it allows any."""
    kind = schema.get("type", ())
    return (kind,) if isinstance(kind, str) else tuple(kind)


def check_request(operation: Operation, request: OperationRequest) -> OperationRequest:
    """Return a request as its schemas have it: with defaults, and numbers in place of what stands for them (N4).

    Raises :class:`BadRequestError`, which names the first field that is missing, of another type, or out of bounds.
    Fields that the operation does not know are left as they are.
    """
    checked = {name: schema["default"] for name, schema in operation.fields.items() if "default" in schema}
    for name, value in request.items():
        schema = operation.fields.get(name)
        checked[name] = value if schema is None else _check(name, value, schema)
    for name in (*operation.required, *operation.path_fields):
        if name not in checked:
            raise BadRequestError(name, "expected a value, there is none")
    return checked


def _check(name: str, value: Any, schema: Schema) -> Any:
    kinds = kinds_of(schema)
    if "integer" in kinds or "number" in kinds:
        number = whole_number(value) if "integer" in kinds else decimal_number(value)
        value = value if number is None else number
    allowed = tuple(each for kind in kinds for each in _TYPES[kind])
    if kinds and (not isinstance(value, allowed) or (isinstance(value, bool) and "boolean" not in kinds)):
        raise BadRequestError(name, f"expected {' or '.join(kinds)}")
    if isinstance(value, list) and "items" in schema:
        return [_check(f"{name}[{at}]", item, schema["items"]) for at, item in enumerate(value)]
    if isinstance(value, dict) and ("properties" in schema or "additionalProperties" in schema):
        parts, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        return {key: _check(f"{name}.{key}", item, parts.get(key, others)) for key, item in value.items()}
    if "enum" in schema and value is not None and value not in schema["enum"]:
        raise BadRequestError(name, f"expected {', '.join(map(str, schema['enum']))}")
    if isinstance(value, str):
        # PostgreSQL keeps no NUL, and neither database keeps halves of characters.
        if "\0" in value or not _is_unicode(value):
            raise BadRequestError(name, "expected text without NUL")
    elif isinstance(value, int | float):
        lowest, highest = schema.get("minimum", -(2**63)), schema.get("maximum", 2**63 - 1)
        if not lowest <= value <= highest:
            passed = f"{lowest} or more" if value < lowest else f"at most {highest}"
            bounds = f"{lowest} to {highest}" if "maximum" in schema else passed
            raise BadRequestError(name, f"expected {bounds}")
    return value


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_numbered(text: str) -> int | None:
    """Return the number in ``id:12``, which stands for an address; None in any other text."""
    digits = text.removeprefix(NUMBERED)
    known = digits != text and digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS
    return int(digits) if known else None


def read_optional_time(request: OperationRequest, name: str) -> int | None:
    """Return milliseconds since the epoch, given as Unix seconds; None if they are absent or null."""
    value = request.get(name)
    if value is None:
        return None
    seconds = decimal_number(value)
    if seconds is None or not 0 <= seconds < 1e12:
        raise BadRequestError(name, "expected Unix seconds")
    return int(seconds * 1000)


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


def object_schema(**properties: Schema) -> Schema:
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
