"""GitHub's conventions: event file, masks, annotations, outputs, visibility."""

import io
import json

import pytest

from controller.github import Runner, defuse, escape_data, escape_property
from corpus_builder.errors import ProjectError


def runner(tmp_path, event=None, **environ):
    path = tmp_path / "event.json"
    if event is not None:
        path.write_text(event if isinstance(event, str) else json.dumps(event), "utf-8")
    base = {"GITHUB_ACTIONS": "true", "GITHUB_EVENT_NAME": "workflow_dispatch", "GITHUB_EVENT_PATH": str(path)}
    return Runner({**base, **environ}, io.StringIO())


def test_form_is_read_from_the_event_file_whatever_its_types(tmp_path):
    inputs = {"action": "status", "confirm_override": True, "watch_minutes": 30, "recipe": "", "other": "x"}
    assert runner(tmp_path, {"inputs": inputs}).read_inputs() == {
        "action": "status", "confirm_override": "true", "watch_minutes": "30",
    }  # fmt: skip


def test_booleans_that_arrive_as_strings_stay_what_they_are(tmp_path):
    assert runner(tmp_path, {"inputs": {"confirm_override": "false"}}).read_inputs() == {"confirm_override": "false"}


def test_with_value_wins_over_a_form_field_of_that_name(tmp_path):
    given = runner(tmp_path, {"inputs": {"recipe": "a"}}, ZY_INPUT_RECIPE="b", ZY_INPUT_DIALOG_ZIP="")
    assert given.read_inputs() == {"recipe": "b"}


@pytest.mark.parametrize("environ", [{"GITHUB_ACTIONS": ""}, {"GITHUB_EVENT_NAME": "push"}, {"GITHUB_EVENT_PATH": ""}])
def test_form_is_read_only_where_there_is_one(tmp_path, environ):
    assert runner(tmp_path, {"inputs": {"action": "kill"}}, **environ).read_inputs() == {}


@pytest.mark.parametrize("event", ["{", "\x00"])
def test_broken_event_file_is_an_error_and_not_an_empty_form(tmp_path, event):
    with pytest.raises(ProjectError, match="input_invalid"):
        runner(tmp_path, event).read_inputs()


def test_input_that_is_no_value_is_refused(tmp_path):
    with pytest.raises(ProjectError, match="input_invalid"):
        runner(tmp_path, {"inputs": {"recipe": ["a"]}}).read_inputs()


@pytest.mark.parametrize(
    ("event", "sees"),
    [
        ({"repository": {"private": True}}, "named"),
        ({"repository": {"private": False}}, "public"),
        ({"repository": {"private": "true"}}, "public"),
        ({"repository": {}}, "public"),
        ({}, "public"),
        ("[]", "public"),
        ("{", "public"),
    ],
)
def test_unknown_visibility_counts_as_public(tmp_path, event, sees):
    assert runner(tmp_path, event).sees() == sees


def test_own_terminal_sees_everything_and_prints_no_command(tmp_path):
    laptop = runner(tmp_path, GITHUB_ACTIONS="")
    laptop.mask("a secret value")
    laptop.annotate("error", "t", "m")
    assert (laptop.sees(), laptop.out.getvalue(), laptop.run_url, laptop.commit) == ("text", "", "", "")


def test_masks_are_escaped_and_short_or_numeric_values_are_left_alone(tmp_path):
    github = runner(tmp_path)
    for value in ("22", "root", "1234567890", "https://h/x%2F?sign=abc\r\nd"):
        github.mask(value)
    assert github.out.getvalue() == "::add-mask::https://h/x%252F?sign=abc%0D%0Ad\n"


def test_annotation_cannot_be_broken_out_of(tmp_path):
    github = runner(tmp_path)
    github.annotate("error", "a,b:c\n", "50 %\n::add-mask::x")
    assert github.out.getvalue() == "::error title=a%2Cb%3Ac%0A::50 %25%0A::add-mask::x\n"
    assert escape_data("%0A") == "%250A"
    assert escape_property("a:b") == "a%3Ab"


def test_output_value_cannot_end_its_own_delimiter(tmp_path):
    github = runner(tmp_path, GITHUB_OUTPUT=str(tmp_path / "out"))
    github.write_output("run_id", "a\nEOF\nother=x")
    head, *body, tail = (tmp_path / "out").read_text().splitlines()
    assert head.startswith("run_id<<zy_")
    assert tail == head.removeprefix("run_id<<")
    assert body == ["a", "EOF", "other=x"]


def test_summaries_are_appended(tmp_path):
    github = runner(tmp_path, GITHUB_STEP_SUMMARY=str(tmp_path / "s.md"))
    github.write_summary("一")
    github.write_summary("two\n\n")
    assert (tmp_path / "s.md").read_text("utf-8") == "一\ntwo\n"


def test_run_page_is_linked(tmp_path):
    github = runner(tmp_path, GITHUB_RUN_ID="7", GITHUB_REPOSITORY="o/r", GITHUB_SHA="abc")
    assert github.run_url == "https://github.com/o/r/actions/runs/7"
    assert github.commit == "abc"


@pytest.mark.parametrize(
    "line",
    ["::add-mask::x", "  ::set-output name=a::b", "x\r::error::y", "##[error]x", "a ##[add-mask]b", "\x1b]0;t\x07"],
)
def test_foreign_line_is_no_workflow_command(line):
    safe = defuse(line)
    assert not safe.lstrip().startswith("::")
    assert "##[" not in safe
    assert not any(ord(char) < 32 for char in safe)


def test_ordinary_line_stays_as_it_is():
    line = "ZY_PROGRESS step=1 total=2 loss=1.5\t[dialog] std::vector 灯塔"
    assert defuse(line) == line
