"""The name of a release: what its files are, not when or where they were packed. Pure.

Runs on the box too: the runner names a release by it, the box proves with it that all of it arrived.

    >>> release_digest([{"path": "code/a.py", "mode": 420, "sha256": "00", "size": 1}])
    'a05055d3326da3ba'
"""

import hashlib
import json
from typing import Any, Iterable, Mapping


def release_digest(files: Iterable[Mapping[str, Any]]) -> str:
    """Return 16 hex digits over path, mode and sha256 of every file, in the order of their paths."""
    rows = sorted([str(file["path"]), int(file["mode"]), str(file["sha256"])] for file in files)
    return hashlib.sha256(json.dumps(rows, ensure_ascii=True, separators=(",", ":")).encode("ascii")).hexdigest()[:16]
