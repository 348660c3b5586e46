"""What a publish of an older edition says, whatever its subject, headers and body (E1–E5), and the shapes of E11."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.errors import BadRequestError, MessageTooLargeError
from mediator.mailboxes.lanes import Lane
from mediator.nats.client import find_client
from mediator.nats.editions import encode_python_push, encode_python_reply, is_python_client, read_publish
from mediator.nats.subjects import Edition

WORDS = {
    Edition.FIRST: {"urgent": Lane.URGENT, "normal": Lane.NORMAL, "notify": Lane.LOW},
    Edition.LATER: {
        "critical": Lane.CRITICAL,
        "high": Lane.CRITICAL,
        "urgent": Lane.URGENT,
        "normal": Lane.NORMAL,
        "low": Lane.LOW,
    },
}
EDITIONS = st.sampled_from(Edition)
ADDRESSES = st.from_regex(r"[a-z0-9]{1,8}(\.[a-z0-9]{1,8}){0,3}", fullmatch=True).filter(lambda name: name != "public")
PREFIXED = {"dedup_id": "mq9-dedup-id", "tags": "mq9-tags", "expire_at": "mq9-expire-at", "send_at": "mq9-send-at"}


@pytest.mark.rule("E1", "E2")
@given(EDITIONS, ADDRESSES, st.data())
def test_a_lane_word_is_cut_off_once_whatever_the_address_is(edition, address, data):
    word, lane = data.draw(st.sampled_from(sorted(WORDS[edition].items())))
    found = read_publish(edition, f"{address}.{word}", b"", None)
    assert (found.address, found.draft.lane) == (address, lane)


@pytest.mark.rule("E2")
@given(EDITIONS, ADDRESSES)
def test_without_a_lane_word_all_is_the_address(edition, address):
    last = address.rpartition(".")
    if last[0] and last[2] in WORDS[edition]:
        return
    found = read_publish(edition, address, b"", {"mq9-priority": "urgent"})
    assert (found.address, found.draft.lane) == (address, Lane.URGENT)


@pytest.mark.rule("E2", "A1")
@pytest.mark.parametrize("rest", ["", "Task", "a..urgent", ".urgent", "a_b.low", "public", "public.urgent", "x" * 129])
def test_what_is_no_address_is_refused_as_mail_id(rest):
    with pytest.raises(BadRequestError, match=r"^mail_id: "):
        read_publish(Edition.LATER, rest, b"", None)


@pytest.mark.rule("E2")
def test_the_lane_word_of_the_subject_beats_the_header():
    found = read_publish(Edition.LATER, "a.low", b"", {"mq9-priority": "critical"})
    assert found.draft.lane is Lane.LOW


@pytest.mark.rule("E3")
@given(st.sets(st.sampled_from(sorted(PREFIXED))), st.sets(st.sampled_from(sorted(PREFIXED))), st.data())
def test_the_prefixed_header_wins_in_any_order_and_case(plain, prefixed, data):
    given_headers = [(data.draw(st.sampled_from([name, name.upper(), name.title()])), "1" * 10) for name in plain]
    given_headers += [(data.draw(st.sampled_from([PREFIXED[n], PREFIXED[n].upper()])), "2" * 10) for n in prefixed]
    headers = dict(data.draw(st.permutations([*given_headers, ("own", "mine")])))
    draft = read_publish(Edition.LATER, "a", b"", headers).draft
    found = {
        "dedup_id": draft.dedup_id,
        "tags": draft.tags[0] if draft.tags else None,
        "expire_at": str(draft.expire_at // 1000) if draft.expire_at else None,
        "send_at": str(draft.send_at // 1000) if draft.send_at else None,
    }
    for name, value in found.items():
        expected = "2" * 10 if name in prefixed else "1" * 10 if name in plain else None
        assert value == expected, name
    assert draft.headers == {"own": "mine"}


@pytest.mark.rule("E3")
@pytest.mark.parametrize(
    ("value", "tags"),
    [
        ("a,b", ("a", "b")),
        ("[a, b]", ("a", "b")),
        (" [a] ", ("a",)),
        ("[]", ()),
        ("", ()),
        ("[a", ("[a",)),
    ],
)
def test_tags_with_and_without_brackets(value, tags):
    assert read_publish(Edition.FIRST, "a.normal", b"", {"tags": value}).draft.tags == tags


@pytest.mark.rule("E5")
@pytest.mark.parametrize(
    ("rest", "headers", "payload", "lasting"),
    [
        ("a.normal", None, b"", True),
        ("a.urgent", None, b"{}", True),
        ("a.notify", None, b"", False),
        ("a.notify", {"persist": "true"}, b"", True),
        ("a.notify", {"mq9-persist": "TRUE"}, b"", True),
        ("a.normal", {"Persist": "false"}, b"", False),
        ("a.normal", {"persist": "true", "mq9-persist": "false"}, b"", False),
        ("a.notify", None, b'{"persist": true}', True),
        ("a.urgent", None, b' {"x": [1], "persist" : false}', False),
        ("a.notify", {"persist": "false"}, b'{"persist": true}', False),
        ("a.notify", None, b'{"persist": "true"}', False),
        ("a.notify", None, b'["persist", true]', False),
        ("a.notify", None, b'{"persist": true', False),
        ("a.notify", None, b'{"inner": {"persist": true}}', False),
        ("a.normal", None, b"\xff" + b'"persist"', True),
        ("a.notify", None, b'{"persist": true, "x": "' + b"y" * (1 << 20) + b'"}', False),
        ("a.notify", None, b'{"persist": true, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", False),
    ],
)
def test_what_lasts(rest, headers, payload, lasting):
    found = read_publish(Edition.FIRST, rest, payload, headers)
    assert found.lasting is lasting
    assert found.draft.payload == payload
    assert found.draft.headers == {}


@pytest.mark.rule("E3", "N3")
def test_errors_of_the_commit_name_the_senders_header():
    found = read_publish(Edition.LATER, "a", b"", {"Expire_At": "1", "mq9-send-at": "1"})
    late = found.map_error(BadRequestError("mq9-expire-at", "must be in the future"))
    assert str(late) == "Expire_At: must be in the future"
    for error in (BadRequestError("mq9-send-at", "x: y"), MessageTooLargeError(2, 1)):
        assert found.map_error(error) is error


@pytest.mark.rule("E11")
@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("robustmq-mq9-python", True),
        ("robustmq-mq9-python 1.0", True),
        ("my robustmq-mq9-python", False),
        ("robustmq", False),
        ("", False),
    ],
)
def test_who_is_taken_for_the_python_client(name, is_one):
    line = b"Nats-Request-Info: " + json.dumps({"acc": "A", "name": name}).encode() + b"\r\n"
    assert is_python_client(find_client(b"NATS/1.0\r\n" + line + b"\r\n").name) is is_one
    assert not is_python_client(find_client(b"NATS/1.0\r\nx-" + line + b"\r\n").name)


@pytest.mark.rule("E11")
@given(st.binary(max_size=60))
def test_no_bytes_of_a_sender_stop_the_question_for_its_name(line):
    for block in (b"", line, b"NATS/1.0\r\nNats-Request-Info:" + line + b"robustmq-mq9-python\r\n"):
        assert not is_python_client(find_client(block).name)


@pytest.mark.rule("E11")
def test_a_success_has_no_error_and_a_failure_has():
    assert encode_python_reply(b'{"error":"","msg_id":3}') == b'{"msg_id":3}'
    assert encode_python_reply(b'{"error":""}') == b"{}"
    failed = b'{"error":"mailbox x does not exist","messages":[]}'
    assert encode_python_reply(failed) == failed


@pytest.mark.rule("E11")
@given(st.integers(0, 2**63 - 1), st.binary(max_size=100))
def test_a_push_is_what_the_client_unpacks(msg_id, payload):
    body = encode_python_push(msg_id, payload)
    if payload:
        assert json.loads(body) == {"msg_id": msg_id, "payload": base64.b64encode(payload).decode()}
    else:
        assert body == b""
