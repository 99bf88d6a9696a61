"""The KV of one conversation, in buffers that grow geometrically."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvstore.spec import KVSpec

MINIMUM_CAPACITY = 64
GROWTH = 1.5


class Session:
    """Tokens and their KV for one conversation.

    The list of tokens is the truth: KV past `length` is garbage, whatever the buffers hold. A forward pass first
    writes the KV of its new tokens layer by layer (`write`), then makes them part of the session (`commit`). A pass
    that fails half way leaves nothing behind, because it never commits.

    Keys and values of a layer live in a buffer of shape `[kv_heads, capacity, head_dim]`; views handed out have the
    shape `[1, kv_heads, tokens, head_dim]` and are valid until the session next grows or is truncated.

    A session is used by one thread at a time.
    """

    def __init__(
        self,
        spec: KVSpec,
        owner: str,
        session_id: str | None,
        *,
        device: torch.device | str = "cpu",
        account: Callable[[int], None] | None = None,
    ) -> None:
        """`account` is told the change in bytes held, before memory is taken and after it is given back."""
        self.spec = spec
        self.owner = owner
        self.id = session_id
        self._device = torch.device(device)
        self._account = account or (lambda change: None)
        # Tokens that it will hold, when known: growing by factors stops there. Set by the store.
        self.planned = 0
        self._tokens: list[int] = []
        self._capacity = 0
        self._keys = [self._empty_buffer(0) for _ in range(spec.layers)]
        self._values = [self._empty_buffer(0) for _ in range(spec.layers)]
        self._written = [0] * spec.layers  # tokens written past `length`, by layer

    @property
    def length(self) -> int:
        """Number of tokens whose KV is held."""
        return len(self._tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens whose KV is held, in order (a copy)."""
        return tuple(self._tokens)

    @property
    def capacity(self) -> int:
        """Tokens that fit without growing."""
        return self._capacity

    @property
    def bytes(self) -> int:
        """Bytes of the buffers, used or not."""
        return self._capacity * self.spec.bytes_per_token

    @property
    def planned_bytes(self) -> int:
        """Bytes of the buffers once the session holds `planned` tokens."""
        return max(self._capacity, self.planned) * self.spec.bytes_per_token

    def common_prefix(self, tokens: Sequence[int]) -> int:
        """Length of the longest common prefix of the session's tokens and `tokens`."""
        shorter = min(len(self._tokens), len(tokens))
        for position in range(shorter):
            if self._tokens[position] != tokens[position]:
                return position
        return shorter

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens in total. Raises whatever torch raises when memory is out; the session
        is then as it was."""
        if length <= self._capacity:
            return
        capacity = max(length, MINIMUM_CAPACITY, int(self._capacity * GROWTH))
        if length <= self.planned:
            capacity = min(capacity, self.planned)
        change = (capacity - self._capacity) * self.spec.bytes_per_token
        self._account(change)
        try:
            keys = [self._grown(buffer, capacity) for buffer in self._keys]
            values = [self._grown(buffer, capacity) for buffer in self._values]
        except BaseException:
            self._account(-change)
            raise
        self._keys, self._values, self._capacity = keys, values, capacity

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the KV of the tokens that follow the session's, for one layer.

        `keys` and `values` have the shape `[1, kv_heads, new tokens, head_dim]`. Returns views of the layer's keys
        and values, the old tokens and the new: `[1, kv_heads, length + new tokens, head_dim]`. Writing again before
        a commit overwrites. Raises ValueError when the shapes are not those of the spec.
        """
        count = keys.shape[2]
        expected = (1, self.spec.kv_heads, count, self.spec.head_dim)
        if keys.shape != expected or values.shape != expected:
            raise ValueError(
                f"layer {layer}: keys {tuple(keys.shape)} and values {tuple(values.shape)} "
                f"are not of the shape {expected}"
            )
        start, end = self.length, self.length + count
        self.reserve(end)
        self._keys[layer][:, start:end].copy_(keys[0])
        self._values[layer][:, start:end].copy_(values[0])
        self._written[layer] = count
        return self._view(self._keys[layer], end), self._view(self._values[layer], end)

    def commit(self, tokens: Sequence[int]) -> None:
        """Make `tokens`, whose KV every layer has just written, part of the session.

        Raises ValueError when a layer wrote another number of tokens; nothing is committed then.
        """
        if any(written != len(tokens) for written in self._written):
            raise ValueError(f"not every layer has written {len(tokens)} tokens: {self._written}")
        self._tokens.extend(tokens)
        self._written = [0] * self.spec.layers

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens. The buffers keep their size."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} tokens to {length}")
        del self._tokens[length:]
        self._written = [0] * self.spec.layers

    def keys(self, layer: int) -> torch.Tensor:
        """View of a layer's keys, `[1, kv_heads, length, head_dim]`."""
        return self._view(self._keys[layer], self.length)

    def values(self, layer: int) -> torch.Tensor:
        """View of a layer's values, `[1, kv_heads, length, head_dim]`."""
        return self._view(self._values[layer], self.length)

    def free(self) -> None:
        """Give the memory back. The session is empty afterwards and may be used again."""
        self.truncate(0)
        freed = self.bytes
        self._keys = [self._empty_buffer(0) for _ in self._keys]
        self._values = [self._empty_buffer(0) for _ in self._values]
        self._capacity = 0
        if freed:
            self._account(-freed)

    def _empty_buffer(self, capacity: int) -> torch.Tensor:
        shape = (self.spec.kv_heads, capacity, self.spec.head_dim)
        return torch.empty(shape, dtype=self.spec.dtype, device=self._device)

    def _grown(self, buffer: torch.Tensor, capacity: int) -> torch.Tensor:
        # A pass may be under way: what its earlier layers wrote past `length` moves along.
        kept = self.length + max(self._written)
        grown = self._empty_buffer(capacity)
        grown[:, :kept] = buffer[:, :kept]
        return grown

    def _view(self, buffer: torch.Tensor, length: int) -> torch.Tensor:
        return buffer[:, :length].unsqueeze(0)
