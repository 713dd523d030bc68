"""Which code is this?  For torch.compile's cache on disk, which finds a compiled graph by its forward.

The backward of our operators is no part of that: with another formula in `_gradients`, the cache gave the old one's
graph, and the old gradients, in silence (torch 2.13). So `Numerics.key` ends in a fingerprint of the sources: every
operator is called with that string, and a weight tells the cache its own (`_stable_hash_for_caching`).
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def fingerprint(folders: Iterable[Path]) -> str:
    """Twelve hexadecimal digits of all that the Python files in these folders say."""
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


CODE = fingerprint([ROOT / "converters", ROOT / "parallel"])  # once: torch.compile traces what makes a Numerics
