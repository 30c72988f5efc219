"""The five actions as a person types them: a real sshd, a real tmux, a real corpus, ZeRO-3 on two CPU ranks."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.machine import counts_by_class, running_machine
from tests.servers import find_sshd

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_sshd() is None, reason="needs openssh-server"),
]
LONG = ("--set", "num_train_epochs=4000", "--set", "save_steps=100000")


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    with running_machine(tmp_path_factory.mktemp("machine")) as running:
        yield running


def report_of(done):
    assert done.stdout.strip(), done.stderr
    return json.loads(done.stdout)


def test_empty_machine_has_a_status_and_no_log(machine):
    assert machine.status()["run"] is None
    done = machine.zy("tail-log")
    assert (done.returncode, "no run yet" in done.stderr) == (6, True)
    assert not Path(machine.data.data).exists()  # asking leaves nothing behind


def test_dry_run_says_the_steps_and_leaves_nothing(machine):
    done = machine.zy("setup-and-train", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "start a run: recipe tiny, version tiny_v1, 2 rank(s)" in done.stdout
    assert not Path(machine.data.data).exists()


def test_setup_only_counts_every_class(machine):
    done = machine.zy("setup-only", "--json")
    assert done.returncode == 0, done.stderr
    report = report_of(done)
    assert counts_by_class(report) == {"soul": 20, "relation": 6}
    assert all(account["lost_tokens"] == 0 for account in report["manifest"]["classes"].values())
    assert {gate["verdict"] for gate in report["manifest"]["gates"]} == {"pass"}
    assert "[corpus] soul: 20 sample(s)" in done.stderr


def test_setup_again_sends_no_code(machine):
    done = machine.zy("setup-only", "--dry-run")
    assert "send nothing: release" in done.stdout


def test_failed_installation_says_its_remedy_and_leaves_the_environment_in_use(machine, tmp_path):
    noted = Path(machine.root.venvs) / "current.json"
    before = noted.read_bytes()
    nowhere = {"ZY_MOTHER_VENV": "", "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    done = machine.zy("setup-only", "--json", GITHUB_STEP_SUMMARY=str(tmp_path / "summary.md"), **nowhere)
    assert done.returncode == 4, done.stderr
    report = report_of(done)
    assert (report["error"]["code"], report["remedy"]) == ("environment_failed", "packages_unreachable")
    assert "PIP_INDEX_URL" in (tmp_path / "summary.md").read_text("utf-8")
    assert noted.read_bytes() == before
    assert json.loads(before)["python"] == f"{sys.prefix}/bin/python"


def test_summary_is_written_where_it_is_asked_for(machine, tmp_path):
    done = machine.zy("status", GITHUB_STEP_SUMMARY=str(tmp_path / "summary.md"), ZY_LANG="zh")
    assert done.returncode == 0
    assert "### 准备" in (tmp_path / "summary.md").read_text("utf-8")


def test_gate_that_stops_is_exit_7_with_the_counts_and_starts_no_training(machine):
    done = machine.zy("setup-and-train", "--confirm", "--set", "plan.gates.total_stop_below=1000")
    assert done.returncode == 7
    assert "| relation | 6 | 6 |" in done.stdout
    assert "❌ stop" in done.stdout
    assert "total (26 < 1000)" in done.stderr
    assert machine.status()["run"] is None


def test_setup_at_work_is_named_to_another_and_ended_by_kill(machine):
    with machine.started("setup-only") as first:
        setup = machine.wait_for_setup()
        other = machine.zy("setup-only", "--set", "max_seq_len=128")
        assert (other.returncode, setup in other.stderr) == (8, True)
        killed = machine.zy("kill", "--json")
        assert killed.returncode == 0, killed.stderr
        assert [(item["id"], item["state"]) for item in report_of(killed)["ended"]] == [(setup, "killed")]
        output, _ = first.communicate(timeout=60)
    assert first.returncode == 6, output
    assert machine.status()["locks"] == {"setup": None, "run": None}
    assert machine.processes() == []


def test_same_setup_asked_for_twice_is_one_setup(machine):
    with machine.started("setup-only") as first:
        setup = machine.wait_for_setup()
        second = machine.zy("setup-only", "--json")
        output, _ = first.communicate(timeout=120)
    assert (first.returncode, second.returncode) == (0, 0), output + second.stderr
    assert report_of(second)["setup_id"] == setup
    assert report_of(second)["is_attached"]


def test_not_confirmed_is_exit_8(machine):
    assert machine.zy("setup-and-train").returncode == 8


@pytest.mark.parametrize(
    ("options", "exit_code", "said"),
    [
        (("--base-model-dir", "/nowhere/model"), 2, "base model folder does not exist"),
        (("--base-model-dir", "/"), 2, ""),
        (("--dialog-zip", "/nowhere/dialogs.zip"), 2, "no dialog ZIP"),
        (("--recipe", "nonesuch"), 2, "cannot be read"),
        (("--set", "learning_rat=1"), 2, "learning_rate"),
        (("--set", "plan.soul_replicas=1"), 2, "soul_replica"),
        (("--set", "gpus=true"), 2, "gpus"),
    ],
)
def test_wrong_wish_is_one_clear_error(machine, options, exit_code, said):
    done = machine.zy("setup-only", *options)
    assert done.returncode == exit_code
    assert said in done.stderr
    assert done.stderr.splitlines()[0].startswith("error: ")
    assert "Traceback" not in done.stderr


def test_base_model_without_config_and_with_missing_weights_are_told_apart(machine, tmp_path):
    done = machine.zy("setup-only", "--base-model-dir", str(tmp_path))
    assert (done.returncode, "no config.json" in done.stderr) == (2, True)
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    done = machine.zy("setup-only", "--base-model-dir", str(tmp_path))
    assert (done.returncode, "model-00002-of-00002.safetensors" in done.stderr) == (2, True)


@pytest.mark.parametrize("content", [b"<html>Access denied</html>", b"PK\x03\x04 torn", b""])
def test_unreadable_zip_leaves_the_dialogs_that_were_there(machine, tmp_path, content):
    bad = tmp_path / "bad.zip"
    bad.write_bytes(content)
    before = os.readlink(machine.data.dialog_pointer)
    done = machine.zy("setup-only", "--dialog-zip", str(bad))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "ZIP" in done.stderr
    assert os.readlink(machine.data.dialog_pointer) == before


def test_wrong_host_key_is_refused_with_both_fingerprints(machine, tmp_path):
    from controller.demo_sshd import make_key

    make_key(tmp_path / "other", "ed25519")
    public = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    pinned = f"[{machine.sshd.host}]:{machine.sshd.port} {public}\n"
    done = machine.zy("status", ZY_GPU_KNOWN_HOSTS=pinned)
    assert done.returncode == 3
    assert done.stderr.count("SHA256:") >= 2


@pytest.mark.parametrize(
    ("change", "exit_code"),
    [
        ({"ZY_GPU_PORT": "1"}, 3),
        ({"ZY_GPU_KNOWN_HOSTS": ""}, 3),
        ({"ZY_GPU_KEY": "not a key"}, 2),
        ({"ZY_GPU_HOST": "a b"}, 2),
        ({"ZY_GPU_USER": ""}, 2),
    ],
)
def test_unreachable_or_misconfigured_machine_has_its_exit_code(machine, change, exit_code):
    done = machine.zy("status", **change)
    assert done.returncode == exit_code, done.stderr
    assert len(done.stderr.strip().splitlines()) >= 3
    assert "Traceback" not in done.stderr


def test_training_runs_to_its_end(machine):
    done = machine.zy("setup-and-train", "--confirm", "--watch-minutes", "8")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "ZY_PROGRESS step=10 total=10" in done.stdout
    assert "ZY_EVENT name=started ranks=2" in done.stdout
    run = machine.status()["run"]
    assert (run["state"], run["last_step"], run["version"]) == ("succeeded", 10, "tiny_v1")
    final = Path(machine.data.version_final("tiny_v1"))
    assert (final / "model.safetensors").stat().st_size > 0
    assert run["id"] in os.readlink(final)
    assert machine.processes() == []


def test_log_of_the_run_ends_with_its_end(machine):
    done = machine.zy("tail-log", "--json")
    report = report_of(done)
    assert "ZY_EVENT name=finished" in report["text"]
    assert len(report["text"].encode()) <= 12_000


def test_resolved_recipe_lies_with_the_run_and_names_its_origins(machine):
    run = machine.status()["run"]["id"]
    recipe = json.loads((Path(machine.data.runs) / run / "recipe.json").read_text("utf-8"))
    assert recipe["recipe"]["gpus"] == 2
    assert recipe["version"] == "tiny_v1"


def test_second_training_is_refused_by_name_and_kill_saves_a_checkpoint(machine):
    before = machine.run_id()
    started = machine.zy("setup-and-train", "--confirm", "--watch-minutes", "0", *LONG, ZY_ON_END="true 'a b'")
    assert started.returncode == 0, started.stderr
    assert "goes on by itself" in started.stdout
    run = machine.wait_for_step(after=before)
    assert machine.status()["secrets"] == ["ZY_ON_END"]
    own_tmux = {"PATH": os.environ["PATH"], "TMUX_TMPDIR": str(machine.folder / "tmux")}
    subprocess.run(["tmux", "kill-server"], env=own_tmux, check=True)

    second = machine.zy("setup-and-train", "--confirm", *LONG)
    assert second.returncode == 8
    assert run["id"] in second.stderr

    late = machine.zy("kill", "--dry-run")
    assert run["id"] in late.stdout
    cursor = report_of(machine.zy("tail-log", "--json"))["cursor"]
    with machine.started("tail-log", "--follow", "--from-offset", cursor) as following:
        killed = machine.zy("kill", "--json")
        followed, _ = following.communicate(timeout=120)
    assert killed.returncode == 0, killed.stderr
    [ended] = report_of(killed)["ended"]
    assert (ended["id"], ended["state"]) == (run["id"], "interrupted")
    assert (report_of(killed)["alive"], report_of(killed)["gpus"], report_of(killed)["was_audited"]) == (0, [], True)
    assert following.returncode == 6, followed  # what became of the run
    assert "ZY_EVENT name=stop_requested" in followed
    first = int(re.search(r"ZY_PROGRESS step=(\d+) ", followed)[1])
    assert first > run["last_step"]  # from the cursor on, not from the beginning; the end of tmux ended nothing
    assert machine.status()["secrets"] == []
    assert machine.processes() == []
    kept = [item for item in machine.status()["checkpoints"] if item["run"] == run["id"]]
    assert [item["complete"] for item in kept] == [True]
    assert machine.zy("kill").returncode == 0  # nothing is at work any more


def test_trainer_that_dies_makes_the_action_fail(machine):
    before = machine.run_id()
    with machine.started("setup-and-train", "--confirm", "--watch-minutes", "8", *LONG) as watching:
        run = machine.wait_for_step(after=before)
        os.kill(next(pid for pid in machine.processes() if is_rank(pid)), signal.SIGKILL)
        output, _ = watching.communicate(timeout=120)
    assert watching.returncode == 6, output[-2000:]
    assert run["id"] in output
    assert machine.status()["run"]["state"] == "failed"
    assert machine.processes() == []


def is_rank(pid):
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b"trainer.train" in words and b"deepspeed.launcher.launch" not in words


def test_everything_that_changed_the_machine_is_in_the_audit(machine):
    changes = [row["change"].split()[0] for row in machine.audit()]
    assert {"start_setup", "start_train", "kill"} <= set(changes)
    assert all(row["who"] for row in machine.audit())
