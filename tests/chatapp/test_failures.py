"""What goes wrong around the server: ports, models, disks, power cuts. Each has a clear answer and loses nothing."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.server import REPOSITORY, Server, manage
from tests.support.socket import deltas, text_of


def serve_and_fail(data_dir: Path, *arguments: str, **environment: str) -> str:
    """Start a server that cannot start; returns what it says."""
    variables = os.environ | {"DATA_DIR": str(data_dir)} | environment
    done = subprocess.run(
        [sys.executable, "manage.py", "serve", *arguments],
        cwd=REPOSITORY,
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_port_in_use_is_named_with_a_way_out(tmp_path: Path) -> None:
    manage("migrate", "--verbosity", "0", environment=os.environ | {"DATA_DIR": str(tmp_path)})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = serve_and_fail(tmp_path, "--port", str(port))
    assert f"Port {port} on 127.0.0.1 is in use" in message
    assert f"--port {port + 1}" in message


def test_an_old_database_is_not_served(tmp_path: Path) -> None:
    assert "manage.py migrate" in serve_and_fail(tmp_path, "--port", "0")


def test_a_web_process_alone_needs_redis(tmp_path: Path) -> None:
    assert "REDIS_URL" in serve_and_fail(tmp_path, "--no-worker", REDIS_URL="")


@pytest.mark.parametrize("kind", ["missing", "broken"])
def test_a_model_that_cannot_be_loaded_is_explained_in_the_chat(tmp_path: Path, kind: str) -> None:
    model = tmp_path / "model"
    if kind == "broken":
        model.mkdir()
        (model / "config.json").write_text('{"model_type": "llama"')
    with (
        Server(tmp_path / "data", {"MODEL": str(model)}) as server,
        server.sign_up("ada").socket() as chat,
    ):
        event = chat.expect("session.created")
        while event["model"]["state"] != "failed":
            event = chat.expect("keepwarm.model")
        assert str(model) in event["model"]["detail"]
        conversation = chat.create_conversation()
        done = chat.turn(conversation, "Hello")
        assert done["response"]["status"] == "failed"
        error = done["response"]["output"][0]["error"]
        assert error["code"] == "model_unavailable"
        assert str(model) in error["message"]
        kept = chat.open(conversation)["items"]
        assert [item["role"] for item in kept] == ["user", "assistant"]


def test_a_full_disk_refuses_messages_and_says_so(tmp_path: Path, tiny_model: Path) -> None:
    with (
        Server(tmp_path, {"MODEL": str(tiny_model)}) as server,
        server.sign_up("ada").socket() as chat,
    ):
        chat.wait_for_model()
        conversation = chat.create_conversation()
        chat.turn(conversation, "Hello", sampling={"max_output_tokens": 4})
        before = chat.open(conversation)["items"]
        with full_disk(server.process):
            error = chat.refusal(
                "conversation.item.create",
                conversation=conversation,
                item={
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "x" * 9000}],
                },
            )
            assert error["code"] == "storage_unavailable"
            assert error["event"] == "conversation.item.create"
            assert chat.open(conversation)["items"] == before, "reading goes on, nothing was changed"
        done = chat.turn(conversation, "Again", sampling={"max_output_tokens": 4})
        assert done["response"]["status"] == "incomplete"


def test_an_answer_that_ends_on_a_full_disk_is_stored_when_there_is_room(
    tmp_path: Path, tiny_model: Path
) -> None:
    with (
        Server(tmp_path, {"MODEL": str(tiny_model), "WORKER_HEARTBEAT_SECONDS": "1"}) as server,
        server.sign_up("ada").socket() as chat,
    ):
        chat.wait_for_model()
        conversation = chat.create_conversation()
        chat.add_message(conversation, "Hello")
        response = chat.create_response(conversation, sampling={"max_output_tokens": 300})
        stream = chat.stream(response)
        events = [next(stream) for _ in range(5)]
        with full_disk(server.process):
            with pytest.raises(TimeoutError):
                chat.receive(lambda event: event["type"] == "response.done", timeout=5)
            assert chat.open(conversation)["items"][-1]["state"] == "streaming"
        events += stream
        assert [event["sequence_number"] for event in events] == list(range(1, len(events) + 1))
        assert deltas(events) == text_of(events[-1])
        assert events[-2]["report"]["completion_tokens"] == 300
        assert chat.open(conversation)["items"][-1]["state"] == "done"


@contextmanager
def full_disk(process: subprocess.Popen[str]) -> Iterator[None]:
    """Let every write of a running process to a file fail, as on a full disk."""
    soft, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (soft, hard))


def test_a_power_cut_in_mid_answer_loses_nothing(tmp_path: Path, tiny_model: Path) -> None:
    environment = {"MODEL": str(tiny_model)}
    first = Server(tmp_path, environment)
    account = first.sign_up("ada")
    with account.socket() as chat:
        chat.wait_for_model()
        conversation = chat.create_conversation()
        chat.add_message(conversation, "Hello")
        response = chat.create_response(conversation, sampling={"max_output_tokens": 1500, "temperature": 1})
        chat.add_message(conversation, "And then?")
        waiting = chat.create_response(conversation, sampling={"max_output_tokens": 5})
        stream = chat.stream(response)
        seen = [next(stream) for _ in range(30)]
        first.kill()

    with Server(tmp_path, environment) as second:
        account.move_to(second)
        with account.socket() as chat:
            chat.send("keepwarm.resume", response_id=response, sequence_number=len(seen))
            events = seen + list(chat.stream(response))
            assert [event["sequence_number"] for event in events] == list(range(1, len(events) + 1))
            assert deltas(events) == text_of(events[-1])
            assert events[-2]["report"]["completion_tokens"] == 1500
            chat.send("keepwarm.resume", response_id=waiting)
            *_, done = chat.stream(waiting)
            assert done["response"]["output"][0]["report"]["completion_tokens"] == 5


def test_stopping_the_server_in_mid_answer_goes_on_at_the_next_start(
    tmp_path: Path, tiny_model: Path
) -> None:
    environment = {"MODEL": str(tiny_model)}
    with Server(tmp_path, environment) as first:
        account = first.sign_up("ada")
        with account.socket() as chat:
            chat.wait_for_model()
            conversation = chat.create_conversation()
            chat.add_message(conversation, "Hello")
            response = chat.create_response(conversation, sampling={"max_output_tokens": 1500})
            next(chat.stream(response))
    with Server(tmp_path, environment) as second:
        account.move_to(second)
        with account.socket() as chat:
            chat.send("keepwarm.resume", response_id=response)
            *_, done = chat.stream(response)
            assert done["response"]["output"][0]["report"]["completion_tokens"] == 1500
