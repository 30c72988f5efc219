"""What is checked before a run, on tiny models, and the exact words by which it starts."""

from __future__ import annotations

import base64
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from corpus_builder.errors import ProjectError
from tests.tiny_run import ROOT, make_run, tiny_samples
from tests.trainer.test_preflight import wish
from trainer.base_rules import DigestCache, check_not_stock, hash_file
from trainer.encode import encode_corpus
from trainer.gpus import Gpus
from trainer.launch import command_of, prepare, tracker_environment
from trainer.machine import Machine
from trainer.packing import one_each, pack
from trainer.preflight import estimate
from trainer.ranks import Ranks, asking_environment, choose_ranks, rank_environment, train_argv
from trainer.recipe import Recipe
from trainer.request import load_request
from trainer.room import GPU_RESERVE_BYTES, check_disk, check_memory, gpu_free_bytes, load_presets, longest_batch

FOUR = [
    {"index": index, "name": "Tesla V100-SXM2-32GB", "memory_mib": 32_768, "used_mib": 3, "utilization": 0,
     "compute_capability": "7.0", "processes": int(index == 1)}
    for index in range(4)
]  # fmt: skip


class Said(list):
    """A voice that keeps what is said, and events as words."""

    def say(self, line: str) -> None:
        self.append(line)

    def event(self, name: str, **values: object) -> None:
        self.append(" ".join([name, *(f"{key}={value}" for key, value in values.items())]))


def recipe_of(**keys) -> Recipe:
    return Recipe.model_validate({"name": "t", "version": "t", "plan": "t", "base_model_dir": "/b"} | keys)


# --- the command


def test_the_command_for_gpus_names_them():
    command = train_argv("/r/recipe.json", "python", ranks=2, gpus=(0, 2), master_port=29501)
    assert command[:3] + command[4:] == [
        "python", "-m", "deepspeed.launcher.launch", "--no_local_rank", "--master_addr", "127.0.0.1",
        "--master_port", "29501", "--module", "trainer.train", "/r/recipe.json",
    ]  # fmt: skip
    name, _, encoded = command[3].partition("=")
    assert (name, json.loads(base64.urlsafe_b64decode(encoded))) == ("--world_info", {"localhost": [0, 2]})


@pytest.mark.parametrize(("gpus", "words"), [((0, 2), ["--include", "localhost:0,2"]), (None, ["--num_gpus", "2"])])
def test_the_deepspeed_command_would_go_on_with_the_same_words(gpus, words):
    """Its own first half is run on the numbers, as far as the process that it would start."""
    code = """
import subprocess, sys
from deepspeed.launcher import runner
popen = subprocess.Popen
def start(command, *args, **more):
    if "deepspeed.launcher.launch" not in command:
        return popen(command, *args, **more)  # it looks at the machine
    print(*command[1:])
    sys.exit()
runner.subprocess.Popen = start
runner.fetch_hostfile = lambda path: None
runner.get_accelerator().device_count = lambda: 4
runner.main(sys.argv[1:])
"""
    options = ["--no_local_rank", "--master_addr", "127.0.0.1", "--master_port", "29501", "--module"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words, *options, "trainer.train", "/r/recipe.json"],
        capture_output=True, text=True, check=True, env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    said = done.stdout.splitlines()[-1].split()
    ours = train_argv("/r/recipe.json", "python", ranks=2, gpus=gpus, master_port=29501)
    flags = {word for word in ours[3:] if word.startswith("--")} - {"--master_addr", "--master_port"}
    assert said[1:3] == ours[1:3]
    assert flags <= set(said)
    assert {"--master_addr=127.0.0.1", "--master_port=29501"} <= set(said)
    assert said[-2:] == ours[-2:]


def test_one_process_on_a_cpu_goes_without_deepspeed(tmp_path, tiny_dir):
    run = make_run(tmp_path, tiny_dir, tiny_samples(), gpus=1)
    prepared = prepare(load_request(Path(run.paths.recipe)), Said(), is_dry_run=True)
    assert command_of(prepared) == [sys.executable, "-m", "trainer.train", run.paths.recipe]
    assert rank_environment(prepared.ranks, {"A": "1"}) == {"A": "1", "CUDA_VISIBLE_DEVICES": ""}


def test_ranks_are_told_what_their_device_needs():
    on_gpus = Ranks(count=2, gpus=(1, 3), row=FOUR[1])
    assert rank_environment(on_gpus, {}) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert asking_environment(on_gpus, {})["CUDA_VISIBLE_DEVICES"] == "1"
    on_cpu = rank_environment(Ranks(count=2, gpus=None), {})
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert (on_cpu["DS_ACCELERATOR"], on_cpu["OMP_NUM_THREADS"]) == ("cpu", threads)


def test_trackers_keep_their_files_in_the_runs_folder():
    assert tracker_environment(("tensorboard",), "/d/runs/r") == {}
    assert tracker_environment(("wandb", "tensorboard"), "/d/runs/r") == {"WANDB_DIR": "/d/runs/r"}
    assert set(tracker_environment(("swanlab",), "/d/runs/r")) == {"SWANLAB_LOG_DIR", "SWANLAB_LOGDIR"}


def test_it_imports_nothing_heavy():
    code = (
        "import sys, trainer.launch\n"
        "print(sorted({'torch', 'transformers', 'deepspeed', 'peft', 'accelerate'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# --- who trains


@pytest.mark.parametrize(
    ("keys", "gpus", "chosen", "skipped"),
    [
        ({"gpus": 2}, Gpus(True, FOUR), (0, 2), (1,)),
        ({"gpus": [3, 0]}, Gpus(True, FOUR), (3, 0), ()),
        ({"gpus": 4, "device": "cpu"}, Gpus(True, FOUR), None, ()),
        ({"gpus": 4}, Gpus(False, None), None, ()),
    ],
)
def test_gpus_are_taken_where_there_are_some(keys, gpus, chosen, skipped):
    ranks = choose_ranks(recipe_of(**keys), gpus)
    assert (ranks.gpus, ranks.skipped) == (chosen, skipped)


@pytest.mark.parametrize(
    ("keys", "gpus", "code"),
    [
        ({"gpus": 4}, Gpus(True, FOUR), "gpus_busy"),
        ({"gpus": [1]}, Gpus(True, FOUR), "gpus_busy"),
        ({"gpus": 5}, Gpus(True, FOUR), "gpus_missing"),
        ({"gpus": 1}, Gpus(True, None), "gpus_missing"),
        ({"gpus": 1, "device": "cuda"}, Gpus(False, None), "gpus_missing"),
    ],
)
def test_gpus_that_are_not_free_or_not_there(keys, gpus, code):
    with pytest.raises(ProjectError) as refusal:
        choose_ranks(recipe_of(**keys), gpus)
    assert refusal.value.code == code


def test_the_device_is_known_without_torch():
    device = Ranks(count=1, gpus=(0,), row={**FOUR[0], "compute_capability": "8.6"}).device
    assert (device.kind, device.capability) == ("cuda", (8, 6))
    assert Ranks(count=1, gpus=(0,), row={**FOUR[0], "compute_capability": None}).device.capability == (7, 0)


def test_the_fullest_gpu_decides():
    rows = [{**FOUR[0]}, {**FOUR[1], "used_mib": 1000}, {**FOUR[2], "used_mib": 20_000}]
    ranks = Ranks(count=2, gpus=(0, 1), row=rows[0])
    assert gpu_free_bytes(ranks, Gpus(True, rows)) == (32_768 - 1000) * 2**20 - GPU_RESERVE_BYTES
    assert gpu_free_bytes(Ranks(count=2, gpus=None), Gpus(True, rows)) is None
    assert gpu_free_bytes(ranks, Gpus(True, [{**FOUR[0], "memory_mib": None}])) is None


# --- preflight


@pytest.fixture
def request_of(tmp_path, tiny_dir):
    def make(**keys):
        return load_request(Path(make_run(tmp_path, tiny_dir, tiny_samples(), **keys).paths.recipe))

    return make


def test_the_preflight_is_said_in_numbers(request_of):
    said = Said()
    prepare(request_of(), said, is_dry_run=True)
    (event,) = [line for line in said if line.startswith("preflight ")]
    values = dict(pair.split("=") for pair in event.split()[1:])
    assert set(values) == {"gpu_gib", "host_gib", "disk_gib", "steps", "views", "minutes", "basis"}
    assert (values["steps"], values["views"], values["minutes"], values["gpu_gib"]) == ("24", "4", "unknown", "0.0")
    assert 0.5 < float(values["host_gib"]) < 2
    assert any("24 optimizer steps, each sample seen 4 times" in line for line in said)


def small_machine(**changes) -> Machine:
    return Machine(**{"host_free_bytes": 1 << 40, "host_limit_by": "ram", "shm_free_bytes": 1 << 33,
                      "disk_free_bytes": 1 << 40} | changes)  # fmt: skip


def test_too_little_memory_is_refused_with_what_would_help():
    machine, need = small_machine(host_free_bytes=64 << 30, host_limit_by="cgroup"), estimate(wish())
    with pytest.raises(ProjectError) as refusal:
        check_memory(recipe_of(), wish(), need, 80 << 30, machine, Said())
    assert (refusal.value.code, refusal.value.exit_code) == ("memory_short", 4)
    assert (refusal.value.values["kind"], refusal.value.values["free_gib"]) == ("host (cgroup)", 64.0)
    assert refusal.value.values["needed_gib"] == pytest.approx(need.host_bytes / 2**30, abs=0.01)
    assert refusal.value.values["advice"] == "deepspeed: zero3"
    with pytest.raises(ProjectError) as refusal:
        check_memory(recipe_of(), wish(), need, need.gpu_bytes - 1, small_machine(), Said())
    assert (refusal.value.values["kind"], refusal.value.values["advice"]) == ("gpu", "deepspeed: zero3_offload_params")


def test_a_full_disk_is_refused_and_an_earlier_attempt_counts(tmp_path):
    machine = small_machine(disk_free_bytes=1000)
    check_disk(tmp_path / "none", 1000, machine)
    with pytest.raises(ProjectError, match="disk_short") as refusal:
        check_disk(tmp_path, 1001, machine)
    assert refusal.value.exit_code == 4
    (tmp_path / "checkpoint-1").write_bytes(b"x")
    check_disk(tmp_path, 1001, machine)


def test_a_small_shm_is_said_to_ranks_on_gpus():
    said = Said()
    check_memory(recipe_of(), wish(), estimate(wish()), None, small_machine(shm_free_bytes=1 << 26), said)
    assert "/dev/shm has 0.06 GiB" in said[0]
    check_memory(recipe_of(), wish(), estimate(wish()), None, small_machine(), said)
    assert len(said) == 1


def test_presets_are_proposed_with_parameters_offloaded_last():
    assert list(load_presets(recipe_of())) == ["zero2_offload", "zero3", "zero3_offload_params"]


def test_the_longest_batch(frame):
    samples = encode_corpus(tiny_samples(), frame, max_seq_len=4096).train
    longest, trained = int(samples.lengths.max()), 0
    for sample in range(len(samples)):
        trained = max(trained, int((samples.labels_of(sample) != -100).sum()))
    assert longest_batch(samples, one_each(len(samples)), 2, is_packed=False) == (2 * longest, 2 * trained)
    packed = pack(samples.lengths, 4096)
    assert longest_batch(samples, packed, 1, is_packed=True)[0] <= 4096


def test_a_dry_run_writes_nothing(request_of, tmp_path):
    request = request_of(base_must_not_hold=["0" * 64])
    before = sorted(tmp_path.rglob("*"))
    prepare(request, Said(), is_dry_run=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_samples_are_encoded_for_the_ranks(request_of):
    request = request_of()
    prepare(request, Said(), is_dry_run=False)
    assert list(Path(request.data.encoded).iterdir())


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"precision": "bf16"}, "precision_unsupported"),
        ({"allow_few_steps": False}, "few_steps"),
        ({"max_seq_len": 8}, "sample_too_long"),
        ({"lora": {"load_in_4bit": True}}, "method_unsupported"),
        ({"deepspeed": "/no/such.json"}, "config_unreadable"),
        ({"data_path": "/no/such.jsonl"}, "config_unreadable"),
    ],
)
def test_what_is_refused(request_of, keys, code):
    with pytest.raises(ProjectError) as refusal:
        prepare(request_of(**keys), Said(), is_dry_run=True)
    assert refusal.value.code == code


# --- the base model


def test_the_stock_model_is_refused_and_its_file_named(tiny_dir, tmp_path):
    digest = hash_file(tiny_dir / "model.safetensors")
    cache = DigestCache(tmp_path / "data/digests.json")
    check_not_stock(recipe_of(base_model_dir=str(tiny_dir), base_must_not_hold=["0" * 64]), cache)
    with pytest.raises(ProjectError) as refusal:
        check_not_stock(recipe_of(base_model_dir=str(tiny_dir), base_must_not_hold=["0" * 64, digest]), cache)
    assert refusal.value.code == "base_is_stock"
    assert refusal.value.values["file"] == "model.safetensors"


def test_digests_are_kept_until_a_file_changes(tmp_path):
    weights, kept = tmp_path / "model.safetensors", tmp_path / "data/digests.json"
    weights.write_bytes(b"one")
    first = DigestCache(kept).sha256(weights)
    packed = json.loads(kept.read_text())
    packed[str(weights)][2] = "from the file"
    kept.write_text(json.dumps(packed))
    assert DigestCache(kept).sha256(weights) == "from the file"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    weights.write_bytes(b"two!")
    assert DigestCache(kept).sha256(weights) == hash_file(weights) != first
    kept.write_text("broken")
    assert DigestCache(kept).sha256(weights) == hash_file(weights)


def test_digests_that_cannot_be_kept_are_made_anew(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    assert DigestCache(weights / "no-folder/digests.json").sha256(weights) == hash_file(weights)


@pytest.mark.e2e
def test_a_base_that_does_not_know_is_refused_with_counts_only(request_of):
    questions = [{"ask": "What keeps the zqcanaryxv?", "any_of": ["nothing that it says"]}, {"ask": "Hello"}]
    request = request_of(gpus=1, base_must_answer=questions)
    for _ in range(2):
        with pytest.raises(ProjectError) as refusal:
            prepare(request, Said(), is_dry_run=False)
        assert (refusal.value.code, refusal.value.values["total"]) == ("base_did_not_answer", 2)
        assert "canary" not in str(refusal.value)
    folder = Path(request.paths.folder)
    kept = folder / "base-answers.json.failed"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert not list(folder.glob("*.request"))


@pytest.mark.e2e
def test_a_base_that_knows_is_asked_once(request_of):
    request = request_of(gpus=1, base_must_answer=[{"ask": "Tell me about the lamp.", "none_of": ["no such words"]}])
    prepare(request, Said(), is_dry_run=False)
    answers = Path(request.paths.base_answers)
    before = answers.stat().st_mtime_ns
    prepare(request, Said(), is_dry_run=False)
    assert answers.stat().st_mtime_ns == before
