"""The Python that trains: the person's own environment, looked at only, or one of ours, made from a lock file.

Runs on the box: standard library and Python 3.8 only. Side effects: `make_environment` makes a folder in
`$ROOT/venvs`, named by what is in it, and completes it with `complete.json`; a half-made one is made anew. An older
environment stays in use until the new one has proven itself.

A lock file is a requirements file; a line `# stage: 2 --no-build-isolation` begins the next call of the installer,
with those options: DeepSpeed's build needs torch to be there already. A stage whose files are known by their sha256
takes no others, and is installed by uv where the box has it; one without comes from wherever pip is told to look.

    python3 -m controller.boxside.environment LOCK.txt PYTHON      installs a lock file into an environment
"""

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional

from controller.boxside.folders import make_private_folder
from controller.boxside.work import read_json
from corpus_builder.errors import Named, ProjectError
from trainer.gpus import Gpus
from trainer.journal import now_utc, save_json
from trainer.run_paths import RootPaths

COMPLETE = "complete.json"
#: The environment that the last setup proved; what a training uses unless it brings its own.
CURRENT = "current.json"
#: The one that a setup is about to prove.
CANDIDATE = "candidate.json"
NEEDED = ("torch", "transformers", "deepspeed", "pydantic", "yaml", "tokenizers", "numpy")
_MARKER = "ZY_VERSIONS "
_PROBE = (
    "import importlib, json; names = %r; "
    "versions = {name: getattr(importlib.import_module(name), '__version__', '') for name in names}; "
    "print(%r + json.dumps(versions))" % (NEEDED, "\n" + _MARKER)
)
#: Everything that may make an environment another one: its Python, and all that is installed, by version.
_ASK_PACKAGES = (
    "import sys; from importlib import metadata; print(sys.version); "
    "print(sorted((str(found.metadata['Name']), found.version) for found in metadata.distributions()))"
)
_STAGE = re.compile(r"#\s*stage:\s*\d+\s*(.*)$")
_PROBE_TIMEOUT_S = 600  # the first import of torch from a cold network disk takes minutes


@dataclass(frozen=True)
class Stage:
    """One call of the installer."""

    options: List[str]
    lines: List[str]

    @property
    def is_hashed(self) -> bool:
        """Whether every file that may come is known by its sha256."""
        return any("--hash=" in line for line in self.lines)


def lock_name(gpus: Gpus) -> str:
    """Return the lock file for what the box has: `cpu`, `volta` (7.x) or `ampere` (8.0 and newer).

    Source: PyPI's torch wheels carry sm_70 in builds before 2.11 only (pytorch#172352).
    """
    if gpus.is_installed and gpus.rows is None:  # "could not ask" is never "there is none"
        raise ProjectError("environment_failed", path="nvidia-smi", reason="it is installed and does not answer")
    if not gpus.rows:
        return "cpu"
    capability = min(_capability(row) for row in gpus.rows)
    if capability < 7:
        raise ProjectError("environment_failed", path="nvidia-smi", reason="compute capability %g" % capability)
    return "volta" if capability < 8 else "ampere"


def _capability(row: Mapping[str, Any]) -> float:
    """Return a GPU's compute capability; a driver too old to say it is one of Volta's time."""
    return float(row["compute_capability"]) if row["compute_capability"] else 7.0


def read_lock_file(code: str, name: str) -> str:
    """Return a lock file of the release; raise `environment_failed`, naming it, when there is none."""
    path = os.path.join(code, "configs", "environments", name + ".txt")
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        raise ProjectError(
            "environment_failed", path="configs/environments/%s.txt" % name, reason="there is no lock file for this box"
        ) from None


def environment_digest(lock_text: str, python_version: str = "") -> str:
    """Return the name of an environment: what is installed, for which Python and machine."""
    parts = [lock_text, python_version or platform.python_version(), platform.machine()]
    return hashlib.sha256("\0".join(parts).encode("utf-8")).hexdigest()[:16]


def python_of(folder: str) -> str:
    """Return the interpreter of an environment, given its folder or the interpreter itself."""
    return folder if os.path.basename(folder).startswith("python") else os.path.join(folder, "bin", "python")


def split_stages(lock_text: str) -> List[Stage]:
    """Return the calls of pip that a lock file asks for, in order; stages without a requirement are left out."""
    stages = [Stage([], [])]
    for line in lock_text.splitlines():
        match = _STAGE.match(line.strip())
        if match is not None:
            options = shlex.split(match.group(1))
            if not all(option.startswith("--") for option in options):
                raise ProjectError("environment_failed", path="lock file", reason="a stage holds more than options")
            stages.append(Stage(options, []))
        elif line.strip() and not line.lstrip().startswith("#"):
            stages[-1].lines.append(line)
    return [stage for stage in stages if stage.lines]


def probe(python: str, overlay: Optional[str] = None) -> Dict[str, str]:
    """Return the versions of what training needs; raise `environment_unusable`. Nothing is written, not even `.pyc`.

    Args:
        overlay: A folder with what the environment lacks.
    """
    environment = os.environ if overlay is None else dict(os.environ, PYTHONPATH=overlay)
    said = ask_python(python, _PROBE, environment, timeout_s=_PROBE_TIMEOUT_S)
    return dict(json.loads(find_marked(said, _MARKER, python)))


def ask_python(python: str, code: str, environment: Mapping[str, str], *, timeout_s: float) -> str:
    """Return what an interpreter prints for `code`; it writes nothing, not even `.pyc`.

    Raises:
        ProjectError: `environment_unusable`: it did not run, took longer than `timeout_s` seconds, or failed.
    """
    try:
        answer = subprocess.run(
            [python, "-B", "-c", code],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            universal_newlines=True,
            errors="replace",
            timeout=timeout_s,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProjectError("environment_unusable", path=python, reason=type(error).__name__) from error
    if answer.returncode != 0:
        words = answer.stderr.strip().splitlines()  # of a foreign program: it may name files and people
        reason = Named(words[-1][:200]) if words else "exit code %d" % answer.returncode
        raise ProjectError("environment_unusable", path=python, reason=reason)
    return answer.stdout


def find_marked(said: str, marker: str, python: str) -> str:
    """Return what stands behind `marker` in the last line that begins with it; raise `environment_unusable`."""
    found = [line for line in said.splitlines() if line.startswith(marker)]
    if not found:
        raise ProjectError("environment_unusable", path=python, reason="exit code 0")
    return found[-1][len(marker) :]


def make_environment(root: str, lock_text: str, run: Any) -> str:
    """Return the interpreter of the environment of `lock_text`, made where it is not there yet.

    Args:
        run: Called with an argv and what it does in words; raises when the command fails.
    """
    folder = RootPaths(root).venv(environment_digest(lock_text))
    python = python_of(folder)
    if read_json(os.path.join(folder, COMPLETE)) is not None and os.path.exists(python):
        return python
    make_private_folder(RootPaths(root).venvs)
    if os.path.lexists(folder):
        shutil.rmtree(folder)
    run([sys.executable, "-m", "venv", folder], "venv")
    install(python, lock_text, folder, run)
    complete = {"versions": probe(python), "python": platform.python_version(), "made_at": now_utc()}
    save_json(os.path.join(folder, COMPLETE), complete)
    return python


def install(python: str, lock_text: str, folder: str, run: Any) -> None:
    """Install a lock file into the environment of `python`; its stages are written to `folder`."""
    uv = shutil.which("uv")
    for number, stage in enumerate(split_stages(lock_text), 1):
        requirements = os.path.join(folder, "stage-%d.txt" % number)
        with open(requirements, "w", encoding="utf-8") as file:
            file.write("\n".join(stage.lines) + "\n")
        argv = install_argv(python, stage, requirements, uv)
        run(argv, "%s, stage %d" % ("uv" if argv[0] == uv else "pip", number))


def install_argv(python: str, stage: Stage, requirements: str, uv: Optional[str] = None) -> List[str]:
    """Return one call of the installer; what a hashed stage needs stands in it, so nothing is resolved."""
    locked = ["--require-hashes", "--no-deps"] if stage.is_hashed else []
    if uv is not None and stage.is_hashed:
        words = [uv, "pip", "install", "--python", python, "--no-progress"]
    else:
        words = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    return words + locked + list(stage.options) + ["-r", requirements]


def for_installers(environ: Mapping[str, str]) -> Dict[str, str]:
    """Return an environment in which uv goes where pip goes: to the same index, trusting what the machine trusts.

    uv reads no pip.conf and brings certificates of its own; a mirror or a proxy of a company is signed by neither.
    """
    told = dict({"UV_SYSTEM_CERTS": "1"}, **environ)
    if "PIP_INDEX_URL" in told:
        told["UV_DEFAULT_INDEX"] = told["PIP_INDEX_URL"]
    return told


def note_candidate(root: str, python: str, versions: Mapping[str, str], overlay: Optional[str]) -> None:
    """Write down which interpreter a setup is about to prove, and the folder with what it lacks."""
    make_private_folder(RootPaths(root).venvs)
    asked = ask_python(python, _ASK_PACKAGES, os.environ, timeout_s=_PROBE_TIMEOUT_S)
    packages = hashlib.sha256(asked.encode("utf-8")).hexdigest()[:16]
    noted = {"python": python, "packages": packages, "versions": dict(versions), "overlay": overlay}
    save_json(os.path.join(RootPaths(root).venvs, CANDIDATE), noted)


def read_candidate(root: str, python: str) -> Dict[str, Any]:
    """Return what was noted of the interpreter that is to be proved; raise `environment_failed` where it is another."""
    noted = read_json(os.path.join(RootPaths(root).venvs, CANDIDATE))
    if noted is None or noted["python"] != python:
        raise ProjectError("environment_failed", path=python, reason="no setup has looked at it")
    return noted


def note_current(root: str, candidate: Mapping[str, Any]) -> None:
    """Write down that this is the interpreter which the last setup proved."""
    save_json(os.path.join(RootPaths(root).venvs, CURRENT), dict(candidate, at=now_utc()))


def find_current(root: str) -> Optional[str]:
    """Return the interpreter that the last setup proved, None when there is none."""
    noted = read_json(os.path.join(RootPaths(root).venvs, CURRENT))
    return None if noted is None else str(noted["python"])


def overlay_link(root: str, python: str) -> str:
    """Return the pointer to the folder with what an environment lacks; it leads nowhere where nothing is missing."""
    name = hashlib.sha256(os.path.abspath(python).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return os.path.join(RootPaths(root).venvs, "overlay-of-" + name)


def find_overlay(root: str, python: str) -> Optional[str]:
    """Return the folder with what an environment lacks: the one it was proved with, else the newest, else None."""
    noted = read_json(os.path.join(RootPaths(root).venvs, CURRENT))
    if noted is not None and noted["python"] == python and "overlay" in noted:
        return None if noted["overlay"] is None else str(noted["overlay"])
    folder = os.path.realpath(overlay_link(root, python))
    return folder if os.path.isdir(folder) else None


def _install_or_exit(argv: List[str], words: str) -> None:
    print(words, flush=True)
    code = subprocess.run(argv, env=for_installers(os.environ), stdin=subprocess.DEVNULL).returncode
    if code != 0:
        sys.exit(code)


def main(lock_path: str, python: str) -> None:
    """Install a lock file into an environment; exit with the installer's code where it fails."""
    with open(lock_path, encoding="utf-8") as file:
        lock_text = file.read()
    with tempfile.TemporaryDirectory() as folder:
        install(python, lock_text, folder, _install_or_exit)


if __name__ == "__main__":
    main(*sys.argv[1:])
