"""Reading what other servers answer, in whatever pieces it comes."""

import aiohttp
import orjson
import pytest

from conformance.checks import Transcript
from conformance.didcomm import DidcommSession, Target
from mediator.http.bodies import read_body
from pickup.rules.records import Generation
from tests.harness.pieces import serving_in_pieces


@pytest.mark.parametrize(
    ("max_bytes", "expected"), [(0, b""), (2, b"ab"), (3, b"abc"), (4, b"abcd"), (6, b"abcdef"), (9, b"abcdef")]
)
async def test_a_body_is_read_to_its_end_or_the_limit(max_bytes: int, expected: bytes) -> None:
    async with (
        serving_in_pieces(b"abc", b"d", b"ef") as port,
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/") as response,
    ):
        assert await read_body(response, max_bytes) == expected


async def test_conformance_finds_an_invitation_that_comes_in_pieces() -> None:
    kind = "https://didcomm.org/out-of-band/1.1/invitation"
    document = orjson.dumps({"@type": kind, "@id": "one", "services": ["did:example:mediator"]})
    async with serving_in_pieces(document[:40], document[40:]) as port:
        target = await Target.find([f"http://127.0.0.1:{port}"], 10)
        assert target.invitations[Generation.V1].id == "one"


async def test_conformance_reads_the_whole_answer_to_an_envelope() -> None:
    async with (
        serving_in_pieces(b'{"protected":', b' "x"}') as port,
        DidcommSession.open(Target({}), Transcript(), 10) as session,
    ):
        answer = await session.post(f"http://127.0.0.1:{port}/", b"{}", Generation.V2)
        assert (answer.status, answer.body) == (200, b'{"protected": "x"}')
