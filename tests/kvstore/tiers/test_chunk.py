"""Chunks and records as bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import KVSpec
from kvstore.tiers import MAX_RECORD_BYTES, Chunk, ChunkHeader, ChunkLayout, ChunkMissing
from kvstore.tiers.chunk import (
    chunk_path,
    encode_chunk,
    encode_record,
    is_record_name,
    is_temporary_name,
    parse_chunk_name,
    parse_header,
    parse_record,
    temporary_name,
)
from tests.kvstore.tiers.chunks import LAYOUT, make_chunk


@st.composite
def layouts(draw: st.DrawFn) -> ChunkLayout:
    size = st.integers(1, 6)
    return ChunkLayout(
        draw(st.text(max_size=5)), "float32", draw(size), draw(size), draw(size), page_tokens=draw(size)
    )


@st.composite
def chunks_with_layouts(draw: st.DrawFn) -> tuple[Chunk, ChunkLayout]:
    layout = draw(layouts())
    layer_bytes = draw(st.integers(0, 9))
    token = st.integers(-(2**31), 2**31 - 1)
    payload = draw(st.binary(min_size=layout.layers * layer_bytes, max_size=layout.layers * layer_bytes))
    chunk = Chunk(
        key=draw(st.binary(min_size=16, max_size=16)),
        tokens=np.array(draw(st.lists(token, max_size=layout.page_tokens)), dtype=np.int32),
        format=draw(st.from_regex(r"[a-z0-9]{1,16}", fullmatch=True)),
        payload=torch.tensor(list(payload), dtype=torch.uint8).view(layout.layers, layer_bytes),
        fidelity=draw(st.integers(0, 255)),
    )
    return chunk, layout


def as_bytes(chunk: Chunk, layout: ChunkLayout) -> bytes:
    return b"".join(encode_chunk(chunk, layout))


def parse(data: bytes, layout: ChunkLayout, chunk: Chunk) -> ChunkHeader:
    header = parse_header(data, layout)
    header.match(chunk.key, chunk.format, chunk.tokens)
    return header


@given(chunks_with_layouts())
@settings(max_examples=150, deadline=None)
def test_what_is_encoded_is_parsed(case: tuple[Chunk, ChunkLayout]) -> None:
    chunk, layout = case
    data = as_bytes(chunk, layout)
    assert len(data) == layout.chunk_bytes(chunk.payload.shape[1])
    header = parse(data, layout, chunk)
    assert (header.key, header.fidelity) == (chunk.key, chunk.fidelity)
    assert (header.format, header.layer_bytes) == (chunk.format, chunk.payload.shape[1])
    assert header.tokens.dtype == np.int32
    assert header.tokens.tolist() == chunk.tokens.tolist()
    header.verify(0, chunk.payload)
    assert data[layout.header_bytes :] == chunk.payload.numpy().tobytes()


@given(chunks_with_layouts(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_header_is_no_header(case: tuple[Chunk, ChunkLayout], data: st.DataObject) -> None:
    chunk, layout = case
    header = bytearray(as_bytes(chunk, layout)[: layout.header_bytes])
    if data.draw(st.booleans(), label="truncated"):
        damaged = bytes(header[: data.draw(st.integers(0, len(header) - 1))])
    else:
        place = data.draw(st.integers(0, len(header) - 1))
        header[place] ^= data.draw(st.integers(1, 255))
        damaged = bytes(header)
    with pytest.raises(ChunkMissing):
        parse_header(damaged, layout)


@given(st.binary(max_size=600))
@settings(max_examples=100, deadline=None)
def test_garbage_is_no_header(data: bytes) -> None:
    with pytest.raises(ChunkMissing):
        parse_header(data, LAYOUT)


@given(chunks_with_layouts(), layouts())
@settings(max_examples=100, deadline=None)
def test_a_header_of_another_layout_is_foreign(case: tuple[Chunk, ChunkLayout], other: ChunkLayout) -> None:
    chunk, layout = case
    data = as_bytes(chunk, layout).ljust(other.header_bytes, b"\0")
    if other == layout:
        parse_header(data, other)
    else:
        with pytest.raises(ChunkMissing) as missing:
            parse_header(data, other)
        assert missing.value.reason == "foreign"


def test_a_chunk_of_another_version_is_foreign() -> None:
    data = bytearray(as_bytes(make_chunk(1), LAYOUT))
    data[8] += 1  # the version follows the 8 bytes of magic
    with pytest.raises(ChunkMissing) as missing:
        parse_header(bytes(data), LAYOUT)
    assert missing.value.reason == "foreign"


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(ChunkLayout)])
def test_each_field_of_a_layout_makes_another_one(field: str) -> None:
    value = getattr(LAYOUT, field)
    changed: Any = value + 1 if isinstance(value, int) else value + "x"
    other = dataclasses.replace(LAYOUT, **{field: changed})
    assert other.digest != LAYOUT.digest


def test_the_layout_of_a_spec() -> None:
    spec = KVSpec(layers=5, kv_heads=2, head_dim=4, dtype=torch.float32, fingerprint="model", page_tokens=8)
    assert ChunkLayout.of(spec) == LAYOUT


def test_layers_are_verified_one_by_one() -> None:
    chunk = make_chunk(1)
    header = parse_header(as_bytes(chunk, LAYOUT), LAYOUT)
    header.verify(2, chunk.payload[2:4])
    swapped = chunk.payload[[3, 2]]
    with pytest.raises(ChunkMissing) as missing:
        header.verify(2, swapped)
    assert missing.value.reason == "checksum"


@pytest.mark.parametrize(
    "change",
    [
        {"key": b"short"},
        {"tokens": np.zeros(3, dtype=np.int64)},
        {"tokens": np.zeros((1, 3), dtype=np.int32)},
        {"format": "../up"},
        {"format": ""},
        {"payload": torch.zeros(5, 4)},
        {"payload": torch.zeros(5, dtype=torch.uint8)},
        {"payload": torch.zeros(4, 5, dtype=torch.uint8).T},
    ],
)
def test_a_chunk_refuses_what_makes_none(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        dataclasses.replace(make_chunk(1), **change)


@pytest.mark.parametrize(
    "change",
    [{"payload": torch.zeros(4, 8, dtype=torch.uint8)}, {"tokens": np.zeros(9, dtype=np.int32)}],
)
def test_a_chunk_of_another_layout_is_not_encoded(change: dict[str, Any]) -> None:
    chunk = dataclasses.replace(make_chunk(1), **change)
    with pytest.raises(ValueError, match=r"not 5|page of 8"):
        encode_chunk(chunk, LAYOUT)


@given(st.binary(max_size=300))
@settings(max_examples=50, deadline=None)
def test_records_come_back(data: bytes) -> None:
    assert parse_record("ab12", b"".join(encode_record("ab12", data))) == data


@given(st.binary(max_size=50), st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_records_are_missing(content: bytes, data: st.DataObject) -> None:
    encoded = bytearray(b"".join(encode_record("ab12", content)))
    damage = data.draw(st.sampled_from(["flip", "cut", "longer"]))
    if damage == "flip":
        encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    elif damage == "cut":
        del encoded[data.draw(st.integers(0, len(encoded) - 1)) :]
    else:
        encoded += b"x"
    with pytest.raises(ChunkMissing):
        parse_record("ab12", bytes(encoded))


def test_a_renamed_record_is_missing() -> None:
    with pytest.raises(ChunkMissing) as missing:
        parse_record("ab13", b"".join(encode_record("ab12", b"data")))
    assert missing.value.reason == "checksum"


def test_a_record_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="allowed"):
        encode_record("ab12", bytes(MAX_RECORD_BYTES + 1))


@pytest.mark.parametrize("name", ["", "AB", "xyz", "a" * 65, "a/b", "..", "a\n"])
def test_a_record_needs_a_name_in_hex(name: str) -> None:
    with pytest.raises(ValueError, match="hex digits"):
        encode_record(name, b"")


def test_names_tell_chunks_records_and_temporary_files_apart() -> None:
    key = bytes(range(16))
    folders, _, name = chunk_path(key, "int8").rpartition("/")
    assert folders == "0/0"
    assert parse_chunk_name(name) == (key, "int8")
    assert is_temporary_name(temporary_name())
    for other in (temporary_name(), "ab12", name + "x", name.upper(), "lost+found"):
        assert parse_chunk_name(other) is None
    assert not is_temporary_name(name)
    assert not is_record_name(name)
    assert not is_record_name(temporary_name())
