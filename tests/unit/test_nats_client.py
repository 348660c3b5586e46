"""The private names of nats-py that the service's client uses or overrides are still there."""

import pytest
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.protocol.parser import Parser

METHODS = (
    "_build_message",
    "_connect_to_server",
    "_flush_pending",
    "_process_err",
    "_process_headers",
    "_process_info",
    "_process_msg",
    "_process_op_err",
    "_process_pong",
    "_read_loop",
    "_send_command",
)
ATTRIBUTES = (
    "_current_server",
    "_error_cb",
    "_flush_queue",
    "_max_pending_size",
    "_pongs",
    "_ps",
    "_reading_task",
    "_transport",
)


@pytest.mark.parametrize("name", METHODS)
def test_nats_py_still_has_the_method(name: str) -> None:
    assert callable(getattr(Client, name))


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_nats_py_still_has_the_attribute(name: str) -> None:
    assert name in vars(Client())


def test_nats_py_still_has_its_parser_and_stream() -> None:
    assert isinstance(Client()._ps, Parser)
    assert callable(Parser.parse)
    assert "_io_writer" in vars(TcpTransport())
    assert "_id" in vars(Subscription(Client(), id=1))
