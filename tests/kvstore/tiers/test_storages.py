"""What all storages have in common."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvstore.tiers import (
    ChunkLayout,
    ChunkMissing,
    DiskStorage,
    HostStorage,
    RemoteStorage,
    Storage,
    StoredChunk,
)
from tests.kvstore.tiers.chunks import BIG_LAYER_BYTES, LAYER_BYTES, LAYOUT, make_chunk, read_payload

BUILDERS: dict[str, Callable[[Path, ChunkLayout], Storage]] = {
    "host": lambda folder, layout: HostStorage(layout),
    "disk": DiskStorage,
    "disk-fsync": lambda folder, layout: DiskStorage(folder, layout, fsync=True),
    "remote-file": lambda folder, layout: RemoteStorage(f"file://{folder}", layout),
    "remote-memory": lambda folder, layout: RemoteStorage(f"memory://{secrets.token_hex(8)}", layout),
    "remote-no-read-ahead": lambda folder, layout: RemoteStorage(
        f"file://{folder}", layout, read_ahead_bytes=0
    ),
}


@pytest.fixture(params=BUILDERS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    storage = BUILDERS[request.param](tmp_path / "store", LAYOUT)
    yield storage
    storage.close()


def reason_of(call: Callable[[], object]) -> str:
    with pytest.raises(ChunkMissing) as missing:
        call()
    return missing.value.reason


def test_chunks_come_back(storage: Storage) -> None:
    chunks = [make_chunk(1), make_chunk(2), make_chunk(2, format="original", layer_bytes=300)]
    chunks.append(replace(make_chunk(3), tokens=np.array([7, 8], dtype=np.int32)))
    for chunk in chunks:
        assert storage.write(chunk) >= chunk.payload.nbytes
    for chunk in chunks:
        with storage.read(chunk.key, chunk.format, chunk.tokens) as reader:
            assert (reader.format, reader.layer_bytes) == (chunk.format, chunk.payload.shape[1])
            assert reader.tokens.tolist() == chunk.tokens.tolist()
        for layers_at_a_time in (1, 2, 5):
            assert torch.equal(read_payload(storage, chunk, layers_at_a_time), chunk.payload)


def test_layers_are_read_in_any_order(storage: Storage) -> None:
    chunk = make_chunk(1)
    storage.write(chunk)
    out = torch.zeros(2, LAYER_BYTES, dtype=torch.uint8)
    for first in (3, 0, 2, 0, 3, 1):
        with storage.read(chunk.key, chunk.format, chunk.tokens) as reader:
            reader.read_into(first, out)
        assert torch.equal(out, chunk.payload[first : first + 2])


def test_tokens_need_not_be_known(storage: Storage) -> None:
    chunk = make_chunk(1)
    storage.write(chunk)
    with storage.read(chunk.key, chunk.format) as reader:
        assert reader.tokens.tolist() == chunk.tokens.tolist()


def test_what_is_not_there_is_missing(storage: Storage) -> None:
    chunk = make_chunk(1)
    assert reason_of(lambda: storage.read(chunk.key, "int8", None)) == "absent"
    storage.write(chunk)
    assert reason_of(lambda: storage.read(chunk.key, "int4", None)) == "absent"
    assert reason_of(lambda: storage.read(make_chunk(2).key, "int8", None)) == "absent"


@pytest.mark.parametrize("change", ["other", "fewer", "more"])
def test_other_tokens_are_missing(storage: Storage, change: str) -> None:
    chunk = make_chunk(1)
    storage.write(chunk)
    tokens = {"other": chunk.tokens ^ 1, "fewer": chunk.tokens[:-1], "more": np.append(chunk.tokens, 1)}
    asked = tokens[change].astype(np.int32)
    assert reason_of(lambda: storage.read(chunk.key, chunk.format, asked)) == "tokens"


def test_layers_of_another_size_are_foreign(storage: Storage) -> None:
    chunk = make_chunk(1)
    storage.write(chunk)
    out = torch.zeros(2, LAYER_BYTES - 1, dtype=torch.uint8)
    with storage.read(chunk.key, chunk.format, chunk.tokens) as reader:
        assert reason_of(lambda: reader.read_into(0, out)) == "foreign"


@pytest.mark.parametrize(
    ("first", "out"),
    [
        (0, torch.zeros(2, LAYER_BYTES)),
        (0, torch.zeros(LAYER_BYTES, dtype=torch.uint8)),
        (0, torch.zeros(LAYER_BYTES, 2, dtype=torch.uint8).T),
        (4, torch.zeros(2, LAYER_BYTES, dtype=torch.uint8)),
        (-1, torch.zeros(2, LAYER_BYTES, dtype=torch.uint8)),
    ],
)
def test_reading_into_the_wrong_place_is_refused(storage: Storage, first: int, out: torch.Tensor) -> None:
    chunk = make_chunk(1)
    storage.write(chunk)
    with (
        storage.read(chunk.key, chunk.format, chunk.tokens) as reader,
        pytest.raises(ValueError, match="layers"),
    ):
        reader.read_into(first, out)


def test_a_chunk_of_another_shape_is_refused(storage: Storage) -> None:
    other = replace(LAYOUT, layers=LAYOUT.layers + 1)
    with pytest.raises(ValueError, match="layers"):
        storage.write(make_chunk(1, layout=other))
    assert list(storage.scan()) == []


def test_deleting(storage: Storage) -> None:
    chunk = make_chunk(1)
    storage.delete(chunk.key, chunk.format)
    storage.write(chunk)
    storage.write(make_chunk(1, format="int4"))
    storage.delete(chunk.key, chunk.format)
    storage.delete(chunk.key, chunk.format)
    assert reason_of(lambda: storage.read(chunk.key, chunk.format, None)) == "absent"
    assert [found.format for found in storage.scan()] == ["int4"]
    storage.write(chunk)
    assert torch.equal(read_payload(storage, chunk), chunk.payload)


def test_what_is_there_stays(storage: Storage) -> None:
    """A second computation of the same KV may differ in the last bits; readers must not see both."""
    chunk = make_chunk(1)
    storage.write(chunk)
    assert storage.write(replace(chunk, payload=chunk.payload ^ 1)) == storage.write(chunk)
    assert torch.equal(read_payload(storage, chunk), chunk.payload)


def test_the_writer_may_change_its_memory_afterwards(storage: Storage) -> None:
    chunk = make_chunk(1)
    storage.write(chunk)
    chunk.payload.zero_()
    chunk.tokens[:] = 0
    expected = make_chunk(1)
    assert torch.equal(read_payload(storage, expected), expected.payload)


def test_scan_finds_all_chunks(storage: Storage) -> None:
    assert list(storage.scan()) == []
    before = time.time() - 5
    chunks = [make_chunk(number, format=format) for number in range(40) for format in ("int8", "int4")]
    sizes = {(chunk.key, chunk.format): storage.write(chunk) for chunk in chunks}
    storage.write_record("ab", b"not a chunk")
    found = list(storage.scan())
    assert {(chunk.key, chunk.format): chunk.bytes for chunk in found} == sizes
    assert all(isinstance(chunk, StoredChunk) and before < chunk.modified for chunk in found)
    assert len(found) == len(sizes)


def test_records(storage: Storage) -> None:
    assert list(storage.records()) == []
    assert reason_of(lambda: storage.read_record("ab")) == "absent"
    storage.delete_record("ab")
    before = time.time() - 5
    storage.write_record("ab", b"first")
    storage.write_record("ab", b"second")
    storage.write_record("0" * 64, b"")
    assert storage.read_record("ab") == b"second"
    assert storage.read_record("0" * 64) == b""
    records = dict(storage.records())
    assert set(records) == {"ab", "0" * 64}
    assert min(records.values()) > before
    storage.delete_record("ab")
    assert reason_of(lambda: storage.read_record("ab")) == "absent"
    with pytest.raises(ValueError, match="hex digits"):
        storage.write_record("../up", b"")


def test_sweeping_leaves_what_is_complete(storage: Storage) -> None:
    chunk = make_chunk(1)
    storage.write(chunk)
    storage.write_record("ab", b"data")
    assert storage.sweep(-3600) == 0
    assert torch.equal(read_payload(storage, chunk), chunk.payload)
    assert storage.read_record("ab") == b"data"


def test_readers_writers_and_deleters_at_once(storage: Storage) -> None:
    """Whoever reads gets a chunk's own bytes or none, while it is written, deleted and written again."""
    chunks = [make_chunk(number, layer_bytes=BIG_LAYER_BYTES) for number in range(6)]
    stop = threading.Event()
    found = threading.Semaphore(0)

    def write_and_delete(seed: int) -> None:
        random = np.random.default_rng(seed)
        for number in random.integers(0, len(chunks), 60):
            storage.write(chunks[number])
            if random.random() < 0.5:
                storage.delete(chunks[number].key, "int8")

    def read(seed: int) -> None:
        random = np.random.default_rng(seed)
        while not stop.is_set():
            chunk = chunks[random.integers(0, len(chunks))]
            try:
                payload = read_payload(storage, chunk)
            except ChunkMissing as missing:
                if missing.reason != "absent":
                    raise
            else:
                assert torch.equal(payload, chunk.payload)
                found.release()

    storage.write(chunks[0])
    with ThreadPoolExecutor(4) as executor:
        readers = [executor.submit(read, seed) for seed in range(2)]
        writers = [executor.submit(write_and_delete, seed) for seed in range(2)]
        for writer in writers:
            writer.result()
        for chunk in chunks:
            storage.write(chunk)
        assert found.acquire(timeout=60)
        stop.set()
        for reader in readers:
            reader.result()
    for chunk in chunks:
        assert torch.equal(read_payload(storage, chunk), chunk.payload)
