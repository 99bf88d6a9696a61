"""Random sequences of operations against a plain model of what the store must hold.

The suite runs 150 short sequences. `KVSTORE_EXAMPLES=2000 pytest tests/kvstore/test_state_machine.py` runs that many
of each of the five configurations.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvstore import (
    DetachedSpan,
    KVStore,
    LeastRecentlyUsed,
    Pin,
    PinRefused,
    PoolExhausted,
    PoolShare,
    Session,
    SessionLocked,
    StoreConfig,
    TierConfig,
    Worth,
)
from kvstore.records import NONE
from kvstore.rope import rotate
from tests.kvstore.reference import PAGE, SIZE, SPEC, Clock, check_books, check_nothing_left, held
from tests.kvstore.tier_helpers import kv_of, read

EXAMPLES = int(os.environ.get("KVSTORE_EXAMPLES", "30"))
LONGEST = 40  # tokens
PUBLIC = 8  # tokens that are public at most
POOLS = (PoolShare("default", maximum=0.9), PoolShare("important", guaranteed=0.4, priority=2.0))
OWNERS = ("ann", "bob")

Key = tuple[str, str]

owners = st.sampled_from(OWNERS)
names = st.sampled_from(["1", "2", "3"])
indices = st.integers(0, 11)
passes = st.integers(1, 9)
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=14)
lengths = st.integers(0, LONGEST)


@dataclass
class Expected:
    """What a session holds: its tokens and their KV, and whether an edit has made that approximate."""

    tokens: list[int] = field(default_factory=list)
    kv: torch.Tensor = field(default_factory=lambda: kv_of([]))
    edited: bool = False


@dataclass
class Active:
    """A session that stays acquired over several operations."""

    key: Key
    session: Session
    expected: Expected
    dropped: bool = False


class Machine(RuleBasedStateMachine):
    """`tiers` are made anew for each sequence; `tolerance` is 0 where no format rounds.

    What a session has left depends on how far background threads have come, so no rule may depend on it, nor what is
    drawn for one: Hypothesis would see different choices in the same sequence. A rule that finds nothing does nothing.
    """

    device_format: Any = "original"
    tolerance = 0.0

    def tiers(self, folder: str) -> dict[str, Any]:
        return {}

    @initialize(
        pages=st.integers(5, 20),
        slab=st.sampled_from([None, 3, 8]),
        pins=st.sampled_from([0.1, 0.3]),
        lru=st.booleans(),
        layers=st.sampled_from([1, 8]),
    )
    def begin(self, pages: int, slab: int | None, pins: float, lru: bool, layers: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.clock = Clock()
        config = StoreConfig(
            device_bytes=2 * pages * PAGE,
            device_format=self.device_format,
            slab_pages=slab,
            newest_original_tokens=4,
            pools=POOLS,
            pin_budget=pins,
            policy=LeastRecentlyUsed() if lru else Worth(),
            sleep_after=100,
            layers_at_a_time=layers,
            **self.tiers(self.folder.name),
        )
        self.store = KVStore(SPEC, config, clock=self.clock)
        self.expected: dict[Key, Expected] = {}
        self.active: list[Active] = []
        self.pins: list[Pin] = []
        self.detached: list[tuple[DetachedSpan, torch.Tensor]] = []

    # Helpers.

    def same(self, actual: torch.Tensor, wanted: torch.Tensor) -> bool:
        if self.tolerance:
            return bool(((actual - wanted).abs() <= self.tolerance).all())
        return torch.equal(actual, wanted)

    def any(self, which: int) -> Key | None:
        """A session, in use or not."""
        keys = sorted(self.expected)
        return keys[which % len(keys)] if keys else None

    def idle(self, which: int) -> Key | None:
        """A session that nobody has acquired."""
        used = {active.key for active in self.active if not active.dropped}
        keys = sorted(set(self.expected) - used)
        return keys[which % len(keys)] if keys else None

    def held_by(self, session: Session) -> Expected:
        """What a session holds from now on; its leading exact spans are what a model computes."""
        held = read(session)
        whole = list(session.tokens)
        exact = 0
        for span in session.spans:
            if not span.exact:
                break
            exact += span.length
        assert self.same(held[..., :exact, :], kv_of(whole[:exact]))
        assert session.positions().tolist()[:exact] == list(range(exact))
        return Expected(whole, held, not session.exact)

    def opened(self, key: Key, wanted: list[int], **options: Any) -> Session:
        """An acquired session whose contents were compared: it is exact, or what edits have left."""
        old = self.expected.get(key, Expected())
        session = self.store.acquire(*key, wanted, **options)
        length = session.length
        assert list(session.tokens) == wanted[:length]
        held = read(session)
        as_edited = old.edited and not session.exact and self.same(held, old.kv[..., :length, :])
        assert as_edited or self.same(held, kv_of(wanted[:length]))
        assert session.reused_tokens + session.restored_tokens == length
        return session

    def write(self, session: Session, part: list[int]) -> None:
        kv = kv_of([*session.tokens, *part])[..., session.length :, :]
        for layer in range(SPEC.layers):
            keys, values = session.write(layer, kv[layer, :1], kv[layer, 1:])
            assert keys.shape[2] == values.shape[2] == session.length + len(part)
            assert torch.equal(torch.cat((keys, values))[..., session.length :, :], kv[layer])
        session.commit(part, source=f"source {part[0]}")

    def close(self, key: Key, session: Session) -> None:
        self.expected[key] = self.held_by(session)
        self.store.release(session)
        if not session.length:
            del self.expected[key]

    def tick(self, seconds: float) -> None:
        self.clock.time += seconds
        self.store.tick()

    # Turns.

    @rule(
        owner=owners,
        name=names,
        keep=lengths,
        new=tokens,
        pool=st.sampled_from([None, "important"]),
        public=st.sampled_from([0, 0, PUBLIC]),
        size=passes,
        wait=st.booleans(),
    )
    def turn(
        self,
        owner: str,
        name: str,
        keep: int,
        new: list[int],
        pool: str | None,
        public: int,
        size: int,
        wait: bool,
    ) -> None:
        key = (owner, name)
        old = self.expected.get(key, Expected())
        wanted = [*old.tokens[:keep], *new][:LONGEST]
        if any(active.key == key and not active.dropped for active in self.active):
            with pytest.raises(SessionLocked):
                self.store.acquire(owner, name, wanted)
            return
        session = self.opened(key, wanted, planned=len(wanted), pool=pool, public_tokens=public, wait=wait)
        found = session.length
        try:
            for start in range(found, len(wanted), size):
                self.write(session, wanted[start : start + size])
        except PoolExhausted:
            pass  # what was written so far counts
        assert list(session.tokens) == wanted[: session.length]
        assert self.same(read(session)[..., found:, :], kv_of(list(session.tokens))[..., found:, :])
        self.close(key, session)

    @rule(which=indices, keep=lengths, new=tokens, size=passes, wait=st.booleans())
    def next_turn(self, which: int, keep: int, new: list[int], size: int, wait: bool) -> None:
        """Go on with a conversation, most often after all that it has."""
        owner, name = self.any(which) or ("ann", "1")
        self.turn(owner, name, keep if which % 3 == 0 else LONGEST, new, None, 0, size, wait)

    @rule(which=indices, wanted=tokens)
    def hold(self, which: int, wanted: list[int]) -> None:
        """Acquire a session and keep it."""
        key = self.idle(which)
        if key is None or len(self.active) > 2:
            return
        session = self.opened(key, [*self.expected[key].tokens, *wanted])
        self.active.append(Active(key, session, self.held_by(session)))

    @rule(which=indices, part=tokens, length=lengths, action=st.sampled_from(["write", "fail", "cut"]))
    def go_on(self, which: int, part: list[int], length: int, action: str) -> None:
        """Write to a session that is kept, fail in the middle of a pass, or truncate it."""
        if not self.active:
            return
        active = self.active[which % len(self.active)]
        session = active.session
        before = list(session.tokens)
        if action == "cut":
            session.truncate(min(length, session.length))
        elif len(before) + len(part) <= LONGEST:
            try:
                if action == "write":
                    self.write(session, part)
                else:
                    garbage = torch.full((1, SPEC.kv_heads, len(part), SPEC.head_dim), 0.5)
                    session.write(0, garbage, garbage)
            except PoolExhausted:
                assert list(session.tokens) == before
        active.expected = self.held_by(session)
        if not active.dropped:
            self.expected[active.key] = active.expected

    @rule(which=indices)
    def let_go(self, which: int) -> None:
        if not self.active:
            return
        active = self.active.pop(which % len(self.active))
        if active.dropped:
            self.store.release(active.session)
        else:
            self.close(active.key, active.session)

    @rule(which=indices, other=indices, new=tokens, newer=tokens)
    def side_by_side(self, which: int, other: int, new: list[int], newer: list[int]) -> None:
        """Two sessions whose passes overlap, as in an engine that batches them."""
        keys = [key for key in (self.idle(which), self.idle(other)) if key is not None]
        if len(set(keys)) < 2:
            return
        wanted = [[*self.expected[key].tokens, *more] for key, more in zip(keys, (new, newer), strict=True)]
        sessions = [self.opened(key, all_of) for key, all_of in zip(keys, wanted, strict=True)]
        left = [all_of[session.length :] for session, all_of in zip(sessions, wanted, strict=True)]
        try:
            for session, all_of in zip(sessions, wanted, strict=True):
                kv = kv_of(all_of)[..., session.length :, :]
                for layer in range(SPEC.layers):
                    session.write(layer, kv[layer, :1], kv[layer, 1:])
            for session, part in zip(sessions, left, strict=True):
                session.commit(part)
        except PoolExhausted:
            pass  # neither was committed
        for key, session, all_of in zip(keys, sessions, wanted, strict=True):
            assert list(session.tokens) == all_of[: session.length]
            self.close(key, session)

    # Edits.

    @rule(which=indices, number=st.integers(0, 3), back=st.booleans())
    def take_out(self, which: int, number: int, back: bool) -> None:
        """Take a span out; put it, or another one, in at its place."""
        if (key := self.idle(which)) is None or len(self.detached) > 3:
            return
        session = self.opened(key, self.expected[key].tokens)
        if len(session.spans) > number:
            first = sum(span.length for span in session.spans[:number])
            end = first + session.spans[number].length
            before = read(session)
            taken = self.store.edits.remove(session, number)
            assert taken.tokens == tuple(self.expected[key].tokens[first:end])
            self.detached.append((taken, before[..., first:end, :]))
            assert self.same(read(session), torch.cat((before[..., :first, :], before[..., end:, :]), dim=3))
            assert all(not span.exact for span in session.spans[number:])
            mine = [pair for pair in self.detached if pair[0].keeper.owner == key[0]]
            if back:
                self.put_in(session, number, first, *mine[0])
        self.close(key, session)

    def put_in(self, session: Session, number: int, first: int, span: DetachedSpan, kv: torch.Tensor) -> None:
        before, held, put = read(session), list(session.tokens), list(span.tokens)
        if self.store.edits.insert(session, number, span, position=span.span.position):
            assert list(session.tokens) == [*held[:first], *put, *held[first:]]
            assert self.same(
                read(session), torch.cat((before[..., :first, :], kv, before[..., first:, :]), dim=3)
            )
        else:
            assert list(session.tokens) == held
            assert self.same(read(session), before)
            self.store.edits.discard(span)
        self.detached = [pair for pair in self.detached if pair[0] is not span]

    @rule(which=indices, number=st.integers(0, 3), position=st.integers(0, 50))
    def move(self, which: int, number: int, position: int) -> None:
        """Rotate a span's keys to another position."""

        def edit(session: Session) -> None:
            span = session.spans[number % len(session.spans)]
            first = sum(span.length for span in session.spans[: number % len(session.spans)])
            wanted = moved(read(session), first, span.position, span.length, position)
            try:
                self.store.edits.move(session, number % len(session.spans), position)
            except PoolExhausted:
                return
            assert self.same(read(session), wanted)
            assert session.positions()[first] == position

        self.edit(which, edit)

    @rule(which=indices, random=st.integers(0, 999), close=st.booleans())
    def rearrange(self, which: int, random: int, close: bool) -> None:
        """Put spans in another order, and perhaps close the gaps."""

        def edit(session: Session) -> None:
            parts = read(session).split([span.length for span in session.spans], dim=3)
            order = Random(random).sample(range(len(parts)), len(parts))
            self.store.edits.reorder(session, order)
            assert self.same(read(session), torch.cat([parts[n] for n in order], dim=3))
            if close:
                try:
                    self.store.edits.close_gaps(session)
                except PoolExhausted:
                    return
                assert session.positions().tolist() == list(range(session.length))

        self.edit(which, edit)

    def edit(self, which: int, change: Callable[[Session], None]) -> None:
        if (key := self.idle(which)) is None:
            return
        session = self.opened(key, self.expected[key].tokens)
        if session.spans:
            change(session)
            self.store.edits.mark(session, 0, emphasis=2.0, pinned=True)
        self.close(key, session)

    # The store.

    @rule(which=indices, twin=st.sampled_from(["fork", "other fork"]), length=lengths)
    def fork(self, which: int, twin: str, length: int) -> None:
        if (key := self.any(which)) is None:
            return
        owner, name = key
        session = self.store.get(owner, name)
        if session is None or self.store.get(owner, twin) is not None:
            return
        length = min(length, session.length)
        self.store.fork(session, twin, length)
        old = self.expected[owner, name]
        self.expected[owner, twin] = Expected(old.tokens[:length], old.kv[..., :length, :], old.edited)

    @rule(which=indices, seconds=st.sampled_from([1.0, 200.0]), now=st.booleans())
    def sleep_and_wake(self, which: int, seconds: float, now: bool) -> None:
        owner, name = self.any(which) or ("ann", "nobody")
        self.store.sleep(owner, name)
        if now:
            assert self.store.flush(60)
        self.tick(seconds)
        self.store.prefetch(owner, name)

    @rule(
        which=indices,
        action=st.sampled_from(
            ["sleep", "prefetch", "heartbeat", "drop", "flush", "compact", "back", "forward"]
        ),
    )
    def keep_house(self, which: int, action: str) -> None:
        owner, name = self.any(which) or ("ann", "nobody")
        match action:
            case "sleep":
                self.store.sleep(owner, name)
            case "prefetch":
                self.store.prefetch(owner, name)
            case "heartbeat":
                self.store.heartbeat(owner, name)
            case "drop":
                self.drop(owner, name)
            case "flush":
                assert self.store.flush(60)
            case "compact":
                self.store.compact()
            case "back":
                self.tick(-5)
            case "forward":
                self.tick(60)

    def drop(self, owner: str, name: str) -> None:
        self.store.drop(owner, name)
        self.expected.pop((owner, name), None)
        for active in self.active:
            active.dropped |= active.key == (owner, name)
        assert self.store.get(owner, name) is None

    @rule(which=indices, end=st.integers(1, LONGEST))
    def pin(self, which: int, end: int) -> None:
        session = self.store.get(*(self.any(which) or ("ann", "nobody")))
        if len(self.pins) == 3:
            self.store.unpin(self.pins.pop(0))
        if session is not None and session.length:
            try:
                self.pins.append(self.store.pin(session, "test", end=min(end, session.length)))
            except PinRefused:
                assert self.store.pins.bytes <= self.store.pins.budget_bytes

    @rule()
    def unpin(self) -> None:
        if self.pins:
            self.store.unpin(self.pins.pop())

    @rule(owner=owners, wanted=tokens, public=st.sampled_from([0, PUBLIC]))
    def find(self, owner: str, wanted: list[int], public: int) -> None:
        match = self.store.find(owner, wanted, public_tokens=public)
        assert match.tokens <= len(wanted)
        assert match.device + sum(match.tiers.values()) == match.tokens
        session = self.store.acquire(owner, None, wanted, public_tokens=public)
        assert self.same(read(session), kv_of(wanted[: session.length]))
        assert session.length <= match.tokens
        self.store.release(session)

    # What always holds.

    @invariant()
    def sessions_in_use_hold_what_they_should(self) -> None:
        for active in self.active if hasattr(self, "store") else ():
            assert list(active.session.tokens) == active.expected.tokens
            assert self.same(read(active.session), active.expected.kv)

    @invariant()
    def the_books_balance(self) -> None:
        if hasattr(self, "store"):
            check_books(self.store, [pair[0].keeper for pair in self.detached], self.pins)

    @invariant()
    def owners_share_public_pages_alone(self) -> None:
        if not hasattr(self, "store"):
            return
        sessions = [*self.store._sessions.values(), *(active.session for active in self.active)]
        first, second = ({r for s in sessions if s.owner == owner for r in held(s)} for owner in OWNERS)
        index, records = self.store.index, self.store.records
        for record in first & second:
            end = int(records.position[record]) + SIZE
            assert end <= PUBLIC
            head = np.concatenate([records.tokens_of(page) for page in self.prefix_of(record)])
            keys = index.chain(head, "nobody", PUBLIC, 0, end // SIZE, index.root)
            assert records.key_of(record) == keys[-1]

    def prefix_of(self, record: int) -> list[int]:
        """A page and those that it builds on, in order."""
        parent = int(self.store.records.parent[record])
        return [*(self.prefix_of(parent) if parent != NONE else []), record]

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for active in self.active:
            self.store.release(active.session)
        for pin in self.pins:
            self.store.unpin(pin)
        for span, _ in self.detached:
            self.store.edits.discard(span)
        check_nothing_left(self.store)
        self.store.close()
        self.folder.cleanup()


def moved(kv: torch.Tensor, first: int, old: int, length: int, new: int) -> torch.Tensor:
    """KV in which the keys of the tokens `first` to `first + length` were rotated from position `old` to `new`."""
    kv = kv.clone()
    assert SPEC.rope is not None
    positions = torch.arange(length)
    for layer, rope in enumerate(SPEC.rope):
        if rope is not None:
            keys = kv[layer, 0, :, first : first + length]
            kv[layer, 0, :, first : first + length] = rotate(keys, rope, positions + old, positions + new)
    return kv


class Disk(Machine):
    def tiers(self, folder: str) -> dict[str, Any]:
        return {"disk": TierConfig(30 * PAGE, "original", location=folder)}


class HostAndDisk(Machine):
    def tiers(self, folder: str) -> dict[str, Any]:
        return {
            "host": TierConfig(10 * PAGE, "original"),
            "disk": TierConfig(10**6, "original", location=folder),
        }


class Remote(Machine):
    def tiers(self, folder: str) -> dict[str, Any]:
        return {"remote": TierConfig(10**6, "original", location=f"memory://{uuid4().hex}")}


class Int8(Machine):
    device_format = "int8"
    tolerance = 0.06  # of values within 1, after several roundings

    def tiers(self, folder: str) -> dict[str, Any]:
        return {"disk": TierConfig(10**6, "int8", location=folder)}


@pytest.mark.parametrize("machine", [Machine, Disk, HostAndDisk, Remote, Int8])
def test_random_operations_keep_every_promise(machine: type[Machine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
