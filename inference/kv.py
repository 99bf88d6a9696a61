"""The store that an engine keeps its KV in, as its settings say."""

from __future__ import annotations

from collections.abc import Callable

from inference.config import EngineConfig
from inference.errors import ModelUnavailable
from inference.loading import LoadedModel
from kvstore import KVStore, StoreConfig, TierConfig


def open_store(config: EngineConfig, model: LoadedModel, on_activity: Callable[[], None]) -> KVStore:
    """The KV store of a model. Raises ModelUnavailable when its settings do not work, such as too little memory for
    a single page."""
    settings = StoreConfig(
        device_bytes=config.kv_bytes,
        host=_tier(config, config.kv_host_bytes),
        disk=_tier(config, config.kv_disk_bytes, str(config.kv_dir)),
        remote=_tier(config, config.kv_remote_bytes, config.kv_remote_url),
    )
    try:
        return KVStore(model.kv_spec, settings, device=model.device, on_activity=on_activity)
    except ValueError as error:
        raise ModelUnavailable(f"The settings of the KV store do not work: {error}") from error


def _tier(config: EngineConfig, budget: int, location: str = "") -> TierConfig | None:
    if not budget:
        return None
    return TierConfig(budget, format=config.kv_format, location=location, expire_after=config.kv_expire_after)
