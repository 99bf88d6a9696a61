"""Which pages policies let go first, and the offline choice that they are compared with."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.kvstore.replay import PAGE_TOKENS, PagedTurn, Paging, optimal_hits, working_set
from benchmarks.kvstore.trace import Turn
from kvstore.eviction import LeastRecentlyUsed, PageStatistics, WaitingTime, Worth, WorthParameters

NOW = 1_000_000.0
HOUR = 3600.0


def statistics(count: int, **columns: Any) -> PageStatistics:
    """Ordinary pages, used 100 seconds ago by somebody who left then, but for what `columns` say."""
    defaults: dict[str, tuple[Any, Any]] = {
        "last_use": (np.float64, NOW - 100),
        "hits": (np.float32, 1),
        "heartbeat": (np.float64, NOW - 100),
        "position": (np.int32, 0),
        "priority": (np.float32, 1),
        "emphasis": (np.float32, 0),
        "attention": (np.float32, 0),
        "superseded": (np.bool_, False),
        "stored": (np.bool_, False),
        "bytes": (np.float32, 4096),
    }
    arrays = {
        name: np.broadcast_to(np.asarray(columns.get(name, value), dtype=dtype), count).copy()
        for name, (dtype, value) in defaults.items()
    }
    return PageStatistics(now=NOW, **arrays)


def test_the_least_recently_used_page_goes_first() -> None:
    pages = statistics(3, last_use=[NOW - 5, NOW - 50, NOW - 1], heartbeat=[NOW, NOW, -np.inf])
    assert np.argsort(LeastRecentlyUsed().worth(pages)).tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("column", "worth_less", "worth_more"),
    [
        ("last_use", NOW - 2 * HOUR, NOW - HOUR),
        ("hits", 1, 20),
        ("heartbeat", NOW - 100, NOW - 20),
        ("position", 0, 4000),
        ("priority", 0.5, 1),
        ("emphasis", 0, 1),
        ("attention", 0, 0.5),
        ("superseded", True, False),
        ("stored", True, False),
        ("bytes", 4096, 2048),
    ],
)
def test_worth_grows_with_each_reason_to_keep_a_page(
    column: str, worth_less: float, worth_more: float
) -> None:
    less, more = Worth().worth(statistics(2, **{column: [worth_less, worth_more]}))
    assert less < more


def test_worth_is_per_byte_and_weighed_by_priority() -> None:
    normal, half_size, preferred = Worth().worth(statistics(3, bytes=[4096, 2048, 4096], priority=[1, 1, 3]))
    assert half_size == pytest.approx(2 * normal)
    assert preferred == pytest.approx(3 * normal)


def test_somebody_present_for_long_is_no_worse_than_somebody_who_left() -> None:
    used = NOW - np.geomspace(1, 1e7, 100)
    present = Worth().worth(statistics(100, last_use=used, heartbeat=NOW))
    absent = Worth().worth(statistics(100, last_use=used, heartbeat=-np.inf))
    assert (present >= absent).all()
    assert present[0] > 2 * absent[0]
    assert present[-1] == absent[-1]


def test_old_hits_count_less() -> None:
    worth = Worth().worth(
        statistics(4, hits=[1, 100, 1, 100], last_use=NOW - np.array([1, 1, 240, 240]) * HOUR)
    )
    assert worth[1] / worth[0] > worth[3] / worth[2] > 1


def test_parameters_decide() -> None:
    pages = statistics(2, superseded=[False, True])
    indifferent = Worth(WorthParameters(superseded=1.0)).worth(pages)
    assert indifferent[0] == indifferent[1]
    assert Worth().worth(pages)[1] < Worth().worth(pages)[0]


times = st.floats(min_value=-1e9, max_value=1e10) | st.just(-np.inf)


@given(
    st.lists(
        st.tuples(
            st.floats(min_value=-1e9, max_value=1e10),  # also uses later than now: a clock was put back
            times,
            st.floats(min_value=0, max_value=1e6),
            st.integers(min_value=0, max_value=10**7),
            st.booleans(),
            st.booleans(),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_worth_is_finite_and_never_negative(rows: list[tuple[float, float, float, int, bool, bool]]) -> None:
    last_use, heartbeat, hits, position, superseded, stored = map(list, zip(*rows, strict=True))
    pages = statistics(
        len(rows),
        last_use=last_use,
        heartbeat=heartbeat,
        hits=hits,
        position=position,
        superseded=superseded,
        stored=stored,
    )
    worth = Worth().worth(pages)
    assert worth.shape == (len(rows),)
    assert worth.dtype == np.float64
    assert np.isfinite(worth).all()
    assert (worth >= 0).all()


def test_worth_of_a_page_does_not_depend_on_the_others() -> None:
    random = np.random.default_rng(0)
    pages = statistics(50, last_use=NOW - random.exponential(HOUR, 50), superseded=random.random(50) < 0.5)
    order = random.permutation(50)
    shuffled = replace(
        pages, **{name: column[order] for name, column in vars(pages).items() if name != "now"}
    )
    np.testing.assert_array_equal(Worth().worth(pages)[order], Worth().worth(shuffled))


def test_no_pages_have_no_worth() -> None:
    assert Worth().worth(statistics(0)).shape == (0,)
    assert LeastRecentlyUsed().worth(statistics(0)).shape == (0,)


@given(
    st.floats(min_value=0.01, max_value=0.99),
    st.floats(min_value=1, max_value=1e5),
    st.floats(min_value=0.1, max_value=5),
)
def test_the_rate_is_the_hazard_of_the_waiting_time(returning: float, scale: float, shape: float) -> None:
    """Integrated over time, the hazard gives the share that is still away."""
    waited = np.concatenate([[0.0], np.geomspace(scale / 1e4, 100 * scale, 20_000)])
    rate = WaitingTime(returning, scale, shape).rate(waited)
    integral = ((rate[1:] + rate[:-1]) / 2 * np.diff(waited)).sum()
    still_away = 1 - returning + returning * (1 + waited[-1] / scale) ** -shape
    assert np.exp(-integral) == pytest.approx(still_away, rel=1e-3)


@pytest.mark.parametrize(
    ("returning", "scale", "shape"), [(0.0, 1.0, 1.0), (1.0, 1.0, 1.0), (0.5, 0.0, 1.0), (0.5, 1.0, -1.0)]
)
def test_a_waiting_time_refuses_what_makes_no_sense(returning: float, scale: float, shape: float) -> None:
    with pytest.raises(ValueError, match="waiting time"):
        WaitingTime(returning, scale, shape)


# The offline choice that the benchmark compares with.


@st.composite
def paged_turns(draw: st.DrawFn) -> tuple[list[PagedTurn], list[int]]:
    """Turns of up to four sessions, of whole pages, of which the first is the same in all."""
    numbers: dict[tuple[int, int], int] = {}
    ordinals: list[int] = []
    held: dict[int, int] = {}
    turns = []
    for session, length in draw(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=9)
    ):
        found = max(held.get(session, 0), min(len(held), 1))
        pages = []
        for ordinal in range(max(found, length)):
            key = (session if ordinal else 0, ordinal)
            if key not in numbers:
                numbers[key] = len(ordinals)
                ordinals.append(ordinal)
            pages.append(numbers[key])
        held[session] = len(pages)
        turns.append(PagedTurn(pages[:found], found * PAGE_TOKENS, pages))
    return turns, ordinals


def best_by_trying_all(turns: list[PagedTurn], budget: int) -> int:
    """Most tokens that any way of evicting finds."""
    best = {frozenset[int](): 0}
    for turn in turns:
        after: dict[frozenset[int], int] = {}
        for resident, hits in best.items():
            pages = next((n for n, page in enumerate(turn.found) if page not in resident), len(turn.found))
            others = resident - set(turn.held)
            for count in range(min(len(others), budget - len(turn.held)) + 1):
                for kept in combinations(sorted(others), count):
                    state = frozenset({*kept, *turn.held})
                    after[state] = max(after.get(state, 0), hits + pages * PAGE_TOKENS)
        best = after
    return max(best.values())


@settings(max_examples=60, deadline=None)
@given(paged_turns(), st.integers(3, 6))
def test_no_way_of_evicting_finds_more_than_the_optimal(
    trace: tuple[list[PagedTurn], list[int]], budget: int
) -> None:
    turns, ordinals = trace
    assert sum(optimal_hits(turns, ordinals, budget)) == best_by_trying_all(turns, budget)


def turn(
    session: str | None, tokens: list[int], answer: list[int], *, owner: str = "a", public: int = 0
) -> Turn:
    return Turn(0.0, owner, session, np.array(tokens, np.int32), np.array(answer, np.int32), public)


def test_pages_are_numbered_as_the_store_shares_them() -> None:
    paging = Paging()
    prompt = list(range(PAGE_TOKENS))
    first = paging.turn(turn("1", [*prompt, 50], [51], public=PAGE_TOKENS))
    assert (first.found, first.found_tokens, first.held) == ([], 0, [0, 1])
    grown = paging.turn(turn("1", [*prompt, 50, 51, 52], [53], public=PAGE_TOKENS))
    assert (grown.found, grown.found_tokens, grown.held) == ([0, 1], PAGE_TOKENS + 2, [0, 1])
    edited = paging.turn(turn("1", [*prompt, 50, 60], [61], public=PAGE_TOKENS))
    assert (edited.found, edited.found_tokens, edited.held) == ([0, 1], PAGE_TOKENS + 1, [0, 2])
    other = paging.turn(turn("1", [*prompt, 50], [51], owner="b", public=PAGE_TOKENS))
    assert (other.found, other.found_tokens, other.held) == ([0], PAGE_TOKENS, [0, 3])
    private = paging.turn(turn(None, [*prompt, 50], [51], owner="b"))
    assert (private.found, private.held) == ([], [4, 5])


def test_the_working_set_counts_what_is_used_again() -> None:
    turns = [
        PagedTurn([], 0, [0, 1, 2]),  # 2 is never used again
        PagedTurn([], 0, [3]),
        PagedTurn([0, 1], 2 * PAGE_TOKENS, [0, 1]),
        PagedTurn([3], PAGE_TOKENS, [3]),
    ]
    assert working_set(turns) == 3
