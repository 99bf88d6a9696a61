"""What an engine tells about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvstore import StoreSnapshot

State = Literal["starting", "converting", "loading", "ready", "failed"]


@dataclass(frozen=True)
class EngineStatus:
    """How far an engine is on its way to serve.

    `progress` goes from 0 to 1 within a state; `model` is its name and `detail` a text for people; `context_length`
    (tokens) is known once the engine is ready.
    """

    state: State
    progress: float
    model: str
    detail: str
    context_length: int | None = None


@dataclass(frozen=True)
class EngineSnapshot:
    """An engine's load at one moment. `store` is None until the model is loaded."""

    running: int
    waiting: int
    store: StoreSnapshot | None
