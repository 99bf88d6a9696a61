"""Short forms for the engine's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inference import (
    ChatMessage,
    Engine,
    FailedEvent,
    FinishedEvent,
    Generation,
    GenerationRequest,
    SamplingParams,
    Span,
    TokenEvent,
)
from kvstore import StoreSnapshot

WAIT = 60  # seconds, far beyond what anything here takes


@dataclass
class Result:
    """Everything that one answer yielded."""

    text: str
    tokens: tuple[int, ...]
    events: list[TokenEvent]
    end: FinishedEvent


def prompt_of(engine: Engine, text: str) -> list[Span]:
    return engine.chat_format.render([ChatMessage("message", "user", text)])


def request(
    spans: Sequence[Span],
    *,
    id: str = "request",
    owner: str = "owner",
    session_id: str | None = None,
    generated: Sequence[int] = (),
    **sampling: Any,
) -> GenerationRequest:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **sampling})
    return GenerationRequest(id, owner, spans, session_id, generated, params)


def end_of(generation: Generation) -> FinishedEvent | FailedEvent:
    """The event that ends the answer; those before it are dropped."""
    while True:
        event = generation.next_event(WAIT)
        assert event is not None, "no event came"
        if not isinstance(event, TokenEvent):
            return event


def collect(generation: Generation) -> Result:
    """Everything that a successful answer yields."""
    events = []
    while isinstance(event := generation.next_event(WAIT), TokenEvent):
        events.append(event)
    assert isinstance(event, FinishedEvent), event
    tokens = [token for token_event in events for token in token_event.token_ids]
    text = "".join(token_event.text for token_event in events)
    return Result(text + event.text, (*tokens, *event.token_ids), events, event)


def finish_of(generation: Generation) -> FinishedEvent:
    """The end of a successful answer."""
    return collect(generation).end


def failure_of(generation: Generation) -> FailedEvent:
    """The end of an answer that fails."""
    end = end_of(generation)
    assert isinstance(end, FailedEvent), end
    return end


def store_of(engine: Engine) -> StoreSnapshot:
    """Figures of the engine's KV store."""
    store = engine.snapshot().store
    assert store is not None
    return store
