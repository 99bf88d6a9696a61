"""What a turn costs beside the model: from the message on the socket to the engine, from the token to the socket.

And what keeping the KV saves. Runs real servers as processes, with the default model; the parts that need Redis
are left out (null) where it is not installed.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.dialogues import stitched_turns
from benchmarks.report import Figure, median, parse_quick, print_figures
from inference import ChatMessage, Engine, EngineConfig, FinishedEvent, GenerationRequest, SamplingParams
from tests.support.server import REPOSITORY, Account, Server, Worker
from tests.support.services import redis_server
from tests.support.socket import ChatSocket, user_message

HISTORY_TOKENS = 1000
ANSWER_TOKENS = 16


@dataclass
class Latencies:
    """Milliseconds: from sending a message to the engine's submit, and from sampling a token to receiving it."""

    dispatch: list[float] = field(default_factory=list)
    delta: list[float] = field(default_factory=list)


def main() -> None:
    quick = parse_quick(__doc__)
    turns = 15 if quick else 60
    embedded = embedded_latencies(turns)
    redis, web_rss = redis_latencies(turns) if shutil.which("redis-server") else (Latencies(), None)
    kept, dropped = second_turn(repetitions=4 if quick else 15)
    speedup = [without / with_kv for with_kv, without in zip(kept, dropped, strict=True)]
    print_figures(
        [
            Figure(
                "dispatch_ms",
                median(embedded.dispatch),
                "< 30",
                "message sent to engine, one process",
                embedded.dispatch,
            ),
            Figure(
                "dispatch_redis_ms", median(redis.dispatch), "< 15", "the same over Redis", redis.dispatch
            ),
            Figure(
                "delta_ms", median(embedded.delta), "< 15", "token sampled to token received", embedded.delta
            ),
            Figure("delta_redis_ms", median(redis.delta), "", "the same over Redis", redis.delta),
            Figure(
                "second_turn_speedup",
                (median(dropped) or 0) / (median(kept) or 1),
                "> 3",
                f"first token after {HISTORY_TOKENS} tokens, KV dropped over kept",
                speedup,
            ),
            Figure("web_rss_mb", web_rss, "< 150", "memory of the web process without worker"),
        ]
    )


def embedded_latencies(turns: int) -> Latencies:
    with temporary_folder() as folder, Server(folder) as server:
        return measure_turns(server.administrator(), turns)


def redis_latencies(turns: int) -> tuple[Latencies, float]:
    """Latencies with web, worker and Redis as processes, and the web process's memory in MiB after the turns."""
    with (
        temporary_folder() as folder,
        redis_server(folder) as url,
        Server(folder, {"REDIS_URL": url}, "--no-worker") as web,
    ):
        worker = Worker(web.environment)
        try:
            latencies = measure_turns(web.administrator(), turns)
        finally:
            worker.stop()
        return latencies, resident_memory(web.process.pid)


def measure_turns(account: Account, turns: int) -> Latencies:
    latencies = Latencies()
    account.http.get("/").raise_for_status()
    with account.socket() as socket:
        socket.wait_for_model()
        one_turn(socket)  # what loads at first use is not what is measured
        for _ in range(turns):
            dispatch, deltas = one_turn(socket)
            latencies.dispatch.append(dispatch)
            latencies.delta.extend(deltas)
    return latencies


def one_turn(socket: ChatSocket) -> tuple[float, list[float]]:
    """One short turn, its events sent without waiting in between, as the web chat does."""
    conversation = socket.create_conversation()
    response = str(uuid.uuid4())
    sent_at = time.time()
    socket.send("conversation.item.create", conversation=conversation, item=user_message("Tell me a story."))
    socket.send(
        "response.create",
        conversation=conversation,
        response_id=response,
        sampling={"max_output_tokens": ANSWER_TOKENS, "temperature": 0},
    )
    deltas, submitted_at = [], 0.0
    for event in socket.stream(response):
        if event["type"] == "response.output_text.delta":
            deltas.append((time.time() - event["sampled_at"]) * 1000)
        elif event["type"] == "keepwarm.cache_report":
            submitted_at = event["report"]["submitted_at"]
    return (submitted_at - sent_at) * 1000, deltas


def second_turn(repetitions: int) -> tuple[list[float], list[float]]:
    """Seconds to the first token of a turn after a history, with its KV kept and dropped, in alternation."""
    engine = Engine(EngineConfig(cache_dir=REPOSITORY / "var" / "models"))
    engine.start()
    engine.wait_until_ready()
    history, questions = history_and_questions(engine, repetitions)
    first_token(engine, [*history, ChatMessage("first", "user", "Hello?")])
    kept, dropped = [], []
    for number, question in enumerate(questions):
        messages = [*history, ChatMessage(f"question {number}", "user", question)]
        kept.append(first_token(engine, messages))
        engine.drop_session("conversation", "owner")
        dropped.append(first_token(engine, messages))
    engine.shutdown()
    return kept, dropped


def history_and_questions(engine: Engine, questions: int) -> tuple[list[ChatMessage], list[str]]:
    """A history of the wanted length from the final split, and the user turns that come after it."""
    turns = stitched_turns("en", "final", skip=0)
    history: list[ChatMessage] = []
    while sum(len(span.tokens) for span in engine.chat_format.render(history or [_HELLO])) < HISTORY_TOKENS:
        history.append(ChatMessage(f"message {len(history)}", "user", next(turns)))
        history.append(ChatMessage(f"message {len(history)}", "assistant", next(turns)))
    rest = [text for _, text in zip(range(2 * questions), turns, strict=False)]
    return history, rest[::2]


_HELLO = ChatMessage("hello", "user", "Hello")


def first_token(engine: Engine, messages: list[ChatMessage]) -> float:
    generation = engine.submit(
        GenerationRequest(
            id=uuid.uuid4().hex,
            owner="owner",
            session_id="conversation",
            spans=engine.chat_format.render(messages),
            sampling=SamplingParams(temperature=0, max_tokens=2),
        )
    )
    *_, end = generation
    assert isinstance(end, FinishedEvent), end
    assert end.usage.time_to_first_token is not None
    return end.usage.time_to_first_token


def resident_memory(process_id: int) -> float:
    """MiB."""
    return int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(process_id)])) / 1024


@contextmanager
def temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="keepwarm-benchmark-") as folder:
        yield Path(folder)


if __name__ == "__main__":
    main()
