"""The turn's stream, in memory and in Redis: append-only, numbered, fenced, readable from anywhere again and again."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from itertools import count

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatapp.protocol import ModelStatus
from chatapp.streams import Entry, StaleWriter, TurnStreams
from chatapp.streams.memory import MemoryTurnStreams
from chatapp.streams.redis import RedisTurnStreams


def own_database(redis_url: str) -> str:
    """Away from the servers that other tests run on the same Redis."""
    return redis_url.removesuffix("/0") + "/1"


@pytest.fixture(params=["memory", "redis"])
def streams(request: pytest.FixtureRequest) -> Iterator[TurnStreams]:
    if request.param == "memory":
        yield MemoryTurnStreams(3600)
    else:
        url = own_database(request.getfixturevalue("redis_url"))
        redis.Redis.from_url(url).flushdb()
        yield RedisTurnStreams(url, 3600)


def delta(number: int, text: str = "") -> Entry:
    return Entry({"type": "response.output_text.delta", "sequence_number": number, "delta": text}, (number,))


def done(number: int) -> Entry:
    return Entry({"type": "response.done", "sequence_number": number})


@given(
    chunks=st.lists(st.lists(st.text(max_size=5), min_size=1, max_size=4), max_size=8),
    readers=st.lists(st.integers(0, 40), max_size=4),
)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_reader_gets_the_rest_in_order(
    streams: TurnStreams, chunks: list[list[str]], readers: list[int]
) -> None:
    turn = uuid.uuid4()
    numbers = count(1)
    appended: list[Entry] = []
    for chunk in chunks:
        entries = [delta(next(numbers), text) for text in chunk]
        streams.append(turn, entries)
        appended += entries
        for after in readers:
            assert streams.read(turn, after) == appended[after:]
    assert streams.read(turn) == appended


async def test_sockets_read_the_same(streams: TurnStreams) -> None:
    turn = uuid.uuid4()
    streams.append(turn, [delta(1, "héllo 🌍"), delta(2), done(3)])
    assert await streams.read_async(turn, 1) == [delta(2), done(3)]
    assert (await streams.read_async(turn))[0].tokens == (1,)
    assert [entry.is_last for entry in streams.read(turn)] == [False, False, True]


@pytest.mark.parametrize("number", [1, 2, 4])
def test_what_does_not_continue_the_log_is_refused_whole(streams: TurnStreams, number: int) -> None:
    turn = uuid.uuid4()
    streams.append(turn, [delta(1), delta(2)])
    with pytest.raises(StaleWriter):
        streams.append(turn, [delta(number), delta(number + 1)])
    assert streams.read(turn) == [delta(1), delta(2)]


def test_of_two_writers_one_writes(streams: TurnStreams) -> None:
    turn = uuid.uuid4()
    losses = []
    start = threading.Barrier(2)

    def write(name: str) -> None:
        start.wait()
        for number in range(1, 50):
            try:
                streams.append(turn, [delta(number, name)])
            except StaleWriter:
                losses.append(name)
                return

    writers = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(losses) == 1
    assert [entry.sequence_number for entry in streams.read(turn)] == list(range(1, 50))


def test_a_cancel_is_seen_by_the_next_append(streams: TurnStreams) -> None:
    turn, other = uuid.uuid4(), uuid.uuid4()
    assert streams.append(turn, [delta(1)]) is False
    assert not streams.cancel_requested(turn)
    streams.request_cancel(turn)
    assert streams.cancel_requested(turn)
    assert streams.append(turn, [delta(2)]) is True
    assert streams.append(other, [delta(1)]) is False


def test_a_discarded_turn_is_gone_and_its_writer_stale(streams: TurnStreams) -> None:
    turn = uuid.uuid4()
    streams.append(turn, [delta(1), delta(2)])
    streams.discard(turn)
    assert streams.read(turn) == []
    with pytest.raises(StaleWriter):
        streams.append(turn, [delta(3)])


def test_a_turn_has_one_holder(streams: TurnStreams) -> None:
    turn = uuid.uuid4()
    assert streams.mark_queued(turn)
    assert not streams.mark_queued(turn), "it is in the queue already"
    assert streams.claim(turn, "first")
    assert streams.claim(turn, "first"), "a claim can be renewed"
    assert not streams.claim(turn, "second")
    assert not streams.mark_queued(turn), "somebody makes it"
    streams.release(turn, "second")
    assert not streams.claim(turn, "second"), "only its holder gives it back"
    streams.release(turn, "first")
    assert streams.mark_queued(turn)
    assert streams.claim(turn, "second")


@pytest.mark.parametrize("kind", ["memory", "redis"])
def test_logs_expire(kind: str, request: pytest.FixtureRequest) -> None:
    turn = uuid.uuid4()
    if kind == "memory":
        streams: TurnStreams = MemoryTurnStreams(0)
        streams.append(turn, [delta(1)])
        streams.append(uuid.uuid4(), [delta(1)])
        assert streams.read(turn) == []
    else:
        url = own_database(request.getfixturevalue("redis_url"))
        streams = RedisTurnStreams(url, 77)
        streams.append(turn, [delta(1)])
        assert 0 < redis.Redis.from_url(url).ttl(f"keepwarm:turn:{turn}") <= 77


async def test_engines_that_were_heard_of_count(
    streams: TurnStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, loading = ModelStatus(state="ready", model="m"), ModelStatus(state="loading", progress=0.5)
    streams.publish_engine("first", ready)
    streams.publish_engine("second", loading)
    assert ready in await streams.engine_statuses()
    assert loading in await streams.engine_statuses()
    streams.publish_engine("first", None)
    assert await streams.engine_statuses() == [loading]
    for clock in ("time.time", "time.monotonic"):
        now = __import__("time").__dict__[clock.split(".")[1]]()
        monkeypatch.setattr(clock, lambda now=now: now + 60)
    assert await streams.engine_statuses() == []
