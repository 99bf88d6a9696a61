"""What a sleeping session leaves in a tier, so that it is found after a restart: its tokens, spans and pages."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from kvstore.keys import KEY_BYTES
from kvstore.spans import Span

VERSION = 1

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Entry:
    """An entry of a page table: the key of the page and of the one that it builds on (b"" for none), the session's
    slots in it, and the page's position and tokens."""

    key: bytes
    parent: bytes
    start: int
    count: int
    position: int
    tokens: Tokens


@dataclass(frozen=True)
class Manifest:
    """A session as it went to sleep. `entries` are its page table, and `left` keys of pages that it made and no longer
    uses: those of other branches."""

    owner: str
    session_id: str
    pool: str
    public_tokens: int
    keyed_pages: int
    spans: Sequence[Span]
    entries: Sequence[Entry]
    left: Sequence[bytes] = ()

    def encode(self) -> bytes:
        return json.dumps(
            {
                "version": VERSION,
                "owner": self.owner,
                "session": self.session_id,
                "pool": self.pool,
                "public_tokens": self.public_tokens,
                "keyed_pages": self.keyed_pages,
                "spans": [asdict(span) for span in self.spans],
                "left": [key.hex() for key in self.left],
                "pages": [
                    [e.key.hex(), e.parent.hex(), e.start, e.count, e.position, _text(e.tokens)]
                    for e in self.entries
                ],
            }
        ).encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Raises ValueError when this is no manifest, or one of another version."""
        try:
            content = json.loads(data)
            if content["version"] != VERSION:
                raise ValueError(f"a manifest of version {content['version']}")
            manifest = cls(
                owner=content["owner"],
                session_id=content["session"],
                pool=content["pool"],
                public_tokens=int(content["public_tokens"]),
                keyed_pages=int(content["keyed_pages"]),
                spans=[Span(**span) for span in content["spans"]],
                entries=[
                    Entry(
                        bytes.fromhex(key),
                        bytes.fromhex(parent),
                        int(start),
                        int(count),
                        int(position),
                        _tokens(text),
                    )
                    for key, parent, start, count, position, text in content["pages"]
                ],
                left=[bytes.fromhex(key) for key in content["left"]],
            )
            whole = all(
                0 <= e.start < e.start + e.count <= len(e.tokens)
                and len(e.key) == KEY_BYTES
                and len(e.parent) in (0, KEY_BYTES)
                for e in manifest.entries
            )
            tokens = sum(span.length for span in manifest.spans)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"not a manifest: {error!r}") from error
        if not whole or tokens != sum(e.count for e in manifest.entries):
            raise ValueError("a manifest whose tokens, spans and pages differ in length")
        return manifest


def manifest_name(owner: str, session_id: str) -> str:
    """The name of a session's manifest: it tells nobody whose it is."""
    text = json.dumps([owner, session_id])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _text(tokens: Tokens) -> str:
    return base64.b64encode(tokens.astype("<i4").tobytes()).decode()


def _tokens(text: str) -> Tokens:
    return np.frombuffer(base64.b64decode(text), dtype="<i4").astype(np.int32)
