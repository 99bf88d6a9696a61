"""Memory for slabs."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch

HUGE_PAGE_BYTES = 2 * 1024**2


@torch.inference_mode(False)
def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialized tensor. Raises whatever torch or the system raises when there is no memory.

    On a CPU, large ones are in huge pages where the system has them: the first touch of fresh memory, which restoring
    a session is full of, was three times as fast with them. The memory goes back to the system with the tensor.

    The tensor may be written inside and outside of torch's inference mode, as the model's thread and others do.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
