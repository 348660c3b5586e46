"""The command that installs an extra of this distribution, from where the distribution itself was installed."""

import json
import shlex
from importlib.metadata import Distribution, PackageNotFoundError
from importlib.util import find_spec
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "agent-mediator"


def has_server() -> bool:
    """Whether what the service needs is installed."""
    return find_spec("peewee") is not None


def install_command(extra: str) -> str:
    """Return the command: it names a checkout or a wheel on disk where pip recorded one (PEP 610), else the index."""
    try:
        origin = json.loads(Distribution.from_name(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    url = urlsplit(origin.get("url", ""))
    source = unquote(url.path) if url.scheme == "file" else DISTRIBUTION
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}{shlex.quote(f'{source}[{extra}]')}"
