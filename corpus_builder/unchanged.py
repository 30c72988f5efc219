"""Whether a build would make what is there already: a look at every input's size, times and inode, nothing read.

More is looked at than is read (a pattern's whole folder), so a change too many starts a build that finds its files
in the cache; a change too few cannot be. Side effects: looks into folders; reads and writes `built.json`.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corpus_builder.cache import TICK_NS, builder_digest, cache_dir, digest_of, now_ns
from corpus_builder.manifest import Finding, Manifest, manifest_from_json, manifest_to_json
from corpus_builder.private_file import gone_on_failure, partial_of
from corpus_builder.request import Request
from corpus_builder.templates import TEMPLATE_FILES

_BUILT = "built.json"
_WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Look:
    """All that a build depends on, as it looked at one moment.

    Attributes:
        digest: Of every input's name, size, times and inode, the request, and our own code.
        files: How many files were looked at.
        is_settled: No file changed a moment ago, so none can change again without a trace.
    """

    digest: str
    files: int
    is_settled: bool


def look_at(request: Request) -> Look:
    """Return how the inputs look now."""
    started_ns = now_ns()
    digest = hashlib.sha256(_request_digest(request).encode())
    count, newest_ns = 0, 0
    for name, found in _inputs(request):
        count += 1
        newest_ns = max(newest_ns, found.st_mtime_ns, found.st_ctime_ns)
        digest.update(
            f"{name}\0{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}\n".encode(
                "utf-8", "surrogateescape"
            )
        )
    return Look(digest.hexdigest(), count, newest_ns < started_ns - TICK_NS)


def find_built(request: Request, look: Look) -> Manifest | None:
    """Return the head of the manifest of a build that saw the same and whose files are there.

    The head is all but the account of each file; findings are summed by kind.
    """
    try:
        built: dict[str, Any] = json.loads((cache_dir(request.samples) / _BUILT).read_text("utf-8"))
        if built["look"] != look.digest or built["outputs"] != _outputs(request):
            return None
        return manifest_from_json(built["head"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save_built(request: Request, look: Look, manifest: Manifest) -> None:
    """Remember that the outputs are those of `look`; nothing is remembered of inputs that may still be changing."""
    path = cache_dir(request.samples) / _BUILT
    if not look.is_settled:
        path.unlink(missing_ok=True)
        return
    head = manifest_to_json(replace(manifest, files=(), findings=_summed(manifest)))
    partial = partial_of(path)
    with gone_on_failure(partial):
        partial.write_text(json.dumps({"look": look.digest, "outputs": _outputs(request), "head": head}), "utf-8")
    os.replace(partial, path)


def _summed(manifest: Manifest) -> tuple[Finding, ...]:
    """Return the findings without their places: one a kind."""
    return tuple(
        Finding(kind=kind, action="reported", path="", count=count, lines=())
        for kind, count in manifest.found().items()
    )


def output_paths(request: Request) -> tuple[Path, ...]:
    """Return the files that a build writes."""
    return request.samples, request.report, request.full_report, request.manifest


def _outputs(request: Request) -> list[list[int]]:
    found = [os.stat(path) for path in output_paths(request)]
    return [[one.st_size, one.st_mtime_ns, one.st_ctime_ns, one.st_ino] for one in found]


def _request_digest(request: Request) -> str:
    return digest_of(
        {
            "code": builder_digest(),
            "plan": request.plan.model_dump(mode="json"),
            "suite": request.suite.model_dump(mode="json") if request.suite is not None else None,
            "max_seq_len": request.max_seq_len,
            "lang": request.lang,
            "paths": [
                os.fsencode(path).hex()
                for path in (request.sources_dir, request.dialog_dir or "", *output_paths(request))
            ],
        }
    )


def _inputs(request: Request) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the name and the state of each file that a build may read; a missing one has no state and is left out."""
    for name in ("tokenizer.json", *TEMPLATE_FILES):
        yield from _file(str(request.base_model_dir / name))
    root = str(request.sources_dir)
    for source in request.plan.sources:
        paths = [*getattr(source, "paths", ()), *([source.path] if hasattr(source, "path") else [])]
        for path in paths:
            yield from _file(os.path.join(root, path))
        for pattern in (*getattr(source, "globs", ()), *getattr(source, "files", ())):
            yield from _matching(root, pattern)  # patterns below `dialog_dir` find what its tree has anyway
    if request.dialog_dir is not None:
        yield from _tree(str(request.dialog_dir), None)


def _file(path: str) -> Iterator[tuple[str, os.stat_result]]:
    try:
        yield path, os.stat(path)
    except OSError:
        return


def _matching(root: str, pattern: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files below the pattern's fixed folders whose names match its last part."""
    parts = pattern.split("/")
    fixed = next((at for at, part in enumerate(parts) if _WILD.search(part)), len(parts) - 1)
    last = re.compile(fnmatch.translate(parts[-1])) if parts[-1] != "**" else None
    yield from _tree(os.path.join(root, *parts[:fixed]), last)


def _tree(
    folder: str, wanted: re.Pattern[str] | None, above: tuple[str, ...] = ()
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every file below `folder`, in order; a link counts with its target and with where it leads.

    Args:
        wanted: Names of the files that count; then links to folders are followed as well, as patterns follow them.
        above: The real folders that links were followed from.
    """
    try:
        with os.scandir(folder) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return
    for entry in ordered:
        if entry.is_dir(follow_symlinks=False):
            yield from _tree(entry.path, wanted, above)
        elif entry.is_symlink():
            yield from _link(entry, wanted, above)
        elif wanted is None or wanted.match(entry.name):
            yield entry.path, entry.stat(follow_symlinks=False)


def _link(
    entry: os.DirEntry[str], wanted: re.Pattern[str] | None, above: tuple[str, ...]
) -> Iterator[tuple[str, os.stat_result]]:
    yield entry.path, entry.stat(follow_symlinks=False)
    target = os.path.realpath(entry.path)
    yield from _file(target)
    if wanted is not None and target not in above and os.path.isdir(target):
        yield from _tree(target, wanted, (*above, target))
