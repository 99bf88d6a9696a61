"""Work in background threads, and how its results come back to the store's thread."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

POLL_SECONDS = 0.005  # that the store's thread spends on results at a time

Completion = Callable[[], None]


class Background:
    """Jobs under way, and completions: functions by which jobs let the store's thread take in what they did.

    `post` is called by jobs, in their threads; all else by the store's thread.
    """

    def __init__(self, on_activity: Callable[[], None]) -> None:
        """`on_activity` is called from background threads when `poll` has something to do."""
        self._on_activity = on_activity
        self._completed: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._jobs: set[Future[None]] = set()
        self._executors: list[ThreadPoolExecutor] = []

    @property
    def busy(self) -> int:
        """Jobs under way."""
        return len(self._jobs)

    def executor(self, threads: int, name: str) -> ThreadPoolExecutor:
        """Threads for jobs of one kind. One thread keeps the jobs' order."""
        executor = ThreadPoolExecutor(threads, f"kvstore-{name}")
        self._executors.append(executor)
        return executor

    def submit(
        self, executor: ThreadPoolExecutor, work: Callable[[], None], on_end: Completion | None = None
    ) -> Future[None]:
        """Begin a job; `on_end` is called by the store's thread when it is over, or was cancelled."""
        job = executor.submit(work)
        self._jobs.add(job)
        job.add_done_callback(lambda done: self.post(partial(self._end, done, on_end)))
        return job

    def post(self, completion: Completion) -> None:
        """Have the store's thread call a function in its next `poll`."""
        self._completed.put(completion)
        self._on_activity()

    def poll(self) -> None:
        """Take in what jobs have done; a great deal of it is left for the next time."""
        until = time.monotonic() + POLL_SECONDS
        while not self._completed.empty() and time.monotonic() < until:
            self._completed.get()()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a result and take it in. Returns whether there was one in time, False at once without jobs."""
        if not self._jobs and self._completed.empty():
            return False
        try:
            self._completed.get(timeout=timeout)()
        except queue.Empty:
            return False
        self.poll()
        return True

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until no job is left. Returns whether that was so in time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._jobs or not self._completed.empty():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self.wait(left) and left == 0.0:
                return False
        return True

    def close(self, *, wait: bool) -> None:
        """End the threads: with `wait` when all jobs are over, else without those that have not begun."""
        for executor in self._executors:
            executor.shutdown(wait, cancel_futures=not wait)
        self.poll()

    def _end(self, job: Future[None], on_end: Completion | None) -> None:
        self._jobs.discard(job)
        if on_end is not None:
            on_end()
