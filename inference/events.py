"""What a generation yields: tokens, then exactly one end. All times are Unix times in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled"]
FailureCode = Literal["context_length_exceeded", "engine_error", "engine_stopped", "model_unavailable"]
Exactness = Literal["exact", "quantized", "approximate"]


@dataclass(frozen=True)
class Usage:
    """What an answer took, counted where the work was done.

    - `prompt_tokens`: tokens of the request's spans.
    - `cached_tokens`, `computed_tokens`: of the tokens known before sampling began (the prompt, and what an earlier
      run generated), those whose KV was reused and those that ran through the model.
    - `completion_tokens`: tokens of the answer, an earlier run's included, the end-of-turn token not.
    - `first_token_at`: when this run sampled its first token; None if it sampled none.
    - `tokens_per_second`: rate at which this run sampled the tokens after its first; None below two tokens.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int
    submitted_at: float
    first_token_at: float | None
    finished_at: float
    tokens_per_second: float | None
    exactness: Exactness = "exact"

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from submission to the first sampled token, waiting included."""
        if self.first_token_at is None:
            return None
        return self.first_token_at - self.submitted_at


@dataclass(frozen=True)
class TokenEvent:
    """More of the answer.

    `text` is never empty and never ends within a character; `token_ids` are the ids read since the last event;
    `sampled_at` is when the last of them was sampled.
    """

    text: str
    token_ids: tuple[int, ...]
    sampled_at: float


@dataclass(frozen=True)
class FinishedEvent:
    """The answer is over. `text` was held back (it might have become a stop string, or is an undecodable tail) and is
    still to be shown; `token_ids` are those that were in no event yet."""

    reason: FinishReason
    usage: Usage
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class FailedEvent:
    """The answer will not be finished. `message` is text for people."""

    code: FailureCode
    message: str


Event = TokenEvent | FinishedEvent | FailedEvent
