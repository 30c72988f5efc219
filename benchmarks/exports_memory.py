"""Memory of reading a ChatGPT export: 700 MB of conversations.json must take less than 500 MB, reader and whole build.

    python -m benchmarks.exports_memory [megabytes of the file, 700]

The file is written to a temporary folder: trees of our own invention, with branches, tool calls and hidden nodes.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.generated import Writer
from benchmarks.measure import Child, Claim, report, run_child
from tests.tokenizers_real import qwen_tokenizer_json

LIMIT_MB = 500
READ = """
import sys
from pathlib import Path
from corpus_builder.exports import Export
from corpus_builder.plan import ExportSource, Speakers
source = ExportSource(kind="chatgpt", files=("x",))
reading = Export(Path(sys.argv[1]), "c.json", source, Speakers(user=("u",), assistant=("a",))).reading
for _ in reading.samples:
    pass
assert reading.units_read == reading.units_kept + sum(reading.drops.values())
print(reading.units_read, reading.units_kept, dict(reading.drops), dict(reading.notes))
"""


class TreeWriter:
    """Makes conversations as ChatGPT exports them."""

    def __init__(self, seed: int) -> None:
        self._writer = Writer(seed)
        self._rng = random.Random(seed)
        self._count = 0

    def conversation(self) -> dict[str, Any]:
        """Return one tree: rounds in a chain, now and then a second answer, a hidden node or a call of a tool."""
        mapping: dict[str, Any] = {"root": {"id": "root", "message": None, "parent": None, "children": []}}
        at = self._add(mapping, "root", "system", "", metadata={"is_visually_hidden_from_conversation": True})
        for _ in range(self._rng.randint(1, 20)):
            asked = self._add(mapping, at, "user", self._writer.paragraph(1, 3))
            if self._rng.random() < 0.1:
                self._add(mapping, asked, "assistant", self._writer.answer())
            if self._rng.random() < 0.1:
                call = self._add(mapping, asked, "assistant", "search", recipient="web")
                asked = self._add(mapping, call, "tool", self._writer.paragraph(3, 9))
            at = self._add(mapping, asked, "assistant", self._writer.answer())
        return {"title": "…", "create_time": 1756000000.5, "mapping": mapping, "current_node": at}

    def _add(self, mapping: dict[str, Any], parent: str, role: str, text: str, **more: Any) -> str:
        self._count += 1
        key = f"00000000-0000-4000-8000-{self._count:012d}"
        message = {
            "id": key, "author": {"role": role, "name": None, "metadata": {}}, "create_time": 1756000000.5,
            "content": {"content_type": "text", "parts": [text]}, "status": "finished_successfully", "weight": 1.0,
            "metadata": {"model_slug": "made-up", "request_id": key}, "recipient": "all", **more,
        }  # fmt: skip
        mapping[key] = {"id": key, "message": message, "parent": parent, "children": []}
        mapping[parent]["children"].append(key)
        return key


def write_export(path: Path, size_bytes: int) -> int:
    """Write an export of `size_bytes`, Chinese as escapes as ChatGPT writes it, and return how many conversations."""
    trees, count = TreeWriter(1), 0
    with path.open("w", encoding="utf-8") as file:
        file.write("[")
        while file.tell() < size_bytes:
            file.write((", " if count else "") + json.dumps(trees.conversation()))
            count += 1
        file.write("]")
    return count


def write_request(folder: Path) -> Path:
    """Write the request of a whole build of the export, and the tokenizer that it needs."""
    (folder / "model").mkdir()
    (folder / "model/tokenizer.json").write_text(qwen_tokenizer_json(), "utf-8")
    plan = {
        "name": "memory", "speakers": {"user": ["u"], "assistant": ["a"]},
        "sources": [{"kind": "chatgpt", "files": ["conversations.json"], "place": "repo"}],
    }  # fmt: skip
    request = {
        "plan": plan, "sources_dir": str(folder), "dialog_dir": None, "base_model_dir": str(folder / "model"),
        "max_seq_len": 4096, "suite": None, "lang": "en",
        **{name: str(folder / "out" / name) for name in ("samples", "manifest", "report")},
    }  # fmt: skip
    path = folder / "request.json"
    path.write_text(json.dumps(request), "utf-8")
    return path


def rows(name: str, child: Child, size_mb: float) -> tuple[str, str]:
    """Return the numbers of one child."""
    return name, f"{child.peak_mb:.0f} MB at most, {child.wall_s:.1f} s, {size_mb / child.cpu_s:.0f} MB/s of processor"


def main() -> int:
    size_mb = float(sys.argv[1]) if len(sys.argv) > 1 else 700
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        path = folder / "conversations.json"
        count = write_export(path, int(size_mb * 1e6))
        floor = run_child([sys.executable, "-c", "import corpus_builder.exports, ijson"])
        read = run_child([sys.executable, "-c", READ, str(path)], is_quiet=False)
        built = run_child([sys.executable, "-m", "corpus_builder.build", str(write_request(folder))])
    return report(
        "exports_memory",
        about=f"{size_mb:g} MB of conversations.json: {count} conversations of our own invention.",
        packages=("ijson",),
        claims=[
            Claim("memory of the reader, of 500 MB", read.peak_mb / LIMIT_MB, 1, True),
            Claim("memory of the whole build, of 500 MB", built.peak_mb / LIMIT_MB, 1, True),
        ],
        numbers=[
            ("interpreter and modules alone", f"{floor.peak_mb:.0f} MB"),
            rows("reader", read, size_mb),
            rows("whole build", built, size_mb),
        ],
        is_kept=size_mb >= 700,
    )


if __name__ == "__main__":
    raise SystemExit(main())
