"""Moving keys: every supported model and every variant of RoPE against the model's own code in transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as apply_to_part

from kvstore.rope import (
    HALVES,
    INTERLEAVED,
    LEARNED_POSITIONS,
    SCORE_BIAS,
    Dynamic,
    Linear,
    Llama3,
    LongRope,
    Proportional,
    RopeSpec,
    Scaling,
    Yarn,
    rope_of_layers,
    rotate,
)

HEAD_DIM = 16
LIMIT = 128  # `max_position_embeddings`, or the length before a context extension

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LIMIT},
    "yarn with fractional ends": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": LIMIT,
        "beta_fast": 16.0,
        "beta_slow": 0.5,
        "truncate": False,
        "attention_factor": 1.5,
    },
    "yarn with a step at the first pair": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": LIMIT,
        "beta_fast": LIMIT / (2 * math.pi),
        "beta_slow": LIMIT / (2 * math.pi),
    },
    "yarn without factor": {
        "rope_type": "yarn",
        "factor": None,
        "original_max_position_embeddings": LIMIT // 4,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": LIMIT,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": LIMIT,
        "short_factor": [1.0 + 0.1 * pair for pair in range(HEAD_DIM // 2)],
        "long_factor": [2.0 + 0.3 * pair for pair in range(HEAD_DIM // 2)],
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
}

# More than any model type takes; each ignores what it does not know.
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "max_position_embeddings": 256,
    "sliding_window": 512,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "global_head_dim": HEAD_DIM,
    "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY_GPTJ = {"vocab_size": 96, "n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, "n_positions": 256}
TINY_OF_TYPE: dict[str, dict[str, Any]] = {
    "bloom": {"vocab_size": 96, "hidden_size": 64, "n_layer": 3, "n_head": 4},
    "codegen": TINY_GPTJ,
    "falcon": {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
    "gemma3_text": {**TINY, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gptj": TINY_GPTJ,
    "jetmoe": {**TINY, "kv_channels": HEAD_DIM},
    "minimax_m2": {**TINY, "rotary_dim": 8},
    "mpt": {"vocab_size": 96, "d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 256},
    "phi3": {**TINY, "partial_rotary_factor": 0.5},
}


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    config = AutoConfig.for_model(model_type, **TINY_OF_TYPE.get(model_type, TINY), **changes)
    config._attn_implementation = "eager"
    return config


def tiny_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Random weights throughout: weights of norms that are all 1 would hide a norm after RoPE."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() == 1:
                weights.add_(0.3 * torch.randn_like(weights))
    return model


@torch.no_grad()
def computed(model: PreTrainedModel, tokens: torch.Tensor, start: int) -> DynamicCache:
    """KV of tokens at the positions from `start`."""
    cache = DynamicCache(config=model.config)
    positions = torch.arange(start, start + tokens.shape[1])
    model(input_ids=tokens, position_ids=positions[None], cache=cache, use_cache=True)
    return cache


def kv_of_layers(cache: DynamicCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each layer's keys and values, `[1, heads, tokens, head_dim]`."""
    layers: list[Any] = cache.layers
    return [(layer.keys, layer.values) for layer in layers]


@pytest.mark.parametrize("model_type", sorted(HALVES | INTERLEAVED | SCORE_BIAS))
def test_moved_keys_are_those_of_the_model(model_type: str) -> None:
    model = tiny_model(tiny_config(model_type))
    tokens, old = torch.randint(3, 96, (1, 24)), torch.arange(24)
    before = kv_of_layers(computed(model, tokens, 0))
    after = kv_of_layers(computed(model, tokens, 117))

    ropes = rope_of_layers(model.config.to_dict(), layers=len(before), head_dim=before[0][0].shape[-1])

    assert ropes is not None
    assert (model_type in SCORE_BIAS) == (set(ropes) == {None})
    for rope, (keys, _), (expected, _) in zip(ropes, before, after, strict=True):
        moved = keys if rope is None else rotate(keys, rope, old, old + 117)
        assert_close(moved, expected, rtol=0, atol=3e-5 * expected.abs().max().item())


@pytest.mark.parametrize(
    ("model_type", "rotated"),
    [
        ("cohere2", [True, True, True, False]),
        ("exaone4", [True, True, True, False]),
        ("llama4_text", [True, True, True, False]),
        ("smollm3", [True, True, True, False]),
        ("llama", [True] * 4),
    ],
)
def test_layers_without_rope_are_left_out(model_type: str, rotated: list[bool]) -> None:
    ropes = rope_of_layers(tiny_config(model_type).to_dict(), layers=4, head_dim=HEAD_DIM)
    assert ropes is not None
    assert [rope is not None for rope in ropes] == rotated


def test_exaone4_rotates_every_layer_where_it_has_no_window() -> None:
    config = tiny_config("exaone4", layer_types=["full_attention"] * 4).to_dict() | {"sliding_window": None}
    ropes = rope_of_layers(config, layers=4, head_dim=HEAD_DIM)
    assert ropes is not None
    assert None not in ropes


@pytest.mark.parametrize("model_type", sorted(LEARNED_POSITIONS))
def test_models_with_learned_positions_cannot_move_keys(model_type: str) -> None:
    config = AutoConfig.for_model(model_type).to_dict()
    assert rope_of_layers(config, layers=12, head_dim=64) is None
    assert RopeSpec.from_config(config, head_dim=64) is None


def test_falcon_with_alibi_does_not_rotate() -> None:
    config = AutoConfig.for_model("falcon", alibi=True).to_dict()
    assert rope_of_layers(config, layers=2, head_dim=64) == (None, None)


def llama_config(variant: str, **changes: Any) -> LlamaConfig:
    parameters = {"rope_theta": 9_000.0, **VARIANTS[variant]}
    return LlamaConfig(**{**TINY, "max_position_embeddings": LIMIT, "rope_parameters": parameters, **changes})


def at(rotary: torch.nn.Module, keys: torch.Tensor, positions: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Keys `[heads, tokens, head_dim]` as a model's own code rotates them, in one forward pass."""
    cos, sin = rotary(keys, positions[None], **kwargs)
    _, rotated = apply_to_part(keys[None], keys[None], cos, sin)
    assert isinstance(rotated, torch.Tensor)
    return rotated[0]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("old_start", "new_start"), [(0, 50), (50, 0), (3, 5 * LIMIT), (5 * LIMIT, 3), (2 * LIMIT, 100 * LIMIT)]
)
def test_every_variant_moves_keys_as_llama_does(variant: str, old_start: int, new_start: int) -> None:
    config = llama_config(variant)
    rope = RopeSpec.from_config(config.to_dict(), head_dim=HEAD_DIM)
    assert rope is not None
    keys, steps = torch.randn(3, 40, HEAD_DIM), torch.randperm(60)[:40].sort().values
    old, new = old_start + steps, new_start + steps

    # A module for each pass: those of "dynamic" remember the longest sequence.
    moved = rotate(at(LlamaRotaryEmbedding(config), keys, old), rope, old, new)

    assert_near(moved, at(LlamaRotaryEmbedding(config), keys, new))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("length", [1, LIMIT - 1, LIMIT, LIMIT + 1, 10 * LIMIT])
def test_inverse_frequencies_are_those_of_a_forward_pass(variant: str, length: int) -> None:
    config = llama_config(variant)
    rope = RopeSpec.from_config(config.to_dict(), head_dim=HEAD_DIM)
    assert rope is not None
    rotary = LlamaRotaryEmbedding(config)
    rotary(torch.zeros(1), torch.tensor([[length - 1]]))
    assert_close(rope.inverse_frequencies(length), rotary.inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize("variant", ["dynamic", "longrope"])
def test_lengths_say_in_which_sequence_keys_were_made_and_go(variant: str) -> None:
    config = llama_config(variant)
    rope = RopeSpec.from_config(config.to_dict(), head_dim=HEAD_DIM)
    assert rope is not None
    keys, long = torch.randn(2, 3 * LIMIT, HEAD_DIM), torch.arange(3 * LIMIT)
    piece, new = slice(10, 30), torch.arange(40, 60)

    made_in_long = at(LlamaRotaryEmbedding(config), keys, long)[:, piece]
    moved = rotate(made_in_long, rope, long[piece], new, old_length=3 * LIMIT, new_length=60)
    assert_near(moved, at(LlamaRotaryEmbedding(config), keys[:, piece], new))

    back = rotate(moved, rope, new, long[piece], old_length=60, new_length=3 * LIMIT)
    assert_near(back, made_in_long)
    assert (moved - rotate(made_in_long, rope, long[piece], new)).abs().max() > 0.01


def test_phi3_rotates_a_part_of_a_head_with_longrope() -> None:
    parameters = {
        "rope_type": "longrope",
        "short_factor": [1.1, 1.2, 1.3, 1.4],
        "long_factor": [2.0, 3.0, 5.0, 8.0],
        "rope_theta": 9_000.0,
        "partial_rotary_factor": 0.5,
    }
    config = Phi3Config(
        **TINY | {"max_position_embeddings": 4 * LIMIT},
        original_max_position_embeddings=LIMIT,
        rope_parameters=parameters,
    )
    rope = RopeSpec.from_config(config.to_dict(), head_dim=HEAD_DIM)
    assert rope is not None
    assert rope.rotary_dim == HEAD_DIM // 2
    keys, old = torch.randn(2, 20, HEAD_DIM), torch.arange(20)
    made = at(Phi3RotaryEmbedding(config), keys, old)
    for new in (old + 33, old + 2 * LIMIT):
        moved = rotate(made, rope, old, new)
        assert_near(moved, at(Phi3RotaryEmbedding(config), keys, new))
        assert torch.equal(moved[..., rope.rotary_dim :], made[..., rope.rotary_dim :])


def test_gemma3_rotates_two_types_of_layers_differently() -> None:
    parameters = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    }
    config = Gemma3TextConfig(**TINY_OF_TYPE["gemma3_text"], rope_parameters=parameters)
    rotary = Gemma3RotaryEmbedding(config)
    keys, old, new = torch.randn(2, 20, HEAD_DIM), torch.arange(20), torch.arange(300, 320)
    found = set()
    for layer_type in parameters:
        rope = RopeSpec.from_config(config.to_dict(), head_dim=HEAD_DIM, layer_type=layer_type)
        assert rope is not None
        found.add(rope)
        moved = rotate(at(rotary, keys, old, layer_type=layer_type), rope, old, new)
        assert_near(moved, at(rotary, keys, new, layer_type=layer_type))
    assert len(found) == 2


def test_keys_far_away_are_as_near_as_close_ones() -> None:
    """The model rounds angles to fp32; exact angles would be off by 0.01 here."""
    config = llama_config("default", max_position_embeddings=1_000_000)
    rope = RopeSpec.from_config(config.to_dict(), head_dim=HEAD_DIM)
    assert rope is not None
    rotary = LlamaRotaryEmbedding(config)
    keys, old = torch.randn(2, 100, HEAD_DIM), torch.arange(100)
    moved = rotate(at(rotary, keys, old), rope, old, old + 900_001)
    assert_near(moved, at(rotary, keys, old + 900_001))


OLDER_NAMES: list[dict[str, Any]] = [
    {"model_type": "llama", "rope_theta": 500_000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {
        "model_type": "qwen2",
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 512,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": LIMIT},
    },
    {
        "model_type": "llama",
        "rope_theta": 500_000.0,
        "max_position_embeddings": 1024,
        "rope_scaling": VARIANTS["llama3"],
    },
    {
        "model_type": "mistral",
        "rope_theta": 10_000.0,
        "max_position_embeddings": LIMIT,
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    },
    {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 20_000.0},
    {"model_type": "stablelm", "partial_rotary_factor": 0.5, "rope_theta": 20_000.0},
    {
        "model_type": "phi3",
        "rope_theta": 10_000.0,
        "max_position_embeddings": 4 * LIMIT,
        "original_max_position_embeddings": LIMIT,
        "partial_rotary_factor": 1.0,
        "rope_scaling": {
            "type": "yarn",
            "short_factor": [1.0] * (HEAD_DIM // 2),
            "long_factor": [2.0] * (HEAD_DIM // 2),
        },
    },
]


@pytest.mark.parametrize("older", OLDER_NAMES, ids=lambda older: older["model_type"])
def test_older_names_mean_the_same(older: dict[str, Any]) -> None:
    today = AutoConfig.for_model(**{**TINY, **{name: _copied(value) for name, value in older.items()}})
    rope = RopeSpec.from_config(older, head_dim=HEAD_DIM)
    assert rope is not None
    assert rope == RopeSpec.from_config(today.to_dict(), head_dim=HEAD_DIM)


def _copied(value: Any) -> Any:
    """Configurations write into the dictionaries that they get."""
    return dict(value) if isinstance(value, dict) else value


def test_double_precision_keys_stay_precise() -> None:
    keys, old = torch.randn(50, HEAD_DIM, dtype=torch.float64), torch.arange(50)
    rope = RopeSpec(HEAD_DIM, HEAD_DIM, False, 10_000.0)
    there_and_back = rotate(rotate(keys, rope, old, old + 777), rope, old + 777, old)
    assert_close(there_and_back, keys, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_low_precision_keys_are_rounded_once(dtype: torch.dtype, interleaved: bool) -> None:
    rope = RopeSpec(HEAD_DIM, 12, interleaved, 10_000.0)
    keys, old, new = torch.randn(4, 50, HEAD_DIM).to(dtype), torch.arange(50), torch.arange(50) + 777
    moved = rotate(keys, rope, old, new)
    assert moved.dtype == dtype
    assert torch.equal(moved, rotate(keys.float(), rope, old, new).to(dtype))


def test_bf16_keys_are_the_models_but_for_their_roundings() -> None:
    """One rounding where the model stored the keys, and one where they were moved: each of half a unit in the last
    place, which for a pair is at most 2**-8 of its length in either dimension."""
    config = llama_config("default")
    rope = RopeSpec.from_config(config.to_dict(), head_dim=HEAD_DIM)
    assert rope is not None
    rotary = LlamaRotaryEmbedding(config)
    keys, old = torch.randn(2, 60, HEAD_DIM), torch.arange(60)
    moved = rotate(at(rotary, keys, old).bfloat16(), rope, old, old + 99).float()
    pairs = torch.stack(keys.chunk(2, dim=-1)).norm(dim=0).repeat(1, 1, 2)
    assert ((moved - at(rotary, keys, old + 99)).abs() <= 2 * 2.0**-8 * pairs).all()


scalings = st.sampled_from(
    [
        Scaling(),
        Linear(3.0),
        Dynamic(2.0, LIMIT),
        Yarn(4.0, LIMIT, 32.0, 1.0, True),
        Llama3(8.0, LIMIT, 1.0, 4.0),
        LongRope(LIMIT, (1.0, 1.1, 1.2, 1.3), (2.0, 2.5, 3.0, 4.0)),
        Proportional(0.5, 1.0),
    ]
)
ropes = st.builds(
    RopeSpec,
    head_dim=st.sampled_from([8, 12]),
    rotary_dim=st.just(8),
    interleaved=st.booleans(),
    theta=st.sampled_from([1_000.0, 10_000.0, 1_000_000.0]),
    scaling=scalings,
)


def positions(largest: int) -> st.SearchStrategy[torch.Tensor]:
    return st.lists(st.integers(0, largest), min_size=5, max_size=5).map(torch.tensor)


@settings(max_examples=100, deadline=None)
@given(ropes, positions(1_000_000), positions(1_000_000), positions(1_000_000))
def test_moves_add_up_and_return(rope: RopeSpec, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    keys = torch.randn(2, 3, 5, rope.head_dim)
    original = keys.clone()
    at_b = rotate(keys, rope, a, b)
    assert_near(rotate(at_b, rope, b, a), keys)
    assert_near(rotate(at_b, rope, b, c), rotate(keys, rope, a, c))
    assert torch.equal(rotate(keys, rope, a, a), keys)
    assert torch.equal(at_b[..., rope.rotary_dim :], keys[..., rope.rotary_dim :])
    assert torch.equal(at_b[1, 2], rotate(keys[1, 2], rope, a, b))
    assert torch.equal(keys, original)


@settings(max_examples=100, deadline=None)
@given(ropes, positions(200), st.integers(0, 300))
def test_a_moved_block_keeps_its_dot_products(rope: RopeSpec, old: torch.Tensor, distance: int) -> None:
    keys = torch.randn(5, rope.head_dim)
    length = 600
    moved = rotate(keys, rope, old, old + distance, old_length=length, new_length=length)
    assert_close(moved @ moved.T, keys @ keys.T, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("variant", ["default", "llama3", "yarn"])
def test_an_answer_after_a_moved_prefix_is_the_same(variant: str) -> None:
    model = tiny_model(llama_config(variant, max_position_embeddings=1024, initializer_range=0.1))
    prefix, question = torch.randint(3, 96, (1, 30)), torch.randint(3, 96, (1, 8))
    ropes = rope_of_layers(model.config.to_dict(), layers=4, head_dim=HEAD_DIM)
    assert ropes is not None
    old, k = torch.arange(30), 400

    unmoved, moved = DynamicCache(), DynamicCache()
    for layer, (keys, values) in enumerate(kv_of_layers(computed(model, prefix, 0))):
        rope = ropes[layer]
        assert rope is not None
        unmoved.update(keys, values, layer)
        moved.update(rotate(keys, rope, old, old + k), values, layer)

    expected = answer(model, question, computed(model, prefix, k), k + 30)
    assert_close(answer(model, question, moved, k + 30), expected, rtol=1e-4, atol=1e-5)
    assert (answer(model, question, unmoved, k + 30) - expected).abs().max() > 0.01


@torch.no_grad()
def answer(model: PreTrainedModel, tokens: torch.Tensor, cache: DynamicCache, start: int) -> torch.Tensor:
    """Logits `[tokens, vocabulary]` of tokens that follow what the cache has."""
    places = torch.arange(start, start + tokens.shape[1])[None]
    logits = model(input_ids=tokens, position_ids=places, cache=cache).logits
    assert isinstance(logits, torch.Tensor)
    return logits[0]


LLAMA = {"model_type": "llama", "max_position_embeddings": LIMIT}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "brand_new"}, "brand_new"),
        ({}, "None"),
        ({"model_type": "qwen2_vl_text", "rope_parameters": {"rope_theta": 1e4}}, "qwen2_vl_text"),
        (LLAMA | {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "spiral"),
        (LLAMA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor"),
        (LLAMA | {"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
        (LLAMA, "rope_theta"),
        (LLAMA | {"rope_parameters": {"rope_theta": 1.0}}, "theta"),
        (LLAMA | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "part of a head"),
        (
            LLAMA | {"rope_parameters": VARIANTS["longrope"] | {"rope_theta": 1e4, "long_factor": [1.0]}},
            "longrope",
        ),
        ({"model_type": "phi", "rope_theta": 1e4}, "partial_rotary_factor"),
        (
            {"model_type": "phi", "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.2}},
            "pairs",
        ),
        ({"model_type": "phimoe", "rope_parameters": {"rope_type": "longrope"}}, "phimoe"),
        ({"model_type": "cohere2", "rope_parameters": {"rope_theta": 1e4}}, "layer_type"),
        ({"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4}, "layer types"),
        (
            {"model_type": "olmo3", "rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "full_attention",
        ),
    ],
)
def test_what_is_not_known_is_refused(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RopeSpec.from_config(config, head_dim=HEAD_DIM)


def test_layers_must_be_described() -> None:
    config = tiny_config("smollm3").to_dict()
    with pytest.raises(ValueError, match="5 layers"):
        rope_of_layers(config, layers=5, head_dim=HEAD_DIM)
    with pytest.raises(ValueError, match="no_rope_layers"):
        rope_of_layers(config | {"no_rope_layers": None}, layers=4, head_dim=HEAD_DIM)
    with pytest.raises(ValueError, match="None"):
        rope_of_layers({}, layers=4, head_dim=HEAD_DIM)


ROPE = RopeSpec(8, 8, False, 10_000.0)
TWO = torch.arange(2)


@pytest.mark.parametrize(
    ("keys", "old", "new", "named"),
    [
        (torch.ones(2, 8, dtype=torch.int64), TWO, TWO, "floating-point"),
        (torch.ones(2, 6), TWO, TWO, "tokens, 8"),
        (torch.ones(8), TWO, TWO, "tokens, 8"),
        (torch.ones(3, 8), TWO, TWO, r"int64 \[3\]"),
        (torch.ones(2, 8), TWO, torch.arange(3), r"int64 \[2\]"),
        (torch.ones(2, 8), TWO.float(), TWO, "float32"),
        (torch.ones(2, 8), TWO[None], TWO, r"int64 \[2\]"),
    ],
)
def test_bad_input_is_refused(keys: torch.Tensor, old: torch.Tensor, new: torch.Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        rotate(keys, ROPE, old, new)


def test_a_sequence_must_have_the_positions() -> None:
    rope = RopeSpec(8, 8, False, 10_000.0, Dynamic(2.0, LIMIT))
    with pytest.raises(ValueError, match="no position 1"):
        rotate(torch.ones(2, 8), rope, TWO, TWO, new_length=1)


@pytest.mark.parametrize("rotary_dim", [0, 3, 10])
def test_pairs_must_fit_a_head(rotary_dim: int) -> None:
    with pytest.raises(ValueError, match="pairs"):
        RopeSpec(8, rotary_dim, False, 10_000.0)


def test_no_tokens_and_no_heads_are_fine() -> None:
    rope = RopeSpec(8, 8, False, 10_000.0, Dynamic(2.0, LIMIT))
    none = torch.arange(0)
    assert rotate(torch.ones(3, 0, 8), rope, none, none).shape == (3, 0, 8)
    assert rotate(torch.ones(0, 2, 8), rope, TWO, TWO).shape == (0, 2, 8)


def test_specs_can_be_compared_and_hashed() -> None:
    config = llama_config("longrope").to_dict()
    first, second = (RopeSpec.from_config(config, head_dim=HEAD_DIM) for _ in range(2))
    assert first == second
    assert len({first, second, ROPE}) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("places", ["cpu", "cuda"])
def test_keys_on_a_gpu_stay_there(places: str) -> None:
    keys, old, new = torch.randn(3, 20, 8), torch.arange(20), torch.arange(20) + 5_000
    moved = rotate(keys.cuda(), ROPE, old.to(places), new.to(places))
    assert moved.is_cuda
    assert_near(moved.cpu(), rotate(keys, ROPE, old, new))
