"""Wakes phones: passes the mediator's push notifications on to FCM (HTTP v1) and APNs.

    pip install aiohttp 'httpx[http2]' joserfc
    python examples/push_webhook.py --secret LONG-RANDOM-TEXT --fcm service-account.json \
        --apns AuthKey_ABC123DEFG.p8 --apns-key-id ABC123DEFG --apns-team TEAM123456 --apns-topic org.example.wallet

In mediator.toml: push_webhook = "http://127.0.0.1:8099/ring/LONG-RANDOM-TEXT", outbound_networks = ["127.0.0.1"].
The mediator tries again after any answer but 2xx, and forgets the device after a 410.
"""

import argparse
import asyncio
import hmac
import json
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import httpx
from aiohttp import web
from joserfc import jwt
from joserfc.jwk import ECKey, RSAKey

SENT, GONE, LATER = 204, 410, 503
TITLE, TEXT = "New message", "Open your wallet to read it."
SCOPE = "https://www.googleapis.com/auth/firebase.messaging"
ASSERTION = "urn:ietf:params:oauth:grant-type:jwt-bearer"
APNS_TOKEN_SECONDS = 40 * 60  # Apple wants a new one between 20 and 60 minutes
DAY = 24 * 3600


class PushService(Protocol):
    async def send(self, token: str, messages: int) -> int:
        """Notify one device; return the status for the mediator."""


class Fcm:
    def __init__(self, client: httpx.AsyncClient, account: dict[str, str], url: str) -> None:
        """``account`` is the JSON key of a Google service account that may send messages."""
        self._client, self._account = client, account
        self._url = f"{url}/v1/projects/{account['project_id']}/messages:send"
        self._key = RSAKey.import_key(account["private_key"])
        self._access, self._until, self._renewing = "", 0.0, asyncio.Lock()

    async def send(self, token: str, messages: int) -> int:
        message = {
            "token": token,
            "notification": {"title": TITLE, "body": TEXT},
            "data": {"messages": str(messages)},
            "android": {"priority": "HIGH", "collapse_key": "mail"},
        }
        async with self._renewing:
            headers = {"Authorization": f"Bearer {await self._bearer()}"}
        answer = await self._client.post(self._url, json={"message": message}, headers=headers)
        if answer.status_code == 401:
            self._until = 0.0
        return _status("FCM", answer, gone=answer.status_code == 404 and "UNREGISTERED" in answer.text)

    async def _bearer(self) -> str:
        """Return an access token (RFC 7523), a new one a minute before the old one ends."""
        now = time.time()
        if now > self._until - 60:
            account = self._account
            claims = {"iss": account["client_email"], "scope": SCOPE, "aud": account["token_uri"]}
            header = {"alg": "RS256", "typ": "JWT", "kid": account["private_key_id"]}
            assertion = jwt.encode(header, {**claims, "iat": int(now), "exp": int(now) + 3600}, self._key)
            form = {"grant_type": ASSERTION, "assertion": assertion}
            answer = await self._client.post(account["token_uri"], data=form)
            given = answer.raise_for_status().json()
            self._access, self._until = given["access_token"], now + given["expires_in"]
        return self._access


class Apns:
    def __init__(self, client: httpx.AsyncClient, key: str, key_id: str, team: str, topic: str, url: str) -> None:
        """``key`` is the text of the .p8 file, ``topic`` the bundle id of the wallet."""
        self._client, self._key_id, self._team, self._topic, self._url = client, key_id, team, topic, url
        self._key = ECKey.import_key(key)
        self._token, self._made = "", 0.0

    async def send(self, token: str, messages: int) -> int:
        headers = {
            "authorization": f"bearer {self._bearer()}",
            "apns-topic": self._topic,
            "apns-push-type": "alert",
            "apns-priority": "10",
            "apns-expiration": str(int(time.time()) + DAY),
            "apns-collapse-id": "mail",
        }
        body = {"aps": {"alert": {"title": TITLE, "body": TEXT}, "sound": "default"}, "messages": messages}
        answer = await self._client.post(f"{self._url}/3/device/{token}", json=body, headers=headers)
        if answer.status_code == 403:
            self._made = 0.0
        return _status("APNs", answer, gone=answer.status_code == 410 or "BadDeviceToken" in answer.text)

    def _bearer(self) -> str:
        now = time.time()
        if now > self._made + APNS_TOKEN_SECONDS:
            header = {"alg": "ES256", "kid": self._key_id}
            self._token, self._made = jwt.encode(header, {"iss": self._team, "iat": int(now)}, self._key), now
        return self._token


def _status(service: str, answer: httpx.Response, *, gone: bool) -> int:
    if answer.is_success:
        return SENT
    print(f"{service} answered {answer.status_code}: {answer.text[:200]}", file=sys.stderr)
    return GONE if gone else LATER


def application(secret: str, services: dict[str, PushService]) -> web.Application:
    async def ring(request: web.Request) -> web.Response:
        if not hmac.compare_digest(request.match_info["secret"].encode(), secret.encode()):
            raise web.HTTPNotFound
        device: dict[str, Any] = await request.json()
        service = services.get(device["service"])
        if service is None:
            # Nobody gets what no service is set up for, so nothing is gained by another attempt.
            return web.Response(status=SENT)
        try:
            return web.Response(status=await service.send(device["token"], device["messages"]))
        except httpx.HTTPError as error:
            print(f"{device['service']}: {error!r}", file=sys.stderr)
            return web.Response(status=LATER)

    app = web.Application(client_max_size=64 * 1024)
    app.router.add_post("/ring/{secret}", ring)
    return app


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--secret", required=True, help="what the mediator's URL ends with; nobody else may ring")
    parser.add_argument("--port", type=int, default=8099)
    parser.add_argument("--fcm", type=Path, help="key of a Google service account, JSON")
    parser.add_argument("--fcm-url", default="https://fcm.googleapis.com")
    parser.add_argument("--apns", type=Path, help="key of Apple, .p8")
    parser.add_argument("--apns-key-id")
    parser.add_argument("--apns-team")
    parser.add_argument("--apns-topic", help="bundle id of the wallet")
    parser.add_argument("--apns-url", default="https://api.push.apple.com", help="api.sandbox.push.apple.com in tests")
    given = parser.parse_args()
    client = httpx.AsyncClient(http2=True, timeout=8)
    services: dict[str, PushService] = {}
    if given.fcm:
        services["fcm"] = Fcm(client, json.loads(given.fcm.read_text()), given.fcm_url)
    if given.apns:
        key = given.apns.read_text()
        services["apns"] = Apns(client, key, given.apns_key_id, given.apns_team, given.apns_topic, given.apns_url)
    web.run_app(application(given.secret, services), host="127.0.0.1", port=given.port)


if __name__ == "__main__":
    main()
