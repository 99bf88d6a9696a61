"""Redis and PostgreSQL servers of the tests' own, on free ports and in folders that go away."""

from __future__ import annotations

import glob
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_START_SECONDS = 30.0


def program(name: str, *places: str) -> str:
    """The path of an installed program.

    Raises:
        RuntimeError: it is not installed; a test that needs it fails, it is not skipped.
    """
    for pattern in places:
        if found := sorted(glob.glob(f"{pattern}/{name}")):
            return found[-1]
    if found_in_path := shutil.which(name):
        return found_in_path
    raise RuntimeError(f"{name} is not installed: `make services` installs what the tests need.")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """A Redis that keeps nothing on disk; yields its URL."""
    port = free_port()
    command = [program("redis-server"), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    process = subprocess.Popen(
        [*command, "--save", "", "--appendonly", "no"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait(lambda: _answers(port), "redis-server")
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait()


@contextmanager
def postgresql_server(folder: Path) -> Iterator[str]:
    """A PostgreSQL cluster with one empty database; yields its URL."""
    binaries = ("/usr/lib/postgresql/*/bin",)
    data = folder / "postgresql"
    data.mkdir(parents=True)
    as_user: list[str] = []
    if os.getuid() == 0:
        # PostgreSQL refuses to run as root; its package made a user for it.
        user = pwd.getpwnam("postgres")
        os.chown(data, user.pw_uid, user.pw_gid)
        for parent in data.parents:
            if not parent.stat().st_mode & 0o001:
                parent.chmod(parent.stat().st_mode | 0o011)
        as_user = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    subprocess.run(
        [*as_user, program("initdb", *binaries), "-D", data, "-U", "keepwarm", "-A", "trust", "-E", "UTF8"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    port = free_port()
    settings = [f"port={port}", "listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off"]
    process = subprocess.Popen(
        [*as_user, program("postgres", *binaries), "-D", str(data), *(f"--{line}" for line in settings)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait(lambda: _accepts(binaries, port), "postgres")
        yield f"postgres://keepwarm@127.0.0.1:{port}/postgres"
    finally:
        # Its "fast" shutdown; at SIGTERM it would wait for clients to leave.
        process.send_signal(signal.SIGINT)
        process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _accepts(binaries: tuple[str, ...], port: int) -> bool:
    command = [program("pg_isready", *binaries), "-h", "127.0.0.1", "-p", str(port), "-U", "keepwarm"]
    return subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0


def _wait(ready: Callable[[], bool], name: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not ready():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} did not start within {_START_SECONDS:.0f} s")
        time.sleep(0.05)
