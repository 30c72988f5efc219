"""Modules from a dictionary: the agent runs on the box without one file of it being written there.

Runs on the box: standard library and Python 3.8 only, and before anything else of ours, so it imports none of it.
Side effects: `install` puts a finder in front of `sys.meta_path`. Names that only lead to others
(`controller` of `controller.boxside.facts`) are empty packages.
"""

import importlib.abc
import importlib.util
import sys
from typing import Any, Dict, Mapping, Optional


class BundleImporter(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds and loads `{"controller.boxside.facts": source, …}`; tracebacks show the source lines."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources: Dict[str, str] = dict(sources)
        for name in sources:
            parts = name.split(".")
            for depth in range(1, len(parts)):
                self.sources.setdefault(".".join(parts[:depth]), "")

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Return a spec for a module of the bundle, None for every other."""
        if fullname not in self.sources:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin="<agent>/" + fullname)

    def is_package(self, fullname: str) -> bool:
        """Whether other modules of the bundle lie below `fullname`."""
        return any(name.startswith(fullname + ".") for name in self.sources)

    def get_source(self, fullname: str) -> Optional[str]:
        """Return the text of a module."""
        if fullname not in self.sources:
            raise ImportError(fullname)
        return self.sources[fullname]


def install(sources: Mapping[str, str]) -> None:
    """Make the modules in `sources` importable, before any file of the same name."""
    sys.meta_path.insert(0, BundleImporter(sources))
