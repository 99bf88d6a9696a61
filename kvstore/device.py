"""The pools of pages that a store has on its device."""

from __future__ import annotations

import torch

from kvstore.config import StoreConfig
from kvstore.formats import INT8
from kvstore.pool import PagePool
from kvstore.spec import KVSpec

SLAB_BYTES = 64 * 1024**2
SLAB_TOKENS = 1024
SLABS_AT_LEAST = 16


def device_pools(spec: KVSpec, config: StoreConfig, device: torch.device) -> tuple[PagePool, PagePool | None]:
    """The pool of pages in the model's own dtype, and that of int8 pages where the device keeps such, which has half of
    the budget. Raises ValueError when the budget does not hold a page."""
    slab = config.slab_pages or _slab_pages(spec, config.device_bytes)
    half = config.device_bytes // 2
    plain = config.device_bytes if config.device_format == "original" else half
    if plain < spec.bytes_per_page:
        raise ValueError(
            f"device_bytes must hold a page, which has {spec.bytes_per_page:,} bytes, and twice as much when the device"
            " also keeps int8 pages"
        )
    pool = PagePool(spec, plain, slab_pages=slab, device=device)
    if config.device_format == "original":
        return pool, None
    return pool, PagePool(spec, config.device_bytes - half, slab_pages=slab, device=device, format=INT8)


def _slab_pages(spec: KVSpec, budget: int) -> int:
    usual = max(SLAB_BYTES // spec.bytes_per_page, SLAB_TOKENS // spec.page_tokens)
    return max(1, min(usual, budget // SLABS_AT_LEAST // spec.bytes_per_page))
