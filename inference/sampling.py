"""From logits to the next token."""

from __future__ import annotations

import hashlib

import torch

from inference.requests import SamplingParams


def sample_token(logits: torch.Tensor, params: SamplingParams, seed: int, index: int) -> int:
    """Choose a token.

    `logits` has the shape `[vocabulary]`, any float dtype. `index` is the token's place in its answer. The choice
    depends on the logits, the parameters, `seed` and `index` alone, so neither other requests nor an interruption
    change an answer. Raises ValueError when the logits are not numbers.
    """
    if bool(torch.isnan(logits).any()):
        raise ValueError("the model returned logits that are not numbers")
    if params.temperature == 0:
        return int(logits.argmax())
    # In double precision, so that the cumulative sum over a large vocabulary does not drift.
    scaled = logits.double()
    scaled = (scaled - scaled.max()) / params.temperature
    tokens: torch.Tensor | None = None
    if params.top_k or params.top_p < 1:
        scaled, tokens = _most_probable(scaled, params.top_k)
    probabilities = torch.softmax(scaled, dim=-1)
    if params.top_p < 1:
        probabilities = _nucleus(probabilities, params.top_p)
    choice = _inverse_cumulative(probabilities, _uniform(seed, index))
    return choice if tokens is None else int(tokens[choice])


def _most_probable(scaled: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and tokens by falling probability, `top_k` of them, or all for 0."""
    count = scaled.shape[-1]
    return torch.topk(scaled, min(top_k, count) if top_k else count)


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """The shortest head of sorted probabilities that sums to `top_p` (Holtzman et al., 2020)."""
    before = probabilities.cumsum(-1) - probabilities
    return probabilities[before < top_p]


def _inverse_cumulative(probabilities: torch.Tensor, uniform: float) -> int:
    cumulative = probabilities.cumsum(-1)
    position = torch.searchsorted(cumulative, cumulative[-1] * uniform, right=True)
    return min(int(position), probabilities.shape[-1] - 1)


def _uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that is a function of its arguments alone, on every machine."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / 2**53
