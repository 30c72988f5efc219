"""A person's own environment in miniature: this repository's packages by links, without some of them."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

SITE = Path(sysconfig.get_paths()["purelib"])


def make_mother(folder: Path, *, without: Iterable[str]) -> Path:
    """Return the interpreter of an environment that lacks some distributions, by their names."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    missing = {entry for name in [*without, "zyforge"] for entry in _top_level(name)}
    (site,) = folder.glob("lib/python*/site-packages")
    for path in SITE.iterdir():
        if path.name not in missing and path.name != "__pycache__" and "zyforge" not in path.name:
            if path.name == "pip":  # really there, nothing of it compiled: whatever runs it would leave its `.pyc`
                shutil.copytree(path, site / "pip", ignore=shutil.ignore_patterns("__pycache__"))
            else:
                (site / path.name).symlink_to(path)
    return folder / "bin/python"


def _top_level(name: str) -> set[str]:
    """Return the entries of site-packages that a distribution owns."""
    try:
        files = metadata.distribution(name).files or []
    except metadata.PackageNotFoundError:
        return set()
    return {file.parts[0] for file in files if file.parts[0] != ".."}


def write_lock(path: Path, wheels: Path, names: Iterable[str], *, digest: str | None = None) -> None:
    """Write a hash-locked file of the versions that are installed here, and wheels that hold them."""
    lines = ["--no-index", f"--find-links {wheels}"]
    for name in names:
        wheel = repack(name, wheels)
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        lines += [f"{name}=={metadata.version(name)} \\", f"    --hash=sha256:{digest or found}"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", "utf-8")


def repack(name: str, wheels: Path) -> Path:
    """Return the wheel of an installed distribution, packed again: no download."""
    found = metadata.distribution(name)
    tag = re.search(r"^Tag: (\S+)", found.read_text("WHEEL") or "", re.MULTILINE)
    assert tag is not None
    wheels.mkdir(parents=True, exist_ok=True)
    path = wheels / f"{re.sub('[-.]+', '_', found.metadata['Name'])}-{found.version}-{tag[1]}.whl"
    files = [file for file in found.files or [] if file.parts[0] != ".." and "__pycache__" not in file.parts]
    kept = [file for file in files if file.name not in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")]
    (record,) = (file for file in files if file.name == "RECORD")
    with zipfile.ZipFile(path, "w") as archive:
        for file in kept:
            archive.write(os.fspath(file.locate()), str(file))
        archive.writestr(str(record), "".join(f"{file},,\n" for file in [*kept, record]))
    return path
