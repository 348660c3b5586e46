"""The command that installs an extra fits how the distribution was installed."""

import json
from pathlib import Path

import pytest

from mediator.system.extras import install_command

CASES = [
    (None, "pip install 'agent-mediator[server]'"),
    ({"url": "file:///src/my%20checkout", "dir_info": {"editable": True}}, "pip install -e '/src/my checkout[server]'"),
    ({"url": "file:///src/checkout", "dir_info": {}}, "pip install '/src/checkout[server]'"),
    (
        {"url": "file:///dist/agent_mediator-1-py3-none-any.whl", "archive_info": {}},
        "pip install '/dist/agent_mediator-1-py3-none-any.whl[server]'",
    ),
    ({"url": "https://host/agent_mediator-1.whl", "archive_info": {}}, "pip install 'agent-mediator[server]'"),
]


@pytest.mark.parametrize(("origin", "command"), CASES)
def test_the_command_names_where_it_came_from(
    origin: object, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "agent_mediator-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: agent-mediator\nVersion: 1\n")
    if origin is not None:
        (folder / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(tmp_path)
    assert install_command("server") == command
