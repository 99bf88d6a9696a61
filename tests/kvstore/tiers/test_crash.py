"""Writers that are killed at any moment."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import torch

from kvstore.tiers import DiskStorage
from tests.kvstore.tiers.chunks import BIG_LAYER_BYTES, LAYOUT, make_chunk, read_payload

RUNS = 5


def _record(number: int) -> bytes:
    return b"%d " % number * 10_000


def _write_for_ever(root: Path, first: int, writing: Event) -> None:
    storage = DiskStorage(root, LAYOUT)
    number = first
    while True:
        storage.write(make_chunk(number, layer_bytes=BIG_LAYER_BYTES))
        storage.write_record("ab", _record(number))
        writing.set()
        number += 1


def test_whatever_is_found_after_a_kill_is_right(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvstore.tiers"])
    storage = DiskStorage(tmp_path, LAYOUT)
    found: dict[bytes, int] = {}
    for run in range(RUNS):
        writing = context.Event()
        writer = context.Process(target=_write_for_ever, args=(tmp_path, run * 10_000, writing))
        writer.start()
        assert writing.wait(60)
        time.sleep(random.uniform(0, 0.1))
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()

        keys = {chunk.key for chunk in storage.scan()}
        assert keys > found.keys()
        number = run * 10_000
        while (chunk := make_chunk(number, layer_bytes=BIG_LAYER_BYTES)).key in keys:
            found[chunk.key] = number
            assert torch.equal(read_payload(storage, chunk), chunk.payload)
            number += 1
        assert keys == found.keys()  # written in order, none is left out
        # The record is that of the last chunk, or of the one before when the writer died in between.
        assert storage.read_record("ab") in (_record(number - 1), _record(number - 2))
    storage.sweep(-1)
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(left) == len(found) + 1
