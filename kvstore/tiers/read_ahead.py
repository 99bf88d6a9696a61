"""Bytes of remote chunks that were fetched before anybody asked for them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

from kvstore.tiers.chunk import ChunkHeader

# Seconds after which bytes that were read ahead, and then not asked for, may go.
READ_AHEAD_IDLE = 10.0


@dataclass
class Ahead:
    """A chunk's header and the bytes of its layers from `first_layer` on."""

    header: ChunkHeader
    first_layer: int
    data: bytes
    used: float


class ReadAhead:
    """Chunks of which more was fetched than was asked for: callers read some layers of many chunks and then the next
    layers, each time opening them anew, and a request costs far more than its bytes. Safe from any thread."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, Ahead] = OrderedDict()  # by path, the longest unused first
        self._bytes = 0

    def get(self, path: str) -> Ahead | None:
        with self._lock:
            entry = self._entries.get(path)
            if entry is not None:
                entry.used = time.monotonic()
                self._entries.move_to_end(path)
            return entry

    def has_room(self, size: int) -> bool:
        """Whether `size` bytes can be added, without those that somebody may still come for."""
        with self._lock:
            while self._bytes + size > self._capacity and self._entries:
                path, oldest = next(iter(self._entries.items()))
                if time.monotonic() - oldest.used < READ_AHEAD_IDLE:
                    return False
                self._remove(path)
            return self._bytes + size <= self._capacity

    def put(self, path: str, header: ChunkHeader, first_layer: int, data: bytes) -> None:
        with self._lock:
            self._remove(path)
            self._entries[path] = Ahead(header, first_layer, data, time.monotonic())
            self._bytes += len(data)

    def remove(self, path: str) -> None:
        with self._lock:
            self._remove(path)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def _remove(self, path: str) -> None:
        entry = self._entries.pop(path, None)
        if entry is not None:
            self._bytes -= len(entry.data)
