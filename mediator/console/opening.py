"""Opens the console of a service: its own pages and operations, once the parts have added theirs."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from mediator.admin.api import PREFIX
from mediator.admin.sign_in import SignInView
from mediator.console import audit, checks, cleanup, settings, tenants
from mediator.console.mailboxes import MailboxPages
from mediator.console.overview import Overview
from mediator.console.pages import Page, Shown, Visit
from mediator.http.health import Health
from mediator.ops.activity import TOPIC, Activity
from mediator.ops.ranking import RankingOperations
from mediator.ops.sampling import PERIOD
from mediator.parts import Host


async def open_console(host: Host, health: Health) -> Callable[[SignInView], Awaitable[str]]:
    """Serve the console on the application; return what writes the page of the sign-in."""
    activity = Activity(host.broker, host.settings, health, host.metrics.registry, host.announcer(TOPIC))
    await activity.open(host.operations)
    host.operations.add_methods(RankingOperations(host.broker))
    console = host.console
    overview, mailboxes = Overview(console, activity), MailboxPages(console, host.broker)
    api = Page("/api", "Admin API", _show_api, "Service")
    pages = (*overview.pages(), *mailboxes.pages(), *tenants.PAGES, *audit.PAGES, *settings.PAGES)
    pages = (*pages, *cleanup.PAGES, *checks.PAGES, api)
    console.add_pages("console", Path(__file__).with_name("templates"), *pages)
    console.register(host.app)
    host.add_job(activity.tick, PERIOD, "sample for the console")

    async def write_sign_in(view: SignInView) -> str:
        return await console.render("console/sign_in.html", view=view)

    return write_sign_in


async def _show_api(_visit: Visit) -> Shown:
    """Show the admin API's document in Swagger UI, which sends requests as whoever is signed in."""
    return {"document": f"{PREFIX}/openapi.json"}
