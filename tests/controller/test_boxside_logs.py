"""Logs through a byte cursor: whole characters, folded lines, privacy classes, and a cost that does not grow."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from controller.boxside.arguments import Arguments
from controller.boxside.log_place import LogPlace, find_place, key_at
from controller.boxside.logs import clean_line, filter_lines, follow, read_window, tail_log
from controller.boxside.public_log import excerpt
from corpus_builder.errors import Named, ProjectError, format_error_line
from corpus_builder.log_lines import log_line, public_line
from trainer.remedies import REMEDIES
from trainer.run_paths import run_paths, setup_paths


@pytest.fixture
def log(tmp_path):
    return tmp_path / "a.log"


def test_the_end_of_a_log_begins_with_a_whole_line(log):
    log.write_text("first line\nsecond\nthird\n")
    window = read_window(str(log), None, 12)
    assert (window.lines, window.start, window.end, window.size) == (["third"], 18, 24, 24)
    assert read_window(str(log), None, 13).lines == ["second", "third"]
    assert read_window(str(log), None, 100).lines == ["first line", "second", "third"]


def test_a_cursor_reads_everything_once(log):
    lines = [f"行 {number} 🙂" for number in range(500)]
    log.write_text("\n".join(lines) + "\n", "utf-8")
    found, offset = [], 0
    while (window := read_window(str(log), offset, 97)).end != offset:
        found += window.lines
        offset = window.end
    assert found == lines


def test_a_line_longer_than_the_window_is_cut_at_characters(log):
    log.write_text("灯" * 100 + "\n", "utf-8")
    found, offset = "", 0
    while (window := read_window(str(log), offset, 10)).end != offset:
        found += "".join(window.lines)
        offset = window.end
    assert found == "灯" * 100


def test_a_last_line_without_an_end_waits(log):
    log.write_text("one\ntw")
    window = read_window(str(log), 0, 100)
    assert (window.lines, window.rest, window.end) == (["one"], "tw", 4)


def test_a_log_made_anew_is_read_from_its_beginning(log):
    log.write_text("new\n")
    assert read_window(str(log), 5000, 100).lines == ["new"]


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe\n", b"\r\n\r\n"])
def test_odd_logs_are_read(log, content):
    log.write_bytes(content)
    window = read_window(str(log), None, 100)
    assert window.end == len(content)
    assert all(isinstance(line, str) for line in window.lines)
    assert read_window(str(log.with_name("none")), None, 100).lines == []


def test_lines_are_as_a_terminal_shows_them_at_last():
    assert clean_line(b"\x1b[31m 10%\r 50%\r\x1b[1m100%\x1b[0m\r") == "100%"
    assert clean_line(b"a\x1b]0;title\x07b\x00\x08c\td") == "abc\td"


@pytest.mark.parametrize("start", range(1, 14))
def test_a_cursor_within_a_character_begins_with_that_character(log, start):
    log.write_text("a灯é🙂b\n灯", "utf-8")
    window = read_window(str(log), start, 100)
    assert window.start <= start < window.start + 4
    whole = "a灯é🙂b\n灯".encode()[window.start :].decode()  # it is a border of characters
    assert "\n".join([*window.lines, window.rest or ""]) == whole
    assert window.begins_inside == (window.start != 12)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_last_character_that_is_written_in_part_is_not_shown_yet(log, cut):
    log.write_bytes("one\nab🙂".encode()[:-cut])
    assert read_window(str(log), 0, 100).rest == "ab"
    log.write_bytes("one\n🙂".encode()[:-cut])
    assert read_window(str(log), 0, 100).rest in (None, "")


def test_bytes_that_are_no_characters_stop_nothing(log):
    log.write_bytes(b"\x80\x80\x80\x80\x80\xff\xc3\n\xe4" * 100)
    found, offset = 0, 0
    while (window := read_window(str(log), offset, 7)).end != offset:
        "".join(window.lines).encode()
        found, offset = found + 1, window.end
    assert offset >= 800


def test_a_public_reader_sees_our_lines_without_names():
    ours = log_line("dialog", "{name}: {turns} turns", name=Named("secret canary.md"), turns=12)
    error = format_error_line(ProjectError("zero_samples", path="/data/canary"))
    lines = [ours, "canary from a library", error, "[dialog] ⟦canary cut", "ZY_EVENT name=finished step=1"]
    shown, hidden = filter_lines(lines, "public")
    assert len(shown) == 2
    assert shown[0].startswith("[dialog] #")
    assert hidden == 3
    assert "canary" not in "".join(shown)
    named, hidden = filter_lines(lines, "named")
    assert hidden == 1
    assert ours in named


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("[rank0]: 2026-05-03 10:15:00,123 - WARNING - canary", "WARNING …"),
        ("[2026-05-03 10:15:00,123] [INFO] [config.py:1000:print] canary", "INFO …"),
        ("[WARNING|trainer.py:816] 2026-05-03 10:15:00 >> canary", "WARNING …"),
        ("W0503 10:15:00.123000 139 torch/distributed/run.py:793] canary", "WARNING …"),
        ("FATAL: canary", "CRITICAL …"),
        ("WARNINGS of a canary", None),
        ("the canary said: ERROR", None),
        ("Is it an ERROR? asks the canary", None),
        ("Canary", None),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. canary",
         "known failure cuda_oom: torch.OutOfMemoryError"),
        ("FileNotFoundError: No such file or directory: '/home/canary/♥ 12345 日记/model-1.safetensors'",
         "known failure shard_missing: No such file or directory: '/….safetensors"),
        ("OSError: [Errno 28] No space left on device: '/canary'", "known failure disk_full: [Errno 28]"),
        ("RuntimeError: ncclSystemError: canary", "known failure nccl_timeout: ncclSystemError: "),
        ("Tokenizer class CanaryTokenizer does not exist or is not currently imported.",
         "known failure model_too_new: Tokenizer class … does not exist or is not currently"),
    ],
)  # fmt: skip
def test_of_a_line_that_is_not_ours_the_public_sees_words_of_our_own(line, shown):
    lines, hidden = filter_lines([line], "public")
    assert lines == ([] if shown is None else [shown])
    assert hidden == 1
    assert "canary" not in "".join(lines).lower()


EXCERPTS = sorted((Path(__file__).parents[1] / "trainer/log_excerpts").rglob("*"))
WRITTEN_BY_US = "\n".join(remedy.pattern.pattern for remedy in REMEDIES) + "DEBUG INFO WARNING ERROR CRITICAL"


def test_every_known_failure_has_a_public_excerpt_and_no_word_of_it_is_the_logs_own():
    codes, files = set(), [path for path in EXCERPTS if path.is_file()]
    assert len(files) > 50
    for path in files:
        for line in path.read_text("utf-8", errors="replace").splitlines():
            for said in filter_lines([line], "public")[0]:
                if not said.startswith("known failure "):
                    continue
                code, _, words = said[len("known failure ") :].partition(": ")
                codes.add(code)
                for word in re.findall(r"[^\W\d_]{4,}", words):
                    assert re.search(re.escape(word[:3]), WRITTEN_BY_US, re.I), (line, said)
    with_lines = {remedy.code for remedy in REMEDIES if not remedy.frames}
    assert len(codes) > len(with_lines) * 2 / 3, sorted(with_lines - codes)


@pytest.mark.parametrize("canary", ["canary", "灯塔", "♥", "Zq9_x", "138001380001"])
def test_whatever_stands_within_a_known_failure_is_not_shown(canary):
    """A text at every place of every excerpt of a real log: the line may still show its failure, never the text."""
    tried = 0
    for path in (path for path in EXCERPTS if path.is_file()):
        for line in path.read_text("utf-8", errors="replace").splitlines():
            if excerpt(line) is None or public_line(line) is not None:  # a line of ours is whole
                continue
            for place in range(0, min(len(line), 400), 5):
                changed = line[:place] + canary + line[place:]
                said = "".join(filter_lines([changed], "public")[0])
                assert canary not in said, (changed, said)
                tried += 1
    assert tried > 500


def test_the_same_hint_again_and_again_is_one_line():
    lines, hidden = filter_lines(["WARNING one", "WARNING two", "[soul] three", "WARNING four"], "public")
    assert (lines, hidden) == (["WARNING … (2 lines)", "[soul] three", "WARNING …"], 3)


def public_tail(tmp_path, content, **args):
    paths = write_setup(tmp_path, "s1", outcome=OUTCOME)
    Path(paths.log).write_bytes(content)
    return tail_log(Arguments({"root": str(tmp_path), "data": str(tmp_path), "see": "public", **args}))


def test_no_cursor_opens_the_inside_of_a_line_to_the_public(tmp_path):
    """Behind a prefix that is nobody's, a person's text may look like a line of ours."""
    line = b"canary said: [soul] the canary's secret\n[soul] ours\n"
    for start in range(1, line.index(b"[soul] ours")):
        answer = public_tail(tmp_path / str(start), line, from_offset=start)
        assert (answer["lines"], answer["hidden_lines"]) == (["[soul] ours"], 1)
    answer = public_tail(tmp_path / "long", b"[soul] " + b"canary" * 100 + b"\n", from_offset=0, bytes=20)
    assert (answer["lines"], answer["hidden_lines"], answer["next_offset"]) == ([], 1, 20)


# --- a log that was cut, moved or replaced


def key_of(path, offset):
    with open(path, "rb") as file:
        return key_at(file, offset)


def test_a_log_that_grew_is_read_on(log):
    log.write_text("one\n")
    key = key_of(log, 4)
    with open(log, "a") as file:
        file.write("two\n")
    assert find_place(str(log), 4, key) == LogPlace(str(log), 4)


def test_a_log_that_was_moved_is_read_to_its_end_and_then_the_new_one(log):
    """logrotate's `create`: the old file under another name, a new one under the old name, with the same beginning."""
    head = "the same first line\n"
    log.write_text(head + "one\n")
    cursor = (len(head), key_of(log, len(head)))
    aside = log.rename(log.with_name("a.log.1"))
    place = find_place(str(log), *cursor)  # nobody has begun the new one yet
    assert place == LogPlace(str(aside), len(head), "rotated")
    log.write_text(head + "two\n")
    place = find_place(str(log), *cursor)
    window = read_window(place.path, place.offset, 100)
    assert window.lines == ["one"]
    assert find_place(str(log), window.end, window.key) == LogPlace(str(log), 0, "rotated")


def test_a_log_that_was_copied_and_cut_is_read_to_its_end_in_the_copy(log):
    """logrotate's `copytruncate`: another inode has the old bytes, the old inode has new ones."""
    log.write_text("one\ntwo\nthree\n")
    cursor = (4, key_of(log, 4))
    shutil.copy(log, log.with_name("a.log-20260503"))
    with open(log, "w") as file:
        file.write("a new beginning that is longer than the old log was\n")
    place = find_place(str(log), *cursor)
    assert place == LogPlace(str(log) + "-20260503", 4, "rotated")
    window = read_window(place.path, place.offset, 100)
    assert window.lines == ["two", "three"]
    assert find_place(str(log), window.end, window.key) == LogPlace(str(log), 0, "rotated")


@pytest.mark.parametrize("content", ["", "new\n", "a new beginning that is longer than the old one\n"])
def test_a_log_that_was_cut_or_replaced_is_read_from_its_beginning(log, content):
    log.write_text("one\ntwo\n")
    key = key_of(log, 8)
    with open(log, "w") as file:
        file.write(content)
    assert find_place(str(log), 8, key) == LogPlace(str(log), 0, "truncated")
    other = log.with_name("other")
    other.write_text(content)
    other.rename(log)
    assert find_place(str(log), 8, key) == LogPlace(str(log), 0, "replaced")
    if len(content) < 8:
        assert find_place(str(log), 8, None) == LogPlace(str(log), 0, "truncated")


def test_a_log_that_was_cut_and_grew_again_from_the_same_beginning_is_told_by_what_came_last(log):
    head = "the same line\n" * 100
    log.write_text(head + "of the first\n" * 100)
    key = key_of(log, 2000)
    with open(log, "w") as file:
        file.write(head + "of the second\n" * 100)
    assert find_place(str(log), 2000, key) == LogPlace(str(log), 0, "truncated")


def test_a_log_that_was_copied_back_is_the_same_one(log):
    log.write_text("one\ntwo\n")
    key = key_of(log, 4)
    copy = log.with_name("copy")
    shutil.copy(log, copy)
    copy.rename(log)
    assert find_place(str(log), 4, key) == LogPlace(str(log), 4)


def test_packed_and_foreign_files_beside_a_log_are_not_it(log):
    log.write_text("one\n")
    key = key_of(log, 4)
    log.rename(log.with_name("a.log.2.gz"))
    log.with_name("a.logs").write_text("one\n")
    log.with_name("a.log.1").symlink_to(log.with_name("a.log.2.gz"))
    log.write_text("")
    assert find_place(str(log), 4, key).change == "replaced"


def test_the_tail_reads_on_through_a_rotation_and_says_so(tmp_path):
    paths = write_setup(tmp_path, "s1", outcome=OUTCOME)
    log = Path(paths.log)
    log.write_text("one\n")
    args = {"root": str(tmp_path), "data": str(tmp_path), "see": "named"}
    first = tail_log(Arguments(args))
    with open(log, "a") as file:
        file.write("two\n")
    log.rename(str(log) + ".1")
    log.write_text("three\n")
    read, cursor = [], first
    for _ in range(3):
        on = {"from_offset": cursor["next_offset"], "log_key": cursor["log_key"], "id": cursor["id"]}
        cursor = tail_log(Arguments({**args, **on}))
        read.append((cursor["lines"], cursor["log_change"]))
    assert read == [(["two"], "rotated"), (["three"], "rotated"), ([], None)]


def test_following_goes_on_through_a_rotation(tmp_path):
    paths = write_setup(tmp_path, "s1", log_start=4)
    log = Path(paths.log)
    log.write_text("old\none\n")
    args = {"root": str(tmp_path), "data": str(tmp_path), "kind": "setup", "id": "s1", "see": "named"}
    first = follow(Arguments({**args, "offset": 0}))
    assert first["lines"] == ["one"]
    log.rename(str(log) + ".1")
    log.write_text("two\n")
    second = follow(Arguments({**args, "offset": first["next_offset"], "log_key": first["log_key"]}))
    assert (second["lines"], second["log_change"]) == (["two"], "rotated")
    with open(log, "a") as file:
        file.write("three\n")
    third = follow(Arguments({**args, "offset": second["next_offset"], "log_key": second["log_key"]}))
    assert (third["lines"], third["log_change"]) == (["three"], None)


def test_a_cursor_names_its_log_even_when_there_is_a_newer_one(tmp_path):
    older = write_setup(tmp_path, "s1", outcome=OUTCOME)
    Path(older.log).write_text("one\n")
    args = {"root": str(tmp_path), "data": str(tmp_path), "see": "named"}
    first = tail_log(Arguments(args))
    newer = run_paths(str(tmp_path), "v1", "20990101-000000-aaaa")
    os.makedirs(newer.folder)
    Path(newer.supervisor_spec).write_text(json.dumps({"data": str(tmp_path), "version": "v1"}))
    Path(newer.outcome).write_text(json.dumps(OUTCOME))
    Path(newer.log).write_text("of the run\n")
    assert tail_log(Arguments({**args, "which": "train"}))["lines"] == ["of the run"]
    on = {"from_offset": 0, "log_key": first["log_key"], "id": first["id"]}
    assert tail_log(Arguments({**args, "which": "train", **on}))["id"] == "s1"
    gone = tail_log(Arguments({**args, "which": "train", **on, "id": "s0", "from_offset": 4}))
    assert (gone["lines"], gone["log_change"]) == (["of the run"], "replaced")


@pytest.mark.parametrize("size", [0, 10 << 30])
def test_an_empty_log_and_a_huge_one_cost_the_same(tmp_path, size):
    """By the bytes that are read, of one as of the other."""
    paths = write_setup(tmp_path, "s1", outcome=OUTCOME)
    with open(paths.log, "wb") as file:
        file.truncate(size)
    program = (
        "import sys, json; from controller.boxside.logs import tail_log; from controller.boxside.arguments import "
        "Arguments; args = Arguments(json.loads(sys.argv[1])); before = open('/proc/self/io').read().split(); "
        "answer = tail_log(args); after = open('/proc/self/io').read().split(); "
        "print(int(after[1]) - int(before[1]), answer['size'])"
    )
    for more in ({}, {"from_offset": size}, {"from_offset": size // 2, "bytes": 12_000}):
        args = json.dumps({"root": str(tmp_path), "data": str(tmp_path), "see": "public", **more})
        done = subprocess.run([sys.executable, "-c", program, args], capture_output=True, text=True, check=True)
        read, found = map(int, done.stdout.split())
        assert found == size
        assert read < 64 * 1024


def test_a_huge_log_costs_what_a_small_one_costs(log):
    with open(log, "wb") as file:
        file.truncate(10 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"\nthe end\n")
    began = time.process_time()
    assert read_window(str(log), None, 12_000).lines[-1] == "the end"
    assert time.process_time() - began < 1


def write_setup(data, setup_id, *, log_start=0, log_end=None, outcome=None):
    paths = setup_paths(str(data), setup_id)
    os.makedirs(paths.folder)
    os.makedirs(os.path.dirname(paths.log), exist_ok=True)
    process = {"pid": 1, "start_ticks": 1, "boot_id": "another boot"}
    attempt = {"attempt": 1, "process": process, "child": None, "log_start": log_start}
    if log_end is not None:
        attempt["log_end"] = log_end
    files = {paths.supervisor_spec: {"data": str(data)}, paths.supervisor: {"attempts": [attempt]}}
    if outcome:
        files[paths.outcome] = outcome
    for path, values in files.items():
        with open(path, "w") as file:
            json.dump(values, file)
    return paths


OUTCOME = {"state": "succeeded", "exit_code": 0, "signal": None, "reason": "done", "last_step": 0, "ended_at": "now"}


def test_following_a_setup_shows_its_own_part_of_the_log(tmp_path):
    paths = write_setup(tmp_path, "s1", log_start=4, log_end=9, outcome=OUTCOME)
    with open(paths.log, "w") as file:
        file.write("old\nmine\nlater\n")
    args = {"root": str(tmp_path), "data": str(tmp_path), "kind": "setup", "id": "s1", "offset": 0, "see": "named"}
    answer = follow(Arguments(args))
    assert (answer["lines"], answer["next_offset"], answer["state"]) == (["mine"], 9, "succeeded")
    assert follow(Arguments({**args, "offset": 9}))["next_offset"] == 9


def test_without_outcome_and_supervisor_a_work_is_lost(tmp_path):
    paths = write_setup(tmp_path, "s1")
    with open(paths.log, "w") as file:
        file.write("one\nhalf a li")
    answer = follow(
        Arguments({"root": str(tmp_path), "data": str(tmp_path), "kind": "setup", "id": None, "see": "named"})
    )
    assert (answer["state"], answer["lines"]) == ("lost", ["one", "half a li"])


def test_what_is_not_there_is_said(tmp_path):
    for op, more in ((follow, {"kind": "train"}), (tail_log, {}), (tail_log, {"which": "build"})):
        with pytest.raises(ProjectError, match="run_not_found"):
            op(Arguments({"root": str(tmp_path), "data": str(tmp_path), **more}))


def test_the_tail_goes_on_from_its_own_cursor(tmp_path):
    paths = write_setup(tmp_path, "s1", outcome=OUTCOME)
    with open(paths.log, "w") as file:
        file.write("one\ntwo\n")
    first = tail_log(Arguments({"root": str(tmp_path), "data": str(tmp_path), "see": "named", "bytes": 5}))
    assert (first["lines"], first["id"]) == (["two"], "s1")
    with open(paths.log, "a") as file:
        file.write("three\nfo")
    for more in ({}, {"log_key": first["log_key"]}):
        args = {
            "root": str(tmp_path),
            "data": str(tmp_path),
            "see": "named",
            "from_offset": first["next_offset"],
            **more,
        }
        after = tail_log(Arguments(args))
        assert (after["lines"], after["rest"], after["next_offset"]) == (["three"], "fo", 14)
        assert after["log_change"] is None
