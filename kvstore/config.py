"""Settings of a store."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvstore.eviction import EvictionPolicy, Worth
from kvstore.formats import get_format
from kvstore.shares import DEFAULT_POOLS, PoolShare

FormatName = Literal["original", "int8", "int4"]


@dataclass(frozen=True)
class TierConfig:
    """One lower tier.

    - `budget_bytes`: it never holds more; the least worthy chunks go first.
    - `format`: what pages are kept in. The newest of a session stay in the original one.
    - `expire_after`: seconds after which a chunk that nobody used is removed; None is never.
    - `location`: the folder of the disk tier, or the fsspec URL of the remote one.
    - `fsync`: for the disk: whether each chunk is forced to the disk. Without it a power cut (not a killed process) can
      lose the last chunks, which is found by their checksums.
    - `timeout`: for the remote: seconds after which a call has failed.
    """

    budget_bytes: int
    format: FormatName = "int8"
    expire_after: float | None = None
    location: str | Path = ""
    fsync: bool = False
    timeout: float = 5.0

    def __post_init__(self) -> None:
        if self.budget_bytes < 0:
            raise ValueError("a tier's budget_bytes must not be negative")
        if self.expire_after is not None and self.expire_after <= 0:
            raise ValueError("expire_after must be above 0 seconds, or None")
        get_format(self.format)


@dataclass(frozen=True)
class StoreConfig:
    """Settings of a store. Raises ValueError when one makes no sense.

    - `device_bytes`: memory for pages on the device.
    - `device_format`: "int8" keeps whole pages, but a session's newest, in int8 on the device too; they are decoded
      when attention reads them, so this trades time for room.
    - `host`, `disk`, `remote`: lower tiers; None is not to have one.
    - `slab_pages`: pages that are allocated together. A session of no more tokens than that can be adjacent. None
      chooses slabs of about 1/16 of the device's budget, up to 64 MiB or 1,024 tokens, whichever is more.
    - `newest_original_tokens`: tokens at a session's end that are not quantized (the residual of KIVI,
      arXiv 2402.02750).
    - `pools`: how sessions share the device.
    - `pin_budget`: fraction of the device's budget that pins may take.
    - `policy`: which pages go first.
    - `sleep_after`: seconds without a heartbeat or use after which a session leaves the device.
    - `layers_at_a_time`: layers that are restored together; fewer begin sooner, more read in larger pieces.
    """

    device_bytes: int
    device_format: Literal["original", "int8"] = "original"
    host: TierConfig | None = None
    disk: TierConfig | None = None
    remote: TierConfig | None = None
    slab_pages: int | None = None
    newest_original_tokens: int = 32
    pools: tuple[PoolShare, ...] = DEFAULT_POOLS
    pin_budget: float = 0.25
    policy: EvictionPolicy = field(default_factory=Worth)
    sleep_after: float = 600.0
    layers_at_a_time: int = 8

    def __post_init__(self) -> None:
        if self.device_bytes < 0:
            raise ValueError("device_bytes must not be negative")
        if self.device_format not in ("original", "int8"):
            raise ValueError(f"device_format {self.device_format!r} is not original or int8")
        if self.slab_pages is not None and self.slab_pages < 1:
            raise ValueError("slab_pages must be at least 1")
        if self.newest_original_tokens < 0:
            raise ValueError("newest_original_tokens must not be negative")
        if not 0 <= self.pin_budget <= 1:
            raise ValueError("pin_budget must be from 0 to 1")
        if self.sleep_after <= 0:
            raise ValueError("sleep_after must be above 0 seconds")
        if self.layers_at_a_time < 1:
            raise ValueError("layers_at_a_time must be at least 1")
        for name in ("disk", "remote"):
            tier = getattr(self, name)
            if tier is not None and not str(tier.location):
                raise ValueError(f"the {name} tier needs a location")
