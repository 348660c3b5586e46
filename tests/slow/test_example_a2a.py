"""examples/a2a_offline_agent.py: an A2A client reaches an agent that is offline, through programs that are killed."""

import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from a2a.client import Client, ClientConfig, create_client
from a2a.helpers import get_message_text, new_text_message
from a2a.types import CancelTaskRequest, GetTaskRequest, Role, SendMessageRequest, Task, TaskState

from tests.harness.service import Service, free_port, listening, spawn
from tests.harness.waiting import until

EXAMPLE = Path(__file__).parents[2] / "examples/a2a_offline_agent.py"


class Programs:
    """The bridge and the agent, started as the example's first lines say."""

    def __init__(self, service: Service, folder: Path) -> None:
        self.port = free_port()
        self._command = [sys.executable, str(EXAMPLE), "{}", "--mailbox", "a2a.recipes", "--server", service.nats_url]
        self._log = folder / "a2a.log"
        self._running: dict[str, object] = {}

    def start(self, part: str) -> None:
        command = [word.format(part) for word in self._command]
        self._running[part] = spawn([*command, "--port", str(self.port)], self._log)

    def kill(self, part: str) -> None:
        process = self._running.pop(part)
        process.kill()
        process.wait()

    async def bridge(self) -> None:
        """Start the bridge and wait until it takes calls."""
        self.start("bridge")
        await until(lambda: listening(self.port), what="the bridge listens")

    def close(self) -> None:
        for part in list(self._running):
            self.kill(part)


@pytest.fixture
def programs(service: Service, tmp_path: Path) -> Iterator[Programs]:
    programs = Programs(service, tmp_path)
    try:
        yield programs
    finally:
        programs.close()


async def connected(programs: Programs, stack: AsyncExitStack, **options: bool) -> Client:
    client = await create_client(f"http://127.0.0.1:{programs.port}", ClientConfig(streaming=False, **options))
    return await stack.enter_async_context(client)


async def asked(client: Client, text: str) -> Task:
    request = SendMessageRequest(message=new_text_message(text, role=Role.ROLE_USER))
    [answer] = [event async for event in client.send_message(request)]
    return answer.task


async def answered(client: Client, task: Task) -> str:
    """Poll until a task is completed, and return what the agent said."""

    async def is_completed() -> Task | None:
        found = await client.get_task(GetTaskRequest(id=task.id))
        return found if found.status.state == TaskState.TASK_STATE_COMPLETED else None

    return get_message_text((await until(is_completed, what="the agent answers")).status.message)


async def test_an_offline_agent_answers_when_it_returns(programs: Programs, stack: AsyncExitStack) -> None:
    await programs.bridge()
    client = await connected(programs, stack, polling=True)
    leeks, eggs, given_up = [await asked(client, text) for text in ("leeks", "eggs", "old milk")]
    assert leeks.status.state == TaskState.TASK_STATE_SUBMITTED
    cancelled = await client.cancel_task(CancelTaskRequest(id=given_up.id))
    assert cancelled.status.state == TaskState.TASK_STATE_CANCELED
    programs.kill("bridge")
    await programs.bridge()
    programs.start("agent")
    assert await answered(client, leeks) == "A gratin of leeks."
    assert await answered(client, eggs) == "A gratin of eggs."
    # Who waits gets the answer itself.
    waiting = await asked(await connected(programs, stack), "rice")
    assert get_message_text(waiting.status.message) == "A gratin of rice."
    programs.kill("agent")
    later = await asked(client, "beans")
    programs.start("agent")
    assert await answered(client, later) == "A gratin of beans."
    state = (await client.get_task(GetTaskRequest(id=given_up.id))).status.state
    assert state == TaskState.TASK_STATE_CANCELED
