"""Puts `zy` on the PATH of a runner's job. Standard library only: it runs before anything is installed.

`ZY_RUNNER_PYTHON` may name a Python that has what zyforge depends on (a self-hosted runner's): then nothing is
installed, and it runs the code of this commit. Otherwise an environment is made below `RUNNER_TEMP`, by `uv` where
there is one. The object storage clients are installed only where a storage secret is set: building one of them takes
longer than all the rest. No package's build script sees a secret.

Side effects: an environment on the runner; one line in `GITHUB_PATH`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

CODE_ROOT = Path(__file__).resolve().parents[1]
STORAGE_SECRETS = ("AWS_ACCESS_KEY_ID", "ZY_COS_SECRET_ID")
OLDEST = (3, 10)
LAUNCH = "from controller.cli import main\nmain()"


def wanted(environ: Mapping[str, str]) -> str:
    """Return what to install: our code in place, with the storage clients where a storage secret is set. Pure."""
    needs_storage = any(environ.get(name) for name in STORAGE_SECRETS)
    return f"{CODE_ROOT}[objects]" if needs_storage else str(CODE_ROOT)


def commands(folder: Path, package: str, *, python: str, uv: str | None) -> list[list[str]]:
    """Return the commands that make `folder` an environment with `package`. Pure."""
    inside = str(folder / "bin" / "python")
    if uv is not None:
        return [
            [uv, "venv", "--quiet", "--python", python, str(folder)],
            [uv, "pip", "install", "--quiet", "--python", inside, "--editable", package],
        ]
    pip = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--editable", package]
    return [[python, "-m", "venv", str(folder)], pip]


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which packages are built: nobody's build script sees a key. Pure.

    uv trusts the certificates that the runner trusts, as pip does where a company's proxy reads along.
    """
    kept = {name: value for name, value in environ.items() if not name.startswith(("ZY_", "AWS_", "INPUT_"))}
    return {"UV_SYSTEM_CERTS": "1", **kept}


def install(environ: Mapping[str, str]) -> Path:
    """Return the folder of the `zy` command, made where there is none yet."""
    folder = Path(environ["RUNNER_TEMP"]) / "zyforge"
    given = environ.get("ZY_RUNNER_PYTHON", "")
    if given:
        write_launcher(folder / "bin" / "zy", python=given)
    elif not (folder / "bin" / "zy").exists():
        for command in commands(folder, wanted(environ), python=sys.executable, uv=shutil.which("uv")):
            subprocess.run(command, check=True, env=without_secrets(environ))
    return folder / "bin"


def write_launcher(path: Path, *, python: str) -> None:
    """Write a `zy` that runs our code, as it lies here, with `python`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (f"#!{python}", "import sys", f"sys.path.insert(0, {str(CODE_ROOT)!r})", LAUNCH)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text("\n".join(lines) + "\n", "utf-8")
    partial.chmod(0o755)
    os.replace(partial, path)


def main() -> None:
    """Install, and put the folder first on the PATH of the job's later steps."""
    if sys.version_info < OLDEST:
        sys.exit(
            f"zyforge needs Python {OLDEST[0]}.{OLDEST[1]} or newer on the runner, this is {sys.version.split()[0]}"
        )
    folder = install(os.environ)
    with open(os.environ["GITHUB_PATH"], "a", encoding="utf-8") as file:
        file.write(f"{folder}\n")


if __name__ == "__main__":
    main()
