"""Logs through a byte cursor: whole characters, folded lines, privacy classes, and a cost that does not grow."""

import json
import os
import time

import pytest

from controller.boxside.arguments import Arguments
from controller.boxside.logs import clean_line, filter_lines, follow, read_window, tail_log
from corpus_builder.errors import Named, ProjectError, format_error_line
from corpus_builder.log_lines import log_line
from trainer.run_paths import setup_paths


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
    args = {"data": str(tmp_path), "kind": "setup", "id": "s1", "offset": 0, "see": "named"}
    answer = follow(Arguments(args))
    assert (answer["lines"], answer["next_offset"], answer["state"]) == (["mine"], 9, "succeeded")
    assert follow(Arguments({**args, "offset": 9}))["next_offset"] == 9


def test_without_outcome_and_supervisor_a_work_is_lost(tmp_path):
    paths = write_setup(tmp_path, "s1")
    with open(paths.log, "w") as file:
        file.write("one\nhalf a li")
    answer = follow(Arguments({"data": str(tmp_path), "kind": "setup", "id": None, "see": "named"}))
    assert (answer["state"], answer["lines"]) == ("lost", ["one", "half a li"])


def test_what_is_not_there_is_said(tmp_path):
    for op, more in ((follow, {"kind": "train"}), (tail_log, {}), (tail_log, {"which": "build"})):
        with pytest.raises(ProjectError, match="run_not_found"):
            op(Arguments({"data": str(tmp_path), **more}))


def test_the_tail_goes_on_from_its_own_cursor(tmp_path):
    paths = write_setup(tmp_path, "s1", outcome=OUTCOME)
    with open(paths.log, "w") as file:
        file.write("one\ntwo\n")
    first = tail_log(Arguments({"data": str(tmp_path), "see": "named", "bytes": 5}))
    assert (first["text"], first["id"]) == ("two\n", "s1")
    with open(paths.log, "a") as file:
        file.write("three\n")
    after = tail_log(Arguments({"data": str(tmp_path), "see": "named", "from_offset": first["next_offset"]}))
    assert after["text"] == "three\n"
