"""What goes wrong in lower tiers is a miss: never a wrong value, never an exception to who looks something up."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import KVSpec, KVStore, Span, StoreSnapshot, TierConfig
from kvstore.manifest import Entry, Manifest
from kvstore.tiers import ChunkLayout, ChunkReader, DiskStorage, StorageError
from tests.kvstore.tier_helpers import (
    PAGE,
    ROOM,
    SPEC,
    Stores,
    chunk_files,
    compute,
    config,
    counted,
    disk,
    disturb,
    empty_device,
    failing,
    failures,
    kv_of,
    opened_stores,
    read,
    record_files,
    text,
    turn,
)


@pytest.fixture
def stores() -> Iterator[Stores]:
    yield from opened_stores()


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}"


def log_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the store has logged."""
    return [record.message for record in caplog.records if record.name.startswith("kvstore")]


def without_fault(folder: Path, session_id: str = "chat", length: int = 40) -> None:
    """A store on the folder that worked well and was closed."""
    store = KVStore(SPEC, config(disk=disk(folder)))
    turn(store, session_id, text(1, length))
    store.close()


# Writing fails.


def no_space(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_costs_what_it_would_have_kept(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = stores.open(config(12, disk=disk(tmp_path)))
    turn(store, "before", text(1, 20))
    store.flush()
    with monkeypatch.context() as full:
        full.setattr(os, "writev", no_space)
        for number in range(2, 6):
            turn(store, f"chat {number}", text(number, 40))
        store.sleep("ann", "chat 5")
        store.flush()
    assert failures(store).keys() == {"disk:write"}
    assert len(log_lines(caplog)) == 1
    assert "free some space" in log_lines(caplog)[0]
    assert list(tmp_path.rglob("*.tmp")) == []
    assert turn(store, "before", text(1, 20)) == 20
    assert turn(store, "chat 2", text(2, 40)) == 0
    turn(store, "after", text(9, 20))
    empty_device(store)
    assert turn(store, "after", text(9, 20)) == 20


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_still_read(
    stores: Stores,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
) -> None:
    without_fault(tmp_path)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    real_open = os.open

    def open_to_read(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            refuse()
        return real_open(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", open_to_read)
    for name in ("unlink", "replace", "mkdir", "utime"):
        monkeypatch.setattr(os, name, refuse)
    store = stores.open(config(disk=disk(tmp_path)))
    assert turn(store, "chat", text(1, 60)) == 40
    assert store.drop("ann", "chat")
    assert failures(store).keys() == {"disk:write", "disk:delete"}
    assert len(log_lines(caplog)) == 2
    assert turn(store, "chat", text(1, 60)) == 0


def test_a_file_in_place_of_the_folder(
    stores: Stores, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "kv"
    place.write_text("something else")
    store = stores.open(config(12, disk=disk(place)))
    for _ in range(2):
        turn(store, "chat", text(1, 20))
        turn(store, "other", text(2, 40))
    store.close()
    assert failures(store).keys() == {"disk:write"}
    assert len(log_lines(caplog)) == 1
    assert place.read_text() == "something else"


# A remote store that is not there, or slow.


def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("nobody is there")

    files = fsspec.get_filesystem_class("memory")
    for name in ("cat_file", "pipe_file", "info", "ls", "rm_file"):
        monkeypatch.setattr(files, name, refuse)


def test_a_remote_store_that_was_never_there(
    stores: Stores, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unreachable(monkeypatch)
    store = stores.open(config(12, remote=TierConfig(ROOM, "original", location=url)))
    assert store.snapshot().tiers[0].ready
    turn(store, "chat", text(1, 20))
    turn(store, "other", text(2, 40))
    assert turn(store, "chat", text(1, 20)) < 20
    store.close()
    assert failures(store).keys() == {"remote:scan", "remote:write"}
    assert len(log_lines(caplog)) == 2


def test_a_remote_store_that_goes_away_and_returns(
    stores: Stores, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = stores.open(config(remote=TierConfig(ROOM, "original", location=url)))
    turn(store, "chat", text(1, 40))
    empty_device(store)
    with monkeypatch.context() as outage:
        unreachable(outage)
        assert store.acquire("ann", "reader", text(1, 40)).length == 0
        store.flush()
        assert failures(store).keys() == {"remote:unreadable"}
    assert len(log_lines(caplog)) == 1
    session = store.acquire("ann", "another reader", text(1, 40))
    assert session.length == 40  # what could not be had for a while was not taken for lost
    assert torch.equal(read(session), kv_of(text(1, 40)))
    store.release(session)


def test_a_remote_store_that_does_not_answer(
    stores: Stores, url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = stores.gate()
    store = stores.open(config(remote=TierConfig(ROOM, "original", location=url, timeout=0.2)))
    turn(store, "chat", text(1, 40))
    empty_device(store)
    files = fsspec.get_filesystem_class("memory")
    cat_file = files.cat_file

    def hang(*arguments: Any, **options: Any) -> Any:
        gate.pass_through()
        return cat_file(*arguments, **options)

    monkeypatch.setattr(files, "cat_file", hang)
    session = store.acquire("ann", "chat", text(1, 40))
    assert session.length == 0
    compute(session, text(1, 40))
    store.release(session)
    assert failures(store).keys() == {"remote:unreadable"}
    assert len(log_lines(caplog)) == 1


# Damaged and foreign files.


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sleeping session of 10 tokens: two whole pages, one that is not, and a manifest."""
    folder = tmp_path_factory.mktemp("kept")
    without_fault(folder, length=10)
    return folder


def found_in(folder: Path, length: int = 10) -> tuple[int, dict[str, int]]:
    """What a new store finds of the sleeping session, all of which is compared, and what it says has failed."""
    store = KVStore(SPEC, config(disk=disk(folder)))
    store.flush()
    session = store.acquire("ann", "chat", text(1, length))
    found = session.length
    assert torch.equal(read(session), kv_of(text(1, length))[..., :found, :])
    compute(session, text(1, length))
    assert torch.equal(read(session), kv_of(text(1, length)))
    store.release(session)
    store.flush()
    counts = failures(store)
    store.tiering.close()
    return found, counts


@contextmanager
def copied(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as place:
        yield Path(shutil.copytree(folder, Path(place, "copy")))


@settings(max_examples=60, deadline=None)
@given(number=st.integers(0, 2), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_of_a_chunk_is_noticed(kept: Path, number: int, place: float, bit: int) -> None:
    with copied(kept) as folder:
        path = chunk_files(folder)[number]
        content = bytearray(path.read_bytes())
        content[int(place * len(content))] ^= 1 << bit
        path.write_bytes(content)
        found, counts = found_in(folder)
    assert found < 10
    assert sum(counts.values()) == 1


@settings(max_examples=20, deadline=None)
@given(number=st.integers(0, 2), place=st.floats(0, 1, exclude_max=True))
def test_any_truncated_chunk_is_noticed(kept: Path, number: int, place: float) -> None:
    with copied(kept) as folder:
        path = chunk_files(folder)[number]
        content = path.read_bytes()
        path.write_bytes(content[: int(place * len(content))])
        found, counts = found_in(folder)
    assert found < 10
    assert counts == {"disk:truncated": 1}


@settings(max_examples=40, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), truncated=st.booleans())
def test_any_damage_to_a_manifest_is_noticed(kept: Path, place: float, bit: int, truncated: bool) -> None:
    with copied(kept) as folder:
        (path,) = record_files(folder)
        content = bytearray(path.read_bytes())
        index = int(place * len(content))
        content[index] ^= 1 << bit
        path.write_bytes(content[:index] if truncated else content)
        found, counts = found_in(folder)
    assert found == 8  # by its whole pages; which session they were of is not known
    assert counts == {"disk:manifest": 1}


def test_a_damaged_chunk_is_replaced(
    stores: Stores, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    without_fault(tmp_path)
    for path in chunk_files(tmp_path):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes((content[-1] ^ 1,)))
    store = stores.open(config(disk=disk(tmp_path)))
    assert turn(store, "chat", text(1, 40)) == 0
    # The first damaged page is found and written anew. Those behind it were not read.
    for pages in range(1, 11):
        empty_device(store)
        assert turn(store, "chat", text(1, 40)) == 4 * pages
    assert failures(store) == {"disk:checksum": 10}
    assert len(log_lines(caplog)) == 1  # not one a page


OTHERS = [
    replace(SPEC, fingerprint="another model"),
    replace(SPEC, dtype=torch.bfloat16),
    replace(SPEC, page_tokens=8),
    replace(SPEC, layers=2),
    replace(SPEC, kv_heads=1),
    replace(SPEC, head_dim=16),
]


@pytest.mark.parametrize(
    "other", OTHERS, ids=lambda spec: f"{spec.fingerprint}-{spec.page_shape}-{spec.dtype}"
)
def test_another_model_in_the_same_folder_is_not_seen(stores: Stores, tmp_path: Path, other: KVSpec) -> None:
    without_fault(tmp_path)
    before = {path: path.read_bytes() for path in chunk_files(tmp_path)}
    store = stores.open(config(disk=disk(tmp_path, budget=0)), spec=other)
    assert store.find("ann", text(1, 40)).tokens == 0
    session = store.acquire("ann", "chat", text(1, 40))
    assert session.length == 0
    store.release(session)
    assert {path: path.read_bytes() for path in chunk_files(tmp_path)} == before
    assert failures(store) == {}
    assert found_in(tmp_path, 40) == (40, {})


@pytest.mark.parametrize(
    "other", OTHERS[:4], ids=lambda spec: f"{spec.fingerprint}-{spec.page_shape}-{spec.dtype}"
)
def test_a_chunk_of_another_model_under_the_right_name(stores: Stores, tmp_path: Path, other: KVSpec) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    without_fault(here)
    foreign = stores.open(config(disk=disk(there)), spec=other)
    session = foreign.acquire("ann", "chat", text(1, 40))
    kv = torch.zeros(other.layers, 2, other.kv_heads, 40, other.head_dim, dtype=other.dtype)
    for layer in range(other.layers):
        session.write(layer, kv[layer, :1], kv[layer, 1:])
    session.commit(text(1, 40))
    foreign.release(session)
    foreign.flush()
    content = chunk_files(there)[0].read_bytes()
    for path in chunk_files(here):
        path.write_bytes(content)
    found, counts = found_in(here, 40)
    assert found == 0
    assert counts == {"disk:foreign": 1}


def test_chunks_that_have_changed_places(stores: Stores, tmp_path: Path) -> None:
    without_fault(tmp_path)
    one, two, *_ = chunk_files(tmp_path)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    found, counts = found_in(tmp_path, 40)
    assert found < 40
    assert counts == {"disk:foreign": 1}


def test_junk_in_the_folder(stores: Stores, tmp_path: Path) -> None:
    without_fault(tmp_path)
    folder = chunk_files(tmp_path)[0].parent
    for name in ("notes.txt", "0123.original.kv", f"{'0' * 32}.fp3.kv", f"{'g' * 32}.original.kv", ".x.tmp"):
        (folder / name).write_bytes(b"junk")
    (folder / f"{'1' * 32}.original.kv").mkdir()
    (record_files(tmp_path)[0].parent / "not a record").write_bytes(b"junk")
    (record_files(tmp_path)[0].parent / "abc").write_bytes(b"junk")
    found, counts = found_in(tmp_path, 40)
    assert (found, counts) == (40, {"disk:manifest": 1})


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"version": 99}', b'{"version": 1}', b"\xff\xfe"],
)
def test_a_manifest_that_was_written_whole_and_makes_no_sense(
    stores: Stores, tmp_path: Path, content: bytes
) -> None:
    without_fault(tmp_path)
    (path,) = record_files(tmp_path)
    DiskStorage(tmp_path, ChunkLayout.of(SPEC)).write_record(path.name, content)
    found, counts = found_in(tmp_path, 40)
    assert (found, counts) == (40, {"disk:manifest": 1})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pages", [["00", 0, 4, 0, ""]]),
        ("pages", [["zz", 0, 4, 0, ""]]),
        ("pages", 7),
        ("spans", [{"source": "a", "length": "x", "position": 0}]),
        ("spans", [{"colour": "red"}]),
        ("spans", []),
        ("spans", [{"source": "a", "length": 5, "position": 0}]),
        ("public_tokens", "many"),
    ],
)
def test_a_manifest_with_a_wrong_field(field: str, value: object) -> None:
    tokens = np.arange(4, dtype=np.int32)
    entry = Entry(bytes(16), b"", 0, 4, 0, tokens)
    whole = Manifest("ann", "chat", "default", 0, 0, [Span("a", 4, 0)], [entry]).encode()
    assert Manifest.decode(whole).entries[0].tokens.tolist() == tokens.tolist()
    wrong = json.loads(whole) | {field: value}
    with pytest.raises(ValueError, match=r"\w"):
        Manifest.decode(json.dumps(wrong).encode())


# Storages that misbehave.


class Surprise(Exception):
    """Nothing that a storage says it raises."""


@pytest.mark.parametrize("method", ["write", "delete", "write_record", "delete_record"])
def test_unexpected_exceptions_of_writing(
    stores: Stores, tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    store = stores.open(config(disk=disk(tmp_path, budget=12 * PAGE)))
    disturb(store, "disk", **{method: failing(Surprise("from afar"))})
    for number in range(4):
        turn(store, f"chat {number}", text(number, 18))
        store.sleep("ann", f"chat {number}")
        store.flush()
        store.tick()
    store.drop("ann", "chat 0")
    action = "write" if method.startswith("write") else "delete"
    assert failures(store).keys() == {f"disk:{action}"}
    assert len(log_lines(caplog)) == 1
    assert "from afar" in log_lines(caplog)[0]
    assert store.snapshot().jobs == 0
    for number in range(4):
        turn(store, f"chat {number}", text(number, 30))


@pytest.mark.parametrize("error", [Surprise("from afar"), MemoryError(), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("method", ["read", "read_into"])
def test_unexpected_exceptions_of_reading(
    stores: Stores,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    error: BaseException,
) -> None:
    store = stores.open(config(disk=disk(tmp_path)))
    turn(store, "chat", text(1, 40))
    empty_device(store)
    with monkeypatch.context() as trouble:
        if method == "read":
            trouble.setattr(DiskStorage, "read", lambda *_: failing(error)())
        else:
            trouble.setattr(ChunkReader, "read_into", lambda *_: failing(error)())
        for session_id in ("chat", "another chat"):
            session = store.acquire("ann", session_id, text(1, 40))
            assert session.length == 0
            store.release(session)
    store.flush()
    assert sum(failures(store).values()) == 2
    assert len(log_lines(caplog)) >= 1
    assert turn(store, "chat", text(1, 40)) == 40  # the copies are still there


def test_a_manifest_that_cannot_be_read_all_of_a_sudden(
    stores: Stores, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    without_fault(tmp_path, length=38)
    store = stores.open(config(disk=disk(tmp_path)))
    disturb(store, "disk", read_record=failing(Surprise("from afar")))
    assert turn(store, "chat", text(1, 38)) == 36
    assert failures(store) == {"disk:manifest": 1}
    assert len(log_lines(caplog)) == 1


def test_a_device_copy_that_fails(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = stores.open(config(disk=disk(tmp_path)))
    turn(store, "chat", text(1, 40))
    empty_device(store)
    with monkeypatch.context() as trouble:
        trouble.setattr(
            "kvstore.transfer.DeviceLink.to_device", lambda *_: failing(RuntimeError("no memory"))()
        )
        session = store.acquire("ann", "chat", text(1, 40))
        assert session.length == 0
        store.release(session)
    assert failures(store) == {"device:RuntimeError": 1}
    assert len(log_lines(caplog)) == 1
    assert turn(store, "chat", text(1, 40)) == 40


# Slowness.


def test_who_needs_nothing_from_a_slow_disk_does_not_wait_for_it(stores: Stores, tmp_path: Path) -> None:
    store = stores.open(config(disk=disk(tmp_path)))
    turn(store, "slow", text(1, 40))
    empty_device(store)
    turn(store, "resident", text(2, 40))
    store.flush()
    gate = stores.gate()
    disturb(store, "disk", read=gate.pass_through, write=gate.pass_through, delete=gate.pass_through)
    slow = store.acquire("ann", "slow", text(1, 40), wait=False)
    gate.wait_until_reached()
    assert turn(store, "resident", text(2, 60)) == 40
    assert turn(store, "new", text(3, 40)) == 0
    assert store.find("ann", text(1, 40)).tokens == 40
    store.drop("ann", "new")
    store.tick()
    gate.open()
    assert torch.equal(read(slow), kv_of(text(1, 40)))
    store.release(slow)


def test_pages_that_a_slow_tier_has_not_come_to_make_room(
    stores: Stores, tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    remote = TierConfig(ROOM, "original", location=url)
    store = stores.open(config(40, disk=disk(tmp_path), remote=remote))
    gate = stores.gate()
    disturb(store, "remote", write=gate.pass_through)
    for number in range(6):
        turn(store, f"chat {number}", text(number, 40))
    gate.wait_until_reached()
    assert counted(store, "failures:remote:abandoned") > 0
    assert [turn(store, f"chat {number}", text(number, 40)) for number in range(6)] == [40] * 6
    assert len(log_lines(caplog)) == 1
    gate.open()
    for number in range(6):
        store.sleep("ann", f"chat {number}")  # who sleeps is written whole, at last
    store.flush()
    assert failures(store).keys() == {"remote:abandoned"}


def test_a_snapshot_may_be_taken_while_the_store_works(stores: Stores, tmp_path: Path) -> None:
    store = stores.open(config(20, disk=disk(tmp_path, "int8", budget=40 * PAGE)))
    seen: list[StoreSnapshot] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            seen.append(store.snapshot())
            ended.wait(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for number in range(40):
            session = store.acquire("ann", f"chat {number % 8}", text(number % 8, 10 + number))
            compute(session, text(number % 8, 10 + number))
            store.release(session)
            store.tick()
    finally:
        ended.set()
        watcher.join()
    assert len(seen) > 40
    for name in ("lookups", "tokens_committed", "chunks_written:disk"):
        counts = [shot.totals.get(name, 0) for shot in seen]
        assert counts == sorted(counts)
    assert all(shot.bytes <= shot.budget_bytes for shot in seen)
    assert all(shot.totals["tokens_reused"] <= shot.totals["tokens_looked_up"] for shot in seen)


# Clocks.


def test_a_clock_that_goes_backwards(stores: Stores, tmp_path: Path) -> None:
    now = [time.time()]
    lower = disk(tmp_path, budget=60 * PAGE, expire_after=3600.0)
    store = stores.open(config(30, disk=lower), clock=lambda: now[0])
    for step, change in enumerate((0.0, 50.0, -5000.0, 10.0, -(10.0**9), 4000.0)):
        now[0] += change
        turn(store, f"chat {step}", text(step, 30))
        store.heartbeat("ann", f"chat {step}")
        store.tick()
    store.flush()
    for step in range(6):
        assert turn(store, f"chat {step}", text(step, 30)) >= 28  # whole pages are on the disk
    assert failures(store) == {}


def test_chunks_from_the_future(stores: Stores, tmp_path: Path) -> None:
    without_fault(tmp_path)
    for path in (*chunk_files(tmp_path), *record_files(tmp_path)):
        os.utime(path, (time.time() + 10**8,) * 2)
    store = stores.open(config(disk=disk(tmp_path, expire_after=3600.0)))
    store.tick()
    assert turn(store, "chat", text(1, 40)) == 40
    assert failures(store) == {}


def test_storage_errors_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = KVStore(SPEC, config(disk=disk(tmp_path)))
    monkeypatch.setattr(os, "writev", no_space)
    with pytest.raises(StorageError, match="free some space"):
        store.tiering.tiers[0].storage.write_record("ab", b"data")
    store.tiering.close()
    assert counted(store, "failures:disk:write") == 0
