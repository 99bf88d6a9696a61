"""The shape of one model's KV."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVSpec:
    """What a store has to know of the model whose KV it keeps.

    One token's KV is, for each of `layers` layers, a key and a value of shape `[kv_heads, head_dim]`.
    `fingerprint` identifies the model's weights and configuration: KV is only ever valid for the model with
    the same fingerprint.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    fingerprint: str

    def __post_init__(self) -> None:
        if min(self.layers, self.kv_heads, self.head_dim) < 1:
            raise ValueError("layers, kv_heads and head_dim must be at least 1")

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize
