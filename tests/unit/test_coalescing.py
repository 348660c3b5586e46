"""A coalescing task runs once at a time, once more when called meanwhile, and none is lost to an error."""

import asyncio
import logging

import pytest

from mediator.errors import UnavailableError
from mediator.operate.scheduler import CoalescingTask


class Work:
    """Work that a test lets go on, step by step."""

    def __init__(self, *raised: Exception) -> None:
        self.raised = list(raised)
        self.begun = asyncio.Semaphore(0)
        self.go_on = asyncio.Semaphore(0)
        self.done = 0
        self.beside = 0
        self.at_once = 0

    async def __call__(self) -> None:
        self.beside += 1
        self.at_once = max(self.at_once, self.beside)
        try:
            self.begun.release()
            await self.go_on.acquire()
            if self.raised:
                raise self.raised.pop(0)
            self.done += 1
        finally:
            self.beside -= 1


async def begun(work: Work) -> None:
    async with asyncio.timeout(30):
        await work.begun.acquire()


async def ended(task: CoalescingTask) -> None:
    # What is left of it needs a few turns of the loop and nothing else.
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.running


async def test_calls_while_it_runs_make_it_run_once_more() -> None:
    work = Work()
    task = CoalescingTask("test", work)
    task.call()
    await begun(work)
    for _ in range(5):
        task.call()
    work.go_on.release()
    await begun(work)
    work.go_on.release()
    await ended(task)
    assert (work.done, work.at_once) == (2, 1)


@pytest.mark.parametrize("error", [UnavailableError("full"), RuntimeError("bug")])
async def test_an_error_is_logged_and_the_next_call_runs(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    work = Work(error)
    task = CoalescingTask("test", work)
    for _ in range(2):
        task.call()
        await begun(work)
        work.go_on.release()
        await ended(task)
    assert work.done == 1


async def test_stopped_it_runs_no_more() -> None:
    work = Work()
    task = CoalescingTask("test", work)
    task.call()
    await begun(work)
    await task.stop()
    task.call()
    assert not task.running
    assert (work.done, work.beside) == (0, 0)
