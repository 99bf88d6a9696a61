"""A store for the attention state (KV cache) of conversations, usable without the rest of Keepwarm.

What lives here: the description of a model's KV (`KVSpec`), the KV of one conversation (`Session`), and the
store that finds, bounds and evicts sessions (`SessionStore`). What does not: models, tokenizers, scheduling.
Only torch is needed.
"""

from kvstore.session import Session
from kvstore.spec import KVSpec
from kvstore.store import SessionLocked, SessionStore, StoreSnapshot

__all__ = ["KVSpec", "Session", "SessionLocked", "SessionStore", "StoreSnapshot"]
