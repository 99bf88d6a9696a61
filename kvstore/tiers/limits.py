"""Limits on the patience with a service that may hang or fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Unreachable(Exception):
    """The remote store did not do what it was asked, or was not asked because it has failed too often."""


class CircuitBreaker:
    """Stops asking a service that keeps failing, so that nobody waits for it (Nygard, Release It!, 2007).

    After `failures_to_open` failures in a row calls are refused for `pause` seconds. Then one call tries: when it works
    all do again, and when it fails the pause doubles, up to `longest_pause`. Safe from any thread.
    """

    def __init__(
        self,
        *,
        failures_to_open: int = 3,
        pause: float = 1.0,
        longest_pause: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._failures_to_open = failures_to_open
        self._first_pause = pause
        self._longest_pause = longest_pause
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = pause
        self._closed_until = 0.0  # the time of the next try, while calls are refused
        self._last_failure = ""

    def admit(self) -> bool:
        """Called before a call; returns whether it is a try after a pause. Raises Unreachable when it is refused."""
        with self._lock:
            if self._failures < self._failures_to_open:
                return False
            now = self._clock()
            if now < self._closed_until:
                left = self._closed_until - now
                raise Unreachable(f"{self._last_failure}; it is asked again in {left:.0f} s")
            self._closed_until = now + self._pause  # one try is enough
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._failures = 0
            self._pause = self._first_pause

    def failed(self, error: Exception, *, was_try: bool) -> None:
        with self._lock:
            self._failures += 1
            self._last_failure = described(error)
            if was_try:
                self._pause = min(2 * self._pause, self._longest_pause)
            # Calls that were under way when the pause began do not prolong it.
            if was_try or self._failures == self._failures_to_open:
                self._closed_until = self._clock() + self._pause


class TimeLimit:
    """Runs calls in threads of their own, so that one that hangs holds its caller up for `timeout` seconds only.

    A call that is late runs on, and nobody sees its result. There are never more than `threads` of them: when all hang,
    further calls fail.
    """

    def __init__(self, timeout: float, threads: int) -> None:
        self._timeout = timeout
        self._threads = threads
        self._free = threading.BoundedSemaphore(threads)

    def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, or what it raises. Raises TimeoutError."""
        deadline = time.monotonic() + self._timeout
        if not self._free.acquire(timeout=self._timeout):
            raise TimeoutError(f"{self._threads} calls have not returned for more than {self._timeout} s")
        future: Future[T] = Future()
        thread = threading.Thread(target=self._work, args=(work, future), name="kvstore-remote", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads
            self._free.release()
            raise
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            if future.done():  # the call itself has raised it
                raise
            raise TimeoutError(f"no answer within {self._timeout} s") from error

    def _work(self, work: Callable[[], T], future: Future[T]) -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # asyncio's CancelledError, for one, is no Exception
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        finally:
            self._free.release()


def described(error: Exception) -> str:
    """What a message says of an error."""
    return str(error) if isinstance(error, Unreachable) else f"{type(error).__name__}: {error}"
