"""What every storage of a lower tier offers, and what it raises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from kvstore.tiers.chunk import Chunk, ChunkHeader

Tokens = npt.NDArray[np.int32]
MissingReason = Literal["absent", "truncated", "checksum", "foreign", "tokens", "unreadable"]


class ChunkMissing(Exception):
    """A chunk or a record is not there, in whatever sense. Who asked computes its content again.

    `reason` is for counters, `detail` for people:

    - absent: it was never written, or has been deleted.
    - truncated: it is shorter or longer than what was written.
    - checksum: its bytes are not those that were written.
    - foreign: it was written by another version, for another model or page shape, or under another name.
    - tokens: it holds the KV of other tokens than asked for.
    - unreadable: the storage did not hand it over (permissions, an I/O error, no connection, a timeout).
    """

    def __init__(self, reason: MissingReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: MissingReason = reason
        self.detail = detail


class StorageError(Exception):
    """Writing, deleting or listing has failed. The message says what to do about it."""


@dataclass(frozen=True)
class StoredChunk:
    """What a scan tells of a chunk.

    `bytes` is what it takes; `modified` is when it was written or last written again, in seconds since the epoch by the
    storage's own clock, which may be ahead of ours.
    """

    key: bytes
    format: str
    bytes: int
    modified: float


class ChunkReader(ABC):
    """An open chunk whose header has been verified. A context manager, for one thread at a time.

    `header` is what the chunk says of itself. A chunk that is deleted or replaced while it is open stays readable, or
    turns out to be missing; its layers never mix with those of another.
    """

    def __init__(self, header: ChunkHeader) -> None:
        self.header = header
        self.tokens: Tokens = header.tokens
        self.format: str = header.format
        self.layer_bytes: int = header.layer_bytes
        self.fidelity: int = header.fidelity

    def read_into(self, first_layer: int, out: torch.Tensor) -> None:
        """Read and verify the layers from `first_layer` on into `out`: uint8 `[n, layer_bytes]`, contiguous, on the
        CPU.

        Raises ChunkMissing; `out` may hold anything then. Raises ValueError for another kind of `out` or for
        layers that do not exist.
        """
        if out.dtype != torch.uint8 or out.dim() != 2 or not out.is_contiguous() or out.device.type != "cpu":
            raise ValueError(
                "layers are read into a contiguous uint8 tensor [layers, layer_bytes] on the CPU"
            )
        if first_layer < 0 or first_layer + len(out) > self.header.layers:
            end = first_layer + len(out)
            raise ValueError(f"layers {first_layer} to {end} of a chunk of {self.header.layers} layers")
        if out.shape[1] != self.layer_bytes:
            # The same format, but packed in another way than the reader's.
            detail = f"its layers have {self.layer_bytes:,} bytes, not {out.shape[1]:,}"
            raise ChunkMissing("foreign", detail)
        self._fill(first_layer, out)
        self.header.verify(first_layer, out)

    @abstractmethod
    def _fill(self, first_layer: int, out: torch.Tensor) -> None:
        """Get the bytes of layers. Raises ChunkMissing."""

    @abstractmethod
    def close(self) -> None:
        """Release what an open chunk holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Storage(Protocol):
    """Keeps chunks, and small named records, of one layout in one place.

    All methods block and are safe from any thread, and on disk and remotely also from any process. A storage has no
    policy: what is kept, and for how long, is up to who uses it.
    """

    @property
    def name(self) -> str:
        """The tier: "host", "disk" or "remote"."""

    def write(self, chunk: Chunk) -> int:
        """Store a chunk. Returns the bytes that it takes.

        A chunk with the same key and format that is there already stays, and counts as written now. Raises
        StorageError, and ValueError for a chunk of another layout.
        """

    def read(self, key: bytes, format: str, tokens: Tokens | None = None) -> ChunkReader:
        """Open a chunk and verify its header, also against `tokens` (int32) where given. Raises ChunkMissing."""

    def expect(self, key: bytes, format: str) -> None:
        """A hint that a chunk will be read soon. Never raises, and never waits for the bytes."""

    def delete(self, key: bytes, format: str) -> None:
        """Remove a chunk, if it is there. Raises StorageError."""

    def scan(self) -> Iterator[StoredChunk]:
        """All chunks, in no order, unverified. Skips what is no chunk. Raises StorageError when a remote store cannot
        be listed."""

    def sweep(self, older_than: float) -> int:
        """Remove temporary files older than that many seconds, which dead writers left. Returns bytes. Never raises."""

    def write_record(self, name: str, data: bytes) -> None:
        """Store a small blob under a name of 1 to 64 hex digits, in place of an older one, all or nothing. Raises
        StorageError, and ValueError for another name or more than `MAX_RECORD_BYTES`."""

    def read_record(self, name: str) -> bytes:
        """The blob of that name, verified. Raises ChunkMissing."""

    def delete_record(self, name: str) -> None:
        """Remove a record, if it is there. Raises StorageError."""

    def records(self) -> Iterator[tuple[str, float]]:
        """Names of all records and when each was written (seconds since the epoch). Raises as `scan` does."""

    def close(self) -> None:
        """Release everything. Called last."""
