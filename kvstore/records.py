"""What the store knows of each page, in columns, so that a page costs few bytes and policies work on arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.keys import KEY_BYTES

NONE = -1
TIERS = ("host", "disk", "remote")
# Codes of the column `stored`, by format name; 0 is "not in this tier".
FORMAT_CODES = {"original": 1, "int8": 2, "int4": 3}
FORMAT_NAMES = {code: name for name, code in FORMAT_CODES.items()}
# Codes of the column `fidelity`: what the KV has been through, from best to worst.
EXACT, QUANTIZED_INT8, QUANTIZED_INT4, APPROXIMATE = 0, 1, 2, 3
FIDELITY_OF_FORMAT = {"original": EXACT, "int8": QUANTIZED_INT8, "int4": QUANTIZED_INT4}
GROWTH = 1.125
MINIMUM_ROWS = 256

Ids = npt.NDArray[np.int32]

COLUMNS: dict[str, tuple[Any, Any]] = {
    # name: (dtype, value of a row that is no record)
    "alive": (np.bool_, False),
    "parent": (np.int32, NONE),  # the record that its KV builds on directly
    "position": (np.int32, 0),  # position of its first token
    "used": (np.int16, 0),  # tokens whose KV it holds
    "page": (np.int64, NONE),  # its page on the device
    "refs": (np.int32, 0),  # sessions, detached spans and pins that name it
    "locks": (np.int32, 0),  # sessions in use and background jobs that read or write its page
    "pins": (np.int16, 0),
    "children": (np.int32, 0),  # records whose parent it is
    "resident_children": (np.int32, 0),  # those of them that are on the device
    "fidelity": (np.uint8, EXACT),
    "indexed": (np.bool_, False),  # whether lookups by prefix find it
    "known": (np.bool_, True),  # whether its tokens are known (not before a scanned chunk was read)
    "arriving": (np.bool_, False),  # whether its page is being filled from a tier
    "encoded": (np.bool_, False),  # whether its page is an int8 page
    "origin": (np.int32, 0),  # number of the session that made it
    "pool": (np.uint8, 0),  # the share that its page counts to
    "last_use": (np.float64, 0.0),
    "hits": (np.float32, 0.0),
    "heartbeat": (np.float64, -np.inf),
    "emphasis": (np.float32, 0.0),
    "attention": (np.float32, 0.0),
    "superseded": (np.bool_, False),
}


class PageRecords:
    """One record for each page of KV that is somewhere: on the device, in a lower tier, or both.

    Sessions name pages by the record's number (`id`), so a page can leave the device and come back without their
    knowing. A record lives while something refers to it (`refs`, `locks`, `children`) or a copy exists. Columns are
    numpy arrays with one row a record; `key` is `[rows, 16]` uint8, `tokens` `[rows, page_tokens]` int32 and `stored`
    `[rows, tiers]` uint8 with the format's code for each tier that has a copy.
    """

    alive: npt.NDArray[np.bool_]
    parent: npt.NDArray[np.int32]
    position: npt.NDArray[np.int32]
    used: npt.NDArray[np.int16]
    page: npt.NDArray[np.int64]
    refs: npt.NDArray[np.int32]
    locks: npt.NDArray[np.int32]
    pins: npt.NDArray[np.int16]
    children: npt.NDArray[np.int32]
    resident_children: npt.NDArray[np.int32]
    fidelity: npt.NDArray[np.uint8]
    indexed: npt.NDArray[np.bool_]
    known: npt.NDArray[np.bool_]
    arriving: npt.NDArray[np.bool_]
    encoded: npt.NDArray[np.bool_]
    origin: npt.NDArray[np.int32]
    pool: npt.NDArray[np.uint8]
    last_use: npt.NDArray[np.float64]
    hits: npt.NDArray[np.float32]
    heartbeat: npt.NDArray[np.float64]
    emphasis: npt.NDArray[np.float32]
    attention: npt.NDArray[np.float32]
    superseded: npt.NDArray[np.bool_]

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._rows = 0
        self._free: list[int] = []
        self.key = np.zeros((0, KEY_BYTES), dtype=np.uint8)
        self.tokens = np.zeros((0, page_tokens), dtype=np.int32)
        self.stored = np.zeros((0, len(TIERS)), dtype=np.uint8)
        for name, (dtype, _) in COLUMNS.items():
            setattr(self, name, np.zeros(0, dtype=dtype))
        self._resize(MINIMUM_ROWS)

    def __len__(self) -> int:
        """Number of records."""
        return self._rows - len(self._free)

    @property
    def rows(self) -> int:
        """Rows in use or free: ids are below this."""
        return self._rows

    def new(self, *, parent: int = NONE, position: int = 0) -> int:
        """Make a record; its parent counts it as a child."""
        if self._free:
            record = self._free.pop()
        else:
            if self._rows == len(self.key):
                self._resize(int(self._rows * GROWTH) + 1)
            record = self._rows
            self._rows += 1
        self.alive[record] = True
        self.position[record] = position
        self.set_parent(record, parent)
        return record

    def set_parent(self, record: int, parent: int) -> None:
        """Link a record that has no parent yet."""
        self.parent[record] = parent
        if parent != NONE:
            self.children[parent] += 1
            if self.page[record] != NONE:
                self.resident_children[parent] += 1

    def unlink(self, record: int) -> None:
        """Take a record from its parent."""
        if (parent := self.parent[record]) != NONE:
            self.children[parent] -= 1
            if self.page[record] != NONE:
                self.resident_children[parent] -= 1
            self.parent[record] = NONE

    def place(self, record: int, page: int) -> None:
        """Note the page that a record, so far not on the device, has there."""
        self.page[record] = page
        if (parent := self.parent[record]) != NONE:
            self.resident_children[parent] += 1

    def displace(self, record: int) -> int:
        """Note that a record left the device. Returns the page that it had."""
        page = int(self.page[record])
        self.page[record] = NONE
        self.encoded[record] = False
        if (parent := self.parent[record]) != NONE:
            self.resident_children[parent] -= 1
        return page

    def unneeded(self, record: int) -> bool:
        """Whether nothing refers to the record and no copy of its KV exists."""
        return bool(
            self.alive[record]
            and self.page[record] == NONE
            and self.refs[record] == 0
            and self.locks[record] == 0
            and self.children[record] == 0
            and not self.stored[record].any()
        )

    def free(self, record: int) -> int:
        """Forget an unneeded record. Returns its parent, which may be unneeded now."""
        parent = int(self.parent[record])
        if parent != NONE:
            self.children[parent] -= 1
        self._reset(record)
        self._free.append(record)
        return parent

    def where(self, condition: npt.NDArray[np.bool_]) -> Ids:
        """Ids of the records for which a condition over all rows holds."""
        return np.flatnonzero(condition[: self._rows]).astype(np.int32)

    def key_of(self, record: int) -> bytes:
        key: bytes = self.key[record].tobytes()
        return key

    def tokens_of(self, record: int) -> npt.NDArray[np.int32]:
        """The tokens of a page, `[used]` (a copy)."""
        return self.tokens[record, : self.used[record]].copy()

    def add(self, column: npt.NDArray[Any], records: Sequence[int] | Ids, change: int) -> None:
        """Add to a column; a record that is named twice counts twice."""
        np.add.at(column, np.asarray(records, dtype=np.int32), change)

    def nbytes(self) -> int:
        """Bytes of the columns."""
        columns = (getattr(self, name) for name in (*COLUMNS, "key", "tokens", "stored"))
        return sum(column.nbytes for column in columns)

    def _reset(self, record: int) -> None:
        for name, (_, value) in COLUMNS.items():
            getattr(self, name)[record] = value
        self.key[record] = 0
        self.stored[record] = 0

    def _resize(self, rows: int) -> None:
        for name in (*COLUMNS, "key", "tokens", "stored"):
            old = getattr(self, name)
            default = COLUMNS[name][1] if name in COLUMNS else 0
            new = np.full((rows, *old.shape[1:]), default, dtype=old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)
