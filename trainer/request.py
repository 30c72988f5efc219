"""What a run is asked for: its `recipe.json`, read and checked. Side effects: reads files.

Its form stands in train.py, whose argument it is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from corpus_builder.config import validate
from corpus_builder.errors import ProjectError
from trainer.recipe import Recipe
from trainer.run_paths import DataPaths, RunPaths, run_paths


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What `recipe.json` says."""

    recipe: Recipe
    data: DataPaths
    paths: RunPaths
    version: str
    resume_from: str | None
    samples_sha256: str | None = None


def load_request(path: Path) -> Request:
    """Return the request in `recipe.json`; raise `config_unreadable` or `config_invalid`."""
    try:
        packed = json.loads(path.read_text("utf-8"))
        data, version, run_id = packed["data"], packed["version"], packed["run_id"]
        tree = packed["recipe"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProjectError("config_unreadable", path=str(path), reason=type(error).__name__) from error
    return Request(
        recipe=validate(Recipe, tree, where=str(path)),
        data=DataPaths(data),
        paths=run_paths(data, version, run_id),
        version=version,
        resume_from=packed.get("resume_from"),
        samples_sha256=packed.get("samples_sha256"),
    )


def read_attempt(supervisor_path: Path) -> int:
    """Return the number of this attempt as the supervisor counts, 1 where there is none."""
    try:
        return int(json.loads(supervisor_path.read_text("utf-8"))["attempts"][-1]["attempt"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return 1
