"""Speed: lookups among many sessions, forks, and restoring from disk."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.kvstore.memory import DEFAULT_MODEL, TINY, append_new
from benchmarks.report import Figure
from kvstore import KVStore, Session, StoreConfig, TierConfig

SESSIONS = 10_000
SESSION_TOKENS = 64
LOOKUP_TOKENS = 8192
FORK_TOKENS = 4096
RESTORE_TOKENS = 4096
BLOCK = 1024 * 1024


def measure(quick: bool) -> list[Figure]:
    return [*_lookups_and_forks(20 if quick else 200), *_restoring(3 if quick else 9)]


def _lookups_and_forks(repetitions: int) -> list[Figure]:
    pages = SESSIONS * SESSION_TOKENS // TINY.page_tokens + LOOKUP_TOKENS
    store = KVStore(TINY, StoreConfig(device_bytes=2 * pages * TINY.bytes_per_page))
    for number in range(SESSIONS):
        append_new(store, f"session {number}", number, SESSION_TOKENS)
    tokens = append_new(store, "long", SESSIONS, LOOKUP_TOKENS)
    assert store.find("owner", tokens).tokens == LOOKUP_TOKENS
    lookups = [_seconds(lambda: store.find("owner", tokens)) * 1e6 for _ in range(repetitions)]

    append_new(store, "origin", SESSIONS + 1, FORK_TOKENS)
    origin = store.get("owner", "origin")
    assert origin is not None
    forks = [_seconds(partial(store.fork, origin, f"fork {n}")) * 1e6 for n in range(repetitions)]
    store.close()
    return [
        Figure(
            "lookup_us_8k", statistics.median(lookups), "<2000", "longest prefix of 8,192 tokens", lookups
        ),
        Figure("fork_us_4k", statistics.median(forks), "", "fork of a session of 4,096 tokens", forks),
    ]


def _restoring(repetitions: int) -> list[Figure]:
    """Restore a session from disk and read as many bytes from one file, in turn; first with an empty page cache."""
    with tempfile.TemporaryDirectory(dir=_folder()) as folder:
        tier = TierConfig(10**10, format="original", location=str(Path(folder, "kv")))
        size = RESTORE_TOKENS * DEFAULT_MODEL.bytes_per_token
        store = KVStore(DEFAULT_MODEL, StoreConfig(device_bytes=2 * size, disk=tier))
        tokens = list(range(RESTORE_TOKENS))
        session = store.acquire("owner", "session", tokens)
        for first in range(0, RESTORE_TOKENS, 512):
            _append_random(session, tokens[first : first + 512])
        store.release(session)
        plain = Path(folder, "plain")
        plain.write_bytes(os.urandom(size))
        os.sync()
        figures = []
        for name, cold in (("restore_ratio", True), ("restore_ratio_cached", False)):
            rates = [_rates(store, tokens, plain, Path(folder), size, cold) for _ in range(repetitions)]
            restored, read = (statistics.median(part) for part in zip(*rates, strict=True))
            target = ">=0.6" if cold else ""
            where = "the disk" if cold else "the page cache"
            meaning = (
                f"restoring from {where} over a plain read ({restored / 1e6:.0f} and {read / 1e6:.0f} MB/s)"
            )
            figures.append(Figure(name, restored / read, target, meaning))
        store.close()
    return figures


def _rates(
    store: KVStore, tokens: list[int], plain: Path, folder: Path, size: int, cold: bool
) -> tuple[float, float]:
    """Bytes per second of restoring, and of a plain read."""
    store.sleep("owner", "session")
    store.flush()
    store.tick()
    assert store.snapshot().pages == 0
    if cold:
        _forget_cached(folder)
    begun = time.perf_counter()
    session = store.acquire("owner", "session", tokens)
    restored = size / (time.perf_counter() - begun)
    assert session.length == len(tokens)
    store.release(session)
    if cold:
        _forget_cached(folder)
    return restored, size / _seconds(lambda: _read(plain))


def _append_random(session: Session, tokens: list[int]) -> None:
    spec = session.spec
    for layer in range(spec.layers):
        keys, values = torch.randn(2, 1, spec.kv_heads, len(tokens), spec.head_dim)
        session.write(layer, keys, values)
    session.commit(tokens)


def _read(path: Path) -> None:
    buffer = bytearray(BLOCK)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _forget_cached(folder: Path) -> None:
    """Let the system's page cache forget the files, which have been written out."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _folder() -> Path:
    """A folder on a disk: temporary folders may be in memory."""
    folder = Path(__file__).resolve().parents[2] / "var"
    folder.mkdir(exist_ok=True)
    return folder


def _seconds(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun
