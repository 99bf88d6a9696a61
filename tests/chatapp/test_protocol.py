"""The protocol's schemas, and that its page in docs/ tells the same."""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatapp import protocol
from chatapp.protocol import ProtocolError, parse_client_event

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text()
SOURCES = Path(__file__).resolve().parents[2]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def types_of(base: type[Any]) -> set[str]:
    found = set()
    for model in base.__subclasses__():
        if "type" in model.model_fields:
            found.add(get_args(model.model_fields["type"].annotation)[0])
        found |= types_of(model)
    return found


CLIENT_TYPES = types_of(protocol.ClientEvent)
SERVER_TYPES = types_of(protocol.ServerEvent)


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def table_keys(title: str) -> set[str]:
    return set(re.findall(r"^\| `([^`]+)` \|", section(title), re.MULTILINE))


def test_the_page_lists_every_event() -> None:
    assert table_keys("Client events") == CLIENT_TYPES
    assert table_keys("Server events") == SERVER_TYPES


def test_the_page_names_every_field_of_client_events() -> None:
    for row in section("Client events").splitlines():
        if match := re.match(r"\| `([^`]+)` \| (.*?) \|", row):
            (model,) = [
                event
                for event in protocol.ClientEvent.__subclasses__()
                if get_args(event.model_fields["type"].annotation)[0] == match.group(1)
            ]
            for field in set(model.model_fields) - {"type", "event_id"}:
                assert f"`{field}`" in match.group(2), f"{match.group(1)}: {field}"


def test_the_page_lists_every_error_code() -> None:
    documented = set(re.findall(r"`([a-z_]+)`", section("Error codes")))
    raised = set()
    for source in (SOURCES / "chatapp").rglob("*.py"):
        text = source.read_text()
        raised |= set(re.findall(r'ProtocolError\(\s*"([a-z_]+)"', text))
        raised |= set(re.findall(r'_send_error\(\s*"([a-z_]+)"', text))
        raised |= set(re.findall(r'code="([a-z_]+)"', text))
    assert raised
    assert raised <= documented, raised - documented


@given(JSON)
def test_any_json_is_an_event_or_a_protocol_error(data: Any) -> None:
    with pytest.raises(ProtocolError):
        parse_client_event(data)


@given(st.sampled_from(sorted(CLIENT_TYPES)), st.dictionaries(st.text(), JSON, max_size=4))
def test_a_right_type_with_wrong_fields_is_a_protocol_error(event_type: str, fields: dict[str, Any]) -> None:
    try:
        event = parse_client_event({**fields, "type": event_type})
    except ProtocolError as refused:
        code = refused.code
    else:
        assert event.type == event_type
        return
    assert code == "invalid_event"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"conversation": "no"}, "conversation"),
        ({"sampling": {"temperature": 3}}, "sampling.temperature"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p"),
        ({"sampling": {"stop": ["a"] * 5}}, "sampling.stop"),
        ({"sampling": {"temprature": 1}}, "sampling.temprature"),
        ({"event_id": "x" * 129}, "event_id"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_errors_name_the_field(change: dict[str, Any], param: str) -> None:
    event = {"type": "response.create", "conversation": str(uuid.uuid4())} | change
    with pytest.raises(ProtocolError) as refused:
        parse_client_event(event)
    assert refused.value.code == "invalid_event"
    assert refused.value.param == param


@pytest.mark.parametrize("event", [{}, {"type": "response.creat"}, {"type": 1}, [], "text", None])
def test_unknown_types_say_so(event: Any) -> None:
    with pytest.raises(ProtocolError) as refused:
        parse_client_event(event)
    assert refused.value.code in ("unknown_event", "invalid_event")
