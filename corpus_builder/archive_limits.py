"""How much the dialogs' ZIP may hold. Pure.

Runs on the box too: standard library and Python 3.8 only.
"""

from dataclasses import dataclass
from typing import Any, Mapping, Optional


@dataclass(frozen=True)
class Limits:
    """How much an archive may hold, the ZIPs in it included. Chosen: a hundred times the first user's archive."""

    members: int = 100000
    total_bytes: int = 16 * 1024**3
    ratio: int = 1000  # deflate's own limit is 1032 : 1; text of any kind stays under 100 : 1
    depth: int = 2  # a ZIP in a ZIP in the ZIP


USUAL_LIMITS = Limits()


def limits_of(section: Optional[Mapping[str, Any]]) -> Limits:
    """Return the limits of a plan's section `archive`; the usual ones where there is none."""
    known, packed = USUAL_LIMITS, section or {}
    return Limits(
        members=int(packed.get("max_members", known.members)),
        total_bytes=int(float(packed.get("max_gib", known.total_bytes / 1024**3)) * 1024**3),
        ratio=int(packed.get("max_ratio", known.ratio)),
        depth=int(packed.get("max_depth", known.depth)),
    )
