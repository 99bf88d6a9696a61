"""Formats: what they keep, what they take, and that a layer can be had alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import KVSpec
from kvstore.formats import FORMATS, INT4, INT8, ORIGINAL, get_format

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Largest error of a value, over the largest of the values that share its scale.
TOLERANCE = {"original": 0.0, "int8": 0.008, "int4": 0.08}


def spec_of(
    heads: int = 3, channels: int = 64, tokens: int = 16, dtype: torch.dtype = torch.float32
) -> KVSpec:
    return KVSpec(2, heads, channels, dtype, "test", page_tokens=tokens)


def pages_of(spec: KVSpec, count: int = 3, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    pages = torch.rand((count, *spec.page_shape), generator=generator) * 2 - 1
    return (pages * scale).to(spec.dtype)


@settings(max_examples=60, deadline=None)
@given(
    heads=st.integers(1, 5),
    channels=st.sampled_from([1, 7, 32, 64, 80, 96, 128, 131, 256]),
    tokens=st.integers(1, 33),
    dtype=st.sampled_from(DTYPES),
    name=st.sampled_from(sorted(FORMATS)),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    seed=st.integers(0, 100),
)
def test_every_shape_comes_back_within_the_formats_error(
    heads: int, channels: int, tokens: int, dtype: torch.dtype, name: str, scale: float, seed: int
) -> None:
    spec, format = spec_of(heads, channels, tokens, dtype), FORMATS[name]
    pages = pages_of(spec, seed=seed, scale=scale)
    encoded = format.encode(pages, spec)
    assert encoded.shape == (3, spec.layers, format.layer_bytes(spec))
    assert (encoded.dtype, encoded.is_contiguous()) == (torch.uint8, True)
    decoded = format.decode(encoded, spec)
    assert (decoded.shape, decoded.dtype) == (pages.shape, dtype)
    error = (decoded.double() - pages.double()).abs().max().item()
    rounding = 0.0 if name == "original" else 2 * torch.finfo(dtype).eps * scale
    assert error <= TOLERANCE[name] * scale + rounding


@pytest.mark.parametrize("name", FORMATS)
def test_layers_decode_alone(name: str) -> None:
    spec, format = spec_of(), FORMATS[name]
    encoded = format.encode(pages_of(spec), spec)
    whole = format.decode(encoded, spec)
    assert torch.equal(format.decode(encoded[:, 1:], spec), whole[:, 1:])
    assert torch.equal(format.decode(encoded[:1], spec), whole[:1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_original_keeps_every_bit(dtype: torch.dtype) -> None:
    spec = spec_of(dtype=dtype)
    pages = pages_of(spec)
    pages[0, 0, 0, 0, 0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    view = pages.transpose(3, 4).contiguous().transpose(3, 4)  # laid out in another way
    decoded = ORIGINAL.decode(ORIGINAL.encode(view, spec), spec)
    assert torch.equal(decoded.view(torch.uint8), pages.view(torch.uint8))


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-12, -9e36])
def test_constant_pages_come_back(name: str, value: float) -> None:
    spec = spec_of()
    pages = torch.full((1, *spec.page_shape), value)
    decoded = FORMATS[name].decode(FORMATS[name].encode(pages, spec), spec)
    assert torch.allclose(decoded, pages, rtol=0.005, atol=0)


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("largest", [65504.0, 60000.0, 2e-4])
def test_the_ends_of_float16_come_back(name: str, largest: float) -> None:
    spec = spec_of(dtype=torch.float16)
    pages = pages_of(spec, scale=largest)
    pages[0] = largest
    pages[1, ..., ::2] = -largest
    decoded = FORMATS[name].decode(FORMATS[name].encode(pages, spec), spec)
    error = (decoded.double() - pages.double()).abs().max().item()
    assert error <= TOLERANCE[name] * largest + torch.finfo(torch.float16).smallest_normal * 2**-10


def test_a_channel_of_large_keys_does_not_spoil_the_others() -> None:
    spec = spec_of()
    pages = pages_of(spec)
    pages[:, :, 0, :, :, 5] += 200
    for name in ("int8", "int4"):
        decoded = FORMATS[name].decode(FORMATS[name].encode(pages, spec), spec)
        others = torch.arange(spec.head_dim) != 5
        error = (decoded - pages)[:, :, 0][..., others].abs().max()
        assert error <= TOLERANCE[name]


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38])
def test_what_cannot_be_quantized_is_refused(name: str, value: float) -> None:
    spec = spec_of()
    pages = pages_of(spec)
    pages[1, 1, 1, 1, 1, 1] = value
    with pytest.raises(ValueError, match="only the original format"):
        FORMATS[name].encode(pages, spec)


def test_bytes_over_bfloat16s() -> None:
    spec = spec_of(dtype=torch.bfloat16)
    whole = spec.bytes_per_page / spec.layers
    assert ORIGINAL.layer_bytes(spec) == whole
    assert INT8.layer_bytes(spec) / whole <= 0.55
    assert INT4.layer_bytes(spec) / whole <= 0.32


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="original, int8, int4"):
        get_format("fp8")
