"""What this worker says of its engine. Imports no torch, so that it can be said before torch is there."""

from __future__ import annotations

import logging
import os
import socket

from chatapp.protocol import ModelStatus
from chatapp.streams import get_streams

logger = logging.getLogger(__name__)


def publish(status: ModelStatus | None) -> None:
    """Tell the web side where the engine is; None: the worker is gone."""
    worker = f"{socket.gethostname()}:{os.getpid()}"
    try:
        get_streams().publish_engine(worker, status)
    except Exception:
        logger.warning("Could not publish the engine's state", exc_info=True)
