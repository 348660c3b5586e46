"""The OpenAPI 3.1 document of the HTTP API."""

from typing import Any

from mediator.mailboxes.address import MAX_ADDRESS
from mediator.mailboxes.bounds import MAX_TAG, MAX_TAGS
from registry.api.codec import MAX_CURSOR, MAX_PAGES, MAX_STATUS
from registry.cards.card import MAX_CARD, MAX_DEPTH, MAX_NAME
from registry.index.analysis import MAX_REQUEST
from registry.records import State
from registry.requests import MAX_PAGE, PAGE

Json = dict[str, Any]

_NAME = f"(?=.*\\S)[^\\u0000-\\u001f\\u007f-\\u009f]{{1,{MAX_NAME}}}$"
_ADDRESS = "[a-z0-9]+(\\.[a-z0-9]+)*"
_SEND_ONLY = "Whether others are shown the mailbox's send-only address; absent: if its own was generated."
_TTL = "Seconds within which a sign of life is due; 0: never, absent: as the operator configured."
_SECONDS: Json = {"type": "integer", "description": "Unix seconds."}
_CARD: Json = {"type": "object", "description": "A card as it was registered, byte for byte."}


def document() -> Json:
    """Return the document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Mediator",
            "version": "1",
            "summary": "The registry of agents, and the health of the service.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"token": []}, {}],
        "paths": {
            "/agents": {"get": _find(), "post": _register()},
            "/agents/{mailbox}": {"parameters": [_mailbox()], "get": _show(), "delete": _unregister()},
            "/agents/{mailbox}/report": {"parameters": [_mailbox()], "post": _report()},
            "/agents/{mailbox}/feedback": {"parameters": [_mailbox()], "post": _feedback()},
            "/openapi.json": {
                "get": _without_token("This document.", {"200": _answer("OpenAPI 3.1.", {"type": "object"})})
            },
            "/livez": {"get": _without_token("Whether the process answers.", {"200": _text("It does.")})},
            "/readyz": {"get": _without_token("Whether the service is ready.", _readiness())},
            "/metrics": {"get": _without_token("What Prometheus collects.", {"200": _text("The exposition format.")})},
        },
        "components": {
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API token of a tenant. It is not needed if no tenants are configured.",
                }
            },
            "schemas": {
                "Address": {
                    "type": "string",
                    "maxLength": MAX_ADDRESS,
                    "pattern": f"^{_ADDRESS}$",
                    "not": {"const": "public"},
                },
                "Mailbox": {
                    "type": "string",
                    "pattern": f"^(mq9://[^/]*/)?(?=.{{1,{MAX_ADDRESS}}}$)(?!public$){_ADDRESS}$",
                    "description": "An address, bare or after mq9://…/; the broker in between is ignored.",
                },
                "Agent": {
                    "anyOf": [_ref("Address"), {"type": "string", "pattern": f"^name:{_NAME}"}],
                    "description": "The address of the agent's mailbox; without one `name:` and its name.",
                },
                "Card": {
                    "anyOf": [
                        _object({"mailbox": _ref("Mailbox")}),
                        _extended(),
                        {
                            **_object({"name": {"type": "string", "pattern": f"^{_NAME}"}}),
                            "not": {"anyOf": [{"required": ["mailbox"]}, {"required": ["capabilities"]}]},
                        },
                    ],
                    "properties": {
                        "ttl": {"type": ["integer", "null"], "minimum": 0, "description": _TTL},
                        "send_only": {"type": "boolean", "description": _SEND_ONLY},
                    },
                    "description": "An AgentCard, or any object with a mailbox, or with a name that identifies it, "
                    f"of at most {MAX_CARD} bytes and {MAX_DEPTH} levels.",
                },
                "Order": _object({"url": {"type": "string", "format": "uri"}, "mailbox": _ref("Mailbox")}, ["url"]),
                "History": _object(
                    {
                        "mailbox": _ref("Agent"),
                        "name": {"type": "string"},
                        "edition": {"type": "integer", "description": "How many different cards there were."},
                        "registered_at": {**_SECONDS, "description": "First registration, Unix seconds."},
                        "updated_at": {**_SECONDS, "description": "Last registration, Unix seconds."},
                        "warnings": {"type": "array", "items": {"type": "string"}},
                    }
                ),
                "State": _object(
                    {
                        "state": {"enum": list(State)},
                        "last_seen": _SECONDS,
                        "status": {"type": ["object", "null"], "description": "The last report."},
                    }
                ),
                "Registered": {"allOf": [_ref("History"), _object({"created": {"type": "boolean"}})]},
                "Record": {"allOf": [_ref("History"), _ref("State"), _object({"card": _CARD})]},
                "Page": _object(
                    {
                        "agents": {"type": "array", "items": _CARD},
                        "mode": {"enum": ["list", "text", "semantic"]},
                        "total": {"type": "integer"},
                        "next": {"type": "string", "description": "The cursor of the next page, kept 60 s."},
                        "note": {"type": "string", "description": "Why a semantic search was answered by keywords."},
                        "scores": {"type": "array", "items": {"type": "number"}},
                        "states": {"type": "array", "items": _ref("State")},
                        "explanations": {"type": "array", "items": _ref("Explanation")},
                        "query_id": {"type": "string", "description": "Names the search for feedback, for an hour."},
                    },
                    ["agents", "mode", "total"],
                ),
                "Explanation": explanation(),
                "Error": _object({"error": {"type": "string"}, "code": {"type": "string"}}),
            },
        },
    }


def explanation() -> Json:
    """Return the schema of one of DISCOVER's ``explanations``."""
    number, text = {"type": "number"}, {"type": "string"}
    words = {"type": "array", "items": text, "description": "Words of the request that the card has, the rarest first."}
    whole = {**number, "description": "Cosine of the card to the request. Absent: it has no vectors yet."}
    skill = _object({"id": text, "name": text, "cosine": number}, ["cosine"])
    skill["description"] = "The skill nearest to the request."
    parts = {
        "keywords": _object({"score": number, "words": words}),
        "vectors": _object({"score": number, "card": whole, "skill": skill}, ["score"]),
        "memory": _object({"score": number}),
        "rerank": _object({"score": number, "relevance": number, "place": {"type": "integer"}}),
    }
    return _object(parts, []) | {
        "description": "What each way of searching gave to an agent's score: they add up to it."
    }


def _find() -> Json:
    word: Json = {"type": "string", "maxLength": MAX_TAG, "pattern": "^[^,\\x00-\\x1f\\x7f-\\x9f]*$"}
    words: Json = {"type": "array", "maxItems": MAX_TAGS, "items": word}
    parameters = [
        _query("text", {"type": "string"}, f"Search by words, of which the first {MAX_REQUEST} characters count."),
        _query("semantic", {"type": "string"}, "Search by meaning; wins over text."),
        _query("limit", {"type": "integer", "minimum": 0, "default": PAGE}, f"Agents on a page, at most {MAX_PAGE}."),
        _query("page", {"type": "integer", "minimum": 0, "default": 1}, f"From 1, at most {MAX_PAGES}."),
        _query("tag", words, "Required tags."),
        _query("skill", words, "Required skills, by id or name."),
        _query("state", {"type": "array", "items": {"enum": list(State)}}, "All but gone agents by default."),
        _query("min_score", {"type": "number", "minimum": 0}, "Minimum score, up to 1."),
        _query("cursor", {"type": "string", "maxLength": MAX_CURSOR}, "`next` of the page before."),
        _query("with_scores", {"type": "boolean"}, "Include `scores`."),
        _query("with_state", {"type": "boolean"}, "Include `states`."),
        _query("explain", {"type": "boolean"}, "Include `explanations`: why each agent is found where it is."),
    ]
    link: Json = {"description": 'The next page, rel="next".', "schema": {"type": "string"}}
    page = _answer("A page of agents, best first.", _ref("Page"), {"Link": link})
    return _with_token("findAgents", "List or search agents.", {"200": page}, ("400", "503"), parameters=parameters)


def _register() -> Json:
    body = {"required": True, "content": _json({"anyOf": [_ref("Card"), _ref("Order")]})}
    location: Json = {"description": "Where the agent is.", "schema": {"type": "string"}}
    answers = {
        "200": _answer("It replaces the former card.", _ref("Registered")),
        "201": _answer("The agent is new.", _ref("Registered"), {"Location": location}),
    }
    summary = "Register an agent, by its card or by the URL of its card."
    return _with_token("registerAgent", summary, answers, ("400", "413", "429", "502", "503"), requestBody=body)


def _show() -> Json:
    view = _query("view", {"enum": ["card", "record"], "default": "card"}, "The card alone, or the whole record.")
    etag: Json = {"description": "Of the card alone.", "schema": {"type": "string"}}
    known: Json = {"in": "header", "name": "If-None-Match", "schema": {"type": "string"}}
    answers = {
        "200": _answer("The card as it came, or the record.", {"anyOf": [_CARD, _ref("Record")]}, {"ETag": etag}),
        "304": {"description": "The card has not changed."},
    }
    return _with_token("showAgent", "One agent.", answers, ("400", "404", "503"), parameters=[view, known])


def _unregister() -> Json:
    answers: Json = {"204": {"description": "The agent is removed."}}
    return _with_token("unregisterAgent", "Remove an agent.", answers, ("400", "404", "503"))


def _report() -> Json:
    seen = _object({"mailbox": _ref("Agent"), "last_seen": _SECONDS})
    status = {"type": ["object", "null"], "description": f"The status, whatever it says in {MAX_STATUS} bytes."}
    body = {"required": True, "content": _json({"anyOf": [status, {"const": ""}]})}
    answers = {"200": _answer("The agent was seen.", seen)}
    summary = "A sign of life, with a status."
    return _with_token("reportAgent", summary, answers, ("400", "404", "413", "503"), requestBody=body)


def _feedback() -> Json:
    query_id = {
        "type": "string",
        "minLength": 1,
        "maxLength": MAX_CURSOR,
        "description": "Of the search that found the agent.",
    }
    said = _object({"query_id": query_id, "useful": {"type": "boolean"}})
    counted = {"type": "boolean", "description": "Whether the caller's word counts: not on agents of its own."}
    answers = {"200": _answer("It is remembered.", _object({"mailbox": _ref("Agent"), "counted": counted}))}
    summary = "Say whether an agent served a search."
    body = {"required": True, "content": _json(said)}
    return _with_token("rateAgent", summary, answers, ("400", "404", "413", "503"), requestBody=body)


def _extended() -> Json:
    """Return the schema of A2A cards, which have the mailbox in an extension."""
    extension = _object({"params": _object({"mailbox": _ref("Mailbox")})})
    extensions: Json = {"type": "array", "contains": extension}
    return _object({"capabilities": _object({"extensions": extensions})})


def _readiness() -> Json:
    report = _object({"ready": {"type": "boolean"}, "checks": {"type": "object"}})
    return {"200": _answer("It is ready.", report), "503": _answer("It is not ready; which checks fail.", report)}


def _mailbox() -> Json:
    return {"in": "path", "name": "mailbox", "required": True, "schema": _ref("Agent")}


def _query(name: str, schema: Json, description: str) -> Json:
    return {"in": "query", "name": name, "schema": schema, "description": description}


def _with_token(operation: str, summary: str, answers: Json, errors: tuple[str, ...], **more: Any) -> Json:
    """Return an operation that requires a token."""
    refused = {status: _answer("See docs/errors.md.", _ref("Error")) for status in ("401", *errors)}
    return {"operationId": operation, "summary": summary, **more, "responses": {**answers, **refused}}


def _without_token(summary: str, answers: Json) -> Json:
    return {"summary": summary, "security": [], "responses": answers}


def _answer(description: str, schema: Json, headers: Json | None = None) -> Json:
    return {"description": description, "content": _json(schema), **({"headers": headers} if headers else {})}


def _text(description: str) -> Json:
    return {"description": description, "content": {"text/plain": {"schema": {"type": "string"}}}}


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _object(properties: Json, required: list[str] | None = None) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties) if required is None else required}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}
