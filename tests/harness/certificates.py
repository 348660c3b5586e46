"""Certificates for TLS: an authority of the test's own, and one of this machine that it vouches for."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Certificate:
    """Files in PEM."""

    authority: Path
    cert: Path
    key: Path


def issue(folder: Path, host: str = "localhost") -> Certificate:
    """Make an authority, and a certificate for a host and 127.0.0.1."""
    root, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    names = [x509.DNSName(host), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    authority = (
        _builder(issuer, issuer, root.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(root, hashes.SHA256())
    )
    cert = (
        _builder(subject, issuer, key.public_key())
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(root, hashes.SHA256())
    )
    made = Certificate(folder / "authority.pem", folder / "cert.pem", folder / "key.pem")
    made.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    made.cert.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    made.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return made


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    hour = datetime.timedelta(hours=1)
    return x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number(), now - hour, now + hour)
