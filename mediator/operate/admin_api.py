"""The admin API: every operation with a path, as JSON over HTTP below ``/api/v1``, and its OpenAPI document."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import orjson
from aiohttp import hdrs, web
from multidict import MultiMapping

from mediator import __version__
from mediator.errors import BadRequestError
from mediator.http.app import Handler, answer_timeout, extend_time_limit
from mediator.operate.access import Access
from mediator.operate.examples import ExampleWriter
from mediator.operate.operations import Operation, OperationRequest, Operations, Right, Schema, kinds_of

Json = dict[str, Any]

_ERROR: Json = {
    "description": "Refused, with a code of the table of errors.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}
PREFIX = "/api/v1"
GRACE = 5.0
"""Seconds beyond an operation's own limit, for its request and its answer."""
_IN_QUERY = frozenset({hdrs.METH_GET, hdrs.METH_DELETE})
"""Methods whose fields are in the query; those of others are in the body."""
_TRUTH = {"true": True, "false": False}


def write_document(operations: Iterable[Operation], prefix: str, examples: ExampleWriter) -> Json:
    """Return the document of those operations that have a path, each with an example of a request and an answer."""
    paths: dict[str, Json] = {}
    for operation in operations:
        if operation.path is not None:
            paths.setdefault(operation.path, {})[operation.method.lower()] = _describe(operation, prefix, examples)
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


def _describe(operation: Operation, prefix: str, examples: ExampleWriter) -> Json:
    in_path, request = operation.path_fields, examples.request(operation)
    others = {name: schema for name, schema in operation.fields.items() if name not in in_path}
    described: Json = {
        "operationId": operation.name,
        "summary": operation.summary,
        "description": f"Needs the right `{operation.right}`.\n\n```sh\n{examples.command(operation, prefix)}\n```",
        "tags": [(operation.path or "/").split("/")[1]],
        "x-right": operation.right.value,
        "parameters": [_parameter(name, operation.fields[name], "path", True, request) for name in in_path],
        "responses": {
            "200": {
                "description": "Done.",
                "content": {
                    "application/json": {"schema": _answer(operation.answer), "example": examples.answer(operation)}
                },
            },
            "default": _ERROR,
        },
    }
    if operation.method in {"GET", "DELETE"}:
        described["parameters"] += [
            _parameter(name, schema, "query", name in operation.required, request) for name, schema in others.items()
        ]
    elif others:
        required = [name for name in operation.required if name not in in_path]
        schema = {"type": "object", "properties": others, "additionalProperties": False, "required": required}
        described["requestBody"] = {
            "required": bool(required),
            "content": {
                "application/json": {
                    "schema": schema,
                    "example": {name: value for name, value in request.items() if name not in in_path},
                }
            },
        }
    return described


def _parameter(name: str, schema: Schema, place: str, required: bool, request: OperationRequest) -> Json:
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
        **({"example": request[name]} if name in request else {}),
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


class AdminApi:
    """Serves the operations to programs that carry a token, and to pages of ours."""

    def __init__(self, operations: Operations, access: Access) -> None:
        self._operations = operations
        self._access = access
        self._document = b""

    def add_routes(self, app: web.Application) -> None:
        """Add a route for each operation that there is by now."""
        for operation in self._operations.all():
            if operation.path is not None:
                app.router.add_route(operation.method, PREFIX + operation.path, self._handler(operation))
        app.router.add_get(f"{PREFIX}/openapi.json", self._describe)
        examples = ExampleWriter(self._operations.examples)
        self._document = orjson.dumps(write_document(self._operations.all(), PREFIX, examples))

    def _handler(self, operation: Operation) -> Handler:
        async def answer(request: web.Request) -> web.Response:
            actor = self._access.require(request, Right.READ)
            extend_time_limit(request, operation.within + GRACE)
            # Who may not do it is told so, whatever else is wrong with the request.
            read = _read if operation.right in actor.rights else _read_refused
            fields = await read(operation, request)
            try:
                body = await self._operations.run(actor, operation.name, fields)
            except TimeoutError:
                return answer_timeout(operation.within)
            return web.Response(body=orjson.dumps(body), content_type="application/json")

        return answer

    async def _describe(self, request: web.Request) -> web.Response:
        self._access.require(request, Right.READ)
        return web.Response(body=self._document, content_type="application/json")


async def _read(operation: Operation, request: web.Request) -> OperationRequest:
    """Return the fields of a request, which are those of the operation; their values are checked when it is run."""
    in_path = operation.path_fields
    given = (
        await _read_body(operation, request) if operation.method not in _IN_QUERY else _read_query(operation, request)
    )
    if operation.method not in _IN_QUERY and request.query:
        raise BadRequestError(next(iter(request.query)), "expected in the body, not in the query")
    for name in given:
        if name not in operation.fields or name in in_path:
            raise BadRequestError(name[:100], "unknown field")
    return given | {name: _parse(request.match_info[name], operation.fields[name]) for name in in_path}


async def _read_refused(operation: Operation, request: web.Request) -> OperationRequest:
    """Return the fields that a request names which is refused anyway, for the audit log; what is wrong is left out."""
    given: dict[str, Any] = {}
    with suppress(BadRequestError):
        given |= _read_query(operation, request)
    with suppress(BadRequestError, web.HTTPException):
        given |= await _read_body(operation, request)
    given |= request.match_info
    return {name: given[name] for name in operation.fields if name in given}


async def _read_body(operation: Operation, request: web.Request) -> dict[str, Any]:
    body = await request.read()
    if len(body) > operation.longest:
        raise BadRequestError("body", f"expected at most {operation.longest} bytes")
    if not body:
        return {}
    if request.content_type != "application/json":
        raise BadRequestError("content-type", "expected application/json")
    try:
        given = orjson.loads(body)
    except ValueError:
        raise BadRequestError("body", "expected JSON") from None
    if not isinstance(given, dict):
        raise BadRequestError("body", "expected a JSON object")
    return given


def _read_query(operation: Operation, request: web.Request) -> dict[str, Any]:
    query: MultiMapping[str] = request.query
    given: dict[str, Any] = {}
    for name in query:
        schema = operation.fields.get(name, {})
        values = query.getall(name)
        if "array" in kinds_of(schema):
            given[name] = [_parse(value, schema.get("items", {})) for value in values]
        elif len(values) > 1:
            raise BadRequestError(name[:100], "expected one value")
        else:
            given[name] = _parse(values[0], schema)
    return given


def _parse(text: str, schema: Schema) -> Any:
    """Return what a text in a path or a query stands for; numbers may be text anywhere."""
    return _TRUTH.get(text, text) if "boolean" in kinds_of(schema) else text
