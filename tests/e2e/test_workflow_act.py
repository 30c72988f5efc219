"""The workflow itself, each of its five actions, executed by act against a real machine over a real sshd."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from controller.github import INPUT_NAMES
from tests.e2e.act import Act, copy_repository
from tests.e2e.machine import CANARY, SMOKED, running_machine
from tests.servers import find_sshd, running_storage
from tests.smoke_receipt import place_receipt

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_sshd() is None, reason="needs openssh-server"),
]
FORM = {
    "base_model_dir": "",
    "dialog_zip": "",
    "confirm_override": "false",
    "recipe": "tiny.yaml",
    "watch_minutes": "340",
}
HOSTILE = ('"; touch x #', "$(touch x)", "`touch x`", "a\ntouch x", "-rf", "--help")


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    with running_machine(tmp_path_factory.mktemp("machine")) as running:
        add_recipes(running)
        place_receipt(running.root.root, **SMOKED["tiny.yaml"])
        yield running


def add_recipes(machine):
    """Beside the short recipe: one that runs for an hour, one that the trainer cannot start, a plan that stops."""
    recipe = yaml.safe_load((machine.repository / "tiny.yaml").read_text("utf-8"))
    plan = yaml.safe_load((machine.repository / "plan.yaml").read_text("utf-8"))
    broken = Path(shutil.copytree(machine.base_model, machine.folder / "broken"))  # whole as files go
    config = json.loads((broken / "config.json").read_text("utf-8"))
    (broken / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}), "utf-8")
    strict = {**plan, "gates": {**plan["gates"], "total_stop_below": 1000}}
    files = {
        "long.yaml": {**recipe, "num_train_epochs": 4000, "save_steps": 100000},
        "broken.yaml": {**recipe, "base_model_dir": str(broken)},
        "strict.yaml": {**recipe, "plan": "strict-plan.yaml"},
        "strict-plan.yaml": strict,
    }
    for name, values in files.items():
        (machine.repository / name).write_text(yaml.safe_dump(values, allow_unicode=True), "utf-8")


@pytest.fixture(scope="module")
def act(machine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("act")
    return Act(copy_repository(folder / "checkout", own=machine.repository), folder / "home")


@pytest.fixture(scope="module")
def dispatch(act, machine):
    def run(action, *, settings=None, is_private=False, **changes):
        inputs = {**FORM, "action": action, "dialog_zip": str(machine.dialog_zip), **changes}
        done = act.run(inputs, settings or machine.settings(), is_private=is_private)
        check_nothing_leaks(act, machine, done, is_private=is_private)
        return done

    return run


def check_nothing_leaks(act, machine, done, *, is_private=False):
    """No word of the person, no key and no signature is in act's whole output or in what the runner keeps.

    Only act's own JSON shows the argument of `::add-mask::`; GitHub masks that line too.
    """
    written = done.unmasked + act.left_behind()
    assert is_private or CANARY not in written
    assert "X-Amz-Signature=" not in written
    key_lines = machine.sshd.private_key.splitlines()[1:-1]
    assert not any(line in written for line in key_lines if len(line) > 20)


def test_setup_only_is_green_and_counts_every_class(dispatch, machine):
    with running_storage(machine.dialog_zip, key="dialogs.zip") as storage:
        done = dispatch("setup-only", settings={**machine.settings(), **storage.environment()}, dialog_zip=storage.uri)
    assert (done.returncode, done.exit_status) == (0, 0), done.output[-3000:]
    assert "| soul | 5 | 20 | 10 |" in done.summary
    assert "| relation | 6 | 6 | 6 |" in done.summary
    assert "## ✅ setup-only" in done.summary
    assert "[corpus] soul: 20 sample(s)" in done.log


def test_setup_is_audited_with_commit_and_run_page(machine, act):
    row = machine.audit()[-1]
    head = (act.repository / ".git/HEAD").read_text().split()[-1]
    assert row["commit"] == (act.repository / ".git" / head).read_text().strip()
    assert row["run_url"].startswith("https://github.com/")
    assert row["action"] == "setup-only"


def test_not_confirmed_is_red_and_touches_nothing(dispatch, machine):
    before = machine.audit()
    done = dispatch("setup-and-train")
    assert (done.returncode, done.exit_status) == (1, 8)
    assert "confirm_override" in done.summary
    assert machine.audit() == before


def test_corpus_gate_is_red_with_the_counts(dispatch):
    done = dispatch("setup-and-train", confirm_override="true", recipe="strict.yaml")
    assert (done.returncode, done.exit_status) == (1, 7)
    assert "| soul | 5 | 20 | 10 |" in done.summary
    assert "total (26 < 1000)" in done.summary
    assert done.annotations("error")


def test_training_is_green_when_it_ends_well(dispatch, machine):
    done = dispatch("setup-and-train", confirm_override="true", watch_minutes="8")
    assert (done.returncode, done.exit_status) == (0, 0), done.output[-3000:]
    assert "## ✅ setup-and-train · succeeded" in done.summary
    assert "| Step | 10 / 10 |" in done.summary
    assert "ZY_PROGRESS step=10 total=10" in done.log
    assert "| soul | 5 | 20 | 10 |" in done.summary
    assert (Path(machine.data.version_final("tiny_v1")) / "model.safetensors").exists()


@pytest.mark.soak
def test_training_that_fails_is_red(dispatch, machine):
    done = dispatch("setup-and-train", confirm_override="true", recipe="broken.yaml", watch_minutes="8")
    assert (done.returncode, done.exit_status) == (1, 6), done.output[-3000:]
    assert "## ❌ setup-and-train · failed" in done.summary
    assert done.annotations("error")
    assert machine.processes() == []


def test_deadline_is_green_with_a_warning_and_the_rest_of_the_actions_work_beside_the_run(dispatch, machine):
    before = machine.run_id()
    done = dispatch("setup-and-train", confirm_override="true", recipe="long.yaml", watch_minutes="1")
    assert (done.returncode, done.exit_status) == (0, 0), done.output[-3000:]
    assert "## ⏳ setup-and-train" in done.summary
    assert "deadline_passed" in done.annotations("warning")[0]
    run = machine.wait_for_step(after=before)

    second = dispatch("setup-and-train", confirm_override="true", recipe="long.yaml")
    assert (second.returncode, second.exit_status) == (1, 8)
    assert run["id"] in second.summary

    status = dispatch("status")
    assert (status.returncode, status.exit_status) == (0, 0)
    assert run["id"] in status.summary
    assert "running" in status.summary

    tail = dispatch("tail-log")
    assert (tail.returncode, tail.exit_status) == (0, 0)
    assert "ZY_PROGRESS step=" in tail.summary
    assert "deepspeed.launcher" not in tail.summary  # only our own lines in public

    killed = dispatch("kill")
    assert (killed.returncode, killed.exit_status) == (0, 0)
    assert run["id"] in killed.summary
    assert machine.processes() == []
    assert machine.status()["run"]["state"] in ("interrupted", "killed")


def test_private_repository_may_see_names(dispatch, machine):
    shutil.rmtree(Path(machine.data.samples).parent)  # else nothing is rebuilt, and nothing is said of files
    done = dispatch("setup-only", is_private=True)
    assert done.exit_status == 0
    assert f"{CANARY} 0.md" in done.log


def test_wrong_host_key_is_red_with_both_fingerprints(dispatch, machine, tmp_path):
    from controller.demo_sshd import make_key

    make_key(tmp_path / "other", "ed25519")
    public = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    pinned = f"[{machine.sshd.host}]:{machine.sshd.port} {public}\n"
    done = dispatch("status", settings={**machine.settings(), "ZY_GPU_KNOWN_HOSTS": pinned})
    assert (done.returncode, done.exit_status) == (1, 3)
    assert done.summary.count("SHA256:") >= 2


def test_unreachable_machine_is_red(dispatch, machine):
    done = dispatch("kill", settings={**machine.settings(), "ZY_GPU_PORT": "1"})
    assert (done.returncode, done.exit_status) == (1, 3)


@pytest.mark.parametrize("typed", HOSTILE)
@pytest.mark.parametrize("name", INPUT_NAMES)
def test_hostile_input_runs_nothing_and_ends_with_exit_2(dispatch, act, name, typed):
    done = dispatch(**{"action": "setup-only", name: typed})
    assert (done.returncode, done.exit_status) == (1, 2), done.output[-2000:]
    assert "❌" in done.summary
    assert not any("x" in names for folder in (act.repository, act.home) for _, _, names in os.walk(folder))


def test_signed_link_typed_into_the_form_is_refused_and_never_printed_by_us(dispatch):
    done = dispatch("setup-only", dialog_zip="https://example.org/a.zip?sign=0123456789abcdef")
    assert done.exit_status == 2
    assert "ZY_BINGSHUO_DIALOG_URL" in done.summary
    assert "0123456789abcdef" not in done.unmasked


def test_runner_without_zyforge_installs_it(act, machine):
    done = act.run({**FORM, "action": "status"}, machine.settings(), runner_python=None)
    assert (done.returncode, done.exit_status) == (0, 0), done.output[-3000:]
    assert "## ✅ status" in done.summary
