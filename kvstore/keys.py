"""Keys of pages: 16 bytes that stand for the model, the owner and all tokens up to the page's end.

A page's key is a hash of its tokens and of the key before it, as in vLLM's automatic prefix caching. The chain begins
with the model, and the owner is the salt of each link, so that owners never meet. Pages that no prefix leads to,
because they are approximate or not full, get a random key; the first bit tells the two kinds apart.
"""

from __future__ import annotations

import hashlib
import os

from kvstore.spec import KVSpec

KEY_BYTES = 16
PRIVATE_BIT = 0x80
PUBLIC = hashlib.blake2b(b"public", digest_size=KEY_BYTES).digest()


def owner_salt(owner: str) -> bytes:
    """The salt of an owner's pages; no owner's is that of public pages."""
    return hashlib.blake2b(b"owner:" + owner.encode(), digest_size=KEY_BYTES).digest()


def root_key(spec: KVSpec) -> bytes:
    """The key before the first page: it stands for the model and the size of pages."""
    text = f"{spec.fingerprint}:{spec.dtype}:{spec.page_tokens}"
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()


def page_key(parent: bytes, tokens: bytes, salt: bytes) -> bytes:
    """The key of a page: `parent` is the key before it, `tokens` its tokens as int32 in little-endian order."""
    digest = hashlib.blake2b(parent + tokens, digest_size=KEY_BYTES, salt=salt).digest()
    return bytes((digest[0] & ~PRIVATE_BIT,)) + digest[1:] if digest[0] & PRIVATE_BIT else digest


def private_key() -> bytes:
    """A key that no lookup by tokens can come to."""
    key = os.urandom(KEY_BYTES)
    return bytes((key[0] | PRIVATE_BIT,)) + key[1:]


def is_private(key: bytes) -> bool:
    return bool(key[0] & PRIVATE_BIT)
