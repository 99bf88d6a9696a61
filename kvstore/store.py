"""Sessions by owner and id, within a budget of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvstore.session import Session
from kvstore.spec import KVSpec


class SessionLocked(Exception):
    """The session is in use and was asked for a second time."""


@dataclass(frozen=True)
class StoreSnapshot:
    """The store's figures at one moment.

    `sessions` counts the kept sessions, `active` the acquired ones, whether kept or not; `bytes` covers both.
    The rest are totals since the store was made: `lookups` and `hits` (lookups that reused at least one token),
    `tokens_reused`, `evictions` (sessions dropped for want of room) and `drops` (on request).
    """

    sessions: int
    active: int
    bytes: int
    budget_bytes: int
    lookups: int
    hits: int
    tokens_reused: int
    evictions: int
    drops: int


class SessionStore:
    """Keeps the sessions of many conversations and drops the least recently used when bytes run short.

    An acquired session is locked: it is never evicted, and may grow past the budget. The budget is enforced when a
    session grows, by evicting idle ones, and when one is released: a session that alone exceeds it is then dropped.
    Who acquires sessions only when they fit (`fits`), with the `planned` length that was asked for, stays within the
    budget, but for the moment in which one session is copied into larger buffers.

    One thread (the engine's) calls everything that changes the store or its sessions. `snapshot` may be called from
    any thread: it returns an immutable object that the writer replaces after each change.
    """

    def __init__(self, spec: KVSpec, budget_bytes: int, *, device: torch.device | str = "cpu") -> None:
        if budget_bytes < 0:
            raise ValueError("budget_bytes must not be negative")
        self.spec = spec
        self.budget_bytes = budget_bytes
        self._device = torch.device(device)
        self._idle: OrderedDict[tuple[str, str], Session] = OrderedDict()  # oldest use first
        self._locked: dict[tuple[str, str], Session] = {}
        self._unkept: set[Session] = set()  # active, and freed at release
        self._bytes = 0
        self._lookups = 0
        self._hits = 0
        self._tokens_reused = 0
        self._evictions = 0
        self._drops = 0
        self._publish()

    def fits(self, session_id: str | None, owner: str, planned: int) -> bool:
        """Whether the session can be acquired for `planned` tokens, within the budget.

        Reserved for each acquired session are the bytes of its planned tokens, or of its buffers where these are
        larger. Idle sessions do not count, because they make room.
        """
        idle = self._idle.get((owner, session_id)) if session_id is not None else None
        capacity = max(planned, idle.capacity if idle else 0)
        reserved = sum(session.planned_bytes for session in (*self._locked.values(), *self._unkept))
        return reserved + capacity * self.spec.bytes_per_token <= self.budget_bytes

    def acquire(
        self, session_id: str | None, owner: str, tokens: Sequence[int], *, planned: int = 0
    ) -> tuple[Session, int]:
        """Find or make the owner's session and lock it.

        The session keeps the longest common prefix of what it held and `tokens`. Returns the session and the length
        of that prefix. A session of another owner never matches, even under the same id. With `session_id` None the
        session is empty and freed at release. `planned` is the number of tokens that it will hold at most, 0 when
        that is not known. Raises SessionLocked when the session is already acquired.
        """
        if session_id is None:
            session = self._new_session(owner, None)
            session.planned = planned
            self._unkept.add(session)
            self._publish()
            return session, 0
        key = (owner, session_id)
        if key in self._locked:
            raise SessionLocked(f"session {session_id!r} is in use")
        idle = self._idle.pop(key) if key in self._idle else None
        session = idle or self._new_session(owner, session_id)
        session.planned = planned
        self._locked[key] = session
        matched = session.common_prefix(tokens)
        session.truncate(matched)
        self._lookups += 1
        self._hits += matched > 0
        self._tokens_reused += matched
        self._publish()
        return session, matched

    def release(self, session: Session) -> None:
        """Unlock an acquired session. It becomes the most recently used one, or is freed: when it was not to be
        kept, was dropped meanwhile, holds nothing, or exceeds the budget alone."""
        if session in self._unkept:
            self._unkept.remove(session)
            session.free()
        else:
            key = _key(session)
            if self._locked.get(key) is not session:
                raise ValueError("the session is not acquired")
            del self._locked[key]
            session.planned = 0
            self._keep_or_free(key, session)
        self._publish()

    def drop(self, session_id: str, owner: str) -> bool:
        """Forget the owner's session; one in use is freed at release. Returns whether there was one."""
        found = self._drop((owner, session_id))
        self._publish()
        return found

    def drop_all(self) -> None:
        """Forget every session; those in use are freed at release."""
        for key in [*self._idle, *self._locked]:
            self._drop(key)
        self._publish()

    def snapshot(self) -> StoreSnapshot:
        """The store's figures. Safe from any thread."""
        return self._snapshot

    def _new_session(self, owner: str, session_id: str | None) -> Session:
        return Session(self.spec, owner, session_id, device=self._device, account=self._resize)

    def _resize(self, change: int) -> None:
        # Called before a session takes memory, so that room is made first.
        self._bytes += change
        if change > 0:
            self._evict_idle()
        self._publish()

    def _evict_idle(self) -> None:
        while self._bytes > self.budget_bytes and self._idle:
            _, session = self._idle.popitem(last=False)
            self._evictions += 1
            session.free()

    def _keep_or_free(self, key: tuple[str, str], session: Session) -> None:
        if session.length == 0:
            session.free()
        elif session.bytes > self.budget_bytes:
            self._evictions += 1
            session.free()
        else:
            self._idle[key] = session
            self._evict_idle()

    def _drop(self, key: tuple[str, str]) -> bool:
        if key in self._idle:
            self._idle.pop(key).free()
        elif key in self._locked:
            self._unkept.add(self._locked.pop(key))
        else:
            return False
        self._drops += 1
        return True

    def _publish(self) -> None:
        self._snapshot = StoreSnapshot(
            sessions=len(self._idle) + len(self._locked),
            active=len(self._locked) + len(self._unkept),
            bytes=self._bytes,
            budget_bytes=self.budget_bytes,
            lookups=self._lookups,
            hits=self._hits,
            tokens_reused=self._tokens_reused,
            evictions=self._evictions,
            drops=self._drops,
        )


def _key(session: Session) -> tuple[str, str]:
    assert session.id is not None
    return session.owner, session.id
