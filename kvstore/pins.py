"""Pins: pages that are kept on the device, each for a reason and within a budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstore.errors import PinRefused
from kvstore.records import Ids
from kvstore.residency import Residency


@dataclass(frozen=True)
class Pin:
    """Pages that were pinned together. `since` is in seconds of the store's clock, `bytes` what pinning them took from
    the budget."""

    number: int
    reason: str
    owner: str
    since: float
    records: tuple[int, ...]
    bytes: int


class Pins:
    """All pins. Pages under several pins count once, and stay until the last is gone."""

    def __init__(self, residency: Residency, budget_bytes: int) -> None:
        self._residency = residency
        self.budget_bytes = budget_bytes
        self.bytes = 0
        self._pins: dict[int, Pin] = {}
        self._next = 1

    def __iter__(self) -> Iterator[Pin]:
        return iter(tuple(self._pins.values()))

    def add(self, ids: Sequence[int] | Ids, reason: str, owner: str, now: float) -> Pin:
        """Pin pages; what they build on is kept with them. Raises PinRefused when the budget does not allow it."""
        if not reason:
            raise ValueError("a pin needs a reason")
        records = self._residency.records
        chosen = tuple(dict.fromkeys(int(record) for record in ids))
        new = [record for record in chosen if records.pins[record] == 0]
        size = len(new) * self._residency.spec.bytes_per_page
        if self.bytes + size > self.budget_bytes:
            self._residency.counters.refusals["pin"] += 1
            raise PinRefused(
                f"Pinning {size:,} bytes ({reason}) would exceed the budget for pins: {self.bytes:,} of"
                f" {self.budget_bytes:,} bytes are pinned. Remove a pin or raise the budget."
            )
        records.add(records.pins, chosen, 1)
        self._residency.hold(chosen, locked=False)
        self.bytes += size
        pin = Pin(self._next, reason, owner, now, chosen, size)
        self._pins[pin.number] = pin
        self._next += 1
        return pin

    def remove(self, number: int) -> None:
        """Remove a pin. Raises KeyError when there is none of that number."""
        pin = self._pins.pop(number)
        records = self._residency.records
        records.add(records.pins, pin.records, -1)
        free = sum(1 for record in pin.records if records.pins[record] == 0)
        self.bytes -= free * self._residency.spec.bytes_per_page
        self._residency.release(pin.records, locked=False)
