"""A tiny model and its KV, and storages that can be disturbed, for tests of the store with lower tiers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvstore import KVSpec, KVStore, Session, StoreConfig, TierConfig
from kvstore.formats import get_format

SPEC = KVSpec(layers=4, kv_heads=2, head_dim=8, dtype=torch.float32, fingerprint="tiny", page_tokens=4)
PAGE = SPEC.bytes_per_page
ROOM = 10**9  # more than any test fills
PATIENCE = 30.0  # seconds after which a test gives up waiting


def text(seed: int, length: int) -> list[int]:
    """Tokens; equal seeds give equal beginnings."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, 1000, length)]


def kv_of(tokens: Sequence[int]) -> torch.Tensor:
    """KV that depends on all tokens before, as a model's does: `[layers, 2, kv_heads, tokens, head_dim]`, within 1."""
    state, states = 1, []
    for token in tokens:
        state = (state * 6364136223846793005 + token + 1) % 2**64
        states.append(state >> 40)
    size = SPEC.layers * 2 * SPEC.kv_heads * SPEC.head_dim
    base = torch.tensor(states, dtype=torch.float64)[:, None]
    mixed = (base * torch.arange(1, size + 1, dtype=torch.float64)) % 65521 / 32768 - 1
    shape = (len(tokens), SPEC.layers, 2, SPEC.kv_heads, SPEC.head_dim)
    return mixed.float().reshape(shape).permute(1, 2, 3, 0, 4)


def rounded(kv: torch.Tensor, format: str, pages: int) -> torch.Tensor:
    """KV whose first `pages` pages went through a format."""
    result = kv.clone()
    for first in range(0, pages * SPEC.page_tokens, SPEC.page_tokens):
        page = kv[None, ..., first : first + SPEC.page_tokens, :]
        codec = get_format(format)
        result[..., first : first + SPEC.page_tokens, :] = codec.decode(codec.encode(page, SPEC), SPEC)[0]
    return result


def read(session: Session) -> torch.Tensor:
    """What a session holds: `[layers, 2, kv_heads, tokens, head_dim]` (a copy)."""
    parts = [torch.cat((session.keys(layer), session.values(layer))).clone() for layer in range(SPEC.layers)]
    return torch.stack(parts)


def compute(session: Session, tokens: Sequence[int], *, source: str = "") -> None:
    """What a model does: write and commit the KV of the tokens that the session lacks."""
    first = session.length
    if first == len(tokens):
        return
    kv = kv_of(tokens)[..., first:, :]
    for layer in range(SPEC.layers):
        session.write(layer, kv[layer, :1], kv[layer, 1:])
    session.commit(tokens[first:], source=source)


def turn(
    store: KVStore, session_id: str, tokens: Sequence[int], *, owner: str = "ann", **options: Any
) -> int:
    """One whole turn, with all that is found and computed compared. Returns how many tokens were found."""
    session = store.acquire(owner, session_id, tokens, **options)
    found = session.length
    assert session.tokens == tuple(tokens[:found])
    assert torch.equal(read(session), kv_of(tokens)[..., :found, :])
    compute(session, tokens)
    assert torch.equal(read(session), kv_of(tokens))
    store.release(session)
    return found


def disk(folder: Path, format: Any = "original", budget: int = ROOM, **more: Any) -> TierConfig:
    return TierConfig(budget, format=format, location=folder, **more)


def config(pages: int = 1000, /, **more: Any) -> StoreConfig:
    """Settings of a store whose device holds that many pages."""
    return StoreConfig(device_bytes=pages * PAGE, **({"newest_original_tokens": 4} | more))


def empty_device(store: KVStore) -> None:
    """Let everything that a tier has leave the device."""
    store.flush()
    records = store.records
    while len(leaves := records.where(_may_leave(store))):
        for record in leaves.tolist():
            store.residency.evict(record, "room")
    store.tick()


def chunk_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def record_files(folder: Path) -> list[Path]:
    """The manifests of sleeping sessions."""
    return sorted(path for path in folder.rglob("records/*") if path.is_file())


def counted(store: KVStore, name: str) -> int:
    """A total, such as "failures:disk:checksum"; 0 when nothing was counted under that name."""
    return store.snapshot().totals.get(name, 0)


def failures(store: KVStore) -> dict[str, int]:
    """All failures that were counted, by tier and reason."""
    store.flush()
    prefix = "failures:"
    totals = store.snapshot().totals.items()
    return {name.removeprefix(prefix): number for name, number in totals if name.startswith(prefix)}


class Gate:
    """Holds threads up until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._reached = threading.Semaphore(0)

    def pass_through(self) -> None:
        self._reached.release()
        assert self._open.wait(PATIENCE), "nobody has opened the gate"

    def wait_until_reached(self) -> None:
        assert self._reached.acquire(timeout=PATIENCE), "nobody has come to the gate"

    def open(self) -> None:
        self._open.set()


class Disturbed:
    """A storage that does something before it does what it is asked: `before["read"]` is called for each read."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.before: dict[str, Callable[[], None]] = {}

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name not in self.before:
            return method

        def disturbed(*arguments: Any, **options: Any) -> Any:
            self.before[name]()
            return method(*arguments, **options)

        return disturbed


def disturb(store: KVStore, tier: str, **before: Callable[[], None]) -> Disturbed:
    """Put something before methods of a tier's storage."""
    (chosen,) = (candidate for candidate in store.tiering.tiers if candidate.name == tier)
    disturbed = Disturbed(chosen.storage)
    disturbed.before = dict(before)
    chosen.storage = disturbed
    return disturbed


def failing(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


class Stores:
    """Opens stores and ends their threads at the end of a test."""

    def __init__(self) -> None:
        self._opened: list[KVStore] = []
        self.gates: list[Gate] = []

    def open(self, settings: StoreConfig, *, spec: KVSpec = SPEC, **options: Any) -> KVStore:
        """A store that has found what is in its tiers."""
        store = self.open_at_once(settings, spec=spec, **options)
        assert store.flush(PATIENCE)
        return store

    def open_at_once(self, settings: StoreConfig, *, spec: KVSpec = SPEC, **options: Any) -> KVStore:
        """A store that is still looking for what is in its tiers."""
        store = KVStore(spec, settings, **options)
        self._opened.append(store)
        return store

    def gate(self) -> Gate:
        gate = Gate()
        self.gates.append(gate)
        return gate

    def open_later(self, gate: Gate) -> threading.Thread:
        """Opens a gate from another thread, a moment after the caller has gone on to wait behind it."""
        thread = threading.Timer(0.2, gate.open)
        thread.start()
        return thread

    def close(self) -> None:
        for gate in self.gates:
            gate.open()
        for store in self._opened:
            store.flush(PATIENCE)
            store.tiering.close()


def opened_stores() -> Iterator[Stores]:
    """Stores in whose fresh memory is nothing that could be taken for KV."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory, too
    stores = Stores()
    yield stores
    stores.close()
    torch.use_deterministic_algorithms(before)


def _may_leave(store: KVStore) -> np.ndarray:
    records = store.records
    stored = np.asarray(records.stored.any(axis=1))
    return np.asarray((records.page >= 0) & (records.locks == 0) & (records.resident_children == 0) & stored)
