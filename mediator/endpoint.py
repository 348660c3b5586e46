"""HOST:PORT as operators write it, whether other machines can reach it, and URLs without logins."""

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Self
from urllib.parse import urlsplit, urlunsplit

_SPLIT = re.compile(r"(?:\[(?P<v6>[^\[\]]*)\]|(?P<host>[^\[\]:]*)):(?P<port>[^:]*)")
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_PORT = re.compile(r"[0-9]{1,5}")
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host (name or address, IPv6 without brackets) and a TCP port; port 0 means any free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``HOST:PORT``, with IPv6 in brackets. Raises ValueError that says what was expected."""
        parts = _SPLIT.fullmatch(text)
        if parts is None:
            hint = ", an IPv6 address in brackets" if text.count(":") > 1 else ""
            raise ValueError(f"expected HOST:PORT{hint}")
        host = _ipv6(parts["v6"]) if parts["v6"] is not None else _name_or_ipv4(parts["host"])
        if not _PORT.fullmatch(parts["port"]) or int(parts["port"]) > _MAX_PORT:
            raise ValueError(f"expected a port from 0 to {_MAX_PORT} after the colon")
        return cls(host, int(parts["port"]))

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it; names other than localhost count as public."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def without_login(urls: str) -> str:
    """Remove user and password from URLs that are joined by commas."""
    parts = (urlsplit(url.strip()) for url in urls.split(","))
    return ",".join(urlunsplit(part._replace(netloc=part.netloc.rpartition("@")[2])) for part in parts)


def _ipv6(text: str) -> str:
    try:
        return str(IPv6Address(text))
    except ValueError:
        raise ValueError("expected an IPv6 address between the brackets") from None


def _name_or_ipv4(text: str) -> str:
    if not text:
        raise ValueError("expected a host before the colon, 0.0.0.0 for every interface")
    if re.fullmatch(r"[0-9.]+", text):
        try:
            return str(IPv4Address(text))
        except ValueError:
            raise ValueError("expected a host name or an IP address before the colon") from None
    if not _NAME.fullmatch(text):
        raise ValueError("expected a host name or an IP address before the colon")
    return text
