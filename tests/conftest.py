"""Servers that suites share; each starts once a run, when a test first asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.support.server import Account, Server
from tests.support.services import postgresql_server, redis_server
from tests.support.tiny_model import save_tiny_model

_account_numbers = count(1)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture(scope="session")
def postgresql_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with postgresql_server(tmp_path_factory.mktemp("postgresql")) as url:
        yield url


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    """The one-process server with the tiny model."""
    with Server(tmp_path_factory.mktemp("server"), {"MODEL": str(tiny_model)}) as running:
        yield running


@pytest.fixture
def new_account(server: Server) -> Callable[[], Account]:
    return lambda: server.sign_up(f"user{next(_account_numbers)}")


@pytest.fixture
def account(new_account: Callable[[], Account]) -> Account:
    """A user of its own for each test."""
    return new_account()
