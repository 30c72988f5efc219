"""What people read: every value in its place, nothing that is not theirs to see, Markdown that holds."""

import json

import pytest

from controller.markdown import duration, escape, fence, number, table
from controller.reports import (
    KillReport,
    Notice,
    SetupReport,
    StatusReport,
    Step,
    StepsReport,
    TailReport,
    TrainReport,
    report_to_json,
)
from controller.summary import as_markdown, error_as_markdown
from corpus_builder.errors import Named, ProjectError, Text
from corpus_builder.say import LANGUAGES, SEE_ALL, SEE_NAMES, SEE_PUBLIC
from tests.manifests import small_manifest
from trainer.progress import Progress
from trainer.run_state import STATES

EXPECTED = {"soul_share": 0.6666, "relation": 100, "total": 300}


def setup_report(**changes):
    values = {
        "action": "setup-only", "setup_id": "20260503-101500-3fa1", "state": "succeeded", "recipe": "coding_v1",
        "plan": "zhuyuan", "version": "zy_coding_v1", "expected": EXPECTED, "manifest": small_manifest(),
    }  # fmt: skip
    return SetupReport(**{**values, **changes})


def point(step, loss, **extras):
    return Progress(step=step, total=75, loss=loss, lr=9.8e-6, epoch=1, total_epochs=5, thr=3.2, extras=extras)


def train_report(**changes):
    values = {
        "action": "setup-and-train", "setup": setup_report(), "run_id": "20260503-111500-aaaa",
        "version": "zy_coding_v1", "state": "running", "eta_s": 3909.0, "watched_s": 61.0,
        "points": (point(5, 3.0, loss_soul=2.9), point(70, 1.5, loss_soul=1.4, loss_raw=9.0)),
        "checkpoints": ({"path": "/d/checkpoint-70", "gib": 14.2, "complete": True},),
    }  # fmt: skip
    return TrainReport(**{**values, **changes})


STATUS = {
    "run": {
        "id": "r-1", "version": "v", "state": "running", "attempt": 1, "started_at": "2026-05-03T10:15:00Z",
        "last_step": 10, "total": 75, "loss": 1.5, "losses": {"soul": 1.25, "raw": 2.0}, "eta_s": 60, "error": None,
        "remedy": None, "outcome": None, "step_name": "train",
    },
    "setup": {"id": "s-1", "state": "failed", "error": ProjectError("zero_samples", path="p").to_json()},
    "checkpoints": [{"path": "/d/final", "step": None, "gib": 15.0, "complete": True}],
    "gpus": [{"index": 0, "name": "Tesla V100", "memory_mib": 32768, "used_mib": 3, "utilization": None}],
    "disks": {"/data": {"free_gib": 402.12, "total_gib": 1000.0}},
    "locks": {"setup": None, "run": {"owner": "alice", "action": "setup-and-train", "name": "r-1"}},
    "secrets": ["ZY_DIALOG_URL"],
}  # fmt: skip

REPORTS = {
    "setup": setup_report(),
    "smoke": setup_report(
        error=ProjectError("smoke_failed", path="/v/bin/python", reason=Named("x")), state="failed", manifest=None,
        remedy="driver_too_old",
        box={"python": "3.10", "tmux": None, "gpus": [{"name": "V100"}] * 4, "health": {"os": "Ubuntu 22.04"}},
        notices=(Notice(key="shm_small", values={"gib": 0.06, "ranks": 4}),),
    ),
    "gate": setup_report(error=ProjectError("gate_failed", gates="total (5 < 100)"), state="failed"),
    "train": train_report(),
    "started": train_report(points=(), state="starting", checkpoints=()),
    "status": StatusReport(action="status", box="gpu@secret-host:22", status=STATUS),
    "empty": StatusReport(
        action="status", box="b",
        status={**STATUS, "run": None, "setup": None, "checkpoints": [], "gpus": None, "secrets": []},
    ),
    "tail": TailReport(action="tail-log", log_id="r", text="a\n", size=9, from_offset=0, hidden_lines=3),
    "no log": TailReport(action="tail-log", log_id="", text="", size=0, from_offset=0, hidden_lines=0),
    "kill": KillReport(action="kill", ended=({"kind": "train", "id": "r", "state": "lost"},), alive=0, was_forced=True),
    "nothing": KillReport(action="kill", ended=(), alive=0),
    "dry run": StepsReport(
        action="setup-only",
        steps=(
            Step(key="install_tmux", values={}), Step(key="install_tmux", values={}, is_needed=False),
            Step(key="smoke", values={}), Step(key="build_corpus", values={"plan": "p"}),
        ),
    ),
    "dry run of nothing": StepsReport(action="status", steps=()),
}  # fmt: skip


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("name", REPORTS)
def test_every_report_is_said_in_both_languages(name, lang):
    markdown = as_markdown(REPORTS[name], lang=lang, see=SEE_PUBLIC)
    assert markdown.startswith("## ")
    assert ("{" in markdown, "summary." in markdown) == (False, False)
    json.dumps(report_to_json(REPORTS[name], SEE_PUBLIC))


@pytest.mark.parametrize("lang", LANGUAGES)
def test_every_state_has_a_word(lang):
    assert all(as_markdown(train_report(state=state), lang=lang, see=SEE_ALL) for state in STATES)
    assert "失败" in as_markdown(train_report(state="failed"), lang="zh", see=SEE_ALL)


def rows(markdown):
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in markdown.splitlines() if line[:1] == "|"
    ]


def test_setup_counts_every_class_also_those_without_a_sample():
    shown = rows(as_markdown(setup_report(), lang="en", see=SEE_PUBLIC))
    found = {row[0]: row for row in reversed(shown)}
    assert found["soul"][1:] == ["1", "5", "1", "12,345", "678", "0", "≥ 67% of the listed files"]
    assert found["relation"][1:] == ["0"] * 6 + ["≥ 100 dialogs"]
    assert found["Total"][1:] == ["1", "5", "1", "12,345", "678", "0", "≥ 300"]


@pytest.mark.parametrize(("lang", "remedy", "warning"), [("en", "driver", "0.06 GiB"), ("zh", "驱动", "0.06 GiB")])
def test_setup_that_failed_says_its_remedy_and_what_troubles_the_machine(lang, remedy, warning):
    failed = REPORTS["smoke"]
    lines = as_markdown(failed, lang=lang, see=SEE_PUBLIC).splitlines()
    said = [line for line in lines if line.startswith("> ") and not line.startswith("> **")]
    assert len(said) == 1
    assert remedy in said[0]
    assert [line for line in lines if line.startswith("- ⚠️") and warning in line]
    assert ["GPUs" if lang == "en" else "GPU", "4 × V100"] in rows("\n".join(lines))
    trained = as_markdown(train_report(setup=failed), lang=lang, see=SEE_PUBLIC)
    assert "- ⚠️" in trained


def test_gates_show_verdict_and_numbers_and_the_missing_file_is_named():
    markdown = as_markdown(setup_report(manifest=small_manifest(verdict="stop")), lang="en", see=SEE_PUBLIC)
    gate = next(row for row in rows(markdown) if row[0] == "all samples")
    assert gate[1:4] == ["❌ stop", "5", "100"]
    assert "- docs/b.md" in markdown


def test_names_of_dialogs_and_documents_are_hashed_in_public():
    for report in (setup_report(), train_report()):
        public = as_markdown(report, lang="zh", see=SEE_PUBLIC) + json.dumps(report_to_json(report, SEE_PUBLIC))
        assert "canary" not in public
    assert "canary dialog.md" in as_markdown(setup_report(), lang="zh", see=SEE_NAMES)


def test_machine_is_named_only_where_names_may_be_seen():
    assert "secret-host" not in as_markdown(REPORTS["status"], lang="en", see=SEE_PUBLIC)
    assert "secret-host" in as_markdown(REPORTS["status"], lang="en", see=SEE_NAMES)


def test_named_and_written_values_of_an_error_stay_unseen():
    error = ProjectError("sample_invalid", path=Named("her file.md"), line=3, reason=Text("what she wrote"))
    report = setup_report(error=error)
    shown = as_markdown(report, lang="en", see=SEE_PUBLIC) + json.dumps(report_to_json(report, SEE_PUBLIC))
    assert "her file" not in shown
    assert "she wrote" not in shown
    assert "line 3" in shown


def test_training_shows_what_it_expected_of_itself():
    told = {
        "gpu_gib": "9.75",
        "host_gib": "147.3",
        "disk_gib": "410.1",
        "steps": "130",
        "views": "5",
        "minutes": "unknown",
    }
    found = rows(as_markdown(train_report(preflight=told), lang="en", see=SEE_PUBLIC))
    assert ["memory of each GPU", "9.75 GiB"] in found
    assert ["memory of the host", "147.3 GiB"] in found
    assert ["optimizer steps", "130"] in found
    assert ["minutes", "–"] in found
    assert "开始前的预计" in as_markdown(train_report(preflight=told), lang="zh", see=SEE_PUBLIC)
    assert "Expected before" not in as_markdown(train_report(), lang="en", see=SEE_PUBLIC)


def test_training_shows_progress_loss_by_class_and_time_left():
    markdown = as_markdown(train_report(), lang="en", see=SEE_PUBLIC)
    found = rows(markdown)
    assert ["Step", "70 / 75"] in found
    assert ["Time left", "1:05:09"] in found
    assert ["all", "3.0000", "1.5000"] in found
    assert ["soul", "2.9000", "1.4000"] in found
    assert "9.0000" not in markdown
    assert "/d/checkpoint-70" in markdown


def test_status_shows_run_losses_locks_and_names_of_secrets():
    markdown = as_markdown(REPORTS["status"], lang="en", see=SEE_PUBLIC)
    for expected in (
        "10 / 75",
        "1.2500",
        "402.1 GiB",
        "started by alice",
        "ZY_DIALOG_URL",
        "3 / 32,768 MiB",
        "no sample",
    ):
        assert expected in markdown


def test_deadline_is_no_failure_to_the_eye():
    error = ProjectError("deadline_passed", state="running", minutes=340, name="run r")
    assert as_markdown(train_report(error=error), lang="zh", see=SEE_PUBLIC).startswith("## ⏳")
    assert error_as_markdown("kill", error, lang="zh", see=SEE_PUBLIC).startswith("## ❌ kill")


@pytest.mark.parametrize("text", ["```\nout", "a ```` b\n`````", "no newline", "crlf\r\nx", "\ud800", ""])
def test_fence_is_longer_than_any_in_the_text(text):
    first, *body, last = fence(text).split("\n")
    assert first == last + "text"
    assert all(last not in line for line in body)
    fence(text).encode("utf-8")


@pytest.mark.parametrize(
    "value", ["a|b", "a\nb", "<img src=x>", "`x`", "[l](u)", "*b*", "\x1b[31m", "# h", "~~s~~", "$x$"]
)
def test_cell_holds_no_markup(value):
    cell = escape(value)
    assert "\n" not in cell
    assert "<" not in cell
    line = table(("h",), [(value,)]).splitlines()[2]
    assert line.replace("\\|", "").count("|") == 2


def test_ids_and_paths_stay_legible():
    assert (
        escape("zy_coding_v1 20260503-101500-3fa1 /d/checkpoint-70")
        == "zy_coding_v1 20260503-101500-3fa1 /d/checkpoint-70"
    )


@pytest.mark.parametrize(
    ("value", "said"), [(None, "–"), (0, "0"), (12345, "12,345"), (2.0, "2"), (0.66667, "0.6667"), (1e-5, "1e-05")]
)
def test_numbers(value, said):
    assert number(value) == said


@pytest.mark.parametrize(("seconds", "said"), [(None, "–"), (0, "0:00:00"), (59.6, "0:01:00"), (90061, "25:01:01")])
def test_durations(seconds, said):
    assert duration(seconds) == said
