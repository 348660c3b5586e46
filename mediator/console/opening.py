"""The pages of the console that the core brings."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from mediator.admin.api import PREFIX
from mediator.admin.sign_in import SignInView
from mediator.broker import Broker
from mediator.console import audit, checks, cleanup, settings, tenants
from mediator.console.console import Console
from mediator.console.mailboxes import MailboxPages
from mediator.console.overview import Overview
from mediator.console.pages import Page, Shown, Visit
from mediator.ops.activity import Activity


def add_core_pages(console: Console, activity: Activity, broker: Broker) -> Callable[[SignInView], Awaitable[str]]:
    """Add the pages of the core; return what writes the page of the sign-in."""
    overview, mailboxes = Overview(console, activity), MailboxPages(console, broker)
    api = Page("/api", "Admin API", _show_api, "Service")
    pages = (*overview.pages(), *mailboxes.pages(), *tenants.PAGES, *audit.PAGES, *settings.PAGES)
    pages = (*pages, *cleanup.PAGES, *checks.PAGES, api)
    console.add_pages("console", Path(__file__).with_name("templates"), *pages)

    async def write_sign_in(view: SignInView) -> str:
        return await console.render("console/sign_in.html", view=view)

    return write_sign_in


async def _show_api(_visit: Visit) -> Shown:
    """Show the admin API's document in Swagger UI, which sends requests as whoever is signed in."""
    return {"document": f"{PREFIX}/openapi.json"}
