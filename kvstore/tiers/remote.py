"""Chunks in a remote store: whatever fsspec has a file system for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

import fsspec
import fsspec.utils
import torch

from kvstore.tiers.chunk import (
    MAX_RECORD_BYTES,
    RECORD_HEADER_BYTES,
    Chunk,
    ChunkHeader,
    ChunkLayout,
    chunk_path,
    encode_chunk,
    encode_record,
    is_record_name,
    is_temporary_name,
    parse_chunk_name,
    parse_header,
    parse_record,
    raw_bytes,
    temporary_name,
)
from kvstore.tiers.limits import CircuitBreaker, T, TimeLimit, Unreachable, described
from kvstore.tiers.read_ahead import ReadAhead
from kvstore.tiers.storage import ChunkMissing, ChunkReader, StorageError, StoredChunk, Tokens

RECORDS = "records"
# Protocols whose objects appear whole or not at all. With others a file is written under another name and renamed.
ATOMIC_PROTOCOLS = frozenset(
    ("abfs", "abfss", "adl", "az", "gcs", "gs", "memory", "oci", "oss", "r2", "s3", "s3a")
)
# Object stores have no way to touch an object, so one that is older than this (seconds) is written again instead.
REFRESH_AFTER = 24 * 3600.0
THREADS = 8
READ_AHEAD_BYTES = 64 * 2**20


class FileSystem(Protocol):
    """What is used of fsspec's file systems."""

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes: ...

    def pipe_file(self, path: str, value: bytes) -> None: ...

    def mv(self, path1: str, path2: str) -> None: ...

    def rm_file(self, path: str) -> None: ...

    def makedirs(self, path: str, exist_ok: bool = False) -> None: ...

    def info(self, path: str) -> dict[str, Any]: ...

    def ls(self, path: str, detail: bool = True) -> list[dict[str, Any]]: ...

    def invalidate_cache(self) -> None: ...


@dataclass(frozen=True)
class _File:
    """What the remote store says of a file or folder; `path` is the one below the layout's folder."""

    path: str
    size: int
    modified: float
    is_folder: bool

    @classmethod
    def of(cls, info: Mapping[str, Any], folder: str) -> _File:
        name = str(info["name"]).rstrip("/").rpartition("/")[2]
        return cls(
            path=f"{folder}/{name}" if folder else name,
            size=int(info.get("size") or 0),
            modified=_modified(info),
            is_folder=info.get("type") == "directory",
        )

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def is_chunk_folder(self) -> bool:
        return self.is_folder and len(self.name) == 1


class RemoteStorage:
    """Keeps chunks as objects below an fsspec URL, with the same names and bytes as on a disk.

    However the remote store fails, callers wait for `timeout` seconds a call at most, and not at all while the circuit
    breaker refuses calls. A write or deletion that was given up may still happen later; chunks never change, so that
    does no harm.

    Who else may read the objects is a matter of the URL and its store. Credentials come from where the file system's
    package looks for them.
    """

    name = "remote"

    def __init__(
        self,
        url: str,
        layout: ChunkLayout,
        timeout: float = 5.0,
        *,
        breaker: CircuitBreaker | None = None,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
    ) -> None:
        """Connects with the first call. Raises ValueError for a URL of which fsspec has no file system."""
        protocol = fsspec.utils.get_protocol(url)
        try:
            fsspec.get_filesystem_class(protocol)
        except (ValueError, ImportError) as error:
            raise ValueError(f"no file system for the remote tier's URL {url!r}: {error}") from error
        self._url = url
        self._layout = layout
        self._atomic = protocol in ATOMIC_PROTOCOLS
        # fsspec's files in memory have one position for all who read them.
        self._turn: AbstractContextManager[Any] = threading.Lock() if protocol == "memory" else nullcontext()
        self._breaker = breaker or CircuitBreaker()
        self._time_limit = TimeLimit(timeout, THREADS)
        self._ahead = ReadAhead(read_ahead_bytes)
        self._connecting = threading.Lock()
        self._connection: tuple[FileSystem, str] | None = None

    def write(self, chunk: Chunk) -> int:
        chunk.check(self._layout)
        path = chunk_path(chunk.key, chunk.format)
        size = self._layout.chunk_bytes(chunk.payload.shape[1])
        if not self._is_fresh(path, size):
            self._ahead.remove(path)
            self._replace(path, b"".join(encode_chunk(chunk, self._layout)))
        return size

    def read(self, key: bytes, format: str, tokens: Tokens | None = None) -> RemoteReader:
        path = chunk_path(key, format)
        ahead = self._ahead.get(path)
        if ahead is None:
            header = parse_header(self._get(path, 0, self._layout.header_bytes), self._layout)
        else:
            header = ahead.header
        header.match(key, format, tokens)
        return RemoteReader(self, path, header)

    def expect(self, key: bytes, format: str) -> None:
        """Nothing is done: reading ahead takes care of it."""

    def delete(self, key: bytes, format: str) -> None:
        path = chunk_path(key, format)
        self._ahead.remove(path)
        self._delete(path)

    def scan(self) -> Iterator[StoredChunk]:
        for file in self._chunk_files():
            chunk = parse_chunk_name(file.name)
            if chunk is not None:
                yield StoredChunk(*chunk, bytes=file.size, modified=file.modified)

    def sweep(self, older_than: float) -> int:
        if self._atomic:
            return 0
        swept = 0
        before = time.time() - older_than
        with suppress(StorageError):
            for file in (*self._chunk_files(), *self._list(RECORDS)):
                if is_temporary_name(file.name) and file.modified < before:
                    self._delete(file.path)
                    swept += file.size
        return swept

    def write_record(self, name: str, data: bytes) -> None:
        self._replace(f"{RECORDS}/{name}", b"".join(encode_record(name, data)))

    def read_record(self, name: str) -> bytes:
        return parse_record(name, self._get(f"{RECORDS}/{name}", 0, RECORD_HEADER_BYTES + MAX_RECORD_BYTES))

    def delete_record(self, name: str) -> None:
        self._delete(f"{RECORDS}/{name}")

    def records(self) -> Iterator[tuple[str, float]]:
        for file in self._list(RECORDS):
            if is_record_name(file.name):
                yield file.name, file.modified

    def close(self) -> None:
        """Calls that hang are left alone."""
        self._ahead.clear()

    def fetch_layers(self, path: str, header: ChunkHeader, first_layer: int, count: int) -> memoryview:
        """The bytes of layers of a chunk, and of those behind them for later calls. Raises ChunkMissing."""
        wanted = count * header.layer_bytes
        ahead = self._ahead.get(path)
        if ahead is None or ahead.first_layer > first_layer:
            offset = self._layout.header_bytes + first_layer * header.layer_bytes
            rest = (header.layers - first_layer) * header.layer_bytes
            size = rest if self._ahead.has_room(rest) else wanted
            data = self._get(path, offset, offset + size)
            if len(data) < size:
                raise ChunkMissing("truncated", f"{path} ends at byte {offset + len(data):,}")
            if size > wanted:
                self._ahead.put(path, header, first_layer, data)
            return memoryview(data)[:wanted]
        if first_layer + count == header.layers:
            self._ahead.remove(path)
        start = (first_layer - ahead.first_layer) * header.layer_bytes
        return memoryview(ahead.data)[start : start + wanted]

    # Calls of the file system. Paths are below the layout's folder.

    def _get(self, path: str, start: int, end: int) -> bytes:
        """Bytes of a file, fewer than asked for at its end. Raises ChunkMissing."""
        try:
            return self._call(lambda files, root: files.cat_file(f"{root}/{path}", start=start, end=end))
        except FileNotFoundError as error:
            raise ChunkMissing("absent", path) from error
        except Unreachable as error:
            raise ChunkMissing("unreadable", f"{path}: {error}") from error

    def _replace(self, path: str, data: bytes) -> None:
        """Write a file, whole or not at all. Raises StorageError."""
        folder = path.rpartition("/")[0]

        def write(files: FileSystem, root: str) -> None:
            if self._atomic:
                files.pipe_file(f"{root}/{path}", data)
                return
            temporary = f"{root}/{folder}/{temporary_name()}"
            files.makedirs(f"{root}/{folder}", exist_ok=True)
            try:
                files.pipe_file(temporary, data)
                files.mv(temporary, f"{root}/{path}")
            except BaseException:
                with suppress(Exception):
                    files.rm_file(temporary)
                raise

        try:
            self._call(write)
        except (FileNotFoundError, Unreachable) as error:
            raise self._storage_error("write", path, error) from error

    def _delete(self, path: str) -> None:
        try:
            self._call(lambda files, root: files.rm_file(f"{root}/{path}"))
        except FileNotFoundError:
            pass
        except Unreachable as error:
            raise self._storage_error("delete", path, error) from error

    def _is_fresh(self, path: str, size: int) -> bool:
        """Whether a file of that size is there that need not be written again yet. Raises StorageError."""

        def look(files: FileSystem, root: str) -> _File:
            files.invalidate_cache()
            return _File.of(files.info(f"{root}/{path}"), folder="")

        try:
            file = self._call(look)
        except FileNotFoundError:
            return False
        except Unreachable as error:
            raise self._storage_error("write", path, error) from error
        return file.size == size and time.time() - file.modified < REFRESH_AFTER

    def _list(self, folder: str) -> list[_File]:
        """What is in a folder, and in it alone. Raises StorageError."""

        def look(files: FileSystem, root: str) -> list[dict[str, Any]]:
            files.invalidate_cache()
            return files.ls(f"{root}/{folder}".rstrip("/"), detail=True)

        try:
            return [_File.of(info, folder) for info in self._call(look)]
        except FileNotFoundError:
            return []
        except Unreachable as error:
            raise self._storage_error("list", folder, error) from error

    def _chunk_files(self) -> Iterator[_File]:
        """The files in the folders where chunks are."""
        for first in self._list(""):
            if first.is_chunk_folder:
                for second in self._list(first.path):
                    if second.is_chunk_folder:
                        yield from self._list(second.path)

    def _call(self, work: Callable[[FileSystem, str], T]) -> T:
        """What `work` returns for the file system and the layout's folder there. Raises FileNotFoundError, and
        Unreachable for whatever else goes wrong."""
        is_try = self._breaker.admit()
        try:
            result = self._time_limit.run(lambda: self._work(work))
        except FileNotFoundError:
            self._breaker.succeeded()
            raise
        except Exception as error:
            if is_try:
                self._connection = None  # some file systems never recover from a lost connection
            self._breaker.failed(error, was_try=is_try)
            raise Unreachable(described(error)) from error
        self._breaker.succeeded()
        return result

    def _work(self, work: Callable[[FileSystem, str], T]) -> T:
        with self._connecting:
            if self._connection is None:
                files, root = fsspec.url_to_fs(self._url, skip_instance_cache=True)
                self._connection = files, f"{root.rstrip('/')}/{self._layout.digest.hex()}"
            files, root = self._connection
        with self._turn:
            return work(files, root)

    def _storage_error(self, action: str, path: str, error: Exception) -> StorageError:
        place = f"{path} at {self._url}" if path else self._url
        advice = "check the URL, the credentials and the network"
        return StorageError(f"cannot {action} {place}: {described(error)}; {advice}")


class RemoteReader(ChunkReader):
    """An open remote chunk. Nothing is held for it, and each read may be a request."""

    def __init__(self, storage: RemoteStorage, path: str, header: ChunkHeader) -> None:
        super().__init__(header)
        self._storage = storage
        self._path = path

    def _fill(self, first_layer: int, out: torch.Tensor) -> None:
        raw_bytes(out)[:] = self._storage.fetch_layers(self._path, self.header, first_layer, len(out))

    def close(self) -> None:
        """Nothing to release."""


def _modified(info: Mapping[str, Any]) -> float:
    """When a file was written, in seconds since the epoch: file systems say it in many ways. Now, when they do not."""
    for name in ("mtime", "LastModified", "last_modified", "updated", "modified", "created"):
        value = info.get(name)
        if isinstance(value, str):
            with suppress(ValueError):
                value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return time.time()
