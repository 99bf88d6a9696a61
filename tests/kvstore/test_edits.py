"""Edits of a session's spans: which pages they share, which keys they rotate, and what they never leak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import DetachedSpan, KVStore, PoolExhausted, Session, StoreConfig, TierConfig
from kvstore.rope import rotate
from tests.kvstore.reference import (
    PAGE,
    SPEC,
    append_rounded,
    check_books,
    check_nothing_left,
    compute,
    holds,
    new_store,
    run_pass,
    turn,
)
from tests.kvstore.tier_helpers import kv_of, read, text

SOURCES = ("system", "first", "second", "third")
SPANS = dict(zip(SOURCES, (text(1, 5), text(2, 7), text(3, 6), text(4, 9)), strict=True))
TOKENS = [token for source in SOURCES for token in SPANS[source]]
STARTS = dict(zip(SOURCES, (0, 5, 12, 18), strict=True))
KV = kv_of(TOKENS)


@pytest.fixture
def store() -> Iterator[KVStore]:
    store = new_store()
    yield store
    for session in list(store._active):
        store.release(session)
    check_nothing_left(store)


@pytest.fixture
def session(store: KVStore) -> Session:
    return conversation(store)


def conversation(store: KVStore, session_id: str = "chat", owner: str = "ann") -> Session:
    """An acquired session of four spans."""
    session = store.acquire(owner, session_id, [])
    for source in SOURCES:
        run_pass(session, SPANS[source], source=source)
    return session


def kv_at(source: str, position: int) -> torch.Tensor:
    """KV of a span of the conversation, its keys rotated to a position."""
    first, length = STARTS[source], len(SPANS[source])
    kv = KV[..., first : first + length, :].clone()
    assert SPEC.rope is not None
    for layer, rope in enumerate(SPEC.rope):
        if rope is not None and position != first:
            old = torch.arange(first, first + length)
            kv[layer, 0] = rotate(kv[layer, 0], rope, old, old - first + position)
    return kv


def has(session: Session, *spans: tuple[str, int]) -> bool:
    """Whether a session is made of these spans of the conversation, with their keys at these positions."""
    tokens = [token for source, _ in spans for token in SPANS[source]]
    places = [(span.source, span.position) for span in session.spans]
    kv = torch.cat([kv_at(source, position) for source, position in spans], dim=3)
    return session.tokens == tuple(tokens) and places == list(spans) and bool(torch.equal(read(session), kv))


def labels(session: Session) -> list[bool]:
    return [span.exact for span in session.spans]


# Taking out.


@pytest.mark.parametrize("number", range(4))
def test_remove_leaves_a_gap_and_marks_what_is_behind(store: KVStore, session: Session, number: int) -> None:
    held = store.residency.used_pages()
    taken = store.edits.remove(session, number)
    assert taken.tokens == tuple(SPANS[SOURCES[number]])
    assert taken.span.source == SOURCES[number]
    assert has(session, *[(source, STARTS[source]) for source in SOURCES if source != SOURCES[number]])
    assert labels(session) == [True] * number + [False] * (3 - number)
    assert session.exact == (number == 3)
    assert session.exactness == ("exact" if number == 3 else "approximate")
    assert store.residency.used_pages() == held
    assert store.counters.tokens_moved == 0
    check_books(store, [taken.keeper])
    store.edits.discard(taken)


def test_positions_have_a_gap_after_removal(store: KVStore, session: Session) -> None:
    store.edits.discard(store.edits.remove(session, 1))
    assert session.positions().tolist() == [*range(5), *range(12, 27)]
    assert session.next_position == 27


def test_a_discarded_span_gives_its_pages_back(store: KVStore, session: Session) -> None:
    taken = store.edits.remove(session, 3)  # tokens 18 to 27, in pages 4 (shared with "second") to 6
    store.edits.discard(taken)
    store.release(session)
    assert store.drop("ann", "chat")
    assert store.snapshot().records == 0


def test_a_detached_span_outlives_its_session(store: KVStore, session: Session) -> None:
    taken = store.edits.remove(session, 2)
    store.release(session)
    store.drop("ann", "chat")
    check_books(store, [taken.keeper])
    other = store.acquire("ann", "other", [])
    run_pass(other, TOKENS[:5], source="system")
    assert store.edits.insert(other, 1, taken, position=12)
    assert has(other, ("system", 0), ("second", 12))
    check_books(store)


# Putting in.


def test_a_span_that_goes_back_to_its_position_shares_its_pages(store: KVStore, session: Session) -> None:
    before = list(session.table)
    taken = store.edits.remove(session, 1)
    assert store.edits.insert(session, 1, taken, position=5)
    assert has(session, *STARTS.items())
    assert list(session.table) == before
    assert store.counters.tokens_moved == store.counters.pages_copied == 0
    assert labels(session) == [True, False, False, False]
    check_books(store)


def test_a_span_at_another_position_has_rotated_keys_in_pages_of_its_own(
    store: KVStore, session: Session
) -> None:
    taken = store.edits.remove(session, 1)
    pages = store.residency.used_pages()
    assert store.edits.insert(session, 3, taken)  # by default behind the span before it
    assert has(session, ("system", 0), ("second", 12), ("third", 18), ("first", 27))
    assert store.counters.tokens_moved == 7
    assert store.residency.used_pages() == pages + 2
    assert labels(session) == [True, False, False, False]
    assert store.records.fidelity[session.table.ids()[-2:]].tolist() == [3, 3]
    check_books(store)


def test_inserting_at_the_beginning_moves_to_position_0(store: KVStore, session: Session) -> None:
    taken = store.edits.remove(session, 2)
    assert store.edits.insert(session, 0, taken)
    assert has(session, ("second", 0), ("system", 0), ("first", 5), ("third", 18))
    assert labels(session) == [False] * 4


def test_another_owners_span_is_refused(store: KVStore, session: Session) -> None:
    taken = store.edits.remove(session, 1)
    other = store.acquire("bob", "chat", [])
    with pytest.raises(ValueError, match="another owner"):
        store.edits.insert(other, 0, taken)
    assert other.length == 0
    store.edits.discard(taken)


def test_a_span_whose_kv_is_gone_is_refused() -> None:
    store = new_store(8)
    session = store.acquire("ann", "chat", [])
    run_pass(session, TOKENS[:8], source="system")
    run_pass(session, TOKENS[8:16], source="first")
    taken = store.edits.remove(session, 1)
    store.release(session)
    turn(store, "other", text(9, 32))  # takes all pages
    session = store.acquire("ann", "chat", [])
    run_pass(session, TOKENS[:8])
    assert not store.edits.insert(session, 1, taken)
    assert store.edits.replace(session, 0, taken) is None
    assert holds(session, TOKENS[:8])
    store.edits.discard(taken)
    store.release(session)
    check_nothing_left(store)


@pytest.mark.parametrize("position", [5, 40])
def test_a_detached_span_comes_back_from_a_tier(position: int) -> None:
    store = new_store(8, host=TierConfig(10**9, "original"))
    session = conversation(store)
    taken = store.edits.remove(session, 1)
    store.release(session)
    store.flush()
    turn(store, "other", text(9, 32))
    assert store.flush(60)
    session = store.acquire("ann", "chat", [])
    run_pass(session, SPANS["system"], source="system")
    assert store.edits.insert(session, 1, taken, position=position)
    assert has(session, ("system", 0), ("first", position))
    check_books(store)
    store.release(session)
    check_nothing_left(store)


def test_no_room_to_rotate_changes_nothing() -> None:
    store = new_store(7)
    session = conversation(store)
    taken = store.edits.remove(session, 1)
    with pytest.raises(PoolExhausted):
        store.edits.insert(session, 3, taken)
    with pytest.raises(PoolExhausted):
        store.edits.move(session, 1, 5)
    assert has(session, ("system", 0), ("second", 12), ("third", 18))
    check_books(store, [taken.keeper])
    assert store.edits.insert(session, 1, taken, position=5)
    assert has(session, *STARTS.items())
    store.release(session)
    check_nothing_left(store)


def test_keys_cannot_move_when_nobody_says_how_they_are_rotated() -> None:
    spec = replace(SPEC, rope=None)
    store = KVStore(spec, StoreConfig(device_bytes=50 * PAGE))
    session = conversation(store)
    with pytest.raises(ValueError, match="how keys are rotated"):
        store.edits.move(session, 1, 50)
    taken = store.edits.remove(session, 1)
    with pytest.raises(ValueError, match="how keys are rotated"):
        store.edits.insert(session, 3, taken)
    assert store.edits.insert(session, 1, taken, position=5)
    assert has(session, *STARTS.items())
    check_books(store)


# Moving, reordering, replacing.


def test_move_rotates_one_span(store: KVStore, session: Session) -> None:
    store.edits.move(session, 2, 40)
    assert has(session, ("system", 0), ("first", 5), ("second", 40), ("third", 18))
    assert labels(session) == [True, True, False, False]
    assert store.counters.tokens_moved == 6
    check_books(store)


def test_reorder_keeps_positions_and_pages(store: KVStore, session: Session) -> None:
    store.edits.reorder(session, [0, 3, 1, 2])
    assert has(session, ("system", 0), ("third", 18), ("first", 5), ("second", 12))
    assert labels(session) == [True, False, False, False]
    assert store.counters.tokens_moved == store.counters.pages_copied == 0
    check_books(store)
    store.edits.reorder(session, [0, 2, 3, 1])
    assert has(session, *STARTS.items())
    check_books(store)


def test_reorder_to_the_same_order_changes_nothing(store: KVStore, session: Session) -> None:
    store.edits.reorder(session, [0, 1, 2, 3])
    assert session.exact
    assert has(session, *STARTS.items())


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 4], []])
def test_reorder_must_name_each_span_once(store: KVStore, session: Session, order: list[int]) -> None:
    with pytest.raises(ValueError, match="each of 4 spans once"):
        store.edits.reorder(session, order)
    assert session.exact


def test_close_gaps_gives_positions_without_gaps(store: KVStore, session: Session) -> None:
    assert store.edits.close_gaps(session) == 0
    assert session.exact
    store.edits.discard(store.edits.remove(session, 1))
    assert store.edits.close_gaps(session) == 15
    assert has(session, ("system", 0), ("second", 5), ("third", 11))
    assert session.positions().tolist() == list(range(20))
    assert store.edits.close_gaps(session) == 0
    assert store.counters.tokens_moved == 15
    check_books(store)


def test_close_gaps_after_reordering(store: KVStore, session: Session) -> None:
    store.edits.reorder(session, [0, 3, 2, 1])
    assert store.edits.close_gaps(session, first=2) == 13
    assert has(session, ("system", 0), ("third", 18), ("second", 27), ("first", 33))


def test_replace_gives_the_old_span_back(store: KVStore, session: Session) -> None:
    second = store.edits.remove(session, 2)
    first = store.edits.replace(session, 1, second)
    assert first is not None
    assert first.span.source == "first"
    assert has(session, ("system", 0), ("second", 5), ("third", 18))
    assert labels(session) == [True, False, False]
    check_books(store, [first.keeper])
    again = store.edits.replace(session, 1, first)
    assert again is not None
    assert has(session, ("system", 0), ("first", 5), ("third", 18))
    assert again.tokens == tuple(SPANS["second"])
    store.edits.discard(again)


def test_only_acquired_sessions_are_edited(store: KVStore, session: Session) -> None:
    taken = store.edits.remove(session, 3)
    store.release(session)
    for edit in (
        lambda: store.edits.remove(session, 0),
        lambda: store.edits.insert(session, 0, taken),
        lambda: store.edits.move(session, 0, 9),
        lambda: store.edits.reorder(session, [0, 1, 2]),
    ):
        with pytest.raises(ValueError, match="acquired"):
            edit()
    store.edits.discard(taken)


def test_edits_forget_a_pass_under_way(store: KVStore, session: Session) -> None:
    garbage = torch.full((1, SPEC.kv_heads, 3, SPEC.head_dim), 7.0)
    for layer in range(SPEC.layers):
        session.write(layer, garbage, garbage)
    store.edits.reorder(session, [1, 0, 2, 3])
    with pytest.raises(ValueError, match="not every layer"):
        session.commit([1, 2, 3])
    assert has(session, ("first", 5), ("system", 0), ("second", 12), ("third", 18))


# What follows an edit.


def append(session: Session, tokens: list[int]) -> torch.Tensor:
    """Any KV for new tokens, as computed after whatever the session holds. Returns it."""
    kv = kv_of([*session.tokens, *tokens])[..., session.length :, :]
    for layer in range(SPEC.layers):
        session.write(layer, kv[layer, :1], kv[layer, 1:])
    session.commit(tokens, source="answer")
    return kv


def test_what_is_computed_behind_an_edit_is_approximate_and_private(store: KVStore, session: Session) -> None:
    store.edits.discard(store.edits.remove(session, 1))
    before = read(session)
    answer = text(7, 20)
    kv = append(session, answer)
    assert torch.equal(read(session), torch.cat((before, kv), dim=3))
    assert session.spans[-1].source == "answer"
    assert session.spans[-1].position == 27
    assert not session.spans[-1].exact
    tokens = list(session.tokens)
    store.release(session)
    assert store.find("ann", tokens).tokens == 4
    assert turn(store, "other", tokens) == 4
    check_books(store)


def test_an_edited_session_keeps_its_contents_over_turns(store: KVStore, session: Session) -> None:
    store.edits.discard(store.edits.remove(session, 1))
    store.edits.close_gaps(session)
    tokens = list(session.tokens)
    store.release(session)
    session = store.acquire("ann", "chat", [*tokens, 1, 2, 3])
    assert has(session, ("system", 0), ("second", 5), ("third", 11))
    assert session.exactness == "approximate"


def test_cut_before_its_first_edit_a_session_is_exact_and_findable_again(
    store: KVStore, session: Session
) -> None:
    store.edits.discard(store.edits.remove(session, 2))
    session.truncate(12)
    assert session.exactness == "exact"
    branch = [*TOKENS[:12], *text(8, 9)]
    compute(session, branch)
    assert holds(session, branch)
    store.release(session)
    assert store.find("ann", branch).tokens == 20
    assert turn(store, "other", branch) == 20


def test_an_exact_prefix_replaces_an_approximate_session(store: KVStore, session: Session) -> None:
    store.edits.discard(store.edits.remove(session, 0))
    store.edits.close_gaps(session)
    tokens = list(session.tokens)
    store.release(session)
    turn(store, "other", tokens[:20])
    session = store.acquire("ann", "chat", tokens)
    # What was edited is longer, and is kept; a lookup of what is known exactly gives that.
    assert session.exactness == "approximate"
    assert session.length == 22
    store.release(session)
    session = store.acquire("ann", "chat", tokens[:20])
    assert session.exactness == "exact"
    assert holds(session, tokens[:20])


def test_a_span_of_another_context_never_enters_the_index(store: KVStore) -> None:
    """Its page is not full, belongs to one session, and stands at a position where a whole page would be found."""
    first = store.acquire("ann", "1", [])
    run_pass(first, [1, 2, 3, 4], source="context")
    run_pass(first, [7, 8], source="span")
    taken = store.edits.remove(first, 1)
    second = store.acquire("ann", "2", [])
    run_pass(second, [5, 6, 5, 6], source="another context")
    assert store.edits.insert(second, 1, taken)
    append(second, [9, 10, 11])
    store.release(first)
    store.release(second)
    assert store.find("ann", [5, 6, 5, 6, 7, 8, 9, 10]).tokens == 4
    assert turn(store, "3", [5, 6, 5, 6, 7, 8, 9, 10]) == 4


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_random_edits_are_what_their_spans_say_and_never_leak(data: st.DataObject) -> None:
    store = new_store(80, slab_pages=data.draw(st.integers(1, 20)))
    session = conversation(store)
    expected = list(STARTS.items())
    detached: list[tuple[DetachedSpan, str]] = []
    answers = 0
    for _ in range(data.draw(st.integers(1, 8))):
        edit = data.draw(st.sampled_from(["remove", "insert", "move", "reorder", "close", "answer"]))
        number = data.draw(st.integers(0, max(0, len(expected) - 1)))
        if edit == "remove" and expected:
            taken = store.edits.remove(session, number)
            detached.append((taken, expected.pop(number)[0]))
        elif edit == "insert" and detached:
            taken, source = detached.pop()
            position = data.draw(st.sampled_from([STARTS[source], taken.span.position, 64]))
            number = data.draw(st.integers(0, len(expected)))
            assert store.edits.insert(session, number, taken, position=position)
            expected.insert(number, (source, position))
        elif edit == "move" and expected:
            position = data.draw(st.integers(0, 60))
            store.edits.move(session, number, position)
            expected[number] = (expected[number][0], position)
        elif edit == "reorder" and expected:
            order = data.draw(st.permutations(range(len(expected))))
            store.edits.reorder(session, order)
            expected = [expected[n] for n in order]
        elif edit == "close":
            store.edits.close_gaps(session)
            position = 0
            for n, (source, _) in enumerate(expected):
                expected[n] = (source, position)
                position += len(SPANS[source])
        else:
            answers += 1
            append(session, text(20 + answers, 5))
            session.truncate(session.length - 5)
        check_books(store, [taken.keeper for taken, _ in detached])
        check_moved(session, expected)
    tokens = [*session.tokens, *text(30, 9)]
    append(session, text(30, 9))
    store.release(session)
    # Whatever a lookup finds for the edited tokens is what a model computes for them.
    turn(store, "other", tokens)
    for taken, _ in detached:
        store.edits.discard(taken)
    check_nothing_left(store)


def check_moved(session: Session, expected: list[tuple[str, int]]) -> None:
    """Whether a session is made of these spans; keys that were rotated several times are rounded each time."""
    assert [(span.source, span.position) for span in session.spans] == expected
    assert session.tokens == tuple(token for source, _ in expected for token in SPANS[source])
    if expected:
        kv = torch.cat([kv_at(source, position) for source, position in expected], dim=3)
        torch.testing.assert_close(read(session), kv, rtol=1e-4, atol=1e-4)


# Marks.


def test_marks_are_kept_by_the_span_and_make_its_pages_worth_more(store: KVStore, session: Session) -> None:
    store.edits.mark(session, 1, pinned=True, emphasis=3.0)
    assert (session.spans[1].pinned, session.spans[1].emphasis) == (True, 3.0)
    assert store.records.emphasis[session.table.ids()].tolist() == [0, 3, 3, 0, 0, 0, 0]
    store.edits.mark(session, 1, pinned=False)
    assert (session.spans[1].pinned, session.spans[1].emphasis) == (False, 3.0)
    taken = store.edits.remove(session, 1)
    assert taken.span.emphasis == 3.0
    assert store.edits.insert(session, 1, taken, position=40)
    assert session.spans[1].emphasis == 3.0
    assert store.records.emphasis[session.table.ids()[2:4]].tolist() == [3, 3]
    store.edits.mark(session, 1, emphasis=0.0)
    assert session.spans[1].emphasis == 0.0


def test_emphasised_pages_stay_longer() -> None:
    store = new_store(6)
    turn(store, "1", TOKENS[:12])
    session = store.acquire("ann", "1", TOKENS[:12])
    store.edits.mark(session, 0, emphasis=5.0)
    store.release(session)
    turn(store, "2", text(8, 12))
    store.release(store.acquire("ann", "2", text(8, 12)))
    turn(store, "3", text(9, 12))
    assert store.find("ann", TOKENS[:12]).device == 12
    assert store.find("ann", text(8, 12)).device == 0


# On int8 pages.


def test_int8_pages_can_be_edited() -> None:
    store = new_store(60, device_format="int8", newest_original_tokens=4)
    session = store.acquire("ann", "chat", [])
    for end, source in ((5, "system"), (12, "first"), (18, "second"), (27, "third")):
        append_rounded(session, TOKENS[:end])
        session.spans[-1] = replace(session.spans[-1], source=source)
    store.release(session)
    sources = [(source, len(SPANS[source])) for source in SOURCES]
    session = store.acquire("ann", "chat", TOKENS, sources=sources)
    taken = store.edits.remove(session, 1)
    assert store.edits.insert(session, 3, taken, position=30)
    expected = torch.cat(
        [kv_at(source, at) for source, at in (("system", 0), ("second", 12), ("third", 18), ("first", 30))],
        dim=3,
    )
    assert (read(session) - expected).abs().max() < 0.05
    check_books(store)
    store.release(session)
    check_nothing_left(store)
