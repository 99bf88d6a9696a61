"""The store: finding, sharing nothing across owners, staying within its budget."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kvstore import KVSpec, Session, SessionLocked, SessionStore

SPEC = KVSpec(layers=2, kv_heads=1, head_dim=2, dtype=torch.float32, fingerprint="test")
SMALLEST = 64 * SPEC.bytes_per_token  # a session's first buffers


def compute(session: Session, tokens: list[int]) -> None:
    """Stand in for a forward pass: a token's KV is the token and its position."""
    start = session.length
    positions = torch.arange(start, start + len(tokens), dtype=torch.float32)
    kv = torch.stack([torch.tensor(tokens, dtype=torch.float32), positions], dim=-1).view(1, 1, -1, 2)
    for layer in range(SPEC.layers):
        session.write(layer, kv, -kv)
    session.commit(tokens)


def holds(session: Session, tokens: list[int]) -> bool:
    expected = torch.tensor([[float(token), float(i)] for i, token in enumerate(tokens)]).view(1, 1, -1, 2)
    return session.tokens == tuple(tokens) and all(
        torch.equal(session.keys(layer), expected) and torch.equal(session.values(layer), -expected)
        for layer in range(SPEC.layers)
    )


def keep(store: SessionStore, session_id: str, owner: str, tokens: list[int]) -> None:
    session, matched = store.acquire(session_id, owner, tokens)
    compute(session, tokens[matched:])
    store.release(session)


def test_keeps_the_common_prefix() -> None:
    store = SessionStore(SPEC, 10 * SMALLEST)
    keep(store, "a", "me", [1, 2, 3, 4])
    session, matched = store.acquire("a", "me", [1, 2, 9])
    assert matched == 2
    assert holds(session, [1, 2])
    snapshot = store.snapshot()
    assert (snapshot.lookups, snapshot.hits, snapshot.tokens_reused) == (2, 1, 2)


def test_another_owner_never_matches() -> None:
    store = SessionStore(SPEC, 10 * SMALLEST)
    keep(store, "a", "me", [1, 2, 3])
    session, matched = store.acquire("a", "you", [1, 2, 3])
    assert matched == 0
    assert session.length == 0
    store.release(session)
    assert not store.drop("a", "you")
    assert store.acquire("a", "me", [1, 2, 3])[1] == 3


def test_an_acquired_session_is_locked() -> None:
    store = SessionStore(SPEC, 10 * SMALLEST)
    session, _ = store.acquire("a", "me", [])
    with pytest.raises(SessionLocked):
        store.acquire("a", "me", [])
    store.release(session)
    with pytest.raises(ValueError, match="not acquired"):
        store.release(session)


def test_a_session_without_id_is_not_kept() -> None:
    store = SessionStore(SPEC, 10 * SMALLEST)
    session, matched = store.acquire(None, "me", [1, 2])
    compute(session, [1, 2])
    assert matched == 0
    assert store.snapshot().bytes == SMALLEST
    store.release(session)
    assert store.snapshot().bytes == 0
    assert store.snapshot().sessions == 0


def test_the_least_recently_used_idle_session_goes_first() -> None:
    store = SessionStore(SPEC, 2 * SMALLEST)
    keep(store, "a", "me", [1])
    keep(store, "b", "me", [2])
    keep(store, "a", "me", [1, 2])
    keep(store, "c", "me", [3])
    assert store.acquire("a", "me", [1, 2])[1] == 2
    assert store.acquire("b", "me", [2])[1] == 0
    assert store.snapshot().evictions == 1


def test_an_active_session_may_exceed_the_budget_until_released() -> None:
    store = SessionStore(SPEC, SMALLEST)
    keep(store, "idle", "me", [1])
    session, _ = store.acquire("big", "me", [])
    compute(session, list(range(500)))
    assert holds(session, list(range(500)))
    assert store.snapshot().bytes > store.budget_bytes
    assert store.snapshot().sessions == 1
    store.release(session)
    assert store.snapshot().bytes == 0
    assert store.acquire("big", "me", [0])[1] == 0


def test_buffers_grow_no_further_than_planned() -> None:
    store = SessionStore(SPEC, 10 * SMALLEST)
    session, _ = store.acquire("a", "me", [], planned=70)
    compute(session, list(range(65)))
    compute(session, list(range(5)))
    assert session.capacity == 70
    compute(session, [1])  # a plan is no limit
    assert session.capacity > 71
    store.release(session)
    small, _ = store.acquire(None, "me", [], planned=5)
    compute(small, [1])
    assert small.capacity == 5


def test_what_fits_is_what_active_sessions_leave() -> None:
    store = SessionStore(SPEC, 2 * SMALLEST)
    keep(store, "idle", "me", list(range(128)))
    assert store.fits("new", "me", 128)
    assert not store.fits("new", "me", 129)
    kept, _ = store.acquire("a", "me", [], planned=50)
    unkept, _ = store.acquire(None, "me", [], planned=50)
    assert store.fits(None, "me", 28)
    assert not store.fits("b", "me", 29)
    # The idle session would bring its buffers, however few of its tokens it keeps.
    assert store.fits("idle", "you", 10)
    assert not store.fits("idle", "me", 10)
    store.release(unkept)
    assert store.fits("b", "me", 78)
    compute(kept, list(range(100)))  # more than planned
    assert not store.fits("b", "me", 29)
    store.release(kept)
    assert store.fits("b", "me", 128)


def test_within_the_budget_as_long_as_what_is_acquired_fits() -> None:
    store = SessionStore(SPEC, 3 * SMALLEST)
    active: list[tuple[Session, int]] = []
    for number in range(200):
        planned = 1 + number * 37 % 150
        while not store.fits(str(number % 7), "me", planned):
            store.release(active.pop(0)[0])
        if all(session.id != str(number % 7) for session, _ in active):
            active.append((store.acquire(str(number % 7), "me", [], planned=planned)[0], planned))
        for session, most in active:
            compute(session, [number] * min(40, most - session.length))
            assert store.snapshot().bytes <= store.budget_bytes
    assert store.snapshot().evictions > 0


def test_drop_forgets_an_idle_session_at_once_and_an_active_one_at_release() -> None:
    store = SessionStore(SPEC, 10 * SMALLEST)
    keep(store, "a", "me", [1])
    assert store.drop("a", "me")
    assert store.snapshot().bytes == 0
    session, _ = store.acquire("a", "me", [])
    compute(session, [1, 2])
    assert store.drop("a", "me")
    assert holds(session, [1, 2])
    store.release(session)
    assert store.snapshot().bytes == 0
    assert store.acquire("a", "me", [1, 2])[1] == 0


def test_drop_all() -> None:
    store = SessionStore(SPEC, 10 * SMALLEST)
    keep(store, "a", "me", [1])
    active, _ = store.acquire("b", "you", [])
    compute(active, [1])
    store.drop_all()
    store.release(active)
    assert store.snapshot().sessions == store.snapshot().bytes == 0
    assert store.snapshot().drops == 2


def test_snapshot_can_be_read_while_the_writer_writes() -> None:
    store = SessionStore(SPEC, 3 * SMALLEST)
    done = threading.Event()
    inconsistent = []

    def read() -> None:
        while not done.is_set():
            snapshot = store.snapshot()
            if snapshot.hits > snapshot.lookups or snapshot.bytes < 0:
                inconsistent.append(snapshot)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(300):
        keep(store, str(number % 5), "me", [1, 2, number])
    done.set()
    reader.join()
    assert not inconsistent


class StoreMachine(RuleBasedStateMachine):
    """Random use against a plain model: what each session may hold, by owner and id."""

    active = Bundle("active")

    def __init__(self) -> None:
        super().__init__()
        self.store = SessionStore(SPEC, 3 * SMALLEST)
        self.sessions: set[Session] = set()
        self.kept: dict[tuple[str, str], list[int]] = {}  # what was held at release, unless dropped
        self.current: dict[Session, list[int]] = {}
        self.dropped: set[Session] = set()

    @rule(
        target=active,
        session_id=st.sampled_from(["a", "b", "c", "d", None]),
        owner=st.sampled_from(["me", "you"]),
        tokens=st.lists(st.integers(0, 1), max_size=6),
    )
    def acquire(self, session_id: str | None, owner: str, tokens: list[int]) -> Session | None:
        locked = {(s.owner, s.id) for s in self.current if s.id is not None and s not in self.dropped}
        if (owner, session_id) in locked:
            with pytest.raises(SessionLocked):
                self.store.acquire(session_id, owner, tokens)
            return None
        session, matched = self.store.acquire(session_id, owner, tokens)
        assert holds(session, tokens[:matched])
        kept = self.kept.pop((owner, session_id), []) if session_id else []
        pairs = zip(kept, tokens, strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        assert matched in (0, common)  # 0: evicted meanwhile
        self.sessions.add(session)
        self.current[session] = tokens[:matched]
        return session

    @rule(session=active, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=120))
    def compute(self, session: Session | None, tokens: list[int]) -> None:
        if session in self.current:
            compute(session, tokens)
            self.current[session] += tokens

    @rule(session=active)
    def fail_half_way(self, session: Session | None) -> None:
        if session in self.current:
            session.write(0, torch.full((1, 1, 3, 2), 7.0), torch.full((1, 1, 3, 2), 7.0))

    @rule(session=active)
    def release(self, session: Session | None) -> None:
        if session in self.current:
            self.store.release(session)
            tokens = self.current.pop(session)
            if session.id is not None and session not in self.dropped:
                self.kept[session.owner, session.id] = tokens
            self.dropped.discard(session)

    @rule(session_id=st.sampled_from(["a", "b", "c", "d"]), owner=st.sampled_from(["me", "you"]))
    def drop(self, session_id: str, owner: str) -> None:
        self.store.drop(session_id, owner)
        self.kept.pop((owner, session_id), None)
        self.dropped |= {s for s in self.current if (s.owner, s.id) == (owner, session_id)}

    @invariant()
    def active_sessions_hold_what_they_should(self) -> None:
        assert all(holds(session, tokens) for session, tokens in self.current.items())

    @invariant()
    def bytes_are_those_of_the_buffers(self) -> None:
        snapshot = self.store.snapshot()
        assert snapshot.bytes == sum(session.bytes for session in self.sessions)
        assert snapshot.active == len(self.current)

    @invariant()
    def idle_sessions_stay_within_the_budget(self) -> None:
        snapshot = self.store.snapshot()
        if not self.current:
            assert snapshot.bytes <= snapshot.budget_bytes

    def teardown(self) -> None:
        self.store.drop_all()
        for session in list(self.current):
            self.store.release(session)
        assert self.store.snapshot().bytes == sum(session.bytes for session in self.sessions) == 0


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
