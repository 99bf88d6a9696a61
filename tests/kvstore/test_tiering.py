"""The store with lower tiers: pages go down, come back, and are found again after a restart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from kvstore import KVLost, KVStore, Restoration, Session, StoreConfig, TierConfig
from kvstore.records import FORMAT_CODES, QUANTIZED_INT8
from kvstore.tiers import ChunkReader, DiskStorage
from tests.kvstore.tier_helpers import (
    PAGE,
    PATIENCE,
    ROOM,
    SPEC,
    Gate,
    Stores,
    chunk_files,
    compute,
    config,
    counted,
    disk,
    disturb,
    empty_device,
    failures,
    kv_of,
    opened_stores,
    read,
    record_files,
    rounded,
    text,
    turn,
)

HOUR = 3600.0
PLACES = ("host", "disk", "memory", "file")
LASTING = ("disk", "memory", "file")


@pytest.fixture
def stores() -> Iterator[Stores]:
    yield from opened_stores()


@pytest.fixture
def memory_url() -> Iterator[str]:
    name = uuid.uuid4().hex
    yield f"memory://{name}"
    files = fsspec.filesystem("memory")
    if files.exists(f"/{name}"):
        files.rm(f"/{name}", recursive=True)


@pytest.fixture
def tier(tmp_path: Path, memory_url: str) -> Callable[..., dict[str, TierConfig]]:
    """Settings of one lower tier, by the place where its chunks are."""

    def settings(place: str, format: Any = "original", budget: int = ROOM) -> dict[str, TierConfig]:
        if place == "host":
            return {"host": TierConfig(budget, format)}
        if place == "disk":
            return {"disk": TierConfig(budget, format, location=tmp_path)}
        url = memory_url if place == "memory" else f"file://{tmp_path}"
        return {"remote": TierConfig(budget, format, location=url)}

    return settings


def name_of(place: str) -> str:
    """The tier's name in counters."""
    return place if place in ("host", "disk") else "remote"


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


# Down and back.


@pytest.mark.parametrize("place", PLACES)
def test_full_pages_are_written_without_anybody_sleeping(stores: Stores, tier: Any, place: str) -> None:
    store = stores.open(config(**tier(place)))
    session = store.acquire("ann", "chat", tokens := text(1, 18))
    compute(session, tokens)
    assert store.flush(PATIENCE)
    (lower,) = store.snapshot().tiers
    assert (lower.name, lower.chunks) == (name_of(place), 4)  # the fifth page is not full
    assert lower.bytes >= 4 * PAGE
    assert counted(store, f"chunks_written:{lower.name}") == 4
    assert counted(store, f"bytes_written:{lower.name}") >= 4 * PAGE
    store.release(session)


@pytest.mark.parametrize("place", PLACES)
def test_what_was_evicted_comes_back_the_same(stores: Stores, tier: Any, place: str) -> None:
    store = stores.open(config(6, **tier(place)))
    turn(store, "first", tokens := text(1, 20))
    store.flush()
    turn(store, "second", text(2, 24))
    assert counted(store, "pages_evicted:room") == 5
    store.flush()
    session = store.acquire("ann", "first", tokens)
    assert (session.length, session.restored_tokens, session.exactness) == (20, 20, "exact")
    assert torch.equal(read(session), kv_of(tokens))
    store.release(session)
    assert counted(store, f"tokens_restored:{name_of(place)}") == 20
    assert counted(store, f"bytes_restored:{name_of(place)}") == 5 * PAGE


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("place", PLACES)
def test_formats_round_all_but_the_newest_tokens(stores: Stores, tier: Any, place: str, format: str) -> None:
    store = stores.open(config(**tier(place, format)))
    turn(store, "chat", tokens := text(1, 20))
    empty_device(store)
    session = store.acquire("ann", "chat", tokens)
    assert (session.length, session.exactness) == (20, "quantized")
    assert torch.equal(read(session), rounded(kv_of(tokens), format, pages=4))
    assert not torch.equal(read(session), kv_of(tokens))
    store.release(session)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_a_page_is_rounded_once_it_is_no_longer_among_the_newest(
    stores: Stores, tmp_path: Path, format: str
) -> None:
    store = stores.open(config(disk=disk(tmp_path, format)))
    turn(store, "chat", text(1, 8))
    store.flush()
    suffixes = [path.suffixes[0] for path in chunk_files(tmp_path)]
    assert sorted(suffixes) == sorted([f".{format}", ".original"])
    turn(store, "chat", text(1, 12))
    store.flush()
    suffixes = [path.suffixes[0] for path in chunk_files(tmp_path)]
    assert sorted(suffixes) == sorted([f".{format}", f".{format}", ".original"])
    assert store.snapshot().tiers[0].chunks == 3


def test_what_is_computed_behind_rounded_pages_is_labelled(stores: Stores, tmp_path: Path) -> None:
    store = stores.open(config(disk=disk(tmp_path, "int8")))
    turn(store, "chat", text(1, 20))
    empty_device(store)
    session = store.acquire("ann", "chat", text(1, 30))
    compute(session, text(1, 30))
    first, *_, last = session.table.records
    assert store.records.fidelity[[first, last]].tolist() == [QUANTIZED_INT8, QUANTIZED_INT8]
    store.release(session)
    other = store.acquire("ann", "other", text(1, 28))
    assert (other.length, other.exactness) == (28, "quantized")
    store.release(other)


def test_the_label_outlives_the_process(stores: Stores, tmp_path: Path) -> None:
    """The newest pages are kept as they are, but what they were computed behind was rounded."""
    store = stores.open(config(disk=disk(tmp_path, "int8")))
    turn(store, "chat", text(1, 20))
    empty_device(store)
    session = store.acquire("ann", "chat", text(1, 32))
    compute(session, text(1, 32))
    last = session.table.records[-1]
    store.release(session)
    assert store.flush()
    assert store.records.stored[last].max() == FORMAT_CODES["original"]
    again = stores.open(config(disk=disk(tmp_path, "int8")))
    again.flush()
    session = again.acquire("ann", "other", text(1, 32))
    assert again.records.fidelity[session.table.records[-1]] == QUANTIZED_INT8
    again.release(session)


def test_a_page_comes_from_the_quickest_tier(stores: Stores, tmp_path: Path, memory_url: str) -> None:
    lower = {
        "host": TierConfig(3 * PAGE + PAGE // 2, "original"),
        "disk": disk(tmp_path, budget=12 * PAGE),
        "remote": TierConfig(ROOM, "original", location=memory_url),
    }
    store = stores.open(config(**lower))
    turn(store, "chat", tokens := text(1, 60))
    empty_device(store)
    held = {lower.name: lower.chunks for lower in store.snapshot().tiers}
    assert 0 < held["host"] < held["disk"] < held["remote"] == 15
    found = store.find("ann", tokens)
    assert (found.tokens, found.device) == (60, 0)
    assert found.tiers == {
        "host": 4 * held["host"],
        "disk": 4 * (held["disk"] - held["host"]),
        "remote": 4 * (15 - held["disk"]),
    }
    assert turn(store, "chat", tokens) == 60
    restored = {name: counted(store, f"tokens_restored:{name}") for name in held}
    assert restored == found.tiers
    assert failures(store) == {}


def test_a_page_that_cannot_be_rounded_is_kept_as_it_is(stores: Stores, tmp_path: Path) -> None:
    store = stores.open(config(disk=disk(tmp_path, "int8")))
    tokens = text(1, 12)
    session = store.acquire("ann", "chat", tokens)
    kv = kv_of(tokens)
    kv[..., 1, 3] = torch.inf
    for layer in range(SPEC.layers):
        session.write(layer, kv[layer, :1], kv[layer, 1:])
    session.commit(tokens)
    store.release(session)
    for _ in range(2):  # the second time it is there already
        store.sleep("ann", "chat")
        store.flush()
    store.tick()
    assert store.snapshot().pages == 0
    session = store.acquire("ann", "chat", tokens)
    assert session.length == 12
    assert torch.equal(read(session)[..., :4, :], kv[..., :4, :])
    store.release(session)
    assert failures(store) == {}


def test_int8_pages_on_the_device_go_down_and_come_back(stores: Stores, tmp_path: Path) -> None:
    store = stores.open(config(device_format="int8", disk=disk(tmp_path, "int8")))
    session = store.acquire("ann", "chat", tokens := text(1, 20))
    compute(session, tokens)
    store.release(session)
    empty_device(store)
    assert store.snapshot().pages == 0
    session = store.acquire("ann", "chat", tokens)
    assert (session.length, session.exactness) == (20, "quantized")
    assert torch.equal(read(session), rounded(kv_of(tokens), "int8", pages=4))
    store.release(session)


# Restarts.


@pytest.mark.parametrize("place", LASTING)
def test_a_new_store_finds_what_a_vanished_one_wrote(stores: Stores, tier: Any, place: str) -> None:
    old = stores.open(config(**tier(place)))
    turn(old, "chat", text(1, 22))
    old.flush()
    store = stores.open(config(**tier(place)))  # the old one was never closed
    assert store.get("ann", "chat") is None
    assert store.find("ann", text(1, 40)).tiers == {name_of(place): 20}
    assert store.find("bob", text(1, 40)).tokens == 0
    assert turn(store, "another chat", text(1, 40)) == 20
    assert store.snapshot().tiers[0].ready


@pytest.mark.parametrize("place", LASTING)
def test_a_sleeping_session_survives_with_its_last_page(stores: Stores, tier: Any, place: str) -> None:
    old = stores.open(config(**tier(place)))
    session = old.acquire("ann", "chat", tokens := text(1, 22), public_tokens=8)
    compute(session, tokens[:9], source="system")
    compute(session, tokens, source="message")
    old.edits.mark(session, 1, pinned=True, emphasis=2.0)
    spans = list(session.spans)
    old.release(session)
    old.close()
    store = stores.open(config(**tier(place)))
    session = store.acquire("ann", "chat", [*tokens, 7])
    assert (session.length, session.exactness) == (22, "exact")
    assert session.spans == spans
    assert torch.equal(read(session), kv_of(tokens))
    compute(session, [*tokens, 7])
    assert torch.equal(read(session), kv_of([*tokens, 7]))
    store.release(session)
    assert failures(store) == {}


def test_an_edited_session_survives(stores: Stores, tmp_path: Path) -> None:
    old = stores.open(config(disk=disk(tmp_path)))
    session = old.acquire("ann", "chat", tokens := text(1, 27))
    for source, end in (("a", 6), ("b", 17), ("c", 27)):
        compute(session, tokens[:end], source=source)
    old.edits.discard(old.edits.remove(session, 1))
    kept, spans, positions = tokens[:6] + tokens[17:], list(session.spans), session.positions()
    old.release(session)
    old.close()
    store = stores.open(config(disk=disk(tmp_path)))
    session = store.acquire("ann", "chat", kept)
    assert session.tokens == tuple(kept)
    assert (session.spans, session.exactness) == (spans, "approximate")
    assert torch.equal(session.positions(), positions)
    whole = kv_of(tokens)
    assert torch.equal(read(session), torch.cat((whole[..., :6, :], whole[..., 17:, :]), dim=-2))
    store.release(session)
    other = store.acquire("ann", "other", kept)  # approximate KV is nobody else's
    assert other.length <= 6
    store.release(other)


def test_a_manifest_is_for_its_owner_alone(stores: Stores, tmp_path: Path) -> None:
    old = stores.open(config(disk=disk(tmp_path)))
    turn(old, "chat", text(1, 22))
    old.close()
    store = stores.open(config(disk=disk(tmp_path)))
    session = store.acquire("bob", "chat", text(1, 22))
    assert session.length == 0
    store.release(session)


CHILD = """
import sys
from pathlib import Path
from kvstore import KVStore
from tests.kvstore.tier_helpers import SPEC, config, disk, text, turn

store = KVStore(SPEC, config(disk=disk(Path(sys.argv[1]))))
for number in range(100000):
    turn(store, f"chat {number % 7}", text(number % 7, 10 + number // 7))
    if number == 40:
        store.flush()
        print("ready", flush=True)
"""


def test_kill_loses_the_last_unfilled_pages_at_most(stores: Stores, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
        finally:
            child.send_signal(signal.SIGKILL)
    store = stores.open(config(disk=disk(tmp_path)))
    for number in range(7):
        length = 10 + (40 - (40 - number) % 7) // 7  # of its last turn before all was flushed
        assert turn(store, f"chat {number}", text(number, 60)) >= length // 4 * 4
    assert failures(store) == {}


# Budgets, expiry, garbage.


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("format", ["original", "int8"])
def test_a_tier_keeps_within_its_budget(stores: Stores, tier: Any, place: str, format: str) -> None:
    budget = 20 * PAGE
    store = stores.open(config(30, **tier(place, format, budget)))
    for number in range(30):
        turn(store, f"chat {number}", text(number, 25))
        store.flush()
        assert store.snapshot().tiers[0].bytes <= budget
    assert counted(store, f"chunks_removed:{name_of(place)}:budget") > 0
    (lower,) = store.tiering.tiers
    scanned = list(lower.storage.scan())
    assert len(scanned) == lower.chunks > 0
    assert sum(chunk.bytes for chunk in scanned) <= budget


def test_pinned_pages_count_to_the_budget_of_a_tier(stores: Stores, tmp_path: Path) -> None:
    store = stores.open(config(disk=disk(tmp_path, budget=6 * PAGE)))
    session = store.acquire("ann", "chat", tokens := text(1, 80))
    compute(session, tokens)
    pin = store.pin(session, "test")
    store.release(session)
    turn(store, "other", text(2, 40))
    store.flush()
    assert store.snapshot().tiers[0].bytes <= 6 * PAGE
    assert turn(store, "chat", tokens) == 80  # pins hold pages on the device
    store.unpin(pin)


def test_a_smaller_budget_is_kept_from_the_start(stores: Stores, tmp_path: Path) -> None:
    old = stores.open(config(disk=disk(tmp_path)))
    turn(old, "chat", text(1, 80))
    old.close()
    for age, path in enumerate(chunk_files(tmp_path)):
        os.utime(path, (time.time() - 10 - age,) * 2)
    store = stores.open(config(disk=disk(tmp_path, budget=7 * PAGE)))
    assert store.snapshot().tiers[0].bytes <= 7 * PAGE
    assert sum(path.stat().st_size for path in chunk_files(tmp_path)) <= 7 * PAGE
    assert (
        turn(store, "chat", text(1, 80)) == 24
    )  # the beginning was kept, without which the rest is of no use


def test_two_copies_of_a_page_in_one_tier_become_one(stores: Stores, tmp_path: Path) -> None:
    """A process that was killed while it quantized leaves both."""
    old = stores.open(config(disk=disk(tmp_path, "original")))
    turn(old, "chat", text(1, 12))
    old.flush()
    copies = {path: path.read_bytes() for path in chunk_files(tmp_path)}
    quantizing = stores.open(config(disk=disk(tmp_path, "int8")))
    turn(quantizing, "chat", text(1, 20))
    quantizing.sleep("ann", "chat")
    quantizing.flush()
    for path, content in copies.items():
        path.write_bytes(content)
    store = stores.open(config(disk=disk(tmp_path, "int8")))
    assert store.snapshot().tiers[0].chunks == len(chunk_files(tmp_path)) == 5
    session = store.acquire("ann", "chat", text(1, 20))
    assert session.length == 20
    store.release(session)


@pytest.mark.parametrize("place", PLACES)
def test_what_nobody_used_expires(stores: Stores, tier: Any, place: str) -> None:
    clock = Clock()
    (name, lower), *_ = tier(place).items()
    lower = TierConfig(ROOM, "original", expire_after=HOUR, location=lower.location)
    store = stores.open(config(**{name: lower}, sleep_after=10 * HOUR), clock=clock)
    turn(store, "old", text(1, 22))
    store.sleep("ann", "old")
    store.flush()
    store.tick()
    clock.now += 0.9 * HOUR
    turn(store, "young", text(2, 22))
    store.flush()
    clock.now += 0.2 * HOUR
    store.tick()
    store.flush()
    assert counted(store, f"chunks_removed:{name}:expired") == 6
    assert store.find("ann", text(1, 22)).tokens == 0
    assert store.find("ann", text(2, 22)).tokens == 20
    assert len(list(store.tiering.tiers[0].storage.scan())) == 5
    assert list(store.tiering.tiers[0].storage.records()) == []
    assert turn(store, "old", text(1, 22)) == 0


def test_private_chunks_that_no_manifest_names_are_collected(stores: Stores, tmp_path: Path) -> None:
    old = stores.open(config(disk=disk(tmp_path)))
    turn(old, "named", text(1, 6))
    turn(old, "orphaned", text(2, 6))
    old.close()
    manifests = record_files(tmp_path)
    assert (len(chunk_files(tmp_path)), len(manifests)) == (4, 2)
    newer = stores.open(config(disk=disk(tmp_path)))
    assert len(chunk_files(tmp_path)) == 4
    (orphaned,) = (
        path for path in manifests if path.name in newer.tiering.manifests and is_of(path, "orphaned")
    )
    orphaned.unlink()
    young = stores.open(config(disk=disk(tmp_path)))
    assert counted(young, "chunks_removed:disk:unreferenced") == 0  # somebody may be about to name it
    for path in chunk_files(tmp_path):
        os.utime(path, (time.time() - 2 * HOUR,) * 2)
    store = stores.open(config(disk=disk(tmp_path)))
    assert counted(store, "chunks_removed:disk:unreferenced") == 1
    assert len(chunk_files(tmp_path)) == 3
    assert turn(store, "named", text(1, 6)) == 6


def is_of(path: Path, session_id: str) -> bool:
    return f'"session": "{session_id}"'.encode() in path.read_bytes()


# Bringing back.


def sleeping(store: KVStore, session_id: str, tokens: list[int]) -> None:
    """A session that is in lower tiers alone, in whole."""
    turn(store, session_id, tokens)
    store.sleep("ann", session_id)
    store.flush()
    store.tick()
    assert store.snapshot().pages == 0


def gated_layers(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, first: int, keys: set[bytes] | None = None
) -> Gate:
    """Holds up whoever reads layers from `first` on (of pages with these keys)."""
    gate = stores.gate()
    read_into = ChunkReader.read_into

    def gated(self: ChunkReader, first_layer: int, out: torch.Tensor) -> None:
        if first_layer >= first and (keys is None or self.header.key in keys):
            gate.pass_through()
        read_into(self, first_layer, out)

    monkeypatch.setattr(ChunkReader, "read_into", gated)
    return gate


def test_prefetch_brings_a_sleeping_session_back(stores: Stores, tmp_path: Path) -> None:
    store = stores.open(config(disk=disk(tmp_path)))
    sleeping(store, "chat", tokens := text(1, 22))
    restoration = store.prefetch("ann", "chat")
    assert isinstance(restoration, Restoration)
    assert restoration.wait(timeout=PATIENCE) == frozenset()
    assert store.prefetch("ann", "chat") is None or store.flush(PATIENCE)
    assert store.prefetch("ann", "chat") is None
    session = store.acquire("ann", "chat", tokens)
    assert (session.reused_tokens, session.restored_tokens) == (22, 0)
    assert torch.equal(read(session), kv_of(tokens))
    store.release(session)
    assert store.prefetch("ann", "no such chat") is None


def test_prefetch_after_a_restart(stores: Stores, tmp_path: Path) -> None:
    old = stores.open(config(disk=disk(tmp_path)))
    turn(old, "chat", tokens := text(1, 22))
    old.close()
    store = stores.open(config(disk=disk(tmp_path)))
    assert store.prefetch("ann", "chat") is not None
    assert turn(store, "chat", tokens) == 22


def test_a_cancelled_prefetch_loses_nothing(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores.open(config(disk=disk(tmp_path), layers_at_a_time=1))
    sleeping(store, "chat", tokens := text(1, 22))
    gate = gated_layers(stores, monkeypatch, first=2)
    restoration = store.prefetch("ann", "chat")
    assert restoration is not None
    gate.wait_until_reached()
    restoration.cancel()
    gate.open()
    assert restoration.wait_until_done(PATIENCE)
    assert restoration.wait() == {arrival.record for arrival in restoration.arrivals}
    store.flush()
    assert store.snapshot().pages == 0
    assert turn(store, "chat", tokens) == 22
    assert failures(store) == {}


def test_a_prefetch_that_finds_no_room_loses_nothing(stores: Stores, tmp_path: Path) -> None:
    store = stores.open(config(8, disk=disk(tmp_path)))
    sleeping(store, "chat", tokens := text(1, 22))
    busy = store.acquire("ann", "busy", text(2, 24))
    compute(busy, text(2, 24))
    store.prefetch("ann", "chat")
    store.flush()
    store.release(busy)
    assert turn(store, "chat", tokens) == 22


@pytest.mark.parametrize("length", [24, 22])
def test_early_layers_can_be_read_while_later_ones_are_on_their_way(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    store = stores.open(config(disk=disk(tmp_path), layers_at_a_time=1))
    sleeping(store, "chat", text(1, length))
    gate = gated_layers(stores, monkeypatch, first=2)
    session = store.acquire("ann", "chat", longer := text(1, 30), wait=False)
    assert session.length == length
    new = kv_of(longer)[..., length:, :]
    for layer in range(SPEC.layers):
        if layer == 2:
            gate.wait_until_reached()
            gate.open()
        keys, values = session.write(layer, new[layer, :1], new[layer, 1:])
        assert torch.equal(torch.cat((keys, values)), kv_of(longer)[layer])
    session.commit(longer[length:])
    assert torch.equal(read(session), kv_of(longer))
    store.release(session)
    assert counted(store, "pages_copied") == 0
    store.sleep("ann", "chat")
    store.flush()
    assert counted(store, "tokens_restored:disk") == length
    assert len(chunk_files(tmp_path)) == 8  # what the last page was before it grew is gone


def test_a_last_page_that_is_on_its_way_is_not_copied_too_early(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores.open(config(disk=disk(tmp_path), layers_at_a_time=1))
    sleeping(store, "chat", tokens := text(1, 22))
    turn(store, "noise", text(5, 40))  # what freed pages hold is not what comes back
    store.drop("ann", "noise")
    gate = gated_layers(stores, monkeypatch, first=0)
    session = store.acquire("ann", "chat", longer := text(1, 30), wait=False)
    gate.wait_until_reached()
    opened = stores.open_later(gate)
    compute(session, longer)
    opened.join()
    assert session.tokens == tuple(longer)
    assert torch.equal(read(session), kv_of(longer))
    assert tokens == longer[:22]
    store.release(session)


def damaged(path: Path, layer: int) -> None:
    """Flip a byte of a layer of a chunk in the original format."""
    content = bytearray(path.read_bytes())
    layer_bytes = PAGE // SPEC.layers
    content[len(content) - (SPEC.layers - layer) * layer_bytes] ^= 1
    path.write_bytes(content)


def chunk_of(store: KVStore, folder: Path, session_id: str, page: int) -> Path:
    """The file of a page of a session that is in memory."""
    session = store.get("ann", session_id)
    assert session is not None
    key = store.records.key_of(session.table.records[page]).hex()
    (path,) = (path for path in chunk_files(folder) if path.name.startswith(key))
    return path


@pytest.mark.parametrize("layer", [0, 2])
def test_after_a_loss_the_rest_is_computed(stores: Stores, tmp_path: Path, layer: int) -> None:
    store = stores.open(config(disk=disk(tmp_path), layers_at_a_time=1))
    sleeping(store, "chat", tokens := text(1, 40))
    damaged(chunk_of(store, tmp_path, "chat", 6), layer)
    session = store.acquire("ann", "chat", tokens, wait=False)
    assert session.length == 40
    with pytest.raises(KVLost) as lost:
        read(session)
    assert lost.value.length == 24
    session.truncate(lost.value.length)
    assert torch.equal(read(session), kv_of(tokens[:24]))
    compute(session, tokens)
    assert torch.equal(read(session), kv_of(tokens))
    store.release(session)
    assert failures(store) == {"disk:checksum": 1}
    assert turn(store, "chat", tokens) == 40


def test_after_a_loss_layers_are_still_waited_for(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores.open(config(disk=disk(tmp_path), layers_at_a_time=1))
    sleeping(store, "chat", tokens := text(1, 40))
    damaged(chunk_of(store, tmp_path, "chat", 6), 0)
    gate = gated_layers(stores, monkeypatch, first=1)
    session = store.acquire("ann", "chat", tokens, wait=False)
    with pytest.raises(KVLost) as lost:
        session.keys(0)
    session.truncate(lost.value.length)
    gate.wait_until_reached()
    opened = stores.open_later(gate)
    assert torch.equal(read(session), kv_of(tokens[:24]))
    opened.join()
    store.release(session)


def test_another_session_waits_for_shared_pages_whatever_is_lost_behind_them(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores.open(config(disk=disk(tmp_path), layers_at_a_time=1))
    sleeping(store, "long", tokens := text(1, 40))
    damaged(chunk_of(store, tmp_path, "long", 6), 0)
    gate = gated_layers(stores, monkeypatch, first=1)
    long = store.acquire("ann", "long", tokens, wait=False)
    short = store.acquire("ann", "short", tokens[:20], wait=False)
    assert short.length == 20
    with pytest.raises(KVLost):
        long.keys(0)
    gate.wait_until_reached()
    opened = stores.open_later(gate)
    assert torch.equal(read(short), kv_of(tokens[:20]))
    opened.join()
    long.truncate(0)
    store.release(long)
    store.release(short)


def test_a_release_does_not_cancel_what_another_session_waits_for(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores.open(config(disk=disk(tmp_path), layers_at_a_time=1))
    sleeping(store, "long", tokens := text(1, 40))
    gate = gated_layers(stores, monkeypatch, first=1)
    long = store.acquire("ann", "long", tokens, wait=False)
    short = store.acquire("ann", "short", tokens[:20], wait=False)
    gate.wait_until_reached()
    store.release(long)
    gate.open()
    assert torch.equal(read(short), kv_of(tokens[:20]))
    store.release(short)


def test_a_slower_tier_steps_in_for_a_damaged_copy(stores: Stores, tmp_path: Path, memory_url: str) -> None:
    remote = TierConfig(ROOM, "int8", location=memory_url)
    store = stores.open(config(disk=disk(tmp_path), remote=remote, layers_at_a_time=1))
    sleeping(store, "chat", text(1, 40))
    damaged(chunk_of(store, tmp_path, "chat", 3), 2)
    session = store.acquire("ann", "chat", longer := text(1, 44), wait=False)
    compute(session, longer)
    assert session.exactness == "quantized"
    exact, held = kv_of(longer), read(session)
    coarse = rounded(exact, "int8", pages=4)
    assert torch.equal(held[0], exact[0])
    assert torch.equal(held[2:, ..., 12:16, :], coarse[2:, ..., 12:16, :])
    assert torch.equal(held[2:, ..., :12, :], exact[2:, ..., :12, :])
    assert torch.equal(held[2:, ..., 16:, :], exact[2:, ..., 16:, :])
    store.release(session)
    assert failures(store) == {"disk:checksum": 1}
    newest = session.table.records[-1]
    assert store.records.fidelity[newest] == QUANTIZED_INT8  # it was computed behind a rounded page


# Forgetting, and sharing a folder.


@pytest.mark.parametrize("asleep", [False, True])
def test_a_dropped_session_leaves_nothing_in_any_tier(
    stores: Stores, tmp_path: Path, memory_url: str, asleep: bool
) -> None:
    lower = {
        "host": TierConfig(ROOM, "int8"),
        "disk": disk(tmp_path, "int4"),
        "remote": TierConfig(ROOM, "original", location=memory_url),
    }
    store = stores.open(config(**lower))
    turn(store, "kept", text(1, 10))
    turn(store, "dropped", text(1, 8) + text(2, 25))
    turn(store, "dropped", text(1, 8) + text(3, 25))  # the branch that was left goes, too
    turn(store, "kept of bob", text(2, 10), owner="bob")
    if asleep:
        store.sleep("ann", "dropped")
    store.flush()
    assert store.drop("ann", "dropped")
    store.flush()
    for lower_tier in store.tiering.tiers:
        assert len(list(lower_tier.storage.scan())) == lower_tier.chunks == 4
        assert list(lower_tier.storage.records()) == []
    assert store.snapshot().pages == 6
    assert turn(store, "kept", text(1, 10)) == 10


def test_a_session_of_an_earlier_process_can_be_dropped(stores: Stores, tmp_path: Path) -> None:
    old = stores.open(config(disk=disk(tmp_path)))
    turn(old, "chat", text(1, 22))
    old.close()
    store = stores.open(config(disk=disk(tmp_path)))
    assert store.drop("ann", "chat")
    assert not store.drop("ann", "chat")
    store.flush()
    assert chunk_files(tmp_path) == []
    assert record_files(tmp_path) == []


def test_a_session_that_is_dropped_while_it_is_written(stores: Stores, tmp_path: Path) -> None:
    store = stores.open(config(disk=disk(tmp_path)))
    gate = stores.gate()
    disturb(store, "disk", write=gate.pass_through)
    turn(store, "chat", text(1, 22))
    store.sleep("ann", "chat")
    gate.wait_until_reached()
    store.drop("ann", "chat")
    gate.open()
    store.flush()
    assert chunk_files(tmp_path) == []
    assert record_files(tmp_path) == []
    assert store.snapshot().pages == 0


def test_two_stores_on_one_folder(stores: Stores, tmp_path: Path) -> None:
    one, two = (stores.open(config(40, disk=disk(tmp_path))) for _ in range(2))
    for number in range(6):
        turn(one, f"chat {number}", text(number, 24))
        turn(two, f"chat {number}", text(number, 32))  # the same pages and some more
    for store in (one, two):
        empty_device(store)
        assert store.snapshot().pages == 0
    one.drop("ann", "chat 0")
    one.flush()
    assert turn(two, "chat 0", text(0, 32)) == 0
    assert failures(two) == {"disk:absent": 1}
    assert turn(two, "chat 1", text(1, 32)) == 32
    for store in (one, two):
        for number in range(6):
            turn(store, f"chat {number}", text(number, 36))
        store.flush()
    third = stores.open(config(disk=disk(tmp_path)))
    assert [turn(third, f"chat {number}", text(number, 36)) for number in range(6)] == [36] * 6


def test_a_page_that_is_written_before_a_scan_finds_it_stays(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = stores.open(config(disk=disk(tmp_path)))
    turn(old, "chat", tokens := text(1, 20))
    old.flush()
    gate = stores.gate()
    scan = DiskStorage.scan

    def gated(self: DiskStorage) -> Iterator[Any]:
        found = list(scan(self))
        gate.pass_through()
        yield from found

    monkeypatch.setattr(DiskStorage, "scan", gated)
    store = stores.open_at_once(config(disk=disk(tmp_path)))
    gate.wait_until_reached()
    assert not store.snapshot().tiers[0].ready
    writing = stores.gate()
    disturb(store, "disk", write=writing.pass_through)
    assert turn(store, "chat", tokens) == 0
    writing.wait_until_reached()
    gate.open()
    while not store.snapshot().tiers[0].ready:
        store.tick()
    writing.open()
    empty_device(store)
    assert len(chunk_files(tmp_path)) == store.snapshot().tiers[0].chunks == 5
    assert turn(store, "chat", tokens) == 20
    assert failures(store) == {}


def test_a_session_may_be_forked_while_it_is_on_its_way(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores.open(config(disk=disk(tmp_path), layers_at_a_time=1))
    sleeping(store, "chat", tokens := text(1, 24))
    gate = gated_layers(stores, monkeypatch, first=2)
    session = store.acquire("ann", "chat", tokens, wait=False)
    store.fork(session, "twin", 18)
    twin = store.acquire("ann", "twin", tokens[:18], wait=False)
    gate.wait_until_reached()
    opened = stores.open_later(gate)
    assert torch.equal(read(twin), kv_of(tokens[:18]))
    opened.join()
    for either in (session, twin):
        store.release(either)


def test_an_edit_waits_for_what_is_on_its_way(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores.open(config(disk=disk(tmp_path), layers_at_a_time=1))
    tokens = text(1, 24)
    session = store.acquire("ann", "chat", tokens)
    compute(session, tokens[:10], source="a")
    compute(session, tokens, source="b")
    store.release(session)
    store.sleep("ann", "chat")
    store.flush()
    store.tick()
    gate = gated_layers(stores, monkeypatch, first=0)
    session = store.acquire("ann", "chat", tokens, wait=False)
    opened = stores.open_later(gate)
    detached = store.edits.remove(session, 0)
    assert store.edits.insert(session, 0, detached)
    opened.join()
    assert torch.equal(read(session), kv_of(tokens))
    store.release(session)


def test_sessions_fall_asleep_by_themselves(stores: Stores, tmp_path: Path) -> None:
    clock = Clock()
    store = stores.open(config(disk=disk(tmp_path), sleep_after=600.0), clock=clock)
    turn(store, "quiet", text(1, 22))
    turn(store, "watched", text(2, 22))
    clock.now += 400.0
    store.heartbeat("ann", "watched")
    clock.now += 300.0
    store.tick()
    store.flush()
    store.tick()
    shown = store.snapshot()
    assert (shown.sessions, shown.sleeping, shown.pages) == (2, 1, 6)
    assert turn(store, "quiet", text(1, 22)) == 22
    assert counted(store, "wakes") == 1


def test_without_a_lower_tier_sleep_keeps_the_session(stores: Stores) -> None:
    store = stores.open(StoreConfig(device_bytes=100 * PAGE))
    turn(store, "chat", text(1, 22))
    assert store.sleep("ann", "chat")
    store.tick()
    assert turn(store, "chat", text(1, 22)) == 22


def test_sessions_in_use_neither_sleep_nor_are_fetched(stores: Stores, tmp_path: Path) -> None:
    store = stores.open(config(disk=disk(tmp_path)))
    session: Session = store.acquire("ann", "chat", text(1, 22))
    compute(session, text(1, 22))
    assert not store.sleep("ann", "chat")
    assert store.prefetch("ann", "chat") is None
    store.release(session)
