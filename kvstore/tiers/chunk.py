"""Chunks and records, and how they look as files.

A chunk is one page of KV in some format. As a file it is a header, whose length follows from the layout, and then the
payload, layer after layer, so that some layers are one contiguous read. The header, in little-endian order:

    magic, version, digest of the layout, key, number of tokens, bytes of a layer, fidelity, format
    tokens            int32 a token, with zeros up to `page_tokens`
    layer checksums   XXH3 (64 bits) of each layer
    header checksum   XXH3 (64 bits) of all that is before it

The layout's digest stands for the model and the page's shape. A reader knows its own layout, so it knows how long a
header is before it has read one, and never allocates what a damaged or hostile file asks for.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import struct
from dataclasses import dataclass
from functools import cached_property
from os import getpid
from typing import TYPE_CHECKING

import numpy as np
import torch
import xxhash

from kvstore.keys import KEY_BYTES
from kvstore.tiers.storage import ChunkMissing, Tokens

if TYPE_CHECKING:
    from kvstore.spec import KVSpec

MAX_RECORD_BYTES = 64 * 2**20

_VERSION = 1
_CHUNK_MAGIC = b"KWCHUNK\n"
_FIXED = struct.Struct("<8sI16s16sIQB16s")
_CHECKSUM = struct.Struct("<Q")
_RECORD_MAGIC = b"KWRECRD\n"
_RECORD = struct.Struct("<8sIQ16s")  # magic, version, bytes of data, XXH3 (128 bits) of name and data
RECORD_HEADER_BYTES = _RECORD.size

_FORMAT = re.compile(r"[a-z0-9]{1,16}")
_CHUNK_NAME = re.compile(r"([0-9a-f]{32})\.([a-z0-9]{1,16})\.kv")
_RECORD_NAME = re.compile(r"[0-9a-f]{1,64}")
_TEMPORARY_NAME = re.compile(r"\.[0-9]+-[0-9a-f]{16}\.tmp")


@dataclass(frozen=True)
class ChunkLayout:
    """Which model's KV chunks hold, and the shape of their pages. Chunks of one layout are foreign to any other.

    `fingerprint` identifies the model; `dtype` is its KV's ("float32"), whatever the format of a chunk.
    """

    fingerprint: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int

    @classmethod
    def of(cls, spec: KVSpec) -> ChunkLayout:
        """The layout of a model's pages."""
        return cls(
            fingerprint=spec.fingerprint,
            dtype=str(spec.dtype).removeprefix("torch."),
            layers=spec.layers,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            page_tokens=spec.page_tokens,
        )

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that stand for this layout."""
        fields = [self.fingerprint, self.dtype, self.layers, self.kv_heads, self.head_dim, self.page_tokens]
        return hashlib.blake2b(json.dumps(fields).encode(), digest_size=16).digest()

    @cached_property
    def header_bytes(self) -> int:
        """Bytes of a chunk's header."""
        return _FIXED.size + 4 * self.page_tokens + _CHECKSUM.size * (self.layers + 1)

    def chunk_bytes(self, layer_bytes: int) -> int:
        """Bytes of a whole chunk whose layers have `layer_bytes` bytes."""
        return self.header_bytes + self.layers * layer_bytes


@dataclass(frozen=True, eq=False)
class Chunk:
    """One page of KV to be stored. Raises ValueError when the fields make no chunk.

    - `key`: 16 bytes that identify the KV: a hash of the whole token prefix, the model and the owner's salt.
    - `tokens`: int32, at most as many as a page has.
    - `format`: how the payload is encoded; up to 16 lower-case letters and digits.
    - `payload`: uint8 `[layers, layer_bytes]`, contiguous, on the CPU.
    - `fidelity`: a code below 256 for what the KV went through before it was encoded; 0 is nothing.
    """

    key: bytes
    tokens: Tokens
    format: str
    payload: torch.Tensor
    fidelity: int = 0

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES:
            raise ValueError(f"keys have {KEY_BYTES} bytes")
        if self.tokens.dtype != np.int32 or self.tokens.ndim != 1:
            raise ValueError("tokens are int32 and in one dimension")
        if not _FORMAT.fullmatch(self.format):
            raise ValueError(f"{self.format!r} is no name of a format")
        payload = self.payload
        if payload.dtype != torch.uint8 or payload.dim() != 2:
            raise ValueError("a payload is uint8 [layers, layer_bytes]")
        if not payload.is_contiguous() or payload.device.type != "cpu":
            raise ValueError("a payload is contiguous and on the CPU")

    def check(self, layout: ChunkLayout) -> None:
        """Raises ValueError unless the chunk is of that layout."""
        if len(self.payload) != layout.layers:
            raise ValueError(f"the payload has {len(self.payload)} layers, not {layout.layers}")
        if len(self.tokens) > layout.page_tokens:
            raise ValueError(f"{len(self.tokens)} tokens in a page of {layout.page_tokens}")


@dataclass(frozen=True, eq=False)
class ChunkHeader:
    """What a stored chunk says of itself; the fields are those of `Chunk`. `checksums` has one of each layer, or
    nothing where bytes do not change by themselves: in memory."""

    key: bytes
    tokens: Tokens
    format: str
    layers: int
    layer_bytes: int
    fidelity: int = 0
    checksums: tuple[int, ...] = ()

    @classmethod
    def of(cls, chunk: Chunk, checksums: tuple[int, ...] = ()) -> ChunkHeader:
        layers, layer_bytes = chunk.payload.shape
        return cls(
            key=chunk.key,
            tokens=chunk.tokens,
            format=chunk.format,
            layers=layers,
            layer_bytes=layer_bytes,
            fidelity=chunk.fidelity,
            checksums=checksums,
        )

    def match(self, key: bytes, format: str, tokens: Tokens | None) -> None:
        """Raises ChunkMissing unless this is the chunk that was asked for."""
        if (self.key, self.format) != (key, format):
            detail = f"{key.hex()} in {format} is in truth {self.key.hex()} in {self.format}"
            raise ChunkMissing("foreign", detail)
        if tokens is not None and not np.array_equal(self.tokens, tokens):
            raise ChunkMissing("tokens", f"{key.hex()} holds other tokens than its key was asked for")

    def verify(self, first_layer: int, data: torch.Tensor) -> None:
        """Compare layers, uint8 `[n, layer_bytes]`, with their checksums. Raises ChunkMissing."""
        if not self.checksums:
            return
        for layer, checksum in enumerate(layer_checksums(data), start=first_layer):
            if checksum != self.checksums[layer]:
                raise ChunkMissing(
                    "checksum", f"layer {layer} of {self.key.hex()} in {self.format} is damaged"
                )


def layer_checksums(payload: torch.Tensor) -> tuple[int, ...]:
    """XXH3 of each row of uint8 `[n, layer_bytes]`."""
    return tuple(xxhash.xxh3_64_intdigest(row) for row in payload.numpy())


def raw_bytes(data: torch.Tensor) -> memoryview:
    """The memory of a contiguous uint8 tensor on the CPU, not copied."""
    return data.view(-1).numpy().data


def encode_chunk(chunk: Chunk, layout: ChunkLayout) -> list[bytes | memoryview]:
    """A chunk as the pieces of its file: header and payload. Raises ValueError for a chunk of another layout."""
    chunk.check(layout)
    tokens = np.zeros(layout.page_tokens, dtype="<i4")
    tokens[: len(chunk.tokens)] = chunk.tokens
    header = _FIXED.pack(
        _CHUNK_MAGIC,
        _VERSION,
        layout.digest,
        chunk.key,
        len(chunk.tokens),
        chunk.payload.shape[1],
        chunk.fidelity,
        chunk.format.encode(),
    )
    header += tokens.tobytes()
    header += np.array(layer_checksums(chunk.payload), dtype="<u8").tobytes()
    header += _CHECKSUM.pack(xxhash.xxh3_64_intdigest(header))
    return [header, raw_bytes(chunk.payload)]


def parse_header(data: bytes, layout: ChunkLayout) -> ChunkHeader:
    """The header at the beginning of a chunk's file. Raises ChunkMissing for anything but a whole header of that
    layout."""
    size = layout.header_bytes
    if len(data) < size:
        raise ChunkMissing("truncated", f"{len(data)} bytes are no header of {size}")
    fields = _FIXED.unpack_from(data)
    magic, version, digest, key, count, layer_bytes, fidelity, format = fields
    if (magic, version) != (_CHUNK_MAGIC, _VERSION):
        raise ChunkMissing("foreign", f"not a chunk of version {_VERSION}")
    if digest != layout.digest:
        raise ChunkMissing("foreign", "a chunk of another model or page shape")
    (checksum,) = _CHECKSUM.unpack_from(data, size - _CHECKSUM.size)
    if checksum != xxhash.xxh3_64_intdigest(memoryview(data)[: size - _CHECKSUM.size]):
        raise ChunkMissing("checksum", "the header is damaged")
    if count > layout.page_tokens:
        raise ChunkMissing("foreign", f"{count} tokens in a page of {layout.page_tokens}")
    tokens = np.frombuffer(data, dtype="<i4", count=count, offset=_FIXED.size)
    checksums = np.frombuffer(
        data, dtype="<u8", count=layout.layers, offset=_FIXED.size + 4 * layout.page_tokens
    )
    return ChunkHeader(
        key=key,
        tokens=tokens.astype(np.int32),
        format=format.rstrip(b"\0").decode("ascii", errors="replace"),
        layers=layout.layers,
        layer_bytes=layer_bytes,
        fidelity=fidelity,
        checksums=tuple(checksums.tolist()),
    )


def encode_record(name: str, data: bytes) -> list[bytes | memoryview]:
    """A record as the pieces of its file. Raises ValueError for a name or size that is not allowed."""
    check_record_name(name)
    if len(data) > MAX_RECORD_BYTES:
        raise ValueError(f"a record of {len(data):,} bytes; {MAX_RECORD_BYTES:,} are allowed")
    return [_RECORD.pack(_RECORD_MAGIC, _VERSION, len(data), _record_checksum(name, data)), data]


def parse_record(name: str, content: bytes) -> bytes:
    """The data of a record's file. Raises ChunkMissing for anything but that record, whole."""
    if len(content) < RECORD_HEADER_BYTES:
        raise ChunkMissing("truncated", f"{len(content)} bytes are no record")
    magic, version, size, checksum = _RECORD.unpack_from(content)
    if (magic, version) != (_RECORD_MAGIC, _VERSION):
        raise ChunkMissing("foreign", f"not a record of version {_VERSION}")
    data = content[RECORD_HEADER_BYTES:]
    if len(data) != size:
        raise ChunkMissing("truncated", f"a record of {size:,} bytes has {len(data):,}")
    if checksum != _record_checksum(name, data):
        raise ChunkMissing("checksum", f"the record {name} is damaged, or has another name")
    return data


def _record_checksum(name: str, data: bytes) -> bytes:
    hash = xxhash.xxh3_128(f"{name}\n".encode())
    hash.update(data)
    return hash.digest()


# Names.


def chunk_path(key: bytes, format: str) -> str:
    """Where a chunk is below its layout's folder: in folders by the first two hex digits, so that none grows huge."""
    digits = key.hex()
    return f"{digits[0]}/{digits[1]}/{digits}.{format}.kv"


def parse_chunk_name(name: str) -> tuple[bytes, str] | None:
    """Key and format of the chunk in a file of that name (without folders); None when it is no chunk's."""
    match = _CHUNK_NAME.fullmatch(name)
    return (bytes.fromhex(match[1]), match[2]) if match else None


def check_record_name(name: str) -> None:
    """Raises ValueError for a name that a record cannot have."""
    if not is_record_name(name):
        raise ValueError(f"{name!r} is no name of a record: 1 to 64 hex digits")


def is_record_name(name: str) -> bool:
    return _RECORD_NAME.fullmatch(name) is not None


def temporary_name() -> str:
    """A new name for a file that is being written; no chunk or record has such a name."""
    return f".{getpid()}-{secrets.token_hex(8)}.tmp"


def is_temporary_name(name: str) -> bool:
    return _TEMPORARY_NAME.fullmatch(name) is not None
