"""What pages are kept in: the model's own dtype, int8 or int4.

As KIVI found (arXiv 2402.02750), keys have channels of large magnitude and are quantized by channel, over the tokens of
a page; values are quantized by token, in groups of channels. The layers of an encoded page are independent, so that a
layer can be read and decoded alone. All numbers are little-endian.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kvstore.spec import KVSpec

LARGEST_GROUP = 64  # channels of a value that share a scale
INT8_LARGEST = 127
INT4_LARGEST = 15
# The scales of int4 keys are kept in 8 bits: the logarithm below the largest of the head, in steps of 1/24 octave.
STEPS_PER_OCTAVE = 24
SMALLEST = 1e-30
LARGEST = 1e37  # what arithmetic in float32 has room for
# A scale is never less than this share of the offset, which has no more precise digits than bfloat16's anyway.
OFFSET_PRECISION = 2.0**-20


class Format(Protocol):
    """A way to keep pages. `lossless` is whether decoding gives back every bit."""

    @property
    def name(self) -> str:
        """What settings and chunks call the format."""

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back every bit."""

    def layer_bytes(self, spec: KVSpec) -> int:
        """Bytes of one layer of one encoded page, scales included."""

    def encode(self, pages: torch.Tensor, spec: KVSpec) -> torch.Tensor:
        """Encode pages, `[n, layers, 2, kv_heads, page_tokens, head_dim]` in the spec's dtype, of any number of layers.
        Returns uint8 `[n, layers, layer_bytes]`, contiguous and on the same device. Raises ValueError when a lossy
        format is asked to keep infinities, values above 1e37 or what is no number."""

    def decode(self, encoded: torch.Tensor, spec: KVSpec) -> torch.Tensor:
        """Decode pages, uint8 `[n, layers, layer_bytes]` of any number of layers. Returns
        `[n, layers, 2, kv_heads, page_tokens, head_dim]` in the spec's dtype; may share the memory of `encoded`."""


class Original:
    """The model's own dtype."""

    name = "original"
    lossless = True

    def layer_bytes(self, spec: KVSpec) -> int:
        return spec.bytes_per_page // spec.layers

    def encode(self, pages: torch.Tensor, spec: KVSpec) -> torch.Tensor:
        return pages.contiguous().view(torch.uint8).reshape(*pages.shape[:2], self.layer_bytes(spec))

    def decode(self, encoded: torch.Tensor, spec: KVSpec) -> torch.Tensor:
        return encoded.contiguous().view(spec.dtype).reshape(*encoded.shape[:2], *spec.page_shape[1:])


class Int8:
    """Symmetric int8. A layer is: keys `[kv_heads, page_tokens, head_dim]`, values likewise, then in bfloat16 the
    scales of keys `[kv_heads, head_dim]` and of values `[kv_heads, page_tokens, groups]`."""

    name = "int8"
    lossless = False

    def layer_bytes(self, spec: KVSpec) -> int:
        _, heads, tokens, channels = spec.page_shape[1:]
        return heads * (2 * tokens * channels + 2 * (channels + tokens * _groups(channels)))

    def encode(self, pages: torch.Tensor, spec: KVSpec) -> torch.Tensor:
        keys, values = _bounded(pages).unbind(2)
        key_codes, key_scales = self._codes(keys, 3)
        grouped = values.unflatten(-1, (_groups(spec.head_dim), -1))
        value_codes, value_scales = self._codes(grouped, -1)
        return _joined(key_codes, value_codes, key_scales, value_scales)

    def decode(self, encoded: torch.Tensor, spec: KVSpec) -> torch.Tensor:
        _, heads, tokens, channels = spec.page_shape[1:]
        groups = _groups(channels)
        key_codes, value_codes, key_scales, value_scales = _parts(
            encoded,
            (torch.int8, (heads, tokens, channels)),
            (torch.int8, (heads, tokens, groups, channels // groups)),
            (torch.bfloat16, (heads, 1, channels)),
            (torch.bfloat16, (heads, tokens, groups, 1)),
        )
        out = _empty(encoded, spec)
        torch.mul(key_codes, key_scales.to(out.dtype), out=out[:, :, 0])
        values = out[:, :, 1].unflatten(-1, (groups, -1))
        torch.mul(value_codes, value_scales.to(out.dtype), out=values)
        return _finished(out, spec)

    def _codes(self, data: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales = (data.abs().amax(dim, keepdim=True) / INT8_LARGEST).clamp(min=SMALLEST).bfloat16()
        codes = (data / scales).round().clamp(-INT8_LARGEST, INT8_LARGEST).to(torch.int8)
        return codes, scales


class Int4:
    """Affine int4, value = offset + code x scale. A layer is: packed keys and values; the offsets of keys
    `[kv_heads, head_dim]`, and scales and offsets of values `[kv_heads, page_tokens, groups]`, in bfloat16; the largest
    scale of each head in float32; the keys' scales below it `[kv_heads, head_dim]` in 8-bit logarithms."""

    name = "int4"
    lossless = False

    def layer_bytes(self, spec: KVSpec) -> int:
        _, heads, tokens, channels = spec.page_shape[1:]
        values = 4 * tokens * _groups(channels)
        return 2 * _packed_bytes(spec) + heads * (2 * channels + values + 4 + channels)

    def encode(self, pages: torch.Tensor, spec: KVSpec) -> torch.Tensor:
        keys, values = _bounded(pages).unbind(2)
        offsets, scales = self._affine(keys, 3)
        largest = scales.amax(-1, keepdim=True)
        steps = ((largest / scales).log2() * STEPS_PER_OCTAVE).round().clamp(0, 255).to(torch.uint8)
        key_codes = self._codes(keys, offsets, _log_scales(largest, steps))
        grouped = values.unflatten(-1, (_groups(spec.head_dim), -1))
        value_offsets, value_scales = self._affine(grouped, -1)
        value_scales = value_scales.bfloat16()
        value_codes = self._codes(grouped, value_offsets, value_scales.float())
        return _joined(
            _pack(key_codes), _pack(value_codes), offsets, value_scales, value_offsets, largest, steps
        )

    def decode(self, encoded: torch.Tensor, spec: KVSpec) -> torch.Tensor:
        _, heads, tokens, channels = spec.page_shape[1:]
        groups = _groups(channels)
        packed = (torch.uint8, (_packed_bytes(spec),))
        key_codes, value_codes, offsets, value_scales, value_offsets, largest, steps = _parts(
            encoded,
            packed,
            packed,
            (torch.bfloat16, (heads, 1, channels)),
            (torch.bfloat16, (heads, tokens, groups, 1)),
            (torch.bfloat16, (heads, tokens, groups, 1)),
            (torch.float32, (heads, 1, 1)),
            (torch.uint8, (heads, 1, channels)),
        )
        out = _empty(encoded, spec)
        keys, values = out[:, :, 0], out[:, :, 1].unflatten(-1, (groups, -1))
        scales = _log_scales(largest, steps).to(out.dtype)
        torch.mul(_unpack(key_codes, spec).unflatten(-1, (heads, tokens, channels)), scales, out=keys)
        keys += offsets.to(out.dtype)
        shape = (heads, tokens, groups, channels // groups)
        torch.mul(_unpack(value_codes, spec).unflatten(-1, shape), value_scales.to(out.dtype), out=values)
        values += value_offsets.to(out.dtype)
        return _finished(out, spec)

    def _affine(self, data: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Offset, in bfloat16, and scale along `dim`."""
        limit = torch.finfo(torch.bfloat16).max
        offsets = data.amin(dim, keepdim=True).clamp(-limit, limit).bfloat16()
        # Divided before they are subtracted, so that the difference of very large numbers does not overflow.
        scales = data.amax(dim, keepdim=True) / INT4_LARGEST - offsets.float() / INT4_LARGEST
        return offsets, torch.maximum(scales, offsets.float().abs() * OFFSET_PRECISION).clamp(min=SMALLEST)

    def _codes(self, data: torch.Tensor, offsets: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        codes = data / scales - offsets.float() / scales
        return codes.round().clamp(0, INT4_LARGEST).to(torch.uint8)


ORIGINAL: Format = Original()
INT8: Format = Int8()
INT4: Format = Int4()
FORMATS: dict[str, Format] = {format.name: format for format in (ORIGINAL, INT8, INT4)}


def get_format(name: str) -> Format:
    """The format of that name. Raises ValueError when there is none."""
    if name not in FORMATS:
        raise ValueError(f"there is no format {name!r}; there are {', '.join(FORMATS)}")
    return FORMATS[name]


def _groups(channels: int) -> int:
    """Number of equal groups, of at most LARGEST_GROUP channels, that a value is quantized in."""
    return next(n for n in range(1, channels + 1) if channels % n == 0 and channels // n <= LARGEST_GROUP)


def _bounded(pages: torch.Tensor) -> torch.Tensor:
    """The pages in float32. Written so that NaN fails too."""
    if pages.numel() and not bool(pages.abs().amax() < LARGEST):
        raise ValueError(
            "the page has values that are too large or no numbers; only the original format keeps them"
        )
    return pages.float()


def _log_scales(largest: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    return largest * torch.exp2(steps.float() / -STEPS_PER_OCTAVE)


def _packed_bytes(spec: KVSpec) -> int:
    return (spec.kv_heads * spec.page_tokens * spec.head_dim + 1) // 2


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """Two 4-bit codes a byte: those of the first half in the low bits, those of the second in the high ones."""
    flat = codes.flatten(2)
    if flat.shape[-1] % 2:
        flat = torch.nn.functional.pad(flat, (0, 1))
    low, high = flat.chunk(2, dim=-1)
    return low | (high << 4)


def _unpack(packed: torch.Tensor, spec: KVSpec) -> torch.Tensor:
    """Codes of packed keys or values, uint8 `[n, layers, codes]`."""
    half = packed.shape[-1]
    codes = torch.empty((*packed.shape[:2], 2 * half), dtype=torch.uint8, device=packed.device)
    torch.bitwise_and(packed, 15, out=codes[..., :half])
    torch.bitwise_right_shift(packed, 4, out=codes[..., half:])
    return codes[..., : spec.kv_heads * spec.page_tokens * spec.head_dim]


def _joined(*parts: torch.Tensor) -> torch.Tensor:
    """The bytes of all parts behind each other, for each page and layer."""
    return torch.cat([part.contiguous().flatten(2).view(torch.uint8) for part in parts], dim=-1)


def _parts(encoded: torch.Tensor, *layout: tuple[torch.dtype, tuple[int, ...]]) -> list[torch.Tensor]:
    """What `_joined` joined: parts of a dtype and a shape for each page and layer. Parts of bytes are views."""
    parts, start = [], 0
    for dtype, shape in layout:
        size = torch.Size(shape).numel() * dtype.itemsize
        part = encoded[..., start : start + size]
        start += size
        if dtype.itemsize > 1:
            part = part.contiguous()
        parts.append(part.view(dtype).unflatten(-1, shape))
    return parts


def _empty(encoded: torch.Tensor, spec: KVSpec) -> torch.Tensor:
    """Memory to decode into. float32 for float16, which has no room for products of codes and scales, nor the digits
    of small scales."""
    dtype = torch.float32 if spec.dtype is torch.float16 else spec.dtype
    return torch.empty((*encoded.shape[:2], *spec.page_shape[1:]), dtype=dtype, device=encoded.device)


def _finished(decoded: torch.Tensor, spec: KVSpec) -> torch.Tensor:
    """What was decoded, in the spec's dtype: rounding must not carry its largest values into infinity."""
    if decoded.dtype is spec.dtype:
        return decoded
    limit = torch.finfo(spec.dtype).max
    return decoded.clamp_(-limit, limit).to(spec.dtype)
