"""The engine on a tiny random model: who runs when, what ends an answer, what stays for the next."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, MambaConfig, MistralConfig

from inference import (
    Engine,
    EngineConfig,
    EngineStatus,
    EngineStopped,
    FinishedEvent,
    GenerationRequest,
    ModelUnavailable,
    SamplingParams,
    Span,
    TokenEvent,
)
from tests.inference.conftest import TINY_CONTEXT, EngineFactory, save_tiny_model, tiny_tokenizer
from tests.inference.helpers import WAIT, collect, failure_of, finish_of, prompt_of, request, store_of

TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # KV of one token of the tiny model
POISON = 200  # a token that makes the model fail where a test asks for it


def span_of(*tokens: int) -> list[Span]:
    return [Span("message", tokens)]


def letters(count: int, start: int = 0) -> tuple[int, ...]:
    return tuple(10 + (start + i * 7) % 90 for i in range(count))


def before_forward(engine: Engine, action: Any) -> None:
    """Call `action(input_ids)` in the engine's thread before each forward pass."""
    engine._model.model.register_forward_pre_hook(
        lambda module, args, kwargs: action(kwargs["input_ids"]), with_kwargs=True
    )


def poisoned(input_ids: torch.Tensor) -> None:
    if bool((input_ids == POISON).any()):
        raise RuntimeError("poisoned")


class Gate:
    """Holds the engine in its next forward pass until opened."""

    def __init__(self, engine: Engine) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        before_forward(engine, self.wait)

    def wait(self, input_ids: torch.Tensor) -> None:
        self.reached.set()
        assert self.opened.wait(WAIT)


# Correctness against transformers


def reference(folder: Path, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    output = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=count, min_new_tokens=count
    )
    return tuple(output[0, len(prompt) :].tolist())


def small(kind: Any, **settings: Any) -> Any:
    tokenizer = tiny_tokenizer()
    return kind(
        vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=None, initializer_range=0.5, **settings
    )


LLAMA_LIKE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": TINY_CONTEXT,
}
ARCHITECTURES = {
    "gpt2": small(GPT2Config, n_embd=32, n_layer=2, n_head=4, n_positions=TINY_CONTEXT),
    "sliding window": small(MistralConfig, sliding_window=8, **LLAMA_LIKE),
    "sliding and full": small(Gemma2Config, sliding_window=8, **LLAMA_LIKE),
}


@pytest.mark.parametrize("chunk", [5, 256])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_are_those_of_generate(
    name: str, chunk: int, tmp_path: Path, make_engine: EngineFactory
) -> None:
    save_tiny_model(tmp_path, ARCHITECTURES[name])
    engine = make_engine(model=str(tmp_path), prefill_chunk=chunk)
    prompt = letters(40)
    expected = reference(tmp_path, prompt, 24)
    tokens = [t for t in expected if t not in engine._model.end_tokens]
    assert len(tokens) == 24
    first = collect(engine.submit(request(span_of(*prompt), session_id="s", max_tokens=24)))
    assert first.tokens == expected
    # The next turn goes on from the kept KV.
    longer = (*prompt, *expected, *letters(11, start=5))
    second = collect(engine.submit(request(span_of(*longer), session_id="s", max_tokens=8)))
    assert second.end.usage.cached_tokens == len(prompt) + 23
    assert second.tokens == reference(tmp_path, longer, 8)


# Sessions


def test_a_session_reuses_the_common_prefix(make_engine: EngineFactory) -> None:
    engine = make_engine()
    first = collect(engine.submit(request(span_of(*letters(20)), session_id="s")))
    usage = first.end.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens) == (20, 0, 20)
    # The last sampled token has not run through the model; the others have.
    again = (*letters(20), *first.tokens, *letters(5))
    second = collect(engine.submit(request(span_of(*again), session_id="s")))
    assert second.end.usage.cached_tokens == 20 + len(first.tokens) - 1
    assert second.end.usage.computed_tokens == 6
    edited = (*letters(10), 99, *letters(9))
    third = collect(engine.submit(request(span_of(*edited), session_id="s")))
    assert third.end.usage.cached_tokens == 10
    assert store_of(engine).totals["tokens_reused"] == second.end.usage.cached_tokens + 10


def test_reuse_changes_no_token(make_engine: EngineFactory) -> None:
    engine = make_engine()
    prompts = (letters(30), letters(30, start=3), (*letters(15), *letters(40, start=2)), letters(30))
    for number, prompt in enumerate(prompts):
        kept = collect(engine.submit(request(span_of(*prompt), session_id="s", max_tokens=12)))
        fresh = collect(engine.submit(request(span_of(*prompt), owner=f"new {number}", max_tokens=12)))
        assert kept.tokens == fresh.tokens
        assert fresh.end.usage.cached_tokens == 0


def test_a_prompt_that_is_all_cached_still_computes_its_last_token(make_engine: EngineFactory) -> None:
    engine = make_engine()
    first = collect(engine.submit(request(span_of(*letters(20)), session_id="s")))
    again = collect(engine.submit(request(span_of(*letters(20)), session_id="s")))
    assert again.tokens == first.tokens
    assert again.end.usage.cached_tokens == 19
    assert again.end.usage.computed_tokens == 1


def test_another_owner_gets_nothing_of_a_session(make_engine: EngineFactory) -> None:
    engine = make_engine()
    spans = span_of(*letters(20))
    collect(engine.submit(request(spans, session_id="s", owner="me")))
    assert collect(engine.submit(request(spans, session_id="s", owner="you"))).end.usage.cached_tokens == 0
    assert collect(engine.submit(request(spans, session_id="s", owner="me"))).end.usage.cached_tokens == 19


def test_drop_session(make_engine: EngineFactory) -> None:
    engine = make_engine()
    spans = span_of(*letters(20))
    collect(engine.submit(request(spans, session_id="s")))
    engine.drop_session("s", "someone else")
    engine.drop_session("s", "owner")
    assert collect(engine.submit(request(spans, session_id="s"))).end.usage.cached_tokens == 0
    assert store_of(engine).totals["drops"] == 1


def test_a_request_without_a_session_finds_what_its_owner_computed_before(make_engine: EngineFactory) -> None:
    engine = make_engine()
    first = collect(engine.submit(request(span_of(*letters(40)))))
    again = collect(engine.submit(request(span_of(*letters(40)))))
    assert (first.end.usage.cached_tokens, again.end.usage.cached_tokens) == (0, 2 * 16)
    assert again.tokens == first.tokens
    assert store_of(engine).sessions == 0


def test_little_memory_evicts_old_pages_and_fails_nobody(make_engine: EngineFactory) -> None:
    engine = make_engine(kv_bytes=100 * TOKEN_BYTES)
    for number in range(6):
        collect(engine.submit(request(span_of(*letters(60, number)), session_id=str(number))))
    store = store_of(engine)
    assert store.bytes <= store.budget_bytes
    assert store.totals["pages_evicted:room"] > 0
    # An answer ends where the memory does.
    whole = collect(engine.submit(request(span_of(*letters(60)), session_id="whole", max_tokens=None)))
    assert whole.end.reason in ("length", "stop")
    assert whole.end.usage.completion_tokens <= 36


def test_a_prompt_that_the_memory_cannot_hold_fails_with_numbers(make_engine: EngineFactory) -> None:
    engine = make_engine(kv_bytes=100 * TOKEN_BYTES)
    failure = failure_of(engine.submit(request(span_of(*letters(96)))))
    assert failure.code == "context_length_exceeded"
    assert "96 tokens" in failure.message
    assert "holds 96" in failure.message
    assert collect(engine.submit(request(span_of(*letters(90))))).end.usage.completion_tokens == 6


def test_kv_on_disk_outlives_the_engine(make_engine: EngineFactory, tmp_path: Path) -> None:
    spans = span_of(*letters(100))
    first = make_engine(kv_disk_bytes=10**8, kv_dir=tmp_path)
    before = collect(first.submit(request(spans, session_id="s")))
    first.shutdown()
    second = make_engine(kv_disk_bytes=10**8, kv_dir=tmp_path)
    after = collect(second.submit(request(spans, session_id="s")))
    assert after.end.usage.cached_tokens == 99
    assert after.tokens == before.tokens
    assert after.end.usage.exactness == "exact"
    other = collect(second.submit(request(spans, owner="someone else")))
    assert other.end.usage.cached_tokens == 0


def test_damaged_kv_on_disk_is_computed_again(make_engine: EngineFactory, tmp_path: Path) -> None:
    spans = span_of(*letters(100))
    first = make_engine(kv_disk_bytes=10**8, kv_dir=tmp_path)
    before = collect(first.submit(request(spans, session_id="s")))
    first.shutdown()
    chunks = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 4096)
    assert len(chunks) >= 6
    for path in chunks:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    second = make_engine(kv_disk_bytes=10**8, kv_dir=tmp_path)
    after = collect(second.submit(request(spans, session_id="s")))
    assert after.end.usage.cached_tokens == 0
    assert after.tokens == before.tokens


def test_quantized_kv_says_so(make_engine: EngineFactory, tmp_path: Path) -> None:
    spans = span_of(*letters(100))
    for exactness in ("exact", "quantized"):
        engine = make_engine(kv_disk_bytes=10**8, kv_dir=tmp_path, kv_format="int8")
        usage = collect(engine.submit(request(spans, session_id="s"))).end.usage
        assert usage.exactness == exactness
        engine.shutdown()


def test_answers_wait_until_their_kv_fits_whole(make_engine: EngineFactory) -> None:
    engine = make_engine(kv_bytes=100 * TOKEN_BYTES)
    running, held = [], []

    def watch(input_ids: torch.Tensor) -> None:
        running.append(engine.snapshot().running)
        held.append(store_of(engine).bytes)

    before_forward(engine, watch)
    generations = [
        engine.submit(request(span_of(*letters(25, number)), session_id=str(number % 5), max_tokens=20))
        for number in range(8)
    ]
    assert [finish_of(generation).usage.completion_tokens for generation in generations] == [20] * 8
    assert max(running) == 2
    assert max(held) <= 100 * TOKEN_BYTES


def test_nobody_overtakes_an_answer_that_waits_for_memory(make_engine: EngineFactory) -> None:
    engine = make_engine(kv_bytes=100 * TOKEN_BYTES)
    gate = Gate(engine)
    sizes = (30, 80, 80, 30)
    generations = [engine.submit(request(span_of(*letters(size)), max_tokens=10)) for size in sizes]
    gate.opened.set()
    ends = [finish_of(generation).usage for generation in generations]
    for before, after in itertools.pairwise(ends):
        assert after.first_token_at is not None
        assert before.finished_at <= after.first_token_at


# Interleaving


def test_a_short_answer_ends_while_a_long_one_runs(make_engine: EngineFactory) -> None:
    engine = make_engine(prefill_chunk=16)
    long = engine.submit(request(span_of(*letters(300)), max_tokens=150))
    assert isinstance(long.next_event(WAIT), TokenEvent)
    short = collect(engine.submit(request(span_of(*letters(10)), max_tokens=3)))
    assert short.end.usage.finished_at < collect(long).end.usage.finished_at


def test_a_long_prompt_does_not_hold_up_an_answer(make_engine: EngineFactory) -> None:
    engine = make_engine(prefill_chunk=4)
    order = []
    before_forward(engine, lambda ids: order.append(ids.shape[1]))
    gate = Gate(engine)
    answering = engine.submit(request(span_of(*letters(2)), max_tokens=20))
    assert gate.reached.wait(WAIT)
    prefilling = engine.submit(request(span_of(*letters(80)), max_tokens=1))
    gate.opened.set()
    collect(answering), collect(prefilling)
    first, last = order.index(4), len(order) - 1 - order[::-1].index(4)
    steps_between = [size for size in order[first:last] if size == 1]
    assert len(steps_between) >= 18


def test_turns_of_one_session_run_in_order_and_others_overtake(make_engine: EngineFactory) -> None:
    engine = make_engine()
    gate = Gate(engine)
    first = engine.submit(request(span_of(*letters(10)), session_id="s", max_tokens=60))
    second = engine.submit(request(span_of(*letters(10)), session_id="s", max_tokens=2))
    other = engine.submit(request(span_of(*letters(10)), session_id="t", max_tokens=2))
    gate.opened.set()
    first_end, second_end, other_end = (finish_of(g) for g in (first, second, other))
    assert other_end.usage.finished_at < first_end.usage.finished_at
    assert second_end.usage.first_token_at is not None
    assert first_end.usage.finished_at <= second_end.usage.first_token_at
    assert second_end.usage.cached_tokens == 9


def test_all_requests_are_served_when_more_come_than_may_run(make_engine: EngineFactory) -> None:
    engine = make_engine(max_running=2)
    prompts = [span_of(*letters(10, number)) for number in range(7)]
    alone = [collect(engine.submit(request(prompt))).tokens for prompt in prompts]
    together = [engine.submit(request(prompt)) for prompt in prompts]
    assert [collect(generation).tokens for generation in together] == alone
    snapshot = engine.snapshot()
    assert (snapshot.running, snapshot.waiting) == (0, 0)
    assert store_of(engine).active == 0


# Cancelling


def test_cancel_takes_effect_within_one_token(make_engine: EngineFactory) -> None:
    engine = make_engine()
    generation = engine.submit(request(span_of(*letters(10)), session_id="s", max_tokens=400))
    assert isinstance(generation.next_event(WAIT), TokenEvent)
    generation.cancel()
    cancelled_at = time.time()
    rest = collect(generation)
    assert rest.end.reason == "cancelled"
    assert sum(event.sampled_at > cancelled_at for event in rest.events) <= 1
    # What was computed stays for the next turn.
    again = collect(engine.submit(request(span_of(*letters(10)), session_id="s")))
    assert again.end.usage.cached_tokens == 9


def test_cancel_while_waiting(make_engine: EngineFactory) -> None:
    engine = make_engine(max_running=1)
    gate = Gate(engine)
    running = engine.submit(request(span_of(*letters(10))))
    waiting = engine.submit(request(span_of(*letters(10))))
    assert gate.reached.wait(WAIT)
    waiting.cancel()
    gate.opened.set()
    end = finish_of(waiting)
    assert (end.reason, end.usage.completion_tokens, end.usage.first_token_at) == ("cancelled", 0, None)
    assert end.usage.finished_at < finish_of(running).usage.finished_at


def test_cancel_while_prefilling(make_engine: EngineFactory) -> None:
    engine = make_engine(prefill_chunk=16)
    gate = Gate(engine)
    generation = engine.submit(request(span_of(*letters(400)), session_id="s"))
    assert gate.reached.wait(WAIT)
    generation.cancel()
    gate.opened.set()
    end = finish_of(generation)
    assert (end.reason, end.usage.completion_tokens) == ("cancelled", 0)
    again = collect(engine.submit(request(span_of(*letters(400)), session_id="s")))
    assert again.end.usage.cached_tokens == 16


def test_nothing_comes_after_the_end(make_engine: EngineFactory) -> None:
    generation = make_engine().submit(request(span_of(*letters(10))))
    events = list(generation)
    assert sum(isinstance(event, FinishedEvent) for event in events) == 1
    generation.cancel()
    assert generation.next_event(0) is None
    assert list(generation) == []


# Ends


def test_a_prompt_without_room_for_an_answer_fails_with_numbers(make_engine: EngineFactory) -> None:
    engine = make_engine()
    failure = failure_of(engine.submit(request(span_of(*letters(TINY_CONTEXT)))))
    assert failure.code == "context_length_exceeded"
    assert "512" in failure.message
    fitting = collect(engine.submit(request(span_of(*letters(TINY_CONTEXT - 1)), max_tokens=None)))
    assert fitting.end.reason == "length"
    assert fitting.end.usage.completion_tokens == 1


def test_the_context_ends_an_answer(make_engine: EngineFactory) -> None:
    engine = make_engine()
    result = collect(engine.submit(request(span_of(*letters(500)), max_tokens=None)))
    assert result.end.reason == "length"
    assert result.end.usage.completion_tokens == len(result.tokens) == 12


def test_max_tokens_ends_an_answer(make_engine: EngineFactory) -> None:
    result = collect(make_engine().submit(request(span_of(*letters(10)), max_tokens=5)))
    assert result.end.reason == "length"
    assert len(result.tokens) == result.end.usage.completion_tokens == 5


def test_an_end_token_ends_an_answer_and_is_no_part_of_it(make_engine: EngineFactory) -> None:
    engine = make_engine()
    undisturbed = collect(engine.submit(request(span_of(*letters(10)), max_tokens=10)))
    end = undisturbed.tokens[4]
    object.__setattr__(engine._model, "end_tokens", frozenset({end}))
    result = collect(engine.submit(request(span_of(*letters(10)), max_tokens=10)))
    assert result.end.reason == "stop"
    assert result.tokens == undisturbed.tokens[: undisturbed.tokens.index(end)]
    assert result.text == engine.chat_format.decode(result.tokens)


def test_a_stop_string_ends_an_answer_before_it(make_engine: EngineFactory) -> None:
    engine = make_engine()
    spans = prompt_of(engine, "stop strings")
    params: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 60}
    undisturbed = collect(engine.submit(request(spans, **params))).text
    stop = undisturbed[20:24]
    result = collect(engine.submit(request(spans, stop=(stop,), **params)))
    assert result.end.reason == "stop"
    assert result.text == undisturbed[: undisturbed.index(stop)]
    assert all(event.text for event in result.events)
    assert engine.chat_format.decode(result.tokens).startswith(result.text)


# Randomness and continuation


def test_a_seed_decides_the_answer_whatever_runs_beside_it(make_engine: EngineFactory) -> None:
    engine = make_engine()
    spans = span_of(*letters(10))

    def sampled(seed: int | None) -> GenerationRequest:
        return request(spans, temperature=1.0, seed=seed, max_tokens=20)

    alone = collect(engine.submit(sampled(1))).tokens
    beside = [engine.submit(sampled(seed)) for seed in (2, 1, None, None, 3)]
    tokens = [collect(generation).tokens for generation in beside]
    assert tokens[1] == alone
    assert len(set(tokens)) == 5


def test_a_continued_answer_is_the_undisturbed_one(make_engine: EngineFactory) -> None:
    engine = make_engine()
    spans = prompt_of(engine, "continue")
    for seed in range(6):
        sampling: dict[str, Any] = {
            "temperature": 1.0,
            "top_k": 40,
            "top_p": 0.95,
            "seed": seed,
            "max_tokens": 30,
        }
        undisturbed = collect(engine.submit(request(spans, **sampling))).text
        sampling["stop"] = (undisturbed[18:20],)
        whole = collect(engine.submit(request(spans, **sampling)))
        for heard in range(0, len(whole.events) + 1, 3):
            generated = [token for event in whole.events[:heard] for token in event.token_ids]
            rest = collect(engine.submit(request(spans, generated=generated, **sampling)))
            assert "".join(event.text for event in whole.events[:heard]) + rest.text == whole.text
            assert (*generated, *rest.tokens) == whole.tokens
            assert rest.end.reason == whole.end.reason
            assert rest.end.usage.completion_tokens == whole.end.usage.completion_tokens
            assert rest.end.usage.prompt_tokens == whole.end.usage.prompt_tokens


def test_continuing_a_complete_answer_ends_at_once(make_engine: EngineFactory) -> None:
    engine = make_engine()
    spans = span_of(*letters(10))
    whole = collect(engine.submit(request(spans, max_tokens=6)))
    rest = collect(engine.submit(request(spans, generated=whole.tokens, max_tokens=6)))
    assert (rest.tokens, rest.end.reason, rest.end.usage.completion_tokens) == ((), "length", 6)


# Failures


def test_one_failing_request_leaves_the_others(make_engine: EngineFactory) -> None:
    engine = make_engine()
    before_forward(engine, poisoned)
    expected = collect(engine.submit(request(span_of(*letters(10)), max_tokens=30))).tokens
    good = engine.submit(request(span_of(*letters(10)), max_tokens=30))
    bad = engine.submit(request(span_of(*letters(10), POISON), session_id="s"))
    failure = failure_of(bad)
    assert failure.code == "engine_error"
    assert "poisoned" in failure.message
    assert collect(good).tokens == expected
    again = collect(engine.submit(request(span_of(*letters(10)), session_id="s", max_tokens=30)))
    assert again.tokens == expected
    assert store_of(engine).active == 0


def test_unknown_tokens_fail_their_request(make_engine: EngineFactory) -> None:
    engine = make_engine()
    assert failure_of(engine.submit(request(span_of(10, 5000)))).code == "engine_error"
    assert collect(engine.submit(request(span_of(10)))).end.reason == "length"


def test_a_crash_of_the_loop_fails_everybody_and_hangs_nobody(make_engine: EngineFactory) -> None:
    engine = make_engine(max_running=1)
    gate = Gate(engine)
    running = engine.submit(request(span_of(*letters(10))))
    waiting = engine.submit(request(span_of(*letters(10))))
    assert gate.reached.wait(WAIT)

    def broken() -> None:
        raise MemoryError("the scheduler is broken")

    engine._scheduler.next_prefill = broken  # type: ignore[method-assign]
    gate.opened.set()
    assert {failure_of(g).code for g in (running, waiting)} == {"engine_error"}
    assert failure_of(engine.submit(request(span_of(10)))).code == "engine_error"
    assert engine.status.state == "failed"


def test_shutdown_ends_running_waiting_and_later_requests(make_engine: EngineFactory) -> None:
    engine = make_engine(max_running=1)
    generations = [engine.submit(request(span_of(*letters(10)), max_tokens=400)) for _ in range(3)]
    assert isinstance(generations[0].next_event(WAIT), TokenEvent)
    engine.shutdown()
    assert {failure_of(generation).code for generation in generations} == {"engine_stopped"}
    assert failure_of(engine.submit(request(span_of(10)))).code == "engine_stopped"
    with pytest.raises(EngineStopped):
        engine.wait_until_ready(1)


# Starting


def test_status_tells_the_way_to_ready(tiny_folder: Path) -> None:
    seen: list[EngineStatus] = []
    engine = Engine(EngineConfig(model=str(tiny_folder), device="cpu"), on_status=seen.append)
    assert engine.status.state == "starting"
    with pytest.raises(RuntimeError, match="not ready"):
        _ = engine.chat_format
    early = engine.submit(request(span_of(*letters(10))))
    assert not engine.wait_until_ready(0)
    engine.start()
    assert engine.wait_until_ready(WAIT)
    assert collect(early).end.reason == "length"
    engine.shutdown()
    assert [status.state for status in seen] == ["loading", "ready", "failed"]
    assert seen[1].context_length == engine.context_length == TINY_CONTEXT


def test_a_model_that_is_not_there_fails_requests_and_waiters(tmp_path: Path) -> None:
    engine = Engine(EngineConfig(model=str(tmp_path / "missing")))
    early = engine.submit(request(span_of(10)))
    engine.start()
    with pytest.raises(ModelUnavailable, match="no folder"):
        engine.wait_until_ready(WAIT)
    engine.shutdown()  # a model that failed stays the reason
    with pytest.raises(ModelUnavailable, match="no folder"):
        engine.wait_until_ready(WAIT)
    assert failure_of(early).code == "model_unavailable"
    assert failure_of(engine.submit(request(span_of(10)))).code == "model_unavailable"
    assert engine.status.state == "failed"
    assert "no folder" in engine.status.detail


def test_an_engine_that_is_stopped_before_it_is_ready_says_so(tiny_folder: Path) -> None:
    engine = Engine(EngineConfig(model=str(tiny_folder), device="cpu"))
    threading.Timer(0.1, engine.shutdown).start()
    with pytest.raises(EngineStopped):
        engine.wait_until_ready(WAIT)


def test_a_model_with_recurrent_state_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, small(MambaConfig, hidden_size=32, num_hidden_layers=2, state_size=4))
    engine = Engine(EngineConfig(model=str(tmp_path), device="cpu"))
    engine.start()
    with pytest.raises(ModelUnavailable, match="other than keys and values"):
        engine.wait_until_ready(WAIT)
    engine.shutdown()


# Parameters


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"max_tokens": 0},
        {"stop": ("",)},
    ],
)
def test_sampling_parameters_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        GenerationRequest("id", "owner", [Span("message", ())])


@pytest.mark.parametrize(
    "wrong", [{"dtype": "int8"}, {"threads": 0}, {"kv_bytes": -1}, {"prefill_chunk": 0}, {"max_running": 0}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        EngineConfig(**wrong)
