"""What the store raises."""

from __future__ import annotations


class KVStoreError(Exception):
    """Base of the store's errors."""


class SessionLocked(KVStoreError):
    """The session is in use and was asked for a second time."""


class PoolExhausted(KVStoreError):
    """The device has no room for the pages asked for, and nothing that may be evicted for them.

    All figures are bytes: `asked`, `free`, and of the rest what is `pinned` and what is `locked` by sessions in use.
    """

    def __init__(self, asked: int, free: int, pinned: int, locked: int, budget: int) -> None:
        super().__init__(
            f"The KV pool cannot give {asked:,} bytes: of {budget:,} bytes, {free:,} are free, {pinned:,} pinned and"
            f" {locked:,} locked by sessions in use. Release or unpin something, or raise the budget."
        )
        self.asked, self.free, self.pinned, self.locked, self.budget = asked, free, pinned, locked, budget


class PinRefused(KVStoreError):
    """The pin would exceed the budget of pinned bytes."""


class KVLost(KVStoreError):
    """A session's KV past `length` tokens could not be brought back. Truncate the session to `length` and compute."""

    def __init__(self, length: int) -> None:
        super().__init__(f"the KV past the first {length} tokens could not be restored; compute it again")
        self.length = length
