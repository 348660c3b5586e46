"""Operators' tokens that are read again while the service runs: who comes, who goes, and what is refused."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from multidict import CIMultiDict

from mediator.broker import Broker
from mediator.errors import BadRequestError, NotAllowedError, NotAuthenticatedError
from mediator.http.callers import HttpCallers
from mediator.operate.access import Access, CookieSealer, EndedSessions, rights_of
from mediator.operate.operations import ROLES, Actor, Operations
from mediator.operate.service_operations import SettingsOperations
from mediator.parts import installed_settings
from mediator.settings.settings import Settings
from tests.harness.core import make_settings
from tests.harness.stores import ram_store

ADA, BEN, EVE = "token-of-ada-00000", "token-of-ben-00000", "token-of-eve-00000"
ADMIN = Actor("test", ROLES["admin"], "socket")


def write(file: Path, further: str = "", **operators: tuple[str, str]) -> None:
    tokens = "".join(
        f'[[operators.tokens]]\nname = "{name}"\ntoken = "{token}"\nroles = ["{role}"]\n'
        for name, (token, role) in operators.items()
    )
    file.write_text(further + tokens)


def spoil(file: Path, text: str | None) -> None:
    file.unlink() if text is None else file.write_text(text)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "mediator.toml"
    write(made, ada=(ADA, "admin"), ben=(BEN, "read"))
    return made


@pytest.fixture
def settings(file: Path) -> Settings:
    return installed_settings().load(file, data_dir=file.parent)


@asynccontextmanager
async def access_of(settings: Settings) -> AsyncIterator[Access]:
    broker = Broker(ram_store(), settings.bounds)
    yield Access(settings, CookieSealer(b"k" * 32), HttpCallers(settings, "", {}), EndedSessions(broker))
    await broker.close()


@pytest.fixture
async def access(settings: Settings) -> AsyncIterator[Access]:
    async with access_of(settings) as made:
        yield made


@pytest.fixture
def operations(settings: Settings, access: Access) -> Operations:
    made = Operations()
    made.add_methods(SettingsOperations(settings, access.apply_settings))
    return made


async def reload(operations: Operations) -> dict[str, Any]:
    return await operations.run(ADMIN, "operators-reload", {})


def rights(access: Access, token: str) -> frozenset[str] | None:
    try:
        found = access.callers.identify_token(token, CIMultiDict(), None).operator
    except NotAuthenticatedError:
        return None
    return None if found is None else rights_of(found.roles)


async def test_operators_come_go_and_change(file: Path, access: Access, operations: Operations) -> None:
    write(file, "max_waiting = 7\n[quotas]\nmailbox_rate = 3\n", ada=(ADA, "read"), eve=(EVE, "operate"))
    assert await reload(operations) == {
        "source": str(file),
        "added": ["eve"],
        "removed": ["ben"],
        "changed": ["ada"],
        "waiting": ["max_waiting", "quotas.mailbox_rate"],
    }
    assert [rights(access, token) for token in (ADA, BEN, EVE)] == [ROLES["read"], None, ROLES["operate"]]
    again = await reload(operations)
    assert [again[what] for what in ("added", "removed", "changed")] == [[], [], []]
    shown = (await operations.run(ADMIN, "settings", {}))["options"]
    found = {each["option"]: (each["value"], each["source"]) for each in shown}
    assert found["operators.tokens"] == ("**********", str(file))
    assert found["max_waiting"] == (10_000, "default")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[operators.tokens]]\nname = 'ada'\ntoken = 'short'\n", "operators.tokens.0.token: expected 16 to 256"),
        (
            "[[operators.tokens]]\nname = 'ada'\ntoken = 'token-of-ada-00000'\nroles = ['king']\n",
            "tokens.0.roles.0: expected",
        ),
        ("max_pending = 0\n", "max_pending: expected at least 1"),
        ("[[operators", "is not TOML"),
        (None, "cannot read"),
        ("", "without a token local.token would make an operator"),
    ],
)
async def test_what_is_wrong_changes_nothing(
    file: Path, access: Access, operations: Operations, text: str | None, said: str
) -> None:
    spoil(file, text)
    with pytest.raises(BadRequestError, match=f"nothing was changed: .*{said}"):
        await reload(operations)
    assert [rights(access, token) for token in (ADA, BEN)] == [ROLES["admin"], ROLES["read"]]
    with pytest.raises(NotAllowedError):
        await operations.run(Actor("ben", ROLES["operate"], "session"), "operators-reload", {})


async def test_tokens_of_the_environment_stay(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDIATOR_OPERATORS__TOKENS", f'[{{"name": "eve", "token": "{EVE}"}}]')
    settings = installed_settings().load(file, data_dir=tmp_path)
    async with access_of(settings) as access:
        operations = Operations()
        operations.add_methods(SettingsOperations(settings, access.apply_settings))
        write(file, ada=(BEN, "admin"))
        answer = await reload(operations)
        assert (answer["source"], answer["changed"]) == ("MEDIATOR_OPERATORS__TOKENS", [])
        assert rights(access, BEN) is None


async def test_settings_without_a_source_cannot_be_read_again(tmp_path: Path) -> None:
    operations = Operations()
    operations.add_methods(SettingsOperations(make_settings(data_dir=tmp_path), lambda _settings: None))
    with pytest.raises(BadRequestError, match="they were not read from a file or the environment"):
        await reload(operations)
