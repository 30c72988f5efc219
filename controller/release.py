"""What the box gets: our code and the plan's sources as one content-addressed stream, and the agent bundle.

Side effects: reads files, asks `git ls-files`. The same content always has the same digest and the same bytes:
no owner, no time, no order of a directory gets in. Only regular files travel; a link that leaves its root is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from controller.boxside.release_digest import release_digest
from controller.lean_source import lean
from corpus_builder.errors import Named, ProjectError
from corpus_builder.plan import EXPORTS, Plan, SoulSource, ToolSource

#: Where this code lies; the floors are folders in it.
CODE_ROOT = Path(__file__).resolve().parents[1]
CODE_FOLDERS = ("corpus_builder", "trainer", "controller", "configs")
CODE_SUFFIXES = frozenset({".py", ".yaml", ".json", ".txt", ".po", ".mo"})
#: `†`: modules below the controller that also run on the box with the system's Python (tests/test_architecture.py).
#: They and `controller.boxside` are the agent, but for what `ONLY_STEPS` names.
AGENT_MODULES = (
    "corpus_builder.archive",
    "corpus_builder.archive_limits",
    "corpus_builder.archive_members",
    "corpus_builder.errors",
    "corpus_builder.legacy_encodings",
    "corpus_builder.log_lines",
    "trainer.base_model",
    "trainer.build_locks",
    "trainer.curve",
    "trainer.gpus",
    "trainer.run_paths",
    "trainer.run_state",
    "trainer.progress",
    "trainer.remedies",
    "trainer.locks",
    "trainer.children",
    "trainer.journal",
    "trainer.on_end",
    "trainer.stopping",
    "trainer.supervise",
)
BOXSIDE = "controller/boxside"
#: Modules of steps and of the supervisor: they run from the release on the box, and no request of the agent needs them.
ONLY_STEPS = frozenset(
    {
        "corpus_builder.archive",
        "corpus_builder.archive_limits",
        "corpus_builder.archive_members",
        "corpus_builder.legacy_encodings",
        "controller.boxside.addresses",
        "controller.boxside.commands",
        "controller.boxside.download",
        "controller.boxside.fetch",
        "controller.boxside.links",
        "controller.boxside.overlay",
        "controller.boxside.packages",
        "controller.boxside.parts",
        "controller.boxside.setup_steps",
        "controller.boxside.smoke",
        "trainer.build_locks",
        "trainer.stopping",
        "trainer.supervise",
    }
)
MAX_BUNDLE_BYTES = 60 * 2**10
_CHUNK = 2**18
_GZIP = 31  # zlib's word for a gzip header; its own holds no time and no name


@cache
def agent_bundle() -> bytes:
    """Return the agent: zlib of JSON `{module: lean source}`, deterministic."""
    paths = {name: CODE_ROOT / f"{name.replace('.', '/')}.py" for name in AGENT_MODULES}
    for path in sorted((CODE_ROOT / BOXSIDE).glob("*.py")):
        if path.stem != "__init__":
            paths[f"{BOXSIDE.replace('/', '.')}.{path.stem}"] = path
    needed = {name: path for name, path in sorted(paths.items()) if name not in ONLY_STEPS}
    sources = {name: lean(path.read_text("utf-8")) for name, path in needed.items()}
    return zlib.compress(json.dumps(sources, ensure_ascii=False).encode(), 9)


@dataclass(frozen=True, slots=True)
class ReleaseFile:
    """One file: `path` on the box, and where it lies here."""

    path: str
    local: Path
    mode: int
    size: int
    sha256: str

    def metadata(self) -> dict[str, Any]:
        """Return the row that the box checks the arrived file against."""
        return {"path": self.path, "sha256": self.sha256, "mode": self.mode, "size": self.size}


@dataclass(frozen=True, slots=True)
class Release:
    """Everything that one release holds, in the order of its paths."""

    digest: str
    entries: tuple[ReleaseFile, ...]

    def files(self) -> list[dict[str, Any]]:
        """Return path, sha256, mode and size of every file."""
        return [entry.metadata() for entry in self.entries]

    def stream(self) -> Iterator[bytes]:
        """Yield gzip of all contents, one after another in the order of `files`: the listing says where each ends.

        Raises:
            ProjectError: `release_corrupt` when a file has changed since it was gathered.
        """
        packer = zlib.compressobj(1, zlib.DEFLATED, _GZIP)  # level 1: 0.38 of our own code, at 800 Mbit/s
        for entry in self.entries:
            for data in _content(entry):
                if packed := packer.compress(data):
                    yield packed
        yield packer.flush()


def gather(code_root: Path, repo_root: Path, plan: Plan) -> Release:
    """Return the release of the code in `code_root` and of what `plan` names in `repo_root`.

    A file that the plan names and nobody has is simply not in it: the corpus build names it. Modes are 0755 for
    programs and 0644 for the rest.

    Raises:
        ProjectError: `source_link_leaves_root`; `config_invalid` for a path that is not one of `repo_root`.
    """
    code = ((f"code/{name}", _inside(code_root, name)) for name in code_files(code_root))
    sources = ((f"sources/{name}", _inside(repo_root, name)) for name in source_files(repo_root, plan))
    entries = tuple(_entry(path, local) for path, local in sorted([*code, *sources]) if local.is_file())
    return Release(release_digest(entry.metadata() for entry in entries), entries)


def code_files(code_root: Path) -> list[str]:
    """Return our code, relative to `code_root`: what git tracks, else what has one of our suffixes."""
    listed = _listed_by_git(code_root)
    if listed is None:
        walked = (path for folder in CODE_FOLDERS for path in (code_root / folder).rglob("*"))
        listed = [path.relative_to(code_root).as_posix() for path in walked if "__pycache__" not in path.parts]
    return sorted(name for name in listed if PurePosixPath(name).suffix in CODE_SUFFIXES)


def _listed_by_git(code_root: Path) -> list[str] | None:
    """Return what git tracks and the disk still holds; None where this is no checkout of git's."""
    if not (code_root / ".git").exists():
        return None
    command = ["git", "-C", str(code_root), "ls-files", "-z", "--"]
    try:
        listed = subprocess.run([*command, *CODE_FOLDERS], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    names = (os.fsdecode(name) for name in listed.split(b"\0") if name)
    return [name for name in names if (code_root / name).is_file()]


def source_files(repo_root: Path, plan: Plan) -> list[str]:
    """Return what `plan` names, relative to `repo_root`, whether it exists or not."""
    names: set[str] = set()
    for source in plan.sources:
        if isinstance(source, SoulSource):
            names.update(_relative(path, plan) for path in source.paths)
            for pattern in source.globs:
                matches = repo_root.glob(_relative(pattern, plan))
                names.update(path.relative_to(repo_root).as_posix() for path in matches)
        elif isinstance(source, ToolSource):
            names.add(_relative(source.path, plan))
        elif isinstance(source, EXPORTS) and source.place == "repo":
            for pattern in source.files:
                matches = repo_root.glob(_relative(pattern, plan))
                names.update(path.relative_to(repo_root).as_posix() for path in matches)
    return sorted(names)


def _relative(path: str, plan: Plan) -> str:
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts:
        problem = f"  sources: {path!r} reason.below_repo_root"
        raise ProjectError("config_invalid", path=f"plan {plan.name}", count=1, problems=problem)
    return parts.as_posix()


def _inside(root: Path, name: str) -> Path:
    """Return the real file behind `name`; a link may point anywhere below `root`, and nowhere else."""
    real = (root / name).resolve()
    if not real.is_relative_to(root.resolve()):
        raise ProjectError("source_link_leaves_root", path=Named(name))
    return real


def _entry(path: str, local: Path) -> ReleaseFile:
    digest, size = hashlib.sha256(), 0
    with local.open("rb") as file:
        while data := file.read(_CHUNK):
            digest.update(data)
            size += len(data)
        mode = 0o755 if os.fstat(file.fileno()).st_mode & 0o100 else 0o644
    return ReleaseFile(path, local, mode, size, digest.hexdigest())


def _content(entry: ReleaseFile) -> Iterator[bytes]:
    digest, left = hashlib.sha256(), entry.size
    with entry.local.open("rb") as file:
        while data := file.read(min(_CHUNK, left)):
            digest.update(data)
            left -= len(data)
            yield data
        is_longer = bool(file.read(1))
    if left or is_longer or digest.hexdigest() != entry.sha256:
        raise ProjectError("release_corrupt", path=Named(entry.path), reason="reason.changed_while_sent")
