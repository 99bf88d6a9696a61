"""Moves data between the host and the device beside the computation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class DeviceLink:
    """Copies for background threads. On CUDA they run on a stream of their own, so that they neither wait for the
    model nor make it wait; on a CPU they are plain copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self) -> object:
        """Called by the store's thread: stands for all device work that it has started so far."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def behind(self, mark: object) -> Iterator[None]:
        """Runs what is inside after the work that `mark` stands for; at the end it is complete."""
        if self._stream is None:
            yield
            return
        assert isinstance(mark, torch.cuda.Event)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            try:
                yield
            finally:
                self._stream.synchronize()

    def to_device(self, data: torch.Tensor) -> torch.Tensor:
        if self._stream is None:
            return data
        return data.pin_memory().to(self._device, non_blocking=True)

    def to_host(self, data: torch.Tensor) -> torch.Tensor:
        return data.cpu()
