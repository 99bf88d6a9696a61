"""What callers ask an engine for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class ChatMessage:
    """One message of a conversation. `source` is its id; `tokens` are the ids that the engine generated for it, when
    known, without the token that ended the turn."""

    source: str
    role: Role
    text: str
    tokens: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Span:
    """A run of tokens from one source: "system", "template", or a message id."""

    source: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. Raises ValueError when a value is out of range.

    - `temperature`: 0 takes the most probable token.
    - `top_p`: sample among the smallest set of tokens with at least this probability; 1 is off.
    - `top_k`: sample among this many most probable tokens; 0 is off.
    - `seed`: the same seed gives the same answer; None draws one for each request.
    - `max_tokens`: tokens of the answer at most; None is as many as fit.
    - `stop`: the answer ends before the first of these strings.
    """

    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Written so that NaN fails too.
        if not 0 <= self.temperature <= 100:
            raise ValueError(f"temperature must be from 0 to 100, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative, not {self.top_k}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not all(self.stop):
            raise ValueError("stop strings must not be empty")


@dataclass(frozen=True)
class GenerationRequest:
    """One answer to generate. Raises ValueError when `spans` hold no token.

    - `owner`, `session_id`: whose KV, and which. Without a session id no session is kept, but the owner's later prompts
      that begin the same may still find its KV.
    - `spans`: the prompt.
    - `generated`: tokens of this answer that an earlier, interrupted run already produced. The answer goes on after
      them; they count as tokens of the answer but are in no event again.
    """

    id: str
    owner: str
    spans: Sequence[Span]
    session_id: str | None = None
    generated: Sequence[int] = ()
    sampling: SamplingParams = SamplingParams()

    def __post_init__(self) -> None:
        if not any(span.tokens for span in self.spans):
            raise ValueError("the prompt has no tokens")
