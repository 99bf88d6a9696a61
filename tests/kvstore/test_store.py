"""The store: what it finds, shares, keeps, evicts and counts."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import (
    KVSpec,
    KVStore,
    LeastRecentlyUsed,
    PinRefused,
    PoolExhausted,
    PoolShare,
    PrefixMatch,
    Session,
    SessionLocked,
    StoreConfig,
    TierConfig,
)
from kvstore.records import NONE
from tests.kvstore.reference import (
    PAGE,
    SIZE,
    SPEC,
    Clock,
    append_rounded,
    check_books,
    check_nothing_left,
    compute,
    held,
    holds,
    new_store,
    run_pass,
    turn,
)
from tests.kvstore.tier_helpers import kv_of, read, rounded, text

TOKENS = text(1, 100)
OTHERS = text(2, 100)
ROUNDING = 0.02  # what int8 may change


def resident_tokens(store: KVStore, tokens: list[int], owner: str = "ann") -> int:
    """How many of these tokens a lookup finds on the device."""
    return store.find(owner, tokens).device


def kept(store: KVStore, session_id: str, owner: str = "ann") -> Session:
    """A session that the store has in memory."""
    session = store.get(owner, session_id)
    assert session is not None
    return session


# Settings.


@pytest.mark.parametrize(
    "wrong",
    [
        {"device_bytes": -1},
        {"device_format": "int4"},
        {"slab_pages": 0},
        {"newest_original_tokens": -1},
        {"pin_budget": 1.1},
        {"sleep_after": 0},
        {"layers_at_a_time": 0},
        {"disk": TierConfig(10)},
        {"remote": TierConfig(10)},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        StoreConfig(**({"device_bytes": 1000} | wrong))


def test_pools_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="guaranteed"):
        PoolShare("a", guaranteed=0.6, maximum=0.5)
    with pytest.raises(ValueError, match="priority"):
        PoolShare("a", priority=0)
    half = PoolShare("a", guaranteed=0.5), PoolShare("b", guaranteed=0.6)
    for pools in (), half, (PoolShare("a"), PoolShare("a")):
        with pytest.raises(ValueError, match=r"pool|guaranteed"):
            new_store(pools=pools)


@pytest.mark.parametrize(("format", "pages"), [("original", 1), ("int8", 2)])
def test_the_budget_must_hold_a_page(format: str, pages: int) -> None:
    settings: dict[str, Any] = {"device_format": format}
    with pytest.raises(ValueError, match="must hold"):
        KVStore(SPEC, StoreConfig(device_bytes=pages * PAGE - 1, **settings))
    store = KVStore(SPEC, StoreConfig(device_bytes=pages * PAGE, **settings))
    turn(store, "chat", TOKENS[:SIZE])


# Sessions.


def test_a_session_keeps_the_common_prefix() -> None:
    store = new_store()
    turn(store, "chat", TOKENS[:10])
    assert turn(store, "chat", [*TOKENS[:7], *OTHERS[:5]]) == 7
    assert turn(store, "chat", [*TOKENS[:7], *OTHERS[:5]]) == 12
    check_books(store)


def test_a_session_comes_back_to_a_branch_that_it_left() -> None:
    store = new_store()
    turn(store, "chat", TOKENS[:12])
    turn(store, "chat", [*TOKENS[:4], *OTHERS[:8]])
    assert turn(store, "chat", TOKENS[:14]) == 12
    check_books(store)


def test_an_acquired_session_is_locked() -> None:
    store = new_store()
    session = store.acquire("ann", "chat", [])
    with pytest.raises(SessionLocked):
        store.acquire("ann", "chat", [])
    assert store.prefetch("ann", "chat") is None
    assert not store.sleep("ann", "chat")
    assert store.acquire("bob", "chat", []) is not session
    store.release(session)
    with pytest.raises(ValueError, match="not acquired"):
        store.release(session)


def test_a_session_without_a_name_leaves_its_whole_pages() -> None:
    store = new_store()
    assert turn(store, None, TOKENS[:10]) == 0
    assert store.snapshot().sessions == store.snapshot().active == 0
    assert store.snapshot().pages == 2
    first, second = store.acquire("ann", None, TOKENS[:10]), store.acquire("ann", None, TOKENS[:10])
    assert first.length == second.length == 8
    store.release(first)
    store.release(second)
    check_nothing_left(store)


def test_a_session_that_holds_nothing_is_forgotten() -> None:
    store = new_store()
    store.release(store.acquire("ann", "chat", TOKENS[:10]))
    assert store.get("ann", "chat") is None
    assert store.snapshot().sessions == 0


def test_fork_takes_any_length_without_copying() -> None:
    store = new_store()
    turn(store, "chat", TOKENS[:11])
    session = kept(store, "chat")
    for length in (0, 3, 4, 9, 11):
        twin = store.fork(session, f"fork at {length}", length)
        assert twin.tokens == tuple(TOKENS[:length])
    assert store.snapshot().pages == 3
    for length in (0, 3, 4, 9, 11):
        assert turn(store, f"fork at {length}", [*TOKENS[:length], *text(length, 6)]) == length
    assert turn(store, "chat", TOKENS[:15]) == 11
    check_books(store)


def test_fork_refuses_what_makes_no_sense() -> None:
    store = new_store()
    turn(store, "chat", TOKENS[:5])
    turn(store, "twin", TOKENS[:5])
    session = kept(store, "chat")
    with pytest.raises(ValueError, match="already"):
        store.fork(session, "twin")
    for length in (-1, 6):
        with pytest.raises(ValueError, match="cannot fork"):
            store.fork(session, "new", length)
    check_books(store)


def test_drop_forgets_an_idle_session_at_once_and_an_active_one_at_release() -> None:
    store = new_store()
    turn(store, "chat", TOKENS[:10])
    assert store.drop("ann", "chat")
    assert not store.drop("ann", "chat")
    assert store.snapshot().pages == store.snapshot().records == 0
    session = store.acquire("ann", "chat", [])
    compute(session, TOKENS[:10])
    assert store.drop("ann", "chat")
    assert holds(session, TOKENS[:10])
    assert store.get("ann", "chat") is None
    second = store.acquire("ann", "chat", TOKENS[:10])
    assert second is not session
    store.release(session)
    assert second.length == 8  # what another session has is kept for it
    store.release(second)
    assert store.get("ann", "chat") is second
    assert store.snapshot().pages == 2
    check_nothing_left(store)


def test_pages_of_a_branch_that_was_left_count_for_less_until_it_is_back() -> None:
    store = new_store()
    branch = [*TOKENS[:4], *OTHERS[:8]]
    turn(store, "chat", TOKENS[:12])
    left = held(kept(store, "chat"))[1:]
    turn(store, "chat", branch)
    assert store.records.superseded[left].all()
    assert turn(store, "chat", TOKENS[:12]) == 12
    assert held(kept(store, "chat"))[1:] == left
    assert not store.records.superseded[left].any()


def test_drop_forgets_branches_that_the_session_left() -> None:
    store = new_store()
    turn(store, "chat", TOKENS[:12])
    turn(store, "chat", [*TOKENS[:4], *OTHERS[:8]])
    assert store.drop("ann", "chat")
    assert store.find("ann", TOKENS[:12]).tokens == 0
    assert store.snapshot().records == 0


def test_drop_leaves_what_others_have() -> None:
    store = new_store()
    turn(store, "chat", TOKENS[:12])
    turn(store, "other", [*TOKENS[:8], *OTHERS[:4]])
    store.drop("ann", "chat")
    assert store.find("ann", TOKENS[:12]).tokens == 8
    assert turn(store, "other", [*TOKENS[:8], *OTHERS[:4]]) == 12
    check_nothing_left(store)


def test_drop_all() -> None:
    store = new_store()
    turn(store, "chat", TOKENS[:6])
    active = store.acquire("bob", "chat", [])
    compute(active, TOKENS[:6])
    store.drop_all()
    store.release(active)
    assert store.snapshot().sessions == store.snapshot().pages == 0
    assert store.counters.drops == 2


# Finding and sharing.


def test_prefixes_are_found_over_sessions() -> None:
    store = new_store()
    turn(store, "1", TOKENS[:18])
    assert store.find("ann", TOKENS[:30]) == PrefixMatch(16, 16, {})
    assert turn(store, "2", [*TOKENS[:15], *OTHERS[:5]]) == 12
    assert turn(store, "3", [*TOKENS[:15], *OTHERS[:5]]) == 20
    assert turn(store, "4", OTHERS[:8]) == 0
    check_books(store)


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_find_says_what_acquire_then_finds(lengths: list[int]) -> None:
    store = new_store()
    for number, length in enumerate(lengths):
        tokens = [*TOKENS[:length], *OTHERS[number : number + 6]]
        match = store.find("ann", tokens)
        session = store.acquire("ann", str(number), tokens)
        assert session.length == match.tokens == match.device
        compute(session, tokens)
        store.release(session)
    check_nothing_left(store)


def test_what_two_sessions_compute_at_once_is_shared_afterwards() -> None:
    store = new_store()
    first, second = store.acquire("ann", "1", TOKENS), store.acquire("ann", "2", TOKENS)
    compute(first, TOKENS[:18])
    compute(second, TOKENS[:18], seed=1)
    assert first.table.records[:4] == second.table.records[:4]
    assert first.table.records[4] != second.table.records[4]
    assert store.counters.pages_shared == 4
    assert store.snapshot().pages == store.residency.used_pages() == 6
    assert holds(first, TOKENS[:18])
    assert holds(second, TOKENS[:18])
    check_books(store)
    store.release(first)
    store.release(second)
    check_nothing_left(store)


def test_pages_evicted_and_computed_again_are_found_again() -> None:
    store = new_store(4)
    turn(store, "1", TOKENS[:16])
    turn(store, "2", OTHERS[:16])
    assert store.find("ann", TOKENS[:16]).tokens == 0
    assert turn(store, "1", TOKENS[:16]) == 0
    assert store.find("ann", TOKENS[:16]).tokens == 16
    assert turn(store, "3", TOKENS[:16]) == 16
    check_nothing_left(store)


def test_nothing_is_shared_across_owners() -> None:
    store = new_store()
    turn(store, "chat", TOKENS[:16], public_tokens=0)
    assert store.find("bob", TOKENS[:16]).tokens == 0
    assert store.find("bob", TOKENS[:16], public_tokens=16).tokens == 0
    assert turn(store, "chat", TOKENS[:16], owner="bob") == 0
    assert not store.drop("cid", "chat")
    ann, bob = kept(store, "chat"), kept(store, "chat", "bob")
    assert not set(held(ann)) & set(held(bob))


def test_public_prefixes_are_shared_and_nothing_behind_them() -> None:
    store = new_store()
    public = 10  # two whole pages; the third mixes public and private tokens
    turn(store, "chat", TOKENS[:16], public_tokens=public)
    assert store.find("bob", TOKENS[:16], public_tokens=public).tokens == 8
    assert store.find("bob", TOKENS[:16]).tokens == 0
    assert turn(store, "chat", TOKENS[:16], owner="bob", public_tokens=public) == 8
    ann, bob = kept(store, "chat"), kept(store, "chat", "bob")
    assert set(held(ann)) & set(held(bob)) == set(held(ann)[:2])
    assert store.find("ann", TOKENS[:16], public_tokens=public).tokens == 16
    check_nothing_left(store)


def test_a_private_prefix_is_not_public_because_a_later_turn_says_so() -> None:
    store = new_store()
    turn(store, "chat", TOKENS[:8])
    turn(store, "chat", TOKENS[:16], public_tokens=16)
    assert store.find("bob", TOKENS[:16], public_tokens=16).tokens == 0


def test_tokens_are_compared_when_keys_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    def collision(parent: bytes, tokens: bytes, salt: bytes) -> bytes:
        return bytes([len(parent) % 16, 1] * 8)

    monkeypatch.setattr("kvstore.index.page_key", collision)
    monkeypatch.setattr("kvstore.residency.page_key", collision)
    store = new_store()
    turn(store, "1", TOKENS[:SIZE])
    assert store.find("ann", OTHERS[:SIZE]).tokens == 0
    assert turn(store, "2", OTHERS[:SIZE]) == 0
    assert turn(store, "3", TOKENS[:SIZE]) == SIZE


def test_the_index_grows_and_shrinks() -> None:
    store = new_store(1500)
    for number in range(200):
        turn(store, str(number), [number, *TOKENS[: 4 * SIZE]])
    assert all(store.find("ann", [n, *TOKENS[: 4 * SIZE]]).tokens == 16 for n in range(200))
    for number in range(0, 200, 2):
        store.drop("ann", str(number))
    found = [store.find("ann", [n, *TOKENS[: 4 * SIZE]]).tokens for n in range(200)]
    assert found == [0, 16] * 100
    check_nothing_left(store)
    assert len(store.index) == 0


# Eviction.


def test_the_least_recently_used_goes_first_and_from_its_end() -> None:
    clock = Clock()
    store = new_store(8, clock=clock, policy=LeastRecentlyUsed())
    for name, tokens in (("1", TOKENS[:12]), ("2", OTHERS[:12]), ("3", text(3, 8))):
        clock.time += 10
        turn(store, name, tokens)
    clock.time += 10
    turn(store, "4", text(4, 8))  # two more pages: those of "1" that nothing builds on
    assert resident_tokens(store, TOKENS[:12]) == 4
    assert resident_tokens(store, OTHERS[:12]) == 12
    assert store.counters.pages_evicted == {"room": 2}
    clock.time += 10
    assert turn(store, "1", TOKENS[:4]) == 4  # now that of "2" is the oldest
    clock.time += 10
    turn(store, "5", text(5, 12))
    assert resident_tokens(store, OTHERS[:12]) == 0
    assert resident_tokens(store, TOKENS[:4]) == 4


def test_worth_prefers_what_later_tokens_attended_to() -> None:
    clock = Clock()
    store = new_store(6, clock=clock)
    for name, tokens, mass in (("1", TOKENS[:12], 0.2), ("2", OTHERS[:12], 0.001)):
        turn(store, name, tokens)
        session = store.acquire("ann", name, tokens)
        store.note_attention(session, [mass] * 12)
        with pytest.raises(ValueError, match="of shape"):
            store.note_attention(session, [mass] * 11)
        store.release(session)
    ids = kept(store, "1").table.ids()
    assert store.records.attention[ids].tolist() == pytest.approx([SIZE * 0.2] * 3)
    clock.time += 100
    turn(store, "3", text(3, 12))
    assert resident_tokens(store, TOKENS[:12]) == 12
    assert resident_tokens(store, OTHERS[:12]) == 0


def test_worth_prefers_those_that_are_there() -> None:
    clock = Clock()
    store = new_store(6, clock=clock)
    turn(store, "1", TOKENS[:12])
    clock.time += 1
    turn(store, "2", OTHERS[:12])
    clock.time += 100
    store.heartbeat("ann", "1")
    store.heartbeat("ann", "nobody")
    turn(store, "3", text(3, 12))
    assert resident_tokens(store, TOKENS[:12]) == 12
    assert resident_tokens(store, OTHERS[:12]) == 0


def test_a_branch_that_was_left_goes_before_the_one_in_use() -> None:
    store = new_store(6)
    turn(store, "1", TOKENS[:12])
    turn(store, "1", [*TOKENS[:4], *OTHERS[:8]])
    turn(store, "2", text(3, 12))
    assert resident_tokens(store, TOKENS[:12]) == 4
    assert resident_tokens(store, [*TOKENS[:4], *OTHERS[:8]]) == 12


@given(
    turns=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5 * SIZE)), max_size=12),
    pages=st.integers(6, 12),
    policy=st.sampled_from(["lru", "worth"]),
)
@settings(max_examples=30, deadline=None)
def test_pages_never_leave_before_those_that_build_on_them(
    turns: list[tuple[int, int]], pages: int, policy: str
) -> None:
    clock = Clock()
    extra = {"policy": LeastRecentlyUsed()} if policy == "lru" else {}
    store = new_store(pages, clock=clock, **extra)
    for number, length in turns:
        clock.time += 7
        turn(store, str(number), [*TOKENS[: length // 2], *text(number, length - length // 2)])
        records = store.records
        resident = records.where(records.page != NONE)
        parents = records.parent[resident]
        assert (records.page[parents[parents != NONE]] != NONE).all()
        check_books(store)
    check_nothing_left(store)


def test_sessions_of_which_nothing_is_left_are_forgotten_in_time() -> None:
    store = new_store(4)
    turn(store, "1", TOKENS[:8])
    turn(store, "2", OTHERS[:16])
    assert store.get("ann", "1") is not None
    store.tick()
    assert store.get("ann", "1") is None
    assert store.get("ann", "2") is not None
    assert store.counters.sessions_evicted == 1
    check_books(store)


def test_what_is_in_use_is_never_evicted() -> None:
    store = new_store(6)
    active = store.acquire("ann", "active", [])
    compute(active, TOKENS[:14])
    turn(store, "1", OTHERS[:8])
    turn(store, "2", text(3, 8))
    assert holds(active, TOKENS[:14])
    with pytest.raises(PoolExhausted) as error:
        turn(store, "3", text(4, 12))
    failure = error.value
    assert failure.budget == 6 * PAGE
    assert failure.pinned == 0
    assert failure.free + failure.locked == 6 * PAGE
    assert failure.asked > failure.free
    assert store.counters.refusals["room"] == 1
    assert holds(active, TOKENS[:14])


def test_exhaustion_tells_what_is_asked_free_pinned_and_locked() -> None:
    store = new_store(10, pin_budget=0.5)
    turn(store, "pinned", TOKENS[:12])
    idle = kept(store, "pinned")
    store.pin(idle, "greeting", end=8)
    active = store.acquire("ann", "active", [])
    run_pass(active, OTHERS[:16])
    with pytest.raises(PoolExhausted, match="pinned and 8,192 locked") as error:
        active.reserve(16 + 5 * SIZE)
    failure = error.value
    assert (failure.asked, failure.free) == (5 * PAGE, 4 * PAGE)
    assert (failure.pinned, failure.locked, failure.budget) == (2 * PAGE, 4 * PAGE, 10 * PAGE)


# Pins.


def test_pinned_pages_stay() -> None:
    store = new_store(8)
    turn(store, "1", TOKENS[:16])
    session = kept(store, "1")
    pin = store.pin(session, "system prompt", end=5)
    assert (pin.reason, pin.owner, pin.bytes, len(pin.records)) == ("system prompt", "ann", 2 * PAGE, 2)
    turn(store, "2", OTHERS[:24])
    assert resident_tokens(store, TOKENS[:16]) == 8
    assert store.snapshot().pinned_bytes == 2 * PAGE
    check_books(store, pins=[pin])
    store.unpin(pin)
    with pytest.raises(KeyError):
        store.unpin(pin)
    turn(store, "3", text(3, 32))
    assert resident_tokens(store, TOKENS[:16]) == 0
    check_nothing_left(store)


def test_pins_have_a_budget_and_count_a_page_once() -> None:
    store = new_store(8, pin_budget=0.5)
    turn(store, "1", TOKENS[:20])
    session = kept(store, "1")
    first = store.pin(session, "one", first=2, end=14)
    second = store.pin(session, "two", end=12)
    assert (first.bytes, second.bytes) == (4 * PAGE, 0)
    with pytest.raises(PinRefused, match="exceed the budget"):
        store.pin(session, "three", first=16)
    with pytest.raises(ValueError, match="reason"):
        store.pin(session, "")
    assert store.counters.refusals["pin"] == 1
    store.unpin(first)
    assert store.pins.bytes == 3 * PAGE
    store.unpin(second)
    assert store.pins.bytes == 0
    check_books(store)


def test_pinned_pages_outlive_their_session_until_they_are_unpinned() -> None:
    store = new_store(8)
    session = store.acquire("ann", "1", [])
    compute(session, TOKENS[:7])
    pin = store.pin(session, "profile", end=2)
    store.release(session)
    store.drop("ann", "1")
    assert store.snapshot().pages == 1
    store.unpin(pin)
    check_nothing_left(store)


def test_a_session_goes_on_behind_its_pinned_last_page() -> None:
    store = new_store()
    turn(store, "1", TOKENS[:6])
    session = kept(store, "1")
    pin = store.pin(session, "important")
    assert turn(store, "1", TOKENS[:13]) == 6
    assert turn(store, "2", TOKENS[:13]) == 12
    check_books(store, pins=[pin])


# Pools.


POOLS = (PoolShare("default"), PoolShare("low", maximum=0.5), PoolShare("high", guaranteed=0.5))


def test_a_guaranteed_share_is_never_taken() -> None:
    store = new_store(8, pools=POOLS)
    turn(store, "1", TOKENS[:24], pool="high")
    turn(store, "2", OTHERS[:16])
    # Of the six pages of "high", two were above its guarantee.
    assert resident_tokens(store, TOKENS[:24]) == 16
    session = store.acquire("ann", "3", [])
    with pytest.raises(PoolExhausted):
        session.reserve(20)
    store.release(session)
    assert resident_tokens(store, TOKENS[:24]) == 16
    turn(store, "4", text(4, 20), pool="high")  # it may evict its own and others'
    used = {pool.name: pool.used_bytes for pool in store.snapshot().pools}
    assert used["high"] >= 5 * PAGE


def test_a_maximum_share_is_never_exceeded() -> None:
    store = new_store(8, pools=POOLS)
    turn(store, "1", TOKENS[:12], pool="low")
    turn(store, "2", OTHERS[:12], pool="low")
    low = store.snapshot().pools[1]
    assert (low.name, low.used_bytes, low.maximum_bytes) == ("low", 4 * PAGE, 4 * PAGE)
    assert resident_tokens(store, OTHERS[:12]) == 12
    active = store.acquire("ann", "3", [], pool="low")
    with pytest.raises(PoolExhausted):
        active.reserve(5 * SIZE)
    active.reserve(4 * SIZE)
    check_books(store)


def test_a_session_keeps_its_pool_until_another_is_named() -> None:
    store = new_store(8, pools=POOLS)
    turn(store, "1", TOKENS[:8], pool="high")
    turn(store, "1", TOKENS[:12])
    assert [pool.used_bytes for pool in store.snapshot().pools] == [0, 0, 3 * PAGE]
    with pytest.raises(ValueError, match="no pool 'lo'; there are default, low, high"):
        store.acquire("ann", "1", [], pool="lo")
    turn(store, "1", TOKENS[:16], pool="default")
    assert [pool.used_bytes for pool in store.snapshot().pools] == [PAGE, 0, 3 * PAGE]
    check_books(store)


def test_a_session_keeps_its_pool_over_a_restart(tmp_path: Path) -> None:
    disk = TierConfig(10**9, "original", location=tmp_path)
    first = new_store(8, pools=POOLS, disk=disk)
    turn(first, "1", TOKENS[:10], pool="high")
    turn(first, "2", OTHERS[:10], pool="low")
    first.close()
    pools = tuple(pool for pool in POOLS if pool.name != "low")
    second = new_store(8, pools=pools, disk=disk)
    assert second.flush(60)
    assert turn(second, "1", TOKENS[:12]) == 10
    assert [pool.used_bytes for pool in second.snapshot().pools] == [0, 3 * PAGE]
    assert turn(second, "2", OTHERS[:12]) == 10  # its pool is no more
    assert [pool.used_bytes for pool in second.snapshot().pools] == [3 * PAGE, 3 * PAGE]
    second.close()


def test_int8_and_original_pages_together_stay_within_a_maximum() -> None:
    pools = (PoolShare("default"), PoolShare("low", maximum=0.25))
    host = TierConfig(10**9, "original")
    store = new_store(
        64, pools=pools, device_format="int8", newest_original_tokens=20, host=host, slab_pages=8
    )
    for length in (20, 40, 60):
        turn(store, "1", TOKENS[:length], pool="low", tolerance=ROUNDING)
    assert store.flush(60)
    turn(store, "2", OTHERS[:40], pool="low", tolerance=ROUNDING)
    assert store.flush(60)
    check_books(store)
    session = store.acquire("ann", "1", TOKENS[:60], pool="low")
    assert session.length > 40
    check_books(store)


# Whether there is room.


def test_what_fits_is_what_active_sessions_and_pins_leave() -> None:
    store = new_store(10)
    turn(store, "idle", TOKENS[:40])
    assert store.capacity_tokens == 40
    assert store.fits("ann", "new", 40)
    assert not store.fits("ann", "new", 41)
    kept = store.acquire("ann", "kept", [], planned=10)
    unkept = store.acquire("ann", None, [], planned=12)
    assert store.fits("ann", None, 16)
    assert not store.fits("ann", "new", 17)
    assert store.fits("ann", "kept", 28)  # its own plan does not count against it
    store.release(unkept)
    compute(kept, OTHERS[:20])  # more than planned
    assert store.fits("ann", "new", 20)
    assert not store.fits("ann", "new", 21)
    pin = store.pin(kept, "important", end=4)
    assert store.capacity_tokens == 36
    assert not store.fits("ann", "new", 20)
    store.unpin(pin)
    store.release(kept)
    assert store.fits("bob", "new", 40)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_what_fits_never_runs_out_of_pages(data: st.DataObject) -> None:
    store = new_store(12, slab_pages=data.draw(st.integers(1, 12)))
    active: list[tuple[Session, list[int], int]] = []
    for number in range(data.draw(st.integers(1, 10))):
        planned = data.draw(st.integers(1, 12 * SIZE))
        while not store.fits("ann", str(number), planned):
            store.release(active.pop(data.draw(st.integers(0, len(active) - 1)))[0])
        tokens = text(data.draw(st.integers(0, 2)), planned)
        active.append((store.acquire("ann", str(number), tokens, planned=planned), tokens, planned))
        for session, wanted, most in active:
            compute(session, wanted[: data.draw(st.integers(session.length, most))])
        check_books(store)
    for session, wanted, most in active:
        compute(session, wanted[:most])
        store.release(session)
    check_nothing_left(store)


# Sleep and time.


def test_quiet_sessions_fall_asleep_and_wake_on_touch() -> None:
    clock = Clock()
    store = new_store(clock=clock, sleep_after=100, host=TierConfig(10**9, "original"))
    turn(store, "1", TOKENS[:10])
    turn(store, "2", OTHERS[:10])
    active = store.acquire("ann", "3", [])
    clock.time += 90
    store.heartbeat("ann", "2")
    clock.time += 20
    store.tick()
    assert (store.snapshot().sleeping, store.counters.sleeps) == (1, 1)
    assert store.flush(60)
    store.tick()
    assert resident_tokens(store, TOKENS[:10]) == 0
    assert store.find("ann", TOKENS[:10]).tiers == {"host": 8}
    assert turn(store, "1", TOKENS[:14]) == 10
    assert (store.snapshot().sleeping, store.counters.wakes) == (0, 1)
    assert not store.sleep("ann", "3")
    assert not store.sleep("ann", "nobody")
    store.release(active)


@pytest.mark.parametrize("garbage", [1e30, float("nan")])
def test_unused_slots_of_a_page_do_not_leave_the_device(garbage: float) -> None:
    store = new_store(8, host=TierConfig(10**9, "int8"), newest_original_tokens=0)
    session = store.acquire("ann", "1", [])
    run_pass(session, TOKENS[:6])
    failed = torch.full((1, SPEC.kv_heads, 2, SPEC.head_dim), garbage)
    for layer in range(SPEC.layers):
        session.write(layer, failed, failed)  # never committed
    store.release(session)
    assert store.sleep("ann", "1")
    assert store.flush(60)
    store.tick()
    assert store.snapshot().pages == 0
    session = store.acquire("ann", "1", TOKENS[:6])
    assert session.exactness == "quantized"
    assert holds(session, TOKENS[:6], tolerance=ROUNDING)
    whole = store.residency.view(session.table.records[1])
    assert not whole[..., 2:, :].any()


def test_without_a_tier_a_sleeping_session_stays_on_the_device() -> None:
    store = new_store()
    turn(store, "1", TOKENS[:10])
    assert store.sleep("ann", "1")
    store.tick()
    assert store.snapshot().pages == 3
    assert turn(store, "1", TOKENS[:10]) == 10


def test_a_clock_that_goes_back_stands_still() -> None:
    clock = Clock(5000.0)
    store = new_store(4, clock=clock, sleep_after=100)
    turn(store, "1", TOKENS[:8])
    clock.time = 10.0
    assert store.now() == 5000.0
    turn(store, "2", OTHERS[:8])
    store.tick()
    assert store.snapshot().sleeping == 0
    turn(store, "3", text(3, 16))
    clock.time = 5101.0
    store.tick()
    assert store.snapshot().sleeping == 1
    check_books(store)


# Memory.


def sparse_store() -> tuple[KVStore, list[str]]:
    """A store with a page or two in each of many slabs, and the sessions that have them."""
    store = new_store(64, slab_pages=8)
    for number in range(8):
        turn(store, f"large {number}", text(number, 6 * SIZE))
        turn(store, f"small {number}", text(50 + number, 2 * SIZE))
    for number in range(8):
        store.drop("ann", f"large {number}")
    return store, [f"small {number}" for number in range(8)]


def test_compaction_returns_sparse_slabs() -> None:
    store, names = sparse_store()
    before = store.snapshot().allocated_bytes
    assert store.compact() > 0
    assert store.snapshot().allocated_bytes <= before / 2
    assert store.snapshot().bytes == 16 * PAGE
    assert store.counters.pages_compacted > 0
    check_books(store)
    for number, name in enumerate(names):
        assert turn(store, name, text(50 + number, 2 * SIZE + 1)) == 2 * SIZE
    check_nothing_left(store)


def test_compaction_leaves_sessions_in_use_alone() -> None:
    store, names = sparse_store()
    active = [store.acquire("ann", name, text(50 + n, 8)) for n, name in enumerate(names)]
    places = [session.keys(0).data_ptr() for session in active]
    assert store.compact() == 0
    assert [session.keys(0).data_ptr() for session in active] == places
    assert all(holds(session, text(50 + n, 8)) for n, session in enumerate(active))


def test_compaction_makes_sessions_adjacent() -> None:
    store = new_store(64, slab_pages=16)
    first, second = store.acquire("ann", "1", []), store.acquire("ann", "2", [])
    for length in range(0, 40, SIZE):
        run_pass(first, TOKENS[length : length + SIZE])
        run_pass(second, OTHERS[length : length + SIZE])
    assert first.adjacent_runs() > 1
    store.release(first)
    store.release(second)
    store.compact()
    for name, tokens in (("1", TOKENS[:40]), ("2", OTHERS[:40])):
        session = store.acquire("ann", name, tokens)
        assert session.adjacent_runs() == 1
        assert holds(session, tokens)
    check_books(store)


def test_slabs_are_allocated_on_demand_and_returned_when_empty() -> None:
    store = new_store(64, slab_pages=8)
    assert store.snapshot().allocated_bytes == 0
    turn(store, "1", TOKENS[: 9 * SIZE])
    assert store.snapshot().allocated_bytes == 16 * PAGE
    store.drop("ann", "1")
    assert store.snapshot().allocated_bytes == 0


# Int8 pages on the device.


def test_older_pages_on_the_device_are_int8_and_the_newest_original() -> None:
    store = new_store(40, device_format="int8", newest_original_tokens=8)
    session = store.acquire("ann", "1", [])
    for length in range(7, 29, 7):
        append_rounded(session, TOKENS[:length])
    assert store.records.encoded[session.table.ids()].tolist() == [True] * 5 + [False] * 2
    assert session.exactness == "quantized"
    assert holds(session, TOKENS[:28], tolerance=ROUNDING)
    assert torch.equal(read(session)[..., 20:, :], kv_of(TOKENS[:28])[..., 20:, :])
    assert not holds(session, TOKENS[:28])
    check_books(store)
    store.release(session)
    assert turn(store, "1", TOKENS[:40], tolerance=ROUNDING) == 28
    check_nothing_left(store)


def test_int8_pages_are_read_and_shared_without_further_rounding() -> None:
    store = new_store(40, device_format="int8", newest_original_tokens=4)
    turn(store, "1", TOKENS[:40], tolerance=ROUNDING)
    store.fork(store.acquire("ann", "1", TOKENS[:40]), "twin", 18)
    session = store.acquire("ann", "twin", [*TOKENS[:18], *OTHERS[:4]])
    assert session.length == 18
    before = read(session)
    append_rounded(session, [*TOKENS[:18], *OTHERS[:4]])  # copies an int8 page
    assert torch.equal(read(session)[..., :16, :], before[..., :16, :])
    assert holds(session, [*TOKENS[:18], *OTHERS[:4]], tolerance=ROUNDING)
    assert torch.equal(before, rounded(kv_of(TOKENS[:20]), "int8", 5)[..., :18, :])
    assert session.exactness == "quantized"


def test_kv_that_int8_cannot_hold_stays_original() -> None:
    store = new_store(40, device_format="int8", newest_original_tokens=4)
    session = store.acquire("ann", "1", [])
    kv = kv_of(TOKENS[:16]).clone()
    kv[1, 0, 0, 5, 2] = float("inf")
    for layer in range(SPEC.layers):
        session.write(layer, kv[layer, :1], kv[layer, 1:])
    session.commit(TOKENS[:16])
    assert store.records.encoded[session.table.ids()].tolist() == [True, False, True, False]
    assert torch.equal(read(session)[..., 4:8, :], kv[..., 4:8, :])


def test_int8_pages_hold_more_than_the_budget_of_original_ones() -> None:
    store = new_store(12, device_format="int8", newest_original_tokens=4)
    turn(store, "1", TOKENS[: 16 * SIZE][:20], tolerance=ROUNDING)
    for length in range(20, 15 * SIZE, 8):
        turn(store, "1", TOKENS[:length], tolerance=ROUNDING)
    assert resident_tokens(store, TOKENS[:52]) == 52
    check_books(store)


# Figures.


def test_the_snapshot_counts_what_was_done() -> None:
    store = new_store(20, host=TierConfig(10**9, "original"))
    turn(store, "1", TOKENS[:10])  # 10 computed
    turn(store, "2", [*TOKENS[:9], *OTHERS[:3]])  # 8 reused, 4 computed
    store.fork(store.acquire("ann", "1", TOKENS[:10]), "twin")  # 10 reused
    active = kept(store, "1")
    run_pass(active, TOKENS[10:11])  # 1 computed, 1 page copied
    store.release(active)
    assert store.flush(60)
    snapshot = store.snapshot()
    totals = snapshot.totals
    assert (totals["lookups"], totals["hits"]) == (3, 2)
    assert totals["tokens_looked_up"] == 10 + 12 + 10
    assert totals["tokens_reused"] == 8 + 10
    assert totals["tokens_committed"] == 10 + 4 + 1
    assert totals["pages_copied"] == 1
    assert totals["chunks_written:host"] == snapshot.tiers[0].chunks == 3
    assert (snapshot.sessions, snapshot.active, snapshot.sleeping, snapshot.jobs) == (3, 0, 0, 0)
    assert snapshot.pages == snapshot.records == 5
    assert snapshot.bytes == 5 * PAGE
    assert snapshot.budget_bytes == 20 * PAGE
    assert snapshot.pools[0].used_bytes == snapshot.bytes


def test_reused_and_restored_tokens_are_told_apart() -> None:
    store = new_store(4, host=TierConfig(10**9, "original"))
    turn(store, "1", TOKENS[:16])
    store.flush()
    turn(store, "2", OTHERS[:8])
    session = store.acquire("ann", "1", TOKENS[:16])
    assert (session.reused_tokens, session.restored_tokens) == (8, 8)
    assert store.counters.tokens_restored == {"host": 8}
    assert store.counters.tokens_reused == 8
    assert holds(session, TOKENS[:16])


def test_a_page_that_could_not_be_restored_counts_as_neither() -> None:
    store = new_store(4, host=TierConfig(10**9, "original"))
    turn(store, "1", TOKENS[:16])
    store.flush()
    turn(store, "2", OTHERS[:8])
    store.flush()
    lost = kept(store, "1").table.records[2]
    store.tiering.tiers[0].storage.delete(store.records.key_of(lost), "original")
    session = store.acquire("ann", "1", TOKENS[:16])
    assert session.length == 8
    assert (session.reused_tokens, session.restored_tokens) == (8, 0)
    assert store.counters.tokens_reused == 8
    assert not store.counters.tokens_restored


def test_bookkeeping_costs_little() -> None:
    spec = KVSpec(layers=1, kv_heads=1, head_dim=1, dtype=torch.float32, fingerprint="small")
    store = KVStore(spec, StoreConfig(device_bytes=10_000 * spec.bytes_per_page))
    for number in range(20):
        session = store.acquire("ann", str(number), [])
        zeros = torch.zeros(1, 1, 8000, 1)
        session.write(0, zeros, zeros)
        session.commit([number] * 8000)
        store.release(session)
    snapshot = store.snapshot()
    assert snapshot.records == 10_000
    assert snapshot.bookkeeping_bytes / snapshot.records < 300


def test_the_snapshot_can_be_read_while_the_store_works() -> None:
    store = new_store(12)
    done = threading.Event()
    inconsistent = []

    def read_figures() -> None:
        while not done.is_set():
            snapshot = store.snapshot()
            right = snapshot.totals["hits"] <= snapshot.totals["lookups"]
            if not right or snapshot.bytes != snapshot.pages * PAGE or snapshot.bytes > snapshot.budget_bytes:
                inconsistent.append(snapshot)

    reader = threading.Thread(target=read_figures)
    reader.start()
    for number in range(60):
        turn(store, str(number % 5), [1, 2, number, *TOKENS[: number % 20]])
    done.set()
    reader.join()
    assert not inconsistent
