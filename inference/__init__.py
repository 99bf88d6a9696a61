"""The engine: it loads a language model and generates answers, many at a time, with KV from the kvstore.

What lives here: model files and their conversion, chat templates, scheduling, sampling, text streaming. What does
not: conversations, users, HTTP (chatapp), and the KV's storage (kvstore). Importing this package imports neither torch
nor transformers: they come with the first use of `inference.Engine` or `inference.ChatFormat`. The rest of this
package's API works without them, so that only processes that generate need them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from inference.config import EngineConfig
from inference.errors import EngineStopped, ModelUnavailable, PromptRefused
from inference.events import Event, FailedEvent, FinishedEvent, TokenEvent, Usage
from inference.generation import Generation
from inference.requests import ChatMessage, GenerationRequest, SamplingParams, Span
from inference.status import EngineSnapshot, EngineStatus

if TYPE_CHECKING:
    from inference.chat_format import ChatFormat
    from inference.engine import Engine

__all__ = [
    "ChatFormat",
    "ChatMessage",
    "Engine",
    "EngineConfig",
    "EngineSnapshot",
    "EngineStatus",
    "EngineStopped",
    "Event",
    "FailedEvent",
    "FinishedEvent",
    "Generation",
    "GenerationRequest",
    "ModelUnavailable",
    "PromptRefused",
    "SamplingParams",
    "Span",
    "TokenEvent",
    "Usage",
]

# OpenMP reads this once, when torch loads. Threads that spin while they wait take the cores that the web side needs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_NEEDS_TORCH = {
    "ChatFormat": "inference.chat_format",
    "Engine": "inference.engine",
}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_NEEDS_TORCH[name]), name)
