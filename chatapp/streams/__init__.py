"""A turn's stream: the append-only, numbered log of one answer's events.

The worker appends, any number of sockets read, each at its own pace and again whenever it wants. No text is ever
carried by a channel-layer message: those only wake readers up (chatapp/wakeups.py). Also here, because it lives in
the same place: which worker holds a turn, requests to cancel one, and what each worker says of its engine.
"""

from functools import cache

from django.conf import settings

from chatapp.streams.base import Entry, StaleWriter, TurnStreams

__all__ = ["Entry", "StaleWriter", "TurnStreams", "get_streams"]


@cache
def get_streams() -> TurnStreams:
    """The streams of this process: in Redis where there is one, else in memory."""
    if settings.REDIS_URL:
        from chatapp.streams.redis import RedisTurnStreams

        return RedisTurnStreams(settings.REDIS_URL, settings.TURN_STREAM_SECONDS)
    from chatapp.streams.memory import MemoryTurnStreams

    return MemoryTurnStreams(settings.TURN_STREAM_SECONDS)
