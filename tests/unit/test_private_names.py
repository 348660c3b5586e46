"""Private names of other packages, which any release may change: the code uses those listed here, and no others.

Before a package is updated past its range in pyproject.toml, read how it changed around the names listed for it, mend
the list, and run the tests that it names.
"""

import ast
import importlib
import inspect
import re
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from packaging.requirements import Requirement
from packaging.version import Version

from tests.harness.parsing import parse

ROOT = Path(__file__).parents[2]
OURS = ("conformance", "mediator", "pickup", "pipeline", "registry")


class Leaning(NamedTuple):
    """A class of ours that uses or overrides private names of its bases from another package."""

    name: str
    package: str
    names: set[str]
    tests: str
    """What to run when the package changes."""


HTTP = "tests/integration/test_http.py, test_http_direct.py, test_audit_availability.py; python -m benchmarks didcomm"
NATS = "tests/integration/test_nats_*.py, test_tls_files.py, tests/slow/ha/test_nats_cluster.py"
CLASSES = (
    Leaning(
        "mediator.http.connections.HttpConnection",
        "aiohttp",
        {"_current_request", "_request_count", "_upgraded"},
        HTTP,
    ),
    Leaning(
        "mediator.http.direct.DirectConnection",
        "aiohttp",
        {
            *("_buffer_paused", "_close", "_force_close", "_handler_waiter", "_keepalive_timeout", "_loop", "_manager"),
            *("_messages", "_msg_queue_resume_size", "_next_keepalive_close_time", "_parser", "_reading_paused"),
            *("_request_in_progress", "_resume_reading_if_drained", "_waiter"),
        },
        HTTP,
    ),
    Leaning("mediator.http.server._Request", "aiohttp", {"_prepare_hook"}, HTTP),
    Leaning("mediator.mcp.server.AssistantServer", "mcp", {"_lowlevel_server"}, "tests/integration/test_mcp.py"),
    Leaning(
        "mediator.nats.client.NatsClient",
        "nats-py",
        {
            *("_build_message", "_error_cb", "_flush_pending", "_flush_queue", "_max_pending_size", "_pongs"),
            *("_process_err", "_process_headers", "_process_op_err", "_process_pong", "_ps", "_read_loop"),
            *("_reading_task", "_send_command"),
        },
        NATS,
    ),
    Leaning("mediator.nats.tls.TlsClient", "nats-py", {"_current_server", "_process_info"}, NATS),
    Leaning(
        "mediator.tls_client.TlsClient",
        "nats-py",
        {"_close", "_connect_to_server", "_pending", "_pending_data_size", "_reconnection_task", "_transport"},
        NATS,
    ),
    Leaning("mediator.tls_client._Transport", "nats-py", {"_io_writer"}, NATS),
)
REACHED = {
    ("mediator/http/server.py", "_make_request"),
    ("mediator/nats/client.py", "_process_msg"),
    ("mediator/nats/connection.py", "_id"),
}
"""Private names of objects that are no bases of ours, by file."""
PUBLIC = {"_asdict", "_replace", "_fields", "_field_defaults"}
"""Documented names of the standard library that begin with an underscore."""

USED = re.compile(r"\w\)?\]?\.(_[a-z]\w*)")
DEFINED = re.compile(
    r"""def (_\w+)|self\.(_\w+)(?=[^\n()]* [+|]?= )|^ +(_\w+)(?:: .+| = .+)$|"(_\w+)\"""", re.MULTILINE
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def tree_of(found: type) -> ast.AST:
    return parse(textwrap.dedent(inspect.getsource(found)))


def private_names_of(found: type) -> set[str]:
    """Return the private names that a class defines, or stores in its instances."""
    stored = (node for node in ast.walk(tree_of(found)) if isinstance(node, ast.Attribute))
    names = {*vars(found), *(node.attr for node in stored if isinstance(node.ctx, ast.Store))}
    return set(filter(is_private, names))


def is_foreign(found: type) -> bool:
    return found.__module__.partition(".")[0] not in {*OURS, *sys.stdlib_module_names}


@pytest.mark.parametrize("leaning", CLASSES, ids=lambda leaning: leaning.name)
def test_a_class_uses_the_private_names_listed(leaning: Leaning) -> None:
    module, _, name = leaning.name.rpartition(".")
    ours: type = getattr(importlib.import_module(module), name)
    theirs = set().union(*map(private_names_of, filter(is_foreign, ours.__mro__)))
    nodes = list(ast.walk(tree_of(ours)))
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    overridden = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert theirs & (used | overridden) == leaning.names, f"{leaning.package} changed? Then run {leaning.tests}"


def test_objects_of_nats_py_have_the_names_used() -> None:
    assert callable(Client._process_msg)
    assert "_id" in vars(Subscription(Client(), id=1))


def test_no_other_private_names_are_used() -> None:
    """Found where nothing of ours has the name; a base's name that another class of ours has too escapes this."""
    texts = {
        str(path.relative_to(ROOT)): path.read_text() for package in OURS for path in (ROOT / package).rglob("*.py")
    }
    ours = {name for text in texts.values() for groups in DEFINED.findall(text) for name in groups}
    known = PUBLIC.union(ours, *(leaning.names for leaning in CLASSES))
    used = {(path, name) for path, text in texts.items() for name in USED.findall(text) if name not in known}
    assert used <= REACHED


@pytest.mark.parametrize("package", sorted({leaning.package for leaning in CLASSES}))
def test_a_package_used_so_is_held_at_its_minor(package: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    ranges = [wanted.specifier for wanted in map(Requirement, listed) if wanted.name == package]
    installed = Version(importlib.metadata.version(package))
    next_minor = f"{installed.major}.{installed.minor + 1}.0"
    assert ranges
    assert all(installed in each and next_minor not in each for each in ranges), next_minor
