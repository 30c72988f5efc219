"""How a run learns, as people read it: the verdict on its curve, held-out losses, skipped steps; here and by status."""

import json

import pytest

from controller.boxside.status import MAX_POINTS, read_points
from controller.reports import SetupReport, StatusReport, TrainReport
from controller.summary import as_markdown
from corpus_builder.say import LANGUAGES, SEE_PUBLIC
from trainer.curve import VERDICTS, describe_learning
from trainer.journal import Journal
from trainer.progress import Progress, format_progress
from trainer.run_paths import run_paths

SETUP = SetupReport(action="setup", setup_id="s", state="succeeded", recipe="r", plan="p", version="v", expected={})


def point(step, loss, **extras):
    return Progress(step, 75, loss, 1e-5, 1.0, 5.0, 3.2, extras | {"attempt": 1.0})


def looked(step, loss, held_out, soul):
    return point(step, loss, eval_loss=held_out, eval_loss_soul=soul)


#: A run that goes from 3.0 to 1.5 while its held-out loss falls, and rises at the end.
POINTS = [point(step, 3.0 - 0.02 * step, skipped=2.0, scale=16384.0) for step in range(1, 70)]
POINTS += [looked(70, 1.6, 2.5, 2.6), looked(72, 1.55, 1.9, 2.0), looked(75, 1.5, 2.1, 2.2)]


def train_markdown(points, lang):
    report = TrainReport(
        action="setup-and-train", setup=SETUP, run_id="r", version="v", state="running", points=tuple(points)
    )
    return as_markdown(report, lang=lang, see=SEE_PUBLIC)


def status_markdown(learning, lang):
    run = {"id": "r", "state": "running", "last_step": 75, "total": 75, "loss": 1.5, "losses": {}} | learning
    status = {
        "run": run, "setup": None, "checkpoints": [], "gpus": None, "disks": {}, "locks": {}, "secrets": [],
    }  # fmt: skip
    return as_markdown(StatusReport(action="status", box="b", status=status), lang=lang, see=SEE_PUBLIC)


def told(points):
    return {"learning": describe_learning([(item.step, item.loss, item.extras) for item in points])}


@pytest.mark.parametrize("markdown_of", [train_markdown, lambda points, lang: status_markdown(told(points), lang)])
def test_verdict_and_held_out_losses_are_shown_alike(markdown_of):
    english, chinese = markdown_of(POINTS, "en"), markdown_of(POINTS, "zh")
    assert "| Loss curve | as expected: it falls |" in english
    assert "| Held-out loss | step 70 | step 72 (lowest) | step 75 (last seen) |" in english
    assert "| all | 2.5000 | 1.9000 | 2.1000 |" in english
    assert "| soul | 2.6000 | 2.0000 | 2.2000 |" in english
    assert "| Steps skipped by fp16 overflow | 2 |" in english
    assert "如预期：在下降" in chinese
    assert "留出样本 loss" in chinese


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("verdict", VERDICTS)
def test_every_verdict_has_a_word_and_a_short_curve_is_not_judged(lang, verdict):
    markdown = status_markdown({"learning": {"curve": verdict}}, lang)
    assert f"curve.{verdict}" not in markdown
    assert ("loss 曲线" in markdown or "Loss curve" in markdown) is (verdict != "too_short")


def test_a_run_that_nobody_looked_at_and_an_older_box_have_less_to_say():
    assert "Held-out" not in train_markdown(POINTS[:69], "en")
    assert "Loss curve" not in status_markdown({}, "en")


def test_a_class_that_a_look_did_not_hold_is_a_dash():
    points = [point(5, 2.0, eval_loss=1.0), looked(6, 2.0, 0.5, 0.5)]
    assert "| soul | – | 0.5000 | 0.5000 |" in train_markdown(points, "en")


def test_skipped_steps_add_up_over_attempts():
    rows = [(1, 2.0, {"attempt": 1, "skipped": 3}), (2, 2.0, {"attempt": 1, "skipped": 4}), (3, 2.0, {"attempt": 2})]
    assert describe_learning(rows)["skipped"] == 4
    assert describe_learning([*rows, (4, 2.0, {"attempt": 2, "skipped": 1})])["skipped"] == 5


@pytest.fixture
def paths(tmp_path):
    found = run_paths(str(tmp_path), "v", "20260101-000000-abcd")
    (tmp_path / "runs/20260101-000000-abcd").mkdir(parents=True)
    return found


def test_the_box_tells_the_same_from_its_journal(paths):
    journal = Journal(paths, attempt=1)
    for item in [*POINTS[:5], point(5, float("nan")), *POINTS[5:]]:
        journal.read(format_progress(item).encode())
    journal._log.close()
    with open(paths.progress, "a") as file:
        file.write('{"step": 76, "lo')
    assert json.loads(json.dumps(describe_learning(read_points(paths.progress)))) == told(POINTS)["learning"]


def test_a_very_long_run_is_thinned_out_and_keeps_its_looks(paths):
    rows = [
        {"step": step, "loss": 2.0, "extras": {"eval_loss": 1.0} if step == 1234 else {}}
        for step in range(3 * MAX_POINTS)
    ]
    with open(paths.progress, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    points = read_points(paths.progress)
    assert MAX_POINTS // 2 < len(points) <= MAX_POINTS + 1
    assert describe_learning(points)["held_out"]["best"] == {"step": 1234, "losses": {"all": 1.0}}


def test_no_progress_yet(paths):
    assert describe_learning(read_points(paths.progress)) == {"curve": "too_short", "held_out": None, "skipped": 0}
