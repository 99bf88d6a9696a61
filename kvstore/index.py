"""Finds the longest known prefix of a token sequence by the keys of its pages.

The tokens are compared before a page is used: a hash alone is never believed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.keys import KEY_BYTES, PUBLIC, owner_salt, page_key, root_key
from kvstore.records import NONE, Ids, PageRecords
from kvstore.spec import KVSpec

# Pages whose keys are computed and looked up at a time; most lookups end with the first block.
BLOCK = 64
EMPTY, DELETED = -1, -2
MAXIMUM_LOAD = 0.6

Tokens = npt.NDArray[np.int32]


class PrefixIndex:
    """Records by key. An open-addressing hash table over the records' own key column: 4 bytes a slot."""

    def __init__(self, spec: KVSpec, records: PageRecords) -> None:
        self._records = records
        self._page_tokens = spec.page_tokens
        self._root = root_key(spec)
        self._slots = np.full(1024, EMPTY, dtype=np.int32)
        self._filled = 0  # slots that are not EMPTY
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def root(self) -> bytes:
        """The key before the first page."""
        return self._root

    def nbytes(self) -> int:
        """Bytes of the table."""
        return self._slots.nbytes

    def find(self, key: bytes) -> int:
        """The record with this key, or NONE."""
        found = self._find_all(np.frombuffer(key, dtype=np.uint8).reshape(1, KEY_BYTES))
        return int(found[0])

    def add(self, record: int) -> None:
        """Index a record under its key, which no other record has."""
        if self._filled + 1 > MAXIMUM_LOAD * len(self._slots):
            self._rebuild()
        self._insert(record)
        self._count += 1
        self._records.indexed[record] = True

    def remove(self, record: int) -> None:
        """Take a record out."""
        slot = self._start(self._records.key[record])
        while self._slots[slot] != record:
            slot = (slot + 1) & (len(self._slots) - 1)
        self._slots[slot] = DELETED
        self._count -= 1
        self._records.indexed[record] = False

    def forget_unneeded(self, record: int) -> None:
        """Forget a record if nothing refers to it and no copy exists, and then what was kept for its sake alone."""
        while record != NONE and self._records.unneeded(record):
            if self._records.indexed[record]:
                self.remove(record)
            record = self._records.free(record)

    def longest_prefix(self, tokens: Tokens, owner: str, public_tokens: int = 0) -> Ids:
        """Records of the longest indexed prefix of `tokens`, in order, whether or not a copy can be had at once.

        The first `public_tokens` (down to a whole page) are looked up as public. Records that were scanned from a
        tier are taken by their key; whoever reads their chunk compares the tokens in it.
        """
        pages = len(tokens) // self._page_tokens
        found: list[Ids] = []
        parent = self._root
        for first in range(0, pages, BLOCK):
            end = min(first + BLOCK, pages)
            keys = self.chain(tokens, owner, public_tokens, first, end, parent)
            parent = keys[-1]
            block = self._find_all(np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, KEY_BYTES))
            matched = self._matching(block, tokens[first * self._page_tokens : end * self._page_tokens])
            found.append(block[:matched])
            if matched < end - first:
                break
        return np.concatenate(found) if found else np.empty(0, dtype=np.int32)

    def chain(
        self, tokens: Tokens, owner: str, public_tokens: int, first: int, end: int, parent: bytes
    ) -> list[bytes]:
        """Keys of the pages `first` to `end` of `tokens`; `parent` is the key before them."""
        data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
        size = 4 * self._page_tokens
        public_pages = public_tokens // self._page_tokens
        salt = owner_salt(owner)
        keys = []
        for page in range(first, end):
            run = data[page * size : (page + 1) * size]
            parent = page_key(parent, run, PUBLIC if page < public_pages else salt)
            keys.append(parent)
        return keys

    def _matching(self, found: Ids, tokens: Tokens) -> int:
        """How many of the found records, from the first, are there and have the tokens looked for."""
        records = self._records
        there = found != NONE
        equal = (records.tokens[found] == tokens.reshape(-1, self._page_tokens)).all(axis=1)
        usable = there & (equal | ~records.known[found])
        return len(found) if usable.all() else int(np.argmin(usable))

    # Slots follow from a key's second half: a bit of the first is the same in all chain keys.

    def _start(self, key: npt.NDArray[np.uint8]) -> int:
        return int.from_bytes(key[8:].tobytes(), "little") & (len(self._slots) - 1)

    def _find_all(self, keys: npt.NDArray[np.uint8]) -> Ids:
        """Records with these keys, `[n, 16]`; NONE where there is none. One vectorised step a probe."""
        mask = len(self._slots) - 1
        slots = (keys[:, 8:].copy().view("<u8")[:, 0] & np.uint64(mask)).astype(np.int64)
        found = np.full(len(keys), NONE, dtype=np.int32)
        pending = np.arange(len(keys))
        while len(pending):
            records = self._slots[slots[pending]]
            same = (records >= 0) & (self._records.key[records] == keys[pending]).all(axis=1)
            found[pending[same]] = records[same]
            pending = pending[(records != EMPTY) & ~same]
            slots[pending] = (slots[pending] + 1) & mask
        return found

    def _insert(self, record: int) -> None:
        slot = self._start(self._records.key[record])
        while self._slots[slot] >= 0:
            slot = (slot + 1) & (len(self._slots) - 1)
        if self._slots[slot] == EMPTY:
            self._filled += 1
        self._slots[slot] = record

    def _rebuild(self) -> None:
        """Make the table fit its records again, without the deleted slots."""
        records: Sequence[int] = self._slots[self._slots >= 0].tolist()
        size = len(self._slots)
        while len(records) + 1 > MAXIMUM_LOAD / 2 * size:
            size *= 2
        self._slots = np.full(size, EMPTY, dtype=np.int32)
        self._filled = 0
        for record in records:
            self._insert(record)
