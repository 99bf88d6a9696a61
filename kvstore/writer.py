"""Encodes pages and writes them to a tier, in a background thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kvstore.formats import INT8, ORIGINAL, Format
from kvstore.spec import KVSpec
from kvstore.tiers import Chunk, ChunkMissing, Storage, StorageError
from kvstore.transfer import DeviceLink


@dataclass(frozen=True)
class Outgoing:
    """A page to be written: what its chunk says, and a view of it on the device, int8 or in the original dtype."""

    record: int
    key: bytes
    tokens: npt.NDArray[np.int32]
    fidelity: int
    view: torch.Tensor
    is_int8: bool


@dataclass
class Written:
    """What became of pages: formats and bytes of the chunks by record, and why others could not be written."""

    chunks: dict[int, tuple[str, int]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


class Writer:
    """Does the work of writing pages."""

    def __init__(self, spec: KVSpec, link: DeviceLink) -> None:
        self._spec = spec
        self._link = link

    def write(self, pages: Sequence[Outgoing], format: Format, storage: Storage, after: object) -> Written:
        """Write pages in a format, or in the original one if they cannot be had in that. `after` marks the device work
        that must be over before they are read. Never raises."""
        written = Written()
        try:
            with self._link.behind(after):
                encoded = [self._encoded(page, format) for page in pages]
        except Exception as error:
            written.failures.append(described(error))
            return written
        for page, (name, payload) in zip(pages, encoded, strict=True):
            try:
                chunk = Chunk(page.key, page.tokens, name, payload, page.fidelity)
                written.chunks[page.record] = name, storage.write(chunk)
            except Exception as error:
                written.failures.append(described(error))
        return written

    def _encoded(self, page: Outgoing, format: Format) -> tuple[str, torch.Tensor]:
        if page.is_int8 and format is INT8:
            return format.name, self._link.to_host(page.view)
        plain = page.view.unsqueeze(0)
        if page.is_int8:
            plain = INT8.decode(plain, self._spec)
        if (used := len(page.tokens)) < self._spec.page_tokens:
            # What the memory held before would spoil the scales, and may be anybody's.
            plain = plain.clone()
            plain[..., used:, :] = 0
        try:
            return format.name, self._link.to_host(format.encode(plain, self._spec)[0])
        except ValueError:
            return ORIGINAL.name, self._link.to_host(ORIGINAL.encode(plain, self._spec)[0])


def described(error: Exception) -> str:
    """What a log says of an error; storages say what to do, others not even what they are."""
    expected = isinstance(error, (StorageError, ChunkMissing, ValueError))
    return str(error) if expected else repr(error)
