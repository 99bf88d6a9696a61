"""Pages on their way from lower tiers to the device: what is asked for, and how far it is."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kvstore.tiers import Storage


@dataclass(frozen=True)
class Source:
    """A copy of a page: the tier that has it, and the format."""

    storage: Storage
    format: str


@dataclass
class Arrival:
    """One page on its way.

    `target` is the page on the device, `[layers, 2, kv_heads, page_tokens, head_dim]`, or `[layers, layer_bytes]` of
    uint8 for an int8 page. `sources` are the copies, the quickest first; `tokens` (int32) are compared with the
    chunk's. What became of it is in the fields below those.
    """

    record: int
    key: bytes
    tokens: npt.NDArray[np.int32]
    target: torch.Tensor
    sources: list[Source]
    formats: set[str] = field(default_factory=set)  # those that layers came from
    fidelity: int = 0  # what the KV went through before
    tier: str = ""  # where the first layer came from
    bytes: int = 0


@dataclass(frozen=True)
class Failure:
    """A copy of a page that could not be used: `reason` is for counters, `detail` for people. `record` is NONE when it
    was not for want of a copy."""

    record: int
    tier: str
    reason: str
    detail: str


class Restoration:
    """Pages on their way to the device. `wait` and `cancel` are safe from any thread.

    `failures` are all copies that could not be used; `lost` are records for which no copy was left, and those behind
    them, whose KV is of no use without.
    """

    def __init__(self, arrivals: Sequence[Arrival], layers: int) -> None:
        self.arrivals = list(arrivals)
        self.lost: set[int] = set()
        self.failures: list[Failure] = []
        self._layers = layers
        self._ready = 0  # layers that are there
        self._ended = False
        self._cancelled = False
        self._changed = threading.Condition()

    @property
    def done(self) -> bool:
        """Whether nothing more will happen."""
        return self._ended

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def wait(
        self,
        layer: int | None = None,
        timeout: float | None = None,
        *,
        records: AbstractSet[int] | None = None,
    ) -> frozenset[int]:
        """Wait for a layer (None: for all) of the pages of these records (None: of all), or until one of them is lost.
        Returns all records that are lost, as far as is known."""
        needed = self._layers if layer is None else layer + 1
        awaited = {arrival.record for arrival in self.arrivals} if records is None else records
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or self._ready >= needed or not self.lost.isdisjoint(awaited), timeout
            )
            return frozenset(self.lost)

    def wait_until_done(self, timeout: float | None = None) -> bool:
        """Wait until nothing more will happen; pages may be lost then."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended, timeout)

    def cancel(self) -> None:
        """Stop as soon as possible; pages that are not whole by then are lost."""
        self._cancelled = True

    # For the thread that does the work.

    def lose_from(self, number: int) -> None:
        """Give up the arrivals from this number on."""
        with self._changed:
            self.lost.update(arrival.record for arrival in self.arrivals[number:])
            self._changed.notify_all()

    def advance(self, ready: int) -> None:
        """Note how many layers are there, unless the work was cut short."""
        with self._changed:
            if not self._cancelled:
                self._ready = ready
                self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            if self._ready < self._layers:
                self.lost.update(arrival.record for arrival in self.arrivals)
            self._ended = True
            self._changed.notify_all()
