"""Chunks in host memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from kvstore.tiers.chunk import MAX_RECORD_BYTES, Chunk, ChunkHeader, ChunkLayout, check_record_name
from kvstore.tiers.storage import ChunkMissing, ChunkReader, StorageError, StoredChunk, Tokens

# Page-locked memory comes in powers of two, so blocks are one, or just below.
BLOCK_BYTES = 16 * 2**20


class _Block:
    """Memory for some payloads of one size. `free` are the numbers of the slots in which none is."""

    def __init__(self, slots: int, layers: int, layer_bytes: int, page_locked: bool) -> None:
        self.memory = torch.empty((slots, layers, layer_bytes), dtype=torch.uint8, pin_memory=page_locked)
        self.slots = slots
        self.free = list(range(slots))

    @property
    def empty(self) -> bool:
        return len(self.free) == self.slots


@dataclass(frozen=True, eq=False)
class _Slot:
    """The place of one payload."""

    arena: _Arena
    block: _Block
    number: int

    @property
    def payload(self) -> torch.Tensor:
        """uint8 `[layers, layer_bytes]`."""
        return self.block.memory[self.number]


class _Arena:
    """Slots of one size, in blocks that are allocated when needed and returned when empty."""

    def __init__(self, layers: int, layer_bytes: int, page_locked: bool) -> None:
        self._layers = layers
        self._layer_bytes = layer_bytes
        self._page_locked = page_locked
        self._blocks: list[_Block] = []

    @property
    def bytes_allocated(self) -> int:
        return sum(block.memory.nbytes for block in self._blocks)

    def take(self) -> _Slot:
        """A free slot; of the oldest block that has one, so that younger ones run empty. Raises RuntimeError when
        there is no memory."""
        block = next((block for block in self._blocks if block.free), None)
        if block is None:
            slots = max(1, BLOCK_BYTES // max(1, self._layers * self._layer_bytes))
            block = _Block(slots, self._layers, self._layer_bytes, self._page_locked)
            self._blocks.append(block)
        return _Slot(self, block, block.free.pop())

    def give_back(self, slot: _Slot) -> None:
        slot.block.free.append(slot.number)
        if slot.block.empty:
            self._blocks.remove(slot.block)


@dataclass(eq=False)
class _Entry:
    """One chunk. Its slot is given back when it is deleted and nobody reads it any more."""

    header: ChunkHeader
    slot: _Slot
    modified: float
    readers: int = 0
    deleted: bool = False


class HostStorage:
    """Keeps chunks in host memory, page-locked where asked, which makes copies to and from a CUDA device quick and
    asynchronous. Nothing in it outlives the process."""

    name = "host"

    def __init__(self, layout: ChunkLayout, *, page_locked: bool = False) -> None:
        self._layout = layout
        self._page_locked = page_locked
        self._lock = threading.Lock()
        self._arenas: dict[int, _Arena] = {}  # by bytes of a layer
        self._entries: dict[tuple[bytes, str], _Entry] = {}
        self._records: dict[str, tuple[bytes, float]] = {}

    @property
    def bytes_held(self) -> int:
        """Bytes of the payloads that are there."""
        with self._lock:
            return sum(entry.slot.payload.nbytes for entry in self._entries.values())

    @property
    def bytes_allocated(self) -> int:
        """Bytes of memory that are taken for payloads, free slots included."""
        with self._lock:
            return sum(arena.bytes_allocated for arena in self._arenas.values())

    def write(self, chunk: Chunk) -> int:
        chunk.check(self._layout)
        name = (chunk.key, chunk.format)
        with self._lock:
            if self._touch(name):
                return chunk.payload.nbytes
            slot = self._take(chunk.payload.shape[1])
        slot.payload.copy_(chunk.payload)
        with self._lock:
            if self._touch(name):  # another thread was quicker
                slot.arena.give_back(slot)
            else:
                header = ChunkHeader.of(chunk)
                # The caller's array may change after this.
                header = replace(header, tokens=chunk.tokens.copy())
                self._entries[name] = _Entry(header, slot, time.time())
        return chunk.payload.nbytes

    def read(self, key: bytes, format: str, tokens: Tokens | None = None) -> HostReader:
        with self._lock:
            entry = self._entries.get((key, format))
            if entry is None:
                raise ChunkMissing("absent", f"{key.hex()} in {format}")
            entry.header.match(key, format, tokens)
            entry.readers += 1
        return HostReader(self, entry)

    def expect(self, key: bytes, format: str) -> None:
        """Nothing to do: it is there."""

    def delete(self, key: bytes, format: str) -> None:
        with self._lock:
            entry = self._entries.pop((key, format), None)
            if entry is not None:
                entry.deleted = True
                self._give_back_unused(entry)

    def scan(self) -> Iterator[StoredChunk]:
        with self._lock:
            entries = list(self._entries.items())
        for (key, format), entry in entries:
            yield StoredChunk(key, format, entry.slot.payload.nbytes, entry.modified)

    def sweep(self, older_than: float) -> int:
        return 0

    def write_record(self, name: str, data: bytes) -> None:
        check_record_name(name)
        if len(data) > MAX_RECORD_BYTES:
            raise ValueError(f"a record of {len(data):,} bytes; {MAX_RECORD_BYTES:,} are allowed")
        with self._lock:
            self._records[name] = (bytes(data), time.time())

    def read_record(self, name: str) -> bytes:
        with self._lock:
            if name not in self._records:
                raise ChunkMissing("absent", f"record {name}")
            return self._records[name][0]

    def delete_record(self, name: str) -> None:
        with self._lock:
            self._records.pop(name, None)

    def records(self) -> Iterator[tuple[str, float]]:
        with self._lock:
            records = [(name, modified) for name, (_, modified) in self._records.items()]
        yield from records

    def close(self) -> None:
        with self._lock:
            self._entries.clear()
            self._arenas.clear()
            self._records.clear()

    def _touch(self, name: tuple[bytes, str]) -> bool:
        """Note that a chunk that is there was written again. Returns whether it is."""
        entry = self._entries.get(name)
        if entry is not None:
            entry.modified = time.time()
        return entry is not None

    def _take(self, layer_bytes: int) -> _Slot:
        arena = self._arenas.get(layer_bytes)
        if arena is None:
            arena = _Arena(self._layout.layers, layer_bytes, self._page_locked)
            self._arenas[layer_bytes] = arena
        try:
            return arena.take()
        except RuntimeError as error:  # what torch raises when memory, or page-locked memory, cannot be had
            kind = "page-locked memory" if self._page_locked else "memory"
            raise StorageError(
                f"no {kind} for another block of pages; lower the host tier's budget"
            ) from error

    def _release(self, entry: _Entry) -> None:
        with self._lock:
            entry.readers -= 1
            self._give_back_unused(entry)

    def _give_back_unused(self, entry: _Entry) -> None:
        if entry.deleted and entry.readers == 0:
            entry.slot.arena.give_back(entry.slot)


class HostReader(ChunkReader):
    """An open chunk in host memory; its memory is not used for another one meanwhile."""

    def __init__(self, storage: HostStorage, entry: _Entry) -> None:
        super().__init__(entry.header)
        self._storage = storage
        self._entry: _Entry | None = entry

    def _fill(self, first_layer: int, out: torch.Tensor) -> None:
        assert self._entry is not None, "the reader is closed"
        out.copy_(self._entry.slot.payload[first_layer : first_layer + len(out)])

    def close(self) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            self._storage._release(entry)
