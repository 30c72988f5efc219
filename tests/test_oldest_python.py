"""The box's files under a real Python 3.8, where one is found: imported, not just parsed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.test_architecture import ROOT, box_files


def find_python_3_8() -> str | None:
    candidates = [shutil.which("python3.8"), *Path(os.path.expanduser("~/.pyenv/versions")).glob("3.8.*/bin/python3.8")]
    return next((str(path) for path in candidates if path and _runs(str(path))), None)


def _runs(path: str) -> bool:
    """Whether this is an interpreter and not a version manager's empty shim."""
    return subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0


def test_box_files_import_under_python_3_8():
    python = find_python_3_8()
    if python is None:
        pytest.skip("no Python 3.8 on this machine: the files were only parsed as 3.8 (tests/test_architecture.py)")
    names = [str(path.relative_to(ROOT))[:-3].replace("/", ".") for path in box_files()]
    names = [name for name in names if not name.endswith(("__init__", "__main__"))]
    assert len(names) >= 8
    done = subprocess.run(
        [python, "-c", "import sys, importlib; [importlib.import_module(name) for name in sys.argv[1:]]", *names],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
