"""The agent for real: questions that change nothing, releases, setups, trainings, ends; real tmux, private socket."""

import gzip
import hashlib
import io
import json
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from controller.boxside import ending, operations, sessions
from controller.boxside.__main__ import serve
from controller.boxside.arguments import Arguments
from controller.boxside.release_digest import release_digest
from corpus_builder.errors import ProjectError
from tests.agent_box import agent_box
from tests.test_oldest_python import find_python_3_8
from trainer.locks import start_ticks
from trainer.run_paths import run_paths

pytestmark = pytest.mark.e2e  # real processes: minutes, not seconds

HOSTILE = (
    '"; touch x #',
    "$(touch x)",
    "`touch x`",
    "a\ntouch x",
    "-rf",
    "--help",
    "'; touch x; '",
    "#(touch x)",
    "../x",
    "\0",
)


@pytest.fixture
def digest(box):
    return box.push()


# --- questions


def test_questions_change_nothing(box):
    before = box.tree()
    facts = box.ask("facts", base_model_dir=str(box.folder / "none"), digest="0" * 16)
    assert facts["base_model"] == {
        "exists": False, "config": False, "tokenizer": False, "missing": [], "adapter": False,
    }  # fmt: skip
    assert (facts["gpus_silent"], facts["health"]["driver"]) == (False, None)
    assert abs(facts["health"]["time"] - time.time()) < 30
    assert (facts["release_present"], facts["locks"], facts["gpus"]) == (False, {"setup": None, "run": None}, None)
    status = box.ask("status")
    assert (status["run"], status["setup"], status["checkpoints"]) == (None, None, [])
    assert box.ask("manifest") == {"manifest": None}
    assert box.ask("kill", mode="now", owner="alice") == {"ended": [], "alive": 0, "audited": False}
    assert box.ask("gone", ids=["20260503-000000-3fa1"]) == {
        "alive": 0, "gpus": [], "has_gpus": False,
    }  # fmt: skip
    for op in ("follow", "tail_log"):
        with pytest.raises(ProjectError, match="run_not_found"):
            box.ask(op, kind="train")
    assert box.tree() == before


OPS = (
    "facts",
    "receive_release",
    "start_setup",
    "start_train",
    "follow",
    "manifest",
    "status",
    "tail_log",
    "kill",
    "gone",
    "no",
)


@pytest.mark.parametrize("op", OPS)
def test_hostile_values_run_nothing(box, op, monkeypatch):
    """Every argument of every operation in turn; the answers are made in this process, 500 of them."""
    monkeypatch.chdir(box.folder)
    known = {**box.setup_request("0" * 16), **box.train_request("0" * 16), **box.places}
    known.update(kind="setup", id="x", offset=0, see="named", which="auto", mode="now", files=[], dialog_path="/x")
    before = box.tree()
    for name in known:
        for value in (*HOSTILE, None, 7, [], {}, {"a": {}}, True):
            out = io.BytesIO()
            serve({"nonce": "n0", "op": op, "args": {**known, name: value}}, io.BytesIO(), out)
            begin, answer, end = out.getvalue().decode("ascii").splitlines()
            assert (begin, end) == ("ZY_ANSWER_BEGIN n0", "ZY_ANSWER_END n0")
            error = json.loads(answer).get("error")
            assert error is None or error["code"] != "answer_unreadable", (name, value, error)
    assert box.tree() == before


@pytest.mark.parametrize(
    "request_", [None, [], "x", {}, {"nonce": "n\nZY_ANSWER_BEGIN n", "op": "status"}, {"nonce": 3}]
)
def test_a_request_that_cannot_be_read_gets_an_error(request_):
    out = io.BytesIO()
    serve(request_, io.BytesIO(), out)
    assert json.loads(out.getvalue().splitlines()[1])["error"]["code"] == "input_invalid"


def test_a_bug_shows_its_place_and_none_of_its_values(box, capsys):
    out = io.BytesIO()
    serve({"nonce": "n", "op": "receive_release", "args": {**box.places, "digest": "0" * 16, "files": 1}}, None, out)
    serve({"nonce": "n", "op": "manifest", "args": {"data": "/canary" * 2000}}, None, out)
    assert "canary" not in capsys.readouterr().err


# --- releases


def test_a_release_arrives_once(box):
    digest = box.push()
    facts = box.ask("facts", digest=digest)
    assert facts["release_present"]
    folder = Path(box.root.release(digest))
    assert (folder / "code/trainer/supervise.py").read_bytes() == Path("trainer/supervise.py").read_bytes()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert os.readlink(box.root.current_release) == digest
    before = box.tree()
    assert box.push() == digest
    assert box.tree() == before


def row(path, content=b"x", **more):
    return {"path": path, "sha256": hashlib.sha256(content).hexdigest(), "mode": 0o644, "size": len(content), **more}


NOISE = random.Random(1).randbytes(9000)  # which no packing makes shorter


@pytest.mark.parametrize(
    ("rows", "stream"),
    [
        ([row("code/a.py")], gzip.compress(b"y")),
        ([row("code/a.py")], gzip.compress(b"xx")),
        ([row("code/a.py"), row("code/b.py")], gzip.compress(b"x")),
        ([row("code/a.py", NOISE)], gzip.compress(NOISE)[:5000]),
        ([row("code/a.py", NOISE)], gzip.compress(NOISE)[:-8]),
        ([row("code/a.py")], b"x"),
        ([row("code/a.py")], b""),
        ([row("code/a.py", size=-1)], gzip.compress(b"x")),
        ([row("code/../../a.py")], gzip.compress(b"x")),
        ([row("code/a.py"), row("code/a.py/b.py")], gzip.compress(b"xx")),
        ([row("/code/a.py")], b""),
        ([row("release.json")], b""),
        ([row("code/a.py"), row("code/a.py")], b""),
        ([], b""),
        ([{"path": 1}], b""),
    ],
)
def test_a_release_that_is_not_what_it_says_leaves_nothing(box, rows, stream):
    try:
        digest = release_digest(rows)
    except KeyError:
        digest = "0" * 16
    with pytest.raises(ProjectError, match="release_corrupt"):
        box.ask("receive_release", digest=digest, files=rows, stream=[stream])
    assert not any(path.is_file() for path in (box.folder / "root").rglob("*"))


def test_the_last_three_releases_and_the_used_ones_stay(box, digest):
    box.write_manifest()
    started = box.ask("start_train", **box.train_request(digest, "long"))
    for number in range(4):
        rows = [row("code/a.py", b"%d" % number)]
        answer = box.ask(
            "receive_release",
            digest=release_digest(rows),
            files=rows,
            stream=[gzip.compress(b"%d" % number)],
        )
    assert digest in answer["kept"]
    assert len(answer["kept"]) == 4
    assert box.ask("kill", mode="now", owner="bob")["ended"] == [
        {"kind": "train", "id": started["run_id"], "state": "killed"}
    ]


# --- setups


def test_a_setup_for_real(box, digest, chatml_model_dir):
    """check, fetch from a path, the real environment of this repository, kernels left out, the real corpus build."""
    box.write_base_model(chatml_model_dir)
    with zipfile.ZipFile(box.folder / "home/d.zip", "w") as archive:
        archive.writestr("canary.md", "冰朔：你好\n\n铸渊：晚安，灯亮着。\n")
    secret = "https://user:s3cr3t-value@pypi.example/simple"
    request = box.setup_request(
        digest,
        python=sys.executable,
        dialog={"kind": "path", "path": "~/d.zip"},
        secrets={"PIP_INDEX_URL": secret},
    )
    started = box.ask("start_setup", **request)
    assert started == {"setup_id": request["setup_id"], "attached": False}
    answer, lines = box.follow("setup", started["setup_id"])
    assert answer["state"] == "succeeded", "\n".join(lines)
    names = [line.rpartition("=")[2] for line in lines if line.startswith("ZY_EVENT name=step_started")]
    assert names == ["check", "fetch", "environment", "smoke", "corpus"]
    assert any("trained: 2 steps in " in line for line in lines)  # no number in the recipe: one rank, no DeepSpeed
    assert "[setup] environment PIP_INDEX_URL=<redacted>" in lines
    manifest = box.ask("manifest")["manifest"]
    assert manifest["classes"]["relation"]["samples"] >= 1
    assert manifest["missing"] == ["docs/missing.md"]
    assert Path(box.data.build_log).read_text("utf-8")
    status = box.ask("status")
    assert (status["setup"]["state"], status["locks"]["setup"], status["secrets"]) == ("succeeded", None, [])
    everything = b"".join(content or b"" for content in box.tree().values())
    assert b"s3cr3t-value" not in everything
    audit = json.loads(Path(box.data.audit).read_text().splitlines()[0])
    assert (audit["who"], audit["change"], audit["commit"]) == ("alice", "start_setup", "c0ffee")
    public = box.ask("tail_log", see="public")
    assert public["lines"]
    assert "canary" not in "".join(public["lines"])


def test_a_setup_that_fails_says_why(box, digest):
    request = box.setup_request(digest, python=sys.executable)
    answer, _ = box.follow("setup", box.ask("start_setup", **request)["setup_id"])
    assert (answer["state"], answer["error"]["code"]) == ("failed", "base_model_missing")
    assert answer["outcome"]["exit_code"] == 2


def slow_dialog(box, chatml_model_dir):
    """Return a storage that takes connections and says nothing, and a request that waits for it."""
    box.write_base_model(chatml_model_dir)
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    url = f"http://127.0.0.1:{port}/dialog.zip?sig="
    return server, {
        "python": sys.executable, "dialog": {"kind": "url"}, "fetch_allow": [f"127.0.0.1:{port}"],
        "secrets": {"ZY_DIALOG_URL": url + "one-s3cr3t"},
    }, url  # fmt: skip


def test_the_same_setup_is_joined_another_one_refused_and_kill_ends_it(box, digest, chatml_model_dir):
    server, changes, url = slow_dialog(box, chatml_model_dir)
    with server:
        first = box.ask("start_setup", **box.setup_request(digest, **changes))["setup_id"]
        box.follow("setup", first, until="step=fetch")
        again = box.setup_request(digest, **{**changes, "secrets": {"ZY_DIALOG_URL": url + "two"}, "owner": "bob"})
        assert box.ask("start_setup", **again) == {"setup_id": first, "attached": True}
        with pytest.raises(ProjectError) as refusal:
            box.ask("start_setup", **box.setup_request(digest, **changes, lang="zh"))
        assert (refusal.value.code, refusal.value.values["name"], refusal.value.values["owner"]) == (
            "lock_held",
            first,
            "alice",
        )
        assert [path.name for path in Path(box.data.setups).iterdir()] == [first]
        assert box.ask("status")["secrets"] == ["ZY_DIALOG_URL"]
        steps = json.loads((Path(box.data.setups) / first / "spec.json").read_text())["steps"]
        assert {step["name"]: step["secrets"] for step in steps} == {
            "check": [], "fetch": ["ZY_DIALOG_URL"], "environment": [], "smoke": [], "corpus": [],
        }  # fmt: skip
        box.write_manifest()
        with pytest.raises(ProjectError) as refusal:  # it may still change the corpus
            box.ask("start_train", **box.train_request(digest))
        assert (refusal.value.code, refusal.value.values["name"]) == ("lock_held", first)
        elsewhere = {"data": str(box.folder / "other")}
        with pytest.raises(ProjectError, match="corpus_missing"):  # the setup is of another data folder
            box.ask("start_train", **{**box.train_request(digest), **elsewhere})
        panes = subprocess.run(["tmux", "list-sessions", "-F", "#{session_name}"], capture_output=True, text=True)
        assert panes.stdout.split() == ["zy-setup"]
        command_lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
        assert "one-s3cr3t" not in command_lines
        killed = box.ask("kill", mode="checkpoint", owner="carol")
        assert [(item["kind"], item["id"]) for item in killed["ended"]] == [("setup", first)]
        answer, _ = box.follow("setup", first)
        assert answer["state"] == "killed"
    assert b"one-s3cr3t" not in b"".join(content or b"" for content in box.tree().values())


def test_a_folder_that_others_can_write_is_refused(box, digest):
    Path(box.data.data).mkdir()
    Path(box.data.data).chmod(0o775)
    with pytest.raises(ProjectError) as refusal:
        box.ask("start_setup", **box.setup_request(digest, python=sys.executable))
    assert (refusal.value.code, refusal.value.values["reason"]) == (
        "box_not_writable",
        "others can write to it (mode 775)",
    )
    assert not list(Path(box.data.data).iterdir())


def test_a_missing_lock_file_or_release_is_named(box, digest):
    with pytest.raises(ProjectError, match=r"configs/environments/none\.txt"):
        box.ask("start_setup", **box.setup_request(digest, environment_lock="none"))
    with pytest.raises(ProjectError, match="release_corrupt"):
        box.ask("start_setup", **box.setup_request("f" * 16))


# --- trainings


def test_a_training_for_real(box, digest):
    box.write_manifest({"name": "total", "verdict": "warn", "found": 5, "wanted": 9})
    Path(box.data.manifest).write_text(json.dumps({"gates": [], "samples_sha256": "a" * 64}))
    run_id = box.ask("start_train", **box.train_request(digest, samples_sha256="a" * 64))["run_id"]
    answer, lines = box.follow("train", run_id)
    assert (answer["state"], answer["progress"]["step"], answer["progress_count"]) == ("succeeded", 4, 4)
    argv = json.loads(next(line for line in lines if line.startswith("argv")).partition(" ")[2])
    assert argv == ["-m", "trainer.launch", f"{box.data.runs}/{run_id}/recipe.json"]
    assert f"env None None {box.folder}/mother/bin" in lines  # the launcher gives ranks theirs
    status = box.ask("status")
    assert (status["run"]["id"], status["run"]["losses"], status["run"]["version"]) == (run_id, {"soul": 2.25}, "v1")
    assert [(row["step"], row["complete"]) for row in status["checkpoints"]] == [(4, True), (None, True)]
    assert box.ask("tail_log", see="named")["id"] == run_id
    recipe = json.loads((Path(box.data.runs) / run_id / "recipe.json").read_text())
    assert (recipe["run_id"], recipe["resume_from"]) == (run_id, None)


@pytest.mark.parametrize(
    ("gates", "changes", "code"),
    [
        (None, {}, "corpus_missing"),
        ([{"name": "total", "verdict": "stop", "found": 5, "wanted": 100}], {}, "gate_failed"),
        ([], {"recipe": {"device": "cuda"}}, "gpus_missing"),
        ([], {"python": "/no/such/venv"}, "environment_unusable"),
        ([], {"python": None}, "environment_unusable"),
        ([], {"recipe": {"gpus": 0}}, "input_invalid"),
        ([], {"recipe": {"gpus": [0, 0]}}, "input_invalid"),
        ([], {"recipe": {"gpus": [0, "1"]}}, "input_invalid"),
        ([], {"recipe": {"gpus": True}}, "input_invalid"),
        ([], {"run_id": "x"}, "input_invalid"),
        ([], {"samples_sha256": "0" * 64}, "samples_changed"),
        ([], {"samples_sha256": "x"}, "input_invalid"),
        ([], {"digest": "f" * 16}, "release_corrupt"),
    ],
)
def test_what_keeps_a_training_from_starting(box, digest, gates, changes, code):
    if gates is not None:
        box.write_manifest(*gates)
    recipe = {**box.train_request(digest)["recipe"], **changes.get("recipe", {})}
    before = box.tree()
    with pytest.raises(ProjectError) as refusal:
        box.ask("start_train", **{**box.train_request(digest), **changes, "recipe": recipe})
    assert refusal.value.code == code
    assert {name for name in box.tree() if name.startswith("data")} == {
        name for name in before if name.startswith("data")
    }


NVIDIA_SMI = """#!/bin/sh
echo "0, Tesla V100-SXM2-32GB, 32768, 3, 0, 7.0"
echo "1, Tesla V100-SXM2-32GB, 32768, [N/A], [N/A], 7.0"
"""


def test_gpus_are_counted_and_unknown_is_not_zero(box, digest, monkeypatch):
    tools = box.folder / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(NVIDIA_SMI)
    (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    gpus = box.ask("status")["gpus"]
    assert [(gpu["index"], gpu["used_mib"], gpu["compute_capability"]) for gpu in gpus] == [
        (0, 3, "7.0"),
        (1, None, "7.0"),
    ]
    box.write_manifest()
    with pytest.raises(ProjectError) as refusal:
        box.ask("start_train", **box.train_request(digest, recipe={"device": "auto", "gpus": 4}))
    assert refusal.value.values == {"wanted": 4, "found": 2}
    with pytest.raises(ProjectError, match="gpus_missing"):
        box.ask("start_train", **box.train_request(digest, recipe={"device": "auto", "gpus": [1, 2]}))
    run_id = box.ask("start_train", **box.train_request(digest, recipe={"device": "auto"}))["run_id"]
    assert any(line.startswith("env None None") for line in box.follow("train", run_id)[1])


def test_a_trackers_token_is_the_train_steps_alone_and_gone_at_the_end(box, digest):
    box.write_manifest()
    token = "wandb-t0ken-canary"
    run_id = box.ask("start_train", **box.train_request(digest, "long", secrets={"WANDB_API_KEY": token}))["run_id"]
    box.follow("train", run_id, until="ZY_PROGRESS")
    folder = Path(box.data.runs) / run_id
    assert box.ask("status")["secrets"] == ["WANDB_API_KEY"]
    assert (folder / "secrets.env").stat().st_mode & 0o777 == 0o600
    assert json.loads((folder / "spec.json").read_text())["steps"][0]["secrets"] == ["WANDB_API_KEY"]
    child = box.attempts("train", run_id)[-1]["child"]["pid"]
    assert token.encode() in Path(f"/proc/{child}/environ").read_bytes()
    assert token not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    box.ask("kill", mode="checkpoint", owner="bob")
    box.follow("train", run_id)
    assert box.ask("status")["secrets"] == []
    assert token.encode() not in b"".join(content or b"" for content in box.tree().values())


def test_a_second_training_is_refused_and_names_the_first(box, digest):
    box.write_manifest()
    first = box.ask("start_train", **box.train_request(digest, "long"))["run_id"]
    with pytest.raises(ProjectError) as refusal:
        box.ask("start_train", **box.train_request(digest, "long"))
    assert (refusal.value.code, refusal.value.values["name"]) == ("lock_held", first)
    assert [path.name for path in Path(box.data.runs).iterdir()] == [first]
    box.follow("train", first, until="ZY_PROGRESS")
    assert box.ask("kill", mode="checkpoint", owner="bob")["ended"][0]["id"] == first
    answer, _ = box.follow("train", first)
    assert answer["state"] == "interrupted"
    box.ask("start_train", **box.train_request(digest))


def test_kill_now_ends_even_what_does_not_want_to(box, digest):
    box.write_manifest()
    run_id = box.ask("start_train", **box.train_request(digest, "stubborn"))["run_id"]
    box.follow("train", run_id, until="ZY_PROGRESS")
    child = box.attempts("train", run_id)[-1]["child"]["pid"]
    assert box.ask("kill", mode="now", owner="bob") == {
        "ended": [{"kind": "train", "id": run_id, "state": "killed"}], "alive": 0, "audited": True,
    }  # fmt: skip
    assert start_ticks(child) is None
    assert box.ask("status")["locks"]["run"] is None


def test_without_its_supervisor_a_run_is_lost_and_its_children_are_ended(box, digest):
    box.write_manifest()
    run_id = box.ask("start_train", **box.train_request(digest, "stubborn"))["run_id"]
    box.follow("train", run_id, until="ZY_PROGRESS")
    os.kill(box.supervisor_pid("train", run_id), signal.SIGKILL)
    answer, _ = box.follow("train", run_id)
    assert (answer["state"], answer["outcome"]) == ("lost", None)
    assert box.ask("status")["run"]["remedy"] is None
    with open(box.data.logs + f"/train-{run_id}.log", "a") as log:  # what killed the supervisor killed the trainer too
        log.write("[1209600.1] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null)\n")
    assert box.ask("status")["run"]["remedy"] == "host_oom"
    assert "known failure host_oom: " in "".join(box.ask("tail_log", see="public")["lines"])
    second = box.ask("start_train", **box.train_request(digest))["run_id"]
    assert start_ticks(box.attempts("train", run_id)[-1]["child"]["pid"]) is None
    assert box.follow("train", second)[0]["state"] == "succeeded"


def test_a_supervisor_that_does_not_answer_is_ended_and_its_last_step_kept(box, digest, monkeypatch):
    box.write_manifest()
    run_id = box.ask("start_train", **box.train_request(digest, "stubborn", secrets={"TOKEN": "abcdefgh"}))["run_id"]
    box.follow("train", run_id, until="ZY_PROGRESS step=2")
    box.end_tmux()  # it would wake what is stopped
    supervisor = box.supervisor_pid("train", run_id)
    os.kill(supervisor, signal.SIGSTOP)
    monkeypatch.setattr(ending, "END_PATIENCE_S", 0.5)
    killed = ending.kill(Arguments({**box.places, "mode": "now", "owner": "bob"}))
    assert killed == {"ended": [{"kind": "train", "id": run_id, "state": "killed"}], "alive": 0, "audited": True}
    outcome = json.loads((Path(box.data.runs) / run_id / "outcome.json").read_text())
    assert (outcome["state"], outcome["signal"]) == ("killed", 9)
    assert outcome["last_step"] >= 2
    assert start_ticks(supervisor) is None
    assert not list(Path(box.data.runs).glob("*/secrets.env"))


#: Stands for a supervisor that is slow to begin; `takes_lock`: it holds the lock meanwhile.
SLOW_SUPERVISOR = """import json, os, sys, time
spec = json.load(open(sys.argv[1]))
ticks = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19])
me = {"pid": os.getpid(), "start_ticks": ticks, "boot_id": open("/proc/sys/kernel/random/boot_id").read().strip()}
if spec["takes_lock"]:
    lock = {"owner": "alice", "action": "x", "name": spec["name"], "process": me}
    open(spec["lock"] + ".new", "w").write(json.dumps(lock))
    os.rename(spec["lock"] + ".new", spec["lock"])
open(spec["lock"] + ".pid", "w").write(str(os.getpid()))
time.sleep(spec["after_s"])
attempts = {"attempts": [{"process": me, "child": None}]}
open(spec["folder"] + "/supervisor.json", "w").write(json.dumps(attempts))
time.sleep(600)
"""


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")  # setsid's outlives us on purpose
@pytest.mark.parametrize("has_tmux", [True, False])
@pytest.mark.parametrize(("takes_lock", "after_s"), [(True, 3), (True, 600), (False, 600)])
def test_a_slow_supervisor_is_waited_for_or_ended_before_its_folder_goes(
    box, monkeypatch, has_tmux, takes_lock, after_s
):
    code, lock = box.folder / "code", Path(box.root.run_lock)
    (code / "trainer").mkdir(parents=True)
    (code / "trainer/__init__.py").touch()
    (code / "trainer/supervise.py").write_text(SLOW_SUPERVISOR)
    lock.parent.mkdir(parents=True, mode=0o700)
    paths = run_paths(box.data.data, "v1", box.next_id())
    plan = SimpleNamespace(
        paths=paths, data=box.data.data, root=box.root.root, kind="train", id=paths.run_id, code=str(code)
    )
    spec = {"name": plan.id, "lock": str(lock), "folder": paths.folder, "takes_lock": takes_lock, "after_s": after_s}
    monkeypatch.setattr(operations, "START_PATIENCE_S", 1.0)
    monkeypatch.setattr(operations, "LOCKED_PATIENCE_S", 6.0 if after_s == 3 else 0.5)
    if not has_tmux:
        monkeypatch.setattr(sessions, "_tmux", lambda *words, cwd=None: None)
    if after_s == 3:
        operations._launch(plan, spec, {})
        assert Path(paths.supervisor).exists()
        return
    with pytest.raises(ProjectError, match="session_vanished"):
        operations._launch(plan, spec, {})
    assert start_ticks(int(Path(f"{lock}.pid").read_text())) is None
    assert not Path(paths.folder).exists()


def test_the_work_outlives_tmux(box, digest):
    box.write_manifest()
    run_id = box.ask("start_train", **box.train_request(digest, "long"))["run_id"]
    box.follow("train", run_id, until="ZY_PROGRESS")
    box.end_tmux()
    assert box.ask("status")["run"]["state"] == "running"
    box.ask("kill", mode="checkpoint", owner="bob")
    assert box.follow("train", run_id)[0]["state"] == "interrupted"


def test_a_stale_session_of_that_name_is_no_obstacle(box, digest):
    subprocess.run(["tmux", "-f", "/dev/null", "new-session", "-d", "-s", "zy-coding-train", "sleep 600"], check=True)
    subprocess.run(["tmux", "new-session", "-d", "-s", "zy-coding-train-2", "sleep 600"], check=True)
    box.write_manifest()
    run_id = box.ask("start_train", **box.train_request(digest, "long"))["run_id"]
    names = subprocess.run(["tmux", "list-sessions", "-F", "#{session_name}"], capture_output=True, text=True).stdout
    assert names.split() == ["zy-coding-train", "zy-coding-train-2"]
    assert box.follow("train", run_id, until="ZY_PROGRESS")[0]["state"] == "running"


def test_without_tmux_a_run_starts_all_the_same(box, digest, monkeypatch):
    tools = box.folder / "tools"
    tools.mkdir()
    for name in ("env", "python3", "sh"):
        (tools / name).symlink_to(subprocess.run(["which", name], capture_output=True, text=True).stdout.strip())
    monkeypatch.setenv("PATH", str(tools))
    assert box.ask("facts")["tmux"] is None
    box.write_manifest()
    run_id = box.ask("start_train", **box.train_request(digest))["run_id"]
    assert box.follow("train", run_id)[0]["state"] == "succeeded"


def test_tmux_keeps_nobodys_secret(box, digest, monkeypatch):
    monkeypatch.setenv("ZY_GPU_KEY", "canary-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-key")
    box.write_manifest()
    box.ask("start_train", **box.train_request(digest, "long", secrets={"TOKEN": "canary-key"}))
    shown = subprocess.run(["tmux", "show-environment", "-g"], capture_output=True, text=True, check=True).stdout
    assert "PATH=" in shown
    assert "canary" not in shown
    secrets = next(Path(box.data.runs).glob("*/secrets.env"))
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o600


def test_two_starts_at_the_same_instant_make_one_run(box, digest):
    box.write_manifest()
    requests = [box.train_request(digest, "long") for _ in range(3)]

    def start(request):
        try:
            return box.ask("start_train", **request)["run_id"]
        except ProjectError as error:
            return error.code

    with ThreadPoolExecutor(3) as pool:
        found = sorted(pool.map(start, requests))
    assert found[1:] == ["lock_held", "lock_held"]
    assert [path.name for path in Path(box.data.runs).iterdir()] == [found[0]]


@pytest.mark.skipif(find_python_3_8() is None, reason="no Python 3.8 on this machine: not run with it")
def test_the_agent_runs_on_python_3_8(tmp_path, monkeypatch):
    with agent_box(tmp_path, find_python_3_8(), monkeypatch) as box:
        digest = box.push()
        assert box.ask("facts", digest=digest)["python"].startswith("3.8")
        box.write_manifest()
        run_id = box.ask("start_train", **box.train_request(digest))["run_id"]
        assert box.follow("train", run_id)[0]["state"] == "succeeded"
