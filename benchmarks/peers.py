"""A Python that has TRL beside the project's own libraries: the same torch and transformers on both sides of a claim.

Side effects: the first call makes `.cache/peers/trl` and installs TRL and what it needs with pip; the project's own
environment is read and never written to.
"""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
import venv
from importlib.metadata import version

from benchmarks.measure import ROOT

TRL = "trl==1.16.0"
PEERS_DIR = ROOT / ".cache" / "peers"
INSTALLED = "installed"


def trl_python() -> str:
    """Return the Python that can import TRL, made when missing."""
    folder = PEERS_DIR / "trl"
    python = folder / "bin" / "python"
    if not (folder / INSTALLED).exists():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        (site_packages,) = (folder / "lib").glob("python*/site-packages")
        (site_packages / "project.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
        constraints = folder / "constraints.txt"
        constraints.write_text(f"torch=={version('torch')}\n", "utf-8")  # else pip might bring another, 2 GB of it
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, "-c", str(constraints), TRL, "datasets"], check=True)
        (folder / INSTALLED).touch()
    return str(python)
