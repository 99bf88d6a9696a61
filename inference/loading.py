"""Loads a model from its folder and finds out what the engine must know of it."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils.logging import disable_progress_bar

from inference.chat_format import ChatFormat
from inference.config import EngineConfig
from inference.errors import ModelUnavailable
from kvstore import KVSpec, RopeSpec, rope_of_layers

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# For models that do not say how long a context they were trained on.
ASSUMED_CONTEXT_LENGTH = 2048
# Values of each weight that go into the fingerprint. Training changes all of a weight, so a sample tells.
FINGERPRINT_SAMPLE = 64


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. `context_length` is in tokens; sampling any of `end_tokens` ends an answer."""

    model: PreTrainedModel
    chat_format: ChatFormat
    kv_spec: KVSpec
    device: torch.device
    context_length: int
    vocabulary_size: int
    end_tokens: frozenset[int]


def load(folder: Path, config: EngineConfig) -> LoadedModel:
    """Load the model in `folder` onto the configured device. Raises ModelUnavailable when it cannot be used."""
    device = _device(config.device)
    dtype = _dtype(config.dtype, device)
    disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        # transformers picks the attention: torch's fused one, or its own where a model's attention is peculiar.
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, use_safetensors=True
        )
        model = model.to(device).eval()
    except Exception as error:  # broken files make these libraries raise anything
        raise ModelUnavailable(f"The model in {folder} cannot be loaded: {error}") from error
    _check_cache_kind(model, folder)
    chat_format = ChatFormat(_quiet_backend(tokenizer, folder))
    return LoadedModel(
        model=model,
        chat_format=chat_format,
        kv_spec=_kv_spec(model, folder, device, dtype),
        device=device,
        context_length=_context_length(model),
        vocabulary_size=_vocabulary_size(model),
        end_tokens=_end_tokens(model, tokenizer, chat_format),
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ModelUnavailable(f"There is no device {name!r}: {error}") from error


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[name]


def _check_cache_kind(model: PreTrainedModel, folder: Path) -> None:
    """Only models whose whole state is keys and values can be cut back to a prefix, which all reuse rests on."""
    config = model.config
    layers = DynamicCache(config=config).layers
    kinds = {type(layer) for layer in layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    if config.is_encoder_decoder or model._is_stateful or kinds:
        raise ModelUnavailable(
            f"The model in {folder} ({config.model_type}) keeps state other than keys and values, which cannot be"
            " cut back to a common prefix. Choose a model with plain attention in all layers."
        )


def _quiet_backend(tokenizer: PreTrainedTokenizerBase, folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer, without the padding and truncation that its file may switch on."""
    if not tokenizer.is_fast:
        raise ModelUnavailable(f"The model in {folder} has no tokenizer.json.")
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    return tokenizer


def _kv_spec(model: PreTrainedModel, folder: Path, device: torch.device, dtype: torch.dtype) -> KVSpec:
    """Shapes as a pass over one token shows them, because each architecture's configuration names them differently."""
    cache: Any = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=device), cache=cache, use_cache=True)
    shapes = {tuple(part.shape) for layer in cache.layers for part in (layer.keys, layer.values)}
    if len(shapes) != 1:
        raise ModelUnavailable(
            f"The model in {folder} has keys and values of several shapes ({shapes}). Choose one with equal layers."
        )
    ((_, kv_heads, _, head_dim),) = shapes
    layers = len(cache.layers)
    return KVSpec(layers, kv_heads, head_dim, dtype, _fingerprint(model), rope=_rope(model, layers, head_dim))


def _rope(model: PreTrainedModel, layers: int, head_dim: int) -> tuple[RopeSpec | None, ...] | None:
    """How each layer's keys are rotated; None where that is not known, so that keys are never moved."""
    config: Any = model.config.get_text_config()
    try:
        return rope_of_layers(config.to_dict(), layers=layers, head_dim=head_dim)
    except ValueError as error:
        logger.warning("the model's keys cannot be moved to other positions: %s", error)
        return None


def _fingerprint(model: PreTrainedModel) -> str:
    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, weight in sorted(model.state_dict().items()):
        flat = weight.detach().flatten()
        step = max(1, flat.numel() // FINGERPRINT_SAMPLE)
        digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
        digest.update(flat[::step].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _context_length(model: PreTrainedModel) -> int:
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(length) if length else ASSUMED_CONTEXT_LENGTH


def _vocabulary_size(model: PreTrainedModel) -> int:
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.weight.shape[0])


def _end_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chat_format: ChatFormat
) -> frozenset[int]:
    configured: list[Any] = [tokenizer.eos_token_id, chat_format.end_of_turn]
    for source in (model.generation_config, model.config.get_text_config()):
        ids = getattr(source, "eos_token_id", None)
        configured.extend(ids if isinstance(ids, list) else [ids])
    return frozenset(int(token) for token in configured if token is not None)
