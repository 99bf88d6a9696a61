"""The KV of one conversation: what it holds, what a failed pass leaves, and when pages are copied."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import KVSpec, KVStore, PoolExhausted, Session, Span, StoreConfig
from tests.kvstore.reference import (
    PAGE,
    SIZE,
    SPEC,
    check_books,
    check_nothing_left,
    compute,
    holds,
    new_store,
    run_pass,
    turn,
    write,
)
from tests.kvstore.tier_helpers import kv_of, text

TOKENS = text(1, 100)
OTHERS = text(2, 100)


@pytest.fixture
def store() -> Iterator[KVStore]:
    store = new_store()
    yield store
    for session in list(store._active):
        store.release(session)
    check_nothing_left(store)


@pytest.fixture
def session(store: KVStore) -> Session:
    return store.acquire("ann", "chat", [])


def write_garbage(session: Session, count: int, layers: int = SPEC.layers) -> None:
    """A pass that is not committed."""
    garbage = torch.full((1, SPEC.kv_heads, count, SPEC.head_dim), 7.0)
    for layer in range(layers):
        session.write(layer, garbage, -garbage)


def test_spec_counts_keys_and_values_of_every_layer() -> None:
    spec = KVSpec(layers=3, kv_heads=2, head_dim=4, dtype=torch.bfloat16, fingerprint="test", page_tokens=5)
    assert spec.bytes_per_token == 2 * 3 * 2 * 4 * 2
    assert spec.bytes_per_page == 5 * spec.bytes_per_token
    assert torch.zeros(spec.page_shape, dtype=spec.dtype).nbytes == spec.bytes_per_page


def test_spec_refuses_shapes_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        KVSpec(layers=1, kv_heads=0, head_dim=4, dtype=torch.float32, fingerprint="test")
    with pytest.raises(ValueError, match="describes 1 layers, not 2"):
        KVSpec(layers=2, kv_heads=1, head_dim=4, dtype=torch.float32, fingerprint="test", rope=(None,))


# Passes.


@given(sizes=st.lists(st.integers(1, 3 * SIZE), max_size=8), slab=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_passes_of_any_sizes_give_the_same_content(sizes: list[int], slab: int) -> None:
    store = new_store(slab_pages=slab)
    session = store.acquire("ann", "chat", [])
    for size in sizes:
        run_pass(session, TOKENS[session.length : session.length + size])
        assert holds(session, TOKENS[: session.length])
    assert session.length == sum(sizes)
    assert len(session.table) == -(-session.length // SIZE)
    check_books(store)
    store.release(session)
    check_nothing_left(store)


def test_an_empty_session_reads_as_no_tokens(session: Session) -> None:
    assert session.tokens == ()
    assert session.keys(0).shape == session.values(1).shape == (1, SPEC.kv_heads, 0, SPEC.head_dim)
    assert session.positions().tolist() == []
    assert session.next_position == 0
    assert session.exactness == "exact"


@pytest.mark.parametrize("shape", [(1, 3, 1, 8), (1, 2, 1, 5), (2, 2, 1, 8)])
def test_write_refuses_another_shape(session: Session, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shape"):
        session.write(0, torch.zeros(shape), torch.zeros(shape))
    good = torch.zeros(1, SPEC.kv_heads, 1, SPEC.head_dim)
    with pytest.raises(ValueError, match="shape"):
        session.write(0, good, torch.zeros(shape))


def test_a_failed_pass_leaves_nothing(session: Session) -> None:
    run_pass(session, TOKENS[:6])
    write_garbage(session, 9, layers=2)
    assert holds(session, TOKENS[:6])
    run_pass(session, TOKENS[6:8])
    assert holds(session, TOKENS[:8])


@pytest.mark.parametrize("counts", [(3, 3), (9, 2), (2, 9), (1, 4), (5, 1)])
def test_writing_again_before_a_commit_overwrites(session: Session, counts: tuple[int, int]) -> None:
    run_pass(session, TOKENS[:6])
    write_garbage(session, counts[0])
    write(session, counts[1], kv_of(TOKENS[: 6 + counts[1]]))
    session.commit(TOKENS[6 : 6 + counts[1]])
    assert holds(session, TOKENS[: 6 + counts[1]])


def test_commit_needs_every_layer(session: Session) -> None:
    write_garbage(session, 2, layers=SPEC.layers - 1)
    with pytest.raises(ValueError, match="not every layer"):
        session.commit([1, 2])
    assert session.length == 0


def test_commit_needs_as_many_tokens_as_were_written(session: Session) -> None:
    write_garbage(session, 2)
    with pytest.raises(ValueError, match="not every layer"):
        session.commit([1])
    write_garbage(session, 3, layers=1)
    with pytest.raises(ValueError, match="not every layer"):
        session.commit([1, 2, 3])
    assert session.length == 0


def test_a_pass_is_committed_once(session: Session) -> None:
    run_pass(session, TOKENS[:2])
    with pytest.raises(ValueError, match="not every layer"):
        session.commit(TOKENS[:2])
    assert holds(session, TOKENS[:2])


def test_common_prefix(session: Session) -> None:
    run_pass(session, [1, 2, 3])
    assert session.common_prefix([]) == 0
    assert session.common_prefix([2]) == 0
    assert session.common_prefix([1, 2, 9, 3]) == 2
    assert session.common_prefix([1, 2, 3, 4]) == 3


# Truncation.


@given(length=st.integers(0, 30), kept=st.integers(0, 30), more=st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_what_follows_a_truncation_is_another_branch(length: int, kept: int, more: int) -> None:
    kept = min(length, kept)
    store = new_store()
    session = store.acquire("ann", "chat", [])
    compute(session, TOKENS[:length])
    session.truncate(kept)
    assert holds(session, TOKENS[:kept])
    branch = [*TOKENS[:kept], *OTHERS[:more]]
    compute(session, branch)
    assert holds(session, branch)
    check_books(store)
    store.release(session)
    # Whole pages of what was cut are found still.
    assert store.find("ann", TOKENS[:length]).tokens == length // SIZE * SIZE
    assert store.find("ann", branch).tokens == len(branch) // SIZE * SIZE
    check_nothing_left(store)


def test_truncation_forgets_a_pass_under_way(session: Session) -> None:
    run_pass(session, TOKENS[:3])
    for length in (3, 2):
        write_garbage(session, 1)
        session.truncate(length)
        assert holds(session, TOKENS[:length])
        with pytest.raises(ValueError, match="not every layer"):
            session.commit([4])


@pytest.mark.parametrize("length", [-1, 2])
def test_truncation_cannot_lengthen(session: Session, length: int) -> None:
    run_pass(session, [1])
    with pytest.raises(ValueError, match="truncate"):
        session.truncate(length)
    assert session.length == 1


# Copy-on-write.


def test_branches_share_pages_until_they_write(store: KVStore, session: Session) -> None:
    run_pass(session, TOKENS[:10])
    twin = store.fork(session, "twin", 9)
    assert store.snapshot().pages == 3
    store.release(session)
    assert turn(store, "twin", [*TOKENS[:9], *OTHERS[:4]]) == 9
    assert turn(store, "chat", TOKENS[:12]) == 10
    assert twin.table.records[:2] == session.table.records[:2]
    assert twin.table.records[2] != session.table.records[2]
    assert turn(store, "twin", [*TOKENS[:9], *OTHERS[:4]]) == 13
    assert store.counters.pages_copied == 1


def test_a_whole_page_is_never_copied(store: KVStore, session: Session) -> None:
    run_pass(session, TOKENS[: 2 * SIZE])
    store.fork(session, "twin")
    store.release(session)
    turn(store, "twin", [*TOKENS[: 2 * SIZE], *OTHERS[:3]])
    turn(store, "chat", TOKENS[:11])
    assert store.counters.pages_copied == 0
    assert store.snapshot().pages == 4


def test_the_original_can_be_written_while_a_fork_reads(store: KVStore, session: Session) -> None:
    run_pass(session, TOKENS[:6])
    store.fork(session, "twin")
    twin = store.acquire("ann", "twin", TOKENS[:6])
    run_pass(session, TOKENS[6:9])
    run_pass(twin, OTHERS[:5])
    assert holds(session, TOKENS[:9])
    assert holds(twin, [*TOKENS[:6], *OTHERS[:5]])


def test_a_fork_between_write_and_commit_does_not_disturb_the_pass(store: KVStore, session: Session) -> None:
    run_pass(session, TOKENS[:6])
    write(session, 5, kv_of(TOKENS[:11]))
    store.fork(session, "twin")
    session.commit(TOKENS[6:11])
    assert holds(session, TOKENS[:11])
    assert turn(store, "twin", [*TOKENS[:6], *OTHERS[:5]]) == 6
    assert holds(session, TOKENS[:11])


def test_a_pin_between_write_and_commit_does_not_disturb_the_pass(store: KVStore, session: Session) -> None:
    run_pass(session, TOKENS[:6])
    write(session, 5, kv_of(TOKENS[:11]))
    pin = store.pin(session, "in the middle of a pass")
    session.commit(TOKENS[6:11])
    assert holds(session, TOKENS[:11])
    check_books(store, pins=[pin])
    store.unpin(pin)


# Room.


def test_reserved_room_is_there_when_the_device_is_full() -> None:
    store = new_store(10)
    session = store.acquire("ann", "chat", [])
    session.reserve(18)
    other = store.acquire("ann", "other", [])
    other.reserve(20)
    with pytest.raises(PoolExhausted):
        other.reserve(21)
    compute(session, TOKENS[:18])
    compute(other, OTHERS[:20])
    assert holds(session, TOKENS[:18])
    assert holds(other, OTHERS[:20])


def test_reserved_room_of_a_fork_counts_the_page_that_will_be_copied() -> None:
    store = new_store(7)
    turn(store, "chat", TOKENS[:6])
    store.fork(store.acquire("ann", "chat", TOKENS[:6]), "twin")  # "chat" stays in use: its pages cannot go
    twin = store.acquire("ann", "twin", TOKENS[:6])
    twin.reserve(16)
    filler = store.acquire("ann", "filler", [])
    while True:
        try:
            filler.reserve(filler.length + (len(filler.spare) + 1) * SIZE)
        except PoolExhausted:
            break
    compute(twin, [*TOKENS[:6], *OTHERS[:10]])
    assert holds(twin, [*TOKENS[:6], *OTHERS[:10]])


def test_pages_that_were_reserved_by_a_fork_are_found_later(store: KVStore, session: Session) -> None:
    run_pass(session, TOKENS[:6])
    store.fork(session, "twin")
    twin = store.acquire("ann", "twin", TOKENS[:6])
    twin.reserve(16)
    branch = [*TOKENS[:6], *OTHERS[:10]]
    compute(twin, branch)
    store.release(twin)
    assert store.find("ann", branch).tokens == 16


def test_room_that_is_not_used_is_given_back_at_release(store: KVStore, session: Session) -> None:
    run_pass(session, TOKENS[:5])
    session.reserve(50)
    session.reserve(20)  # there is more already
    assert store.residency.used_pages() == 13
    store.release(session)
    assert store.residency.used_pages() == 2
    assert turn(store, "chat", TOKENS[:7]) == 5


def test_no_room_leaves_the_session_as_it_was() -> None:
    store = new_store(3)
    session = store.acquire("ann", "chat", [])
    run_pass(session, TOKENS[:6])
    with pytest.raises(PoolExhausted) as error:
        session.reserve(13)
    assert (error.value.asked, error.value.free, error.value.locked) == (2 * PAGE, PAGE, 2 * PAGE)
    with pytest.raises(PoolExhausted):
        write_garbage(session, 7)
    assert holds(session, TOKENS[:6])
    run_pass(session, TOKENS[6:12])
    assert holds(session, TOKENS[:12])
    store.release(session)
    check_nothing_left(store)


def test_a_device_without_memory_leaves_the_session_as_it_was(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_pass(session, TOKENS[:6])

    def no_memory(*args: object, **kwargs: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", no_memory)
        with pytest.raises(PoolExhausted):
            session.reserve(300)
    assert holds(session, TOKENS[:6])
    run_pass(session, TOKENS[6:20])
    assert holds(session, TOKENS[:20])


# Adjacency.


def test_a_planned_session_stays_in_one_run_beside_others() -> None:
    store = new_store(64, slab_pages=16)
    first = store.acquire("ann", "1", [], planned=40)
    second = store.acquire("ann", "2", [], planned=40)
    for length in range(0, 40, 5):
        run_pass(first, TOKENS[length : length + 5])
        run_pass(second, OTHERS[length : length + 5])
    assert first.adjacent_runs() == second.adjacent_runs() == 1
    assert first.keys(1).data_ptr() == first.keys(1).data_ptr()  # a view: nothing is copied
    assert holds(first, TOKENS[:40])


def test_what_does_not_fit_a_slab_lies_in_several_runs() -> None:
    store = new_store(64, slab_pages=4)
    session = store.acquire("ann", "chat", [])
    for length in range(0, 40, 5):
        run_pass(session, TOKENS[length : length + 5])
        assert session.adjacent_runs() >= -(-session.length // (4 * SIZE))
    assert holds(session, TOKENS[:40])


def test_claims_are_broken_before_a_session_goes_without() -> None:
    store = new_store(8, slab_pages=8)
    planner = store.acquire("ann", "planner", [], planned=8 * SIZE)
    run_pass(planner, TOKENS[:4])
    other = store.acquire("ann", "other", [])
    compute(other, OTHERS[: 7 * SIZE])
    assert holds(other, OTHERS[: 7 * SIZE])
    with pytest.raises(PoolExhausted):
        run_pass(planner, TOKENS[4:5])


# Positions, spans and sources.


def test_passes_of_one_source_are_one_span(session: Session) -> None:
    run_pass(session, TOKENS[:3], source="system")
    run_pass(session, TOKENS[3:5], source="message 1")
    run_pass(session, TOKENS[5:9], source="message 1")
    assert session.spans == [Span("system", 3, 0), Span("message 1", 6, 3)]
    assert session.positions().tolist() == list(range(9))
    assert session.next_position == 9
    session.truncate(4)
    assert session.spans == [Span("system", 3, 0), Span("message 1", 1, 3)]
    session.truncate(3)
    assert session.spans == [Span("system", 3, 0)]
    session.truncate(0)
    assert session.spans == []


def test_acquiring_labels_what_is_held(store: KVStore) -> None:
    turn(store, "chat", TOKENS[:9])
    sources = [("system", 3), ("nothing", 0), ("message 1", 4), ("message 2", 10)]
    session = store.acquire("ann", "chat", TOKENS[:17], sources=sources)
    assert session.spans == [Span("system", 3, 0), Span("message 1", 4, 3), Span("message 2", 2, 7)]
    run_pass(session, TOKENS[9:17], source="message 2")
    assert session.spans[2] == Span("message 2", 10, 7)


def test_marks_outlive_new_labels(store: KVStore, session: Session) -> None:
    run_pass(session, TOKENS[:4], source="system")
    run_pass(session, TOKENS[4:8], source="message 1")
    store.edits.mark(session, 0, pinned=True)
    store.edits.mark(session, 1, emphasis=2.0)
    store.release(session)
    sources = [("system", 4), ("message 1", 3), ("message 2", 1)]
    session = store.acquire("ann", "chat", TOKENS[:8], sources=sources)
    assert session.spans == [
        Span("system", 4, 0, pinned=True),
        Span("message 1", 3, 4, emphasis=2.0),
        Span("message 2", 1, 7),
    ]


def test_tokens_that_no_source_names_are_a_span_of_nobody(store: KVStore) -> None:
    turn(store, "chat", TOKENS[:9])
    session = store.acquire("ann", "chat", TOKENS[:9], sources=[("system", 3)])
    assert session.spans == [Span("system", 3, 0), Span("", 6, 3)]


def test_other_dtypes_are_kept_bit_by_bit() -> None:
    spec = KVSpec(layers=2, kv_heads=1, head_dim=4, dtype=torch.bfloat16, fingerprint="half", page_tokens=4)
    store = KVStore(spec, StoreConfig(device_bytes=10 * spec.bytes_per_page))
    session = store.acquire("ann", "chat", [])
    kv = torch.randn(2, 2, 1, 7, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    kv[0, 0, 0, 3] = float("nan")
    for layer in range(2):
        session.write(layer, kv[layer, :1], kv[layer, 1:])
    session.commit(list(range(7)))
    for layer in range(2):
        held = torch.cat((session.keys(layer), session.values(layer)))
        assert torch.equal(held.view(torch.int16), kv[layer].view(torch.int16))


def test_the_reference_depends_on_the_whole_prefix() -> None:
    assert not torch.equal(kv_of([1, 2, 3])[..., 2, :], kv_of([4, 2, 3])[..., 2, :])
