"""What a person's own environment lacks of our small packages: a folder beside it, never a file in it.

Runs on the box: standard library and Python 3.8 only. Side effects: `make_overlay` makes a folder in `$ROOT/venvs`,
named by what is in it and for whom, whole or not at all; its files are known by the sha256 of our lock file. Steps and
trainings have it on PYTHONPATH, in front of the environment's own packages. Large packages belong together (torch with
its CUDA, transformers with its tokenizers), so they are never brought: their lack is refused by name.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from controller.boxside.environment import COMPLETE, ask_python, find_marked, overlay_link, split_stages
from controller.boxside.folders import make_private_folder, point_to
from controller.boxside.work import read_json
from corpus_builder.errors import ProjectError
from trainer.journal import now_utc, save_json
from trainer.run_paths import RootPaths

#: Module -> what is refused, by the name that a person installs.
LARGE = ("torch", "transformers", "deepspeed", "numpy", "tokenizers", "safetensors")
#: Module -> the lines of the lock file that bring it: itself, and what it cannot be without in the same version.
SMALL: Dict[str, Tuple[str, ...]] = {
    "pydantic": ("pydantic", "pydantic-core", "annotated-types", "typing-extensions", "typing-inspection"),
    "yaml": ("pyyaml",),
    "charset_normalizer": ("charset-normalizer",),
    "jinja2": ("jinja2", "markupsafe"),
    "ijson": ("ijson",),
    "scipy": ("scipy",),
    "datasketch": ("datasketch",),
    "pyarrow": ("pyarrow",),
    "psutil": ("psutil",),
    "packaging": ("packaging",),
    "ninja": ("ninja",),
    "accelerate": ("accelerate",),
    "peft": ("peft",),
}
#: Older ones count as missing: our code cannot be read without.
_LEAST_MAJOR = {"pydantic": 2}
_MARKER = "ZY_LACKS "
_ASK = """
import importlib.util, json, platform
from importlib import metadata
def lacks(name):
    try:
        if importlib.util.find_spec(name) is None:
            return True
        return name in least and int(metadata.version(name).split(".")[0]) < least[name]
    except (ImportError, ValueError):
        return True
large, small, least = %r, %r, %r
print(%r + json.dumps({"python": platform.python_version(), "has_pip": not lacks("pip"),
    "large": [name for name in large if lacks(name)], "small": [name for name in small if lacks(name)]}))
"""
_ASK_TIMEOUT_S = 120
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Lacks:
    """What an interpreter said: modules that it cannot find, its version, whether it has pip."""

    python: str
    has_pip: bool
    large: List[str]
    small: List[str]


def ask_lacks(python: str, overlay: Optional[str] = None) -> Lacks:
    """Return what an environment lacks; nothing is imported there, nothing written. Raises `environment_unusable`."""
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    if overlay is not None:
        environment["PYTHONPATH"] = overlay
    code = _ASK % (LARGE, tuple(SMALL), _LEAST_MAJOR, "\n" + _MARKER)
    said = ask_python(python, code, environment, timeout_s=_ASK_TIMEOUT_S)
    return Lacks(**json.loads(find_marked(said, _MARKER, python)))


def wanted_lines(lock_text: str, modules: Sequence[str]) -> List[str]:
    """Return the lines of a lock file that bring the modules, and the options above them. Raises when one has none."""
    names = {name for module in modules for name in SMALL[module]}
    options: List[str] = []
    found: Dict[str, str] = {}
    for block in _blocks(lock_text):
        match = _NAME.match(block)
        if match is None:
            options += [block] if block not in options else []
        elif _normal(match.group()) in names:
            found[_normal(match.group())] = block
    unknown = sorted(names - set(found))
    if unknown:
        raise ProjectError("environment_failed", path="lock file", reason="no line for %s" % ", ".join(unknown))
    return options + [found[name] for name in sorted(found)]


def _blocks(lock_text: str) -> List[str]:
    """Return requirements and options, each with the lines that it goes on in."""
    blocks: List[str] = []
    goes_on = False
    for line in (line for stage in split_stages(lock_text) for line in stage.lines):
        if goes_on:
            blocks[-1] += "\n" + line
        else:
            blocks.append(line)
        goes_on = line.rstrip().endswith("\\")
    return blocks


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def make_overlay(
    root: str, python: str, read_lock: Callable[[], str], run: Callable[[List[str], str], Any]
) -> Optional[str]:
    """Return the folder that an environment needs beside it, made where it is not there yet; None where it needs none.

    Args:
        read_lock: Returns the text of the lock file; called only where something is missing.
        run: Called with an argv and what it does in words; raises when the command fails.

    Raises:
        ProjectError: `environment_unusable`: a large package is missing; `environment_failed`.
    """
    lacks = ask_lacks(python)
    if lacks.large:
        raise ProjectError("environment_unusable", path=python, reason="reason.lacks: " + ", ".join(lacks.large))
    if not lacks.small:
        if os.path.islink(overlay_link(root, python)):
            os.unlink(overlay_link(root, python))
        return None
    lines = wanted_lines(read_lock(), lacks.small)
    folder = os.path.join(RootPaths(root).venvs, "overlay-" + overlay_digest(lines, python, lacks.python))
    if read_json(os.path.join(folder, COMPLETE)) is None:
        make_private_folder(RootPaths(root).venvs)
        _fill(folder, lines, lacks, python, run)
    left = ask_lacks(python, folder).small
    if left:
        raise ProjectError("environment_failed", path=folder, reason="reason.lacks: " + ", ".join(left))
    point_to(overlay_link(root, python), os.path.basename(folder))
    return folder


def overlay_digest(lines: Sequence[str], python: str, version: str) -> str:
    """Return the name of an overlay: what is in it, and the interpreter that it is for."""
    parts = [*lines, os.path.abspath(python), version, platform.machine()]
    return hashlib.sha256("\0".join(parts).encode("utf-8")).hexdigest()[:16]


def _fill(folder: str, lines: Sequence[str], lacks: Lacks, python: str, run: Callable[[List[str], str], Any]) -> None:
    partial = folder + ".partial"
    if os.path.lexists(partial):
        shutil.rmtree(partial)
    os.makedirs(partial)
    requirements = os.path.join(partial, "wanted.txt")
    with open(requirements, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    try:
        run(overlay_argv(python, partial, requirements, lacks.has_pip), "what it lacks: " + ", ".join(lacks.small))
        save_json(os.path.join(partial, COMPLETE), {"python": python, "modules": lacks.small, "made_at": now_utc()})
        os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def overlay_argv(python: str, target: str, requirements: str, has_pip: bool) -> List[str]:
    """Return the call of an installer that writes to `target` alone: uv, the environment's pip, or the system's."""
    locked = ["--target", target, "--require-hashes", "--no-deps", "-r", requirements]
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "install", "--python", python, "--no-progress", *locked]
    pip = [python, "-m", "pip"] if has_pip else [sys.executable, "-m", "pip", "--python", python]
    return [*pip, "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off", *locked]
