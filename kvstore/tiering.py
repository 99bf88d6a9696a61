"""Keeps the lower tiers: writes pages through, brings them back, stays within budgets, and cleans up.

The store's thread owns all bookkeeping. Background threads get jobs with everything they need, and post what became of
them (background.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from kvstore.background import Background
from kvstore.config import StoreConfig, TierConfig
from kvstore.counters import Counters
from kvstore.formats import ORIGINAL, Format, get_format
from kvstore.keys import PRIVATE_BIT
from kvstore.manifest import Entry, Manifest
from kvstore.records import (
    FORMAT_CODES,
    FORMAT_NAMES,
    NONE,
    TIERS,
    Ids,
    PageRecords,
)
from kvstore.residency import Residency
from kvstore.restoration import Arrival, Restoration, Source
from kvstore.restorer import UNEXPECTED, Restorer
from kvstore.snapshot import TierSnapshot
from kvstore.spec import KVSpec
from kvstore.tiers import (
    ChunkLayout,
    DiskStorage,
    HostStorage,
    RemoteStorage,
    Storage,
    StoredChunk,
)
from kvstore.transfer import DeviceLink
from kvstore.writer import Outgoing, Writer, Written, described

logger = logging.getLogger(__name__)

READERS = 2
WRITE_BATCH = 16  # pages that are encoded and written in one go
REMOVED_AHEAD = 0.01  # share of a tier's budget that is freed beyond what is necessary
SCAN_BATCH = 64  # chunks that the store's thread takes in at a time
LEFTOVER_AGE = 3600.0  # seconds after which a temporary file belongs to nobody
CLEAN_EVERY = 60.0  # seconds between searches for expired chunks
# One line a kind of failure and minute, however many there are.
LOG_EVERY = 60.0
# Reasons for which a chunk may be there all the same, and be had another time.
OUTAGES = frozenset({"unreadable", UNEXPECTED})


@dataclass
class Tier:
    """One lower tier and what the store knows of it."""

    number: int
    storage: Storage
    config: TierConfig
    format: Format
    writer: ThreadPoolExecutor
    bytes: int = 0
    chunks: int = 0
    scanned: bool = False

    @property
    def name(self) -> str:
        return self.storage.name


class Tiering:
    """The lower tiers of a store. All methods are called by the store's thread."""

    def __init__(
        self,
        spec: KVSpec,
        config: StoreConfig,
        residency: Residency,
        counters: Counters,
        *,
        background: Background,
        now: Callable[[], float],
    ) -> None:
        self._spec = spec
        self._layout = ChunkLayout.of(spec)
        self._config = config
        self._residency = residency
        self._records: PageRecords = residency.records
        self._counters = counters
        self._now = now
        self._background = background
        self._link = DeviceLink(residency.device)
        self._restorer = Restorer(spec, self._link, config.layers_at_a_time)
        self._writer = Writer(spec, self._link)
        self._readers = background.executor(READERS, "read")
        self._scanners = background.executor(len(TIERS), "scan")
        self._arriving: dict[int, Restoration] = {}
        self._writing: set[tuple[int, int]] = set()  # (record, tier) of jobs under way
        self._writes: dict[Future[None], tuple[Tier, list[int]]] = {}  # those jobs, with their records
        self._newest_pages = -(-config.newest_original_tokens // spec.page_tokens)
        self._logged: dict[str, float] = {}
        self._cleaned_at = -np.inf
        # Manifests of sleeping sessions in the lasting tier, and when they were written.
        self.manifests: dict[str, float] = {}
        self.tiers = self._build()
        self._by_number = {tier.number: tier for tier in self.tiers}

    @property
    def lasting(self) -> Tier | None:
        """The tier that survives the process: the disk, else the remote one."""
        return next((tier for tier in self.tiers if tier.name != "host"), None)

    def snapshot(self) -> tuple[TierSnapshot, ...]:
        """Each tier's figures."""
        return tuple(
            TierSnapshot(t.name, t.format.name, t.bytes, t.config.budget_bytes, t.chunks, t.scanned)
            for t in self.tiers
        )

    def start(self) -> None:
        """Look for what earlier processes left, in the background."""
        for tier in self.tiers:
            if tier.name == "host":
                tier.scanned = True
            else:
                self._background.submit(self._scanners, partial(self._scan, tier))

    def close(self, *, wait: bool = True) -> None:
        """Let jobs end and the threads with them; without `wait` those that have not begun are given up."""
        self._background.close(wait=wait)
        self._restorer.close()
        for tier in self.tiers:
            tier.storage.close()

    # Writing.

    def write_through(self, table: Sequence[int], first: int) -> None:
        """Write the pages of a session from the `first` one on to every tier that lacks them, and quantize whole ones
        that are no longer among the newest. `table` are the session's records; unsealed ones are left out."""
        whole = self._records.used[np.array(table, dtype=np.int32)] == self._spec.page_tokens
        older = int(whole.sum()) - self._newest_pages
        for tier in self.tiers:
            quantized: list[int] = []
            original: list[int] = []
            begin = max(0, first - self._newest_pages) if not tier.format.lossless else first
            for ordinal in range(begin, len(table)):
                format = tier.format if whole[ordinal] and ordinal < older else ORIGINAL
                if self._needs(table[ordinal], tier, format):
                    (original if format is ORIGINAL else quantized).append(table[ordinal])
            self._write(tier, ORIGINAL, original)
            self._write(tier, tier.format, quantized)

    def abandon_writes(self) -> bool:
        """Give up writes that have not begun, so that their pages can leave the device. Returns whether there were
        any."""
        abandoned = [job for job in list(self._writes) if job.cancel()]
        for job in abandoned:
            tier, ids = self._writes.pop(job)
            detail = f"{len(ids)} pages were not written: it is too slow for the room that the device has"
            self.failed(f"{tier.name}:abandoned", detail)
            self._end_writing(tier, ids)
        return bool(abandoned)

    def remove(self, record: int, tier: Tier, reason: str) -> None:
        """Remove a tier's copy of a page."""
        name = FORMAT_NAMES[int(self._records.stored[record, tier.number])]
        self._forget_copy(record, tier)
        self._counters.chunks_removed[f"{tier.name}:{reason}"] += 1
        key = self._records.key_of(record)
        self._delete(tier, key, name)

    def remove_everywhere(self, record: int, reason: str) -> None:
        for tier in self.tiers:
            if self._records.stored[record, tier.number]:
                self.remove(record, tier, reason)

    # Reading.

    def restore(self, ids: Sequence[int]) -> Restoration:
        """Bring pages back to the device; the records have been given pages there."""
        arrivals = [
            Arrival(
                record,
                self._records.key_of(record),
                self._records.tokens_of(record),
                self._residency.view(record),
                self._sources(record),
            )
            for record in ids
        ]
        restoration = Restoration(arrivals, self._spec.layers)
        self._residency.lock(list(ids))
        for arrival in arrivals:
            self._residency.degrade(arrival.record, [source.format for source in arrival.sources[:1]])
        for record in ids:
            self._records.arriving[record] = True
            self._arriving[record] = restoration
        work = partial(self._restorer.run, restoration, self._link.mark())
        self._background.submit(self._readers, work, lambda: self._arrived(restoration))
        return restoration

    def arriving(self, record: int) -> Restoration | None:
        """The restoration that brings a record's page, if one does."""
        return self._arriving.get(record)

    def read_record(self, name: str) -> Future[bytes]:
        """Read a small named blob of the lasting tier in the background. The future raises ChunkMissing."""
        assert self.lasting is not None
        return self._readers.submit(self.lasting.storage.read_record, name)

    def write_record(self, name: str, data: bytes) -> None:
        """Write a small named blob to the lasting tier in the background."""
        tier = self.lasting
        assert tier is not None

        def work() -> None:
            tier.storage.write_record(name, data)
            self._background.post(lambda: self.manifests.update({name: self._now()}))

        self._background.submit(tier.writer, self._guarded(tier, "write", work))

    def delete_record(self, name: str) -> None:
        """Delete such a blob, also one that is just being written."""
        tier = self.lasting
        assert tier is not None

        def forget() -> None:
            self.manifests.pop(name, None)

        forget()
        work = partial(tier.storage.delete_record, name)
        self._background.submit(tier.writer, self._guarded(tier, "delete", work), forget)

    # Cleaning.

    def clean(self) -> None:
        """Remove expired chunks; does something once a minute at most."""
        now = self._now()
        if now - self._cleaned_at < CLEAN_EVERY:
            return
        self._cleaned_at = now
        for tier in self.tiers:
            if tier.config.expire_after is not None:
                self._expire(tier, now - tier.config.expire_after)

    def _expire(self, tier: Tier, before: float) -> None:
        records = self._records
        old = (records.last_use < before) & (records.stored[:, tier.number] > 0) & self._removable()
        self._remove_all(records.where(old), tier, "expired")
        if tier is self.lasting:
            for name in [name for name, used in self.manifests.items() if used < before]:
                self.delete_record(name)

    def _collect(self) -> None:
        """Remove chunks of earlier processes that only a session could find, and no sleeping session names. Young ones
        stay: another process may be about to name them."""
        records = self._records
        private = (records.key[:, 0] & PRIVATE_BIT).astype(bool) & ~records.known & (records.refs == 0)
        old = records.last_use < self._now() - LEFTOVER_AGE
        tier = self.lasting  # others hold what manifests elsewhere name
        if tier is not None:
            unused = private & old & self._removable() & (records.stored[:, tier.number] > 0)
            self._remove_all(records.where(unused), tier, "unreferenced")

    def _build(self) -> list[Tier]:
        layout = self._layout
        tiers = []
        config = self._config
        if config.host:
            locked = self._residency.device.type == "cuda"
            tiers.append(self._tier("host", HostStorage(layout, page_locked=locked), config.host))
        if config.disk:
            disk = DiskStorage(Path(config.disk.location), layout, fsync=config.disk.fsync)
            tiers.append(self._tier("disk", disk, config.disk))
        if config.remote:
            remote = RemoteStorage(str(config.remote.location), layout, timeout=config.remote.timeout)
            tiers.append(self._tier("remote", remote, config.remote))
        return tiers

    def _tier(self, name: str, storage: Storage, config: TierConfig) -> Tier:
        # One thread a tier, so that a slow one does not hold up the others, and its jobs keep their order.
        writer = self._background.executor(1, name)
        return Tier(TIERS.index(name), storage, config, get_format(config.format), writer)

    def _needs(self, record: int, tier: Tier, format: Format) -> bool:
        records = self._records
        if records.page[record] == NONE or records.arriving[record] or not records.key[record].any():
            return False
        if (record, tier.number) in self._writing:
            return False
        code = int(records.stored[record, tier.number])
        if code == 0:
            return True
        # An original that is no longer among the newest is quantized; what was quantized once stays so.
        return code == FORMAT_CODES["original"] and not format.lossless

    def _write(self, tier: Tier, format: Format, ids: Sequence[int]) -> None:
        for start in range(0, len(ids), WRITE_BATCH):
            self._write_batch(tier, format, list(ids[start : start + WRITE_BATCH]))

    def _write_batch(self, tier: Tier, format: Format, ids: list[int]) -> None:
        self._residency.lock(ids)
        self._writing.update((record, tier.number) for record in ids)
        outgoing = [self._outgoing(record) for record in ids]
        mark = self._link.mark()

        def work() -> None:
            written = self._writer.write(outgoing, format, tier.storage, mark)
            self._background.post(lambda: self._wrote(tier, written, ids))

        job = self._background.submit(tier.writer, work, lambda: self._forget_write(job))
        self._writes[job] = (tier, ids)

    def _forget_write(self, job: Future[None]) -> None:
        self._writes.pop(job, None)

    def _outgoing(self, record: int) -> Outgoing:
        records = self._records
        return Outgoing(
            record=record,
            key=records.key_of(record),
            tokens=records.tokens_of(record),
            fidelity=int(records.fidelity[record]),
            view=self._residency.view(record),
            is_int8=bool(records.encoded[record]),
        )

    def _delete(self, tier: Tier, key: bytes, format: str) -> None:
        work = partial(tier.storage.delete, key, format)
        self._background.submit(tier.writer, self._guarded(tier, "delete", work))

    # In the background.

    def _guarded(self, tier: Tier, action: str, work: Callable[[], None]) -> Callable[[], None]:
        """Work of which a failure is counted."""

        def guarded() -> None:
            try:
                work()
            except Exception as error:
                self._background.post(partial(self.failed, f"{tier.name}:{action}", described(error)))

        return guarded

    def _scan(self, tier: Tier) -> None:
        try:
            tier.storage.sweep(LEFTOVER_AGE)
            batch: list[StoredChunk] = []
            for chunk in tier.storage.scan():
                batch.append(chunk)
                if len(batch) == SCAN_BATCH:
                    self._background.post(partial(self._found, tier, batch))
                    batch = []
            self._background.post(partial(self._found, tier, batch))
            if tier is self.lasting:
                self._scan_manifests(tier)
        except Exception as error:  # a tier that cannot be listed is empty
            self._background.post(partial(self.failed, f"{tier.name}:scan", described(error)))
        finally:
            self._background.post(partial(self._scanned, tier))

    def _scan_manifests(self, tier: Tier) -> None:
        for name, modified in tier.storage.records():
            try:
                entries = Manifest.decode(tier.storage.read_record(name)).entries
            except Exception as error:  # of another version, or damaged: its session is computed again
                self._background.post(partial(self.failed, f"{tier.name}:manifest", described(error)))
                continue
            self._background.post(partial(self._found_manifest, name, modified, entries))

    # Back in the store's thread.

    def _wrote(self, tier: Tier, written: Written, ids: Sequence[int]) -> None:
        for record, (format, size) in written.chunks.items():
            self._note_copy(record, tier, format, size)
        for failure in written.failures:
            self.failed(f"{tier.name}:write", failure)
        self._end_writing(tier, ids)
        self._keep_budget(tier)

    def _end_writing(self, tier: Tier, ids: Sequence[int]) -> None:
        self._residency.unlock(ids)
        self._writing.difference_update((record, tier.number) for record in ids)
        for record in ids:
            self._residency.settle(record)

    def _note_copy(self, record: int, tier: Tier, format: str, size: int) -> None:
        records = self._records
        old = int(records.stored[record, tier.number])
        if old == FORMAT_CODES[format]:  # a scan has found it meanwhile, or it could not be quantized
            self._forget_copy(record, tier)
        elif old:
            self.remove(record, tier, "replaced")
        records.stored[record, tier.number] = FORMAT_CODES[format]
        tier.bytes += self._chunk_bytes(format)
        tier.chunks += 1
        self._counters.chunks_written[tier.name] += 1
        self._counters.bytes_written[tier.name] += size

    def _forget_copy(self, record: int, tier: Tier) -> None:
        format = FORMAT_NAMES[int(self._records.stored[record, tier.number])]
        self._records.stored[record, tier.number] = 0
        tier.bytes -= self._chunk_bytes(format)
        tier.chunks -= 1

    def _chunk_bytes(self, format: str) -> int:
        return self._layout.chunk_bytes(get_format(format).layer_bytes(self._spec))

    def _keep_budget(self, tier: Tier) -> None:
        if tier.bytes <= tier.config.budget_bytes:
            return
        # A little more than necessary, so that not every page that is written has all others judged.
        excess = tier.bytes - tier.config.budget_bytes * (1 - REMOVED_AHEAD)
        records = self._records
        chosen = records.where((records.stored[:, tier.number] > 0) & ~records.arriving)
        worth = self._residency.policy.worth(self._residency.statistics(chosen))
        # Of equally worthy pages the ends of prefixes go first, and last of all those that are pinned.
        order = np.lexsort((-records.position[chosen], worth, records.pins[chosen] > 0))
        for record in chosen[order].tolist():
            if excess <= 0:
                break
            before = tier.bytes
            self._remove_all([record], tier, "budget")
            excess -= before - tier.bytes

    def _removable(self) -> np.ndarray:
        """Which records' copies may be removed: not those that are pinned or on their way."""
        return np.asarray((self._records.pins == 0) & ~self._records.arriving)

    def _remove_all(self, ids: Iterable[int] | Ids, tier: Tier, reason: str) -> None:
        for record in ids:
            self.remove(int(record), tier, reason)
            self._residency.index.forget_unneeded(int(record))

    def _found(self, tier: Tier, found: Sequence[StoredChunk]) -> None:
        now = self._now()
        for chunk in found:
            record = self._residency.index.find(chunk.key)
            if record == NONE:
                record = self._residency.adopt(chunk.key, last_use=min(chunk.modified, now))
            if chunk.format not in FORMAT_CODES:
                continue
            known = int(self._records.stored[record, tier.number])
            if not known:
                self._records.stored[record, tier.number] = FORMAT_CODES[chunk.format]
                tier.bytes += self._chunk_bytes(chunk.format)
                tier.chunks += 1
            elif known != FORMAT_CODES[chunk.format]:
                # A process that was killed while it quantized the page has left both copies.
                self._delete(tier, chunk.key, chunk.format)

    def _found_manifest(self, name: str, modified: float, entries: Sequence[Entry]) -> None:
        """Note a sleeping session of an earlier process: that its chunks are of use, and their order."""
        used = min(modified, self._now())
        self.manifests.setdefault(name, used)
        for entry in entries:
            record = self._residency.recognized(entry)
            if record == NONE:
                return
            self._records.last_use[record] = max(self._records.last_use[record], used)

    def _scanned(self, tier: Tier) -> None:
        tier.scanned = True
        self._keep_budget(tier)
        if all(tier.scanned for tier in self.tiers):
            self._collect()

    def _arrived(self, restoration: Restoration) -> None:
        ids = [arrival.record for arrival in restoration.arrivals]
        self._residency.unlock(ids)
        for failure in restoration.failures:
            self.failed(f"{failure.tier}:{failure.reason}", f"a page could not be read: {failure.detail}")
            if failure.record != NONE and failure.reason not in OUTAGES:
                self._drop_bad_copy(failure.record, failure.tier)
        for arrival in restoration.arrivals:
            record = arrival.record
            self._arriving.pop(record, None)
            self._records.arriving[record] = False
            if record in restoration.lost:
                self._residency.evict(record, "unrestored")
            else:
                self._complete(arrival)
            self._residency.settle(record)

    def _drop_bad_copy(self, record: int, name: str) -> None:
        tier = self._by_number[TIERS.index(name)]
        if self._records.stored[record, tier.number]:
            self.remove(record, tier, "unreadable")

    def _complete(self, arrival: Arrival) -> None:
        self._residency.degrade(arrival.record, arrival.formats, arrival.fidelity)
        self._counters.bytes_restored[arrival.tier] += arrival.bytes
        self._counters.tokens_restored[arrival.tier] += len(arrival.tokens)
        if self._records.key_of(arrival.record) != arrival.key:
            # Tokens were added to the page while its last layers came; if it is full now, it waits to be written.
            self.write_through([arrival.record], 0)

    def _sources(self, record: int) -> list[Source]:
        codes = self._records.stored[record]
        return [
            Source(tier.storage, FORMAT_NAMES[int(codes[tier.number])])
            for tier in self.tiers
            if codes[tier.number]
        ]

    def failed(self, what: str, detail: str) -> None:
        """Count a failure, and log the first of its kind in a while."""
        self._counters.failures[what] += 1
        now = time.monotonic()
        if now - self._logged.get(what, -LOG_EVERY) >= LOG_EVERY:
            self._logged[what] = now
            logger.warning("KV tier trouble (%s): %s", what, detail)
