"""Wake-ups: hints on the channel layer that there is something new to read.

A hint may be lost, doubled or late; whoever gets one reads the truth from the turn's stream or the database. So
sending never waits and never fails.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from typing import Any
from uuid import UUID

from channels.layers import get_channel_layer

logger = logging.getLogger(__name__)

ENGINE_GROUP = "engine"


def turn_group(turn: UUID) -> str:
    return f"turn.{turn.hex}"


def owner_group(owner_id: int) -> str:
    return f"owner.{owner_id}"


class _Sender:
    """Sends from threads by way of one event loop: the layer's connections and queues belong to a loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def use_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Send in this loop. The in-memory layer works only within the loop that its readers run in."""
        with self._lock:
            self._loop = loop

    def send(self, group: str, message: dict[str, Any]) -> None:
        try:
            asyncio.run_coroutine_threadsafe(_group_send(group, message), self._running_loop())
        except RuntimeError:
            logger.debug("No event loop to wake %s", group)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="wakeups", daemon=True).start()
            return self._loop


async def _group_send(group: str, message: dict[str, Any]) -> None:
    layer = get_channel_layer()
    assert layer is not None
    try:
        await layer.group_send(group, message)
    except Exception:
        logger.warning("Could not wake %s", group, exc_info=True)


_sender = _Sender()
use_loop = _sender.use_loop


def turn_grew(turn: UUID) -> None:
    """The turn's stream has new entries."""
    _sender.send(turn_group(turn), {"type": "turn.grew", "turn": str(turn)})


def conversation_changed(owner_id: int, conversation: UUID, version: int) -> None:
    _sender.send(
        owner_group(owner_id),
        {"type": "conversation.changed", "conversation": str(conversation), "version": version},
    )


def conversation_deleted(owner_id: int, conversation: UUID) -> None:
    _sender.send(owner_group(owner_id), {"type": "conversation.deleted", "conversation": str(conversation)})


def session_digest(session_key: str) -> str:
    """A session's name in messages: the key itself is a secret."""
    return hashlib.sha256(session_key.encode()).hexdigest()


def session_ended(owner_id: int, session_key: str) -> None:
    """The owner signed out in one browser: its sockets close."""
    _sender.send(owner_group(owner_id), {"type": "session.ended", "session": session_digest(session_key)})


def rights_changed(owner_id: int) -> None:
    """The owner changed the password or was deactivated: sockets check whether they may stay."""
    _sender.send(owner_group(owner_id), {"type": "rights.changed"})


def engine_changed() -> None:
    _sender.send(ENGINE_GROUP, {"type": "engine.changed"})
