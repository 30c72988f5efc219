"""Exports through the whole build: samples, accounts, gates, and what other trainers read of them."""

import json

import pytest

from corpus_builder.archive import extract_archive
from corpus_builder.build import build, main
from corpus_builder.errors import ProjectError
from corpus_builder.manifest import load_manifest
from corpus_builder.plan import load_plan
from corpus_builder.request import load_request
from corpus_builder.sample import parse_sample
from tests.corpus_builder.test_archive import make_zip
from tests.corpus_builder.test_exports import gpt

SOURCES = [
    {"kind": "chatgpt", "files": ["**/conversations*.json"]},
    {"kind": "messages", "files": ["data/*.jsonl"], "place": "repo"},
]
TREE = {
    **gpt("u1", None, "user", "灯亮着吗？"), **gpt("a1", "u1", "assistant", "亮着。"),
    **gpt("u2", "a1", "user", "今晚有雾吗？"), **gpt("a2", "u2", "assistant", "有一点。"),
    **gpt("b2", "u2", "assistant", "没有。"), **gpt("t", "a2", "tool", "x"),
}  # fmt: skip
ROWS = [
    {"messages": [{"role": "user", "content": f"q{at}\u2028"}, {"role": "assistant", "content": f"a{at}"}]}
    for at in range(3)
]


@pytest.fixture
def world(tmp_path, chatml_model_dir):
    """A fetched archive with an export in it, a repository with chat data, and a function that writes requests."""
    (tmp_path / "repo/data").mkdir(parents=True)
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    (tmp_path / "repo/data/chat.jsonl").write_text(lines + "\n{\n", "utf-8")
    export = json.dumps([{"mapping": TREE}, {"mapping": {}}], ensure_ascii=False)
    members = [("export.zip/conversations.json", export), ("../users.json", "{}"), ("._conversations.json", "x")]
    extract_archive(make_zip(tmp_path / "d.zip", members), str(tmp_path / "dialogs"))

    def request(sources=SOURCES, **changes):
        plan = {"name": "t", "speakers": {"user": ["u"], "assistant": ["a"]}, "sources": sources}
        packed = {
            "plan": {**plan, "gates": {"total_stop_below": 1}}, "sources_dir": str(tmp_path / "repo"),
            "dialog_dir": str(tmp_path / "dialogs"), "base_model_dir": str(chatml_model_dir), "max_seq_len": 256,
            "suite": None, "lang": "zh",
            **{name: str(tmp_path / "out" / name) for name in ("samples", "manifest", "report")}, **changes,
        }  # fmt: skip
        path = tmp_path / "request.json"
        path.write_text(json.dumps(packed), "utf-8")
        return path

    request.out = tmp_path / "out"
    request.dialogs = tmp_path / "dialogs"
    (tmp_path / "out").mkdir()
    return request


def read_samples(world):
    return [parse_sample(line) for line in (world.out / "samples").read_text("utf-8").rstrip("\n").split("\n")]


def test_exports_are_built_and_accounted_for(world):
    assert main([str(world())]) == 0
    manifest = load_manifest(world.out / "manifest")
    accounts = {file.path: file for file in manifest.files}
    export = accounts["export.zip/conversations.json"]
    assert (export.units_read, export.units_kept, export.samples) == (7, 5, 2)
    assert export.drops == {"tool_result": 1, "empty_dialog": 1}
    assert accounts["../users.json"].drops == {"leaves_folder": 1}
    assert (accounts["data/chat.jsonl"].samples, accounts["data/chat.jsonl"].drops) == (3, {"bad_json": 1})
    assert {name: account.samples for name, account in manifest.classes.items()} == {"relation": 2, "data": 3}
    assert {gate.name: gate.found for gate in manifest.gates}["relation_dialogs"] == 1


def test_unchanged_exports_are_not_read_again(world, capsys):
    build(load_request(world()))
    first = (world.out / "samples").read_bytes()
    (world.out / "samples").unlink()
    capsys.readouterr()
    build(load_request(world()))
    assert (world.out / "samples").read_bytes() == first


def test_missing_files_and_links_are_named(world):
    (world.dialogs / "conversations-2.json").symlink_to("/etc/hostname")
    sources = [SOURCES[0], {"kind": "claude", "files": ["claude/*.json"]}]
    manifest = build(load_request(world(sources)))
    assert manifest.missing == ("claude/*.json",)
    assert {file.path: file.drops for file in manifest.files}["conversations-2.json"] == {"link_leaves_folder": 1}
    assert build(load_request(world(sources, dialog_dir=None))).missing == ("dialog_dir", "dialog_dir")
    with pytest.raises(ProjectError, match="source_link_leaves_root"):
        build(load_request(world([{"kind": "claude", "files": ["../x.json"]}])))


def test_guessed_encoding_is_a_warning_with_the_files_name(world, capsys):
    (world.dialogs / "conversations-gbk.json").write_bytes(
        json.dumps([{"mapping": TREE}], ensure_ascii=False).encode("gbk")
    )
    (world.dialogs / "nul.md").write_bytes("u：灯\0\na：亮\n".encode())
    manifest = build(load_request(world([*SOURCES, {"kind": "dialog"}])))
    said = capsys.readouterr().out
    assert "[dialog] warning: the encoding of ⟦conversations-gbk.json⟧ is a guess: gb18030" in said
    notes = {file.path: file.notes for file in manifest.files}
    assert notes["conversations-gbk.json"]["guessed_encoding"] == 1
    assert notes["nul.md"]["nul_characters"] == 1


def test_other_trainers_read_the_samples(world):
    """TRL's conversational format and LLaMA-Factory's `openai` one: roles and contents, the two sides in turn.

    Both read JSON lines through Arrow's reader, which gives every line the same columns.
    """
    from pyarrow import json as arrow_json

    build(load_request(world()))
    loaded = arrow_json.read_json(world.out / "samples").to_pylist()
    assert len(loaded) == 5
    for row, sample in zip(loaded, read_samples(world), strict=True):
        messages = [(message["role"], message["content"]) for message in row["messages"]]
        assert messages == [(message.role, message.content) for message in sample.messages]
        roles = [role for role, _ in messages if role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(isinstance(content, str) and content for _, content in messages)


def test_plan_names_every_wrong_key_of_an_export(tmp_path):
    plan = tmp_path / "p.yaml"
    plan.write_text(
        "name: t\nspeakers: {user: [u], assistant: [a]}\narchive: {max_gb: 1}\nsources:\n"
        "  - {kind: chatgpt, files: [x], wieght: 2}\n"
        "  - {kind: json-dialog, files: [x], turns: 'a..b', dialogs: 'x_*.y'}\n"
    )
    with pytest.raises(ProjectError) as caught:
        load_plan(plan, environment={})
    problems = str(caught.value.values["problems"])
    assert "archive.max_gb: unknown key; nearest known: max_gib" in problems
    assert "wieght: unknown key; nearest known: weight" in problems
    assert "'a..b' is no path" in problems
    assert "may stand in its last key only" in problems
