"""Keeps the lower tiers: writes pages through, brings them back, stays within budgets, and cleans up.

The store's thread owns all bookkeeping. Background threads get jobs with everything they need, and hand back what
became of them as functions that the store's thread calls in `poll`.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

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
from kvstore.spec import KVSpec
from kvstore.tiers import (
    NO_PARENT,
    Chunk,
    ChunkLayout,
    ChunkMissing,
    DiskStorage,
    HostStorage,
    RemoteStorage,
    Storage,
    StorageError,
    StoredChunk,
)
from kvstore.transfer import DeviceLink

logger = logging.getLogger(__name__)

READERS = 2
WRITE_BATCH = 16  # pages that are encoded and written in one go
POLL_SECONDS = 0.005  # that the store's thread spends on finished jobs at a time
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


@dataclass(frozen=True)
class Outgoing:
    """A page to be written: what its chunk says, and a view of it on the device."""

    record: int
    key: bytes
    parent: bytes
    position: int
    tokens: np.ndarray
    view: torch.Tensor
    encoded: bool
    fidelity: int


@dataclass
class Written:
    """What became of a job that wrote pages to one tier."""

    tier: Tier
    format: str
    sizes: dict[int, int] = field(default_factory=dict)  # bytes by record
    failure: str = ""


class Tiering:
    """The lower tiers of a store. All methods are called by the store's thread, but those of `Restoration`."""

    def __init__(
        self,
        spec: KVSpec,
        config: StoreConfig,
        residency: Residency,
        counters: Counters,
        *,
        now: Callable[[], float],
        on_activity: Callable[[], None],
    ) -> None:
        """`on_activity` is called from background threads when `poll` has something to do."""
        self._spec = spec
        self._layout = ChunkLayout.of(spec)
        self._config = config
        self._residency = residency
        self._records: PageRecords = residency.records
        self._counters = counters
        self._now = now
        self._on_activity = on_activity
        self._link = DeviceLink(residency.device)
        self._restorer = Restorer(spec, self._link, config.layers_at_a_time)
        self._completed: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: set[Future[None]] = set()
        self._readers = ThreadPoolExecutor(READERS, "kvstore-read")
        self._scanners = ThreadPoolExecutor(len(TIERS), "kvstore-scan")
        self._writers: list[ThreadPoolExecutor] = []
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

    @property
    def busy(self) -> int:
        """Jobs under way."""
        return len(self._jobs)

    def start(self) -> None:
        """Look for what earlier processes left, in the background."""
        for tier in self.tiers:
            if tier.name == "host":
                tier.scanned = True
            else:
                self._submit(self._scanners, partial(self._scan, tier))

    def poll(self) -> None:
        """Take in what background jobs have done; a great deal of it is left for the next time."""
        until = time.monotonic() + POLL_SECONDS
        while not self._completed.empty() and time.monotonic() < until:
            self._completed.get()()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of at least one job and take it in. Returns whether there was one."""
        if not self._jobs and self._completed.empty():
            return False
        try:
            self._completed.get(timeout=timeout)()
        except queue.Empty:
            return False
        self.poll()
        return True

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until no job is left. Returns whether that was so in time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._jobs or not self._completed.empty():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self.wait(left) and left == 0.0:
                return False
        return True

    def close(self, *, wait: bool = True) -> None:
        """Let jobs end and the threads with them; without `wait` those that have not begun are given up."""
        for executor in (self._readers, self._scanners, *self._writers):
            executor.shutdown(wait, cancel_futures=not wait)
        self._restorer.close()
        self.poll()
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
        self._submit(tier.writer, lambda: self._delete(tier, key, name))

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
        mark = self._link.mark()
        post = self._post_later(lambda: self._arrived(restoration))
        self._submit(self._readers, lambda: self._restorer.run(restoration, mark, post))
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
            try:
                tier.storage.write_record(name, data)
            except Exception as error:
                self._post(partial(self.failed, f"{tier.name}:write", described(error)))
            else:
                self._post(lambda: self.manifests.update({name: self._now()}))

        self._submit(tier.writer, work)

    def delete_record(self, name: str) -> None:
        tier = self.lasting
        assert tier is not None

        def work() -> None:
            try:
                tier.storage.delete_record(name)
            except Exception as error:
                self._post(partial(self.failed, f"{tier.name}:delete", described(error)))
            # Again, in case that it was still being written when its deletion was asked for.
            self._post(lambda: self._forget_manifest(name))

        self._forget_manifest(name)
        self._submit(tier.writer, work)

    def _forget_manifest(self, name: str) -> None:
        self.manifests.pop(name, None)

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
        writer = ThreadPoolExecutor(1, f"kvstore-{name}")
        self._writers.append(writer)
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
            batch = list(ids[start : start + WRITE_BATCH])
            self._residency.lock(batch)
            self._writing.update((record, tier.number) for record in batch)
            outgoing = [self._outgoing(record) for record in batch]
            mark = self._link.mark()
            future = self._submit(tier.writer, partial(self._write_pages, tier, format, outgoing, mark))
            self._writes[future] = (tier, batch)

    def _outgoing(self, record: int) -> Outgoing:
        records = self._records
        parent = int(records.parent[record])
        return Outgoing(
            record=record,
            key=records.key_of(record),
            parent=records.key_of(parent) if parent != NONE else NO_PARENT,
            position=int(records.position[record]),
            tokens=records.tokens_of(record),
            view=self._residency.view(record),
            encoded=bool(records.encoded[record]),
            fidelity=int(records.fidelity[record]),
        )

    # In the background.

    def _write_pages(self, tier: Tier, format: Format, outgoing: Sequence[Outgoing], mark: object) -> None:
        written: list[Written] = []
        try:
            with self._link.behind(mark):
                payloads = [(*self._encoded(page, format), page) for page in outgoing]
            for name, payload, page in payloads:
                result = next((w for w in written if w.format == name), None)
                if result is None:
                    result = Written(tier, name)
                    written.append(result)
                self._write_page(result, page, payload)
        except Exception as error:
            written.append(Written(tier, format.name, failure=described(error)))
        finally:
            records = [page.record for page in outgoing]
            self._post(lambda: self._wrote(tier, written, records))

    def _encoded(self, page: Outgoing, format: Format) -> tuple[str, torch.Tensor]:
        """A page in a format, or in the original one if it cannot be had in that."""
        if page.encoded:
            if format.name == "int8":
                return "int8", self._link.to_host(page.view)
            plain = get_format("int8").decode(page.view.unsqueeze(0), self._spec)
        else:
            plain = page.view.unsqueeze(0)
        if (used := len(page.tokens)) < self._spec.page_tokens:
            # What the memory held before would spoil the scales, and may be anybody's.
            plain = plain.clone()
            plain[..., used:, :] = 0
        try:
            return format.name, self._link.to_host(format.encode(plain, self._spec)[0])
        except ValueError:
            return "original", self._link.to_host(ORIGINAL.encode(plain, self._spec)[0])

    def _write_page(self, result: Written, page: Outgoing, payload: torch.Tensor) -> None:
        chunk = Chunk(
            key=page.key,
            parent=page.parent,
            position=page.position,
            tokens=page.tokens,
            format=result.format,
            payload=payload,
            fidelity=page.fidelity,
        )
        try:
            result.sizes[page.record] = result.tier.storage.write(chunk)
        except Exception as error:
            result.failure = described(error)

    def _delete(self, tier: Tier, key: bytes, format: str) -> None:
        try:
            tier.storage.delete(key, format)
        except Exception as error:
            self._post(partial(self.failed, f"{tier.name}:delete", described(error)))

    def _scan(self, tier: Tier) -> None:
        try:
            tier.storage.sweep(LEFTOVER_AGE)
            batch: list[StoredChunk] = []
            for chunk in tier.storage.scan():
                batch.append(chunk)
                if len(batch) == SCAN_BATCH:
                    self._post(partial(self._found, tier, batch))
                    batch = []
            self._post(partial(self._found, tier, batch))
            if tier is self.lasting:
                self._scan_manifests(tier)
        except Exception as error:  # a tier that cannot be listed is empty
            self._post(partial(self.failed, f"{tier.name}:scan", described(error)))
        finally:
            self._post(partial(self._scanned, tier))

    def _scan_manifests(self, tier: Tier) -> None:
        for name, modified in tier.storage.records():
            try:
                entries = Manifest.decode(tier.storage.read_record(name)).entries
            except Exception as error:  # of another version, or damaged: its session is computed again
                self._post(partial(self.failed, f"{tier.name}:manifest", described(error)))
                continue
            self._post(partial(self._found_manifest, name, modified, entries))

    def _post(self, completion: Callable[[], None]) -> None:
        self._completed.put(completion)
        self._on_activity()

    def _post_later(self, completion: Callable[[], None]) -> Callable[[], None]:
        return lambda: self._post(completion)

    # Back in the store's thread.

    def _submit(self, executor: ThreadPoolExecutor, work: Callable[[], None]) -> Future[None]:
        future = executor.submit(work)
        self._jobs.add(future)
        future.add_done_callback(lambda done: self._post(partial(self._forget_job, done)))
        return future

    def _forget_job(self, job: Future[None]) -> None:
        self._jobs.discard(job)
        self._writes.pop(job, None)

    def _wrote(self, tier: Tier, written: Sequence[Written], ids: Sequence[int]) -> None:
        for result in written:
            for record, size in result.sizes.items():
                self._note_copy(record, tier, result.format, size)
            if result.failure:
                self.failed(f"{tier.name}:write", result.failure)
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
                self._submit(tier.writer, partial(self._delete, tier, chunk.key, chunk.format))

    def _found_manifest(self, name: str, modified: float, entries: Sequence[Entry]) -> None:
        """Note a sleeping session of an earlier process: that its chunks are of use, and their order."""
        used = min(modified, self._now())
        self.manifests.setdefault(name, used)
        parent = NONE
        for entry in entries:
            record = self._residency.index.find(entry.key)
            if record == NONE:
                return
            self._residency.identify(record, entry.tokens, parent, entry.position)
            self._records.last_use[record] = max(self._records.last_use[record], used)
            parent = record

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


def described(error: Exception) -> str:
    """What a log says of an error; storages say what to do, others not even what they are."""
    expected = isinstance(error, (StorageError, ChunkMissing, ValueError))
    return str(error) if expected else repr(error)
