"""The caller's end of a running answer."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator

from inference.events import Event, TokenEvent


class Generation:
    """Events of one answer, read by one thread. `cancel` may be called from any thread."""

    def __init__(self, request_id: str, wake_engine: Callable[[], None]) -> None:
        self.id = request_id
        self.submitted_at = time.time()
        self._wake_engine = wake_engine
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._cancelled = False
        self._ended = False

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled

    def next_event(self, timeout: float | None = None) -> Event | None:
        """The next event, or None after `timeout` seconds without one, or when the end was already read."""
        if self._ended:
            return None
        try:
            event = self._events.get(timeout=timeout)
        except queue.Empty:
            return None
        self._ended = not isinstance(event, TokenEvent)
        return event

    def __iter__(self) -> Iterator[Event]:
        """Events up to and including the one that ends the answer."""
        while (event := self.next_event()) is not None:
            yield event

    def cancel(self) -> None:
        """End the answer within one token. Its end still arrives as an event."""
        self._cancelled = True
        self._wake_engine()

    def publish(self, event: Event) -> None:
        """Hand an event to the reader. For the engine."""
        self._events.put(event)
