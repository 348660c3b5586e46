"""The client of an OpenID Connect provider: by authorization code with PKCE, state and nonce (OIDC Core §3.1).

The grammar is authlib's, signatures are joserfc's. Requests go to the provider that the settings name.
"""

import asyncio
import base64
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote_plus, urlsplit

import aiohttp
import orjson
from authlib.common.errors import AuthlibBaseError
from authlib.common.security import generate_token
from authlib.oauth2.rfc6749.parameters import prepare_grant_uri, prepare_token_request
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from authlib.oidc.core import CodeIDToken
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from mediator.errors import SignInFailedError, UnreachableError
from mediator.http.bodies import read_body
from mediator.settings.sections import OidcSettings

KEEP_SECONDS = 3600.0
"""For how long the provider's description and keys are kept; an unknown key is looked for at once."""
REQUEST_SECONDS = 5.0
MAX_ANSWER = 1 << 20
LEEWAY = 60
"""Seconds by which the provider's clock may differ."""
MAX_CLAIMS = 64
"""Values of the roles' claim that a session remembers: those that the settings name, and no more than these."""
_ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""None with a shared secret: whoever knew the client's secret could write tokens."""
_NAME = re.compile(r"[^A-Za-z0-9@._-]")


@dataclass(frozen=True, slots=True)
class Challenge:
    """What the browser keeps while its user is at the provider."""

    state: str
    nonce: str
    verifier: str


@dataclass(frozen=True, slots=True)
class SignedInUser:
    """Whoever the provider says somebody is."""

    name: str
    full_name: str
    """The name, the subject and the issuer, as the audit log has them: only the last two belong to one person."""
    claims: tuple[str, ...]


class OidcClient:
    """The client of one provider. Used on the event loop."""

    def __init__(self, options: OidcSettings) -> None:
        self._options = options
        self._issuer = options.issuer or ""
        self._known: dict[str, tuple[Any, float]] = {}
        self._turn = asyncio.Lock()

    async def begin(self, redirect_uri: str) -> tuple[str, Challenge]:
        """Return where to send the browser; raises :class:`UnreachableError` when the provider does not answer."""
        endpoint = _text(await self._describe(), "authorization_endpoint")
        challenge = Challenge(generate_token(32), generate_token(32), generate_token(64))
        url = prepare_grant_uri(
            endpoint,
            client_id=self._options.client_id,
            response_type="code",
            redirect_uri=redirect_uri,
            scope=self._options.scopes,
            state=challenge.state,
            nonce=challenge.nonce,
            code_challenge=create_s256_code_challenge(challenge.verifier),
            code_challenge_method="S256",
        )
        return str(url), challenge

    async def finish(self, code: str, nonce: str, verifier: str, redirect_uri: str) -> SignedInUser:
        """Redeem the code; raises :class:`SignInFailedError` or :class:`UnreachableError`."""
        answer = await self._redeem(code, verifier, redirect_uri)
        claims = await self._verify(_text(answer, "id_token"), nonce, answer.get("access_token"))
        name = next((claims[key] for key in ("preferred_username", "email", "sub") if claims.get(key)), "")
        name = _NAME.sub("_", str(name))[:64]
        full_name = f"{name} ({_NAME.sub('_', str(claims['sub']))[:128]} at {claims['iss']})"
        return SignedInUser(name, full_name, self._roles(claims))

    async def _redeem(self, code: str, verifier: str, redirect_uri: str) -> Mapping[str, Any]:
        described = await self._describe()
        uri, secret = _text(described, "token_endpoint"), self._options.client_secret
        body = prepare_token_request("authorization_code", code=code, redirect_uri=redirect_uri, code_verifier=verifier)
        login = (self._options.client_id, "" if secret is None else secret.get_secret_value())
        methods = described.get("token_endpoint_auth_methods_supported") or ["client_secret_basic"]
        if secret is None or "client_secret_post" in methods:
            named = zip(("client_id", "client_secret"), login, strict=True)
            body += "".join(f"&{name}={quote_plus(value)}" for name, value in named if value)
            status, answer = await _post(uri, body)
        else:
            # Names and secrets are form-encoded (RFC 6749 §2.3.1), which not every provider decodes.
            status, answer = await _post(uri, body, *map(quote_plus, login))
            if status == 401 and tuple(map(quote_plus, login)) != login:
                status, answer = await _post(uri, body, *login)
        if status != 200:
            raise SignInFailedError(f"the provider refused the code ({str(answer.get('error', status))[:64]})")
        return answer

    async def _verify(self, token: str, nonce: str, access_token: Any) -> Mapping[str, Any]:
        try:
            keys = KeySet.import_key_set(await self._keys())
            try:
                read = jwt.decode(token, keys, algorithms=_ALGORITHMS)
            except JoseError:
                # The provider may have changed its keys.
                keys = KeySet.import_key_set(await self._keys(fresh=True))
                read = jwt.decode(token, keys, algorithms=_ALGORITHMS)
            claims = CodeIDToken(
                read.claims,
                read.header,
                options={
                    "iss": {"essential": True, "value": (await self._describe())["issuer"]},
                    "aud": {"essential": True, "value": self._options.client_id},
                },
                params={"client_id": self._options.client_id, "nonce": nonce, "access_token": access_token},
            )
            claims.validate(leeway=LEEWAY)
        except (JoseError, AuthlibBaseError, ValueError, KeyError, TypeError) as error:
            raise SignInFailedError(f"the provider's ID token is not valid ({type(error).__name__})") from error
        return dict(claims)

    def _roles(self, claims: Mapping[str, Any]) -> tuple[str, ...]:
        """Return those values of the claim that the settings name."""
        value: Any = claims.get(self._options.claim)
        if value is None:
            value = claims
            for step in self._options.claim.split("."):
                value = value.get(step) if isinstance(value, Mapping) else None
        values = value if isinstance(value, list) else [value]
        named = {name for names in self._options.roles.values() for name in names}
        return tuple(sorted({each for each in values if isinstance(each, str)} & named))[:MAX_CLAIMS]

    async def _describe(self) -> Mapping[str, Any]:
        """Return what the provider says of itself; its issuer is as it writes that, with a slash at the end or not."""
        described = await self._get(f"{self._issuer.rstrip('/')}/.well-known/openid-configuration")
        if str(described.get("issuer", "")).rstrip("/") != self._issuer.rstrip("/"):
            raise UnreachableError(f"oidc.issuer: {self._issuer} calls itself {str(described.get('issuer'))[:200]}")
        return described

    async def _keys(self, *, fresh: bool = False) -> Any:
        return await self._get(_text(await self._describe(), "jwks_uri"), fresh=fresh)

    async def _get(self, url: str, *, fresh: bool = False) -> Mapping[str, Any]:
        """Return a document of the provider, kept for an hour; ``fresh``: not older than a few seconds."""
        asked = time.monotonic()
        async with self._turn:
            known, at = self._known.get(url, ({}, -KEEP_SECONDS))
            if known and asked - at < (REQUEST_SECONDS if fresh else KEEP_SECONDS):
                return known  # type: ignore[no-any-return]
            status, answer = await _fetch("GET", url)
            if status != 200:
                raise UnreachableError(f"oidc.issuer: {url} answered with status {status}")
            self._known[url] = answer, time.monotonic()
            return answer


async def _post(url: str, body: str, *login: str) -> tuple[int, Mapping[str, Any]]:
    headers = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "application/json"}
    if login:
        headers["Authorization"] = f"Basic {base64.b64encode(':'.join(login).encode()).decode()}"
    return await _fetch("POST", url, headers=headers, data=body)


async def _fetch(method: str, url: str, **options: Any) -> tuple[int, Mapping[str, Any]]:
    """Return the status and the JSON object that a provider answers with; redirects are not followed."""
    if urlsplit(url).scheme not in {"http", "https"}:
        raise UnreachableError("oidc.issuer: its description names an endpoint that is no web address")
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS)) as session,
            session.request(method, url, allow_redirects=False, **options) as response,
        ):
            body = await read_body(response, MAX_ANSWER + 1)
            if len(body) > MAX_ANSWER:
                raise UnreachableError(f"oidc.issuer: {url} sent more than {MAX_ANSWER} bytes")
            answer = orjson.loads(body)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise UnreachableError(f"oidc.issuer: {url} did not answer correctly ({type(error).__name__})") from error
    if not isinstance(answer, dict):
        raise UnreachableError(f"oidc.issuer: {url} did not answer with a JSON object")
    return response.status, answer


def _text(answer: Mapping[str, Any], name: str) -> str:
    value = answer.get(name)
    if not isinstance(value, str):
        raise UnreachableError(f"oidc.issuer: the provider's answer has no {name}")
    return value
