"""A repository, dialogs and a request for the builder, in a folder.

Side effects: writes files; fetches Qwen's vocabulary.

<folder>/ sources/docs/*.md  sources/tool.jsonl  dialogs/…  model/tokenizer.json  out/  request.json
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.generated import ASSISTANT, USER, Writer, write_dialogs
from corpus_builder.plan import Checks
from tests.tokenizers_real import QWEN_TEMPLATE, qwen_tokenizer_json, write_tokenizer_folder

QUESTIONS = {
    "whole": ["{path} 的全文是什么?", "请把 {path} 读给我听。", "Read {path} to me."],
    "section": ["{path} 里关于「{section}」说了什么?", "What does {path} say about {section}?"],
}
#: Nothing but reading, splitting and counting.
CHECKS_OFF: dict[str, Any] = {**dict.fromkeys(Checks.model_validate({}).policies, "off"), "duplicates": False}


def write_world(folder: Path, *, dialogs_bytes: int, documents: int = 0, tools: int = 0, sections: int = 12) -> None:
    """Write the inputs of a corpus."""
    writer = Writer(2)
    docs = folder / "sources/docs"
    docs.mkdir(parents=True)
    for number in range(documents):
        (docs / f"{number:03d}.md").write_text(writer.document(sections), "utf-8")
    lines = (json.dumps({"prompt": writer.paragraph(1, 2), "response": writer.answer()}) for _ in range(tools))
    (folder / "sources/tool.jsonl").write_text("".join(line + "\n" for line in lines), "utf-8")
    (folder / "dialogs").mkdir()
    write_dialogs(folder / "dialogs", dialogs_bytes)
    write_tokenizer_folder(folder / "model", qwen_tokenizer_json(), QWEN_TEMPLATE)


def write_request(folder: Path, *, checks: dict[str, Any] | None = None, replicas: int = 1, out: str = "out") -> Path:
    """Write a request for what `write_world` wrote and return its path; `checks` None: the plan's defaults."""
    plan = {
        "name": "benchmark",
        "system_prompt": "你是灯塔,编号 LMP-0042。知道就直接回答,不知道就直说。",
        "system_prompt_share": 0.8,
        "soul_replica": replicas,
        "speakers": {"user": USER, "assistant": ASSISTANT},
        "checks": checks or {},
        "sources": [
            {"kind": "soul", "globs": ["docs/*.md"], "questions": QUESTIONS, "min_section_chars": 0},
            {"kind": "dialog"},
            {"kind": "tool", "path": "tool.jsonl"},
        ],
        "gates": {"soul_files_found_share": 0, "relation_stop_below": 0, "total_stop_below": 0},
    }
    (folder / out).mkdir(exist_ok=True)
    request = {
        "plan": plan, "sources_dir": str(folder / "sources"), "dialog_dir": str(folder / "dialogs"),
        "base_model_dir": str(folder / "model"), "max_seq_len": 4096, "suite": None, "lang": "en",
        **{name: str(folder / out / name) for name in ("samples", "manifest", "report")},
    }  # fmt: skip
    path = folder / f"{out}.json"
    path.write_text(json.dumps(request), "utf-8")
    return path


def contents_of(samples: Path) -> Iterator[str]:
    """Yield the text of every turn of a samples file."""
    with samples.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            yield from (message["content"] for message in json.loads(line)["messages"])
