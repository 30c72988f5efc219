"""What the recipe asks of its base model beyond being whole: not the stock model, and knowing some answers.

Side effects: reads weight files; `DigestCache` keeps their digests in the data folder; `check_answers` starts a child
and writes what the model said to a 0600 file of the run.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from corpus_builder.errors import ProjectError, parse_error_line
from trainer.journal import save_json
from trainer.recipe import Recipe
from trainer.sizes import weight_files

SUITE = "base_must_answer"


class DigestCache:
    """sha256 of files, kept by path, size and time of change: reading 15 GB takes a minute, and they rarely change.

    Where `path` cannot be written, each digest is made anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._known: dict[str, list[object]] = dict(json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            self._known = {}

    def sha256(self, file: Path, *, keeps: bool = True) -> str:
        """Return the digest of a file; `keeps`: write it down."""
        stat = file.stat()
        stamp = [stat.st_size, stat.st_mtime_ns]
        known = self._known.get(str(file))
        if isinstance(known, list) and known[:2] == stamp:
            return str(known[2])
        digest = hash_file(file)
        self._known[str(file)] = [*stamp, digest]
        if keeps:
            self._save()
        return digest

    def _save(self) -> None:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            save_json(str(self._path), self._known)
        except OSError:
            pass


def hash_file(path: Path) -> str:
    """Return the sha256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def check_not_stock(recipe: Recipe, cache: DigestCache, *, keeps: bool = True) -> None:
    """Raise `base_is_stock`, naming the file, if the base holds a weight file that the recipe forbids."""
    forbidden = frozenset(recipe.base_must_not_hold)
    if not forbidden:
        return
    for file in weight_files(Path(recipe.base_model_dir)):
        if cache.sha256(file.resolve(), keeps=keeps) in forbidden:
            raise ProjectError("base_is_stock", path=recipe.base_model_dir, file=file.name)


def check_answers(recipe: Recipe, out: Path, environment: Mapping[str, str]) -> None:
    """Raise `base_did_not_answer`, with counts only, unless the base answers all that it must; asked once per run.

    Args:
        out: Where the answers go, 0600; the request lies beside it while the child runs.
        environment: Of the child that loads the model; it decides which GPU it sees.
    """
    total = len(recipe.base_must_answer)
    if not total:
        return
    if not out.exists():
        _ask(recipe, out, environment)
    right = int(json.loads(out.read_text("utf-8"))["right"])
    if right < total:
        out.rename(out.with_name(out.name + ".failed"))  # another attempt asks again: the base may be another one
        raise ProjectError("base_did_not_answer", path=recipe.base_model_dir, right=right, total=total)


def _ask(recipe: Recipe, out: Path, environment: Mapping[str, str]) -> None:
    questions = [question.model_dump(mode="json") for question in recipe.base_must_answer]
    suite = {"name": SUITE, "pass_at_least": len(questions), "questions": questions}
    request = out.with_name(out.name + ".request")
    save_json(str(request), {"model_dir": recipe.base_model_dir, "suite": suite, "out": str(out)})
    try:
        done = subprocess.run(
            [sys.executable, "-m", "trainer.accept", str(request)],
            env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, errors="replace", check=False,
        )  # fmt: skip
    finally:
        os.unlink(request)
    if done.returncode != 0:
        errors = [error for line in done.stderr.splitlines() if (error := parse_error_line(line)) is not None]
        raise (
            errors[-1]
            if errors
            else ProjectError(
                "run_failed", state="failed", reason=f"asking the base model ended with {done.returncode}", name=SUITE
            )
        )
