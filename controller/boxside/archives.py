"""Which archives of dialogs lie on the box, by where they came from (fetch.py). Asks only. Side effects: none.

Runs on the box: standard library and Python 3.8 only.
"""

import os
from typing import List

from controller.boxside.work import read_json
from trainer.run_paths import DataPaths


def find_archives(data: str, source: str) -> List[str]:
    """Return the sha256 of the archives that came from a link of this `source` (links.py), the newest first."""
    paths, found = DataPaths(data), []
    for name in os.listdir(paths.archives) if os.path.isdir(paths.archives) else ():
        sha256, suffix = os.path.splitext(name)
        about = read_json(os.path.join(paths.archives, name)) if suffix == ".json" else None
        if about is not None and about.get("source") == source and os.path.isdir(paths.archive(sha256)):
            found.append((os.path.getmtime(os.path.join(paths.archives, name)), sha256))
    return [sha256 for _, sha256 in sorted(found, reverse=True)]
