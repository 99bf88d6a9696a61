"""The page table of a session."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from kvstore.records import Ids


class PageTable:
    """Which tokens of which pages a session has, in order.

    An entry names a record, the first slot of its page that belongs to the session, and the number of slots. A session
    that only grows has whole pages and a last one that is partly filled; taking spans out leaves entries that begin
    or end within a page. Entries are three machine words, so a copy for a fork is a copy of three arrays.
    """

    def __init__(self) -> None:
        self.records = array("i")
        self.starts = array("i")
        self.counts = array("i")

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Entries as (record, first slot, number of slots)."""
        return zip(self.records, self.starts, self.counts, strict=True)

    @property
    def tokens(self) -> int:
        """Slots of all entries."""
        return sum(self.counts)

    def ids(self) -> Ids:
        """The entries' records (a copy)."""
        return np.array(self.records, dtype=np.int32)

    def copy(self) -> PageTable:
        other = PageTable()
        other.records, other.starts, other.counts = self.records[:], self.starts[:], self.counts[:]
        return other

    def append(self, record: int, start: int, count: int) -> None:
        self.records.append(record)
        self.starts.append(start)
        self.counts.append(count)

    def extend(self, other: PageTable) -> None:
        self.records.extend(other.records)
        self.starts.extend(other.starts)
        self.counts.extend(other.counts)

    def slice(self, first: int, end: int) -> PageTable:
        """The part that holds the tokens `first` to `end`; entries at its ends are cut where they must be."""
        part = PageTable()
        offset = 0
        for record, start, count in self:
            low, high = max(first, offset), min(end, offset + count)
            if low < high:
                part.append(record, start + low - offset, high - low)
            offset += count
            if offset >= end:
                break
        return part

    def cut(self, length: int) -> list[int]:
        """Keep the first `length` tokens. Returns the records of the entries that went, in order."""
        held = self.tokens
        gone = []
        while held > length:
            excess = held - length
            if self.counts[-1] <= excess:
                held -= self.counts.pop()
                self.starts.pop()
                gone.append(self.records.pop())
            else:
                self.counts[-1] -= excess
                held = length
        return gone[::-1]
