"""Which answer runs next. Holds no model and no tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from inference.answer import Answer


class Scheduler:
    """Orders answers: first come, first admitted, but for a session that is in use.

    Two answers of one session run one after the other, since the second builds on what the first leaves; other
    sessions overtake it meanwhile. Nobody overtakes an answer that waits for memory, however much that needs. Used by
    one thread.
    """

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._waiting: deque[Answer] = deque()
        self._running: deque[Answer] = deque()  # the one whose prefill is longest ago first

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._waiting and not self._running

    @property
    def running(self) -> int:
        """Number of admitted answers."""
        return len(self._running)

    def add(self, answer: Answer) -> None:
        """Let an answer wait for admission."""
        self._waiting.append(answer)

    def remove(self, answer: Answer) -> None:
        """Forget an answer, whether it waits or runs."""
        queue = self._running if answer in self._running else self._waiting
        queue.remove(answer)

    def admit(self, fits: Callable[[Answer], bool]) -> Answer | None:
        """Move the next answer that may run from waiting to running, and return it.

        `fits` tells whether there is memory for an answer beside those that run. One that runs alone always may.
        """
        if len(self._running) >= self._max_running:
            return None
        busy = {answer.session_key for answer in self._running} - {None}
        for answer in self._waiting:
            if answer.session_key not in busy:
                if self._running and not fits(answer):
                    return None
                self._waiting.remove(answer)
                self._running.append(answer)
                return answer
        return None

    def admitted(self) -> list[Answer]:
        """Answers that run."""
        return list(self._running)

    def cancelled(self) -> list[Answer]:
        """Answers whose caller gave up, waiting or running."""
        everyone = (*self._waiting, *self._running)
        return [answer for answer in everyone if answer.generation.cancelled]

    def next_prefill(self) -> Answer | None:
        """The answer whose turn it is to compute a chunk of its prompt. Each call gives another one its turn."""
        for answer in self._running:
            if answer.prefilling:
                self._running.remove(answer)
                self._running.append(answer)
                return answer
        return None

    def decoding(self) -> Iterator[Answer]:
        """Answers that need one step for their next token."""
        return iter([answer for answer in self._running if not answer.prefilling])
