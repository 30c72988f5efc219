"""`zy --help` against `python -c "import click"`, as processes (target 1.5)."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.measure import ROOT, Claim, best_wall_of, report

ZY = "from controller.cli import main; main()"
LOADED = "import sys; import controller.cli; print(*sorted({name.split('.')[0] for name in sys.modules}))"


def run(code: str, *arguments: str) -> str:
    """Run Python with `code` and return what it prints."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main() -> int:
    found = best_wall_of({"click": lambda: run("import click"), "zy": lambda: run(ZY, "--help")}, rounds=15)
    ours = {"controller", "corpus_builder", "trainer", "click"}
    loaded = {name for name in run(LOADED).split() if not name.startswith("_")}
    foreign = loaded - set(sys.stdlib_module_names) - ours
    return report(
        "help",
        about=(__doc__ or "").strip(),
        packages=("click",),
        claims=[
            Claim("zy --help, of import click", found["zy"] / found["click"], 1.5, at_most=True),
            Claim("other libraries imported", len(foreign), 0, at_most=True),
        ],
        numbers=[
            ('python -c "import click"', f"{found['click'] * 1e3:.0f} ms"),
            ("zy --help", f"{found['zy'] * 1e3:.0f} ms"),
            ("other libraries", ", ".join(sorted(foreign)) or "none"),
        ],
    )


if __name__ == "__main__":
    raise SystemExit(main())
