"""The context planner: from a branch of messages to the spans that the next answer attends to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inference import ChatMessage, Span

# What is left out grows in steps of this share of the budget, so that the kept messages begin at the same place
# over several turns and their KV stays a usable prefix.
_STEP_SHARE = 0.25

Render = Callable[[Sequence["ChatMessage"]], list["Span"]]


@dataclass(frozen=True)
class Decision:
    """Why a message is in the context or left out of it."""

    source: str
    included: bool
    reason: str


@dataclass(frozen=True)
class ContextPlan:
    spans: list[Span]
    decisions: list[Decision]

    @property
    def left_out(self) -> int:
        """How many messages the answer will not attend to."""
        return sum(not decision.included for decision in self.decisions)


def plan_context(messages: Sequence[ChatMessage], render: Render, budget: int) -> ContextPlan:
    """Fit a branch into a budget of tokens by leaving out its oldest messages.

    A system message and the last message always stay in, even where they alone exceed the budget: the engine then
    says so with the numbers.

    Args:
        messages: The branch from its root, a system message first where there is one, and the question last.
        render: Puts messages through the model's chat template.
        budget: Tokens that the rendered context may have.
    """
    first = 1 if messages[0].role == "system" else 0
    spans = render(messages)
    total = _count(spans)
    left_out = 0
    if total > budget:
        left_out = _oldest_to_leave_out(messages[first:-1], spans, excess=total - budget, budget=budget)
    kept = [*messages[:first], *messages[first + left_out :]]
    while left_out and (_count(spans := render(kept)) > budget) and len(kept) > first + 1:
        left_out += 1
        del kept[first]
    return ContextPlan(spans, _decisions(messages, first, left_out))


def _count(spans: Sequence[Span]) -> int:
    return sum(len(span.tokens) for span in spans)


def _oldest_to_leave_out(
    messages: Sequence[ChatMessage], spans: Sequence[Span], *, excess: int, budget: int
) -> int:
    """How many of the oldest messages to leave out, so that the next one kept is a user's."""
    tokens_of: Counter[str] = Counter()
    for span in spans:
        tokens_of[span.source] += len(span.tokens)
    step = max(1, int(budget * _STEP_SHARE))
    to_free = -(-excess // step) * step
    freed = count = 0
    while count < len(messages) and (freed < to_free or messages[count].role != "user"):
        freed += tokens_of[messages[count].source]
        count += 1
    return count


def _decisions(messages: Sequence[ChatMessage], first: int, left_out: int) -> list[Decision]:
    return [
        Decision(message.source, False, "older than what fits the context budget")
        if first <= index < first + left_out
        else Decision(message.source, True, "fits the context budget")
        for index, message in enumerate(messages)
    ]
