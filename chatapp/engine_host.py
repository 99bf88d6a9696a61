"""The worker's engine: one per process, started with the worker, its state told to the web side."""

from __future__ import annotations

import logging
import threading

from django.conf import settings
from django.db import DatabaseError, connections
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from chatapp import turns, wakeups, workers
from chatapp.protocol import ModelStatus
from chatapp.streams.base import ENGINE_HEARTBEAT_SECONDS
from inference import Engine, EngineConfig, EngineStatus

logger = logging.getLogger(__name__)


class _Host:
    def __init__(self) -> None:
        self._stopped = threading.Event()
        self.engine = Engine(_config(), on_status=self._status_changed)
        self._heartbeat = threading.Thread(target=self._beat, name="engine-heartbeat", daemon=True)

    def start(self) -> None:
        self.engine.start()
        self._heartbeat.start()

    def stop(self) -> None:
        self._stopped.set()
        self.engine.shutdown()
        workers.publish(None)
        wakeups.engine_changed()

    def _beat(self) -> None:
        """Say that this worker lives, keep its turns, and pick up those of workers that do not."""
        while True:
            workers.publish(_to_protocol(self.engine.status))
            try:
                workers.renew_claims()
                turns.pick_up_abandoned()
            except (DatabaseError, OperationalError, RedisError):
                logger.warning("Could not look after the turns; trying again", exc_info=True)
            finally:
                connections.close_all()
            if self._stopped.wait(ENGINE_HEARTBEAT_SECONDS):
                return

    def _status_changed(self, status: EngineStatus) -> None:
        if self._stopped.is_set():
            return  # an engine that is shut down on purpose has not failed
        workers.publish(_to_protocol(status))
        wakeups.engine_changed()


def _to_protocol(status: EngineStatus) -> ModelStatus:
    return ModelStatus(
        state=status.state,
        progress=status.progress,
        model=status.model,
        detail=status.detail,
        context_length=status.context_length,
    )


def _config() -> EngineConfig:
    return EngineConfig(
        model=settings.MODEL,
        cache_dir=settings.MODEL_CACHE,
        device=settings.MODEL_DEVICE,
        dtype=settings.MODEL_DTYPE,
        threads=settings.ENGINE_THREADS or None,
        kv_bytes=settings.KV_MEMORY_MB * 2**20,
        kv_host_bytes=settings.KV_HOST_MB * 2**20,
        kv_disk_bytes=settings.KV_DISK_MB * 2**20,
        kv_dir=settings.KV_DIR,
        kv_remote_bytes=settings.KV_REMOTE_MB * 2**20,
        kv_remote_url=settings.KV_REMOTE_URL,
        kv_format=settings.KV_FORMAT,
        kv_expire_after=settings.KV_EXPIRE_DAYS * 24 * 3600.0,
        prefill_chunk=settings.PREFILL_CHUNK,
        max_running=settings.MAX_RUNNING,
    )


_lock = threading.Lock()
_host: _Host | None = None


def start() -> Engine:
    """Start this process's engine, once; the model loads on its own thread."""
    global _host
    with _lock:
        if _host is None:
            _host = _Host()
            _host.start()
        return _host.engine


def get() -> Engine:
    """This process's engine, started if need be. Once stopped, it stays stopped."""
    return _host.engine if _host is not None else start()


def stop() -> None:
    with _lock:
        if _host is not None:
            _host.stop()
