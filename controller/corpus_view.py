"""`zy corpus preview` and `zy corpus report`: what `zy corpus build` left in a folder, shown. Side effects: a child."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from controller.configuration import CODE_ROOT
from controller.corpus_build import MANIFEST, REPORT, SAMPLES
from controller.invocation import Surroundings, choose_lang, tell_error
from corpus_builder.errors import ProjectError, parse_error_line


def preview(around: Surroundings, *, out: str, wanted: str | None, rows: int, lang: str | None) -> int:
    """Print counts and samples and return the exit code; on a runner no text is printed."""
    return _run(around, lang, out, what="preview", **{"class": wanted}, rows=rows)


def report(around: Surroundings, *, out: str, lang: str | None) -> int:
    """Write the report again, print where it lies and return the exit code."""
    return _run(around, lang, out, what="report")


def _run(around: Surroundings, lang: str | None, out: str, **asked: Any) -> int:
    """Run the ground floor's program with the terminal handed on; its last line on stderr may be an error."""
    spoken = choose_lang(lang, around.environ)
    folder = Path(out).absolute()
    places = {"samples": folder / SAMPLES, "manifest": folder / MANIFEST, "report": folder / REPORT}
    request = {
        **asked,
        **{name: str(path) for name, path in places.items()},
        "see": around.runner.sees(),
        "lang": spoken,
    }
    environment = {**os.environ, "PYTHONPATH": str(CODE_ROOT)}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "request.json"
        path.write_text(json.dumps(request, ensure_ascii=False), "utf-8")
        command = [sys.executable, "-m", "corpus_builder.preview", str(path)]
        around.out.flush()
        child = subprocess.run(command, stderr=subprocess.PIPE, env=environment, encoding="utf-8", errors="replace")
    if child.returncode == 0:
        return 0
    told = [error for line in child.stderr.splitlines() if (error := parse_error_line(line)) is not None]
    error = told[-1] if told else ProjectError("setup_failed", step="corpus", exit_code=child.returncode, name="corpus")
    return tell_error(error, around, spoken)
