"""Memory: token slots that are allocated and not used, and what the store keeps beside the KV."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from benchmarks.dialogues import dialogues
from benchmarks.report import Figure
from kvstore import KVSpec, KVStore, Session, StoreConfig

# The default model's: SmolLM2-135M in float32.
DEFAULT_MODEL = KVSpec(layers=30, kv_heads=3, head_dim=64, dtype=torch.float32, fingerprint="benchmark")
TINY = KVSpec(layers=1, kv_heads=1, head_dim=1, dtype=torch.float32, fingerprint="benchmark")
BUDGET = 1024**3
GROWING_AT_ONCE = 4
# Tokens of a text, about: the default tokenizer makes one of 4.3 characters of these dialogues.
CHARACTERS_PER_TOKEN = 4.3
TEMPLATE_TOKENS = 5  # that a chat template puts around each message


def conversations() -> Iterator[list[int]]:
    """Tokens by turn of each conversation: every dialogue once, every third gone on with for two more."""
    found = [
        [int(len(turn["text"]) / CHARACTERS_PER_TOKEN) + TEMPLATE_TOKENS for turn in dialogue["turns"]]
        for dialogue in dialogues("en", "final")
    ]
    while True:
        for number in range(len(found)):
            yield [t for n in range(3 if number % 3 == 0 else 1) for t in found[(number + n) % len(found)]]


def append(session: Session, tokens: Sequence[int] | np.ndarray) -> None:
    """Write and commit tokens whose KV is zero."""
    spec = session.spec
    nothing = torch.zeros((), dtype=spec.dtype).expand(1, spec.kv_heads, len(tokens), spec.head_dim)
    for layer in range(spec.layers):
        session.write(layer, nothing, nothing)
    session.commit(tokens.tolist() if isinstance(tokens, np.ndarray) else tokens)


def measure(quick: bool) -> list[Figure]:
    waste, within_pages = _waste()
    return [
        Figure(
            "waste_ratio", waste, "<=0.04", "token slots allocated but unused over those used, slabs included"
        ),
        Figure("page_waste_ratio", within_pages, "", "the same within the pages in use"),
        Figure(
            "page_bytes_overhead",
            _overhead(200 if quick else 1000),
            "<300",
            "bytes kept beside the KV of a page",
        ),
    ]


def _waste() -> tuple[float, float]:
    """Grow conversations turn by turn, a few at a time, until the first page would have to go."""
    # The default model's pages and slabs, but of one number a token, because what is in them does not matter.
    pages = BUDGET // DEFAULT_MODEL.bytes_per_page
    model = KVStore(DEFAULT_MODEL, StoreConfig(device_bytes=BUDGET))
    slab_pages = model.residency.pool.slab_pages
    model.close()
    store = KVStore(TINY, StoreConfig(device_bytes=pages * TINY.bytes_per_page, slab_pages=slab_pages))
    source = conversations()
    growing: list[tuple[str, list[int]]] = []
    lengths: dict[str, int] = {}
    while True:
        while len(growing) < GROWING_AT_ONCE:
            growing.append((f"session {len(lengths) + len(growing)}", next(source)))
        name, turns = growing.pop(0)
        length = lengths.get(name, 0) + turns.pop(0)
        if store.snapshot().pages + -(-length // TINY.page_tokens) > pages:
            break
        tokens = np.random.default_rng(int(name.split()[1])).integers(0, 49152, length, dtype=np.int32)
        session = store.acquire("owner", name, tokens, planned=length)
        append(session, tokens[session.length :])
        store.release(session)
        lengths[name] = length
        if turns:
            growing.append((name, turns))
    used = sum(lengths.values())
    snapshot = store.snapshot()
    slots = snapshot.allocated_bytes / TINY.bytes_per_token
    paged = snapshot.bytes / TINY.bytes_per_token
    store.close()
    return (slots - used) / used, (paged - used) / used


def _overhead(sessions: int) -> float:
    """All Python and numpy memory that sessions of 512 tokens add, by page."""
    pages = sessions * 512 // TINY.page_tokens
    store = KVStore(TINY, StoreConfig(device_bytes=2 * pages * TINY.bytes_per_page))
    append_new(store, "warm-up", 0)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(1, sessions + 1):
        append_new(store, f"session {number}", number)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    store.close()
    return (after - before) / pages


def append_new(store: KVStore, name: str, seed: int, length: int = 512) -> np.ndarray:
    """A session of random tokens."""
    tokens = np.random.default_rng(seed).integers(0, 49152, length, dtype=np.int32)
    session = store.acquire("owner", name, tokens, planned=length)
    append(session, tokens[session.length :])
    store.release(session)
    return tokens
