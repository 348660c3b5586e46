"""The admin API's page in a real browser: Swagger UI under the console's policy sends requests as its visitor."""

from pathlib import Path

from tests.harness.app import app
from tests.harness.browser import open_tab
from tests.harness.console_tour import find_faults
from tests.harness.waiting import until

STATUS = "document.querySelector('.live-responses-table .response-col_status')?.innerText ?? ''"
OPEN = "document.querySelector('#operations-%s .opblock-summary-control').click()"
RUN = "document.querySelector('#operations-%s %s')?.click()"


async def test_an_operation_is_tried_out_in_the_browser(tmp_path: Path) -> None:
    async with app(tmp_path) as service, open_tab() as tab:
        await tab.show(f"{service.service.console_link}&next=/console/api")
        blocks = "document.querySelectorAll('.opblock').length"
        await until(lambda: tab.evaluate(f"{blocks} > 20"), what="the operations are shown")
        operation = "cleanup-cleanup"
        await tab.evaluate(OPEN % operation)
        for button in (".try-out__btn", "button.execute"):
            found = f"document.querySelector('#operations-{operation} {button}') !== null"
            await until(lambda found=found: tab.evaluate(found), what=f"{button} is there")
            await tab.evaluate(RUN % (operation, button))
        await until(lambda: tab.evaluate(f"{STATUS}.startsWith('200')"), what="the answer is shown")
        assert await find_faults(tab) == []
        assert tab.complaints == []
        entries = (await service.call("GET", "/api/v1/audit")).json["entries"]
        assert [(one["actor"], one["operation"], one["result"]) for one in entries] == [
            ("local", "cleanup", "ok"),
            ("local", "sign-in", "ok"),
        ]
