"""What eviction keeps: token hit rates of a replayed trace under LRU, under worth, and under the best offline choice.

The trace (benchmarks/kvstore/trace.py says how it is made) is replayed through a `KVStore` with a device tier only, so
that what is evicted is lost. A hit is a token whose KV `acquire` finds; the rate is over all tokens looked up, new
messages included, so even a store without limit does not reach 1 (`hit_rate_unlimited`). Turns do not overlap.

The device holds a fifth of the working set. The working set here is the largest number of pages that at one time lie
between two uses: what it takes to lose nothing. All pages ever made would be many times that, since most
conversations are never gone on with, and a fifth of them would leave no policy anything to lose.

The best choice is Belady's (1966): when room is needed, the page goes whose next use is furthest in the future. Among
all policies that have a turn's pages on the device during the turn, it has the fewest pages computed again, for each
page counts the same and a page's next use is never before its predecessor's, so that prefixes go from their ends by
themselves. In tokens it is best up to partly filled pages, which count the same there and hold fewer.

The reported traces are of the "final" dialogues, with seeds that nothing was tuned on.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from benchmarks.kvstore.memory import TINY, append
from benchmarks.kvstore.trace import MINUTE, Event, Heartbeat, Tokens, Turn, make_trace
from benchmarks.report import Figure, median
from kvstore import EvictionPolicy, KVStore, LeastRecentlyUsed, StoreConfig, Worth

SEEDS = (101, 102, 103)
PAGE_TOKENS = TINY.page_tokens
ROOT = -1
TICK = 10 * MINUTE


def measure(quick: bool) -> list[Figure]:
    if quick:
        results = [compare(make_trace("final", SEEDS[0], callers=300, days=1))]
    else:
        results = [compare(make_trace("final", seed, callers=500, days=1.5)) for seed in SEEDS]
    ratios = [result["worth"] / result["optimal"] for result in results]
    meanings = {
        "lru": "tokens found over tokens looked up, evicting the least recently used",
        "worth": "the same, evicting by worth",
        "optimal": "the same, knowing the future (Belady)",
        "unlimited": "the same, never evicting",
    }
    figures = [
        _figure(f"hit_rate_{name}", [r[name] for r in results], "", meanings[name]) for name in meanings
    ]
    return [*figures, _figure("worth_of_optimal", ratios, ">=0.9", "hit rate by worth over the optimal one")]


def _figure(name: str, values: Sequence[float], target: str, meaning: str) -> Figure:
    return Figure(name, median(values), target, meaning, values if len(values) > 1 else ())


def compare(trace: Sequence[Event]) -> dict[str, float]:
    """Token hit rates of a trace by policy."""
    turns = [event for event in trace if isinstance(event, Turn)]
    paging = Paging()
    paged = [paging.turn(turn) for turn in turns]
    longest = max(len(turn.held) for turn in paged)
    budget = max(working_set(paged) // 5, longest + 1)
    found = {
        "lru": replay(trace, LeastRecentlyUsed(), budget),
        "worth": replay(trace, Worth(), budget),
        "optimal": sum(optimal_hits(paged, paging.ordinals, budget)),
        "unlimited": sum(turn.found_tokens for turn in paged),
    }
    looked_up = sum(len(turn.tokens) for turn in turns)
    return {name: tokens / looked_up for name, tokens in found.items()}


def replay(trace: Sequence[Event], policy: EvictionPolicy, budget: int) -> int:
    """Tokens that a store with `budget` pages finds."""
    now, ticked, found = 0.0, 0.0, 0
    store = KVStore(
        TINY,
        StoreConfig(device_bytes=budget * TINY.bytes_per_page, policy=policy, slab_pages=budget),
        clock=lambda: now,
    )
    for event in trace:
        now = event.time
        if isinstance(event, Heartbeat):
            store.heartbeat(event.owner, event.session)
            continue
        if now - ticked > TICK:
            store.tick()
            ticked = now
        session = store.acquire(
            event.owner,
            event.session,
            event.tokens,
            planned=len(event.tokens) + len(event.answer),
            public_tokens=event.public_tokens,
        )
        found += session.length
        append(session, np.concatenate([event.tokens[session.length :], event.answer]))
        store.release(session)
    store.close()
    return found


@dataclass(frozen=True)
class PagedTurn:
    """What a turn finds, and what it leaves, in a store without limit: pages by number, in order.

    `found` hold the first `found_tokens` tokens that it looks up; `held` hold its session after the turn.
    """

    found: list[int]
    found_tokens: int
    held: list[int]


@dataclass
class HeldTokens:
    """A session's tokens and their pages."""

    tokens: Tokens
    pages: list[int]


class Paging:
    """Numbers the pages of turns as the store shares them: whole pages by owner and prefix, others by session.

    `ordinals` has the number of pages before each page.
    """

    def __init__(self) -> None:
        self.ordinals: list[int] = []
        self._whole: dict[tuple[int, str, bytes], int] = {}
        self._sessions: dict[tuple[str, str], HeldTokens] = {}

    def turn(self, turn: Turn) -> PagedTurn:
        """Number the pages of the next turn."""
        chain = list(self._known(turn))
        held = self._sessions.get((turn.owner, turn.session)) if turn.session is not None else None
        common = common_prefix(held.tokens, turn.tokens) if held is not None else 0
        if held is not None and common >= len(chain) * PAGE_TOKENS:
            found, found_tokens = held.pages[: -(-common // PAGE_TOKENS)], common
            # A page that was cut within is copied, and one that was filled to here is filled on.
            kept = found if common == len(held.tokens) else found[: common // PAGE_TOKENS]
        else:
            found, found_tokens, kept = chain, len(chain) * PAGE_TOKENS, chain
        tokens = np.concatenate([turn.tokens, turn.answer])
        pages = self._filled(turn, tokens, kept)
        if turn.session is not None:
            self._sessions[turn.owner, turn.session] = HeldTokens(tokens, pages)
        return PagedTurn(found, found_tokens, pages)

    def _known(self, turn: Turn) -> Iterator[int]:
        """The longest run of known whole pages."""
        before = ROOT
        for ordinal in range(len(turn.tokens) // PAGE_TOKENS):
            page = self._whole.get(self._key(turn, turn.tokens, ordinal, before))
            if page is None:
                return
            yield page
            before = page

    def _filled(self, turn: Turn, tokens: Tokens, kept: Sequence[int]) -> list[int]:
        """Pages of all tokens, of which the first are `kept`; the last of these may go on being filled."""
        pages: list[int] = []
        for ordinal in range(-(-len(tokens) // PAGE_TOKENS)):
            page = kept[ordinal] if ordinal < len(kept) else None
            if (ordinal + 1) * PAGE_TOKENS <= len(tokens):
                key = self._key(turn, tokens, ordinal, pages[-1] if pages else ROOT)
                page = self._whole.get(key, page)
                page = self._whole[key] = self._new(ordinal) if page is None else page
            pages.append(self._new(ordinal) if page is None else page)
        return pages

    def _key(self, turn: Turn, tokens: Tokens, ordinal: int, before: int) -> tuple[int, str, bytes]:
        end = (ordinal + 1) * PAGE_TOKENS
        owner = "" if end <= turn.public_tokens else turn.owner
        return before, owner, tokens[end - PAGE_TOKENS : end].tobytes()

    def _new(self, ordinal: int) -> int:
        self.ordinals.append(ordinal)
        return len(self.ordinals) - 1


def common_prefix(first: Tokens, second: Tokens) -> int:
    length = min(len(first), len(second))
    equal = first[:length] == second[:length]
    return length if equal.all() else int(np.argmin(equal))


def working_set(turns: Sequence[PagedTurn]) -> int:
    """The largest number of pages that lie between two uses at one time."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, turn in enumerate(turns):
        for page in turn.held:
            first.setdefault(page, number)
        for page in turn.found:
            last[page] = number
    changes = np.zeros(len(turns), dtype=np.int64)
    for page, number in last.items():
        changes[first[page]] += 1
        changes[number] -= 1
    return int(np.cumsum(changes).max())


def optimal_hits(turns: Sequence[PagedTurn], ordinals: Sequence[int], budget: int) -> list[int]:
    """Tokens that each turn finds when those of `budget` pages go whose next use is furthest in the future."""
    uses: list[list[int]] = [[] for _ in ordinals]
    for number, turn in reversed(list(enumerate(turns))):
        for page in turn.found:
            uses[page].append(number)  # the next use is the last entry

    def next_use(page: int) -> float:
        return uses[page][-1] if uses[page] else math.inf

    resident: set[int] = set()
    furthest: list[tuple[float, int, int]] = []  # a heap; of pages used at the same time the deepest is first
    hits = []
    for turn in turns:
        pages = sum(1 for _ in takewhile(resident.__contains__, turn.found))
        hits.append(min(pages * PAGE_TOKENS, turn.found_tokens))
        for page in turn.found:
            uses[page].pop()
        needed = set(turn.held)
        missing = len(needed - resident)
        while len(resident) + missing > budget:
            use, _, page = heapq.heappop(furthest)
            # What was pushed before the page's latest use is out of date.
            if page not in needed and -use == next_use(page):
                resident.discard(page)
        resident |= needed
        for page in {*turn.found, *turn.held}:
            heapq.heappush(furthest, (-next_use(page), -ordinals[page], page))
    return hits
