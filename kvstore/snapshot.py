"""The store's figures at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PoolSnapshot:
    """One pool of sessions: bytes of its pages on the device, and its share in bytes."""

    name: str
    used_bytes: int
    guaranteed_bytes: int
    maximum_bytes: int


@dataclass(frozen=True)
class TierSnapshot:
    """One lower tier. `ready` is False until what earlier processes left is known."""

    name: str
    format: str
    bytes: int
    budget_bytes: int
    chunks: int
    ready: bool


@dataclass(frozen=True)
class StoreSnapshot:
    """The store's figures at one moment. Bytes are of pages and their scales; totals count since the store was made.

    - `sessions` counts the kept sessions, `active` the acquired ones, whether kept or not, `sleeping` those asleep.
    - `bytes` are those of pages in use on the device, `allocated_bytes` those of its slabs, `pinned_bytes` those of
      pinned pages, and `bookkeeping_bytes` those of records and index.
    - `pages` counts pages on the device, `records` all that are known, in whatever tier.
    - `totals` are the fields of `Counters`; those counted by name are there as "field:name".
    """

    sessions: int
    active: int
    sleeping: int
    bytes: int
    allocated_bytes: int
    budget_bytes: int
    pinned_bytes: int
    bookkeeping_bytes: int
    pages: int
    records: int
    jobs: int
    pools: tuple[PoolSnapshot, ...]
    tiers: tuple[TierSnapshot, ...]
    totals: Mapping[str, int]
