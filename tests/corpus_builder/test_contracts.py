"""Round trips and refusals of the ground floor's contracts."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from corpus_builder import catalogues, say
from corpus_builder.config import load_config, near_miss, parse_boolean
from corpus_builder.errors import EXIT_CODES, Named, ProjectError, Text, format_error_line, parse_error_line
from corpus_builder.log_lines import log_line, public_line
from corpus_builder.manifest import (
    ClassAccount,
    FileAccount,
    Gate,
    Manifest,
    check_gates,
    load_manifest,
    save_manifest,
)
from corpus_builder.plan import load_plan
from corpus_builder.sample import Message, Origin, Sample, format_sample, parse_sample
from corpus_builder.suite import Question, is_right

ROOT = Path(__file__).parents[2]
PLAN = ROOT / "configs/corpus/zhuyuan.yaml"

messages = st.lists(
    st.builds(Message, st.sampled_from(["system", "user", "assistant"]), st.text(), st.booleans()),
    min_size=1,
    max_size=5,
)
samples = st.builds(
    Sample,
    messages=messages.map(tuple),
    source=st.text(),
    sample_class=st.sampled_from(["soul", "relation", "tool", "data"]),
    weight=st.floats(0.01, 9),
    replica=st.integers(0, 9),
    split=st.sampled_from(["train", "validation"]),
    origin=st.none() | st.builds(Origin, st.text(), st.integers(1), st.integers(1)),
)


@given(samples)
def test_sample_round_trip(sample):
    assert parse_sample(format_sample(sample)) == sample


def test_sample_of_the_first_pipeline_gets_its_class_from_its_source():
    line = json.dumps({"messages": [{"role": "user", "content": "hi"}], "source": "dialog:a.md", "weight": 0.5})
    sample = parse_sample(line)
    assert (sample.sample_class, sample.weight, sample.split) == ("relation", 0.5, "train")


def test_sample_id_ignores_weight_and_sees_replicas():
    one = Sample(messages=(Message("user", "a"),), source="s", sample_class="soul")
    heavier = Sample(messages=(Message("user", "a"),), source="s", sample_class="soul", weight=2.0)
    second = Sample(messages=(Message("user", "a"),), source="s", sample_class="soul", replica=1)
    assert one.id == heavier.id != second.id
    assert len(one.id) == 16


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"messages": []}',
        '{"messages": [{"role": "robot", "content": "a"}]}',
        '{"messages": [{"role": "user", "content": null}]}',
        '{"messages": [{"role": "user", "content": "a"}], "weight": NaN}',
        '{"messages": [{"role": "user", "content": "a"}], "weight": true}',
        '{"messages": [{"role": "user", "content": "a"}], "class": "other"}',
        '{"messages": [{"role": "user", "content": "a"}], "origin": {"path": "x"}}',
    ],
)
def test_sample_with_a_fault_is_refused_by_place(line):
    with pytest.raises(ProjectError) as caught:
        parse_sample(line, path="a.jsonl", line_number=7)
    assert caught.value.code == "sample_invalid"
    assert caught.value.values["line"] == 7


def manifest(**changes):
    values = {
        "plan_name": "p",
        "plan_digest": "d",
        "tokenizer": "estimated",
        "max_seq_len": 64,
        "files": (
            FileAccount(
                path="a.md", sample_class="soul", bytes=3, encoding="utf-8", units_read=2, units_kept=1, samples=5,
                drops={"empty": 1},
            ),
        ),
        "missing": ("b.md",),
        "classes": {"soul": ClassAccount(samples=5, unique=1, characters=3, tokens=9, trained_tokens=2, lost_tokens=0)},
        "gates": (Gate(name="total", verdict="stop", found=5, wanted=100, where=("b.md",)),),
        "samples_sha256": "0" * 64,
    }  # fmt: skip
    return Manifest(**{**values, **changes})


def test_manifest_round_trip(tmp_path):
    save_manifest(manifest(), tmp_path / "m.json")
    assert load_manifest(tmp_path / "m.json") == manifest()


def test_manifest_that_does_not_add_up_is_not_written(tmp_path):
    lossy = FileAccount(
        path="a.md",
        sample_class="soul",
        bytes=3,
        encoding="utf-8",
        units_read=3,
        units_kept=1,
        samples=5,
        drops={"empty": 1},
    )
    with pytest.raises(ProjectError, match="manifest_unbalanced"):
        save_manifest(manifest(files=(lossy,)), tmp_path / "m.json")
    assert list(tmp_path.iterdir()) == []


def test_gate_that_stops_is_named_with_its_numbers():
    with pytest.raises(ProjectError, match=r"total \(5 < 100\)") as caught:
        check_gates(manifest())
    assert caught.value.exit_code == 7


def test_every_code_has_three_lines_in_each_language_with_the_same_values():
    import string

    def fields(key, lang):
        sentence = say._catalogue(lang).gettext(key)
        assert sentence != key, f"{key} is not said in {lang}"
        return {name for _, name, _, _ in string.Formatter().parse(sentence) if name}

    for code in EXIT_CODES:
        for part in ("what", "where", "next"):
            assert fields(f"{code}.{part}", "en") == fields(f"{code}.{part}", "zh"), f"{code}.{part}"


def test_compiled_catalogues_are_those_of_the_sources():
    for lang in say.LANGUAGES:
        assert catalogues.po_path(lang).with_suffix(".mo").read_bytes() == catalogues.compiled(lang)


def test_values_keep_their_privacy_class():
    error = ProjectError("sample_invalid", path=Named("secret-name.md"), line=3, reason=Text("what she wrote"))
    back = ProjectError.from_json(json.loads(json.dumps(error.to_json())))
    public = say.format_error(back, "en", see=say.SEE_PUBLIC)
    assert "secret-name" not in public
    assert "what she wrote" not in public
    assert "line 3" in public
    assert "secret-name.md" in say.format_error(back, "zh", see=say.SEE_NAMES)
    assert "what she wrote" not in str(error)


def test_plan_of_the_seed_loads_with_its_numbers():
    plan = load_plan(PLAN, environment={}).value
    soul = plan.sources[0]
    assert plan.soul_replica == 5
    assert plan.speakers.user == ("冰朔", "妈妈")
    assert soul.questions.whole[0] == "请把 {path} 的完整内容讲给我听"
    assert soul.questions.section[0] == "在 {path} 里, 关于「{section}」是怎么说的?"
    assert len(soul.paths) == 10
    assert len(set(soul.questions.whole)) >= plan.soul_replica
    assert len(set(soul.questions.section)) >= plan.soul_replica


def test_overrides_win_in_order_and_leave_their_origin():
    resolved = load_plan(
        PLAN, environment={"ZY_SOUL_REPLICA": "3", "ZY_INCLUDE_CORPUS_JSONL": "no", "ZY_REPO_ROOT": ""},
        sets=[("gates.total_stop_below", "7"), ("soul_replica", "2")],
    )  # fmt: skip
    assert (resolved.value.soul_replica, resolved.value.include_corpus_jsonl) == (2, False)
    assert resolved.value.gates.total_stop_below == 7
    assert resolved.origins == {
        "soul_replica": "--set", "include_corpus_jsonl": "ZY_INCLUDE_CORPUS_JSONL", "gates.total_stop_below": "--set",
    }  # fmt: skip


def test_unknown_key_gives_the_nearest_known_one(tmp_path):
    tree = yaml.safe_load(PLAN.read_text("utf-8"))
    tree["sytem_prompt"] = "x"
    tree["soul_replica"] = True
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(tree), "utf-8")
    with pytest.raises(ProjectError) as caught:
        load_plan(tmp_path / "p.yaml", environment={})
    problems = caught.value.values["problems"]
    assert "sytem_prompt: unknown key; nearest known: system_prompt" in problems
    assert "soul_replica: Input should be a valid integer (got True)" in problems


@pytest.mark.parametrize("content", ["", "- a", "a: [", "\x00"])
def test_file_that_is_no_configuration_is_refused(tmp_path, content):
    (tmp_path / "p.yaml").write_text(content, "utf-8")
    with pytest.raises(ProjectError, match="config_unreadable"):
        load_plan(tmp_path / "p.yaml", environment={})


def test_unknown_override_is_refused_with_a_near_miss():
    with pytest.raises(ProjectError) as caught:
        load_plan(PLAN, environment={}, sets=[("gates.total_stop", "1")])
    assert caught.value.values["near"].startswith("total_")


@pytest.mark.parametrize(("text", "value"), [("true", True), ("0", False), ("YES", True), ("no", False)])
def test_booleans(text, value):
    assert parse_boolean("k", text) is value


@pytest.mark.parametrize("text", ["on", "2", "ja", "", "treu"])
def test_words_that_are_no_boolean(text):
    with pytest.raises(ProjectError, match="override_invalid"):
        parse_boolean("k", text)


def test_near_miss_lists_all_when_none_is_near():
    assert near_miss("zzz", ["b", "a"]) == "a, b"


def test_load_config_needs_a_file(tmp_path):
    from corpus_builder.plan import Plan

    with pytest.raises(ProjectError, match="config_unreadable"):
        load_config(Plan, tmp_path / "none.yaml", environment_keys={}, environment={})


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("My name is LUMEN.", True),
        ("Lumen, a lamp", True),
        ("Lumen, a robot", False),
        ("", False),
        ("I am Smol", False),
    ],
)
def test_answer_is_judged_by_its_words(answer, right):
    assert is_right(Question(ask="?", any_of=("lumen",), none_of=("robot",)), answer) is right


def test_error_line_round_trip():
    error = ProjectError("gate_failed", gates=Named("a < b"))
    back = parse_error_line(format_error_line(error))
    assert (back.code, back.values) == (error.code, error.values)
    assert parse_error_line("ZY_ERROR {") is None
    assert parse_error_line('ZY_ERROR {"code": "no such code", "values": {}}') is None


def test_log_line_in_public_has_no_names_and_no_text():
    line = log_line(
        "dialog", "{path}: {turns} turns, said {text}", path=Named("her ⟧ name.md"), turns=3, text=Text("love")
    )
    assert "love" not in line
    shown = public_line(line + "\n")
    assert shown.startswith("[dialog] #")
    assert "name" not in shown
    assert shown.endswith("3 turns, said <4 characters>")


@pytest.mark.parametrize(
    "line",
    ["hello [dialog] x", "Traceback (most recent call last):", "", 'ZY_ERROR {"code": 1}', "she said: ZY_EVENT name=x"],
)
def test_line_that_is_not_ours_is_not_public(line):
    assert public_line(line) is None


def test_our_line_behind_a_rank_prefix_is_public():
    assert public_line("[rank0]: ZY_EVENT name=started") == "ZY_EVENT name=started"
