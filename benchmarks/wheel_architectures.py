"""For which GPU generations a torch wheel holds code: the receipt behind the lock files.

python -m benchmarks.wheel_architectures torch-2.10.0-cp311-cp311-manylinux_2_28_x86_64.whl

Reads the compiler flags that torch keeps inside `libtorch_cuda.so` (what `torch.cuda.get_arch_list` shows on a GPU).
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

_FLAG = re.compile(rb"arch=compute_\d+[a-z]?,code=(sm_\d+[a-z]?)")
_CHUNK_BYTES = 1 << 24
_OVERLAP_BYTES = 64


def architectures(wheel: Path) -> list[str]:
    """Return e.g. `["sm_70", "sm_75"]`, in the order of their numbers; empty for a wheel without CUDA."""
    found: set[str] = set()
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith("libtorch_cuda.so"):
                continue
            with archive.open(name) as library:
                rest = b""
                while chunk := library.read(_CHUNK_BYTES):
                    found |= {match.decode() for match in _FLAG.findall(rest + chunk)}
                    rest = chunk[-_OVERLAP_BYTES:]
    return sorted(found, key=lambda name: int(re.sub(r"\D", "", name)))


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        print(f"{path.name}: {' '.join(architectures(path)) or 'no code for GPUs'}")
