"""``manage.py serve``: the whole chat in one process, or with ``--no-worker`` its web side alone."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
from argparse import ArgumentParser
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvicorn
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db import DEFAULT_DB_ALIAS, connections
from django.db.migrations.executor import MigrationExecutor

from chatapp import accounts, wakeups

if TYPE_CHECKING:
    from chatapp.embedded import EmbeddedWorker

# uvicorn closes the socket at a frame above this; smaller ones that are too large get an error event.
_FRAME_MAX_BYTES = 4 * 2**20


class Command(BaseCommand):
    help = "Serve the web chat, with the worker in a thread of the same process."

    def add_arguments(self, parser: ArgumentParser) -> None:
        public = urlsplit(settings.PUBLIC_URL)
        parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
        parser.add_argument(
            "--port",
            type=int,
            default=8000 if public.scheme == "https" else public.port or 80,
            help="port to listen on, 0 for any free one (default: %(default)s)",
        )
        parser.add_argument(
            "--no-worker",
            action="store_true",
            help="web side only; workers are processes of their own (needs REDIS_URL)",
        )

    def handle(self, *_: Any, host: str, port: int, no_worker: bool, **__: Any) -> None:
        if no_worker and not settings.REDIS_URL:
            raise CommandError(
                "--no-worker needs REDIS_URL: without Redis, web and worker share one process."
            )
        self._check_migrations()
        listener = self._listen(host, port)
        # A waiting thread must not spin on a core that the web side needs. Read when OpenMP loads, with torch.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # Tokens pass through several threads: hand the interpreter over sooner than the default of 5 ms.
        sys.setswitchinterval(0.001)
        # Being asked to end is the same as Ctrl+C: the worker is to put its conversations away.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        worker = None if no_worker else _embedded_worker()
        try:
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(self._serve(listener, worker))
        finally:
            if worker is not None:
                worker.stop()

    def _check_migrations(self) -> None:
        executor = MigrationExecutor(connections[DEFAULT_DB_ALIAS])
        if executor.migration_plan(executor.loader.graph.leaf_nodes()):
            raise CommandError("The database is not up to date. Run `manage.py migrate` first.")

    def _listen(self, host: str, port: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(128)
        except OSError as refused:
            listener.close()
            if refused.errno == errno.EADDRINUSE:
                raise CommandError(
                    f"Port {port} on {host} is in use. Stop what uses it, or choose another: "
                    f"manage.py serve --port {port + 1}"
                ) from refused
            raise CommandError(f"Cannot listen on {host}:{port}: {refused}") from refused
        return listener

    async def _serve(self, listener: socket.socket, worker: EmbeddedWorker | None) -> None:
        wakeups.use_loop(asyncio.get_running_loop())
        if worker is not None:
            worker.start()
        await asyncio.to_thread(self._welcome, listener)
        server = uvicorn.Server(
            uvicorn.Config(
                "chatapp.asgi:application",
                lifespan="off",
                log_config=None,
                ws_max_size=_FRAME_MAX_BYTES,
                timeout_graceful_shutdown=3,
            )
        )
        await server.serve(sockets=[listener])

    def _welcome(self, listener: socket.socket) -> None:
        if not settings.IS_LOCAL:
            # A log of a public site is no place for a key to it.
            self.stdout.write(
                f"Keepwarm is at {settings.PUBLIC_URL}/. `manage.py sign_in_link` makes a link to sign in with."
            )
        else:
            base_url = _local_url(*listener.getsockname()[:2])
            administrator = accounts.first_administrator()
            self.stdout.write(f"Keepwarm is at {base_url}/ (stop it with Ctrl+C)")
            self.stdout.write(
                f"Sign in as {administrator.get_username()} with this link, which works once:\n"
                f"  {accounts.one_time_sign_in_url(administrator, base_url)}"
            )
        self.stdout.flush()
        connections.close_all()


def _embedded_worker() -> EmbeddedWorker:
    # Imported here: the web side alone needs none of a worker's libraries.
    from chatapp.embedded import EmbeddedWorker

    return EmbeddedWorker()


def _local_url(host: str, port: int) -> str:
    """The address to open; a host that was asked for by --host is one that may be asked for."""
    if ip_address(host).is_unspecified:
        host = "127.0.0.1"
    name = f"[{host}]" if ":" in host else host
    if name not in settings.ALLOWED_HOSTS:
        settings.ALLOWED_HOSTS.append(name)
    return f"http://{name}:{port}"
