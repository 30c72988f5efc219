"""A build after another: what is unchanged is not read, and the result is that of a build from nothing."""

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corpus_builder.build import build, main
from corpus_builder.cache import TICK_NS, Cache, FileKey
from corpus_builder.collect import Task
from corpus_builder.frame import load_frame
from corpus_builder.plan import Plan
from corpus_builder.prepare import Preparer
from corpus_builder.process import Processor
from corpus_builder.reading import Reading
from corpus_builder.request import load_request
from corpus_builder.sample import Message, Sample

ROOT = Path(__file__).parents[2]
OUTPUTS = ("samples", "manifest", "report", "report.full.html")


def settle():
    """Wait until a file that was just written counts as finished."""
    time.sleep(1.5 * TICK_NS / 1e9)


def outputs(folder):
    return {name: (folder / name).read_bytes() for name in OUTPUTS}


def built_from_nothing(world, tmp_path, **changes):
    out = tmp_path / "fresh"
    out.mkdir(exist_ok=True)
    for path in sorted(out.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    places = {name: str(out / name) for name in ("samples", "manifest", "report")}
    build(load_request(world(**places, **changes)))
    return outputs(out)


def read_again(capsys):
    """Return how many files the last build read, from its log."""
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("[corpus] read "))
    return int(line.split()[2])


def test_nothing_is_done_where_nothing_changed(world, capsys):
    settle()
    assert main([str(world())]) == 0
    settle()
    before = {name: os.stat(world.out / name).st_mtime_ns for name in OUTPUTS}
    first = capsys.readouterr().out
    assert main([str(world())]) == 0
    log = capsys.readouterr().out
    assert log.startswith("[corpus] nothing to do: 6 file(s) are as they were\n")  # the tokenizer is one
    assert first.endswith(log.split("\n", 1)[1])
    assert {name: os.stat(world.out / name).st_mtime_ns for name in OUTPUTS} == before


def test_gate_that_stopped_stops_where_nothing_changed(world, capsys):
    path = world(plan={**world.plan, "gates": {"total_stop_below": 99}})
    settle()
    assert (main([str(path)]), main([str(path)])) == (7, 7)
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["new file", "other bytes", "no file", "no output"])
def test_any_change_is_seen(world, capsys, change):
    path = world.dialogs / "2025/new.md"
    path.write_text("冰朔：早\n铸渊：早\n", "utf-8")
    settle()
    main([str(world())])
    if change == "new file":
        (world.sources / "docs/none.md").write_text("# now there")
    elif change == "other bytes":
        path.write_text("冰朔：早\n铸渊：晚\n", "utf-8")
    elif change == "no file":
        path.unlink()
    else:
        (world.out / "report").unlink()
    capsys.readouterr()
    main([str(world())])
    assert "nothing to do" not in capsys.readouterr().out


def test_one_changed_file_costs_one_file(world, tmp_path, capsys):
    build(load_request(world()))
    (world.dialogs / "notes.md").write_text("冰朔：now\n铸渊：a dialog\n", "utf-8")
    capsys.readouterr()
    build(load_request(world()))
    assert read_again(capsys) == 1
    assert outputs(world.out) == built_from_nothing(world, tmp_path)


def test_touched_file_is_recognised_by_its_bytes(world, capsys):
    build(load_request(world()))
    before = outputs(world.out)
    for path in (world.dialogs / "notes.md", world.sources / "tool.jsonl"):
        os.utime(path, (1, 1))
    capsys.readouterr()
    build(load_request(world()))
    assert read_again(capsys) == 0
    assert outputs(world.out) == before


def test_change_under_the_same_size_and_time_is_seen(world, tmp_path):
    path = world.dialogs / "notes.md"
    path.write_text("冰朔：aa\n铸渊：bb\n", "utf-8")
    os.utime(path, (1, 1))
    build(load_request(world()))
    path.write_text("冰朔：aa\n铸渊：cc\n", "utf-8")
    os.utime(path, (1, 1))
    build(load_request(world()))
    assert outputs(world.out) == built_from_nothing(world, tmp_path)


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        ({"system_prompt_share": 0.25}, 0),
        ({"validation_share": 0.5}, 0),
        ({"gates": {"total_stop_below": 1}}, 0),
        ({"checks": {"near_duplicate_similarity": 0.9}}, 0),
        ({"soul_replica": 3}, 5),
        ({"checks": {"email": "redact"}}, 5),
    ],
)
def test_key_of_the_plan_costs_what_depends_on_it(world, tmp_path, capsys, changes, read):
    build(load_request(world()))
    capsys.readouterr()
    plan = {**world.plan, **changes}
    build(load_request(world(plan=plan)))
    assert read_again(capsys) == read
    assert outputs(world.out) == built_from_nothing(world, tmp_path, plan=plan)


def damage_entries(cache, damage):
    for path in cache.glob("*.jsonl"):
        path.write_bytes(damage(path.read_bytes()))


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: content.replace(b"lamp", b"pool", 1) if b"lamp" in content else content + b"\n",
        lambda content: content[:5] + bytes([content[5] ^ 1]) + content[6:],
        lambda content: b"\x00" * len(content),
        lambda content: content * 2,
    ],
)
def test_damaged_cache_is_made_again_and_never_trusted(world, capsys, damage):
    build(load_request(world()))
    before = outputs(world.out)
    damage_entries(world.out / ".cache", damage)
    (world.out / "manifest").unlink()
    capsys.readouterr()
    build(load_request(world()))
    assert read_again(capsys) == 5
    assert outputs(world.out) == before


def test_missing_output_is_made_from_the_cache(world, capsys):
    settle()
    build(load_request(world()))
    before = outputs(world.out)
    (world.out / "samples").unlink()
    capsys.readouterr()
    build(load_request(world()))
    assert read_again(capsys) == 0
    assert outputs(world.out) == before


def test_entry_of_a_file_that_went_is_deleted(world):
    build(load_request(world()))
    assert len(list((world.out / ".cache").glob("*.jsonl"))) == 5 + 1  # and the index
    (world.dialogs / "notes.md").unlink()
    build(load_request(world()))
    assert len(list((world.out / ".cache").glob("*.jsonl"))) == 4 + 1


def test_build_that_failed_leaves_a_cache_that_works(world, tmp_path):
    with pytest.raises(Exception, match="suite_not_unseen"):
        build(load_request(world(suite={"name": "s", "pass_at_least": 1, "questions": [{"ask": "在吗"}]})))
    build(load_request(world()))
    assert outputs(world.out) == built_from_nothing(world, tmp_path)


def test_order_of_the_files_in_their_folder_does_not_matter(world, tmp_path):
    names = [f"{at:02}.md" for at in range(12)]
    seen = set()
    for seed in range(3):
        for name in random.Random(seed).sample(names, len(names)):
            path = world.dialogs / name
            path.unlink(missing_ok=True)
            path.write_text(f"冰朔：{name}\n铸渊：{name}！\n", "utf-8")
        seen.add(tuple(built_from_nothing(world, tmp_path).values()))
    assert len(seen) == 1


def test_number_of_threads_does_not_matter(world, tmp_path):
    for name in ("docs/a.md", "docs/none.md"):
        (world.sources / name).write_text(
            "\n\n".join(f"## {at}\n\nThe lamp {at}. 灯。" * 9 for at in range(40)), "utf-8"
        )
    seen = set()
    for threads in ("1", "2"):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true"}
        shutil.rmtree(world.out)
        world.out.mkdir()
        command = [sys.executable, "-m", "corpus_builder.build", str(world())]
        subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True, timeout=120)
        seen.add(tuple(outputs(world.out).values()))
    assert len(seen) == 1


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(
        st.tuples(st.sampled_from(["a.md", "b.md", "c.md"]), st.sampled_from(["", "早", "a@b.org", "灯塔。" * 40])),
        min_size=1,
        max_size=4,
    )
)
def test_any_edits_give_what_a_build_from_nothing_gives(world, tmp_path, edits):
    plan = {**world.plan, "validation_share": 0.4, "checks": {"email": "redact"}}
    for name, said in edits:
        path = world.dialogs / name
        if said:
            path.write_text(f"冰朔：{name}？\n铸渊：{said}\n", "utf-8")
        else:
            path.unlink(missing_ok=True)
        build(load_request(world(plan=plan)))
    assert outputs(world.out) == built_from_nothing(world, tmp_path, plan=plan)


def test_only_the_changed_file_is_parsed(world, tmp_path, chatml_model_dir):
    parsed = []

    def read(text, name):
        parsed.append(name)
        return Reading(samples=(Sample(messages=(Message("assistant", text),), source=name, sample_class="soul"),),
                       units_read=1, units_kept=1)  # fmt: skip

    def run():
        plan = Plan.model_validate(world.plan)
        preparer = Preparer(plan, load_frame(chatml_model_dir), max_seq_len=256, suite=None)
        cache = Cache(tmp_path / "cache", "settings")
        processor = Processor(preparer, cache)
        done = [
            processor.process(Task(tag="soul", name=path.name, path=path, read=read))
            for path in sorted((tmp_path / "in").iterdir())
        ]
        cache.save()
        return [one.entry.read_bytes() for one in done]

    (tmp_path / "in").mkdir()
    for name in "abc":
        (tmp_path / "in" / name).write_text(f"text {name}")
    first = run()
    assert parsed == ["a", "b", "c"]
    assert run() == first
    (tmp_path / "in" / "b").write_text("text B")
    assert run() != first
    assert parsed == ["a", "b", "c", "b"]


def test_file_that_changed_a_moment_ago_is_not_known_by_its_look(tmp_path):
    cache = Cache(tmp_path, "settings")
    key = FileKey(size=1, mtime_ns=10**18, inode=5, ctime_ns=10**18)
    cache.remember("young", key, "c1", 10**18 + TICK_NS)
    cache.remember("old", key, "c2", 10**18 + TICK_NS + 1)
    cache.save()
    again = Cache(tmp_path, "settings")
    assert (again.content_of("young", key), again.content_of("old", key)) == (None, "c2")
    assert again.content_of("old", FileKey(2, 10**18, 5, 10**18)) is None


def test_damaged_index_is_no_index(tmp_path):
    cache = Cache(tmp_path, "settings")
    cache.remember("old", FileKey(1, 1, 1, 1), "c", 10**18)
    cache.save()
    path = tmp_path / "index.jsonl"
    path.write_text(path.read_text().replace('"c"', '"d"'))
    assert Cache(tmp_path, "settings").content_of("old", FileKey(1, 1, 1, 1)) is None


def test_cache_is_for_its_owner_only(world):
    build(load_request(world()))
    cache = world.out / ".cache"
    assert cache.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in cache.glob("?" * 32 + ".jsonl"))
    assert (world.out / "report.full.html").stat().st_mode & 0o077 == 0


def test_request_is_part_of_what_is_remembered(world, capsys):
    settle()
    main([str(world())])
    capsys.readouterr()
    main([str(world(lang="zh"))])
    assert "nothing to do" not in capsys.readouterr().out
