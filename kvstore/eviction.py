"""Which pages leave the device first.

A policy gives each candidate a worth, and the store takes the least worthy first. It evicts leaf first: a page is a
candidate only when none of its continuations is on the device, since KV cannot be used without the KV before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

# Seconds after which a use counts half in `PageStatistics.hits`.
HIT_HALF_LIFE = 24 * 3600.0

Doubles = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PageStatistics:
    """What is known of `n` pages: arrays of the shape `[n]`, one entry a page, and the time.

    - `now`: seconds on the store's clock; so are all other times.
    - `last_use`: when a session last attended to the page or a lookup found it.
    - `hits`: number of uses, decayed to `last_use`: each use makes it 1 + hits * 0.5 ** (seconds since the use before
      / HIT_HALF_LIFE).
    - `heartbeat`: last sign of life (an open socket, a bot's call) of a session that holds it; -inf without any.
    - `position`: position of its first token.
    - `priority`: weight of its scenario's pool, 1 is normal.
    - `emphasis`: how much the user or the planner marked its span, from 0 up.
    - `attention`: attention mass that later tokens gave it, 0 when not measured.
    - `superseded`: its session went on with another branch, without it.
    - `stored`: a lower tier has a copy, so that losing it costs a restore and not a recomputation.
    - `bytes`: what it takes on the device, above 0.
    """

    now: float
    last_use: Doubles
    hits: Floats
    heartbeat: Doubles
    position: npt.NDArray[np.int32]
    priority: Floats
    emphasis: Floats
    attention: Floats
    superseded: npt.NDArray[np.bool_]
    stored: npt.NDArray[np.bool_]
    bytes: Floats


class EvictionPolicy(Protocol):
    """Judges pages. `worth` may be called with thousands of pages whenever room is short: it must be vectorised."""

    @property
    def name(self) -> str:
        """What settings and reports call the policy."""

    def worth(self, pages: PageStatistics) -> Doubles:
        """Worth of each page, float64 `[n]`, in any unit. Lower is evicted first."""


class LeastRecentlyUsed:
    """Evicts what was not used for the longest time."""

    name = "lru"

    def worth(self, pages: PageStatistics) -> Doubles:
        return pages.last_use


@dataclass(frozen=True)
class WaitingTime:
    """How long it takes until somebody comes back: a Lomax (shifted Pareto) distribution.

    Waiting times of people have heavy tails: who has been away for a minute is likely back within minutes, who has been
    away for a day hardly before tomorrow. `returning` is the share of those who come back at all, `scale` (seconds) is
    where the tail begins, and `shape` how quickly it falls.
    """

    returning: float
    scale: float
    shape: float

    def __post_init__(self) -> None:
        if not (0 < self.returning < 1 and self.scale > 0 and self.shape > 0):
            raise ValueError("a waiting time needs 0 < returning < 1, scale > 0 and shape > 0")

    def rate(self, waited: Doubles) -> Doubles:
        """Probability per second of coming back just now, given that it did not happen in the seconds `waited`.

        This is the hazard rate, which counts that who stays away for long may be among those who never come back.
        """
        stretch = 1 + waited / self.scale
        still_away = self.returning * stretch**-self.shape
        return self.shape / (self.scale * stretch) * still_away / (1 - self.returning + still_away)


@dataclass(frozen=True)
class WorthParameters:
    """PLACEHOLDER"""

    present: WaitingTime = WaitingTime(returning=0.9, scale=60.0, shape=1.0)
    absent: WaitingTime = WaitingTime(returning=0.6, scale=1000.0, shape=1.0)
    presence_timeout: float = 75.0
    frequency: float = 0.3
    superseded: float = 0.02
    emphasis: float = 1.0
    attention: float = 1.0
    parity_position: float = 8000.0
    restore_cost: float = 0.05


class Worth:
    """Evicts what saves the least work for the memory it takes."""

    name = "worth"

    def __init__(self, parameters: WorthParameters | None = None) -> None:
        self.parameters = parameters or WorthParameters()

    def worth(self, pages: PageStatistics) -> Doubles:
        return self._reuse(pages) * self._cost(pages) * pages.priority / pages.bytes

    def _reuse(self, pages: PageStatistics) -> Doubles:
        p = self.parameters
        waited = np.maximum(pages.now - pages.last_use, 0)
        there = pages.now - pages.heartbeat <= p.presence_timeout
        rate = p.absent.rate(waited)
        rate[there] = np.maximum(rate[there], p.present.rate(waited[there]))
        hits = pages.hits * 0.5 ** (waited / HIT_HALF_LIFE)
        rate *= (
            (1 + p.frequency * hits) * (1 + p.emphasis * pages.emphasis) * (1 + p.attention * pages.attention)
        )
        rate[pages.superseded] *= p.superseded
        return rate

    def _cost(self, pages: PageStatistics) -> Doubles:
        p = self.parameters
        return np.where(pages.stored, p.restore_cost, 1 + pages.position / p.parity_position)
