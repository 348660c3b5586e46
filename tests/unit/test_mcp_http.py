"""Who may call the MCP server over HTTP, and as whom it connects for them."""

import json

import pytest

from mediator.endpoint import Endpoint
from mediator.errors import SetupError
from mediator.http.callers import read_local_token
from mediator.login import Login
from mediator.mcp.http import choose_logins
from mediator.parts import installed_settings
from tests.harness.mcp_http import application, calls

SERVER = "nats://127.0.0.1:4222"
TOKEN, OTHER = "t0ken" * 4, "0ther" * 4
HERE, EVERYWHERE = Endpoint("127.0.0.1", 0), Endpoint("0.0.0.0", 0)
USER = {"name": "ada", "password": "pw"}


def settings(tmp_path, **tenants):
    return installed_settings().load(None, data_dir=tmp_path, tenants=tenants)


def accepts(settings, endpoint, given):
    """Whether the server starts."""
    return application(settings, endpoint, given) is not None


def test_each_tenant_with_tokens_has_its_own_user(tmp_path):
    bcrypt = {"name": "old", "password": "$2a$11$" + "x" * 53}
    both = settings(
        tmp_path,
        acme={"users": [bcrypt, USER], "api_tokens": [TOKEN]},
        globex={"users": [{"name": "bob", "password": "pw-bob"}], "api_tokens": [OTHER]},
        silent={"users": [{"name": "sam", "password": "pw-sam"}]},
    )
    assert choose_logins(both, Login(SERVER)) == {
        "acme": Login(SERVER, user="ada", password="pw"),
        "globex": Login(SERVER, user="bob", password="pw-bob"),
    }
    assert accepts(both, EVERYWHERE, Login(SERVER))
    # A login of the command line is for the tenant that has this user.
    assert choose_logins(both, Login(SERVER, user="bob", password="x")) == {
        "globex": Login(SERVER, user="bob", password="x")
    }
    with pytest.raises(SetupError, match="expected one tenant"):
        choose_logins(both, Login(SERVER, token="of somebody"))


def test_a_tenant_without_a_usable_login_is_refused(tmp_path):
    nkey = {"name": "key", "nkey": "U" + "A" * 55}
    acme = settings(tmp_path, acme={"users": [nkey], "api_tokens": [TOKEN]})
    with pytest.raises(SetupError, match=r"tenants\.acme has api_tokens, but no user with a plain password"):
        choose_logins(acme, Login(SERVER))
    assert choose_logins(acme, Login(SERVER, nkey="seed.nk")) == {"acme": Login(SERVER, nkey="seed.nk")}


def test_nobody_calls_without_a_token_from_elsewhere(tmp_path):
    alone = settings(tmp_path)
    assert accepts(alone, HERE, Login(SERVER))
    with pytest.raises(SetupError, match="is not on loopback, so callers need an API token"):
        accepts(alone, EVERYWHERE, Login(SERVER))
    # Whoever may log in somewhere must not lend that to all users of this machine.
    with pytest.raises(SetupError, match="expected one tenant with api_tokens for this login, got 0"):
        accepts(alone, HERE, Login(SERVER, user="ada", password="pw"))
    with_users = settings(tmp_path, default={"users": [USER]})
    with pytest.raises(SetupError, match="callers need an API token"):
        accepts(with_users, HERE, Login(SERVER))
    tokens = settings(tmp_path, default={"api_tokens": [TOKEN]})
    assert choose_logins(tokens, Login(SERVER)) == {"default": Login(SERVER)}
    assert accepts(tokens, EVERYWHERE, Login(SERVER))


async def test_this_machine_calls_by_its_secret_alone(tmp_path):
    call = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
    plain = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
    async with calls(application(settings(tmp_path), HERE, Login(SERVER))) as http:

        async def status(**headers):
            return (await http.post("/mcp", content=call, headers=plain | headers)).status_code

        secret = {"Authorization": f"Bearer {read_local_token(tmp_path)}"}
        assert await status() == 401
        assert await status(Origin="http://127.0.0.1:8090") == 401
        assert await status(**secret) == 200
        # A name of a page's own that leads to this machine.
        assert await status(Host="elsewhere.example:8090", **secret) == 401
        assert await status(**{"X-Forwarded-For": "127.0.0.1"}, **secret) == 401
        assert await status(Authorization=f"Bearer {TOKEN}") == 401
        assert (await http.post("/mcp/", content=call, headers=plain | secret)).status_code in (307, 404)
        assert (await http.get("/", headers=secret)).status_code == 404
