"""The storages of the lower tiers: host memory, a disk folder, a remote store.

What lives here: how a page of KV becomes a chunk of bytes and back, and the places where chunks are kept. What does
not: which pages are kept, evicted or expired, formats, the threads that call these blocking storages, and the device.
"""

from kvstore.tiers.chunk import MAX_RECORD_BYTES, Chunk, ChunkHeader, ChunkLayout
from kvstore.tiers.disk import DiskStorage
from kvstore.tiers.host import HostStorage
from kvstore.tiers.limits import CircuitBreaker
from kvstore.tiers.remote import RemoteStorage
from kvstore.tiers.storage import (
    ChunkMissing,
    ChunkReader,
    MissingReason,
    Storage,
    StorageError,
    StoredChunk,
)

__all__ = [
    "MAX_RECORD_BYTES",
    "Chunk",
    "ChunkHeader",
    "ChunkLayout",
    "ChunkMissing",
    "ChunkReader",
    "CircuitBreaker",
    "DiskStorage",
    "HostStorage",
    "MissingReason",
    "RemoteStorage",
    "Storage",
    "StorageError",
    "StoredChunk",
]
