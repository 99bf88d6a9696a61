"""What the store counts, where the work is done."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass
class Counters:
    """Totals since the store was made. Those by name are counted under the names in their comments.

    Tokens of lookups: each token looked up is one of `tokens_reused` (its page was on the device),
    `tokens_restored` (it came from a tier) and the rest, which the caller computes. `tokens_committed` are all whose
    KV was written by the model.
    """

    lookups: int = 0
    hits: int = 0  # lookups that found at least one token
    tokens_looked_up: int = 0
    tokens_reused: int = 0
    tokens_restored: Counter[str] = field(default_factory=Counter)  # by tier
    tokens_committed: int = 0
    tokens_moved: int = 0  # whose keys were rotated to other positions
    pages_evicted: Counter[str] = field(default_factory=Counter)  # by reason: room, sleep, unrestored
    sessions_evicted: int = 0  # dropped for want of room for their pages
    pages_copied: int = 0  # copy-on-write
    pages_shared: int = 0  # found to be the same as another session's
    pages_compacted: int = 0
    chunks_written: Counter[str] = field(default_factory=Counter)  # by tier
    bytes_written: Counter[str] = field(default_factory=Counter)  # by tier
    bytes_restored: Counter[str] = field(default_factory=Counter)  # by tier
    chunks_removed: Counter[str] = field(default_factory=Counter)  # by tier and reason, "disk:budget"
    failures: Counter[str] = field(default_factory=Counter)  # by tier and reason, "disk:checksum"
    refusals: Counter[str] = field(default_factory=Counter)  # room and pins asked for in vain
    drops: int = 0
    sleeps: int = 0
    wakes: int = 0

    def totals(self) -> dict[str, int]:
        """All counters by name; those counted by name are there as "field:name"."""
        totals: dict[str, int] = {}
        for field_ in fields(self):
            value = getattr(self, field_.name)
            if isinstance(value, Counter):
                totals |= {f"{field_.name}:{name}": number for name, number in value.items()}
            else:
                totals[field_.name] = value
        return totals
