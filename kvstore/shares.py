"""How pools of sessions share the device: guaranteed and maximum shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.snapshot import PoolSnapshot


@dataclass(frozen=True)
class PoolShare:
    """A pool of sessions and its share of the device's budget.

    - `guaranteed`: fraction of the budget that other pools can never take from it, once it uses it.
    - `maximum`: fraction of the budget that it never exceeds.
    - `priority`: weight of its pages' worth; 1 is normal.
    """

    name: str
    guaranteed: float = 0.0
    maximum: float = 1.0
    priority: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.guaranteed <= self.maximum <= 1:
            raise ValueError(f"pool {self.name!r}: 0 <= guaranteed <= maximum <= 1 does not hold")
        if self.priority <= 0:
            raise ValueError(f"pool {self.name!r}: priority must be above 0")


DEFAULT_POOLS = (PoolShare("default"),)


class Shares:
    """Bytes that each pool uses, and who may take from whom. Pools are numbered in the order given."""

    def __init__(self, pools: Sequence[PoolShare], budget_bytes: int) -> None:
        if not pools:
            raise ValueError("there must be at least one pool")
        if sum(pool.guaranteed for pool in pools) > 1 + 1e-9:
            raise ValueError("the pools' guaranteed shares exceed the whole")
        if len({pool.name for pool in pools}) < len(pools):
            raise ValueError("pools must have different names")
        self.pools = tuple(pools)
        self._budget = budget_bytes
        self.used = [0] * len(pools)

    def number(self, name: str) -> int:
        """A pool's number. Raises ValueError when there is none of that name."""
        for number, pool in enumerate(self.pools):
            if pool.name == name:
                return number
        raise ValueError(
            f"there is no pool {name!r}; there are {', '.join(pool.name for pool in self.pools)}"
        )

    def charge(self, pool: int, change: int) -> None:
        """Count bytes taken, or given back when negative."""
        self.used[pool] += change

    def excess(self, pool: int, more: int) -> int:
        """Bytes by which a pool would exceed its maximum if it took `more`."""
        return max(0, self.used[pool] + more - int(self.pools[pool].maximum * self._budget))

    def snapshot(self) -> tuple[PoolSnapshot, ...]:
        """Each pool's figures."""
        return tuple(
            PoolSnapshot(
                pool.name, used, int(pool.guaranteed * self._budget), int(pool.maximum * self._budget)
            )
            for pool, used in zip(self.pools, self.used, strict=True)
        )

    def may_lose(self, pool: int, taker: int, size: int) -> bool:
        """Whether a page of `size` bytes may be taken from `pool` for `taker`."""
        return pool == taker or self.used[pool] - size >= self.pools[pool].guaranteed * self._budget
