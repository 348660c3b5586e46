"""examples/spark_job.py, run by the commands that it prints."""

import json

from tests.harness.examples import run_printed
from tests.harness.service import Services
from tests.harness.spark import environment


async def test_the_spark_job_sends_totals_of_a_mailbox(services: Services):
    service = await services.running()
    # A table that is wide enough for the payload, whatever the terminal is.
    service.environment |= environment() | {"COLUMNS": "200"}
    given = {"[mediator-data]": str(service.data_dir)}
    *_, shown, found = await run_printed("spark_job", service, given)
    assert "|    tea|     2|  9.0|" in shown
    assert json.dumps({"product": "tea", "orders": 2, "total": 9.0}, separators=(",", ":")) in found
