"""Web and worker as processes of their own, over Redis and PostgreSQL."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.server import Account, Server, Worker
from tests.support.services import redis_server
from tests.support.socket import deltas, text_of

SHORT = {"sampling": {"max_output_tokens": 8}}


@dataclass
class Installation:
    web: Server
    worker: Worker
    account: Account


@pytest.fixture(scope="module")
def installation(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, redis_url: str, postgresql_url: str
) -> Iterator[Installation]:
    environment = {
        "MODEL": str(tiny_model),
        "REDIS_URL": redis_url,
        "DATABASE_URL": postgresql_url,
        "DATABASE_POOL": "4",
        "WORKER_HEARTBEAT_SECONDS": "1",
    }
    with Server(tmp_path_factory.mktemp("web"), environment, "--no-worker") as web:
        running = Installation(web, Worker(web.environment), web.sign_up("ada"))
        yield running
        running.worker.stop()


def test_turns_are_streamed_and_reuse_the_cache(installation: Installation) -> None:
    with installation.account.socket() as chat:
        chat.wait_for_model()
        conversation = chat.create_conversation()
        chat.add_message(conversation, "Hello 中文 🌍")
        events = list(chat.stream(chat.create_response(conversation, **SHORT)))
        assert [event["sequence_number"] for event in events] == list(range(1, len(events) + 1))
        assert deltas(events) == text_of(events[-1]) != ""
        second = chat.turn(conversation, "Go on", **SHORT)["response"]["output"][0]["report"]
        assert second["cached_tokens"] >= events[-2]["report"]["prompt_tokens"]


def test_a_dropped_connection_gets_the_rest(installation: Installation) -> None:
    with installation.account.socket() as chat:
        conversation = chat.create_conversation()
        chat.add_message(conversation, "Hello")
        response = chat.create_response(conversation, sampling={"max_output_tokens": 400})
        stream = chat.stream(response)
        events = [next(stream) for _ in range(10)]
    with installation.account.socket() as again:
        again.send("keepwarm.resume", response_id=response, sequence_number=len(events))
        events += again.stream(response)
    assert [event["sequence_number"] for event in events] == list(range(1, len(events) + 1))
    assert deltas(events) == text_of(events[-1])


def test_stop_reaches_the_worker(installation: Installation) -> None:
    with installation.account.socket() as chat:
        conversation = chat.create_conversation()
        chat.add_message(conversation, "Hello")
        response = chat.create_response(conversation, sampling={"max_output_tokens": 3000})
        stream = chat.stream(response)
        next(stream)
        chat.send("response.cancel", response_id=response)
        *_, done = stream
        assert done["response"]["status"] == "cancelled"


def test_search_and_odd_texts_on_postgresql(installation: Installation) -> None:
    with installation.account.socket() as chat:
        conversation = chat.create_conversation()
        chat.add_message(conversation, "nul \x00 and a Žebra")
        found = chat.ask("keepwarm.conversation.list", search="ŽEBRA")["conversations"]
        assert [entry["id"] for entry in found] == [conversation]


def test_a_worker_that_is_stopped_finishes_its_answers_and_the_next_one_takes_over(
    installation: Installation,
) -> None:
    with installation.account.socket() as chat:
        conversation = chat.create_conversation()
        chat.add_message(conversation, "Hello")
        response = chat.create_response(conversation, sampling={"max_output_tokens": 1000})
        stream = chat.stream(response)
        events = [next(stream) for _ in range(10)]
        installation.worker.process.send_signal(signal.SIGTERM)
        installation.worker.process.wait(60)
        events += stream
        assert events[-2]["report"]["completion_tokens"] == 1000
        assert chat.expect("keepwarm.model")["model"]["state"] == "absent"
        # Asked for while there is no worker; answered when there is one.
        chat.add_message(conversation, "Go on")
        waiting = chat.create_response(conversation, **SHORT)
        installation.worker = Worker(installation.web.environment)
        *_, done = chat.stream(waiting)
        assert done["response"]["status"] == "incomplete"


def test_a_killed_worker_s_answer_is_taken_up_by_the_next_one(installation: Installation) -> None:
    with installation.account.socket() as chat:
        chat.wait_for_model()
        conversation = chat.create_conversation()
        chat.add_message(conversation, "Hello")
        sampling = {"max_output_tokens": 1500, "temperature": 1, "seed": 3}
        response = chat.create_response(conversation, sampling=sampling)
        stream = chat.stream(response)
        events = [next(stream) for _ in range(20)]
        installation.worker.process.kill()
        installation.worker = Worker(installation.web.environment)
        events += stream
        assert [event["sequence_number"] for event in events] == list(range(1, len(events) + 1))
        assert deltas(events) == text_of(events[-1])
        assert events[-2]["report"]["completion_tokens"] == 1500
        undisturbed = chat.create_conversation()
        assert text_of(chat.turn(undisturbed, "Hello", sampling=sampling)) == text_of(events[-1])


def test_more_answers_at_once_than_database_connections(installation: Installation) -> None:
    with installation.account.socket() as chat:
        chat.wait_for_model()
        responses = []
        for _ in range(10):
            conversation = chat.create_conversation()
            chat.add_message(conversation, "Hello")
            responses.append(chat.create_response(conversation, sampling={"max_output_tokens": 200}))
        for response in responses:
            *_, done = chat.stream(response)
            assert done["response"]["status"] == "incomplete"


def test_without_redis_an_answer_fails_and_can_be_asked_for_again(
    tmp_path: Path, tiny_model: Path, postgresql_url: str
) -> None:
    with ExitStack() as redis_running:
        url = redis_running.enter_context(redis_server(tmp_path))
        environment = {"MODEL": str(tiny_model), "REDIS_URL": url, "DATABASE_URL": postgresql_url}
        with (
            Server(tmp_path / "web", environment, "--no-worker") as web,
            web.sign_up("grace").socket() as chat,
        ):
            conversation = chat.create_conversation()
            message = chat.add_message(conversation, "Hello")
            redis_running.close()
            answer = chat.ask("response.create", conversation=conversation)
            assert answer["type"] in ("response.created", "error")
            items = chat.open(conversation)["items"]
            assert items[0]["id"] == message["id"]
            assert all(item["state"] != "streaming" for item in items)
            assert items[-1]["error"]["code"] == "queue_unavailable"
