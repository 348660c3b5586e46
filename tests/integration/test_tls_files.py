"""TLS by files: renewed certificates, clients that show their own, and the service's login at an external server."""

import shutil
import ssl
from datetime import UTC, datetime, timedelta

import nats
import pytest
from nats.errors import Error as NatsError
from nats.errors import NoServersError

from mediator.errors import SetupError
from mediator.login import Login
from mediator.nats.connection import Upstreams, connect
from mediator.operate.diagnosis import Level
from mediator.operate.surroundings import certificate_findings
from tests.harness.certificates import Certificate, issue
from tests.harness.external import nats_server
from tests.harness.gateway import gateway
from tests.harness.nkeys import Key

PATIENCE = 10
REFUSED = (NatsError, NoServersError, OSError, TimeoutError)


def made(folder, name: str) -> Certificate:
    (folder / name).mkdir()
    return issue(folder / name)


def trusting(certificate: Certificate, own: Certificate | None = None) -> ssl.SSLContext:
    """Return the context of a client that trusts an authority, and shows a certificate of its own."""
    context = ssl.create_default_context(cafile=certificate.authority)
    if own is not None:
        context.load_cert_chain(own.cert, own.key)
    return context


def arguments(context: ssl.SSLContext) -> dict[str, object]:
    return {"tls": context, "tls_hostname": "localhost", "allow_reconnect": False, "max_reconnect_attempts": 1}


async def answers(client) -> bool:
    return b"mail_address" in (await client.request("$mq9.AI.MAILBOX.CREATE", b"{}", timeout=PATIENCE)).data


async def test_a_renewed_certificate_is_for_new_connections(tmp_path):
    old, new = made(tmp_path, "old"), made(tmp_path, "new")
    async with gateway(tmp_path, tls_cert=old.cert, tls_key=old.key) as house:
        before = await house.client(**arguments(trusting(old)))
        # Until both files are there, the last good pair is used.
        shutil.copy(new.cert, old.cert)
        await house.client(**arguments(trusting(old)))
        shutil.copy(new.key, old.key)
        after = await house.client(**arguments(trusting(new)))
        with pytest.raises(ssl.SSLError):
            await nats.connect(house.gateway.url, error_cb=_ignore, **arguments(trusting(old)))
        assert await answers(before)
        assert await answers(after)


async def test_clients_show_a_certificate_where_asked(tmp_path):
    server, client, stranger = (made(tmp_path, name) for name in ("server", "client", "stranger"))
    options = {"tls_cert": server.cert, "tls_key": server.key, "tls_client_ca": client.authority}
    async with gateway(tmp_path, **options) as house:
        assert b'"tls_verify":true' in (await (await house.raw()).line())
        ours = await house.client(**arguments(trusting(server, client)))
        assert await answers(ours)
        for own in (None, stranger):
            with pytest.raises(REFUSED):
                await nats.connect(house.gateway.url, error_cb=_ignore, **arguments(trusting(server, own)))


async def test_the_service_logs_in_by_certificate_and_nkey(tmp_path, monkeypatch):
    server, own, key = made(tmp_path, "server"), made(tmp_path, "own"), Key("user")
    (tmp_path / "service.nk").write_text(key.seed)
    config = (
        f'tls {{ cert_file: "{server.cert}", key_file: "{server.key}", ca_file: "{own.authority}", verify: true }}\n'
        f"authorization {{ users: [ {{ nkey: {key.public} }} ] }}"
    )
    login = {
        "nkey": str(tmp_path / "service.nk"),
        "tls_ca": str(server.authority),
        "tls_cert": str(own.cert),
        "tls_key": str(own.key),
    }
    async with nats_server(tmp_path, config) as (port, _):
        urls = [f"tls://localhost:{port}"]
        connection = await connect(Upstreams(urls, Login("", **login)), "test")
        assert connection.connected
        await connection.close()
        stranger = made(tmp_path, "stranger")
        wrong = login | {"tls_cert": str(stranger.cert), "tls_key": str(stranger.key)}
        # For so long it tries.
        monkeypatch.setattr("mediator.nats.connection.CONNECT_SECONDS", 1.0)
        with pytest.raises(SetupError, match="cannot connect to NATS"):
            await connect(Upstreams(urls, Login("", **wrong)), "test")
        with pytest.raises(SetupError, match=r"tls_ca: cannot use .*none"):
            await connect(Upstreams(urls, Login("", **login | {"tls_ca": str(tmp_path / "none")})), "test")


async def test_the_doctor_tells_before_a_certificate_expires(tmp_path):
    """Those of the harness are good for an hour."""
    files = {"gateway.tls_cert": issue(tmp_path).cert}
    now = datetime.now(UTC)
    (soon,) = certificate_findings(files, now)
    assert soon.level is Level.PROBLEM
    assert "gateway.tls_cert: the certificate expires on" in soon.text
    (late,) = certificate_findings(files, now + timedelta(hours=2))
    assert "has expired" in late.text
    assert list(certificate_findings(files, now - timedelta(days=20))) == []
    (tmp_path / "cert.pem").write_text("no certificate")
    (broken,) = certificate_findings(files, now)
    assert "cannot be read" in broken.text


async def _ignore(_error: Exception) -> None:
    pass
