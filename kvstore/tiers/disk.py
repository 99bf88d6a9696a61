"""Chunks in a folder of the local disk."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

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
from kvstore.tiers.storage import ChunkMissing, ChunkReader, StorageError, StoredChunk, Tokens

HEX_DIGITS = "0123456789abcdef"
RECORDS = "records"
# KV tells what was said to who can read it.
FOLDER_MODE, FILE_MODE = 0o700, 0o600
# Not to wait for whoever writes to a pipe that lies where a file should.
READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class DiskStorage:
    """Keeps chunks as files in a folder, where they survive the process. Any number of processes may share it.

    Each layout has a folder of its own below `root`, so chunks of another model or page size are not even seen. Files
    are written under a temporary name and renamed when complete: a killed process loses what it was writing and
    nothing else. Only their owner can read them.

    A power cut is another matter: without `fsync` it can lose or truncate the last chunks that were written, which
    readers find by size and checksum. With it each chunk is on the disk when `write` returns, which is slower.

    The folder is made by the first write. One that cannot be read or written has no chunks, and refuses new ones.
    """

    name = "disk"

    def __init__(self, root: Path, layout: ChunkLayout, *, fsync: bool = False) -> None:
        self._layout = layout
        self._fsync = fsync
        self._root = root
        self._folder = os.path.join(root, layout.digest.hex())

    def write(self, chunk: Chunk) -> int:
        chunk.check(self._layout)
        path = self._path(chunk.key, chunk.format)
        if not self._touch(chunk):
            self._replace(path, encode_chunk(chunk, self._layout))
        return self._layout.chunk_bytes(chunk.payload.shape[1])

    def read(self, key: bytes, format: str, tokens: Tokens | None = None) -> DiskReader:
        descriptor, size = _open(self._path(key, format))
        try:
            header = parse_header(_read(descriptor, self._layout.header_bytes), self._layout)
            header.match(key, format, tokens)
            whole = self._layout.chunk_bytes(header.layer_bytes)
            if size != whole:
                raise ChunkMissing("truncated", f"{key.hex()} in {format} has {size:,} bytes, not {whole:,}")
        except BaseException:
            os.close(descriptor)
            raise
        return DiskReader(header, descriptor, self._layout.header_bytes)

    def expect(self, key: bytes, format: str) -> None:
        """Let the system begin to read the file into its page cache."""
        if not hasattr(os, "posix_fadvise"):
            return
        with suppress(ChunkMissing, OSError):
            descriptor, _ = _open(self._path(key, format))
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)

    def delete(self, key: bytes, format: str) -> None:
        _delete(self._path(key, format))

    def scan(self) -> Iterator[StoredChunk]:
        for folder in self._chunk_folders():
            for name, status in _files(folder):
                chunk = parse_chunk_name(name)
                if chunk is not None:
                    yield StoredChunk(*chunk, bytes=status.st_size, modified=status.st_mtime)

    def sweep(self, older_than: float) -> int:
        swept = 0
        before = time.time() - older_than
        for folder in (*self._chunk_folders(), self._path_of_records()):
            for name, status in _files(folder):
                if is_temporary_name(name) and status.st_mtime < before:
                    with suppress(OSError):
                        os.unlink(os.path.join(folder, name))
                        swept += status.st_size
        return swept

    def write_record(self, name: str, data: bytes) -> None:
        pieces = encode_record(name, data)
        self._replace(os.path.join(self._path_of_records(), name), pieces)

    def read_record(self, name: str) -> bytes:
        descriptor, size = _open(os.path.join(self._path_of_records(), name))
        try:
            if size > RECORD_HEADER_BYTES + MAX_RECORD_BYTES:
                raise ChunkMissing("foreign", f"record {name} has {size:,} bytes, more than is allowed")
            return parse_record(name, _read(descriptor, size))
        finally:
            os.close(descriptor)

    def delete_record(self, name: str) -> None:
        _delete(os.path.join(self._path_of_records(), name))

    def records(self) -> Iterator[tuple[str, float]]:
        for name, status in _files(self._path_of_records()):
            if is_record_name(name):
                yield name, status.st_mtime

    def close(self) -> None:
        """Nothing is open between calls."""

    def _path(self, key: bytes, format: str) -> str:
        return os.path.join(self._folder, chunk_path(key, format))

    def _path_of_records(self) -> str:
        return os.path.join(self._folder, RECORDS)

    def _chunk_folders(self) -> Iterator[str]:
        for first in HEX_DIGITS:
            for second in HEX_DIGITS:
                yield os.path.join(self._folder, first, second)

    def _touch(self, chunk: Chunk) -> bool:
        """Whether the chunk is there; it counts as written now, then."""
        try:
            with self.read(chunk.key, chunk.format, chunk.tokens) as reader:
                reader.touch()
        except ChunkMissing:
            return False
        return True

    def _replace(self, path: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Write a file under another name and rename it, so that `path` is never incomplete. Raises StorageError."""
        folder = os.path.dirname(path)
        temporary = os.path.join(folder, temporary_name())
        try:
            descriptor = self._create(temporary)
            try:
                self._fill(descriptor, pieces)
                os.replace(temporary, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
            if self._fsync:
                _sync_folder(folder)
        except OSError as error:
            raise _storage_error("write", path, error) from error

    def _create(self, path: str) -> int:
        try:
            return os.open(path, WRITE_FLAGS, FILE_MODE)
        except FileNotFoundError:
            self._make_folder(os.path.dirname(path))
            return os.open(path, WRITE_FLAGS, FILE_MODE)

    def _make_folder(self, folder: str) -> None:
        """Make a folder below the root, and those above it."""
        self._root.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        path = self._root
        for part in Path(folder).relative_to(self._root).parts:
            parent, path = path, path / part
            path.mkdir(FOLDER_MODE, exist_ok=True)
            if self._fsync:
                _sync_folder(str(parent))

    def _fill(self, descriptor: int, pieces: Sequence[bytes | memoryview]) -> None:
        try:
            remaining = [memoryview(piece) for piece in pieces]
            while remaining:
                written = os.writev(descriptor, remaining)
                while remaining and written >= len(remaining[0]):
                    written -= len(remaining.pop(0))
                if written:
                    remaining[0] = remaining[0][written:]
            if self._fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


class DiskReader(ChunkReader):
    """An open chunk file. It stays readable when it is deleted or replaced meanwhile."""

    def __init__(self, header: ChunkHeader, descriptor: int, header_bytes: int) -> None:
        super().__init__(header)
        self._descriptor: int | None = descriptor
        self._header_bytes = header_bytes

    def touch(self) -> None:
        """Let the file count as written now, where that is allowed."""
        with suppress(OSError):
            os.utime(self._open_descriptor)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    @property
    def _open_descriptor(self) -> int:
        assert self._descriptor is not None, "the reader is closed"
        return self._descriptor

    def _fill(self, first_layer: int, out: torch.Tensor) -> None:
        remaining = raw_bytes(out)
        offset = self._header_bytes + first_layer * self.layer_bytes
        while remaining:
            try:
                count = os.preadv(self._open_descriptor, [remaining], offset)
            except OSError as error:
                raise ChunkMissing("unreadable", f"{self.header.key.hex()}: {error}") from error
            if count == 0:
                raise ChunkMissing("truncated", f"{self.header.key.hex()} ends at byte {offset:,}")
            remaining, offset = remaining[count:], offset + count


def _open(path: str) -> tuple[int, int]:
    """Open a regular file to read. Returns descriptor and size. Raises ChunkMissing."""
    try:
        descriptor = os.open(path, READ_FLAGS)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ChunkMissing("absent", path) from error
    except OSError as error:
        raise ChunkMissing("unreadable", f"{path}: {error}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise ChunkMissing("unreadable", f"{path} is not a file")
    return descriptor, status.st_size


def _read(descriptor: int, size: int) -> bytes:
    """The first `size` bytes of a file, fewer at its end. Raises ChunkMissing."""
    try:
        return os.pread(descriptor, size, 0)
    except OSError as error:
        raise ChunkMissing("unreadable", str(error)) from error


def _delete(path: str) -> None:
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise _storage_error("delete", path, error) from error


def _files(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Names and states of the regular files in a folder, which may be missing or change meanwhile."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.is_file(follow_symlinks=False):
                    yield entry.name, entry.stat(follow_symlinks=False)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _storage_error(action: str, path: str, error: OSError) -> StorageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "free some space or lower the tier's budget"
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        advice = "let this process write there or choose another folder"
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        advice = "allow more open files (ulimit -n)"
    else:
        advice = "check the folder and its disk"
    return StorageError(f"cannot {action} {path}: {error.strerror or error}; {advice}")
