"""The whole build on real files: what goes in is in a sample or in the account."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from corpus_builder.archive import extract_archive
from corpus_builder.assemble import gets_system_prompt
from corpus_builder.build import build, main
from corpus_builder.errors import ProjectError, parse_error_line
from corpus_builder.frame import load_frame
from corpus_builder.log_lines import public_line
from corpus_builder.manifest import load_manifest
from corpus_builder.plan import load_plan
from corpus_builder.request import load_request
from corpus_builder.suite import load_suite
from tests.corpus_builder.small_world import CANARY, read_samples
from tests.corpus_builder.test_archive import make_zip

ROOT = Path(__file__).parents[2]


def test_corpus_is_built_and_accounted_for(world, chatml_model_dir):
    assert main([str(world())]) == 0
    samples, manifest = read_samples(world), load_manifest(world.out / "manifest")
    assert {name: account.samples for name, account in manifest.classes.items()} == {
        "soul": 6, "relation": 2, "tool": 2,
    }  # fmt: skip
    assert manifest.classes["soul"].unique == 3
    assert manifest.missing == ("docs/none.md",)
    frame = load_frame(chatml_model_dir)
    assert manifest.tokenizer == frame.digest
    assert sum(account.tokens for account in manifest.classes.values()) == sum(frame.cost(s.messages) for s in samples)
    trained = sum(label != -100 for sample in samples for label in frame.encode(sample.messages).labels)
    assert sum(account.trained_tokens for account in manifest.classes.values()) == trained
    assert all(account.lost_tokens == 0 for account in manifest.classes.values())
    assert len({sample.id for sample in samples}) == len(samples) == 10


def test_each_file_has_its_account(world):
    manifest = build(load_request(world()))
    accounts = {account.path: account for account in manifest.files}
    assert list(accounts) == ["docs/a.md", "2025/gbk.TXT", f"{CANARY}.md", "notes.md", "tool.jsonl"]
    gbk = accounts["2025/gbk.TXT"]
    assert (gbk.encoding, gbk.notes) == ("gb18030", {"guessed_encoding": 1, "unknown_speakers": 1})
    assert accounts["notes.md"].drops == {"no_turns": 1}
    assert (accounts["tool.jsonl"].drops, accounts["tool.jsonl"].notes) == ({"bad_json": 1}, {"copies": 1})


def test_gates_say_what_was_found_and_where(world):
    gates = {gate.name: gate for gate in build(load_request(world())).gates}
    assert {name: (gate.verdict, gate.found, gate.wanted) for name, gate in gates.items()} == {
        "soul_files_found": ("pass", 0.5, 0.5),
        "relation": ("pass", 2, 1),
        "relation_dialogs": ("warn", 2, 3),
        "dialog_rounds": ("warn", 1, 2),
        "total": ("pass", 10, 6),
    }
    assert gates["soul_files_found"].where == ("docs/none.md",)
    assert gates["dialog_rounds"].where == ("2025/gbk.TXT",)


def test_system_prompt_stands_before_its_share(world):
    build(load_request(world()))
    with_prompt = [sample.messages[0].role == "system" for sample in read_samples(world)]
    assert with_prompt == [False, True] * 5
    from fractions import Fraction

    assert sum(gets_system_prompt(at, Fraction("0.8")) for at in range(1000)) == 800


def test_same_input_gives_the_same_bytes(world):
    build(load_request(world()))
    first = (world.out / "samples").read_bytes()
    build(load_request(world()))
    assert (world.out / "samples").read_bytes() == first


def test_log_names_every_file_and_the_public_log_none(world, capsys):
    main([str(world())])
    log = capsys.readouterr().out
    assert f"[dialog] ⟦{CANARY}.md⟧: 4 unit(s) -> 1 sample(s), utf-8" in log
    assert "[soul] missing: ⟦docs/none.md⟧" in log
    assert "[dialog] no speaker of the plan: ⟦霜砚⟧" in log
    public = [public_line(line) for line in log.splitlines()]
    assert None not in public
    assert CANARY not in "".join(public)
    assert CANARY not in (world.out / "report").read_text("utf-8")
    assert not any("在。" in line for line in log.splitlines())


@pytest.mark.parametrize(
    ("gates", "code"), [({"total_stop_below": 99}, "gate_failed"), ({"relation_stop_below": 3}, "gate_failed")]
)
def test_gate_that_stops_leaves_the_account(world, capsys, gates, code):
    assert main([str(world(plan={**world.plan, "gates": {**world.plan["gates"], **gates}}))]) == 7
    assert parse_error_line(capsys.readouterr().err.strip()).code == code
    assert load_manifest(world.out / "manifest").verdict == "stop"
    assert (world.out / "report").exists()
    assert len(read_samples(world)) == 10


def test_no_sample_at_all_is_its_own_failure(world, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main([str(world(sources_dir=str(empty), dialog_dir=None))]) == 7
    assert parse_error_line(capsys.readouterr().err.strip()).code == "zero_samples"
    manifest = load_manifest(world.out / "manifest")
    assert manifest.missing == ("docs/a.md", "docs/none.md", "dialog_dir", "tool.jsonl")


def test_question_of_the_suite_in_the_corpus_stops_and_leaves_no_manifest(world, capsys):
    build(load_request(world()))
    suite = {"name": "s", "pass_at_least": 1, "questions": [{"ask": "在吗？"}, {"ask": "unseen"}]}
    assert main([str(world(suite=suite))]) == 2
    assert parse_error_line(capsys.readouterr().err.strip()).values == {"suite": "s", "count": 1}
    assert not (world.out / "manifest").exists()
    assert not (world.out / "samples.partial").exists()


def test_long_texts_are_split_and_nothing_is_lost(world, chatml_model_dir):
    long = "\n\n".join(f"## Part {at}\n\n" + "The keeper lights the lamp at dusk. " * at for at in range(1, 12))
    (world.sources / "docs/a.md").write_text(long, "utf-8")
    manifest = build(load_request(world(max_seq_len=128)))
    frame = load_frame(chatml_model_dir)
    samples = read_samples(world)
    assert all(frame.cost(sample.messages) <= 128 for sample in samples)
    for replica in range(2):
        parts = [s for s in samples if s.source == "soul:docs/a.md" and s.replica == replica]
        assert len(parts) > 3
        assert "".join(s.messages[-1].content for s in parts) == long.strip()
    assert manifest.classes["soul"].lost_tokens == 0


def test_refused_members_of_the_archive_are_in_the_account(world, tmp_path):
    path = make_zip(tmp_path / "d.zip", [("../x.md", "冰朔：a\n铸渊：b"), ("ok.md", "冰朔：a\n铸渊：b"), ("c.zip", "")])
    extract_archive(path, str(tmp_path / "extracted"))
    manifest = build(load_request(world(dialog_dir=str(tmp_path / "extracted"))))
    drops = {account.path: account.drops for account in manifest.files if account.sample_class == "relation"}
    assert drops == {"ok.md": {}, "../x.md": {"leaves_folder": 1}, "c.zip": {"damaged": 1}}


def test_own_system_prompt_that_fills_the_window_drops_that_line_only(world):
    system = {"role": "system", "content": "lamp " * 300}
    line = json.dumps({"messages": [system, {"role": "assistant", "content": "a"}]})
    (world.sources / "tool.jsonl").write_text(line + '\n{"prompt": "p", "response": "r"}\n')
    manifest = build(load_request(world(max_seq_len=128)))
    account = manifest.files[-1]
    assert (account.units_read, account.units_kept, account.drops) == (2, 1, {"window_too_small": 1})


def test_files_that_are_no_text_or_cannot_be_read_are_counted(world):
    (world.dialogs / "picture.md").write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00\xff\xfe")
    (world.dialogs / "out.md").symlink_to("/etc/hostname")
    accounts = {account.path: account for account in build(load_request(world())).files}
    assert accounts["picture.md"].drops == {"not_text": 1}
    assert accounts["out.md"].drops == {"link_leaves_folder": 1}


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"plan": {"name": 1}}'])
def test_request_that_is_wrong_is_refused(tmp_path, content, capsys):
    (tmp_path / "r.json").write_text(content)
    assert main([str(tmp_path / "r.json")]) == 2
    assert parse_error_line(capsys.readouterr().err.strip()).code in ("config_unreadable", "config_invalid")


def test_window_too_small_for_the_system_prompt_stops(world):
    with pytest.raises(ProjectError, match="window_too_small"):
        build(load_request(world(max_seq_len=16)))
    assert set(os.listdir(world.out)) <= {".cache"}


@pytest.mark.parametrize("name", ["demo", "zhuyuan"])
def test_shipped_plans_build_and_their_suite_is_unseen(world, name):
    plan = load_plan(ROOT / f"configs/corpus/{name}.yaml", environment={}).value
    suite_path = ROOT / f"configs/accept/{name}.yaml"
    suite = load_suite(suite_path).value.model_dump(mode="json") if suite_path.exists() else None
    request = world(plan=plan.model_dump(mode="json"), suite=suite, sources_dir=str(ROOT), max_seq_len=512,
                    dialog_dir=str(ROOT / "demo/dialogs"))  # fmt: skip
    manifest = build(load_request(request))
    assert manifest.verdict == ("stop" if name == "zhuyuan" else "pass")  # its documents are in another repository


def test_building_imports_nothing_heavy(world):
    code = (
        "import sys; from corpus_builder.build import main; code = main(sys.argv[1:]); "
        "print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(world())], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
