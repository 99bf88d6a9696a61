"""The shape of one model's KV."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvstore.rope import RopeSpec


@dataclass(frozen=True)
class KVSpec:
    """What a store has to know of the model whose KV it keeps.

    One token's KV is, for each of `layers` layers, a key and a value of shape `[kv_heads, head_dim]`.
    `fingerprint` identifies the model's weights and configuration: KV is only ever valid for the model with
    the same fingerprint. KV is kept in pages of `page_tokens` tokens. `rope` tells, for each layer, how its keys are
    rotated by their positions (None for a layer whose keys are not); without it, keys cannot be moved to other
    positions.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    fingerprint: str
    page_tokens: int = 16
    rope: tuple[RopeSpec | None, ...] | None = None

    def __post_init__(self) -> None:
        if min(self.layers, self.kv_heads, self.head_dim, self.page_tokens) < 1:
            raise ValueError("layers, kv_heads, head_dim and page_tokens must be at least 1")
        if self.rope is not None and len(self.rope) != self.layers:
            raise ValueError(f"rope describes {len(self.rope)} layers, not {self.layers}")

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers, in the model's own dtype."""
        return self.page_tokens * self.bytes_per_token

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one page: `[layers, 2 (keys, values), kv_heads, page_tokens, head_dim]`."""
        return self.layers, 2, self.kv_heads, self.page_tokens, self.head_dim
