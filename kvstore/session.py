"""The KV of one conversation branch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import KVLost
from kvstore.pool import Run
from kvstore.records import APPROXIMATE, EXACT, NONE
from kvstore.spans import Span, cut_spans, grown
from kvstore.table import PageTable

if TYPE_CHECKING:
    from kvstore.residency import Residency
    from kvstore.restoration import Restoration

Tokens = npt.NDArray[np.int32]
MINIMUM_TOKENS = 64


class Session:
    """Tokens and their KV for one conversation branch: an ordered list of spans over pages.

    The list of tokens is the truth: slots past `length` are garbage, whatever the pages hold. A forward pass first
    writes the KV of its new tokens layer by layer (`write`), then makes them part of the session (`commit`). A pass
    that fails half way leaves nothing behind, because it never commits.

    Pages may be shared with other sessions and with the prefix index. A page that is shared or full is never written:
    the first write behind such a page goes to a new one (copy-on-write).

    A session is used by the store's thread alone, and only between `acquire` and `release`: only then are its pages
    held on the device.
    """

    def __init__(
        self, residency: Residency, owner: str, session_id: str | None, *, number: int, pool: int
    ) -> None:
        """`number` names the session's claim on memory and `pool` is the share that its pages count to."""
        self.spec = residency.spec
        self.owner = owner
        self.id = session_id
        self.number = number
        self.pool = pool
        self.locked = False
        self.asleep = False
        self.dropped = False
        self.last_use = -np.inf
        # Of the last acquisition: tokens found on the device, and brought back from a tier.
        self.reused_tokens = 0
        self.restored_tokens = 0
        self.planned = 0  # tokens that it will hold, when known
        self.public_tokens = 0
        self.heartbeat = -np.inf
        self.fidelity = EXACT
        self.table = PageTable()
        self.spans: list[Span] = []
        self.arrivals: list[Restoration] = []
        self.keyed_pages = 0  # pages at the front that the prefix index knows: whole, exact, without gaps
        self._residency = residency
        self._buffer: Tokens | None = None  # the tokens, with room for more; None: gather them from the pages
        self._length = 0
        self.spare: list[int] = []  # records with pages for tokens past `length`
        self._written = [0] * self.spec.layers  # tokens written past `length`, by layer
        self._targets: list[tuple[Run, int]] = []  # where those go, with the offset of the first
        self._target_count = 0
        self._target_room = 0  # slots of the last page among those
        self._runs: list[Run] | None = (
            None  # adjacent slots of the committed tokens; None when to be found again
        )

    @property
    def length(self) -> int:
        """Number of tokens whose KV is held."""
        return self._length

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens whose KV is held, in order (a copy)."""
        return tuple(self.token_array.tolist())

    @property
    def token_array(self) -> Tokens:
        """View of the tokens, int32 `[length]`, valid until the session changes."""
        if self._buffer is None:
            self._buffer = self._residency.gathered_tokens(self.table)
        return self._buffer[: self._length]

    @property
    def next_position(self) -> int:
        """The position of the token that would follow."""
        return self.spans[-1].end if self.spans else 0

    @property
    def exact(self) -> bool:
        """Whether no span is approximate."""
        return all(span.exact for span in self.spans)

    @property
    def exactness(self) -> Literal["exact", "quantized", "approximate"]:
        """What the KV has been through: nothing, a rounding format, or a change of what comes before it."""
        if not self.exact:
            return "approximate"
        worst = self._residency.worst_fidelity(self.table.ids())
        return "exact" if worst == EXACT else "quantized" if worst < APPROXIMATE else "approximate"

    def positions(self) -> torch.Tensor:
        """Positions of the tokens, int64 `[length]`."""
        parts = [torch.arange(span.position, span.end) for span in self.spans]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def common_prefix(self, tokens: Sequence[int] | Tokens) -> int:
        """Length of the longest common prefix of the session's tokens and `tokens`."""
        others = np.asarray(tokens[: self._length], dtype=np.int32)
        equal = self.token_array[: len(others)] == others
        return len(others) if equal.all() else int(np.argmin(equal))

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens in total.

        Raises PoolExhausted when the device has no room; the session then holds what it held. Raises KVLost like
        `write`.
        """
        if length > self._length and self._last_page_is_shared():
            self._copy_last_page()
        room = self._room() + len(self.spare) * self.spec.page_tokens
        missing = length - self._length - room
        if missing <= 0:
            return
        pages = -(-missing // self.spec.page_tokens)
        last = self.spare[-1] if self.spare else (self.table.records[-1] if self.table else NONE)
        position = self.next_position + room
        self.spare += self._residency.new_records(self, pages, after=last, position=position)

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the KV of the tokens that follow the session's, for one layer.

        `keys` and `values` have the shape `[1, kv_heads, new tokens, head_dim]`. Returns the layer's keys and values,
        of the old tokens and the new: `[1, kv_heads, length + new tokens, head_dim]`, views where the pages are
        adjacent. Writing again before a commit overwrites. Raises ValueError when the shapes are not those of the
        spec, PoolExhausted when the device has no room, KVLost when KV that was on its way could not be restored.
        """
        count = keys.shape[2]
        expected = (1, self.spec.kv_heads, count, self.spec.head_dim)
        if keys.shape != expected or values.shape != expected:
            raise ValueError(
                f"layer {layer}: keys {tuple(keys.shape)} and values {tuple(values.shape)} "
                f"are not of the shape {expected}"
            )
        if count != self._target_count:
            self._aim(count)
        self.await_arrivals(layer)  # what arrives later would overwrite what is written behind it in its page
        for run, offset in self._targets:
            run.keys(layer).copy_(keys[0, :, offset : offset + run.count])
            run.values(layer).copy_(values[0, :, offset : offset + run.count])
        self._written[layer] = count
        return self._read(layer, [run for run, _ in self._targets])

    def commit(self, tokens: Sequence[int], *, source: str = "") -> None:
        """Make `tokens`, whose KV every layer has just written, part of the session, as a span of `source`.

        Raises ValueError when a layer wrote another number of tokens; nothing is committed then.
        """
        if any(written != len(tokens) for written in self._written):
            raise ValueError(f"not every layer has written {len(tokens)} tokens: {self._written}")
        self._append_tokens(np.asarray(tokens, dtype=np.int32))
        self._residency.counters.tokens_committed += len(tokens)
        self._append_span(source, len(tokens))
        if self._runs is not None:
            self._runs = merged([*self._runs, *(run for run, _ in self._targets)])
        self._forget_targets()
        self._residency.pages_filled(self)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens. Whole pages of the rest stay in the prefix index."""
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot truncate {self._length} tokens to {length}")
        self._forget_targets()
        if length == self._length:
            return
        self.drop_spare()
        self._length = length
        cut_spans(self.spans, length)
        self._residency.release(self.table.cut(length), locked=self.locked)
        self.rearranged()

    def keys(self, layer: int) -> torch.Tensor:
        """A layer's keys, `[1, kv_heads, length, head_dim]`. Raises KVLost like `write`."""
        return self._read(layer, [])[0]

    def values(self, layer: int) -> torch.Tensor:
        """A layer's values, `[1, kv_heads, length, head_dim]`. Raises KVLost like `write`."""
        return self._read(layer, [])[1]

    def adjacent_runs(self) -> int:
        """In how many runs of adjacent slots the tokens lie; 1 means that attention reads them without a copy."""
        return len(self._committed_runs())

    # What follows is for the store and the edits of spans.

    def await_arrivals(self, layer: int) -> None:
        """Wait until the pages that are being restored have this layer and those before it. Raises KVLost."""
        if not self.arrivals:
            return
        own = set(self.table.records)
        lost = {record for restoration in self.arrivals for record in restoration.wait(layer, records=own)}
        if (length := self.tokens_before(lost)) < self._length:
            raise KVLost(length)
        if layer == self.spec.layers - 1:
            self._note_arrived()

    def _note_arrived(self) -> None:
        """All layers of all pages are there: note the formats that they came from."""
        own = set(self.table.records)
        for restoration in self.arrivals:
            for arrival in restoration.arrivals:
                if arrival.record in own:
                    self._residency.degrade(arrival.record, arrival.formats, arrival.fidelity)
        self.arrivals.clear()
        self._find_fidelity()

    def rearranged(self) -> None:
        """Find everything that follows from the page table again, after it was changed."""
        self._runs = None
        self.keyed_pages = min(self.keyed_pages, self._whole_pages())
        self._find_fidelity()

    def replace_contents(self, table: PageTable, spans: list[Span]) -> None:
        """Take other contents. References and locks are the caller's business."""
        self._forget_targets()
        self.table, self.spans = table, spans
        self._length = table.tokens
        self._buffer = None
        self.keyed_pages = 0
        self.rearranged()

    def rest(self) -> None:
        """Keep only what an idle session needs."""
        self._buffer = None
        self.rearranged()

    def take_fork(self, other: Session, table: PageTable, length: int) -> None:
        """Begin as the first `length` tokens of another session, whose part of the page table is `table`."""
        spans = list(other.spans)
        cut_spans(spans, length)
        self.replace_contents(table, spans)
        self.public_tokens = other.public_tokens
        self.keyed_pages = min(other.keyed_pages, self._whole_pages())
        self.heartbeat, self.last_use = other.heartbeat, other.last_use

    def drop_spare(self) -> None:
        """Give back pages that hold no committed token."""
        self._forget_targets()
        spare, self.spare = self.spare, []
        self._residency.release(spare, locked=self.locked)

    def _find_fidelity(self) -> None:
        worst = self._residency.worst_fidelity(self.table.ids())
        self.fidelity = worst if self.exact else APPROXIMATE

    def _whole_pages(self) -> int:
        size = self.spec.page_tokens
        for page, (_, start, count) in enumerate(self.table):
            if start or count < size:
                return page
        return len(self.table)

    def _room(self) -> int:
        """Slots of the last page that may be written: none when it is shared or not cut at its end. A pass under way
        keeps those that it had, whoever comes to share the page meanwhile: others hold what is before them."""
        if self._target_count:
            return self._target_room
        if not self.table:
            return 0
        record, start, count = self.table.records[-1], self.table.starts[-1], self.table.counts[-1]
        if not self._residency.writable(record, start + count):
            return 0
        return self.spec.page_tokens - start - count

    def _aim(self, count: int) -> None:
        """Find the slots for `count` tokens that follow."""
        self._forget_targets()
        self.reserve(self._length + count)
        targets, offset = [], 0
        room = target_room = self._room()
        for record in ([self.table.records[-1]] if room else []) + self.spare:
            start = self.spec.page_tokens - room if room else 0
            size = min(self.spec.page_tokens - start, count - offset)
            if size <= 0:
                break
            targets.append((self._residency.run(record, start, size), offset))
            offset += size
            room = 0
        self._targets, self._target_count, self._target_room = merged_targets(targets), count, target_room

    def _last_page_is_shared(self) -> bool:
        """Whether there are slots behind the tokens in the last page that may not be written."""
        if not self.table or self._room():
            return False
        return self.table.starts[-1] + self.table.counts[-1] < self.spec.page_tokens

    def _copy_last_page(self) -> None:
        """Give the session a page of its own in place of a last one that it may not write. Raises KVLost."""
        self.await_arrivals(self.spec.layers - 1)
        record, start, count = self.table.records[-1], self.table.starts[-1], self.table.counts[-1]
        copy = self._residency.copied(self, record, start, count)
        self.table.cut(self._length - count)
        self.table.append(copy, 0, count)
        self._residency.adopt_children(self, len(self.table) - 1, record, copy)
        self._residency.release([record], locked=self.locked)
        self._runs = None

    def _append_tokens(self, tokens: Tokens) -> None:
        self._extend_buffer(tokens)
        offset = 0
        if room := self._room():
            offset = min(room, len(tokens))
            record = self.table.records[-1]
            self._residency.unseal(record)
            self._residency.fill(record, tokens[:offset], self.fidelity)
            self.table.counts[-1] += offset
        while offset < len(tokens):
            record = self.spare.pop(0)
            part = tokens[offset : offset + self.spec.page_tokens]
            self._residency.fill(record, part, self.fidelity)
            self.table.append(record, 0, len(part))
            offset += len(part)

    def _extend_buffer(self, tokens: Tokens) -> None:
        held, end = self.token_array, self._length + len(tokens)
        if self._buffer is None or end > len(self._buffer):
            self._buffer = np.empty(max(end, 2 * self._length, MINIMUM_TOKENS), dtype=np.int32)
            self._buffer[: self._length] = held
        self._buffer[self._length : end] = tokens
        self._length = end

    def _append_span(self, source: str, count: int) -> None:
        exact, position = self.exact, self.next_position
        if self.spans and self.spans[-1].continues(source, position, exact):
            self.spans[-1] = grown(self.spans[-1], count)
        elif count:
            self.spans.append(Span(source, count, position, exact))

    def _forget_targets(self) -> None:
        self._written = [0] * self.spec.layers
        self._targets, self._target_count, self._target_room = [], 0, 0

    def _committed_runs(self) -> list[Run]:
        if self._runs is None:
            self._runs = merged([self._residency.run(*entry) for entry in self.table])
        return self._runs

    def _read(self, layer: int, new: list[Run]) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values of the committed tokens and of the runs behind them."""
        self.await_arrivals(layer)
        runs = merged([*self._committed_runs(), *new])
        if len(runs) == 1:
            return runs[0].keys(layer).unsqueeze(0), runs[0].values(layer).unsqueeze(0)
        if not runs:
            empty = torch.empty(
                (1, self.spec.kv_heads, 0, self.spec.head_dim),
                dtype=self.spec.dtype,
                device=self._residency.device,
            )
            return empty, empty
        keys = torch.cat([run.keys(layer) for run in runs], dim=1)
        values = torch.cat([run.values(layer) for run in runs], dim=1)
        return keys.unsqueeze(0), values.unsqueeze(0)

    def tokens_before(self, records: set[int]) -> int:
        """Tokens before the first of these records; all where there is none of them."""
        length = 0
        for record, _, count in self.table if records else ():
            if record in records:
                return length
            length += count
        return self._length


def merged(runs: Sequence[Run]) -> list[Run]:
    """The same slots in as few runs as possible."""
    result: list[Run] = []
    for run in runs:
        joined = result[-1].joined(run) if result else None
        if joined is not None:
            result[-1] = joined
        else:
            result.append(run)
    return result


def merged_targets(targets: Sequence[tuple[Run, int]]) -> list[tuple[Run, int]]:
    """Runs with the offset of their first token, in as few runs as possible."""
    runs = merged([run for run, _ in targets])
    offsets = np.cumsum([0, *(run.count for run in runs)]).tolist()
    return list(zip(runs, offsets, strict=False))
