"""A tiny model that rotates keys, whole turns of it, and books that must balance, for tests of the store's core."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch

from kvstore import KVStore, Pin, RopeSpec, Session, StoreConfig
from kvstore.records import COLUMNS, NONE
from tests.kvstore import tier_helpers
from tests.kvstore.tier_helpers import kv_of, read

ROPE = RopeSpec(head_dim=8, rotary_dim=6, interleaved=False, theta=100.0)
# One layer does not rotate its keys, as in models that leave some layers without positions.
SPEC = replace(tier_helpers.SPEC, rope=(ROPE, None, ROPE, ROPE))
PAGE = SPEC.bytes_per_page
SIZE = SPEC.page_tokens


class Clock:
    """A clock that stands still unless it is set."""

    def __init__(self, time: float = 1000.0) -> None:
        self.time = time

    def __call__(self) -> float:
        return self.time


def new_store(pages: int = 100, /, *, clock: Clock | None = None, **settings: Any) -> KVStore:
    """A store whose device holds that many pages."""
    return KVStore(SPEC, StoreConfig(device_bytes=pages * PAGE, **settings), clock=clock or Clock())


def write(session: Session, count: int, kv: torch.Tensor) -> None:
    """Write the last `count` tokens of `kv`, `[layers, 2, kv_heads, tokens, head_dim]`, behind a session's, and compare
    what each layer reads then with all of it."""
    new = kv[..., kv.shape[3] - count :, :]
    for layer in range(SPEC.layers):
        keys, values = session.write(layer, new[layer, :1], new[layer, 1:])
        assert torch.equal(torch.cat((keys, values)), kv[layer])


def run_pass(session: Session, tokens: Sequence[int], *, source: str = "") -> None:
    """Compute tokens that follow those of an exact session, as one forward pass does."""
    write(session, len(tokens), kv_of([*session.tokens, *tokens]))
    session.commit(tokens, source=source)


def compute(session: Session, tokens: Sequence[int], *, seed: int = 0) -> None:
    """Compute what an exact session lacks of `tokens`, in passes of random sizes."""
    random = Random(seed)
    while session.length < len(tokens):
        run_pass(session, tokens[session.length : session.length + random.randint(1, 2 * SIZE)])


def holds(session: Session, tokens: Sequence[int], *, tolerance: float = 0.0) -> bool:
    """Whether a session has these tokens and the KV that a model computes for them."""
    difference = (read(session) - kv_of(tokens)).abs()
    return session.tokens == tuple(tokens) and bool((difference <= tolerance).all())


def turn(
    store: KVStore,
    session_id: str | None,
    tokens: Sequence[int],
    *,
    owner: str = "ann",
    tolerance: float = 0.0,
    seed: int = 0,
    **options: Any,
) -> int:
    """One whole turn, with all that is found and computed compared. Returns how many tokens were found."""
    session = store.acquire(owner, session_id, tokens, **options)
    found = session.length
    assert holds(session, tokens[:found], tolerance=tolerance)
    if tolerance:
        append_rounded(session, tokens)
    else:
        compute(session, tokens, seed=seed)
    assert holds(session, tokens, tolerance=tolerance)
    store.release(session)
    return found


def append_rounded(session: Session, tokens: Sequence[int]) -> None:
    """Compute what a session lacks whose older pages are rounded."""
    first = session.length
    if first == len(tokens):
        return
    new = kv_of(tokens)[..., first:, :]
    for layer in range(SPEC.layers):
        session.write(layer, new[layer, :1], new[layer, 1:])
    session.commit(tokens[first:])


def held(session: Session) -> list[int]:
    """All records that a session refers to, one entry a reference."""
    return [*session.table.records, *session.spare]


def check_books(store: KVStore, others: Iterable[Session] = (), pins: Iterable[Pin] = ()) -> None:
    """Whether all that is counted beside the pages is what the pages say. `others` are acquired sessions without a name
    and those that keep detached spans."""
    records, residency = store.records, store.residency
    sessions = {*store._sessions.values(), *store._active, *others}
    refs = Counter(record for session in sessions for record in held(session))
    refs.update(record for pin in pins for record in pin.records)
    alive = records.where(records.alive).tolist()
    assert {record: int(records.refs[record]) for record in alive if records.refs[record]} == dict(refs)
    children = Counter(records.parent[alive].tolist())
    resident = Counter(records.parent[records.where(records.page != NONE)].tolist())
    for record in alive:
        assert records.children[record] == children[record]
        assert records.resident_children[record] == resident[record]
    for name, (_, value) in COLUMNS.items():
        assert (getattr(records, name)[~records.alive] == value).all(), f"{name} of a row that is no record"
    assert residency.used_pages() == int((records.page != NONE).sum())
    assert residency.used_bytes() <= residency.device_bytes() <= store.config.device_bytes
    assert sum(store.shares.used) == residency.used_bytes()
    for number, pool in enumerate(store.shares.pools):
        assert store.shares.used[number] <= pool.maximum * store.config.device_bytes
    assert len(store.index) == int(records.indexed.sum())
    if not store.background.busy:
        locks = Counter(record for session in store._active for record in held(session))
        assert {record: int(records.locks[record]) for record in alive if records.locks[record]} == dict(
            locks
        )
        assert not records.arriving.any()


def check_nothing_left(store: KVStore) -> None:
    """Whether a store without sessions, detached spans and pins holds nothing that could not leave at once."""
    store.drop_all()
    assert store.flush(60)
    check_books(store)
    records, residency = store.records, store.residency
    while len(resident := records.where(records.page != NONE)):
        leaves = resident[records.resident_children[resident] == 0]
        assert len(leaves), "pages build on each other in a circle"
        for record in leaves.tolist():
            residency.evict(record, "test")
    assert residency.device_bytes() == 0, "slabs were not returned"
    assert not any(store.shares.used)
