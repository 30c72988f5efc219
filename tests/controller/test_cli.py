"""The command line: what it imports, what it refuses, how it says so, and with which exit code."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from controller.cli import zy
from controller.inputs import ACTIONS
from controller.invocation import Options, Surroundings, perform
from corpus_builder.errors import ProjectError
from corpus_builder.frame import CHAT_TEMPLATE
from tests.fake_box import FakeBox
from tests.tokenizers_real import tiny_tokenizer_json, write_tokenizer_folder

ROOT = Path(__file__).parents[2]
STATUS = {
    "run": None, "setup": None, "checkpoints": [], "gpus": None, "disks": {}, "secrets": [],
    "locks": {"setup": None, "run": None},
}  # fmt: skip


def run_zy(*args, **environ):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ZY_", "GITHUB_", "AWS_"))}
    return subprocess.run(
        [sys.executable, "-m", "controller.cli", *args],
        env={**kept, **environ}, cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_help_imports_click_only():
    code = (
        "import sys; from controller.cli import zy\n"
        "try: zy(['--help'])\n"
        "except SystemExit: pass\n"
        "mine = {n for n in sys.modules if n.split('.')[0] in ('controller', 'trainer', 'corpus_builder')}\n"
        "heavy = [n for n in ('pydantic', 'yaml', 'paramiko', 'boto3', 'torch') if n in sys.modules]\n"
        "print(sorted(mine), heavy, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "['controller', 'controller.cli'] []"


def test_help_names_every_action_and_every_exit_code():
    text = CliRunner().invoke(zy, ["--help"]).output
    assert all(action in text for action in ACTIONS)
    assert all(f"  {code}  " in text for code in range(10) if code != 1)


@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_has_the_four_options(action):
    text = CliRunner().invoke(zy, [action, "--help"]).output
    assert all(option in text for option in ("--box", "--dry-run", "--json", "--lang"))


@pytest.mark.parametrize("typed", ['"; touch x #', "$(touch x)", "a\nb", "-rf", "--help", "--version", ""])
def test_unknown_action_is_refused_with_its_exit_code(typed, tmp_path):
    done = run_zy("--", typed, ZY_LANG="en", GITHUB_STEP_SUMMARY=str(tmp_path / "s.md"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 3
    assert "there is no action" in (tmp_path / "s.md").read_text("utf-8")


@pytest.mark.parametrize("typed", ["corpus", "demo"])
def test_composite_action_offers_the_actions_and_no_more(typed):
    assert run_zy("--", typed, ZY_INPUT_ACTION=typed).returncode == 2


def test_missing_settings_are_all_named_in_the_language():
    done = run_zy("status", ZY_LANG="zh")
    assert done.returncode == 2
    assert all(name in done.stderr for name in ("ZY_GPU_HOST", "ZY_GPU_USER", "ZY_GPU_KEY", "下一步"))


def test_not_confirmed_is_exit_8_without_a_box():
    done = run_zy(
        "setup-and-train", "--lang", "en", ZY_GPU_HOST="h", ZY_GPU_USER="u", ZY_GPU_PASSWORD="secret-password"
    )
    assert done.returncode == 8
    assert "--confirm" in done.stderr


def test_unknown_recipe_key_gives_the_nearest_one():
    done = run_zy(
        "setup-only",
        "--set",
        "learning_rat=1",
        "--lang",
        "en",
        ZY_GPU_HOST="h",
        ZY_GPU_USER="u",
        ZY_GPU_PASSWORD="x" * 9,
    )
    assert done.returncode == 2
    assert "learning_rate" in done.stderr


def call(action, answers, *, options=None, **environ):
    """Run an action against a fake box; return exit code, out, err."""
    out, err = io.StringIO(), io.StringIO()
    given = options or Options(given={}, lang="en")
    code = perform(action, given, Surroundings(environ, out, err), open_box=lambda kind, settings: FakeBox(answers))
    return code, out.getvalue(), err.getvalue()


def test_json_is_the_only_thing_on_stdout():
    code, out, err = call("status", {"status": [STATUS]}, options=Options(given={}, is_json=True))
    assert (code, json.loads(out)["status"], err) == (0, STATUS, "")


@pytest.mark.parametrize("is_composite", [True, False])
def test_deadline_is_a_warning_and_green_only_in_our_action(is_composite):
    late = ProjectError("deadline_passed", state="running", minutes=340, name="run r")
    environ = {"GITHUB_ACTIONS": "true", **({"ZY_INPUT_ACTION": "status"} if is_composite else {})}
    code, out, err = call("status", {"status": [late]}, **environ)
    assert code == (0 if is_composite else 5)
    assert "::warning title=deadline_passed::" in out
    assert "the work goes on" in err


def test_failure_is_an_annotation_of_public_words(tmp_path):
    from corpus_builder.errors import Named

    failed = ProjectError("dialog_zip_unreadable", path=Named("canary.zip"), reason="x")
    event = tmp_path / "event.json"
    event.write_text('{"repository": {"private": true}}')
    code, out, err = call("status", {"status": [failed]}, GITHUB_ACTIONS="true", GITHUB_EVENT_PATH=str(event))
    assert code == 2
    assert "::error title=dialog_zip_unreadable::" in out
    assert "canary" not in out
    assert "canary" in err  # a private repository's log may name files


def test_lines_of_the_box_are_no_workflow_commands():
    tail = {
        "id": "r", "kind": "train", "state": "running", "lines": ["::add-mask::x", "##[error]y"], "rest": "::z",
        "from_offset": 0, "next_offset": 9, "log_key": "a.0", "log_change": None, "size": 9, "hidden_lines": 0,
    }  # fmt: skip
    _, out, _ = call("tail-log", {"tail_log": [tail]}, GITHUB_ACTIONS="true")
    assert "add-mask" in out
    assert not any(line.startswith("::") or "##[" in line for line in out.splitlines())


def test_secrets_are_masked_before_the_box_is_asked():
    _, out, _ = call("status", {"status": [STATUS]}, GITHUB_ACTIONS="true", ZY_GPU_PASSWORD="hunter2hunter2")
    assert out.splitlines()[0] == "::add-mask::hunter2hunter2"


def test_signed_link_typed_into_the_form_is_masked_and_refused(tmp_path):
    event = tmp_path / "event.json"
    event.write_text(json.dumps({"inputs": {"dialog_zip": "https://h/a.zip?sign=0123456789"}}))
    environ = {"GITHUB_ACTIONS": "true", "GITHUB_EVENT_NAME": "workflow_dispatch", "GITHUB_EVENT_PATH": str(event)}
    code, out, err = call("setup-only", {}, **environ)
    assert code == 2
    assert out.startswith("::add-mask::https://h/a.zip?sign=0123456789\n")
    assert "0123456789" not in out.split("\n", 1)[1] + err


def test_a_bug_keeps_its_traceback():
    with pytest.raises(AssertionError, match="no answer scripted"):
        call("status", {})


def test_corpus_build_counts_what_it_built(tmp_path):
    (tmp_path / "docs").mkdir()
    for name in ("a", "b"):
        text = f"# {name}\n\n## Who keeps the lamp of {name}?\n\nI keep it, every night, with oil and patience.\n"
        (tmp_path / "docs" / f"{name}.md").write_text(text, "utf-8")
    (tmp_path / "plan.yaml").write_text(
        "name: small\nspeakers: {user: [U], assistant: [A]}\n"
        "sources:\n- kind: soul\n  globs: [docs/*.md]\n  min_section_chars: 5\n"
        "  questions: {whole: ['Read {path}'], section: ['{section}?']}\n"
        "gates: {total_stop_below: 1000}\n",
        "utf-8",
    )
    write_tokenizer_folder(tmp_path / "model", tiny_tokenizer_json([text]), CHAT_TEMPLATE)
    done = run_zy(
        "corpus", "build", "--base-model-dir", str(tmp_path / "model"), "--plan", str(tmp_path / "plan.yaml"),
        "--repo-root", str(tmp_path), "--out",
        str(tmp_path / "out"), "--lang", "en", "--set", "soul_replica=1",
    )  # fmt: skip
    assert done.returncode == 7, done.stdout + done.stderr
    assert "| soul | 2 |" in done.stdout
    assert "❌ stop" in done.stdout
    assert "corpus is not fit" in done.stderr
