"""Operators added, changed and removed in the settings of a running service, by a signal and by the command."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from aiohttp import ClientSession, CookieJar

from tests.harness.service import Services
from tests.harness.waiting import until

ADA, BEN = "token-of-ada-00000", "token-of-ben-00000"
HTML = {"Accept": "text/html"}


def write(file: Path, **tokens: str) -> None:
    listed = [{"name": name, "token": token, "roles": ["admin"]} for name, token in tokens.items()]
    lines = [", ".join(f"{key} = {json.dumps(value)}" for key, value in each.items()) for each in listed]
    file.write_text(f"[operators]\ntokens = [{', '.join(f'{{ {line} }}' for line in lines)}]\n")


async def test_a_removed_operator_is_out_at_once(services: Services, tmp_path: Path) -> None:
    file = tmp_path / "mediator.toml"
    write(file, ada=ADA, ben=BEN)
    service = await services.running(config=file)
    origin = f"http://127.0.0.1:{service.http_port}"
    api = f"{origin}/api/v1/overview"
    async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as browser, ClientSession() as program:

        async def status(token: str) -> int:
            async with program.get(api, headers={"Authorization": f"Bearer {token}"}) as answer:
                return answer.status

        async with program.get(api, headers={"Authorization": f"Bearer {ADA}"}) as answer:
            pid = (await answer.json())["pid"]
        signed = await browser.post(
            f"{origin}/console/sign-in", data={"token": BEN}, headers={"Origin": origin}, allow_redirects=False
        )
        assert signed.status == 303
        live = await browser.get(f"{origin}/console/live")
        assert (await live.content.readline()).startswith(b":")
        write(file, ada=ADA)
        os.kill(pid, signal.SIGHUP)
        # The page that was followed live ends; nothing of the session is left.
        await asyncio.wait_for(live.content.read(), 60)
        page = await browser.get(f"{origin}/console", headers=HTML, allow_redirects=False)
        assert (page.status, await status(BEN), await status(ADA)) == (303, 401, 200)

        write(file, ada=ADA, ben="short")
        os.kill(pid, signal.SIGHUP)
        await until(lambda: service.events("operators not reloaded"), what="bad settings are refused")
        assert await status(ADA) == 200

        write(file, ben=BEN)
        command = [sys.executable, "-m", "mediator", "operators", "reload", "--data-dir", str(service.data_dir)]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        said, _ = await process.communicate()
        assert said.decode() == f"operators from {file}: added ben; removed ada\n"
        headers = {"Authorization": f"Bearer {BEN}"}
        async with program.get(f"{origin}/api/v1/audit?operation=operators-reload", headers=headers) as answer:
            entries = (await answer.json())["entries"]
    assert [(each["via"], each["result"]) for each in entries] == [
        ("socket", "ok"),
        ("signal", "bad_request"),
        ("signal", "ok"),
    ]
