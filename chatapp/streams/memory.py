"""Turn streams in this process's memory, for the one-process mode. Safe from any thread."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

from chatapp.protocol import ModelStatus
from chatapp.streams.base import (
    CLAIM_SECONDS,
    ENGINE_SILENT_SECONDS,
    QUEUED_SECONDS,
    Entry,
    StaleWriter,
)

_QUEUED = ""


@dataclass
class _Log:
    entries: list[Entry] = field(default_factory=list)
    touched_at: float = 0.0


class MemoryTurnStreams:
    def __init__(self, keep_seconds: float) -> None:
        self._keep_seconds = keep_seconds
        self._lock = threading.Lock()
        # Least recently appended first.
        self._logs: OrderedDict[UUID, _Log] = OrderedDict()
        self._cancelled: dict[UUID, float] = {}
        # Who holds a turn, and until when; "" while it is in the queue.
        self._holders: dict[UUID, tuple[str, float]] = {}
        self._engines: dict[str, tuple[float, ModelStatus]] = {}

    def append(self, turn: UUID, entries: Sequence[Entry]) -> bool:
        with self._lock:
            log = self._logs.setdefault(turn, _Log())
            if entries[0].sequence_number != len(log.entries) + 1:
                raise StaleWriter(
                    f"Turn {turn} has {len(log.entries)} events; number {entries[0].sequence_number} does not follow."
                )
            log.entries.extend(entries)
            log.touched_at = time.monotonic()
            self._logs.move_to_end(turn)
            self._expire()
            return turn in self._cancelled

    def read(self, turn: UUID, after: int = 0) -> list[Entry]:
        with self._lock:
            log = self._logs.get(turn)
            return log.entries[after:] if log else []

    async def read_async(self, turn: UUID, after: int = 0) -> list[Entry]:
        return self.read(turn, after)

    def discard(self, turn: UUID) -> None:
        with self._lock:
            self._logs.pop(turn, None)
            self._cancelled.pop(turn, None)

    def request_cancel(self, turn: UUID) -> None:
        with self._lock:
            self._cancelled[turn] = time.monotonic()

    def cancel_requested(self, turn: UUID) -> bool:
        with self._lock:
            return turn in self._cancelled

    def mark_queued(self, turn: UUID) -> bool:
        with self._lock:
            if self._holder(turn) is not None:
                return False
            self._holders[turn] = (_QUEUED, time.monotonic() + QUEUED_SECONDS)
            return True

    def claim(self, turn: UUID, worker: str) -> bool:
        with self._lock:
            if self._holder(turn) not in (None, _QUEUED, worker):
                return False
            self._holders[turn] = (worker, time.monotonic() + CLAIM_SECONDS)
            return True

    def release(self, turn: UUID, worker: str) -> None:
        with self._lock:
            if self._holder(turn) == worker:
                del self._holders[turn]

    def _holder(self, turn: UUID) -> str | None:
        holder, until = self._holders.get(turn, (None, 0.0))
        return holder if until > time.monotonic() else None

    def publish_engine(self, worker: str, status: ModelStatus | None) -> None:
        with self._lock:
            if status is None:
                self._engines.pop(worker, None)
            else:
                self._engines[worker] = (time.monotonic(), status)

    async def engine_statuses(self) -> list[ModelStatus]:
        oldest = time.monotonic() - ENGINE_SILENT_SECONDS
        with self._lock:
            return [status for heard_at, status in self._engines.values() if heard_at >= oldest]

    def _expire(self) -> None:
        oldest = time.monotonic() - self._keep_seconds
        while self._logs and next(iter(self._logs.values())).touched_at < oldest:
            self._logs.popitem(last=False)
        for turn in [turn for turn, asked_at in self._cancelled.items() if asked_at < oldest]:
            del self._cancelled[turn]
