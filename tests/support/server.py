"""Keepwarm as processes: the one-process server, or web and worker apart over Redis and PostgreSQL."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

import httpx

from tests.support.socket import TIMEOUT_SECONDS, ChatSocket

REPOSITORY = Path(__file__).resolve().parent.parent.parent
_START_SECONDS = 120.0


class Account:
    """A signed-in user: an HTTP client with its cookies, and sockets."""

    def __init__(self, base_url: str) -> None:
        self.http = httpx.Client(base_url=base_url, follow_redirects=True, timeout=TIMEOUT_SECONDS)
        self._base_url = base_url

    def socket(self) -> ChatSocket:
        return ChatSocket(
            self._base_url.replace("http", "ws", 1) + "/ws/",
            cookies=dict(self.http.cookies),
            origin=self._base_url,
        )

    def move_to(self, server: Server) -> None:
        """Go on at a restarted server, whose port is another; cookies do not know ports."""
        self._base_url = server.base_url
        self.http.base_url = httpx.URL(server.base_url)

    def post(self, path: str, data: dict[str, str]) -> httpx.Response:
        """Post a form, with the CSRF token that its page sets."""
        self.http.get(path)
        return self.http.post(
            path,
            data=data | {"csrfmiddlewaretoken": self.http.cookies["csrftoken"]},
            headers={"Origin": self._base_url},
        )


class Server:
    """A running ``manage.py serve`` with its own data folder.

    Args:
        data_dir: Database and secret key; a second server on the same folder is a restart.
        environment: More settings, as environment variables.
        arguments: For ``serve``.
    """

    def __init__(self, data_dir: Path, environment: dict[str, str] | None = None, *arguments: str) -> None:
        self.environment = (
            os.environ
            | {"DATA_DIR": str(data_dir), "MODEL_CACHE": str(REPOSITORY / "var" / "models")}
            | (environment or {})
        )
        manage("migrate", "--verbosity", "0", environment=self.environment)
        self.process = spawn(
            ["manage.py", "serve", "--port", "0", *arguments], self.environment, stdout=subprocess.PIPE
        )
        self._lines: list[str] = []
        self.base_url = self._wait_for(r"Keepwarm is at (http://\S+?)/ ")
        self.sign_in_link = self._wait_for(r"(http://\S+/accounts/sign-in/\S+)")
        threading.Thread(target=self._drain, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def administrator(self) -> Account:
        """The first administrator, by the printed link: works once."""
        account = Account(self.base_url)
        assert account.http.get(self.sign_in_link, follow_redirects=False).is_redirect
        return account

    def sign_up(self, username: str) -> Account:
        account = Account(self.base_url)
        password = "correct horse battery"
        account.post(
            "/accounts/sign-up/", {"username": username, "password1": password, "password2": password}
        ).raise_for_status()
        assert "keepwarm_session" in account.http.cookies, f"{username} was not signed up"
        return account

    def stop(self) -> None:
        """End it as Ctrl+C does."""
        stop(self.process)

    def kill(self) -> None:
        """End it as a power cut does."""
        self.process.kill()
        self.process.wait()

    def output(self) -> str:
        return "".join(self._lines)

    def _wait_for(self, pattern: str) -> str:
        assert self.process.stdout is not None
        timer = threading.Timer(_START_SECONDS, self.process.kill)
        timer.start()
        try:
            for line in self.process.stdout:
                self._lines.append(line)
                if match := re.search(pattern, line + " "):
                    return match.group(1)
        finally:
            timer.cancel()
        raise AssertionError(f"The server did not start:\n{self.output()}")

    def _drain(self) -> None:
        assert self.process.stdout is not None
        self._lines.extend(self.process.stdout)


class Worker:
    """A Celery worker process of its own."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.process = spawn(
            ["-m", "celery", "--quiet", "-A", "chatapp", "worker", "--loglevel", "WARNING"], environment
        )

    def stop(self) -> None:
        stop(self.process)


def manage(*arguments: str, environment: dict[str, str]) -> str:
    """Run a management command to its end.

    Raises:
        AssertionError: it failed; with what it printed.
    """
    done = subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def spawn(
    arguments: list[str], environment: dict[str, str], stdout: int | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env=environment,
        stdout=stdout,
        stderr=subprocess.STDOUT if stdout else None,
        text=True,
    )


def stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
