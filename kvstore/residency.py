"""What is on the device: gives pages to records, takes them away, and decides whose go first."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstore.counters import Counters
from kvstore.errors import PoolExhausted
from kvstore.eviction import HIT_HALF_LIFE, EvictionPolicy, PageStatistics
from kvstore.formats import INT8
from kvstore.index import PrefixIndex
from kvstore.keys import PUBLIC, is_private, owner_salt, page_key, private_key
from kvstore.pool import PagePool, PlainRun, Run
from kvstore.records import (
    APPROXIMATE,
    EXACT,
    FIDELITY_OF_FORMAT,
    NONE,
    QUANTIZED_INT8,
    Ids,
    PageRecords,
)
from kvstore.shares import Shares

if TYPE_CHECKING:
    from kvstore.manifest import Entry
    from kvstore.session import Session, Tokens
    from kvstore.table import PageTable


logger = logging.getLogger(__name__)

# When room is short, this share of the budget is freed beyond what is asked for, so that the next page is at hand.
EVICTED_AHEAD = 128


class Residency:
    """The device's pages. Used by the store's thread alone.

    A page may leave the device when no session in use and no background job holds it (`locks`), it is not pinned, and
    nothing that builds on it is on the device: so prefixes go from their ends. Among those the policy's least worthy
    goes first, within what the pools' shares allow.
    """

    def __init__(
        self,
        pool: PagePool,
        encoded_pool: PagePool | None,
        index: PrefixIndex,
        records: PageRecords,
        *,
        shares: Shares,
        policy: EvictionPolicy,
        counters: Counters,
        newest_original: int,
        now: Callable[[], float],
    ) -> None:
        """`encoded_pool` holds whole pages but the last `newest_original` of a session, where the device has one."""
        self.spec = pool.spec
        self.pool = pool
        self.encoded_pool = encoded_pool
        self.index = index
        self.records = records
        self.shares = shares
        self.policy = policy
        self.counters = counters
        self._newest_original = newest_original
        self._now = now
        # The store's: told of a session's pages that are whole now, from the first of them on; asked to wait for a
        # background job that holds pages; and told of records that nobody can find any more, whose copies in tiers
        # are to go.
        self.on_filled: Callable[[Session, int], None] = lambda session, first: None
        self.on_pressure: Callable[[], bool] = lambda: False
        self.on_discarded: Callable[[int], None] = lambda record: None

    @property
    def device(self) -> torch.device:
        return self.pool.device

    # Pages of sessions.

    def new_records(self, session: Session, count: int, *, after: int, position: int) -> list[int]:
        """Records with pages behind the record `after`, one reference each. Raises PoolExhausted."""
        size = self.spec.page_tokens
        try:
            self.make_room(count, session.pool)
        except PoolExhausted:
            if not self._encode_older(session):
                raise
            self.make_room(count, session.pool)
        planned = -(-session.planned // size) - len(session.table)
        pages = self._allocate(
            self.pool, count, after=self._page_behind(after), claimant=session.number, planned=planned
        )
        made: list[int] = []
        for number, page in enumerate(pages):
            parent = after if number == 0 else made[-1]
            record = self.records.new(parent=parent, position=position + number * size)
            self.records.fidelity[record] = session.fidelity
            self.records.origin[record] = session.number
            self.records.last_use[record] = self._now()
            self._put(record, page, session.pool)
            made.append(record)
        self.hold(made, locked=session.locked)
        return made

    def copied(self, session: Session, record: int, start: int, count: int) -> int:
        """A new record, with one reference, whose first `count` slots are those from `start` of `record`."""
        records = self.records
        (copy,) = self.new_records(
            session, 1, after=int(records.parent[record]), position=int(records.position[record]) + start
        )
        target = self.pool.plain_run(int(records.page[copy]), 0, count)
        source = self.run(record, start, count)
        if isinstance(source, PlainRun):
            target.all_layers().copy_(source.all_layers())
        else:
            for layer in range(self.spec.layers):
                target.keys(layer).copy_(source.keys(layer))
                target.values(layer).copy_(source.values(layer))
        self.fill(copy, records.tokens[record, start : start + count], int(records.fidelity[record]))
        records.emphasis[copy] = records.emphasis[record]
        self.counters.pages_copied += 1
        return copy

    def run(self, record: int, start: int, count: int) -> Run:
        """Slots of a record's page."""
        pool = self._pool_of(record)
        return pool.run(int(self.records.page[record]), start, count)

    def writable(self, record: int, end: int) -> bool:
        """Whether an acquired session may write the slots from `end` of a record's page: nothing is there, and nobody
        else has the page or is writing it to a tier. A sealed one is to be unsealed before tokens are added."""
        records = self.records
        free = int(records.used[record]) == end < self.spec.page_tokens
        alone = records.refs[record] == 1 and records.locks[record] == 1 + records.arriving[record]
        return bool(free and alone and not records.encoded[record])

    def fill(self, record: int, tokens: Tokens, fidelity: int) -> None:
        """Note the tokens whose KV was written behind those that the record has, and what that went through."""
        used = int(self.records.used[record])
        self.records.tokens[record, used : used + len(tokens)] = tokens
        self.records.used[record] = used + len(tokens)
        self.records.fidelity[record] = max(self.records.fidelity[record], fidelity)

    def degrade(self, record: int, formats: Collection[str], before: int = EXACT) -> None:
        """Note the formats that a record's KV went through, and its fidelity `before` that."""
        worst = max((FIDELITY_OF_FORMAT[name] for name in formats), default=EXACT)
        self.records.fidelity[record] = max(self.records.fidelity[record], worst, min(before, APPROXIMATE))

    def gathered_tokens(self, table: PageTable) -> Tokens:
        """The tokens of a page table, int32 `[tokens]`."""
        starts, counts = np.array(table.starts, dtype=np.int32), np.array(table.counts, dtype=np.int32)
        slots = np.arange(self.spec.page_tokens)
        own = (slots >= starts[:, None]) & (slots < (starts + counts)[:, None])
        return np.asarray(self.records.tokens[table.ids()][own])

    def hold(self, records: Sequence[int] | Ids, *, locked: bool) -> None:
        """Add a reference to each, and a lock."""
        self.records.add(self.records.refs, records, 1)
        if locked:
            self.lock(records)

    def release(self, records: Sequence[int] | Ids, *, locked: bool) -> None:
        """Take back what `hold` gave. Pages that only a session could use are freed when the last reference goes."""
        if not len(records):
            return
        self.records.add(self.records.refs, records, -1)
        if locked:
            self.unlock(records)
        for record in dict.fromkeys(reversed(list(records))):
            self.settle(int(record))

    def settle(self, record: int) -> None:
        """Discard a record, with its page and copies, if nobody holds it and no lookup can find it."""
        records = self.records
        if not records.alive[record] or records.refs[record] or records.locks[record]:
            return
        if records.indexed[record] and not is_private(records.key_of(record)):
            return
        self.on_discarded(record)
        if records.page[record] != NONE:
            self._take(record)
        self.index.forget_unneeded(record)

    def discard(self, record: int) -> None:
        """Let nobody find a record any more that nobody holds, and remove its page and copies."""
        if self.records.refs[record] == 0:
            if self.records.indexed[record]:
                self.index.remove(record)
            self.settle(record)

    def adopt(self, key: bytes, *, last_use: float) -> int:
        """A record for a chunk that was found in a tier, of which only the key is known."""
        record = self.records.new()
        self.records.known[record] = False
        self.records.last_use[record] = last_use
        self._set_key(record, key)
        return record

    def identify(self, record: int, tokens: Tokens, parent: int, position: int) -> None:
        """Note what a lookup or a manifest says of a record that was found in a tier. Reading its chunk checks it."""
        records = self.records
        if not records.known[record]:
            records.tokens[record, : len(tokens)] = tokens
            records.used[record] = len(tokens)
            records.position[record] = position
            records.known[record] = True
        if records.parent[record] == NONE and not self._builds_on(parent, record):
            records.set_parent(record, parent)

    def recognized(self, entry: Entry) -> int:
        """The record of a page that a manifest names, NONE when no tier has it; notes what the manifest says of it."""
        record = self.index.find(entry.key)
        if record != NONE:
            parent = self.index.find(entry.parent) if entry.parent else NONE
            self.identify(record, entry.tokens, parent, entry.position)
        return record

    def _builds_on(self, record: int, other: int) -> bool:
        """Whether a record is another, or builds on it."""
        if record == other:
            return True
        while self.records.children[other] and record != NONE:
            record = int(self.records.parent[record])
            if record == other:
                return True
        return False

    def view(self, record: int) -> torch.Tensor:
        """View of a record's page; see `PagePool.view`."""
        return self._pool_of(record).view(int(self.records.page[record]))

    def lock(self, records: Sequence[int] | Ids) -> None:
        self.records.add(self.records.locks, records, 1)

    def unlock(self, records: Sequence[int] | Ids) -> None:
        self.records.add(self.records.locks, records, -1)

    def worst_fidelity(self, ids: Ids) -> int:
        """The worst fidelity of some records."""
        return int(self.records.fidelity[ids].max()) if len(ids) else EXACT

    def touch(self, ids: Ids, heartbeat: float) -> None:
        """Note a use of some records."""
        records, now = self.records, self._now()
        decay = 0.5 ** (np.maximum(now - records.last_use[ids], 0) / HIT_HALF_LIFE)
        records.hits[ids] = 1 + records.hits[ids] * decay
        records.last_use[ids] = now
        records.heartbeat[ids] = np.maximum(records.heartbeat[ids], heartbeat)
        records.superseded[ids] = False

    def pages_filled(self, session: Session) -> None:
        """Give keys to a session's newly filled pages, and share those that are known already."""
        size = self.spec.page_tokens
        filled = []
        for ordinal in range(len(session.table) - 1, -1, -1):
            record = session.table.records[ordinal]
            if self.records.key[record].any():
                break
            if self.records.used[record] == size:
                filled.append(ordinal)
        for ordinal in reversed(filled):
            self._give_key(session, ordinal)
        if filled:
            self.on_filled(session, filled[-1])
            self._encode_older(session)

    def seal(self, record: int) -> None:
        """Give a page that is not full a key, so that it can go to a tier. It is found by those who hold it alone."""
        if not self.records.key[record].any():
            self._set_key(record, private_key())

    def unseal(self, record: int) -> None:
        """Take back what `seal` gave, and the copies with it, which lack what is to be added to the page."""
        if self.records.key[record].any():
            self.on_discarded(record)
            self.index.remove(record)
            self.records.key[record] = 0

    # Who stays and who goes.

    def make_room(self, count: int, share: int, *, target: PagePool | None = None) -> None:
        """Evict until `count` pages are free for a pool's sessions. Raises PoolExhausted."""
        pool = target or self.pool
        while True:
            over = self.shares.excess(share, count * pool.page_bytes)
            missing = count - pool.free_pages
            if over:
                self._evict(-(-over // pool.page_bytes), share, pool, own=True)
            elif missing > 0:
                self._evict(missing + pool.budget_pages // EVICTED_AHEAD, share, pool, own=False)
            else:
                return
            improved = self.shares.excess(share, count * pool.page_bytes) < over or (
                not over and count - pool.free_pages < missing
            )
            if not improved and not self.on_pressure():
                raise self._exhausted(count, pool)

    def evict(self, record: int, reason: str) -> None:
        """Take a record's page from the device."""
        self._take(record)
        self.counters.pages_evicted[reason] += 1
        self.index.forget_unneeded(record)

    def bring(
        self, ids: Sequence[int], share: int, *, after: int, claimant: int = 0, planned: int = 0
    ) -> None:
        """Give pages to records that are not on the device, in order behind the page of `after`; as int8 pages, where
        the device has these, whole ones but the newest. Raises PoolExhausted; nothing has changed then."""
        encoded: list[int] = []
        if self.encoded_pool is not None:
            older = ids[: -self._newest_original]
            encoded = [record for record in older if self.records.used[record] == self.spec.page_tokens]
            self.make_room(len(encoded), share, target=self.encoded_pool)
        others = set(encoded)
        plain = [record for record in ids if record not in others]
        self.make_room(len(plain), share)
        pages = self._allocate(
            self.pool, len(plain), after=self._page_behind(after), claimant=claimant, planned=planned
        )
        if self.encoded_pool is not None and encoded:
            try:
                pages += self._allocate(self.encoded_pool, len(encoded))
            except PoolExhausted:
                self.pool.free(pages)
                raise
            self.records.encoded[encoded] = True
            self.records.fidelity[encoded] = np.maximum(self.records.fidelity[encoded], QUANTIZED_INT8)
        for record, page in zip([*plain, *encoded], pages, strict=True):
            self._put(record, page, share)

    def relocate(self, record: int, page: int) -> None:
        """Move a record's content to another page of the same pool, which was taken for it. Nobody may hold it."""
        pool, old = self._pool_of(record), int(self.records.page[record])
        pool.copy(old, page)
        self.records.page[record] = page
        pool.free([old])

    def unlocked(self, pool: PagePool | None = None) -> Ids:
        """Records whose pages, in one pool or all, nobody reads or writes at the moment."""
        records = self.records
        free = (records.page != NONE) & (records.locks == 0)
        if pool is not None:
            free &= records.encoded == (pool is self.encoded_pool)
        return records.where(free)

    def statistics(self, ids: Ids) -> PageStatistics:
        """What policies judge records by."""
        records = self.records
        priority = np.array([pool.priority for pool in self.shares.pools], dtype=np.float32)
        return PageStatistics(
            now=self._now(),
            last_use=records.last_use[ids],
            hits=records.hits[ids],
            heartbeat=records.heartbeat[ids],
            position=records.position[ids],
            priority=priority[records.pool[ids]],
            emphasis=records.emphasis[ids],
            attention=records.attention[ids],
            superseded=records.superseded[ids],
            stored=np.asarray(records.stored[ids].any(axis=1)),
            bytes=np.full(len(ids), self.spec.bytes_per_page, dtype=np.float32),
        )

    def device_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(pool.allocated_pages * pool.page_bytes for pool in self._all_pools())

    def budget_pages(self) -> int:
        """Pages that fit on the device."""
        return sum(pool.budget_pages for pool in self._all_pools())

    def used_pages(self) -> int:
        """Pages in use."""
        return sum(pool.used_pages for pool in self._all_pools())

    def used_bytes(self) -> int:
        """Bytes of the pages in use."""
        return sum(pool.used_pages * pool.page_bytes for pool in self._all_pools())

    def page_bytes_of(self, ids: Ids) -> int:
        """Bytes on the device of some records."""
        resident = self.records.page[ids] != NONE
        encoded = int((resident & self.records.encoded[ids]).sum())
        size = self.encoded_pool.page_bytes if self.encoded_pool else 0
        return (int(resident.sum()) - encoded) * self.pool.page_bytes + encoded * size

    def _evict(self, count: int, share: int, pool: PagePool, *, own: bool) -> None:
        records = self.records
        # Of all pools, since those that build on a page of this one may be in another, and go first.
        unlocked = self.unlocked()
        candidates = unlocked[records.pins[unlocked] == 0]
        worth = np.zeros(records.rows)
        worth[candidates] = self.policy.worth(self.statistics(candidates))
        may_go = np.zeros(records.rows, dtype=bool)
        may_go[candidates] = True
        ends = candidates[records.resident_children[candidates] == 0]
        leaves = list(zip(worth[ends].tolist(), ends.tolist(), strict=True))
        heapq.heapify(leaves)
        while count > 0 and leaves:
            _, record = heapq.heappop(leaves)
            owner = int(records.pool[record])
            if owner != share and (own or not self.shares.may_lose(owner, share, pool.page_bytes)):
                continue
            parent = int(records.parent[record])
            count -= self._pool_of(record) is pool
            self.evict(record, "room")
            if parent != NONE and may_go[parent] and records.resident_children[parent] == 0:
                heapq.heappush(leaves, (float(worth[parent]), parent))

    def _allocate(
        self, pool: PagePool, count: int, *, after: int | None = None, claimant: int = 0, planned: int = 0
    ) -> list[int]:
        """Take pages for which room was made. Raises PoolExhausted when the device has less memory than its budget
        says: torch tells of that with a RuntimeError, the system with an OSError."""
        try:
            return pool.allocate(count, after=after, claimant=claimant, planned=planned)
        except (RuntimeError, MemoryError, OSError) as error:
            self.counters.failures["device:memory"] += 1
            logger.warning("the device has no memory for KV, though the budget allows it: %s", error)
            raise self._exhausted(count, pool) from error

    def _exhausted(self, count: int, pool: PagePool) -> PoolExhausted:
        self.counters.refusals["room"] += 1
        records = self.records
        resident = records.page != NONE
        pinned = records.where(resident & (records.pins > 0))
        locked = records.where(resident & (records.pins == 0) & (records.locks > 0))
        return PoolExhausted(
            asked=count * pool.page_bytes,
            free=pool.free_pages * pool.page_bytes,
            pinned=self.page_bytes_of(pinned),
            locked=self.page_bytes_of(locked),
            budget=pool.budget_pages * pool.page_bytes,
        )

    def _all_pools(self) -> list[PagePool]:
        return [self.pool] if self.encoded_pool is None else [self.pool, self.encoded_pool]

    def _pool_of(self, record: int) -> PagePool:
        if self.records.encoded[record]:
            assert self.encoded_pool is not None
            return self.encoded_pool
        return self.pool

    def _page_behind(self, record: int) -> int | None:
        if record == NONE or self.records.encoded[record] or self.records.page[record] == NONE:
            return None
        return int(self.records.page[record])

    def _put(self, record: int, page: int, share: int) -> None:
        self.records.place(record, page)
        self.records.pool[record] = share
        self.shares.charge(share, self._pool_of(record).page_bytes)

    def _take(self, record: int) -> None:
        pool = self._pool_of(record)
        self.shares.charge(int(self.records.pool[record]), -pool.page_bytes)
        pool.free([self.records.displace(record)])

    def _give_key(self, session: Session, ordinal: int) -> None:
        records, record = self.records, session.table.records[ordinal]
        size = self.spec.page_tokens
        follows = session.keyed_pages == ordinal and records.position[record] == ordinal * size
        if not follows or records.fidelity[record] == APPROXIMATE or session.table.starts[ordinal]:
            self._set_key(record, private_key())
            return
        parent = records.key_of(session.table.records[ordinal - 1]) if ordinal else self.index.root
        public = (ordinal + 1) * size <= session.public_tokens
        salt = PUBLIC if public else owner_salt(session.owner)
        key = page_key(parent, records.tokens[record].astype("<i4").tobytes(), salt)
        session.keyed_pages = ordinal + 1
        known = self.index.find(key)
        if known == NONE:
            self._set_key(record, key)
        elif self._sharable(known, record):
            self._share(session, ordinal, known)
        else:
            session.keyed_pages = ordinal
            self._set_key(record, private_key())

    def _set_key(self, record: int, key: bytes) -> None:
        self.records.key[record] = np.frombuffer(key, dtype=np.uint8)
        self.index.add(record)

    def _sharable(self, known: int, own: int) -> bool:
        """Whether a session may use the known record in place of its own; a worse page without users is replaced."""
        records = self.records
        if records.known[known] and not np.array_equal(records.tokens[known], records.tokens[own]):
            return False  # another page has the same key by chance
        if records.refs[own] > 1:
            return False  # a fork or a pin has come to it in the middle of the pass, and needs it
        if records.page[known] == NONE:
            return True
        if records.fidelity[known] > records.fidelity[own] and records.locks[known] == 0:
            self._take(known)
            return True
        return not records.arriving[known] and not records.encoded[known]

    def _share(self, session: Session, ordinal: int, known: int) -> None:
        """Let the session use the known record of a page that it has just computed itself."""
        records, own = self.records, session.table.records[ordinal]
        if records.page[known] == NONE:
            # The page left the device, or was found by a scan of a tier; what was computed takes its place.
            tokens = records.tokens_of(own)
            self.identify(known, tokens, int(records.parent[own]), int(records.position[own]))
            pool, share = self._pool_of(own), int(records.pool[own])
            page = records.displace(own)
            self.shares.charge(share, -pool.page_bytes)
            self._put(known, page, share)
            records.fidelity[known] = records.fidelity[own]
        self.hold([known], locked=session.locked)
        self.touch(np.array([known], dtype=np.int32), session.heartbeat)
        session.table.records[ordinal] = known
        self.adopt_children(session, ordinal, own, known)
        self.release([own], locked=session.locked)
        session.rearranged()
        self.counters.pages_shared += 1

    def adopt_children(self, session: Session, ordinal: int, own: int, known: int) -> None:
        """Link the session's next page, made behind its own one, to the shared one."""
        following = [*session.table.records[ordinal + 1 : ordinal + 2], *session.spare[:1]]
        for record in following[:1]:
            if self.records.parent[record] == own:
                self.records.unlink(record)
                self.records.set_parent(record, known)

    def _encode_older(self, session: Session) -> bool:
        """Encode whole pages on the device once they are no longer among the session's newest. Pages that others hold
        at the moment wait for a next time. Returns whether there were any."""
        if self.encoded_pool is None:
            return False
        records = self.records
        ids = np.unique(session.table.ids()[: -self._newest_original])
        whole = (records.used[ids] == self.spec.page_tokens) & ~records.encoded[ids]
        chosen = ids[whole & (records.locks[ids] == (1 if session.locked else 0))]
        while len(chosen):
            if self._encode(chosen.tolist(), session.pool):
                session.rearranged()
                return True
            chosen = chosen[: len(chosen) // 2]
        return False

    def _encode(self, chosen: Sequence[int], share: int) -> bool:
        assert self.encoded_pool is not None
        try:
            self.make_room(len(chosen), share, target=self.encoded_pool)
        except PoolExhausted:
            return False  # they stay as they are
        plain = torch.stack([self.pool.view(int(self.records.page[r])) for r in chosen])
        try:
            encoded = INT8.encode(plain, self.spec)
        except ValueError:  # some hold what int8 cannot: they stay, the others are encoded one by one
            return len(chosen) > 1 and sum(self._encode([record], share) for record in chosen) > 0
        try:
            pages = self._allocate(self.encoded_pool, len(chosen))
        except PoolExhausted:
            return False
        for record, page, content in zip(chosen, pages, encoded, strict=True):
            self.encoded_pool.view(page).copy_(content)
            owner = int(self.records.pool[record])
            self._take(record)
            self.records.encoded[record] = True
            self._put(record, page, owner)
            self.records.fidelity[record] = max(self.records.fidelity[record], QUANTIZED_INT8)
        return True
