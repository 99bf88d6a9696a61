"""Edits of a session's spans: taking out, putting in, moving, reordering.

Keys are stored rotated by their positions (RoPE), so KV can stand at another position once its keys are rotated there.
What it was computed after has changed all the same: every span behind an edit is approximate from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvstore.pool import PlainRun
from kvstore.records import APPROXIMATE, NONE
from kvstore.residency import Residency
from kvstore.rope import rotate
from kvstore.session import Session
from kvstore.spans import Span
from kvstore.table import PageTable


@dataclass(frozen=True)
class DetachedSpan:
    """A span that was taken out, with its KV, which may move to lower tiers like a session's. Put it back into a
    session of the same owner, or discard it."""

    span: Span
    keeper: Session

    @property
    def tokens(self) -> tuple[int, ...]:
        """The span's tokens."""
        return self.keeper.tokens


@dataclass(frozen=True)
class _Piece:
    """A span with its part of the page table and its tokens."""

    span: Span
    table: PageTable
    tokens: np.ndarray


class SpanEdits:
    """Edits of acquired sessions. Spans are numbered from 0, in order."""

    def __init__(
        self,
        residency: Residency,
        new_keeper: Callable[[Session], Session],
        bring_back: Callable[[Session], None],
        on_detached: Callable[[Session], None],
    ) -> None:
        """`new_keeper` makes an empty session that holds a detached span, `bring_back` brings its pages to the device
        as far as they can be had, and `on_detached` is told of one that was filled."""
        self._residency = residency
        self._new_keeper = new_keeper
        self._bring_back = bring_back
        self._on_detached = on_detached

    def remove(self, session: Session, number: int) -> DetachedSpan:
        """Take a span out. Those behind it stay at their positions, so that a gap remains."""
        pieces = self._pieces(session)
        piece = pieces[number]
        keeper = self._new_keeper(session)
        self._residency.hold(piece.table.ids(), locked=False)
        keeper.replace_contents(piece.table, [piece.span])
        self._rebuild(session, pieces[:number], _approximate(pieces[number + 1 :]))
        self._on_detached(keeper)
        return DetachedSpan(piece.span, keeper)

    def insert(
        self, session: Session, number: int, detached: DetachedSpan, *, position: int | None = None
    ) -> bool:
        """Put a detached span before the span `number`, or at the end; its first token at `position`, by default where
        the span before ends. Pages are shared where it stays at its position, else its keys are rotated.

        Returns False, and changes nothing, when its KV could not be had any more: then compute its tokens. Raises
        ValueError for another owner's span, PoolExhausted when there is no room.
        """
        if detached.keeper.owner != session.owner:
            raise ValueError("the span belongs to another owner")
        self._bring_back(detached.keeper)
        if detached.keeper.length < detached.span.length:
            return False
        pieces = self._pieces(session)
        if position is None:
            position = pieces[number - 1].span.end if number else 0
        piece = _Piece(detached.span, detached.keeper.table, detached.keeper.token_array.copy())
        if position != detached.span.position:
            self._residency.lock(piece.table.ids())
            try:
                piece = self._moved(session, piece, position)
            finally:
                self._residency.unlock(detached.keeper.table.ids())
            self._rebuild(session, pieces[:number], _approximate([piece, *pieces[number:]]), owned=piece)
        else:
            self._rebuild(session, pieces[:number], _approximate([piece, *pieces[number:]]))
        self.discard(detached)
        return True

    def discard(self, detached: DetachedSpan) -> None:
        """Forget a detached span."""
        ids = detached.keeper.table.ids()
        detached.keeper.replace_contents(PageTable(), [])
        self._residency.release(ids, locked=False)

    def replace(self, session: Session, number: int, detached: DetachedSpan) -> DetachedSpan | None:
        """Put a detached span in the place of another, which is returned. None, and nothing changed, when its KV could
        not be had."""
        position = session.spans[number].position
        if not self.insert(session, number, detached, position=position):
            return None
        return self.remove(session, number + 1)

    def move(self, session: Session, number: int, position: int) -> None:
        """Rotate a span's keys so that its first token stands at `position`. Raises PoolExhausted, and KVLost when KV
        that was on its way could not be restored."""
        pieces = self._pieces(session)
        piece = self._moved(session, pieces[number], position)
        self._rebuild(session, pieces[:number], _approximate([piece, *pieces[number + 1 :]]), owned=piece)

    def reorder(self, session: Session, order: Sequence[int]) -> None:
        """Put the spans in another order. They keep their positions; `close_gaps` gives them new ones. Raises
        ValueError when `order` does not name each span once."""
        pieces = self._pieces(session)
        if sorted(order) != list(range(len(pieces))):
            raise ValueError(f"the order {list(order)} does not name each of {len(pieces)} spans once")
        same = next((i for i, number in enumerate(order) if i != number), len(pieces))
        self._rebuild(session, pieces[:same], _approximate([pieces[number] for number in order[same:]]))

    def close_gaps(self, session: Session, first: int = 0) -> int:
        """Move the spans from `first` on so that each begins where the one before it ends. Returns the number of tokens
        whose keys were rotated. Raises PoolExhausted; spans before the one in question are moved then."""
        rotated = 0
        for number in range(first, len(session.spans)):
            position = session.spans[number - 1].end if number else 0
            if session.spans[number].position != position:
                self.move(session, number, position)
                rotated += session.spans[number].length
        return rotated

    def mark(
        self, session: Session, number: int, *, pinned: bool | None = None, emphasis: float | None = None
    ) -> None:
        """Set a span's marks; emphasis makes its pages worth more. Its pages are pinned with `KVStore.pin`."""
        span = session.spans[number]
        if pinned is not None:
            span = replace(span, pinned=pinned)
        if emphasis is not None:
            span = replace(span, emphasis=emphasis)
            ids = self._pieces(session)[number].table.ids()
            records = self._residency.records
            records.emphasis[ids] = np.maximum(records.emphasis[ids], emphasis) if emphasis else 0.0
        session.spans[number] = span

    def _pieces(self, session: Session) -> list[_Piece]:
        if not session.locked:
            raise ValueError("only an acquired session can be edited")
        pieces, offset = [], 0
        for span in session.spans:
            end = offset + span.length
            pieces.append(
                _Piece(span, session.table.slice(offset, end), session.token_array[offset:end].copy())
            )
            offset = end
        return pieces

    def _rebuild(
        self,
        session: Session,
        before: Sequence[_Piece],
        behind: Sequence[_Piece],
        *,
        owned: _Piece | None = None,
    ) -> None:
        """Make a session of pieces; those `behind` follow the edit. `owned` has its references and locks already."""
        table = PageTable()
        pieces = [*before, *behind]
        for piece in pieces:
            table.extend(piece.table)
        held = [
            record
            for piece in pieces
            if owned is None or piece.table is not owned.table
            for record in piece.table.records
        ]
        old = session.table.ids()
        keyed = min(
            session.keyed_pages, sum(p.span.length for p in before) // self._residency.spec.page_tokens
        )
        self._residency.hold(held, locked=True)
        session.drop_spare()
        session.replace_contents(joined(table), [piece.span for piece in pieces])
        session.keyed_pages = keyed
        self._release_merged(table, session.table)
        self._residency.release(old, locked=True)

    def _release_merged(self, pieces: PageTable, table: PageTable) -> None:
        """Take back the references of entries that became one with the one before them."""
        held = list(pieces.records)
        for record in table.records:
            held.remove(record)
        if held:
            self._residency.release(held, locked=True)

    def _moved(self, session: Session, piece: _Piece, position: int) -> _Piece:
        """A copy of a piece in pages of its own, its keys rotated to `position`."""
        spec, residency = self._residency.spec, self._residency
        if spec.rope is None:
            raise ValueError("the spec does not say how keys are rotated, so they cannot be moved")
        session.await_arrivals(spec.layers - 1)
        count = piece.span.length
        made = residency.new_records(session, -(-count // spec.page_tokens), after=NONE, position=position)
        old = torch.arange(piece.span.position, piece.span.end)
        new = old - piece.span.position + position
        # Some variants of RoPE rotate by the length of the whole sequence, which is best told by the session's end.
        length = max(session.next_position, piece.span.end, position + count)
        self._copy_rotated(piece.table, made, old, new, length)
        table = PageTable()
        for first, record in zip(range(0, count, spec.page_tokens), made, strict=True):
            part = piece.tokens[first : first + spec.page_tokens]
            residency.fill(record, part, APPROXIMATE)
            residency.records.emphasis[record] = piece.span.emphasis
            table.append(record, 0, len(part))
        residency.counters.tokens_moved += count
        return _Piece(replace(piece.span, position=position, exact=False), table, piece.tokens)

    def _copy_rotated(
        self, table: PageTable, made: Sequence[int], old: torch.Tensor, new: torch.Tensor, length: int
    ) -> None:
        residency, spec = self._residency, self._residency.spec
        assert spec.rope is not None
        sources = [residency.run(*entry) for entry in table]
        for layer, rope in enumerate(spec.rope):
            keys = torch.cat([run.keys(layer) for run in sources], dim=1)
            values = torch.cat([run.values(layer) for run in sources], dim=1)
            rotated = (
                keys if rope is None else rotate(keys, rope, old, new, old_length=length, new_length=length)
            )
            for first, record in zip(range(0, len(old), spec.page_tokens), made, strict=True):
                size = min(spec.page_tokens, len(old) - first)
                target = residency.run(record, 0, size)
                assert isinstance(target, PlainRun)
                target.keys(layer).copy_(rotated[:, first : first + size])
                target.values(layer).copy_(values[:, first : first + size])


def _approximate(pieces: Sequence[_Piece]) -> list[_Piece]:
    return [replace(piece, span=replace(piece.span, exact=False)) for piece in pieces]


def joined(table: PageTable) -> PageTable:
    """The same slots, with neighbouring entries of one page as one entry."""
    result = PageTable()
    for record, start, count in table:
        if result and result.records[-1] == record and result.starts[-1] + result.counts[-1] == start:
            result.counts[-1] += count
        else:
            result.append(record, start, count)
    return result
