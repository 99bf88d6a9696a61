"""Chunks for tests, whose content follows from a number."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from kvstore.tiers import Chunk, ChunkLayout, Storage

LAYOUT = ChunkLayout("model", "float32", layers=5, kv_heads=2, head_dim=4, page_tokens=8)
LAYER_BYTES = 96
# Big enough that writing one takes more than one step of anything.
BIG_LAYER_BYTES = 40_000


def make_chunk(
    number: int, *, format: str = "int8", layer_bytes: int = LAYER_BYTES, layout: ChunkLayout = LAYOUT
) -> Chunk:
    """The chunk of that number."""
    random = np.random.default_rng(number)
    payload = random.integers(0, 256, (layout.layers, layer_bytes), dtype=np.uint8)
    return Chunk(
        key=_key(number),
        tokens=random.integers(0, 2**31 - 1, layout.page_tokens, dtype=np.int32),
        format=format,
        payload=torch.from_numpy(payload),
    )


def read_payload(storage: Storage, chunk: Chunk, layers_at_a_time: int = 2) -> torch.Tensor:
    """The payload that a storage has for a chunk's key, format and tokens. Raises ChunkMissing."""
    result = torch.zeros_like(chunk.payload)
    with storage.read(chunk.key, chunk.format, chunk.tokens) as reader:
        for first in range(0, len(result), layers_at_a_time):
            reader.read_into(first, result[first : first + layers_at_a_time])
    return result


def _key(number: int) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()
