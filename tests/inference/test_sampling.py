"""Choosing a token."""

from __future__ import annotations

import pytest
import torch

from inference import SamplingParams
from inference.sampling import sample_token

LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))


def counts(params: SamplingParams, draws: int = 2000) -> list[float]:
    tokens = [sample_token(LOGITS, params, 1, index) for index in range(draws)]
    return [tokens.count(token) / draws for token in range(4)]


def test_temperature_zero_takes_the_most_probable() -> None:
    assert counts(SamplingParams(temperature=0), 10) == [1, 0, 0, 0]


def test_frequencies_are_the_probabilities() -> None:
    assert counts(SamplingParams(temperature=1)) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.04)


def test_temperature_flattens() -> None:
    expected = torch.softmax(LOGITS / 2, dim=-1).tolist()
    assert counts(SamplingParams(temperature=2)) == pytest.approx(expected, abs=0.04)


def test_top_k() -> None:
    assert counts(SamplingParams(temperature=1, top_k=2)) == pytest.approx([0.625, 0.375, 0, 0], abs=0.04)
    assert counts(SamplingParams(temperature=1, top_k=100))[3] > 0


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    found = counts(SamplingParams(temperature=1, top_p=0.6))
    assert found == pytest.approx([0.625, 0.375, 0, 0], abs=0.04)
    assert counts(SamplingParams(temperature=1, top_p=1e-9), 20) == [1, 0, 0, 0]


def test_the_choice_is_a_function_of_seed_and_index() -> None:
    params = SamplingParams(temperature=1)
    draws = [[sample_token(LOGITS, params, seed, index) for index in range(40)] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_logits_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="not numbers"):
        sample_token(torch.tensor([1.0, float("nan")]), SamplingParams(), 1, 0)
