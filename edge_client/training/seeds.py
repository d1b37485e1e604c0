"""Seeds for every purpose from one seed: H(seed, purpose), the same on every machine."""

from __future__ import annotations

import hashlib

__all__ = ["derive"]


def derive(seed: int, *purpose: str | int) -> int:
    """63 bits for `purpose`; different purposes of one seed share nothing that a generator could show."""
    text = "\0".join([str(seed), *(f"{type(part).__name__}:{part}" for part in purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
