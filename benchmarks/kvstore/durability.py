"""Durability: a process that writes is killed at a random moment, again and again; what is found then is right."""

from __future__ import annotations

import multiprocessing
import random
import signal
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import Figure
from kvstore import KVSpec, KVStore, Session, StoreConfig, TierConfig

RUNS = 50
SPEC = KVSpec(layers=4, kv_heads=2, head_dim=16, dtype=torch.float32, fingerprint="crash", page_tokens=16)
LONGEST_LIFE = 0.4  # seconds
SESSIONS = 40
TURN = 48  # tokens


def measure(quick: bool) -> list[Figure]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvstore", __name__])
    wrong = found = 0
    with tempfile.TemporaryDirectory() as folder:
        for run in range(RUNS):
            if run % 10 == 0:
                place = Path(folder, str(run))
            _kill_a_writer(context, place, run)
            bad, good = _check(place)
            wrong += bad
            found += good
    return [
        Figure("crash_runs", RUNS, "50", "processes killed while they wrote"),
        Figure("crash_wrong", wrong, "0", f"pages that were found afterwards and wrong, of {found}"),
    ]


def _kill_a_writer(context: multiprocessing.context.ForkServerContext, folder: Path, seed: int) -> None:
    ready = context.Event()
    process = context.Process(target=write_for_ever, args=(folder, ready, seed), daemon=True)
    process.start()
    ready.wait(30)
    time.sleep(random.Random(seed).uniform(0, LONGEST_LIFE))
    assert process.pid is not None
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def write_for_ever(folder: Path, ready: Event, seed: int) -> None:
    """What a worker does: sessions grow, sleep, wake and are dropped."""
    store = _open(folder)
    dice = random.Random(seed)
    ready.set()
    while True:
        number = dice.randrange(SESSIONS)
        name = f"session {number}"
        if dice.random() < 0.1:
            store.sleep("owner", name)
            store.tick()
            continue
        if dice.random() < 0.02:
            store.drop("owner", name)
            continue
        known = store.get("owner", name)
        length = min((known.length if known else 0) + dice.randint(1, TURN), 400)
        tokens = tokens_of(number, length)
        session = store.acquire("owner", name, tokens)
        _append(session, tokens)
        store.release(session)


def _check(folder: Path) -> tuple[int, int]:
    """Pages that are wrong, and pages that are found."""
    store = _open(folder)
    store.flush()
    wrong = found = 0
    for number in range(SESSIONS):
        tokens = tokens_of(number, 400)
        session = store.acquire("owner", f"session {number}", tokens)
        expected = kv_of(tokens)[..., : session.length, :]
        actual = torch.stack(
            [torch.cat((session.keys(layer), session.values(layer))) for layer in range(SPEC.layers)]
        )
        same = (expected == actual).all(-1).all(2).all(1).all(0)
        pages = [same[first : first + SPEC.page_tokens] for first in range(0, len(same), SPEC.page_tokens)]
        wrong += sum(not bool(page.all()) for page in pages)
        found += len(pages)
        store.release(session)
    store.tiering.close()
    return wrong, found


def _open(folder: Path) -> KVStore:
    disk = TierConfig(10**9, format="original", location=str(folder))
    return KVStore(SPEC, StoreConfig(device_bytes=100 * SPEC.bytes_per_page, disk=disk))


def tokens_of(number: int, length: int) -> np.ndarray:
    """A session's tokens; half of the sessions share their first 100."""
    shared = np.random.default_rng(number % 2).integers(0, 1000, 100)
    own = np.random.default_rng(1000 + number).integers(0, 1000, 300)
    return np.concatenate((shared, own)).astype(np.int32)[:length]


def kv_of(tokens: np.ndarray) -> torch.Tensor:
    """KV that depends on all tokens before, as a model's does: `[layers, 2, kv_heads, tokens, head_dim]`."""
    state, states = 1, []
    for token in tokens.tolist():
        state = (state * 6364136223846793005 + token + 1) % 2**64
        states.append(state >> 40)
    base = torch.tensor(states, dtype=torch.float64)[:, None]
    size = SPEC.layers * 2 * SPEC.kv_heads * SPEC.head_dim
    mixed = (base * torch.arange(1, size + 1, dtype=torch.float64)) % 65521
    shape = (len(tokens), SPEC.layers, 2, SPEC.kv_heads, SPEC.head_dim)
    return mixed.float().reshape(shape).permute(1, 2, 3, 0, 4)


def _append(session: Session, tokens: np.ndarray) -> None:
    kv = kv_of(tokens)[..., session.length :, :]
    for layer in range(SPEC.layers):
        session.write(layer, kv[layer, :1], kv[layer, 1:])
    session.commit(tokens[session.length :].tolist())
