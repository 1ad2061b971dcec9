"""The name of a full block: a digest of its tokens and of everything before them."""

import hashlib
import struct
from collections.abc import Sequence

from minipaged.tiers import declare_part

declare_part("block_key", "(parent, token_ids) -> bytes; names a full block after its tokens and its parent's name")


def root_key(namespace: str, salt: str = "") -> bytes:
    """Return the parent of every first block.

    Args:
        namespace: Whatever K and V of equal tokens depend on: the model, its weights, dtype, rotary settings.
        salt: Requests of different salts find nothing of each other.

    Example:
        >>> root_key("model") == root_key("model", ""), root_key("model") == root_key("model", "a")
        (True, False)
    """
    digest = hashlib.sha256(hashlib.sha256(namespace.encode()).digest())
    digest.update(salt.encode("utf-8", "surrogatepass"))
    return digest.digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the SHA-256 of the parent's key and the token ids as 32-bit numbers, lowest byte first.

    Every number has a fixed width, so 1, 23 and 12, 3 differ, and a block's key covers all tokens before it. The
    digest is a cryptographic one: nobody can make up a prompt whose key is that of another's.

    Example:
        >>> root = root_key("model")
        >>> block_key(block_key(root, [7]), [9]).hex()[:8]
        '8bfbf9a7'
        >>> block_key(root, [1, 23]) == block_key(root, [12, 3])
        False
    """
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()
