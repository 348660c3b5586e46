"""The console over a store, without doors: what it serves, to whoever has which roles."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import ClientResponse, ClientSession, CookieJar
from aiohttp.test_utils import TestServer

from mediator.console.console import Console
from mediator.console.core_pages import add_core_pages
from mediator.gateway.clients import ClientOperations
from mediator.host import Host
from mediator.http.app import build_app
from mediator.http.callers import HttpCallers
from mediator.http.health import Health
from mediator.nats.door import RecentRequests
from mediator.operate.access import Access, CookieSealer, EndedSessions
from mediator.operate.activity import SAMPLE_SECONDS, Activity
from mediator.operate.alarms import Alarms
from mediator.operate.backlog import BacklogMeter
from mediator.operate.copy_operations import CopyOperations
from mediator.operate.findings import RecentRefusals
from mediator.operate.logs import LogOperations
from mediator.operate.long_tasks import LongTaskOperations, LongTasks
from mediator.operate.mailbox_operations import MailboxOperations, RankingOperations
from mediator.operate.message_operations import DeadOperations, MessageOperations
from mediator.operate.service_operations import ServiceOperations, SettingsOperations
from mediator.operate.sign_in import SignIn
from mediator.operate.surroundings import Surroundings
from mediator.operate.tenant_operations import TenantOperations
from mediator.tenants.directory import TenantDirectory, TenantUpdater
from tests.harness.core import Core, core, make_settings

ROLES = ("read", "operate", "read-payload", "admin")
HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def token(role: str) -> str:
    """Return the token of the operator with one role, who is named as the role."""
    return f"token-of-whoever-may-{role}"


@dataclass
class ConsoleSite:
    """A console, and a browser's session with it."""

    core: Core
    host: Host
    session: ClientSession
    server: TestServer
    alarms: Alarms
    role: str = "admin"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {token(self.role)}", **HTML}

    async def get(self, path: str, **options: Any) -> ClientResponse:
        headers = {**self.headers, **options.pop("headers", {})}
        return await self.session.get(self.server.make_url(path), headers=headers, allow_redirects=False, **options)

    async def read(self, path: str) -> str:
        answer = await self.get(path)
        text = await answer.text()
        assert answer.status == 200, text
        return text

    async def act(self, operation: str, **fields: Any) -> ClientResponse:
        return await self.session.post(
            self.server.make_url(f"/console/do/{operation}"), data=fields, headers=self.headers, allow_redirects=False
        )


@asynccontextmanager
async def console_site(
    folder: Path, open_part: Callable[[Host], None] = lambda _host: None
) -> AsyncIterator[ConsoleSite]:
    """Run one; each role has an operator with a token. ``open_part`` does what a part would."""
    operators = {"tokens": [{"name": role, "token": token(role), "roles": [role]} for role in ROLES]}
    settings = make_settings(data_dir=folder, operators=operators, backup_dir=folder / "backups")
    async with core(folder, audited=True) as inner:
        health, directory = Health(), TenantDirectory(settings, inner.clock)
        callers = HttpCallers.of_service(settings, directory)
        access = Access(settings, CookieSealer(b"k" * 32), callers, EndedSessions(inner.broker))
        app = build_app(health, inner.metrics.registry)
        host = Host(
            settings,
            broker=inner.broker,
            metrics=inner.metrics,
            health=health,
            scheduler=inner.scheduler,
            operations=inner.operations,
            announcer=lambda _topic: None,
            app=app,
            http_port=0,
            tenants=directory,
            callers=callers,
            access=access,
            console=Console(inner.operations, access),
            surroundings=Surroundings(inner.broker, inner.metrics, {}),
        )
        host.operations.add_methods(MailboxOperations(inner.broker, directory.names))
        host.operations.add_methods(ClientOperations(inner.broker, None, RecentRequests()))
        host.operations.add_methods(MessageOperations(inner.broker))
        host.operations.add_methods(CopyOperations(inner.broker, directory.names, has_nats=False))
        host.operations.add_methods(DeadOperations(inner.broker))
        backlog = BacklogMeter(inner.broker, 10, 0)
        refusals = RecentRefusals(inner.metrics.requests.counts)
        service = ServiceOperations(
            inner.broker, settings, directory, health, "", 0, host.doctor_checks, backlog, refusals
        )
        host.operations.add_methods(service)
        alarms = Alarms(inner.broker, settings.instance, service.find)
        await alarms.open()
        host.operations.add_methods(alarms)
        host.operations.add_methods(SettingsOperations(settings, access.apply_settings))
        host.operations.add_methods(LogOperations())
        updater = TenantUpdater(inner.broker, directory, None, None)
        host.operations.add_methods(TenantOperations(inner.broker, settings, directory, updater))
        tasks = LongTasks(settings)
        host.operations.add_methods(LongTaskOperations(tasks, settings))
        open_part(host)
        sign_in = SignIn(access, settings, 0, inner.operations)
        sign_in.add_routes(app)
        activity = Activity(inner.broker, backlog, settings, health, inner.metrics.registry, None)
        await activity.open(inner.operations)
        host.add_job(activity.tick, SAMPLE_SECONDS)
        inner.operations.add_methods(RankingOperations(inner.broker))
        sign_in.render = add_core_pages(host.console, activity, inner.broker)
        host.console.register(app)
        try:
            async with TestServer(app) as server, ClientSession(cookie_jar=CookieJar(unsafe=True)) as session:
                yield ConsoleSite(inner, host, session, server, alarms)
        finally:
            await tasks.stop()
