"""`mediator mcp`, used by the TypeScript SDK of the Model Context Protocol, over stdio and HTTP."""

import asyncio

from tests.harness.app import BOB
from tests.harness.node import FOLDER, install
from tests.harness.service import Service
from tests.integration.test_mcp import PROGRAM, guarded, url

__all__ = ["guarded", "url"]
WITHIN = 60.0


async def use(*arguments: str) -> None:
    """Run the client, which ends with an error when something is not as it should be."""
    install()
    process = await asyncio.create_subprocess_exec(
        "node", str(FOLDER / "mcp.js"), *arguments, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(WITHIN):
            _, complained = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, complained.decode()


async def test_the_typescript_sdk_works_over_stdio(guarded: Service) -> None:
    login = ("--server", guarded.nats_url, "--user", "ada", "--password", "pw-ada")
    await use(*PROGRAM, *login)


async def test_the_typescript_sdk_works_over_http(url: str) -> None:
    await use(url, BOB)
