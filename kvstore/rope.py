"""Rotary position embeddings (RoPE): how keys depend on their positions, and how they are moved to others.

RoPE (Su et al. 2021, arXiv 2104.09864) turns each pair of a key's dimensions by an angle: the key's position times
the pair's own inverse frequency. Keys are kept as the model made them, already turned. Turning them further by the
difference of two angles gives the keys that the model would have made at another position.

`RopeSpec.from_config` reads the configurations of transformers 5 and computes what its models compute. It knows the
model types in the first tables below, each of which is tested against its model. Any other type is refused with a
ValueError, because a wrong guess would corrupt keys without a sign. Models are left out on purpose where one angle a
pair does not say it all: those that normalise keys with learned weights after RoPE, have positions in several axes
(images), compress keys (multi-head latent attention), or carry a recurrent state along.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# A pair is dimension i of the first half and i of the second half of the rotated dimensions.
HALVES = _names(
    "afmoe apertus arcee bitnet cwm diffllama doge dots1 exaone4 exaone_moe falcon flex_olmo gemma gemma2 gemma3_text "
    "gemma4_text glm4_moe gpt_neox gpt_neox_japanese gpt_oss granite granitemoe hyperclovax jais2 jetmoe llama "
    "minimax_m2 ministral ministral3 mistral mixtral nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 phimoe qwen2 "
    "qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma"
)
# A pair is dimensions 2i and 2i + 1.
INTERLEAVED = _names("codegen cohere cohere2 ernie4_5 ernie4_5_moe glm glm4 gptj helium llama4_text")
# Keys are not rotated: positions are added to the token embeddings, ...
LEARNED_POSITIONS = _names("biogpt gpt2 gpt_bigcode gpt_neo openai-gpt opt xglm")
# ... or a bias is added to the attention scores (ALiBi).
SCORE_BIAS = _names("bloom mpt")

# Models that can rotate a part of a head's dimensions only.
PARTIAL = _names(
    "glm glm4 glm4_moe gpt_neox gpt_neox_japanese minimax_m2 nemotron persimmon phi phi3 stablelm"
)
# Models whose code fixes the base of the frequencies and whose configurations count the rotated dimensions.
FIXED = _names("codegen gptj")
# Models whose layers with full attention do not rotate keys, while those with a sliding window do.
ONLY_SLIDING = _names("afmoe cohere2 exaone4 exaone_moe")
# Models that leave single layers unrotated, whatever their type.
SOME_LAYERS = _names("llama4_text smollm3")
# Models whose types of layers rotate keys differently.
BY_LAYER_TYPE = _names("gemma3_text gemma4_text olmo3")


@dataclass(frozen=True)
class Scaling:
    """How a variant of RoPE derives a layer's inverse frequencies. This one is the original, without any scaling.

    Attention factors, by which yarn and longrope stretch keys, are not kept: they do not depend on positions in any
    supported model, so they are in the keys already and stay as they are.
    """

    by_length: ClassVar[bool] = False  # whether frequencies depend on the length of the sequence

    def inverse_frequencies(self, theta: float, dimensions: int, sequence_length: int) -> torch.Tensor:
        """Angles per position, fp32 `[dimensions / 2]`, in the order of operations that transformers uses."""
        return 1.0 / _powers(theta, dimensions)


@dataclass(frozen=True)
class Linear(Scaling):
    """Positions are divided by `factor` (Chen et al. 2023, arXiv 2306.15595)."""

    factor: float

    def inverse_frequencies(self, theta: float, dimensions: int, sequence_length: int) -> torch.Tensor:
        return 1.0 / _powers(theta, dimensions) / self.factor


@dataclass(frozen=True)
class Dynamic(Scaling):
    """The base grows with sequences longer than `max_positions` (dynamic NTK, by the Reddit users bloc97 and
    emozilla)."""

    by_length = True
    factor: float
    max_positions: int

    def inverse_frequencies(self, theta: float, dimensions: int, sequence_length: int) -> torch.Tensor:
        # An fp32 tensor, as in transformers, so that its rounding is the same.
        length = torch.tensor(max(sequence_length, self.max_positions))
        growth = (self.factor * length / self.max_positions) - (self.factor - 1)
        return 1.0 / _powers(theta * growth ** (dimensions / (dimensions - 2)), dimensions)


@dataclass(frozen=True)
class Yarn(Scaling):
    """Slow pairs are divided by `factor`, fast ones are not, with a ramp between pairs that turn `slow_turns` and
    `fast_turns` times within `original_positions` (Peng et al. 2023, arXiv 2309.00071). `whole_pairs` moves the
    ramp's ends out to whole pairs."""

    factor: float
    original_positions: int
    fast_turns: float
    slow_turns: float
    whole_pairs: bool

    def inverse_frequencies(self, theta: float, dimensions: int, sequence_length: int) -> torch.Tensor:
        low = self._pair_that_turns(self.fast_turns, theta, dimensions)
        high = self._pair_that_turns(self.slow_turns, theta, dimensions)
        if self.whole_pairs:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dimensions - 1)
        if low == high:
            high += 0.001  # a step, not a division by zero
        ramp = ((torch.arange(dimensions // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        unscaled_share = 1 - ramp
        powers = _powers(theta, dimensions)
        return 1.0 / (self.factor * powers) * (1 - unscaled_share) + 1.0 / powers * unscaled_share

    def _pair_that_turns(self, turns: float, theta: float, dimensions: int) -> float:
        """The pair, as a fraction, that makes so many full turns within the original positions."""
        return dimensions * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))


@dataclass(frozen=True)
class Llama3(Scaling):
    """Pairs that turn less than `low_turns` times within `original_positions` are divided by `factor`, those that
    turn more than `high_turns` times are not, with a ramp between (Llama 3.1, arXiv 2407.21783)."""

    factor: float
    original_positions: int
    low_turns: float
    high_turns: float

    def inverse_frequencies(self, theta: float, dimensions: int, sequence_length: int) -> torch.Tensor:
        unscaled = 1.0 / _powers(theta, dimensions)
        turns = self.original_positions / (2 * math.pi / unscaled)
        unscaled_share = ((turns - self.low_turns) / (self.high_turns - self.low_turns)).clamp(0, 1)
        return (1 - unscaled_share) * unscaled / self.factor + unscaled_share * unscaled


@dataclass(frozen=True)
class LongRope(Scaling):
    """Each pair has a divisor of its own for sequences up to `original_positions`, and another for longer ones (Ding
    et al. 2024, arXiv 2402.13753)."""

    by_length = True
    original_positions: int
    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]

    def inverse_frequencies(self, theta: float, dimensions: int, sequence_length: int) -> torch.Tensor:
        long = sequence_length > self.original_positions
        return 1.0 / (
            torch.tensor(self.long_factors if long else self.short_factors) * _powers(theta, dimensions)
        )


@dataclass(frozen=True)
class Proportional(Scaling):
    """The slowest pairs do not turn at all, so that only `share` of a head tells positions; the others are divided by
    `factor` (Gemma 4)."""

    share: float
    factor: float

    def inverse_frequencies(self, theta: float, dimensions: int, sequence_length: int) -> torch.Tensor:
        frequencies = 1.0 / _powers(theta, dimensions) / self.factor
        frequencies[int(self.share * dimensions // 2) :] = 0.0
        return frequencies


def _powers(theta: float | torch.Tensor, dimensions: int) -> torch.Tensor:
    """`theta ** (2 i / dimensions)` for each pair i, fp32."""
    return torch.pow(theta, torch.arange(0, dimensions, 2).float() / dimensions)


@dataclass(frozen=True)
class RopeSpec:
    """How one layer rotates its keys.

    Of a key's `head_dim` dimensions the first `rotary_dim` are rotated, in pairs that are neighbours (`interleaved`)
    or lie half of `rotary_dim` apart. `theta` is the base of the pairs' frequencies, which `scaling` may change.
    """

    head_dim: int
    rotary_dim: int
    interleaved: bool
    theta: float
    scaling: Scaling = Scaling()

    def __post_init__(self) -> None:
        if not 2 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise ValueError(f"{self.rotary_dim} of {self.head_dim} dimensions cannot be rotated in pairs")
        if self.theta <= 1:
            raise ValueError(f"theta must be greater than 1, not {self.theta}")
        if isinstance(self.scaling, Dynamic) and self.rotary_dim < 4:
            raise ValueError("dynamic scaling takes at least 4 rotated dimensions")
        if isinstance(self.scaling, LongRope):
            factors = (self.scaling.short_factors, self.scaling.long_factors)
            if any(len(group) != self.rotary_dim // 2 for group in factors):
                raise ValueError(
                    f"longrope must have {self.rotary_dim // 2} factors, one for each rotated pair"
                )

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, head_dim: int, layer_type: str | None = None
    ) -> RopeSpec | None:
        """The rotary embedding of the layers of one type.

        `config` is the dict form of a transformers text configuration (`config.to_dict()`), or one of an older
        version that states the same under older names. `layer_type` is the layer's entry in `layer_types`, for models
        whose types of layers differ. Returns None where keys are not rotated. Raises ValueError for a model type or a
        variant of RoPE that is not known, and where something is missing that cannot be derived.

        SmolLM3 and Llama 4 leave single layers unrotated, whatever their type: see `rope_of_layers`.
        """
        model_type = config.get("model_type")
        if model_type in LEARNED_POSITIONS | SCORE_BIAS or (model_type == "falcon" and config.get("alibi")):
            return None
        if model_type not in HALVES | INTERLEAVED:
            raise ValueError(f"it is not known how models of type {model_type!r} rotate their keys")
        if model_type in ONLY_SLIDING and not _rotates_with_window(config, layer_type):
            return None
        parameters = _parameters(config, layer_type)
        if parameters is None:
            return None
        scaling = _scaling(parameters, config)
        whole = isinstance(scaling, Proportional)
        return cls(
            head_dim=head_dim,
            rotary_dim=head_dim if whole else _rotary_dim(parameters, config, head_dim),
            interleaved=model_type in INTERLEAVED,
            theta=float(_required(parameters, "rope_theta")),
            scaling=scaling,
        )

    def inverse_frequencies(self, sequence_length: int) -> torch.Tensor:
        """Radians that each pair turns per position, fp32 `[rotary_dim / 2]`, on the CPU.

        They are those of a forward pass whose largest position is `sequence_length - 1`. Only "dynamic" and
        "longrope" depend on it. In transformers a dynamic model has a memory: once grown, its frequencies stay at the
        longest sequence seen until a sequence shorter than `max_position_embeddings` resets them. Here they are those
        of a model that starts with this sequence.
        """
        return self.scaling.inverse_frequencies(self.theta, self.rotary_dim, sequence_length)

    def angles(self, positions: torch.Tensor, length: int | None = None) -> torch.Tensor:
        """Angles, in radians, by which the keys at positions (int64 `[tokens]`, at least one) are rotated in a
        sequence of so many tokens: by default the shortest that has the positions. fp64 `[tokens, rotary_dim / 2]`
        on the positions' device.

        Models round an angle to fp32, which matters at large positions (at position 100,000 by up to 0.004). So the
        products are fp32 here too; fp64 is for the differences of angles.
        """
        if self.scaling.by_length:
            shortest = int(positions.max()) + 1
            length = shortest if length is None else length
            if length < shortest:
                raise ValueError(f"a sequence of {length} tokens has no position {shortest - 1}")
        frequencies = self.inverse_frequencies(length or 0).to(positions.device)
        return (positions.float()[:, None] * frequencies).double()


def rope_of_layers(
    config: Mapping[str, Any], *, layers: int, head_dim: int
) -> tuple[RopeSpec | None, ...] | None:
    """How each layer of a model rotates its keys: None for layers that do not. None instead of a tuple where positions
    are added to the token embeddings, so that keys cannot be moved at all. See `RopeSpec.from_config`, also for the
    ValueErrors."""
    model_type = config.get("model_type")
    if model_type in LEARNED_POSITIONS:
        return None
    types = config.get("layer_types") or [None] * layers
    # Despite its name, 1 in `no_rope_layers` stands for a layer that is rotated.
    rotated = _required(config, "no_rope_layers") if model_type in SOME_LAYERS else [1] * layers
    if len(types) != layers or len(rotated) != layers:
        raise ValueError(f"the configuration does not describe {layers} layers")
    return tuple(
        RopeSpec.from_config(config, head_dim=head_dim, layer_type=layer_type) if rotates else None
        for layer_type, rotates in zip(types, rotated, strict=True)
    )


def rotate(
    keys: torch.Tensor,
    rope: RopeSpec,
    old_positions: torch.Tensor,
    new_positions: torch.Tensor,
    *,
    old_length: int | None = None,
    new_length: int | None = None,
) -> torch.Tensor:
    """Keys moved from old to new positions: a new tensor.

    `keys` is `[..., tokens, head_dim]` of any float dtype on any device, its leading dimensions being layers or heads
    that share `rope`; positions are int64 `[tokens]`. For "dynamic" and "longrope", `old_length` is the length of the
    sequence in whose forward pass the keys were made and `new_length` that of the one that they join: by default the
    shortest that have these positions. Other variants do not look at lengths.

    Each pair is turned once, by the difference of both angles, in fp32 (fp64 keys in fp64), and rounded once to the
    keys' dtype. Keys that stay where they are do not change. Raises ValueError where shapes or dtypes do not fit.
    """
    _check(keys, rope, old_positions, new_positions)
    moved = keys.clone()
    if keys.numel() == 0:
        return moved
    turn = rope.angles(new_positions, new_length) - rope.angles(
        old_positions.to(new_positions.device), old_length
    )
    dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32
    cos, sin = turn.cos().to(keys.device, dtype), turn.sin().to(keys.device, dtype)
    first, second = (part.to(dtype) for part in _pairs(keys, rope))
    to_first, to_second = _pairs(moved, rope)
    to_first.copy_(first * cos - second * sin)
    to_second.copy_(second * cos + first * sin)
    return moved


def _pairs(keys: torch.Tensor, rope: RopeSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first and the second dimension of each rotated pair."""
    half, end = rope.rotary_dim // 2, rope.rotary_dim
    if rope.interleaved:
        return keys[..., 0:end:2], keys[..., 1:end:2]
    return keys[..., :half], keys[..., half:end]


def _check(keys: torch.Tensor, rope: RopeSpec, *positions: torch.Tensor) -> None:
    if not keys.dtype.is_floating_point:
        raise ValueError(f"keys must be floating-point numbers, not {keys.dtype}")
    if keys.dim() < 2 or keys.shape[-1] != rope.head_dim:
        raise ValueError(f"keys must be [..., tokens, {rope.head_dim}], not {list(keys.shape)}")
    for group in positions:
        if group.dtype != torch.int64 or group.shape != keys.shape[-2:-1]:
            raise ValueError(
                f"positions must be int64 [{keys.shape[-2]}], not {group.dtype} {list(group.shape)}"
            )


def _rotates_with_window(config: Mapping[str, Any], layer_type: str | None) -> bool:
    """Whether a layer of a model whose full-attention layers are not rotated is rotated."""
    if config["model_type"].startswith("exaone") and config.get("sliding_window") is None:
        return True
    if layer_type is None:
        raise ValueError(
            f"layer_type must be given for {config['model_type']!r}, whose types of layers differ"
        )
    return layer_type == "sliding_attention"


def _parameters(config: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any] | None:
    """The RoPE parameters of a type of layers in today's names. None for a type that is not rotated."""
    if config["model_type"] in FIXED:
        return {"rope_theta": 10_000.0}
    parameters = config.get("rope_parameters") or _older_parameters(config)
    nested = [name for name, entry in parameters.items() if isinstance(entry, Mapping)]
    if not nested and config["model_type"] not in BY_LAYER_TYPE:
        return dict(parameters)
    if layer_type is None or layer_type not in parameters:
        raise ValueError(f"rope_parameters describe layer types {nested}, not {layer_type!r}")
    chosen: Mapping[str, Any] | None = parameters[layer_type]
    return chosen


def _older_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """RoPE parameters as transformers named them before version 5."""
    parameters = dict(config.get("rope_scaling") or {})
    names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    for name, gpt_neox_name in names.items():
        value = config.get(name, config.get(gpt_neox_name))
        if value is not None:
            parameters.setdefault(name, value)
    if config["model_type"] in PARTIAL:
        _required(parameters, "partial_rotary_factor")  # its default differs from model to model
    return parameters


def _rotary_dim(parameters: Mapping[str, Any], config: Mapping[str, Any], head_dim: int) -> int:
    """How many of a head's dimensions are rotated."""
    model_type = config["model_type"]
    if model_type in FIXED:
        return int(_required(config, "rotary_dim"))
    share = parameters.get("partial_rotary_factor")
    if share is None:
        return head_dim
    if share != 1.0 and model_type not in PARTIAL:
        raise ValueError(f"models of type {model_type!r} do not rotate a part of a head")
    return int(head_dim * share)


def _scaling(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> Scaling:
    """The variant of RoPE that the parameters describe."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    model_type = config["model_type"]
    if model_type == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # under the names of its first releases
    if model_type == "phimoe" and kind != "default":
        raise ValueError("'phimoe' stretches keys by a factor that depends on the sequence's length")
    match kind:
        case "default":
            return Scaling()
        case "linear":
            return Linear(float(_required(parameters, "factor")))
        case "dynamic":
            return Dynamic(
                float(_required(parameters, "factor")), _required(config, "max_position_embeddings")
            )
        case "yarn":
            return _yarn(parameters, config)
        case "llama3":
            return Llama3(
                factor=float(_required(parameters, "factor")),
                original_positions=_original_positions(parameters, config),
                low_turns=float(_required(parameters, "low_freq_factor")),
                high_turns=float(_required(parameters, "high_freq_factor")),
            )
        case "longrope":
            return LongRope(
                original_positions=_original_positions(parameters, config),
                short_factors=_numbers(parameters, "short_factor"),
                long_factors=_numbers(parameters, "long_factor"),
            )
        case "proportional":
            share = parameters.get("partial_rotary_factor", 1.0)
            return Proportional(share=float(share), factor=float(parameters.get("factor", 1.0)))
    raise ValueError(f"RoPE of type {kind!r} of model type {model_type!r} is not known")


def _yarn(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> Yarn:
    original = _original_positions(parameters, config)
    factor = parameters.get("factor")
    if factor is None:
        factor = _required(config, "max_position_embeddings") / original
    return Yarn(
        factor=float(factor),
        original_positions=original,
        fast_turns=float(parameters.get("beta_fast") or 32),
        slow_turns=float(parameters.get("beta_slow") or 1),
        # transformers reads this one beside the types of layers, not within
        whole_pairs=bool((config.get("rope_parameters") or parameters).get("truncate", True)),
    )


def _original_positions(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """The number of positions that the model was trained with before its context was extended."""
    name = "original_max_position_embeddings"
    for source in (parameters, config):
        if source.get(name) is not None:
            return int(source[name])
    return int(_required(config, "max_position_embeddings"))


def _required(parameters: Mapping[str, Any], name: str) -> Any:
    if parameters.get(name) is None:
        raise ValueError(f"the configuration lacks {name!r}")
    return parameters[name]


def _numbers(parameters: Mapping[str, Any], name: str) -> tuple[float, ...]:
    return tuple(float(number) for number in _required(parameters, name))
