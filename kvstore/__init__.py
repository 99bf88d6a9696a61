"""A store for the attention state (KV cache) of conversations, usable without the rest of Keepwarm.

What lives here: the description of a model's KV (`KVSpec`), the store (`KVStore`) that keeps sessions in pages on the
device and in lower tiers, finds shared prefixes and decides what goes first, and the sessions (`Session`) that a model
reads and writes. What does not: models, tokenizers, scheduling. docs/kvstore.md explains it.
"""

from kvstore.config import StoreConfig, TierConfig
from kvstore.edits import DetachedSpan
from kvstore.errors import KVLost, KVStoreError, PinRefused, PoolExhausted, SessionLocked
from kvstore.eviction import EvictionPolicy, LeastRecentlyUsed, Worth
from kvstore.pins import Pin
from kvstore.restoration import Restoration
from kvstore.rope import RopeSpec, rope_of_layers
from kvstore.session import Session
from kvstore.shares import PoolShare
from kvstore.snapshot import StoreSnapshot
from kvstore.spans import Span
from kvstore.spec import KVSpec
from kvstore.store import KVStore, PrefixMatch

__all__ = [
    "DetachedSpan",
    "EvictionPolicy",
    "KVLost",
    "KVSpec",
    "KVStore",
    "KVStoreError",
    "LeastRecentlyUsed",
    "Pin",
    "PinRefused",
    "PoolExhausted",
    "PoolShare",
    "PrefixMatch",
    "Restoration",
    "RopeSpec",
    "Session",
    "SessionLocked",
    "Span",
    "StoreConfig",
    "StoreSnapshot",
    "TierConfig",
    "Worth",
    "rope_of_layers",
]
