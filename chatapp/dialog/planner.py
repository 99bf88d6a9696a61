"""The context planner: from a branch of messages to the spans that the next answer attends to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inference import ChatMessage, Span

# The source of the spans that the chat template adds around messages.
TEMPLATE = "template"

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
    older = messages[first:-1]
    spans = render(messages)
    excess = _count(spans) - budget
    left_out = _oldest_to_leave_out(older, spans, excess, budget) if excess > 0 else 0
    while left_out:
        spans = render([*messages[:first], *messages[first + left_out :]])
        if _count(spans) <= budget or left_out == len(older):
            break
        left_out = _up_to_a_user(older, left_out + 1)
    return ContextPlan(spans, _decisions(messages, first, left_out))


def _count(spans: Sequence[Span]) -> int:
    return sum(len(span.tokens) for span in spans)


def _oldest_to_leave_out(
    messages: Sequence[ChatMessage], spans: Sequence[Span], excess: int, budget: int
) -> int:
    """How many of the oldest messages to leave out by what each of them holds; at least one where there is one."""
    tokens_of = _tokens_by_message(spans)
    step = max(1, int(budget * _STEP_SHARE))
    to_free = -(-excess // step) * step
    freed = count = 0
    while count < len(messages) and freed < to_free and messages[count].source in tokens_of:
        freed += tokens_of[messages[count].source]
        count += 1
    return _up_to_a_user(messages, max(count, min(1, len(messages))))


def _up_to_a_user(messages: Sequence[ChatMessage], count: int) -> int:
    """Leave out more until the first message kept is a user's, as chat templates want it."""
    while count < len(messages) and messages[count].role != "user":
        count += 1
    return count


def _tokens_by_message(spans: Sequence[Span]) -> Counter[str]:
    """Each source's tokens, with those of the template that lead to it."""
    tokens_of: Counter[str] = Counter()
    leading = 0
    for span in spans:
        leading += len(span.tokens)
        if span.source != TEMPLATE:
            tokens_of[span.source] += leading
            leading = 0
    return tokens_of


def _decisions(messages: Sequence[ChatMessage], first: int, left_out: int) -> list[Decision]:
    return [
        Decision(message.source, False, "older than what fits the context budget")
        if first <= index < first + left_out
        else Decision(message.source, True, "fits the context budget")
        for index, message in enumerate(messages)
    ]
