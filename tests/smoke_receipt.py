"""The receipt of two steps that this repository's environment really trained, once per session of tests.

Each test of a setup makes a machine of its own; without it each would pay for the same two steps of the same model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from trainer.build_locks import EXTENSIONS_DIR, extensions_dir
from trainer.recipe import Recipe

ROOT = Path(__file__).parents[1]
PYTHON = f"{sys.prefix}/bin/python"
TIMEOUT_S = 300


def run_steps(root: Path, requests: dict[str, dict[str, Any]], **environ: str) -> dict[str, str]:
    """Run steps of a setup as its supervisor does, in order; return what each said. Fails with the first that does."""
    said = {}
    for name, request in requests.items():
        path = root.parent / f"step-{name}.json"
        path.write_text(json.dumps(request))
        done = subprocess.run(
            [sys.executable, "-m", "controller.boxside", "step", name, str(path)], cwd=ROOT, text=True,
            env=steps_environment(**environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        said[name] = done.stdout
    return said


def steps_environment(**changes: str) -> dict[str, str]:
    """Return the environment of a supervisor's children: our code, and where this environment's kernels lie."""
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    return {**kept, "PYTHONPATH": str(ROOT), EXTENSIONS_DIR: extensions_dir(PYTHON), **changes}


def recipe_json(**keys: Any) -> dict[str, Any]:
    """Return a whole recipe as the box gets it."""
    recipe = Recipe.model_validate({"name": "t", "version": "t", "plan": "t", "base_model_dir": "/none", **keys})
    return recipe.model_dump(mode="json")


def place_receipt(root: str | Path, **keys: Any) -> None:
    """Put the receipt into a root folder that is new: for a recipe with these of its keys, in this environment."""
    venvs = Path(root) / "venvs"
    venvs.mkdir(parents=True, mode=0o700, exist_ok=True)
    for folder in (Path(root), venvs):
        folder.chmod(0o700)
    for name, content in _receipts(json.dumps(keys, sort_keys=True)).items():
        (venvs / name).write_bytes(content)


@cache
def _receipts(keys: str) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        common = {"root": str(root), "code": str(ROOT), "python": PYTHON}
        smoke = {**common, "recipe": recipe_json(**json.loads(keys))}
        run_steps(root, {"environment": {**common, "lock": "cpu"}, "smoke": smoke})
        return {path.name: path.read_bytes() for path in (root / "venvs").glob("smoke-*.json")}
