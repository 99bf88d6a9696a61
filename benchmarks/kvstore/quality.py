"""Quality: what a model's predictions lose when the KV of the history went through int8 or int4.

For each sample the default model reads a history of stitched dialogues. Its whole pages, but for the newest tokens, are
encoded and decoded; with that KV, and with the original, the model then scores the tokens that follow in the dialogue.
The figure is the relative change of perplexity over the tokens of all samples, English and Chinese.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.dialogues import stitched_turns
from benchmarks.report import Figure
from inference.config import DEFAULT_CACHE, DEFAULT_MODEL
from inference.sources import model_folder
from kvstore import KVSpec, StoreConfig
from kvstore.formats import FORMATS, Format

HISTORY = 1008
SCORED = 272
TARGETS = {"int8": ("<=0.001", "<=0.55"), "int4": ("<=0.015", "<=0.32")}
Split = Literal["tuning", "final"]


def measure(quick: bool, split: Split = "final") -> list[Figure]:
    """The figures; `split` "tuning" is for those who change the formats."""
    folder = model_folder(DEFAULT_MODEL, DEFAULT_CACHE, lambda step, progress: None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    losses = _losses(model, tokenizer, 1 if quick else 16, split)
    figures = []
    for name, (quality, size) in TARGETS.items():
        delta = math.exp(losses[name] - losses["original"]) - 1
        figures.append(
            Figure(f"{name}_ppl_delta", delta, quality, f"relative change of perplexity by {name}")
        )
        figures.append(
            Figure(f"{name}_bytes_ratio", _bytes_ratio(FORMATS[name]), size, "bytes over bfloat16's")
        )
    return figures


@torch.inference_mode()
def _losses(model: Any, tokenizer: Any, samples: int, split: Split) -> dict[str, float]:
    """Mean negative log-likelihood of a token, by the format of the history."""
    sums = dict.fromkeys(FORMATS, 0.0)
    count = 0
    for language in ("en", "zh"):
        for tokens in _samples(tokenizer, language, samples, split):
            kv = _history(model, tokens)
            for name, format in FORMATS.items():
                sums[name] += _score(model, tokens, _through(kv, format))
            count += SCORED - 1
    return {name: total / count for name, total in sums.items()}


def _samples(
    tokenizer: Any, language: Literal["en", "zh"], samples: int, split: Split
) -> Iterator[torch.Tensor]:
    """Tokens of conversations, `[1, HISTORY + SCORED]`, one behind the other."""
    turns = stitched_turns(language, split, 0)
    for _ in range(samples):
        messages: list[dict[str, str]] = []
        tokens: list[int] = []
        while len(tokens) < HISTORY + SCORED:
            messages += [
                {"role": "user", "content": next(turns)},
                {"role": "assistant", "content": next(turns)},
            ]
            tokens = tokenizer.apply_chat_template(messages)["input_ids"]
        yield torch.tensor([tokens[: HISTORY + SCORED]])


def _history(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """KV of the history, `[layers, 2, kv_heads, HISTORY, head_dim]`."""
    cache: Any = DynamicCache(config=model.config)
    model(input_ids=tokens[:, :HISTORY], cache=cache, use_cache=True, logits_to_keep=1)
    return torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers])


def _through(kv: torch.Tensor, format: Format) -> torch.Tensor:
    """The KV after its older pages were encoded and decoded."""
    spec = _spec(kv)
    newest = StoreConfig(device_bytes=spec.bytes_per_page).newest_original_tokens
    older = (HISTORY - newest) // spec.page_tokens * spec.page_tokens
    pages = kv[:, :, :, :older].unflatten(3, (-1, spec.page_tokens)).permute(3, 0, 1, 2, 4, 5)
    decoded = format.decode(format.encode(pages, spec), spec)
    return torch.cat((decoded.permute(1, 2, 3, 0, 4, 5).flatten(3, 4), kv[:, :, :, older:]), dim=3)


def _score(model: Any, tokens: torch.Tensor, kv: torch.Tensor) -> float:
    """Negative log-likelihood of the tokens after the history but for the first of them, summed."""
    cache: Any = DynamicCache(config=model.config)
    for layer, (keys, values) in enumerate(kv):
        cache.update(keys.unsqueeze(0), values.unsqueeze(0), layer)
    logits = model(input_ids=tokens[:, HISTORY:], cache=cache, use_cache=True).logits[0, :-1]
    return float(torch.nn.functional.cross_entropy(logits.float(), tokens[0, HISTORY + 1 :], reduction="sum"))


def _bytes_ratio(format: Format) -> float:
    spec = KVSpec(layers=30, kv_heads=3, head_dim=64, dtype=torch.bfloat16, fingerprint="benchmark")
    page = torch.randn(1, *spec.page_shape).bfloat16()
    return format.encode(page, spec).nbytes / page.nbytes


def _spec(kv: torch.Tensor) -> KVSpec:
    layers, _, heads, _, channels = kv.shape
    return KVSpec(layers, heads, channels, kv.dtype, fingerprint="benchmark")
