"""A small repository to build a corpus from."""

import json

from corpus_builder.sample import parse_sample

CANARY = "canary-7f3a"


def make_world(tmp_path, model_dir):
    """A repository with documents and tools, dialogs beside it, and a function that writes requests."""
    sources = tmp_path / "sources"
    dialogs = tmp_path / "dialogs"
    for folder in (sources / "docs", dialogs / "2025", tmp_path / "out"):
        folder.mkdir(parents=True)
    (sources / "docs/a.md").write_text("# A\n\n## One\n\nThe keeper lights the lamp.\n\n## Two\n\nAt dusk.\n", "utf-8")
    (sources / "tool.jsonl").write_text('{"prompt": "p", "response": "r"}\n{"prompt": "p", "response": "r"}\n{\n')
    (dialogs / f"{CANARY}.md").write_text("冰朔：在吗\n铸渊：在。\n冰朔：好\n铸渊：嗯。\n", "utf-8")
    (dialogs / "2025/gbk.TXT").write_bytes("冰朔：编码？\n铸渊：无妨。\n霜砚：我\n霜砚：也\n".encode("gbk"))
    (dialogs / "notes.md").write_text("no speaker here", "utf-8")
    plan = {
        "name": "test",
        "system_prompt": "You keep the lamp.",
        "system_prompt_share": 0.5,
        "soul_replica": 2,
        "speakers": {"user": ["冰朔"], "assistant": ["铸渊"]},
        "sources": [
            {
                "kind": "soul",
                "paths": ["docs/a.md", "docs/none.md"],
                "questions": {
                    "whole": ["Read {path}.", "What is {path}?"],
                    "section": ["{section}?", "Tell {section}."],
                },
                "min_section_chars": 10,
            },
            {"kind": "dialog"},
            {"kind": "tool", "path": "tool.jsonl"},
        ],
        "gates": {
            "soul_files_found_share": 0.5,
            "relation_warn_below": 3,
            "total_stop_below": 5,
            "total_warn_below": 6,
        },
    }

    def request(**changes):
        packed = {
            "plan": plan, "sources_dir": str(sources), "dialog_dir": str(dialogs),
            "base_model_dir": str(model_dir), "max_seq_len": 256, "suite": None, "lang": "en",
            **{name: str(tmp_path / "out" / name) for name in ("samples", "manifest", "report")}, **changes,
        }  # fmt: skip
        path = tmp_path / "request.json"
        path.write_text(json.dumps(packed), "utf-8")
        return path

    request.plan, request.sources, request.dialogs, request.out = plan, sources, dialogs, tmp_path / "out"
    return request


def read_samples(world):
    lines = (world.out / "samples").read_text("utf-8").split("\n")
    assert lines.pop() == ""
    return [parse_sample(line) for line in lines]
