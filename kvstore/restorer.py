"""Brings pages from lower tiers to the device, layer by layer: early layers can compute while later ones load."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch

from kvstore.formats import INT8, Format, get_format
from kvstore.records import NONE
from kvstore.restoration import Arrival, Failure, Restoration, Source
from kvstore.spec import KVSpec
from kvstore.tiers import ChunkMissing, ChunkReader
from kvstore.transfer import DeviceLink

logger = logging.getLogger(__name__)

UNEXPECTED = "unexpected"  # why a copy could not be read, beside the reasons of ChunkMissing
BATCH = 32  # pages that are read and decoded at a time
WORKERS = 2  # batches that are read side by side: one waits for the disk while the other decodes
LOOKAHEAD = 4  # batches that the storages are told of before they are read
OPEN_READERS = 256  # chunks that stay open between two groups of layers


class Restorer:
    """Does the work of restorations in background threads."""

    def __init__(self, spec: KVSpec, link: DeviceLink, layers_at_a_time: int) -> None:
        self._spec = spec
        self._link = link
        self._layers_at_a_time = layers_at_a_time
        self._workers = ThreadPoolExecutor(WORKERS, "kvstore-restore")

    def run(self, restoration: Restoration, after: object) -> None:
        """Fill the pages. `after` marks the device work that must be over before they may be overwritten. Never
        raises."""
        work = _Work(self._spec, self._link, restoration, after)
        try:
            self._run(work, restoration)
        except BaseException as error:  # whatever it is, the pages are computed again
            logger.debug("restoring %d pages has failed", len(restoration.arrivals), exc_info=True)
            restoration.failures.append(Failure(NONE, "device", type(error).__name__, repr(error)))
            restoration.lose_from(0)
        finally:
            work.close()
            restoration.end()

    def close(self) -> None:
        """End the threads. Nothing is restored any more."""
        self._workers.shutdown()

    def _run(self, work: _Work, restoration: Restoration) -> None:
        first, count = 0, self._layers_at_a_time
        while first < self._spec.layers and not restoration.cancelled:
            count = min(count, self._spec.layers - first)
            self._read_layers(work, restoration, first, count)
            first += count
            restoration.advance(first)
            count *= 2  # later layers are not so urgent, and larger reads are quicker

    def _read_layers(self, work: _Work, restoration: Restoration, first: int, count: int) -> None:
        """Bring layers of all pages to the device, up to the first page of which no copy is left."""
        wanted = len(restoration.arrivals) - len(restoration.lost)
        jobs = [
            self._workers.submit(work.bring, start, min(start + BATCH, wanted), first, count)
            for start in range(0, wanted, BATCH)
        ]
        wait(jobs)  # for all of them: no page may be written to once it is given up
        for job in jobs:
            job.result()


class _Work:
    """One restoration while it is carried out, by several threads."""

    def __init__(self, spec: KVSpec, link: DeviceLink, restoration: Restoration, after: object) -> None:
        self._spec = spec
        self._link = link
        self._restoration = restoration
        self._after = after
        self._readers: dict[tuple[int, str], ChunkReader] = {}  # by record and tier

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def bring(self, start: int, end: int, first: int, count: int) -> None:
        """Bring layers of a batch of pages to the device, up to the first page of which no copy is left: that and all
        behind it are lost."""
        batch = self._restoration.arrivals[start:end]
        if self._restoration.cancelled or batch[0].record in self._restoration.lost:
            return
        if first == 0:
            self._announce(start)
        parts = self._read_batch(batch, first, count)
        with self._link.behind(self._after):
            self._deliver(batch, parts, first)
        had = sum(len(part.pages) for part in parts)
        if had < len(batch):
            self._restoration.lose_from(start + had)

    def _announce(self, start: int) -> None:
        """Tell the storages of the batch that will be due in a while, at the beginning of all until then."""
        begin = start + (LOOKAHEAD - 1) * BATCH if start else 0
        for arrival in self._restoration.arrivals[begin : start + LOOKAHEAD * BATCH]:
            for source in arrival.sources[:1]:
                source.storage.expect(arrival.key, source.format)

    def _read_batch(self, batch: Sequence[Arrival], first: int, count: int) -> list[_Part]:
        """Read layers of each page. Returns what was read, by format, up to the first page that is lost."""
        parts: dict[str, _Part] = {}
        for number, arrival in enumerate(batch):
            format = self._read_page(arrival, parts, len(batch), first, count)
            if format is None:
                break
            parts[format].pages.append(number)
        return list(parts.values())

    def _read_page(
        self, arrival: Arrival, parts: dict[str, _Part], pages: int, first: int, count: int
    ) -> str | None:
        while arrival.sources:
            source = arrival.sources[0]
            if source.format not in parts:
                size = get_format(source.format).layer_bytes(self._spec)
                parts[source.format] = _Part(
                    source.format, torch.empty((pages, count, size), dtype=torch.uint8)
                )
            part = parts[source.format]
            out = part.encoded[len(part.pages)]
            try:
                self._read(arrival, source, first, out)
            except Exception as error:  # a miss, or a defect of a remote store's driver
                self._restoration.failures.append(_failure(arrival, source, error))
                arrival.sources.pop(0)
                continue
            arrival.formats.add(source.format)
            arrival.tier = arrival.tier or source.storage.name
            arrival.bytes += out.nbytes
            return source.format
        return None

    def _read(self, arrival: Arrival, source: Source, first: int, out: torch.Tensor) -> None:
        place = (arrival.record, source.storage.name)
        reader = self._readers.pop(place, None)
        if reader is None:
            reader = source.storage.read(arrival.key, source.format, arrival.tokens)
        try:
            reader.read_into(first, out)
        except BaseException:
            reader.close()
            raise
        arrival.fidelity = max(arrival.fidelity, reader.fidelity)
        if first + len(out) < self._spec.layers and len(self._readers) < OPEN_READERS:
            self._readers[place] = reader
        else:
            reader.close()

    def _deliver(self, batch: Sequence[Arrival], parts: Sequence[_Part], first: int) -> None:
        """Decode what was read and copy it to the device."""
        for part in parts:
            encoded = self._link.to_device(part.encoded[: len(part.pages)])
            count = encoded.shape[1]
            targets = [batch[number].target[first : first + count] for number in part.pages]
            self._copy(get_format(part.format), encoded, targets)

    def _copy(self, format: Format, encoded: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        """Copy encoded layers to pages, each of which is plain or in int8."""
        for int8 in (False, True):
            chosen = [
                number for number, target in enumerate(targets) if (target.dtype == torch.uint8) == int8
            ]
            if not chosen:
                continue
            part = encoded if len(chosen) == len(targets) else encoded[chosen]
            if not (int8 and format is INT8):
                part = format.decode(part, self._spec)
                part = INT8.encode(part, self._spec) if int8 else part
            for number, content in zip(chosen, part, strict=True):
                targets[number].copy_(content)


def _failure(arrival: Arrival, source: Source, error: Exception) -> Failure:
    if isinstance(error, ChunkMissing):
        return Failure(arrival.record, source.storage.name, error.reason, error.detail)
    return Failure(arrival.record, source.storage.name, UNEXPECTED, repr(error))


@dataclass
class _Part:
    """Layers that were read in one format: `encoded` is `[pages, layers, layer_bytes]`, `pages` are their numbers."""

    format: str
    encoded: torch.Tensor
    pages: list[int] = field(default_factory=list)
