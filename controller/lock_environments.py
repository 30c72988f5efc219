"""Lock files of the environments: `python -m controller.lock_environments [NAME …]` writes them from their `.in` files.

`configs/environments/<name>.in` says what is wanted and why; `<name>.txt` says exactly what is installed, with the
sha256 of every file that may come, for every Python from the oldest that the first line of the `.in` file names. A
lock file is a requirements file in stages (`controller.boxside.environment`). Side effects: asks the package index
through uv (a development tool); writes the lock files.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ENVIRONMENTS_DIR = Path(__file__).parents[1] / "configs" / "environments"
NAMES = ("volta", "ampere", "cpu")
#: Built on the spot: its build asks for torch, which must be there before.
BUILT_LAST = ("deepspeed",)
#: On a CPU torch comes in a build of its own (another index, or a file): which one is the machine's choice, so it has
#: no hash here, and what only CUDA builds need is left out.
OPEN_ON_CPU = ("torch",)
_CUDA_ONLY = re.compile(r"(nvidia|cuda|triton)\b")
_OLDEST_PYTHON = re.compile(r"# python >= (\d+\.\d+)")
HEAD = """# Made from {name}.in by `python -m controller.lock_environments`; edit that, not this file.
"""


def lock(name: str) -> str:
    """Return the text of a lock file; raise CalledProcessError, with uv's words on stderr, where nothing fits."""
    wanted = ENVIRONMENTS_DIR / f"{name}.in"
    match = _OLDEST_PYTHON.match(wanted.read_text("utf-8"))
    if match is None:
        raise ValueError(f"{wanted}: the first line must name the oldest Python: # python >= 3.10")
    options = ["--universal", "--generate-hashes", "--no-header", "--no-annotate", "--quiet"]
    argv = ["uv", "pip", "compile", *options, "--python-version", match[1], str(wanted)]
    found = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout
    return HEAD.format(name=name) + staged(list(requirements(found)), is_cpu=name == "cpu")


def requirements(text: str) -> Iterator[str]:
    """Yield each requirement of a requirements file with its hashes, the continuation lines included."""
    for block in re.split(r"(?<!\\)\n(?=\S)", text.strip()):
        yield block.strip()


def staged(blocks: Sequence[str], *, is_cpu: bool) -> str:
    """Return requirements in the calls of the installer that they need."""
    if is_cpu:
        opened = [_without_hashes(block) for block in blocks if _name(block) in OPEN_ON_CPU]
        blocks = [block for block in blocks if _name(block) not in OPEN_ON_CPU and not _CUDA_ONLY.match(_name(block))]
        first = ["\n".join(opened), "# stage: 2"]
    else:
        first = []
    last = [block for block in blocks if _name(block) in BUILT_LAST]
    others = [block for block in blocks if _name(block) not in BUILT_LAST]
    return "\n".join([*first, *others, f"# stage: {len(first) // 2 + 2} --no-build-isolation", *last]) + "\n"


def _name(block: str) -> str:
    return re.split(r"[=\s;\[]", block, maxsplit=1)[0]


def _without_hashes(block: str) -> str:
    return block.partition("\\")[0].strip()


def main(names: Sequence[str]) -> None:
    """Write the lock files of `names`, of all environments without any."""
    for name in names or NAMES:
        (ENVIRONMENTS_DIR / f"{name}.txt").write_text(lock(name), "utf-8")
        print(f"{name}.txt written")


if __name__ == "__main__":
    main(sys.argv[1:])
