"""Following a turn's stream for one socket: what is in the log, then what comes, each event once and in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

from redis.exceptions import RedisError

from chatapp import turns
from chatapp.database import in_database
from chatapp.models import Message
from chatapp.streams import Entry, get_streams

logger = logging.getLogger(__name__)

# How long a follower trusts that it was woken; after that it looks for itself, since wake-ups may be lost.
_DOUBT_SECONDS = 1.0

Send = Callable[[dict[str, Any]], Awaitable[None]]


class Follower:
    """Reads at the socket's pace: while sending waits, the log keeps what is new."""

    def __init__(self, turn: UUID, after: int, send: Send) -> None:
        self._turn = turn
        self._after = after
        self._send = send
        self._woken = asyncio.Event()

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        """Send events until the turn's last one, or until the turn is deleted."""
        doubtful = True
        while True:
            self._woken.clear()
            entries = await self._read()
            if not entries and doubtful:
                stored = await in_database(self._stored_ending)
                if stored is None:
                    return
                entries = stored
            for entry in entries:
                await self._send(entry.event)
                self._after = entry.sequence_number
            if entries and entries[-1].is_last:
                return
            doubtful = not await self._wait() and not entries

    async def _read(self) -> list[Entry]:
        try:
            return await get_streams().read_async(self._turn, self._after)
        except RedisError:
            # It comes back, and so does what was in it or the stored answer.
            logger.warning("The stream of turn %s cannot be read", self._turn, exc_info=True)
            return []

    async def _wait(self) -> bool:
        try:
            await asyncio.wait_for(self._woken.wait(), _DOUBT_SECONDS)
        except TimeoutError:
            return False
        return True

    def _stored_ending(self) -> list[Entry] | None:
        """The end of a turn whose log is gone or broke off, from the database.

        Empty while the turn goes on, None where it was deleted.
        """
        answer = Message.objects.filter(pk=self._turn).first()
        if answer is None:
            return None
        if answer.is_active:
            return []
        return [turns.ending(answer, self._after + 1)]
