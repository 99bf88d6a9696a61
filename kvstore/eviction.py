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
    """How `Worth` judges. The defaults of the first five were tuned with benchmarks/kvstore/replay.py, on other traces
    than it reports; hit rates there change by about 0.01 at most when one of them is halved or doubled.

    - `present`: waiting time until the next turn while somebody has the conversation open.
    - `absent`: the same when nobody has.
    - `presence_timeout`: seconds after the last heartbeat during which somebody counts as present: two heartbeats of
      the web chat may be lost.
    - `frequency`: the rate of reuse grows with (1 + decayed hits) to this power. Below 1, since the many turns of one
      visit say less of the next visit than as many visits would.
    - `superseded`: factor on the rate for pages of a branch that was left.
    - `emphasis`, `attention`: how much each unit of these adds to the rate, as a fraction.
    - `parity_position`: position from which attending to all tokens before a token costs as much as the rest of its
      computation: about 3,000 for a model of 135 million parameters, 27,000 for one of 8 billion.
    - `restore_cost`: cost to bring a page back from a lower tier, where computing it at position 0 costs 1.
    """

    present: WaitingTime = WaitingTime(returning=0.6, scale=60.0, shape=1.8)
    absent: WaitingTime = WaitingTime(returning=0.7, scale=1800.0, shape=1.3)
    presence_timeout: float = 75.0
    frequency: float = 0.7
    superseded: float = 0.1
    emphasis: float = 1.0
    attention: float = 1.0
    parity_position: float = 8000.0
    restore_cost: float = 0.05


class Worth:
    """Evicts what saves the least work for the memory that it takes.

    A page's worth is (probability of reuse x cost to recompute) / bytes, as in the GreedyDual-Size-Frequency policy
    for web caches (Cherkasova, HP Labs, 1998), with a model of people in place of its clock:

    - The probability is the rate at which the session's owner comes back, by how long it was not used and whether
      somebody is there, times factors for hits, emphasis, attention and left branches. That somebody is present never
      makes a page worth less: who leaves a page open and goes comes back like all others.
    - The cost grows with position, and is small for what a lower tier has.
    - A pool's priority weighs it.
    """

    name = "worth"

    def __init__(self, parameters: WorthParameters | None = None) -> None:
        self.parameters = parameters or WorthParameters()

    def worth(self, pages: PageStatistics) -> Doubles:
        """In token computations per second and byte, times priority."""
        return self._reuse_rate(pages) * self._cost(pages) * pages.priority / pages.bytes

    def _reuse_rate(self, pages: PageStatistics) -> Doubles:
        parameters = self.parameters
        waited = np.maximum(pages.now - pages.last_use, 0)
        rate = parameters.absent.rate(waited)
        present = pages.now - pages.heartbeat <= parameters.presence_timeout
        rate[present] = np.maximum(rate[present], parameters.present.rate(waited[present]))
        hits = pages.hits * 0.5 ** (waited / HIT_HALF_LIFE)
        rate *= (1 + hits) ** parameters.frequency
        rate *= 1 + parameters.emphasis * pages.emphasis
        rate *= 1 + parameters.attention * pages.attention
        rate[pages.superseded] *= parameters.superseded
        return rate

    def _cost(self, pages: PageStatistics) -> Doubles:
        recomputed = 1 + pages.position / self.parameters.parity_position
        return np.where(pages.stored, self.parameters.restore_cost, recomputed)
