"""Remote stores that are down, slow, flaky or damaged."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.tiers import Chunk, ChunkMissing, CircuitBreaker, DiskStorage, RemoteStorage, StorageError
from kvstore.tiers.limits import Unreachable
from kvstore.tiers.remote import REFRESH_AFTER, THREADS
from tests.kvstore.tiers.chunks import LAYOUT, make_chunk, read_payload

CALLS = ("cat_file", "pipe_file", "info", "ls", "rm_file", "mv", "makedirs")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def never_open() -> CircuitBreaker:
    return CircuitBreaker(failures_to_open=10**9)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "remote"


@pytest.fixture
def storage(folder: Path) -> RemoteStorage:
    return RemoteStorage(f"file://{folder}", LAYOUT, breaker=never_open())


@pytest.fixture
def memory_url() -> str:
    return f"memory://{secrets.token_hex(8)}"


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def reason_of(call: Callable[[], object]) -> str:
    with pytest.raises(ChunkMissing) as missing:
        call()
    return missing.value.reason


def break_calls(
    patch: pytest.MonkeyPatch, instead: Callable[..., Any], names: tuple[str, ...] = CALLS
) -> None:
    for name in names:
        patch.setattr(LocalFileSystem, name, instead)


def down(*args: object, **kwargs: object) -> None:
    raise ConnectionError("connection refused")


def counted(patch: pytest.MonkeyPatch, name: str, of: type = LocalFileSystem) -> list[tuple[Any, ...]]:
    """The arguments of all calls of a file system's method from now on."""
    calls: list[tuple[Any, ...]] = []
    original = getattr(of, name)

    def count(self: object, *args: Any, **kwargs: Any) -> object:
        calls.append((*args, *kwargs.values()))
        return original(self, *args, **kwargs)

    patch.setattr(of, name, count)
    return calls


# What is stored.


def test_files_are_those_of_a_disk(storage: RemoteStorage, folder: Path) -> None:
    chunk, other = make_chunk(1), make_chunk(2)
    disk = DiskStorage(folder, LAYOUT)
    storage.write(chunk)
    storage.write_record("ab", b"data")
    disk.write(other)
    assert torch.equal(read_payload(disk, chunk), chunk.payload)
    assert torch.equal(read_payload(storage, other), other.payload)
    assert disk.read_record("ab") == b"data"
    assert {found.key for found in storage.scan()} == {chunk.key, other.key}


@pytest.mark.parametrize("url", ["nosuchprotocol://bucket", "nosuchprotocol::memory://x"])
def test_an_impossible_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="nosuchprotocol"):
        RemoteStorage(url, LAYOUT)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Chunk, bytes]:
    """A URL, the one file there, its chunk, and what the file holds when it is whole."""
    folder = tmp_path_factory.mktemp("damaged")
    chunk = make_chunk(1, layer_bytes=40)
    RemoteStorage(f"file://{folder}", LAYOUT).write(chunk)
    (path,) = files_in(folder)
    return f"file://{folder}", path, chunk, path.read_bytes()


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_chunk_is_missing(damaged: tuple[str, Path, Chunk, bytes], data: st.DataObject) -> None:
    url, path, chunk, whole = damaged
    content = bytearray(whole)
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans(), label="cut"):
        del content[place:]
    else:
        content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    storage = RemoteStorage(url, LAYOUT, read_ahead_bytes=data.draw(st.sampled_from([0, 2**20])))
    with pytest.raises(ChunkMissing):
        read_payload(storage, chunk)


def test_a_damaged_chunk_that_is_replaced_can_be_read(storage: RemoteStorage, folder: Path) -> None:
    chunk = make_chunk(1)
    storage.write(chunk)
    (path,) = files_in(folder)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert reason_of(lambda: read_payload(storage, chunk)) == "checksum"
    storage.delete(chunk.key, chunk.format)
    storage.write(chunk)
    assert torch.equal(read_payload(storage, chunk), chunk.payload)


def test_what_was_fetched_ahead_of_a_damaged_chunk_is_dropped_when_it_is_written_again(
    storage: RemoteStorage, folder: Path
) -> None:
    chunk = make_chunk(1)
    storage.write(chunk)
    (path,) = files_in(folder)
    content = bytearray(path.read_bytes())
    content[LAYOUT.header_bytes + chunk.payload.shape[1]] ^= 1  # in the second layer
    path.write_bytes(content)
    os.utime(path, (1000, 1000))
    assert reason_of(lambda: read_payload(storage, chunk, layers_at_a_time=1)) == "checksum"
    storage.write(chunk)
    assert torch.equal(read_payload(storage, chunk, layers_at_a_time=1), chunk.payload)


def test_old_objects_are_written_again(
    storage: RemoteStorage, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = make_chunk(1)
    storage.write(chunk)
    first = next(storage.scan()).modified
    writes = counted(monkeypatch, "pipe_file")
    storage.write(chunk)
    assert not writes
    monkeypatch.setattr(time, "time", lambda: first + REFRESH_AFTER + 1)
    storage.write(chunk)
    assert len(writes) == 1


def test_a_clock_that_went_back_does_no_harm(storage: RemoteStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = make_chunk(1)
    storage.write(chunk)
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    storage.write(chunk)
    assert storage.sweep(0) == 0
    assert torch.equal(read_payload(storage, chunk), chunk.payload)


@pytest.mark.parametrize(
    ("told", "modified"),
    [
        ({"mtime": 5}, 5.0),
        ({"mtime": 5.5}, 5.5),
        ({"LastModified": datetime(2026, 1, 1, tzinfo=UTC)}, 1767225600.0),
        ({"LastModified": datetime(2026, 1, 1)}, 1767225600.0),
        ({"updated": "2026-01-01T00:00:00Z"}, 1767225600.0),
        ({"updated": "yesterday", "created": 7}, 7.0),
        ({}, 1234.0),
    ],
)
def test_file_systems_tell_times_in_many_ways(
    memory_url: str, monkeypatch: pytest.MonkeyPatch, told: dict[str, object], modified: float
) -> None:
    storage = RemoteStorage(memory_url, LAYOUT)
    storage.write_record("ab", b"data")
    listing = MemoryFileSystem.ls

    def ls(self: MemoryFileSystem, path: str, detail: bool = True) -> list[dict[str, object]]:
        return [
            {**{name: info[name] for name in ("name", "size", "type")}, **told}
            for info in listing(self, path, detail=True)
        ]

    monkeypatch.setattr(MemoryFileSystem, "ls", ls)
    monkeypatch.setattr(time, "time", lambda: 1234.0)
    assert list(storage.records()) == [("ab", modified)]


def test_leftovers_are_swept_when_old(
    storage: RemoteStorage, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = make_chunk(1)
    storage.write(chunk)
    storage.write_record("ab", b"data")
    complete = files_in(folder)
    for file in complete:
        file.with_name(".1-0123456789abcdef.tmp").write_bytes(b"abc")
    assert storage.sweep(3600) == 0
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 7200)
    assert storage.sweep(3600) == 6
    assert files_in(folder) == complete


@pytest.mark.parametrize("broken", ["pipe_file", "mv"])
def test_a_failed_write_leaves_nothing_behind(
    storage: RemoteStorage, folder: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    original = LocalFileSystem.pipe_file

    def half(self: LocalFileSystem, path: str, value: bytes, **kwargs: object) -> None:
        original(self, path, value[: len(value) // 2])
        raise OSError("connection lost")

    monkeypatch.setattr(LocalFileSystem, broken, half if broken == "pipe_file" else down)
    with pytest.raises(StorageError, match="check the URL"):
        storage.write(make_chunk(1))
    assert files_in(folder) == []


# Requests.


def test_layers_to_come_are_fetched_with_the_first(
    storage: RemoteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [make_chunk(number) for number in range(4)]
    for chunk in chunks:
        storage.write(chunk)
    requests = counted(monkeypatch, "cat_file")
    for first in range(LAYOUT.layers):
        for chunk in chunks:
            out = torch.zeros(1, chunk.payload.shape[1], dtype=torch.uint8)
            with storage.read(chunk.key, chunk.format, chunk.tokens) as reader:
                reader.read_into(first, out)
            assert torch.equal(out[0], chunk.payload[first])
    assert len(requests) == 2 * len(chunks)  # header and payload


def test_what_is_fetched_ahead_has_a_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [make_chunk(number) for number in range(4)]
    room = 2 * chunks[0].payload.nbytes
    storage = RemoteStorage(f"file://{folder}", LAYOUT, read_ahead_bytes=room)
    for chunk in chunks:
        storage.write(chunk)
    requests = counted(monkeypatch, "cat_file")
    for chunk in chunks:
        with storage.read(chunk.key, chunk.format, chunk.tokens) as reader:
            reader.read_into(0, torch.zeros(1, chunk.payload.shape[1], dtype=torch.uint8))
    sizes = [end - start for _, start, end in requests]
    layer = chunks[0].payload.shape[1]
    assert sizes[1::2] == [5 * layer, 5 * layer, layer, layer]
    # What nobody came for makes room after a while.
    later = time.monotonic() + 3600
    monkeypatch.setattr(time, "monotonic", lambda: later)
    with storage.read(chunks[3].key, "int8", chunks[3].tokens) as reader:
        reader.read_into(0, torch.zeros(1, layer, dtype=torch.uint8))
    assert requests[-1][2] - requests[-1][1] == 5 * layer


def test_what_was_read_to_the_end_makes_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [make_chunk(number) for number in range(3)]
    storage = RemoteStorage(f"file://{folder}", LAYOUT, read_ahead_bytes=chunks[0].payload.nbytes)
    requests = counted(monkeypatch, "cat_file")
    for chunk in chunks:
        storage.write(chunk)
        assert torch.equal(read_payload(storage, chunk, layers_at_a_time=1), chunk.payload)
    assert len(requests) == 2 * len(chunks)


def test_what_was_fetched_ahead_is_dropped_with_the_chunk(storage: RemoteStorage) -> None:
    chunk = make_chunk(1)
    storage.write(chunk)
    with storage.read(chunk.key, chunk.format, chunk.tokens) as reader:
        reader.read_into(0, torch.zeros(1, chunk.payload.shape[1], dtype=torch.uint8))
    storage.delete(chunk.key, chunk.format)
    assert reason_of(lambda: storage.read(chunk.key, chunk.format, chunk.tokens)) == "absent"


# Trouble.


def test_a_store_that_is_down(storage: RemoteStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = make_chunk(1)
    storage.write(chunk)
    storage.write_record("ab", b"data")
    with monkeypatch.context() as patch:
        break_calls(patch, down)
        assert reason_of(lambda: read_payload(storage, chunk)) == "unreadable"
        assert reason_of(lambda: storage.read_record("ab")) == "unreadable"
        for call in (
            lambda: storage.write(chunk),
            lambda: storage.delete(chunk.key, chunk.format),
            lambda: storage.write_record("ab", b"new"),
            lambda: storage.delete_record("ab"),
            lambda: list(storage.scan()),
            lambda: list(storage.records()),
        ):
            with pytest.raises(StorageError, match="connection refused"):
                call()
        assert storage.sweep(0) == 0
    assert torch.equal(read_payload(storage, chunk), chunk.payload)
    assert storage.read_record("ab") == b"data"


def test_a_store_that_goes_down_while_a_chunk_is_open(
    storage: RemoteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = make_chunk(1)
    storage.write(chunk)
    with storage.read(chunk.key, chunk.format, chunk.tokens) as reader:
        break_calls(monkeypatch, down)
        assert reason_of(lambda: reader.read_into(0, torch.zeros_like(chunk.payload))) == "unreadable"


@pytest.mark.parametrize(
    "error", [ValueError("x"), RuntimeError("x"), TimeoutError("x"), KeyError("x"), SystemExit(1)]
)
def test_whatever_a_file_system_raises_is_unreadable(
    storage: RemoteStorage, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    storage.write(make_chunk(1))
    break_calls(monkeypatch, fail)
    assert reason_of(lambda: read_payload(storage, make_chunk(1))) == "unreadable"
    with pytest.raises(StorageError, match=type(error).__name__):
        storage.write(make_chunk(2))


def test_a_url_that_cannot_be_connected_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = RemoteStorage(f"file://{tmp_path}", LAYOUT, breaker=never_open())
    with monkeypatch.context() as patch:
        patch.setattr("fsspec.url_to_fs", down)
        assert reason_of(lambda: read_payload(storage, make_chunk(1))) == "unreadable"
        with pytest.raises(StorageError, match="connection refused"):
            storage.write(make_chunk(1))
    storage.write(make_chunk(1))
    assert torch.equal(read_payload(storage, make_chunk(1)), make_chunk(1).payload)


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Local files whose calls do not return before the event is set."""
    released = threading.Event()
    for name in CALLS:
        original = getattr(LocalFileSystem, name)

        def wait(self: object, *args: object, original: Any = original, **kwargs: object) -> object:
            released.wait()
            return original(self, *args, **kwargs)

        monkeypatch.setattr(LocalFileSystem, name, wait)
    yield released
    released.set()


def is_answered(call: Callable[[], object]) -> bool:
    try:
        call()
    except (ChunkMissing, StorageError):
        return False
    return True


def hanging_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvstore-remote"]


def test_calls_that_hang_hold_nobody_up(folder: Path, hang: threading.Event) -> None:
    storage = RemoteStorage(f"file://{folder}", LAYOUT, timeout=0.02, breaker=never_open())
    chunk = make_chunk(1)
    for _ in range(THREADS + 3):
        assert reason_of(lambda: read_payload(storage, chunk)) == "unreadable"
        with pytest.raises(StorageError, match=r"0\.02 s"):
            storage.write(chunk)
        assert 1 <= len(hanging_threads()) <= THREADS
    hang.set()
    for thread in hanging_threads():
        thread.join(60)
    assert not hanging_threads()
    # It has all its threads back, and some call is quick enough.
    assert any(is_answered(lambda: storage.write(chunk)) for _ in range(1000))
    assert any(is_answered(lambda: read_payload(storage, chunk)) for _ in range(1000))


def test_the_breaker_refuses_calls_after_failures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    breaker = CircuitBreaker(failures_to_open=3, pause=10, longest_pause=30, clock=clock)
    storage = RemoteStorage(f"file://{folder}", LAYOUT, breaker=breaker)
    chunk = make_chunk(1)
    storage.write(chunk)
    with monkeypatch.context() as patch:
        break_calls(patch, down)
        requests = counted(patch, "cat_file")
        for _ in range(5):
            assert reason_of(lambda: read_payload(storage, chunk)) == "unreadable"
        assert len(requests) == 3
        with pytest.raises(StorageError, match="connection refused; it is asked again in 10 s"):
            storage.write(chunk)
    # It is back, and asked when the pause is over.
    requests = counted(monkeypatch, "cat_file")
    assert reason_of(lambda: read_payload(storage, chunk)) == "unreadable"
    assert not requests
    clock.now += 10
    assert torch.equal(read_payload(storage, chunk), chunk.payload)


def test_a_try_after_a_pause_connects_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    breaker = CircuitBreaker(failures_to_open=1, pause=10, clock=clock)
    storage = RemoteStorage(f"file://{folder}", LAYOUT, breaker=breaker)
    chunk = make_chunk(1)
    storage.write(chunk)
    broken: set[int] = set()
    original = LocalFileSystem.cat_file

    def cat_file(self: LocalFileSystem, *args: Any, **kwargs: Any) -> bytes:
        if not broken or id(self) in broken:
            broken.add(id(self))
            raise ConnectionError("this connection is lost")
        content: bytes = original(self, *args, **kwargs)
        return content

    kept = storage._connection  # so that no other file system gets the same id
    monkeypatch.setattr(LocalFileSystem, "cat_file", cat_file)
    for _ in range(2):  # the failure, and the try after the first pause
        assert reason_of(lambda: read_payload(storage, chunk)) == "unreadable"
        clock.now += 100
    assert torch.equal(read_payload(storage, chunk), chunk.payload)
    assert storage._connection is not kept


def test_a_flaky_store_gives_right_bytes_or_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [make_chunk(number) for number in range(20)]
    storage = RemoteStorage(f"file://{folder}", LAYOUT, breaker=never_open())
    for chunk in chunks:
        storage.write(chunk)
    original = LocalFileSystem.cat_file
    calls = iter(range(10**9))

    def cat_file(self: LocalFileSystem, *args: Any, **kwargs: Any) -> bytes:
        content: bytes = original(self, *args, **kwargs)
        match next(calls) % 5:
            case 0:
                raise ConnectionError("reset by peer")
            case 1:
                return content[: len(content) // 2]
            case _:
                return content

    monkeypatch.setattr(LocalFileSystem, "cat_file", cat_file)

    def read(chunk: Chunk) -> bool:
        try:
            payload = read_payload(storage, chunk)
        except ChunkMissing as missing:
            if missing.reason not in ("unreadable", "truncated"):
                raise
            return False
        assert torch.equal(payload, chunk.payload)
        return True

    with ThreadPoolExecutor(4) as executor:
        outcomes = list(executor.map(read, chunks * 5))
    assert set(outcomes) == {True, False}


# The circuit breaker by itself.


def test_the_pause_doubles_up_to_a_limit() -> None:
    clock = Clock()
    breaker = CircuitBreaker(failures_to_open=2, pause=10, longest_pause=30, clock=clock)
    for _ in range(2):
        assert not breaker.admit()
        breaker.failed(ConnectionError("down"), was_try=False)
    for pause in (10, 20, 30, 30):
        clock.now += pause - 1
        with pytest.raises(Unreachable, match="down; it is asked again in 1 s"):
            breaker.admit()
        clock.now += 1
        assert breaker.admit()
        breaker.failed(ConnectionError("down"), was_try=True)
    clock.now += 30
    assert breaker.admit()
    breaker.succeeded()
    for _ in range(2):
        assert not breaker.admit()
        breaker.failed(ConnectionError("down"), was_try=False)
    clock.now += 10
    assert breaker.admit()


def test_only_one_call_tries() -> None:
    clock = Clock()
    breaker = CircuitBreaker(failures_to_open=1, pause=10, clock=clock)
    breaker.failed(ConnectionError("down"), was_try=False)
    clock.now += 10
    assert breaker.admit()
    with pytest.raises(Unreachable):
        breaker.admit()
    # One that never comes back does not keep others from trying.
    clock.now += 10
    assert breaker.admit()


def test_failures_in_a_row_count() -> None:
    breaker = CircuitBreaker(failures_to_open=2, clock=Clock())
    for _ in range(5):
        breaker.failed(ConnectionError("down"), was_try=False)
        breaker.succeeded()
        assert not breaker.admit()


def test_late_failures_do_not_prolong_the_pause() -> None:
    clock = Clock()
    breaker = CircuitBreaker(failures_to_open=1, pause=10, clock=clock)
    breaker.failed(ConnectionError("down"), was_try=False)
    clock.now += 9
    for _ in range(5):
        breaker.failed(ConnectionError("down"), was_try=False)
    clock.now += 1
    assert breaker.admit()
