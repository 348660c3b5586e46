"""An A2A agent that is reached through its mailbox, also while it is offline.

Two programs, which share nothing but the mediator:

    python examples/a2a_offline_agent.py bridge --mailbox a2a.recipes   # always on: an A2A server at port 9100
    python examples/a2a_offline_agent.py agent --mailbox a2a.recipes    # comes and goes: the agent itself

Callers see one ordinary A2A agent. The bridge stores each request as mail and answers with a task; the agent fetches
the mail when it runs and answers by mail, which completes the task. Tasks are kept in a mailbox, too, one message for
each, so neither of the two loses anything when it is killed. docs/howto/a2a.md explains it.
"""

import argparse
import asyncio
import contextlib

import uvicorn
from a2a.helpers import new_task_from_user_message, new_text_message
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.context import ServerCallContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes
from a2a.server.tasks import InMemoryTaskStore, TaskStore, TaskUpdater
from a2a.types import (
    AgentCapabilities,
    AgentCard,
    AgentInterface,
    AgentSkill,
    ListTasksRequest,
    ListTasksResponse,
    Message,
    Role,
    SendMessageRequest,
    SendMessageResponse,
    Task,
    TaskState,
    TaskStatus,
)
from google.protobuf.json_format import MessageToDict, ParseDict
from starlette.applications import Starlette

from mediator.client import Client, Mailbox


def card(url: str) -> AgentCard:
    """Describe the agent; callers reach it at the bridge's URL."""
    return AgentCard(
        name="Recipe finder", description="Finds a recipe for what is in the fridge.", version="1.0.0",
        default_input_modes=["text/plain"], default_output_modes=["text/plain"], capabilities=AgentCapabilities(),
        supported_interfaces=[AgentInterface(url=url, protocol_binding="JSONRPC", protocol_version="1.0")],
        skills=[AgentSkill(id="find", name="Find a recipe", description="Names a dish.", tags=["food"])],
    )  # fmt: skip


class RecipeFinder(AgentExecutor):
    """The agent, as it would be without a mailbox."""

    async def execute(self, context: RequestContext, queue: EventQueue) -> None:
        await queue.enqueue_event(new_text_message(f"A gratin of {context.get_user_input()}.", role=Role.ROLE_AGENT))

    async def cancel(self, context: RequestContext, queue: EventQueue) -> None:
        raise NotImplementedError


async def run_agent(box: Mailbox, executor: AgentExecutor) -> None:
    """Answer the requests in the mailbox with an executor as any A2A server has one."""
    handler = DefaultRequestHandler(executor, InMemoryTaskStore(), card("http://localhost"))
    async for mail in box.consume(group="agent", lease=10):
        async with mail:  # acknowledged when the answer is on disk; else it comes again
            request = ParseDict(mail.json(), SendMessageRequest())
            result = await handler.on_message_send(request, ServerCallContext())
            answer = SendMessageResponse(**{"task" if isinstance(result, Task) else "message": result})
            await box.reply(mail, MessageToDict(answer), key=mail.key, dedup_id=mail.key)


class MailboxTaskStore(TaskStore):
    """Keeps tasks in a mailbox: the message with a task's id as its key is the task as it is now."""

    def __init__(self, box: Mailbox) -> None:
        self._box = box

    async def save(self, task: Task, context: ServerCallContext) -> None:
        await self._box.send(MessageToDict(task), key=task.id)

    async def get(self, task_id: str, context: ServerCallContext) -> Task | None:
        found = await self._box.query(key=task_id)
        return ParseDict(found[0].json(), Task()) if found else None

    async def list(self, params: ListTasksRequest, context: ServerCallContext) -> ListTasksResponse:
        tasks = [ParseDict(message.json(), Task()) for message in await self._box.query(limit=100)]
        return ListTasksResponse(tasks=tasks, total_size=len(tasks), page_size=100)

    async def delete(self, task_id: str, context: ServerCallContext) -> None:
        for message in await self._box.query(key=task_id):
            await self._box.delete(message.msg_id)


class MailboxExecutor(AgentExecutor):
    """Hands requests to an agent by mail, and waits for its answers, however long it takes."""

    def __init__(self, agent: Mailbox, answers: Mailbox, tasks: TaskStore) -> None:
        self._agent = agent
        self._answers = answers
        self._tasks = tasks
        self._waiting: dict[str, asyncio.Future[Task]] = {}

    async def execute(self, context: RequestContext, queue: EventQueue) -> None:
        task = context.current_task or new_task_from_user_message(context.message)
        await self._tasks.save(task, context.call_context)  # before the mail that can be answered
        message = Message()
        message.CopyFrom(context.message)
        message.ClearField("task_id")  # the task is the bridge's; the agent may have one of its own
        done = self._waiting[task.id] = asyncio.get_running_loop().create_future()
        try:
            await self._agent.send(
                MessageToDict(SendMessageRequest(message=message)),
                key=task.id, dedup_id=task.id, reply_to=self._answers.address,
            )  # fmt: skip
            updater = TaskUpdater(queue, task.id, task.context_id)
            await updater.submit()  # only now the caller has the task: the request is on disk
            answered = await done
            for artifact in answered.artifacts:
                await updater.add_artifact(list(artifact.parts), artifact.artifact_id, artifact.name)
            await updater.update_status(answered.status.state, answered.status.message)
        finally:
            del self._waiting[task.id]

    async def cancel(self, context: RequestContext, queue: EventQueue) -> None:
        for mail in await self._agent.query(key=context.task_id):
            await self._agent.delete(mail.msg_id)  # as long as the agent has not taken it
        await TaskUpdater(queue, context.task_id, context.context_id).cancel()

    async def take_answers(self) -> None:
        """Complete tasks as answers come, also those of callers before the last start of the bridge."""
        async for mail in self._answers.consume(group="bridge", lease=10):
            async with mail:
                answer = ParseDict(mail.json(), SendMessageResponse())
                task = await self._tasks.get(mail.key, ServerCallContext())
                if task is None or task.status.state == TaskState.TASK_STATE_CANCELED:
                    continue
                if answer.HasField("task"):
                    task.status.CopyFrom(answer.task.status)
                    task.artifacts.extend(answer.task.artifacts)
                else:
                    task.status.CopyFrom(TaskStatus(state=TaskState.TASK_STATE_COMPLETED, message=answer.message))
                await self._tasks.save(task, ServerCallContext())
                waiting = self._waiting.get(mail.key)
                if waiting is not None and not waiting.done():
                    waiting.set_result(task)


async def run_bridge(box: Mailbox, port: int) -> None:
    """Serve the agent's place in the world of A2A."""
    answers = await box.client.create(f"{box.address}.answers", retention="until_ack", exist_ok=True)
    tasks = MailboxTaskStore(await box.client.create(f"{box.address}.tasks", exist_ok=True))
    executor = MailboxExecutor(box, answers, tasks)
    url = f"http://127.0.0.1:{port}"
    handler = DefaultRequestHandler(executor, tasks, card(url))
    app = Starlette(routes=[*create_agent_card_routes(card(url)), *create_jsonrpc_routes(handler, "/")])
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    taking = asyncio.create_task(executor.take_answers())
    await server.serve()
    taking.cancel()
    await handler.aclose()


async def main() -> None:
    parser = argparse.ArgumentParser(description="An A2A agent that is reached through its mailbox.")
    parser.add_argument("part", choices=("bridge", "agent"))
    parser.add_argument("--mailbox", required=True)
    parser.add_argument(
        "--server", default="nats://127.0.0.1:4222", help="with a login: nats://user:password@host:4222"
    )
    parser.add_argument("--port", type=int, default=9100, help="of the bridge")
    options = parser.parse_args()
    async with Client(options.server) as client:
        box = await client.create(options.mailbox, retention="until_ack", exist_ok=True)
        await (run_agent(box, RecipeFinder()) if options.part == "agent" else run_bridge(box, options.port))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
