"""The context planner fits a branch into its budget, and keeps its beginning still while it can."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from chatapp.dialog import ContextPlan, plan_context
from inference import ChatMessage, Span

TEMPLATE_TOKENS = 3


def render(messages: Sequence[ChatMessage]) -> list[Span]:
    """One token a character, and a few of the template before each message and for the answer's start."""
    spans = []
    for message in messages:
        spans.append(Span("template", (0,) * TEMPLATE_TOKENS))
        spans.append(Span(message.source, tuple(map(ord, message.text))))
    return [*spans, Span("template", (0,) * TEMPLATE_TOKENS)]


def branch(lengths: Sequence[int], system: int = 0) -> list[ChatMessage]:
    """User and assistant in turn, a user's message last."""
    messages = [ChatMessage("system", "system", "s" * system)] if system else []
    for index, length in enumerate(lengths):
        messages.append(ChatMessage(f"message {index}", "assistant" if index % 2 else "user", "x" * length))
    return messages


def size(plan: ContextPlan) -> int:
    return sum(len(span.tokens) for span in plan.spans)


def included(plan: ContextPlan) -> list[str]:
    return [decision.source for decision in plan.decisions if decision.included]


def test_everything_is_in_while_it_fits() -> None:
    plan = plan_context(branch([10, 10, 10], system=5), render, budget=100)
    assert plan.left_out == 0
    assert included(plan) == ["system", "message 0", "message 1", "message 2"]


def test_the_oldest_messages_go_first_and_the_system_prompt_stays() -> None:
    plan = plan_context(branch([40, 40, 40, 40, 40], system=20), render, budget=150)
    assert size(plan) <= 150
    assert included(plan)[0] == "system"
    assert included(plan)[-1] == "message 4"
    assert "message 0" not in included(plan)
    assert all(decision.reason for decision in plan.decisions)


odd_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=15).filter(lambda lengths: len(lengths) % 2)


@given(odd_lengths, st.integers(0, 30), st.integers(100, 400))
def test_plans_fit_and_begin_with_a_user(lengths: list[int], system: int, budget: int) -> None:
    messages = branch(lengths, system)
    plan = plan_context(messages, render, budget)
    assert size(plan) <= budget
    assert included(plan)[-1] == messages[-1].source
    first = included(plan)[1 if system else 0]
    assert {message.source: message.role for message in messages}[first] == "user"


def test_a_message_that_never_fits_is_left_to_the_engine_to_refuse() -> None:
    plan = plan_context(branch([10, 10, 500]), render, budget=100)
    assert included(plan) == ["message 2"]
    assert size(plan) > 100


def test_the_kept_beginning_stays_for_several_turns() -> None:
    """What is left out grows in steps, so that most turns find their prefix in the cache."""
    beginnings = []
    for turns in range(10, 40):
        plan = plan_context(branch([10] * (2 * turns + 1)), render, budget=200)
        beginnings.append(included(plan)[0])
    changes = sum(before != after for before, after in pairwise(beginnings))
    assert 0 < changes <= len(beginnings) // 2 + 1
