"""A small OpenID Connect provider: authorization code with PKCE, one user, keys of its own."""

import base64
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote_plus

from aiohttp import web
from aiohttp.test_utils import TestServer
from authlib.common.security import generate_token
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey

CLIENT, SECRET = "console", "a secret: 5 % of €+the client"


@dataclass
class OidcProvider:
    """Whoever is sent to it is signed in at once, as its user."""

    issuer: str = ""
    claims: dict[str, Any] = field(default_factory=lambda: {"preferred_username": "ada", "groups": ["admins", "x"]})
    """What it says about its user."""
    wrong: dict[str, Any] = field(default_factory=dict)
    """Claims of the ID token that are other than they should be."""
    key: RSAKey = field(default_factory=lambda: RSAKey.generate_key(2048, {"kid": "one"}))
    signed_with: RSAKey | None = None
    """Another key than the published one."""
    slash: str = ""
    """At the end of the issuer: "/" or nothing."""
    methods: tuple[str, ...] = ()
    """How clients may authenticate, as it says; nothing: it does not say."""
    decodes: bool = True
    """Whether it decodes the client's secret in the header (RFC 6749 §2.3.1)."""
    asked: list[dict[str, str]] = field(default_factory=list)
    """Requests for authorization."""
    codes: dict[str, dict[str, str]] = field(default_factory=dict)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/.well-known/openid-configuration", self.describe)
        app.router.add_get("/authorize", self.authorize)
        app.router.add_post("/token", self.token)
        app.router.add_get("/keys", self.keys)
        return app

    async def describe(self, _request: web.Request) -> web.Response:
        endpoints = {"authorization_endpoint": "authorize", "token_endpoint": "token", "jwks_uri": "keys"}
        return web.json_response(
            {
                "issuer": self.issuer + self.slash,
                **{name: f"{self.issuer}/{path}" for name, path in endpoints.items()},
                **({"token_endpoint_auth_methods_supported": self.methods} if self.methods else {}),
            }
        )

    async def authorize(self, request: web.Request) -> web.Response:
        query = dict(request.query)
        self.asked.append(query)
        assert query["response_type"] == "code"
        assert query["client_id"] == CLIENT
        assert query["code_challenge_method"] == "S256"
        code = generate_token(32)
        self.codes[code] = query
        raise web.HTTPFound(f"{query['redirect_uri']}?code={code}&state={query['state']}")

    async def token(self, request: web.Request) -> web.Response:
        form = await request.post()
        if self._login(request, form) != (CLIENT, SECRET):
            return web.json_response({"error": "invalid_client"}, status=401)
        asked = self.codes.pop(str(form["code"]), None)
        good = asked is not None and create_s256_code_challenge(str(form["code_verifier"])) == asked["code_challenge"]
        if not good or form["redirect_uri"] != asked["redirect_uri"]:
            return web.json_response({"error": "invalid_grant"}, status=400)
        now = int(time.time())
        about = {
            "iss": self.issuer + self.slash,
            "aud": CLIENT,
            "sub": "7",
            "iat": now,
            "exp": now + 60,
            "nonce": asked["nonce"],
        }
        key = self.signed_with or self.key
        signed = jwt.encode({"alg": "RS256", "kid": key.kid}, {**about, **self.claims, **self.wrong}, key)
        return web.json_response({"access_token": "opaque", "token_type": "Bearer", "id_token": signed})

    def _login(self, request: web.Request, form: Any) -> tuple[str, ...]:
        if self.methods == ("client_secret_post",):
            return form.get("client_id"), form.get("client_secret")
        login = base64.b64decode(request.headers.get("Authorization", "")[len("Basic ") :]).decode().partition(":")
        return tuple(map(unquote_plus, login[::2])) if self.decodes else login[::2]

    async def keys(self, _request: web.Request) -> web.Response:
        return web.json_response(KeySet([self.key]).as_dict(private=False))


@asynccontextmanager
async def oidc_provider() -> AsyncIterator[OidcProvider]:
    """Run one on a free port."""
    provider = OidcProvider()
    async with TestServer(provider.app()) as server:
        provider.issuer = str(server.make_url("")).rstrip("/")
        yield provider
