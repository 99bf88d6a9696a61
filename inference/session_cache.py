"""Lets a transformers model keep its KV in a kvstore session."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvstore import Session


class SessionLayer(CacheLayerMixin):
    """One layer of a session, as a layer of a transformers cache.

    Every layer keeps all tokens, those with a sliding window too: the window is in the attention mask, which
    transformers derives from the sizes given here.
    """

    is_sliding = False

    def __init__(self, session: Session, layer: int) -> None:
        super().__init__()
        self._session = session
        self._layer = layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the session has its buffers."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._session.write(self._layer, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._session.length + query_length, 0

    def get_seq_length(self) -> int:
        return self._session.length

    def get_max_length(self) -> int:
        return -1


class SessionCache(Cache):
    """A session as the `cache` argument of a transformers model.

    A forward pass writes into the session without committing; the caller commits the pass's tokens when it succeeded.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(layers=[SessionLayer(session, layer) for layer in range(session.spec.layers)])
