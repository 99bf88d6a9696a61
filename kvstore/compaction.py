"""Moves pages, so that sparse slabs can be returned and sessions lie in adjacent pages."""

from __future__ import annotations

from kvstore.pool import SLAB_STRIDE, PagePool
from kvstore.records import NONE
from kvstore.residency import Residency
from kvstore.session import Session

SPARSE = 0.5  # slabs that are used less than this are emptied


def empty_sparse_slabs(residency: Residency) -> int:
    """Move the pages of sparsely used slabs into the free pages of fuller ones, so that their memory goes back to the
    device. Returns the number of pages moved. Pages that are locked stay, and their slabs with them."""
    moved = 0
    pools = (residency.pool, residency.encoded_pool)
    for pool in pools:
        if pool is not None:
            moved += _empty_sparse_slabs(residency, pool)
    residency.counters.pages_compacted += moved
    return moved


def _empty_sparse_slabs(residency: Residency, pool: PagePool) -> int:
    moved = 0
    for slab in sorted(pool.slabs, key=lambda slab: int(slab.used.sum())):
        used = int(slab.used.sum())
        elsewhere = sum(other.pages - int(other.used.sum()) for other in pool.slabs if other is not slab)
        if used > SPARSE * slab.pages or used > elsewhere:
            continue
        residents = _records_in(residency, pool, slab.number)
        if len(residents) < used:
            continue  # some are locked
        pages = pool.allocate_elsewhere(used, slab.number)
        for record, page in zip(residents, pages, strict=True):
            residency.relocate(record, page)
        moved += used
    return moved


def make_adjacent(residency: Residency, session: Session) -> bool:
    """Move an idle session's pages to one run of free pages, in their order. Returns whether they are adjacent now;
    nothing changes where there is no such run, or pages are shared with a session in use."""
    records = residency.records
    ids = list(dict.fromkeys(session.table.records))
    movable = [r for r in ids if records.page[r] != NONE and not records.encoded[r]]
    if session.adjacent_runs() <= 1:
        return True
    if len(movable) < len(ids) or any(records.locks[r] for r in ids):
        return False
    pages = residency.pool.allocate_run(len(ids))
    if pages is None:
        return False
    for record, page in zip(ids, pages, strict=True):
        residency.relocate(record, page)
    residency.counters.pages_compacted += len(ids)
    session.rearranged()
    return session.adjacent_runs() == 1


def _records_in(residency: Residency, pool: PagePool, number: int) -> list[int]:
    """Movable records whose pages are in a slab, in the order of their pages."""
    chosen = residency.unlocked(pool)
    pages = residency.records.page[chosen]
    inside = pages // SLAB_STRIDE == number
    order = pages[inside].argsort()
    return [int(record) for record in chosen[inside][order]]
