"""The KV of one conversation: what it holds, and what a failed pass leaves."""

from __future__ import annotations

import pytest
import torch

from kvstore import KVSpec, Session

SPEC = KVSpec(layers=3, kv_heads=2, head_dim=4, dtype=torch.float32, fingerprint="test")


def random_kv(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (1, SPEC.kv_heads, count, SPEC.head_dim)
    return torch.randn(shape), torch.randn(shape)


def run_pass(session: Session, tokens: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    written = [random_kv(len(tokens)) for _ in range(SPEC.layers)]
    for layer, (keys, values) in enumerate(written):
        session.write(layer, keys, values)
    session.commit(tokens)
    return written


def test_spec_counts_keys_and_values_of_every_layer() -> None:
    assert SPEC.bytes_per_token == 2 * 3 * 2 * 4 * 4


def test_spec_refuses_a_shape_without_heads() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        KVSpec(layers=1, kv_heads=0, head_dim=4, dtype=torch.float32, fingerprint="test")


def test_views_show_what_was_written() -> None:
    session = Session(SPEC, "owner", "id")
    first = run_pass(session, [1, 2])
    second = run_pass(session, [3])
    assert session.tokens == (1, 2, 3)
    for layer in range(SPEC.layers):
        expected = torch.cat([first[layer][0], second[layer][0]], dim=2)
        assert session.keys(layer).shape == (1, 2, 3, 4)
        assert torch.equal(session.keys(layer), expected)
        assert torch.equal(session.values(layer), torch.cat([first[layer][1], second[layer][1]], dim=2))


def test_write_returns_old_and_new_tokens() -> None:
    session = Session(SPEC, "owner", "id")
    run_pass(session, [1, 2])
    keys, values = random_kv(3)
    all_keys, all_values = session.write(0, keys, values)
    assert all_keys.shape == all_values.shape == (1, 2, 5, 4)
    assert torch.equal(all_keys[:, :, 2:], keys)
    assert torch.equal(all_values[:, :, 2:], values)


def test_content_survives_growth_in_the_middle_of_a_pass() -> None:
    session = Session(SPEC, "owner", "id")
    history = run_pass(session, list(range(60)))
    written = [random_kv(200) for _ in range(SPEC.layers)]
    for layer, (keys, values) in enumerate(written):
        session.write(layer, keys, values)
    session.commit(list(range(200)))
    for layer in range(SPEC.layers):
        expected = torch.cat([history[layer][0], written[layer][0]], dim=2)
        assert torch.equal(session.keys(layer), expected)


def test_growing_is_geometric() -> None:
    session = Session(SPEC, "owner", "id")
    capacities = set()
    for token in range(1000):
        run_pass(session, [token])
        capacities.add(session.capacity)
    assert len(capacities) < 10


def test_a_failed_pass_leaves_nothing() -> None:
    session = Session(SPEC, "owner", "id")
    history = run_pass(session, [1, 2])
    session.write(0, *random_kv(4))
    assert list(session.tokens) == [1, 2]
    assert torch.equal(session.keys(0), history[0][0])
    written = run_pass(session, [7])
    assert list(session.tokens) == [1, 2, 7]
    assert torch.equal(session.keys(2), torch.cat([history[2][0], written[2][0]], dim=2))


def test_commit_needs_every_layer() -> None:
    session = Session(SPEC, "owner", "id")
    session.write(0, *random_kv(1))
    with pytest.raises(ValueError, match="not every layer"):
        session.commit([1])
    assert session.length == 0


def test_truncate_keeps_the_head_and_forgets_a_pass_under_way() -> None:
    session = Session(SPEC, "owner", "id")
    history = run_pass(session, [1, 2, 3])
    for layer in range(SPEC.layers):
        session.write(layer, *random_kv(1))
    session.truncate(2)
    assert torch.equal(session.values(1), history[1][1][:, :, :2])
    with pytest.raises(ValueError, match="not every layer"):
        session.commit([4])


def test_truncate_cannot_lengthen() -> None:
    session = Session(SPEC, "owner", "id")
    run_pass(session, [1])
    with pytest.raises(ValueError, match="truncate"):
        session.truncate(2)


@pytest.mark.parametrize("shape", [(1, 3, 1, 4), (1, 2, 1, 5), (2, 2, 1, 4)])
def test_write_refuses_another_shape(shape: tuple[int, ...]) -> None:
    session = Session(SPEC, "owner", "id")
    with pytest.raises(ValueError, match="shape"):
        session.write(0, torch.zeros(shape), torch.zeros(shape))


def test_bytes_are_accounted_and_given_back() -> None:
    changes: list[int] = []
    session = Session(SPEC, "owner", "id", account=changes.append)
    run_pass(session, list(range(100)))
    assert sum(changes) == session.bytes == session.capacity * SPEC.bytes_per_token
    session.free()
    assert sum(changes) == session.bytes == 0
    assert session.tokens == ()


def test_growth_without_memory_leaves_the_session_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[int] = []
    session = Session(SPEC, "owner", "id", account=changes.append)
    history = run_pass(session, [1, 2])

    def no_memory(*args: object, **kwargs: object) -> None:
        raise RuntimeError("out of memory")

    held = session.bytes
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", no_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            session.reserve(5000)
    assert sum(changes) == session.bytes == held
    assert torch.equal(session.keys(0), history[0][0])
