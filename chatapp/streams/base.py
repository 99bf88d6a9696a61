"""What every store of turn streams can do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import UUID

from django.conf import settings

from chatapp.protocol import ModelStatus

# A worker says that it lives this often; one that was silent for three times as long does not count.
ENGINE_HEARTBEAT_SECONDS: float = settings.WORKER_HEARTBEAT_SECONDS
ENGINE_SILENT_SECONDS = 3 * ENGINE_HEARTBEAT_SECONDS

# A worker renews its claim on a turn with each heartbeat; without, the turn is free again after this time. A turn in
# the queue is taken for lost, and enqueued again, after the second.
CLAIM_SECONDS = ENGINE_SILENT_SECONDS
QUEUED_SECONDS = 60.0


@dataclass(frozen=True)
class Entry:
    """One event of the stream, as clients get it, and the tokens behind its text, which they do not get."""

    event: dict[str, Any]
    tokens: tuple[int, ...] = ()

    @property
    def sequence_number(self) -> int:
        number: int = self.event["sequence_number"]
        return number

    @property
    def is_last(self) -> bool:
        return bool(self.event["type"] == "response.done")

    def to_json(self) -> str:
        return json.dumps([self.event, self.tokens], separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Entry:
        event, tokens = json.loads(text)
        return cls(event, tuple(tokens))


class StaleWriter(Exception):
    """Another worker has written these numbers: the turn is no longer this writer's."""


class TurnStreams(Protocol):
    """A log for each turn. Numbers start at 1 and have no gaps; a log disappears some time after its last append."""

    def append(self, turn: UUID, entries: Sequence[Entry]) -> bool:
        """Append entries whose numbers continue the log, all or nothing.

        Returns:
            Whether somebody asked to cancel the turn: looked up in the same step, so that a stop works within a token.

        Raises:
            StaleWriter: the log already has an entry of the first number or a later one.
        """

    def read(self, turn: UUID, after: int = 0) -> list[Entry]:
        """The entries with a number greater than ``after``; none where the log is unknown."""

    async def read_async(self, turn: UUID, after: int = 0) -> list[Entry]: ...

    def discard(self, turn: UUID) -> None:
        """Forget the log and its cancel request: the answer, or its conversation, was deleted."""

    def request_cancel(self, turn: UUID) -> None: ...

    def cancel_requested(self, turn: UUID) -> bool: ...

    def mark_queued(self, turn: UUID) -> bool:
        """Note that the turn is in the queue. False where it already is, or a worker holds it."""

    def claim(self, turn: UUID, worker: str) -> bool:
        """Take or renew the turn for a worker. False where another one holds it."""

    def release(self, turn: UUID, worker: str) -> None:
        """Give the turn back, if this worker holds it."""

    def publish_engine(self, worker: str, status: ModelStatus | None) -> None:
        """Say where the worker's engine is; None: the worker is gone."""

    async def engine_statuses(self) -> list[ModelStatus]:
        """What workers that were heard of lately say."""
