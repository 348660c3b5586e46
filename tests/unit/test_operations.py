"""The registry of operations: rights, defaults, what an answer withholds, and what is audited."""

import asyncio
import re
from typing import Any, cast

import pytest

from mediator.errors import BadRequestError, NoSuchMailboxError, NotAllowedError, SetupError
from mediator.operate.operations import (
    COUNT,
    FLAG,
    ROLES,
    TEXT,
    Actor,
    Operation,
    Operations,
    Right,
    limit,
    many,
    object_schema,
    or_null,
    payload,
    table,
)
from mediator.operate.service_operations import ServiceOperations
from tests.harness.core import make_settings

OWNER = Actor("ada", frozenset(Right), "socket")


def actor(role: str) -> Actor:
    return Actor("eve", ROLES[role], "token")


async def echo(request: dict[str, Any]) -> dict[str, Any]:
    return {"got": request}


def operation(name: str = "echo", run: Any = echo, right: Right = Right.READ, **options: Any) -> Operation:
    return Operation(name, run, right, "", options.pop("answer", {}), **options)


class Log(list[tuple[str, str, str]]):
    """Keeps what would be audited."""

    async def audit(self, actor: Actor, operation: Operation, request: dict[str, Any], result: str) -> None:
        self.append((actor.name, operation.name, result))


@pytest.mark.parametrize("right", Right)
@pytest.mark.parametrize("role", ROLES)
async def test_only_the_right_lets_in(role: str, right: Right) -> None:
    operations = Operations()
    operations.add(operation(right=right))
    if right in ROLES[role]:
        assert await operations.run(actor(role), "echo", {"a": 1}) == {"got": {"a": 1}}
    else:
        with pytest.raises(NotAllowedError, match=f"this needs the right {right}"):
            await operations.run(actor(role), "echo", {})


async def test_a_default_stands_where_a_field_is_absent() -> None:
    operations = Operations()
    operations.add(operation(fields={"limit": limit(50), "tenant": TEXT}))
    assert await operations.run(OWNER, "echo", {}) == {"got": {"limit": 50}}
    assert await operations.run(OWNER, "echo", {"limit": 2}) == {"got": {"limit": 2}}


FIELDS: dict[str, Any] = {
    "tenant": TEXT,
    "limit": limit(50),
    "lane": or_null({"type": "string", "enum": ["high", "low"]}),
    "ids": many(COUNT),
    "quotas": {"type": "object", "properties": {"rate": or_null(COUNT)}},
    "nkeys": table(TEXT),
    "sure": FLAG,
    "since": {"type": "number"},
}


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"limit": 51}, "limit: expected 1 to 50"),
        ({"limit": True}, "limit: expected integer"),
        ({"limit": None}, "limit: expected integer"),
        ({"tenant": 7}, "tenant: expected string"),
        ({"tenant": "\0"}, "tenant: expected text without NUL"),
        ({"tenant": "\ud800"}, "tenant: expected text without NUL"),
        ({"lane": "middle"}, "lane: expected high, low"),
        ({"ids": "7"}, "ids: expected array"),
        ({"ids": [1, -1]}, "ids[1]: expected 0 or more"),
        ({"ids": [2**63]}, "ids[0]: expected at most 9223372036854775807"),
        ({"quotas": []}, "quotas: expected object"),
        ({"quotas": {"rate": "many"}}, "quotas.rate: expected integer or null"),
        ({"nkeys": {"ann": 1}}, "nkeys.ann: expected string"),
        ({"sure": "yes"}, "sure: expected boolean"),
        ({"since": "soon"}, "since: expected number"),
        ({"place": ""}, "tenant: expected a value, there is none"),
    ],
)
async def test_a_wrong_field_is_named_at_every_door(wrong: dict[str, Any], error: str) -> None:
    operations = Operations()
    operations.add(operation(fields=FIELDS, required=("tenant",)))
    asked = wrong if "place" in wrong else {"tenant": "acme", **wrong}
    with pytest.raises(BadRequestError, match=f"^{re.escape(error)}"):
        await operations.run(OWNER, "echo", asked)


async def test_numbers_may_be_text_and_null_where_allowed() -> None:
    operations = Operations()
    operations.add(operation(fields=FIELDS, path="/echo/{tenant}"))
    given = {
        "tenant": "acme",
        "limit": "7.0",
        "lane": None,
        "ids": ["1", 2.0],
        "quotas": {"rate": None},
        "since": "1.5",
    }
    got = (await operations.run(OWNER, "echo", given))["got"]
    assert got == {**given, "limit": 7, "ids": [1, 2], "since": 1.5}
    with pytest.raises(BadRequestError, match=r"^tenant: expected a value"):
        await operations.run(OWNER, "echo", {})


async def test_payloads_need_their_own_right() -> None:
    async def show(_request: dict[str, Any]) -> dict[str, Any]:
        return {"messages": [{"id": 1, "body": "secret"}], "body": "open", "first": {"body": "secret"}}

    message = object_schema(id=COUNT, body=payload(TEXT))
    operations = Operations()
    operations.add(operation("show", show, answer=object_schema(messages=many(message), body=TEXT, first=message)))
    assert await operations.run(actor("read"), "show", {}) == {"messages": [{"id": 1}], "body": "open", "first": {}}
    assert (await operations.run(actor("read-payload"), "show", {}))["first"] == {"body": "secret"}


async def test_the_login_of_nats_leaves_by_the_socket_alone() -> None:
    settings = make_settings(nats_url="nats://service:secret@nats.example:4222,nats://service:secret@second:4222")
    operations, nothing = Operations(), cast(Any, None)
    operations.add_methods(
        ServiceOperations(nothing, settings, nothing, nothing, "nats://a:b@here", 0, (), nothing, nothing)
    )
    assert "service:secret@" in (await operations.run(OWNER, "endpoints", {}))["nats"]
    for role in ROLES:
        told = await operations.run(actor(role), "endpoints", {})
        assert told["nats"] == "nats://nats.example:4222,nats://second:4222"


async def test_an_error_names_a_mailbox_as_it_was_asked_for() -> None:
    async def find(_tenant: str, number: int) -> str | None:
        return {5: "secret"}.get(number)

    async def refuse(request: dict[str, Any]) -> dict[str, Any]:
        assert request["mail_address"] == "secret"
        raise NoSuchMailboxError(request["mail_address"])

    operations = Operations(find_address=find)
    operations.add(operation("refuse", refuse))
    for named in ("id:5", "id:6", "id:-5"):
        with pytest.raises(NoSuchMailboxError, match=f"^mailbox {named} does not exist"):
            await operations.run(actor("read"), "refuse", {"mail_address": named})


async def test_each_act_is_audited_with_its_result() -> None:
    async def refuse(_request: dict[str, Any]) -> dict[str, Any]:
        raise NoSuchMailboxError("task")

    async def fail(_request: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError("a secret of ours")

    async def hang(_request: dict[str, Any]) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    log = Log()
    operations = Operations(log.audit)
    for name, run in {"act": echo, "refuse": refuse, "fail": fail}.items():
        operations.add(operation(name, run, method="POST"))
    operations.add(operation("hang", hang, method="POST", within=0.0), operation())
    operations.add(
        operation("step", method="POST", audited=False), operation("power", method="POST", right=Right.ADMIN)
    )
    await operations.run(OWNER, "echo", {})
    await operations.run(OWNER, "step", {})
    await operations.run(OWNER, "act", {})
    for name, error in {"refuse": NoSuchMailboxError, "fail": RuntimeError, "hang": TimeoutError}.items():
        with pytest.raises(error):
            await operations.run(OWNER, name, {})
    with pytest.raises(NotAllowedError):
        await operations.run(actor("operate"), "power", {})
    assert log == [
        ("ada", "act", "ok"),
        ("ada", "refuse", "mailbox_not_found"),
        ("ada", "fail", "internal"),
        ("ada", "hang", "timeout"),
        ("eve", "power", "not_allowed"),
    ]


@pytest.mark.parametrize("other", [operation(path="/other"), operation("other", path="/echo")])
def test_names_and_paths_belong_to_one_part(other: Operation) -> None:
    operations = Operations()
    operations.add(operation(path="/echo"))
    with pytest.raises(SetupError, match="two parts bring the operation"):
        operations.add(other)


async def test_an_unknown_operation_lists_the_known() -> None:
    operations = Operations()
    operations.add(operation("b"), operation("a"))
    with pytest.raises(BadRequestError, match="expected one of a, b"):
        await operations.run(OWNER, "c", {})
