"""This worker as others know it: its name, its engine's state, and the turns that it holds.

Imports no torch, so that a worker can say that it is there before torch is.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from redis.exceptions import RedisError

from chatapp.protocol import ModelStatus
from chatapp.streams import get_streams

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_held: set[UUID] = set()


def name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def publish(status: ModelStatus | None) -> None:
    """Tell the web side where the engine is; None: the worker is gone."""
    try:
        get_streams().publish_engine(name(), status)
    except RedisError:
        logger.warning("Could not publish the engine's state", exc_info=True)


@contextmanager
def holding(turn: UUID) -> Iterator[bool]:
    """Claim a turn for as long as it is made; gives False where it is held already, by this worker or another."""
    with _lock:
        is_mine = turn not in _held and get_streams().claim(turn, name())
        if is_mine:
            _held.add(turn)
    try:
        yield is_mine
    finally:
        if is_mine:
            with _lock:
                _held.discard(turn)
            get_streams().release(turn, name())


def renew_claims() -> None:
    """Keep the turns that this worker makes; to be called well before a claim runs out."""
    with _lock:
        held = list(_held)
    for turn in held:
        get_streams().claim(turn, name())
