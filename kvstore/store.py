"""The store: finds, keeps, moves and bounds the KV of many sessions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt
import torch

from kvstore import compaction
from kvstore.background import Background
from kvstore.config import StoreConfig
from kvstore.counters import Counters
from kvstore.device import device_pools
from kvstore.edits import SpanEdits
from kvstore.errors import PoolExhausted, SessionLocked
from kvstore.index import PrefixIndex
from kvstore.manifest import manifest_name
from kvstore.pins import Pin, Pins
from kvstore.records import NONE, TIERS, Ids, PageRecords
from kvstore.residency import Residency
from kvstore.restoration import Restoration
from kvstore.session import Session, Tokens
from kvstore.shares import Shares
from kvstore.sleeping import Sleeping
from kvstore.snapshot import StoreSnapshot
from kvstore.spans import Span, labelled
from kvstore.spec import KVSpec
from kvstore.table import PageTable
from kvstore.tiering import Tiering

# Seconds that a session that needs room waits for background jobs.
BRIEFLY, AT_LONGEST = 1.0, 60.0
SWEEP_SESSIONS = 64  # idle sessions that one tick looks at for nothing left of them

Key = tuple[str, str]


@dataclass(frozen=True)
class PrefixMatch:
    """How much of a token sequence the store has: `tokens` in all, of which `device` are on the device and `tiers` in
    the lower ones, by the quickest that has them."""

    tokens: int
    device: int
    tiers: dict[str, int]


def conversation_number(owner: str, session_id: str) -> int:
    """A number from 2**30 to 2**31 that a conversation has in every process; others may share it."""
    return 2**30 + int(manifest_name(owner, session_id)[:7], 16)


class KVStore:
    """Keeps sessions in pages on the device and in lower tiers, within budgets.

    An acquired session is locked: its pages stay on the device until it is released. Everything else may be evicted,
    the least worthy first, to lower tiers where there are some.

    One thread (the engine's) calls everything here and on sessions. Only `snapshot`, and `wait` and `cancel` of a
    `Restoration`, may be called from any thread. File and network work runs in background threads; what they have
    done takes effect in `poll`, which the methods that need it call themselves. `on_activity` is called from those
    threads when there is something to poll; an idle engine uses it to wake up.
    """

    def __init__(
        self,
        spec: KVSpec,
        config: StoreConfig,
        *,
        device: torch.device | str = "cpu",
        clock: Callable[[], float] = time.time,
        on_activity: Callable[[], None] | None = None,
    ) -> None:
        """Raises ValueError when the budget does not hold a single page."""
        self.spec = spec
        self.config = config
        self.counters = Counters()
        self._clock = clock
        self._latest = -np.inf
        self.records = PageRecords(spec.page_tokens)
        self.index = PrefixIndex(spec, self.records)
        pool, encoded = device_pools(spec, config, torch.device(device))
        self.shares = Shares(config.pools, config.device_bytes)
        self.residency = Residency(
            pool,
            encoded,
            self.index,
            self.records,
            shares=self.shares,
            policy=config.policy,
            counters=self.counters,
            newest_original=max(1, -(-config.newest_original_tokens // spec.page_tokens)),
            now=self.now,
        )
        self.background = Background(on_activity or (lambda: None))
        self.tiering = Tiering(
            spec,
            config,
            self.residency,
            self.counters,
            background=self.background,
            now=self.now,
        )
        self.residency.on_filled = self._filled
        self.residency.on_pressure = self._relieve
        self.residency.on_discarded = lambda record: self.tiering.remove_everywhere(record, "discarded")
        self.pins = Pins(self.residency, int(config.pin_budget * config.device_bytes))
        self.sleeping = Sleeping(self.residency, self.tiering, self.shares, self.counters)
        self.edits = SpanEdits(self.residency, self._keeper, self._fetch, self._detached)
        self._sessions: dict[Key, Session] = {}
        self._active: set[Session] = set()
        self._unkept: set[Session] = set()  # active, and forgotten at release
        self._asleep: set[Session] = set()
        self._leaving: set[Session] = set()  # asleep, and not yet off the device
        self._numbers = count(1)
        self._sweep_from = 0
        self.tiering.start()
        self._publish()

    def now(self) -> float:
        """The clock's time in seconds; it never goes back."""
        self._latest = max(self._latest, self._clock())
        return float(self._latest)

    # Turns.

    def acquire(
        self,
        owner: str,
        session_id: str | None,
        tokens: Sequence[int] | Tokens,
        *,
        planned: int = 0,
        public_tokens: int = 0,
        pool: str | None = None,
        sources: Sequence[tuple[str, int]] | None = None,
        wait: bool = True,
    ) -> Session:
        """Find or make the owner's session and lock it.

        The session holds the longest known beginning of `tokens`: of what it held, or of what the prefix index finds
        among the owner's pages and, for the first `public_tokens`, among public ones. What it held beyond stays in
        the index. Pages in lower tiers are brought back: before this returns, or, with `wait` False, while the first
        layers are read already; then reading may raise KVLost. It never raises for want of KV or of room: the session
        is shorter then.

        With `session_id` None the session is forgotten at release (its whole pages stay in the index). `planned` is
        the number of tokens that it will hold at most, 0 when that is not known; `pool` names its share of the
        device; `sources` are (source, number of tokens) of the spans of `tokens`.

        Raises SessionLocked when the session is already acquired, ValueError when there is no such pool.
        """
        self.poll()
        wanted = np.asarray(tokens, dtype=np.int32)
        session = self._opened(owner, session_id, pool)
        session.planned, session.public_tokens = planned, public_tokens
        if session_id is None:
            self._unkept.add(session)
        else:
            self._sessions[owner, session_id] = session
        self._wake(session)
        self._match(session, wanted)
        session.locked = True
        self._active.add(session)
        self.residency.lock(session.table.ids())
        try:
            brought = self._bring_back(session)
            if wait:
                self._await_arrivals(session)
        except BaseException:
            self.release(session)
            raise
        self._count_lookup(session, len(wanted), brought)
        if sources is not None and session.exact:
            session.spans = labelled(session.spans, sources, session.length)
        session.heartbeat = self.now()
        self.residency.touch(session.table.ids(), session.heartbeat)
        self._publish()
        return session

    def release(self, session: Session) -> None:
        """Unlock an acquired session. It is forgotten when it was not to be kept, was dropped meanwhile, or holds
        nothing. Raises ValueError when it is not acquired."""
        if not session.locked:
            raise ValueError("the session is not acquired")
        session.drop_spare()
        session.locked = False
        self._active.remove(session)
        self._cancel_arrivals(session)
        session.planned = 0
        self.residency.unlock(session.table.ids())
        self.residency.pool.release_claims(session.number)
        self.residency.touch(session.table.ids(), session.heartbeat)
        session.rest()
        session.last_use = self.now()
        if session in self._unkept:
            self._unkept.remove(session)
            self._close(session)
        elif session.length == 0:
            self._forget(session)
        self._publish()

    def fork(self, session: Session, session_id: str, length: int | None = None) -> Session:
        """A new idle session of the same owner that shares the first `length` tokens of another (None: all), without
        copying KV. Raises ValueError when there is a session of that id already, or fewer tokens."""
        key = (session.owner, session_id)
        if key in self._sessions:
            raise ValueError(f"there is a session {session_id!r} already")
        length = session.length if length is None else length
        if not 0 <= length <= session.length:
            raise ValueError(f"cannot fork {session.length} tokens at {length}")
        twin = self._new_session(session.owner, session_id, session.pool)
        table = session.table.slice(0, length)
        self.residency.hold(table.ids(), locked=False)
        twin.take_fork(session, table, length)
        self._sessions[key] = twin
        self._publish()
        return twin

    def fits(self, owner: str, session_id: str | None, planned: int) -> bool:
        """Whether a session can be acquired for `planned` tokens and grow to them, beside those in use and what is
        pinned, without running out of pages."""
        session = self._sessions.get((owner, session_id)) if session_id is not None else None
        reserved = [self._pages(max(s.planned, s.length)) for s in self._active if s is not session]
        free = self.residency.budget_pages() - self.pins.bytes // self.spec.bytes_per_page
        return sum(reserved) + self._pages(planned) <= free

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one session can hold at most, beside what is pinned."""
        pinned = self.pins.bytes // self.spec.bytes_per_page
        return (self.residency.budget_pages() - pinned) * self.spec.page_tokens

    def get(self, owner: str, session_id: str) -> Session | None:
        """The owner's session, if it is in memory."""
        return self._sessions.get((owner, session_id))

    def find(self, owner: str, tokens: Sequence[int] | Tokens, *, public_tokens: int = 0) -> PrefixMatch:
        """The longest beginning of `tokens` that can be reused, over all tiers, without acquiring anything."""
        self.poll()
        found = self._usable(
            self.index.longest_prefix(np.asarray(tokens, dtype=np.int32), owner, public_tokens)
        )
        size = self.spec.page_tokens
        resident = self.records.page[found] != NONE
        quickest = np.argmax(self.records.stored[found[~resident]] > 0, axis=1) if len(found) else []
        tiers = Counter(TIERS[tier] for tier in quickest)
        return PrefixMatch(
            tokens=len(found) * size,
            device=int(resident.sum()) * size,
            tiers={name: pages * size for name, pages in tiers.items()},
        )

    # Forgetting.

    def drop(self, owner: str, session_id: str) -> bool:
        """Forget the owner's session, and its KV in all tiers as far as no other session has it; one in use is
        forgotten at release. Returns whether there was one."""
        session = self._sessions.pop((owner, session_id), None) or self._loaded(owner, session_id)
        self.sleeping.forget(owner, session_id)
        if session is None:
            return False
        self.counters.drops += 1
        session.dropped = True
        if session.locked:
            self._unkept.add(session)
        else:
            self._close(session)
        self._publish()
        return True

    def drop_all(self) -> None:
        """Forget every session; those in use are forgotten at release."""
        for owner, session_id in list(self._sessions):
            self.drop(owner, session_id)

    # Signs of life.

    def heartbeat(self, owner: str, session_id: str) -> None:
        """Note that somebody is there: the session's pages are worth more, and it does not fall asleep."""
        session = self._sessions.get((owner, session_id))
        if session is not None:
            session.heartbeat = self.now()
            ids = session.table.ids()
            self.records.heartbeat[ids] = np.maximum(self.records.heartbeat[ids], session.heartbeat)

    def note_attention(self, session: Session, mass: npt.ArrayLike) -> None:
        """Note the attention mass that later tokens gave to each token of an acquired session, `[length]`, as a
        fraction of all: pages that got more are worth more. Raises ValueError for another length."""
        measured = np.asarray(mass, dtype=np.float32)
        if measured.shape != (session.length,):
            raise ValueError(f"attention of shape {measured.shape} for a session of {session.length} tokens")
        ends = np.cumsum(session.table.counts)
        sums = np.add.reduceat(measured, np.concatenate(([0], ends[:-1]))) if len(ends) else measured
        self.records.attention[session.table.ids()] = sums

    def prefetch(self, owner: str, session_id: str) -> Restoration | None:
        """Begin to bring a session back to the device before its next turn; None when nothing is to be done. The
        session stays unlocked."""
        self.poll()
        try:
            session = self._opened(owner, session_id, None)
        except SessionLocked:
            return None
        if session.length == 0:
            return None
        self._sessions[owner, session_id] = session
        self._wake(session)
        session.heartbeat = self.now()
        self._bring_back(session, cut=False)
        restoration = session.arrivals[-1] if session.arrivals else None
        session.arrivals.clear()
        self.residency.touch(session.table.ids(), session.heartbeat)
        self._publish()
        return restoration

    def sleep(self, owner: str, session_id: str) -> bool:
        """Let an idle session leave the device, once its pages are in a lower tier. It is not forgotten: the next
        `acquire` or `prefetch` wakes it. Returns whether there was one."""
        session = self._sessions.get((owner, session_id))
        if session is None or session.locked:
            return False
        self._fall_asleep(session)
        self._publish()
        return True

    def tick(self) -> None:
        """Housekeeping; to be called every second or so: take in background work, put sessions to sleep, remove what
        has expired."""
        self.poll()
        now = self.now()
        for session in list(self._sessions.values()):
            quiet = now - max(session.heartbeat, session.last_use)
            if not session.locked and not session.asleep and quiet > self.config.sleep_after:
                self._fall_asleep(session)
        self._leaving -= {session for session in self._leaving if self.sleeping.leave_device(session)}
        self._sweep()
        self.tiering.clean()
        self._publish()

    # Pins and memory.

    def pin(self, session: Session, reason: str, *, first: int = 0, end: int | None = None) -> Pin:
        """Keep the pages that hold the tokens `first` to `end` of a session (None: all) on the device. Raises
        PinRefused when the budget for pins does not allow it."""
        part = session.table.slice(first, session.length if end is None else end)
        pin = self.pins.add(part.records, reason, session.owner, self.now())
        self._publish()
        return pin

    def unpin(self, pin: Pin) -> None:
        """Remove a pin. Raises KeyError when it is gone already."""
        self.pins.remove(pin.number)
        self._publish()

    def compact(self) -> int:
        """Make the pages of idle sessions adjacent, and return sparsely used slabs. Returns how many pages moved."""
        before = self.counters.pages_compacted
        for session in self._sessions.values():
            if not session.locked and self._on_device(session):
                compaction.make_adjacent(self.residency, session)
        compaction.empty_sparse_slabs(self.residency)
        for session in self._sessions.values():
            if not session.locked:
                session.rearranged()
        self._publish()
        return self.counters.pages_compacted - before

    # Background work.

    def poll(self) -> None:
        """Take in what background threads have done. Never waits."""
        self.background.poll()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all background work is done. Returns whether that was so within `timeout` seconds."""
        done = self.background.flush(timeout)
        self._publish()
        return done

    def close(self, timeout: float | None = None) -> None:
        """Put all idle sessions to sleep, wait for background work, `timeout` seconds at most, and end its threads.
        Work that has not begun by then is given up."""
        for session in list(self._sessions.values()):
            if not session.locked and not session.asleep:
                self._fall_asleep(session)
        self.tiering.close(wait=self.background.flush(timeout))
        self._publish()

    def snapshot(self) -> StoreSnapshot:
        """The store's figures. Safe from any thread."""
        return self._snapshot

    # Inside.

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.spec.page_tokens)

    def _opened(self, owner: str, session_id: str | None, pool: str | None) -> Session:
        """The owner's session: the one in memory, one that sleeps in a tier, or a new one."""
        number = self.shares.number(pool) if pool is not None else 0
        session = None
        if session_id is not None:
            session = self._sessions.get((owner, session_id)) or self._loaded(owner, session_id)
        if session is None:
            return self._new_session(owner, session_id, number)
        if session.locked:
            raise SessionLocked(f"session {session_id!r} is in use")
        if pool is not None:
            session.pool = number
        return session

    def _loaded(self, owner: str, session_id: str) -> Session | None:
        """A session that sleeps in a tier."""
        session = self._new_session(owner, session_id, 0)
        return session if self.sleeping.load(session) else None

    def _fall_asleep(self, session: Session) -> None:
        self.sleeping.put_to_sleep(session)
        self._asleep.add(session)
        self._leaving.add(session)

    def _wake(self, session: Session) -> None:
        if session.asleep:
            session.asleep = False
            self.counters.wakes += 1
            self._asleep.discard(session)
            self._leaving.discard(session)

    def _new_session(self, owner: str, session_id: str | None, pool: int) -> Session:
        number = next(self._numbers) if session_id is None else conversation_number(owner, session_id)
        return Session(self.residency, owner, session_id, number=number, pool=pool)

    def _match(self, session: Session, tokens: Tokens) -> None:
        """Let a session hold the longest known beginning of `tokens`."""
        own = min(session.tokens_before(self._lost(session)), session.common_prefix(tokens))
        chain = self._usable(self.index.longest_prefix(tokens, session.owner, session.public_tokens))
        shared = len(chain) * self.spec.page_tokens
        old = session.table.ids()
        if shared > own or (shared and shared == own and not session.exact):
            table = PageTable()
            for record in chain.tolist():
                table.append(record, 0, self.spec.page_tokens)
            self._identify(chain, tokens)
            self.residency.hold(chain, locked=False)
            session.replace_contents(table, [Span("", shared, 0)])
            session.keyed_pages = len(chain)
            self.residency.release(old, locked=False)
        else:
            session.truncate(own)
        self._supersede(np.setdiff1d(old, session.table.ids()))

    def _identify(self, chain: Ids, tokens: Tokens) -> None:
        """Note what a lookup says of records that were found by a scan."""
        size = self.spec.page_tokens
        unknown = ~self.records.known[chain] | (self.records.parent[chain] == NONE)
        for ordinal in np.flatnonzero(unknown).tolist():
            part = tokens[ordinal * size : (ordinal + 1) * size]
            parent = int(chain[ordinal - 1]) if ordinal else NONE
            self.residency.identify(int(chain[ordinal]), part, parent, ordinal * size)

    def _usable(self, chain: Ids) -> Ids:
        """The leading records of which a copy exists."""
        there = (self.records.page[chain] != NONE) | self.records.stored[chain].any(axis=1)
        return chain if there.all() else chain[: int(np.argmin(there))]

    def _lost(self, session: Session) -> set[int]:
        """Records of a session of which no copy exists."""
        ids = session.table.ids()
        gone = (self.records.page[ids] == NONE) & ~self.records.stored[ids].any(axis=1)
        return set(ids[gone].tolist())

    def _supersede(self, ids: Ids) -> None:
        """Mark pages that a session has just left and no other has."""
        records = self.records
        records.superseded[ids[records.alive[ids] & (records.refs[ids] == 0)]] = True

    def _cancel_arrivals(self, session: Session) -> None:
        """Stop what only this session waits for."""
        awaited = {restoration for other in self._active for restoration in other.arrivals}
        for restoration in session.arrivals:
            if restoration not in awaited:
                restoration.cancel()
        session.arrivals.clear()

    def _bring_back(self, session: Session, *, cut: bool = True) -> set[int]:
        """Bring pages that are not on the device back, as many as there is room for; the session is cut before the
        others unless `cut` is False. Returns the records that are on their way for this session."""
        wanted = self._missing(session)
        missing = wanted
        while missing and not self._place(session, missing):
            missing = missing[: len(missing) // 2]
        if cut and len(missing) < len(wanted):
            session.truncate(session.tokens_before(set(wanted[len(missing) :])))
        if missing:
            self.tiering.restore(missing)
            session.rearranged()
        arriving = (self.tiering.arriving(record) for record in session.table.records)
        session.arrivals = list(dict.fromkeys(found for found in arriving if found is not None))
        return set(missing)

    def _missing(self, session: Session) -> list[int]:
        ids = dict.fromkeys(session.table.records)
        return [record for record in ids if self.records.page[record] == NONE]

    def _place(self, session: Session, missing: list[int]) -> bool:
        """Give pages to records that are to be brought back. Returns whether there was room."""
        own = session.table.ids()
        self.residency.lock(own)  # nothing of the session itself may go to make room
        first = session.table.records.index(missing[0])
        after = session.table.records[first - 1] if first else NONE
        try:
            self.residency.bring(
                missing,
                session.pool,
                after=after,
                claimant=session.number if session.locked else 0,
                planned=self._pages(session.planned) - first,
            )
        except PoolExhausted:
            return False
        finally:
            self.residency.unlock(own)
        return True

    def _await_arrivals(self, session: Session) -> None:
        if not session.arrivals:
            return
        for restoration in session.arrivals:
            restoration.wait_until_done()
        session.arrivals.clear()
        self._take_in(session)
        lost = set(self._missing(session))
        if lost:
            session.truncate(session.tokens_before(lost))
        session.rearranged()

    def _take_in(self, session: Session) -> None:
        """Take in what became of pages whose restoration is over."""
        while any(self.records.arriving[record] for record in session.table.records):
            if not self.background.wait():
                break

    def _keeper(self, session: Session) -> Session:
        """A session that keeps a span that was taken out of another."""
        return self._new_session(session.owner, None, session.pool)

    def _detached(self, keeper: Session) -> None:
        """Let a detached span's pages go to the tiers, also those that are not full."""
        if self.tiering.tiers:
            for record in dict.fromkeys(keeper.table.records):
                self.residency.seal(record)
            self.tiering.write_through(keeper.table.records, 0)

    def _fetch(self, session: Session) -> None:
        """Bring an idle session's pages to the device, as far as they can be had."""
        session.truncate(session.tokens_before(self._lost(session)))
        self._bring_back(session)
        self._await_arrivals(session)

    def _count_lookup(self, session: Session, wanted: int, brought: set[int]) -> None:
        counters = self.counters
        counters.lookups += 1
        counters.hits += session.length > 0
        counters.tokens_looked_up += wanted
        session.restored_tokens = sum(count for record, _, count in session.table if record in brought)
        session.reused_tokens = session.length - session.restored_tokens
        counters.tokens_reused += session.reused_tokens

    def _filled(self, session: Session, first: int) -> None:
        if self.tiering.tiers:
            self.tiering.write_through(session.table.records, first)
        self._publish()

    def _relieve(self) -> bool:
        """Called when nothing can be evicted: let go of pages that background jobs hold. Those that a slow tier has not
        come to are not waited for long."""
        wait = self.background.wait
        return wait(BRIEFLY) or self.tiering.abandon_writes() or wait(AT_LONGEST)

    def _close(self, session: Session) -> None:
        """Take a session's references back; of a dropped one's KV nothing stays that others do not use."""
        self._asleep.discard(session)
        self._leaving.discard(session)
        ids = session.table.ids()
        session.replace_contents(PageTable(), [])
        self.residency.release(ids, locked=False)
        if session.dropped:
            made = self.records.where((self.records.origin == session.number) & (self.records.refs == 0))
            for record in dict.fromkeys([*ids[::-1].tolist(), *made.tolist()]):
                self.residency.discard(record)

    def _forget(self, session: Session) -> None:
        assert session.id is not None
        self._sessions.pop((session.owner, session.id), None)
        self._close(session)

    def _sweep(self) -> None:
        """Forget idle sessions of which nothing is left, a few at a time."""
        keys = list(self._sessions)
        start = self._sweep_from if self._sweep_from < len(keys) else 0
        for key in keys[start : start + SWEEP_SESSIONS]:
            session = self._sessions[key]
            if not session.locked and self._lost(session) & set(session.table.records[:1]):
                self.counters.sessions_evicted += 1
                self._forget(session)
        self._sweep_from = start + SWEEP_SESSIONS

    def _on_device(self, session: Session) -> bool:
        return not self._missing(session) and not any(self.records.arriving[r] for r in session.table.records)

    def _publish(self) -> None:
        self._snapshot = StoreSnapshot(
            sessions=len(self._sessions),
            active=len(self._active),
            sleeping=len(self._asleep),
            bytes=self.residency.used_bytes(),
            allocated_bytes=self.residency.device_bytes(),
            budget_bytes=self.config.device_bytes,
            pinned_bytes=self.pins.bytes,
            bookkeeping_bytes=self.records.nbytes() + self.index.nbytes(),
            pages=self.residency.used_pages(),
            records=len(self.records),
            jobs=self.background.busy,
            pools=self.shares.snapshot(),
            tiers=self.tiering.snapshot(),
            totals=self.counters.totals(),
        )
