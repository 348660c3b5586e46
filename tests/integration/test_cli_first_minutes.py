"""What a newcomer runs into: which service a command speaks to, and what it says when something is wrong."""

import datetime
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.integration.test_cli import Service, alone, external, mediator, run, service

__all__ = ["alone", "external", "mediator", "service"]

GUARDED = """
log_level = "debug"
[gateway]
tls_cert = "{folder}/cert.pem"
tls_key = "{folder}/key.pem"
[registry]
enabled = false
[tenants.acme]
users = [{{ name = "ann", password = "right" }}]
[tenants.beta]
users = [{{ name = "bob", password = "right" }}]
"""


def write_certificate(folder: Path) -> None:
    """Write a certificate for a public name, which no authority that this machine knows has signed, and its key."""

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    key, authority = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name("mail.example.com"))
        .issuer_name(name("an authority of its own"))
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .sign(authority, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service of two tenants, whose clients log in and encrypt."""
    folder = tmp_path_factory.mktemp("guarded")
    write_certificate(folder)
    (folder / "m.toml").write_text(GUARDED.format(folder=folder))
    service = Service(folder, "--config", folder / "m.toml")
    yield service
    assert service.stop() == 0


# Which service a command speaks to.


def test_a_command_speaks_to_the_service_of_its_data_directory(alone, service, guarded, tmp_path):
    assert alone("mailbox", "create", "mine", "--data-dir", service.data_dir).code == 0
    (tmp_path / "m.toml").write_text(f'data_dir = "{service.data_dir}"\n')
    assert alone("send", "mine", "x", "--config", "m.toml").out == "sent, msg_id 0\n"
    shown = alone("query", "mine", "--data-dir", guarded.data_dir, "--user", "ann", "--password", "right")
    assert shown.err == "mediator: mailbox mine does not exist\n"


def test_a_command_speaks_to_no_other_service(alone, external, tmp_path, monkeypatch):
    # Somebody else's server stands where this service would listen.
    port = external("")
    monkeypatch.setenv("MEDIATOR_NATS", f"127.0.0.1:{port}")
    for arguments, start in (
        ((), "mediator serve"),
        (("--data-dir", "other place"), "mediator serve --data-dir 'other place'"),
    ):
        result = alone("send", "a", "secret", *arguments)
        assert result.code == 1
        assert f"no service runs on {tmp_path}/" in result.err
        assert f"; start `{start}`, or " in result.err
    # One that was named is asked, and one that the settings name.
    url = f"nats://127.0.0.1:{port}"
    assert alone("send", "a", "x", "--server", url).err == f"mediator: no mediator answers on {url}\n"
    monkeypatch.setenv("MEDIATOR_NATS_URL", url)
    assert alone("send", "a", "x").err == f"mediator: no mediator answers on {url}\n"


def test_commands_trust_the_certificate_of_their_own_service_and_print_no_warning(guarded):
    result = run("mailbox", "create", "--data-dir", guarded.data_dir, "--user", "ann", "--password", "right")
    assert (result.code, result.err) == (0, "")


# What is wrong is said.


@pytest.mark.parametrize(
    ("login", "said"),
    [
        (("--user", "ann", "--password", "wrong"), "user or password is wrong"),
        (("--user", "nobody", "--password", "right"), "user or password is wrong"),
        ((), "it asks for a login"),
    ],
)
def test_a_refused_login_is_called_so(alone, guarded, login, said):
    result = alone("send", "a", "x", "--data-dir", guarded.data_dir, *login)
    assert result.code == 1
    assert result.err == f"mediator: cannot connect to {guarded.nats}: {said}; give --user and --password\n"


def test_a_server_that_cannot_be_used_is_called_so(alone, guarded, service, monkeypatch):
    monkeypatch.setattr("mediator.cli.client.CONNECT_SECONDS", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for server, said in (
            (guarded.nats, "its certificate is not trusted (unable to get local issuer certificate); SSL_CERT_FILE"),
            (f"nats://127.0.0.1:{service.http}", "no NATS server answers there within "),
            (f"nats://127.0.0.1:{silent.getsockname()[1]}", "no NATS server answers there within "),
            ("nats://nowhere.invalid:4222", "no such host"),
        ):
            result = alone("send", "a", "x", "--server", server)
            assert result.code == 1
            assert result.err.startswith(f"mediator: cannot connect to {server}: {said}")
            assert "mediator serve" not in result.err
