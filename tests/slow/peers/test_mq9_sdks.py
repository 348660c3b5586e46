"""The programs of docs/howto/mq9-sdks.md as printed, on mq9's SDKs in Go and Rust.

No package index has these SDKs: MQ9_SDKS names a checkout of robustmq/mq9, with the folders `go` and `rust`.
"""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from tests.harness.pages import ROOT, blocks
from tests.harness.service import Service

pytestmark = pytest.mark.timeout(600)
PAGE = ROOT / "docs" / "howto" / "mq9-sdks.md"
PRINTED_URL = "nats://127.0.0.1:4222"
GO = """\
module tasks

go 1.21

require github.com/robustmq/mq9/go v0.0.0

replace github.com/robustmq/mq9/go => {sdk}
"""
RUST = """\
[package]
name = "tasks"
version = "0.1.0"
edition = "2021"

[dependencies]
mq9 = {{ path = "{sdk}" }}
tokio = {{ version = "1", features = ["full"] }}
"""


def sdk_of(language: str, tool: str) -> Path:
    """Return the folder of an SDK; where it or its toolchain is missing the test is skipped."""
    checkout = os.environ.get("MQ9_SDKS")
    if checkout is None:
        pytest.skip("mq9's SDKs are in no package index: MQ9_SDKS names a checkout of robustmq/mq9")
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not there")
    return Path(checkout).resolve() / language


def write_program(language: str, service: Service, file: Path) -> None:
    """Write the page's program, for the service of the test and a mailbox of its own."""
    (text,) = [block.text for block in blocks(PAGE) if block.language == language]
    assert PRINTED_URL in text
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text.replace(PRINTED_URL, service.nats_url).replace("sdk.tasks", f"sdk.tasks.{language}"))


async def run(folder: Path, *command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    printed, complained = await process.communicate()
    assert process.returncode == 0, complained.decode()
    return printed.decode()


@pytest.mark.rule("F1", "F9", "K2")
async def test_the_program_in_go_does_its_tasks(service: Service, tmp_path: Path):
    sdk = sdk_of("go", "go")
    write_program("go", service, tmp_path / "main.go")
    (tmp_path / "go.mod").write_text(GO.format(sdk=sdk))
    await run(tmp_path, "go", "mod", "tidy")
    assert (await run(tmp_path, "go", "run", ".")).splitlines() == ["task 1", "task 2", "task 3"]


@pytest.mark.rule("F1", "F9", "K2")
async def test_the_program_in_rust_does_its_tasks(service: Service, tmp_path: Path):
    sdk = sdk_of("rust", "cargo")
    write_program("rust", service, tmp_path / "src" / "main.rs")
    (tmp_path / "Cargo.toml").write_text(RUST.format(sdk=sdk))
    assert (await run(tmp_path, "cargo", "run", "--quiet")).splitlines() == ["task 1", "task 2", "task 3"]
