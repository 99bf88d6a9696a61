"""Turn streams in Redis Streams, for several processes.

An entry's sequence number is its stream id (``N-0``). A script appends only what continues the log, so of two workers
that believe they own a turn only one can append: no text is written twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import cast
from uuid import UUID
from weakref import WeakKeyDictionary

import redis
import redis.asyncio

from chatapp.protocol import ModelStatus
from chatapp.streams.base import CLAIM_SECONDS, ENGINE_SILENT_SECONDS, QUEUED_SECONDS, Entry, StaleWriter

_ENGINES = "keepwarm:engines"

# What XRANGE gives without decoding: stream id, fields.
_Rows = list[tuple[bytes, dict[bytes, bytes]]]

# KEYS: log, cancel request. ARGV: first number, seconds to keep, entries.
# Returns nil where the first number does not follow the last entry, else whether a cancel is asked for.
_APPEND = """
local first = tonumber(ARGV[1])
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
local length = last and tonumber(string.match(last[1], '^%d+')) or 0
if first ~= length + 1 then return nil end
for i = 3, #ARGV do
  redis.call('XADD', KEYS[1], string.format('%d-0', first + i - 3), 'entry', ARGV[i])
end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return redis.call('EXISTS', KEYS[2])
"""


# KEYS: claim. ARGV: worker, seconds. Returns whether the worker holds the turn now.
_CLAIM = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= '' and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
return 1
"""

_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""


def _log_key(turn: UUID) -> str:
    return f"keepwarm:turn:{turn}"


def _claim_key(turn: UUID) -> str:
    return f"keepwarm:claim:{turn}"


def _cancel_key(turn: UUID) -> str:
    return f"keepwarm:cancel:{turn}"


class RedisTurnStreams:
    def __init__(self, url: str, keep_seconds: int) -> None:
        self._url = url
        self._keep_seconds = keep_seconds
        self._redis = redis.Redis.from_url(url)
        self._append = self._redis.register_script(_APPEND)
        self._claim = self._redis.register_script(_CLAIM)
        self._release = self._redis.register_script(_RELEASE)
        # An asyncio client belongs to the event loop that it was first used in.
        self._async_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, redis.asyncio.Redis] = (
            WeakKeyDictionary()
        )

    def append(self, turn: UUID, entries: Sequence[Entry]) -> bool:
        first = entries[0].sequence_number
        cancelled = self._append(
            keys=[_log_key(turn), _cancel_key(turn)],
            args=[first, self._keep_seconds, *(entry.to_json() for entry in entries)],
        )
        if cancelled is None:
            raise StaleWriter(f"Turn {turn}: number {first} does not follow the last event of its stream.")
        return bool(cancelled)

    def read(self, turn: UUID, after: int = 0) -> list[Entry]:
        return _entries(cast(_Rows, self._redis.xrange(_log_key(turn), min=f"({after}-0")))

    async def read_async(self, turn: UUID, after: int = 0) -> list[Entry]:
        return _entries(cast(_Rows, await self._async_redis.xrange(_log_key(turn), min=f"({after}-0")))

    def discard(self, turn: UUID) -> None:
        self._redis.delete(_log_key(turn), _cancel_key(turn))

    def request_cancel(self, turn: UUID) -> None:
        self._redis.set(_cancel_key(turn), 1, ex=self._keep_seconds)

    def cancel_requested(self, turn: UUID) -> bool:
        return bool(self._redis.exists(_cancel_key(turn)))

    def mark_queued(self, turn: UUID) -> bool:
        return bool(self._redis.set(_claim_key(turn), "", nx=True, ex=int(QUEUED_SECONDS)))

    def claim(self, turn: UUID, worker: str) -> bool:
        return bool(self._claim(keys=[_claim_key(turn)], args=[worker, max(1, round(CLAIM_SECONDS))]))

    def release(self, turn: UUID, worker: str) -> None:
        self._release(keys=[_claim_key(turn)], args=[worker])

    def publish_engine(self, worker: str, status: ModelStatus | None) -> None:
        if status is None:
            self._redis.hdel(_ENGINES, worker)
        else:
            self._redis.hset(_ENGINES, worker, f"{time.time()} {status.model_dump_json()}")

    async def engine_statuses(self) -> list[ModelStatus]:
        oldest = time.time() - ENGINE_SILENT_SECONDS
        statuses = []
        for worker, value in cast(dict[bytes, bytes], await self._async_redis.hgetall(_ENGINES)).items():
            heard_at, _, status = value.partition(b" ")
            if float(heard_at) >= oldest:
                statuses.append(ModelStatus.model_validate_json(status))
            else:
                await self._async_redis.hdel(_ENGINES, worker)
        return statuses

    @property
    def _async_redis(self) -> redis.asyncio.Redis:
        loop = asyncio.get_running_loop()
        client = self._async_clients.get(loop)
        if client is None:
            client = self._async_clients[loop] = redis.asyncio.Redis.from_url(self._url)
        return client


def _entries(rows: _Rows) -> list[Entry]:
    return [Entry.from_json(fields[b"entry"]) for _, fields in rows]
