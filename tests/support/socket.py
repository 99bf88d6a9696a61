"""A client of the websocket protocol, for tests and benchmarks."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Self

from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

TIMEOUT_SECONDS = 60.0

Event = dict[str, Any]


class ChatSocket:
    """One socket. Events that a call was not waiting for are kept for the next one."""

    def __init__(self, url: str, *, cookies: dict[str, str] | None = None, origin: str | None = None) -> None:
        headers = {"Cookie": "; ".join(f"{name}={value}" for name, value in (cookies or {}).items())}
        self._resources = ExitStack()
        self.connection: ClientConnection = self._resources.enter_context(
            connect(
                url,
                additional_headers=headers,
                origin=None if origin is None else Origin(origin),
                max_size=None,
                open_timeout=TIMEOUT_SECONDS,
                close_timeout=0.5,
            )
        )
        self._kept: list[Event] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._resources.close()

    def send(self, type: str, **fields: Any) -> str:
        """Send an event; returns its ``event_id``."""
        event_id = fields.setdefault("event_id", uuid.uuid4().hex)
        self.connection.send(json.dumps({"type": type, **fields}, default=str))
        return str(event_id)

    def receive(self, wanted: Callable[[Event], bool], timeout: float = TIMEOUT_SECONDS) -> Event:
        """The first event, kept or new, that is wanted."""
        for index, event in enumerate(self._kept):
            if wanted(event):
                return self._kept.pop(index)
        while True:
            received: Event = json.loads(self.connection.recv(timeout=timeout))
            if wanted(received):
                return received
            self._kept.append(received)

    def expect(self, *types: str, timeout: float = TIMEOUT_SECONDS) -> Event:
        return self.receive(lambda event: event["type"] in types, timeout)

    def ask(self, type: str, **fields: Any) -> Event:
        """Send an event and wait for its direct answer, which may be an error."""
        event_id = self.send(type, **fields)
        return self.receive(lambda event: event["in_reply_to"] == event_id)

    def refusal(self, type: str, **fields: Any) -> Event:
        """The error that an event gets."""
        answer = self.ask(type, **fields)
        assert answer["type"] == "error", answer
        error: Event = answer["error"]
        return error

    # --- Whole steps --------------------------------------------------------------------------------

    def create_conversation(self, **fields: Any) -> str:
        created = self.ask("keepwarm.conversation.create", **fields)
        assert created["type"] == "keepwarm.conversation.created", created
        return str(created["conversation"]["id"])

    def add_message(self, conversation: str, text: str, **fields: Any) -> Event:
        added = self.ask(
            "conversation.item.create", conversation=conversation, item=user_message(text), **fields
        )
        assert added["type"] == "conversation.item.added", added
        item: Event = added["item"]
        return item

    def create_response(self, conversation: str, **fields: Any) -> str:
        created = self.ask("response.create", conversation=conversation, **fields)
        assert created["type"] == "response.created", created
        return str(created["response"]["id"])

    def stream(self, response: str, timeout: float = TIMEOUT_SECONDS) -> Iterator[Event]:
        """The response's numbered events up to its end, as they come."""
        while True:
            event = self.receive(lambda event: event.get("response_id") == response, timeout)
            yield event
            if event["type"] == "response.done":
                return

    def turn(self, conversation: str, text: str, **fields: Any) -> Event:
        """Send a message, ask for the answer and wait for its end: the ``response.done`` event."""
        self.add_message(conversation, text)
        *_, done = self.stream(self.create_response(conversation, **fields))
        return done

    def open(self, conversation: str) -> Event:
        opened = self.ask("keepwarm.conversation.open", conversation=conversation)
        assert opened["type"] == "keepwarm.conversation.opened", opened
        return opened

    def wait_for_model(self) -> None:
        """Wait until the engine is ready; the first event on the socket says where it is."""
        event = self.expect("session.created", "keepwarm.model")
        while event["model"]["state"] != "ready":
            assert event["model"]["state"] != "failed", event
            event = self.expect("keepwarm.model")


def user_message(text: str, **fields: Any) -> Event:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}], **fields}


def text_of(done: Event) -> str:
    """The whole text of a ``response.done`` event."""
    return str(done["response"]["output"][0]["content"][0]["text"])


def deltas(events: list[Event]) -> str:
    """What the deltas of a response's events add up to."""
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
