"""Files of the disk storage, and what can happen to them."""

from __future__ import annotations

import errno
import multiprocessing
import os
import stat
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.tiers import Chunk, ChunkLayout, ChunkMissing, DiskStorage, StorageError
from kvstore.tiers.chunk import encode_chunk
from tests.kvstore.tiers.chunks import BIG_LAYER_BYTES, LAYOUT, make_chunk, read_payload


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def storage(root: Path) -> DiskStorage:
    return DiskStorage(root, LAYOUT)


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if not path.is_dir())


def written(storage: DiskStorage, root: Path, chunk: Chunk) -> Path:
    """Write the first chunk of a folder. Returns its file."""
    storage.write(chunk)
    (path,) = files_in(root)
    return path


def reason_of(call: Callable[[], object]) -> str:
    with pytest.raises(ChunkMissing) as missing:
        call()
    return missing.value.reason


# Damaged and strange files.


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[DiskStorage, Path, Chunk, bytes]:
    """A storage, the one file in it, its chunk, and what the file holds when it is whole."""
    root = tmp_path_factory.mktemp("damaged")
    storage, chunk = DiskStorage(root, LAYOUT), make_chunk(1, layer_bytes=40)
    path = written(storage, root, chunk)
    return storage, path, chunk, path.read_bytes()


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_damaged_chunk_is_missing(
    damaged: tuple[DiskStorage, Path, Chunk, bytes], data: st.DataObject
) -> None:
    storage, path, chunk, whole = damaged
    content = bytearray(whole)
    damage = data.draw(st.sampled_from(["flip", "cut", "longer", "zeros"]))
    place = data.draw(st.integers(0, len(content) - 1))
    if damage == "flip":
        content[place] ^= data.draw(st.integers(1, 255))
    elif damage == "cut":
        del content[place:]
    elif damage == "longer":
        content += whole[: place + 1]
    else:  # what a power cut can leave
        content[place & ~0xF :] = bytes(len(content) - (place & ~0xF))
    path.write_bytes(content)
    with pytest.raises(ChunkMissing):
        read_payload(storage, chunk, data.draw(st.sampled_from([1, 2, 5])))


def test_every_byte_is_checked(damaged: tuple[DiskStorage, Path, Chunk, bytes]) -> None:
    storage, path, chunk, whole = damaged
    for place in range(len(whole)):
        content = bytearray(whole)
        content[place] ^= 0x10
        path.write_bytes(content)
        with pytest.raises(ChunkMissing):
            read_payload(storage, chunk)
    path.write_bytes(whole)
    assert torch.equal(read_payload(storage, chunk), chunk.payload)


def test_layers_beside_a_damaged_one_can_be_read(storage: DiskStorage, root: Path) -> None:
    chunk = make_chunk(1)
    path = written(storage, root, chunk)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    out = torch.zeros_like(chunk.payload)
    with storage.read(chunk.key, chunk.format, chunk.tokens) as reader:
        reader.read_into(0, out[:4])
        assert reason_of(lambda: reader.read_into(4, out[4:])) == "checksum"
    assert torch.equal(out[:4], chunk.payload[:4])


def test_a_truncated_chunk_is_written_again(storage: DiskStorage, root: Path) -> None:
    chunk = make_chunk(1)
    path = written(storage, root, chunk)
    os.truncate(path, path.stat().st_size - 1)
    assert reason_of(lambda: read_payload(storage, chunk)) == "truncated"
    storage.write(chunk)
    assert torch.equal(read_payload(storage, chunk), chunk.payload)


def test_a_chunk_truncated_while_it_is_open_is_missing(storage: DiskStorage, root: Path) -> None:
    chunk = make_chunk(1)
    path = written(storage, root, chunk)
    with storage.read(chunk.key, chunk.format, chunk.tokens) as reader:
        os.truncate(path, path.stat().st_size - 1)
        assert reason_of(lambda: reader.read_into(0, torch.zeros_like(chunk.payload))) == "truncated"


def test_a_renamed_chunk_is_foreign(storage: DiskStorage, root: Path) -> None:
    first, second = make_chunk(1), make_chunk(2)
    path = written(storage, root, first)
    storage.write(second)
    (target,) = (file for file in files_in(root) if file != path)
    path.replace(target)
    assert reason_of(lambda: read_payload(storage, second)) == "foreign"
    assert reason_of(lambda: read_payload(storage, replace(second, tokens=first.tokens))) == "foreign"


def test_a_chunk_under_another_format_is_foreign(storage: DiskStorage, root: Path) -> None:
    chunk = make_chunk(1)
    path = written(storage, root, chunk)
    path.rename(path.with_name(path.name.replace("int8", "int4")))
    assert reason_of(lambda: read_payload(storage, replace(chunk, format="int4"))) == "foreign"


@pytest.mark.parametrize(
    "other",
    [
        replace(LAYOUT, fingerprint="another"),
        replace(LAYOUT, dtype="bfloat16"),
        replace(LAYOUT, kv_heads=4, head_dim=2),
        replace(LAYOUT, page_tokens=16),
    ],
)
def test_another_layout_sees_nothing(storage: DiskStorage, root: Path, other: ChunkLayout) -> None:
    chunk = make_chunk(1)
    path = written(storage, root, chunk)
    stranger = DiskStorage(root, other)
    assert list(stranger.scan()) == []
    assert reason_of(lambda: read_payload(stranger, chunk)) == "absent"
    stranger.write(make_chunk(2))
    (own,) = (file for file in files_in(root) if file != path)
    # Not even when somebody copies a file into its folder.
    misplaced = own.parents[2] / path.relative_to(path.parents[2])
    misplaced.parent.mkdir(parents=True, exist_ok=True)
    misplaced.write_bytes(path.read_bytes())
    assert reason_of(lambda: read_payload(stranger, chunk)) == "foreign"


def test_strange_things_in_the_folder_are_skipped(storage: DiskStorage, root: Path) -> None:
    chunk = make_chunk(1)
    path = written(storage, root, chunk)
    name = make_chunk(2).key.hex() + ".int8.kv"
    (path.parent / "notes.txt").write_text("hello")
    (path.parent / ".nfs000001").write_text("")
    (path.parent / name.upper()).write_text("")
    (path.parent / name).mkdir()
    (path.parent / f"{make_chunk(3).key.hex()}.int8.kv").symlink_to("/dev/zero")
    os.mkfifo(path.parent / f"{make_chunk(4).key.hex()}.int8.kv")
    (path.parents[1] / "f0").write_text("not a folder")
    path.parents[2].joinpath("x").mkdir()
    assert [found.key for found in storage.scan()] == [chunk.key]
    assert storage.sweep(-3600) == 0


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_missing(storage: DiskStorage, root: Path, make: Callable[[Path], None]) -> None:
    chunk = make_chunk(1)
    path = written(storage, root, chunk)
    path.unlink()
    make(path)
    assert reason_of(lambda: read_payload(storage, chunk)) == "unreadable"


def test_a_hostile_size_allocates_nothing(storage: DiskStorage, root: Path) -> None:
    """A file with a valid header that claims layers of many gigabytes, and a sparse file of that size."""
    chunk = make_chunk(1)
    path = written(storage, root, chunk)
    claim = 2**36
    header = _header_claiming(chunk, claim)
    path.write_bytes(header)
    assert reason_of(lambda: read_payload(storage, chunk)) == "truncated"
    os.truncate(path, LAYOUT.chunk_bytes(claim))
    assert reason_of(lambda: read_payload(storage, chunk)) == "foreign"


def _header_claiming(chunk: Chunk, layer_bytes: int) -> bytes:
    header = bytearray(encode_chunk(chunk, LAYOUT)[0])
    place = header.index(struct.pack("<Q", chunk.payload.shape[1]))
    header[place : place + 8] = struct.pack("<Q", layer_bytes)
    header[-8:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(header[:-8]))
    return bytes(header)


def test_a_huge_record_is_not_read(storage: DiskStorage, root: Path) -> None:
    storage.write_record("ab", b"data")
    (path,) = files_in(root)
    os.truncate(path, 2**40)
    assert reason_of(lambda: storage.read_record("ab")) == "foreign"


def test_a_damaged_record_is_missing(storage: DiskStorage, root: Path) -> None:
    storage.write_record("ab", b"data")
    (path,) = files_in(root)
    path.write_bytes(path.read_bytes()[:-1] + b"A")
    assert reason_of(lambda: storage.read_record("ab")) == "checksum"
    storage.write_record("ab", b"data")
    assert storage.read_record("ab") == b"data"


def test_an_io_error_is_missing(storage: DiskStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    chunk = make_chunk(1)
    storage.write(chunk)
    for name in ("open", "pread", "preadv"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            assert reason_of(lambda: read_payload(storage, chunk)) == "unreadable"
    assert torch.equal(read_payload(storage, chunk), chunk.payload)


def test_reads_and_writes_may_come_in_pieces(storage: DiskStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    writev, preadv = os.writev, os.preadv
    monkeypatch.setattr(os, "writev", lambda file, pieces: writev(file, [pieces[0][:37]]))
    monkeypatch.setattr(os, "preadv", lambda file, pieces, place: preadv(file, [pieces[0][:41]], place))
    chunk = make_chunk(1)
    storage.write(chunk)
    assert torch.equal(read_payload(storage, chunk), chunk.payload)


def test_nothing_stays_open(storage: DiskStorage, root: Path) -> None:
    chunk = make_chunk(1)
    path = written(storage, root, chunk)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        read_payload(storage, chunk)
        assert reason_of(lambda: storage.read(chunk.key, "int8", chunk.tokens[1:])) == "tokens"
    path.write_bytes(b"KWCHUNK")
    assert reason_of(lambda: read_payload(storage, chunk)) == "truncated"
    path.unlink()
    path.mkdir()
    assert reason_of(lambda: read_payload(storage, chunk)) == "unreadable"
    with pytest.raises(StorageError):
        storage.write(chunk)
    assert len(os.listdir("/proc/self/fd")) == before


# Disks that do not take anything.


def test_a_full_disk_leaves_nothing_behind(
    storage: DiskStorage, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, refused = make_chunk(1), make_chunk(2)
    path = written(storage, root, kept)
    writev = os.writev

    def half(file: int, pieces: list[memoryview]) -> int:
        if os.fstat(file).st_size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return writev(file, pieces[:1])

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", half)
        with pytest.raises(StorageError, match="free some space"):
            storage.write(refused)
        with pytest.raises(StorageError, match="free some space"):
            storage.write_record("ab", b"data")
    assert files_in(root) == [path]
    assert torch.equal(read_payload(storage, kept), kept.payload)
    storage.write(refused)
    assert torch.equal(read_payload(storage, refused), refused.payload)


def test_a_failed_rename_leaves_nothing_behind(storage: DiskStorage, root: Path) -> None:
    chunk = make_chunk(1)
    path = written(storage, root, chunk)
    path.unlink()
    path.mkdir()
    with pytest.raises(StorageError):
        storage.write(chunk)
    assert files_in(root) == []


def test_an_interrupted_write_leaves_nothing_behind(
    storage: DiskStorage, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "writev", interrupt)
    with pytest.raises(KeyboardInterrupt):
        storage.write(make_chunk(1))
    assert files_in(root) == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_read_only_disk_is_read(
    storage: DiskStorage, root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    chunk = make_chunk(1)
    path = written(storage, root, chunk)
    opening = os.open

    def refuse(path: str, flags: int, *args: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(number, os.strerror(number))
        return opening(path, flags, *args)

    def forbid(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    for name in ("unlink", "utime"):
        monkeypatch.setattr(os, name, forbid)
    assert torch.equal(read_payload(storage, chunk), chunk.payload)
    assert storage.write(chunk) == path.stat().st_size
    for call in (
        lambda: storage.write(make_chunk(2)),
        lambda: storage.write_record("ab", b""),
        lambda: storage.delete(chunk.key, chunk.format),
        lambda: storage.delete_record("ab"),
    ):
        with pytest.raises(StorageError, match="let this process write there"):
            call()
    assert [found.key for found in storage.scan()] == [chunk.key]


@pytest.mark.parametrize("place", ["tier", "tier/below"])
def test_a_file_in_place_of_the_folder_refuses_writes_alone(tmp_path: Path, place: str) -> None:
    (tmp_path / "tier").write_text("a file")
    storage, chunk = DiskStorage(tmp_path / place, LAYOUT), make_chunk(1)
    with pytest.raises(StorageError, match="check the folder"):
        storage.write(chunk)
    assert reason_of(lambda: read_payload(storage, chunk)) == "absent"
    assert reason_of(lambda: storage.read_record("ab")) == "absent"
    assert not list(storage.scan())
    assert not list(storage.records())
    storage.delete(chunk.key, chunk.format)
    assert storage.sweep(0) == 0


def test_a_removed_folder_is_made_again(storage: DiskStorage, root: Path) -> None:
    chunk = make_chunk(1)
    path = written(storage, root, chunk)
    path.unlink()
    for folder in list(path.parents)[:4]:
        folder.rmdir()
    assert not root.exists()
    storage.write(chunk)
    assert torch.equal(read_payload(storage, chunk), chunk.payload)


# What others see.


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_only_the_owner_can_read(root: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        storage = DiskStorage(root, LAYOUT)
        storage.write(make_chunk(1))
        storage.write_record("ab", b"data")
    finally:
        os.umask(before)
    paths = [root, *root.rglob("*")]
    assert len(paths) == 7  # root, layout, two levels, chunk, records, record
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_an_open_chunk_survives_its_deletion(storage: DiskStorage) -> None:
    chunk = make_chunk(1)
    storage.write(chunk)
    out = torch.zeros_like(chunk.payload)
    with storage.read(chunk.key, chunk.format, chunk.tokens) as reader:
        storage.delete(chunk.key, chunk.format)
        storage.write(replace(chunk, payload=chunk.payload ^ 1))
        reader.read_into(0, out)
    assert torch.equal(out, chunk.payload)


def test_writing_what_is_there_touches_it(storage: DiskStorage, root: Path) -> None:
    chunk = make_chunk(1)
    path = written(storage, root, chunk)
    os.utime(path, (1000, 1000))
    assert [found.modified for found in storage.scan()] == [1000]
    storage.write(chunk)
    assert all(found.modified > 1000 for found in storage.scan())


def test_times_in_the_future_are_told_as_they_are(storage: DiskStorage, root: Path) -> None:
    chunk = make_chunk(1)
    path = written(storage, root, chunk)
    future = int(time.time()) + 10**8
    leftover = path.with_name(".123-0123456789abcdef.tmp")
    leftover.write_bytes(b"abc")
    for file in (path, leftover):
        os.utime(file, (future, future))
    assert [found.modified for found in storage.scan()] == [future]
    assert storage.sweep(0) == 0
    assert torch.equal(read_payload(storage, chunk), chunk.payload)
    storage.write(chunk)
    assert all(found.modified < future for found in storage.scan())


def test_leftovers_are_swept_when_old(storage: DiskStorage, root: Path) -> None:
    chunk = make_chunk(1)
    path = written(storage, root, chunk)
    storage.write_record("ab", b"data")
    records = path.parents[2] / "records"
    old, young, record = (
        path.with_name(".1-0123456789abcdef.tmp"),
        path.with_name(".1-0123456789abcde0.tmp"),
        records / ".1-0123456789abcdef.tmp",
    )
    for file in (old, young, record):
        file.write_bytes(b"abc")
    for file in (old, record, path):
        os.utime(file, (1000, 1000))
    assert len(list(storage.scan())) == 1
    assert len(list(storage.records())) == 1
    assert storage.sweep(3600) == 6
    assert files_in(root) == sorted([young, path, records / "ab"])


def _write_all(root: Path) -> None:
    storage = DiskStorage(root, LAYOUT)
    for number in range(30):
        storage.write(make_chunk(number, layer_bytes=BIG_LAYER_BYTES))


def test_two_processes_write_the_same_chunks(storage: DiskStorage, root: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvstore.tiers"])
    writers = [context.Process(target=_write_all, args=(root,)) for _ in range(2)]
    for writer in writers:
        writer.start()
    chunks = [make_chunk(number, layer_bytes=BIG_LAYER_BYTES) for number in range(30)]
    while any(writer.is_alive() for writer in writers):
        for chunk in chunks:
            try:
                payload = read_payload(storage, chunk)
            except ChunkMissing as missing:
                if missing.reason != "absent":
                    raise
            else:
                assert torch.equal(payload, chunk.payload)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    for chunk in chunks:
        assert torch.equal(read_payload(storage, chunk), chunk.payload)
    assert len(files_in(root)) == len(chunks)
