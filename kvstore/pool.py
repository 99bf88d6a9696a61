"""Device memory in pages: slabs that are allocated on demand and returned when empty."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kvstore.allocation import allocate
from kvstore.formats import ORIGINAL, Format
from kvstore.spec import KVSpec

# A page's number is `slab number * SLAB_STRIDE + index in its slab`, so neighbours have neighbouring numbers.
SLAB_STRIDE = 1 << 20
UNCLAIMED = 0


class Run(Protocol):
    """Token slots that are read together."""

    @property
    def count(self) -> int:
        """Number of slots."""
        ...

    def keys(self, layer: int) -> torch.Tensor:
        """One layer's keys, `[kv_heads, count, head_dim]`."""
        ...

    def values(self, layer: int) -> torch.Tensor:
        """One layer's values, `[kv_heads, count, head_dim]`."""
        ...

    def joined(self, following: Run) -> Run | None:
        """This run and the one behind it as one run, None where they cannot be read together."""
        ...


@dataclass(frozen=True)
class PlainRun:
    """Adjacent slots of one slab: `memory` is the slab's tensor `[layers, 2, kv_heads, slots, head_dim]`."""

    memory: torch.Tensor
    start: int
    count: int

    def keys(self, layer: int) -> torch.Tensor:
        """View of one layer's keys, `[kv_heads, count, head_dim]`."""
        return self.memory[layer, 0, :, self.start : self.start + self.count]

    def values(self, layer: int) -> torch.Tensor:
        """View of one layer's values, `[kv_heads, count, head_dim]`."""
        return self.memory[layer, 1, :, self.start : self.start + self.count]

    def all_layers(self) -> torch.Tensor:
        """View of everything, `[layers, 2, kv_heads, count, head_dim]`."""
        return self.memory[:, :, :, self.start : self.start + self.count]

    def joined(self, following: Run) -> PlainRun | None:
        if not isinstance(following, PlainRun) or following.memory is not self.memory:
            return None
        if following.start != self.start + self.count:
            return None
        return PlainRun(self.memory, self.start, self.count + following.count)


@dataclass(frozen=True)
class EncodedRun:
    """Slots of encoded pages, decoded whenever they are read: all slots of `pages` but the first `skipped`."""

    pool: PagePool
    pages: tuple[int, ...]
    skipped: int
    count: int

    def keys(self, layer: int) -> torch.Tensor:
        return self._decoded(layer, 0)

    def values(self, layer: int) -> torch.Tensor:
        return self._decoded(layer, 1)

    def joined(self, following: Run) -> EncodedRun | None:
        whole = self.skipped + self.count == len(self.pages) * self.pool.spec.page_tokens
        if not isinstance(following, EncodedRun) or following.skipped or not whole:
            return None
        return EncodedRun(self.pool, self.pages + following.pages, self.skipped, self.count + following.count)

    def _decoded(self, layer: int, part: int) -> torch.Tensor:
        pages = self.pool.decoded(self.pages, layer)[:, 0, part]  # [pages, kv_heads, page_tokens, head_dim]
        heads = pages.transpose(0, 1).flatten(1, 2)
        return heads[:, self.skipped : self.skipped + self.count]


class Slab:
    """Pages that were allocated together, in one tensor."""

    def __init__(self, number: int, pages: int, memory: torch.Tensor) -> None:
        self.number = number
        self.pages = pages
        self.memory = memory
        self.used = np.zeros(pages, dtype=bool)
        self.claims = np.full(pages, UNCLAIMED, dtype=np.int32)

    def free_runs(self, claimant: int | None) -> Iterator[tuple[int, int]]:
        """Runs of free pages as (first, count); pages claimed by others than `claimant` count as used, unless it is
        None."""
        free = ~self.used
        if claimant is not None:
            free &= (self.claims == UNCLAIMED) | (self.claims == claimant)
        edges = np.flatnonzero(np.diff(np.concatenate(([False], free, [False])).astype(np.int8)))
        for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            yield first, end - first


class PagePool:
    """Pages of one device, within a budget of bytes.

    In the original format, a slab is a tensor `[layers, 2, kv_heads, slots, head_dim]`: the tokens of adjacent pages
    are adjacent for each layer and head, so that attention reads them through a view, and a run of pages of all layers
    moves in one strided copy. In another format it is `[pages, layers, layer_bytes]` of uint8.

    A session that grows gets pages behind its last one where these are free: a claim keeps them for it, as long as
    there is room elsewhere. Claims hold no memory and are broken when nothing else is left.
    """

    def __init__(
        self,
        spec: KVSpec,
        budget_bytes: int,
        *,
        slab_pages: int,
        device: torch.device | str = "cpu",
        format: Format = ORIGINAL,
    ) -> None:
        if not 1 <= slab_pages <= SLAB_STRIDE:
            raise ValueError(f"slab_pages must be from 1 to {SLAB_STRIDE}")
        self.spec = spec
        self.device = torch.device(device)
        self.format = format
        self.page_bytes: int = spec.layers * format.layer_bytes(spec)
        self.budget_pages: int = budget_bytes // self.page_bytes
        self.slab_pages = slab_pages
        self._slabs: dict[int, Slab] = {}
        self._next_slab = 0
        self.allocated_pages = 0
        self.used_pages = 0

    @property
    def free_pages(self) -> int:
        """Pages that can be handed out: free ones of the slabs, and those that the budget has left."""
        return self.budget_pages - self.used_pages

    @property
    def slabs(self) -> Sequence[Slab]:
        return tuple(self._slabs.values())

    def allocate(
        self, count: int, *, after: int | None = None, claimant: int = 0, planned: int = 0
    ) -> list[int]:
        """Take `count` pages, adjacent to each other and to the page `after` as far as possible.

        `planned` pages in total are claimed for `claimant` where a new run begins. Raises whatever torch raises when
        the device has no memory; nothing is taken then. The caller has made sure that `count <= free_pages`.
        """
        taken: list[int] = []
        try:
            while len(taken) < count:
                left = count - len(taken)
                last = taken[-1] if taken else after
                found = self._behind(last, left, claimant) if last is not None else []
                taken += found or self._new_run(left, claimant, max(planned - len(taken), left))
        except BaseException:
            self.free(taken)
            raise
        return taken

    def allocate_run(self, count: int) -> list[int] | None:
        """Take `count` adjacent pages, if there are as many."""
        best = self._longest_run(0)
        if best is None or best[2] < count:
            slab = self._new_slab(count)
            if slab is None:
                return None
            best = (slab, 0, slab.pages)
        slab, first, length = best
        if length < count:
            self._return_if_empty(slab)
            return None
        return self._take(slab, first, count)

    def allocate_elsewhere(self, count: int, number: int) -> list[int]:
        """Take `count` pages of the slabs that are there, but for one. The caller has seen that there are as many."""
        taken: list[int] = []
        for slab in sorted(self.slabs, key=lambda slab: -int(slab.used.sum())):
            for first, length in list(slab.free_runs(None)) if slab.number != number else []:
                taken += self._take(slab, first, min(length, count - len(taken)))
        return taken

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back. Slabs that become empty are returned to the device."""
        for page in pages:
            number, index = divmod(page, SLAB_STRIDE)
            slab = self._slabs[number]
            if not slab.used[index]:
                raise ValueError(f"page {page} is not in use")
            slab.used[index] = False
        self.used_pages -= len(pages)
        for number in {page // SLAB_STRIDE for page in pages}:
            self._return_if_empty(self._slabs[number])

    def release_claims(self, claimant: int) -> None:
        """Let others have the free pages that were kept for `claimant`."""
        for slab in self.slabs:
            slab.claims[slab.claims == claimant] = UNCLAIMED

    def run(self, page: int, start: int, count: int) -> Run:
        """The slots `start` to `start + count` of a page."""
        if self.format is not ORIGINAL:
            return EncodedRun(self, (page,), start, count)
        return self.plain_run(page, start, count)

    def plain_run(self, page: int, start: int, count: int) -> PlainRun:
        """Slots of a page in the original format."""
        number, index = divmod(page, SLAB_STRIDE)
        return PlainRun(self._slabs[number].memory, index * self.spec.page_tokens + start, count)

    def view(self, page: int) -> torch.Tensor:
        """View of a page: `[layers, 2, kv_heads, page_tokens, head_dim]`, encoded `[layers, layer_bytes]`."""
        if self.format is ORIGINAL:
            return self.plain_run(page, 0, self.spec.page_tokens).all_layers()
        number, index = divmod(page, SLAB_STRIDE)
        return self._slabs[number].memory[index]

    def copy(self, source: int, target: int) -> None:
        """Copy a page's content to another page."""
        self.view(target).copy_(self.view(source))

    def decoded(self, pages: Sequence[int], layer: int) -> torch.Tensor:
        """One layer of encoded pages, `[pages, 1, 2, kv_heads, page_tokens, head_dim]`."""
        encoded = torch.stack([self.view(page)[layer : layer + 1] for page in pages])
        return self.format.decode(encoded, self.spec)

    def _behind(self, page: int, count: int, claimant: int) -> list[int]:
        number, index = divmod(page, SLAB_STRIDE)
        slab = self._slabs[number]
        end = index + 1
        limit = min(slab.pages, end + count)
        while end < limit and not slab.used[end] and slab.claims[end] in (UNCLAIMED, claimant):
            end += 1
        return self._take(slab, index + 1, end - index - 1)

    def _new_run(self, count: int, claimant: int, planned: int) -> list[int]:
        """The first pages of a new run: one that holds the planned pages if there is, else a new slab, else the
        longest run there is, at last one that another has claimed."""
        planned = min(planned, self.slab_pages)
        best = self._longest_run(claimant)
        if best is None or best[2] < planned:
            try:
                slab = self._new_slab(max(planned, 1))
            except (RuntimeError, MemoryError, OSError):
                # The device has less memory than the budget says: what is free in other slabs will do.
                slab = None
                if best is None and self._longest_run(None) is None:
                    raise
            if slab is not None:
                best = (slab, 0, slab.pages)
        if best is None:
            best = self._longest_run(None)
        assert best is not None, "the caller checks free_pages"
        slab, first, length = best
        if claimant:
            slab.claims[first : first + min(planned, length)] = claimant
        return self._take(slab, first, min(count, length))

    def _longest_run(self, claimant: int | None) -> tuple[Slab, int, int] | None:
        runs = ((slab, *run) for slab in self.slabs for run in slab.free_runs(claimant))
        return max(runs, key=lambda run: run[2], default=None)

    def _new_slab(self, at_least: int) -> Slab | None:
        pages = min(max(self.slab_pages, at_least), self.budget_pages - self.allocated_pages)
        if pages < 1:
            return None
        slab = Slab(self._next_slab, pages, self._memory(pages))
        self._slabs[slab.number] = slab
        self._next_slab += 1
        self.allocated_pages += pages
        return slab

    def _memory(self, pages: int) -> torch.Tensor:
        spec = self.spec
        if self.format is not ORIGINAL:
            shape: tuple[int, ...] = (pages, spec.layers, self.format.layer_bytes(spec))
            return allocate(shape, torch.uint8, self.device)
        shape = (spec.layers, 2, spec.kv_heads, pages * spec.page_tokens, spec.head_dim)
        return allocate(shape, spec.dtype, self.device)

    def _take(self, slab: Slab, first: int, count: int) -> list[int]:
        slab.used[first : first + count] = True
        self.used_pages += count
        base = slab.number * SLAB_STRIDE + first
        return list(range(base, base + count))

    def _return_if_empty(self, slab: Slab) -> None:
        if not slab.used.any():
            del self._slabs[slab.number]
            self.allocated_pages -= slab.pages
