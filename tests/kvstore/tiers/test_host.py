"""Memory of the host storage."""

from __future__ import annotations

import pytest
import torch

from kvstore.tiers import ChunkMissing, HostStorage, StorageError
from kvstore.tiers.host import BLOCK_BYTES
from tests.kvstore.tiers.chunks import LAYOUT, make_chunk, read_payload

# Four payloads fill a block.
QUARTER = BLOCK_BYTES // 4 // LAYOUT.layers


def test_memory_is_taken_in_blocks_and_returned() -> None:
    storage = HostStorage(LAYOUT)
    assert storage.bytes_allocated == storage.bytes_held == 0
    chunks = [make_chunk(number, layer_bytes=QUARTER) for number in range(9)]
    size = chunks[0].payload.nbytes
    for count, chunk in enumerate(chunks, start=1):
        assert storage.write(chunk) == size
        assert storage.bytes_held == count * size
        assert storage.bytes_allocated == -(-count // 4) * 4 * size
    for chunk in chunks[4:]:
        storage.delete(chunk.key, chunk.format)
    assert storage.bytes_held == storage.bytes_allocated == 4 * size
    for chunk in chunks[:4]:
        assert torch.equal(read_payload(storage, chunk), chunk.payload)
        storage.delete(chunk.key, chunk.format)
    assert storage.bytes_held == storage.bytes_allocated == 0


def test_free_slots_are_used_again() -> None:
    storage = HostStorage(LAYOUT)
    for number in range(40):
        storage.write(make_chunk(number, layer_bytes=QUARTER))
        if number >= 3:
            storage.delete(make_chunk(number - 3, layer_bytes=QUARTER).key, "int8")
    assert storage.bytes_held == 3 * QUARTER * LAYOUT.layers
    assert storage.bytes_allocated == 4 * QUARTER * LAYOUT.layers


def test_a_chunk_larger_than_a_block_has_one_of_its_own() -> None:
    storage = HostStorage(LAYOUT)
    chunk = make_chunk(1, layer_bytes=BLOCK_BYTES)
    storage.write(chunk)
    assert storage.bytes_allocated == chunk.payload.nbytes


def test_a_deleted_chunk_stays_for_those_who_read_it() -> None:
    storage = HostStorage(LAYOUT)
    neighbour, chunk, other = (make_chunk(number, layer_bytes=QUARTER) for number in range(3))
    storage.write(neighbour)
    storage.write(chunk)
    out = torch.zeros_like(chunk.payload)
    with storage.read(chunk.key, chunk.format, chunk.tokens) as reader:
        storage.delete(chunk.key, chunk.format)
        with pytest.raises(ChunkMissing):
            storage.read(chunk.key, chunk.format, chunk.tokens)
        storage.write(other)
        reader.read_into(0, out)
        assert torch.equal(out, chunk.payload)
    assert torch.equal(read_payload(storage, other), other.payload)
    for left in (neighbour, other):
        storage.delete(left.key, left.format)
    assert storage.bytes_allocated == 0


def test_two_who_write_the_same_chunk_take_one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, chunk = HostStorage(LAYOUT), make_chunk(1)
    copy = torch.Tensor.copy_

    def overtaken(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        monkeypatch.setattr(torch.Tensor, "copy_", copy)
        storage.write(chunk)
        return copy(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", overtaken)
    storage.write(chunk)
    assert torch.equal(read_payload(storage, chunk), chunk.payload)
    assert storage.bytes_held == chunk.payload.nbytes
    storage.delete(chunk.key, chunk.format)
    assert storage.bytes_allocated == 0


def test_closing_a_reader_twice_does_no_harm() -> None:
    storage = HostStorage(LAYOUT)
    chunk = make_chunk(1)
    storage.write(chunk)
    with storage.read(chunk.key, chunk.format, chunk.tokens) as first:
        second = storage.read(chunk.key, chunk.format, chunk.tokens)
        second.close()
        second.close()
        storage.delete(chunk.key, chunk.format)
        assert storage.bytes_allocated > 0
        first.read_into(0, torch.zeros_like(chunk.payload))
    assert storage.bytes_allocated == 0


def test_no_memory_is_a_storage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: object, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    storage = HostStorage(LAYOUT)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", no_memory)
        with pytest.raises(StorageError, match="budget"):
            storage.write(make_chunk(1))
    assert list(storage.scan()) == []
    storage.write(make_chunk(1))
    assert torch.equal(read_payload(storage, make_chunk(1)), make_chunk(1).payload)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory is CUDA's")
def test_memory_is_page_locked_where_asked() -> None:
    storage = HostStorage(LAYOUT, page_locked=True)
    chunk = make_chunk(1)
    storage.write(chunk)
    assert torch.equal(read_payload(storage, chunk), chunk.payload)
    (entry,) = storage._entries.values()
    assert entry.slot.payload.is_pinned()


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA it can be had")
def test_page_locked_memory_that_cannot_be_had_is_a_storage_error() -> None:
    with pytest.raises(StorageError, match="page-locked"):
        HostStorage(LAYOUT, page_locked=True).write(make_chunk(1))
