"""The one-process mode: a Celery worker in a thread beside the web server, over the in-memory broker."""

from __future__ import annotations

import logging
import threading

from celery.worker import WorkController
from django.conf import settings

from chatapp.celery import app

logger = logging.getLogger(__name__)


class EmbeddedWorker:
    """A worker as ``celery worker`` runs it, without what only a process of its own has: signals, a pid file, peers."""

    def __init__(self) -> None:
        self._controller: WorkController | None = None
        self._thread = threading.Thread(target=self._run, name="celery-worker", daemon=True)

    def start(self) -> None:
        """Start it; torch and the model load in its threads while the web side answers already."""
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """End it: answers in the making stay unfinished, and are made on the next start."""
        from chatapp import engine_host

        engine_host.stop()
        if self._controller is not None:
            self._controller.stop()
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._controller = WorkController(
                app=app,
                pool_cls="threads",
                concurrency=settings.CELERY_WORKER_CONCURRENCY,
                without_heartbeat=True,
                without_mingle=True,
                without_gossip=True,
                loglevel="WARNING",
            )
            self._controller.start()
        except Exception:
            logger.exception("The worker has stopped; messages will not be answered until the next start")
