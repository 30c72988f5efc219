"""Round trips and refusals of the trainer's contracts."""

import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus_builder.errors import ProjectError
from trainer.locks import Lock, Process, identify, is_alive, read_lock, release_lock, take_lock
from trainer.progress import Event, Progress, format_event, format_progress, parse_line
from trainer.recipe import accumulation, load_recipe, optimizer_steps
from trainer.remedies import find_remedy
from trainer.run_paths import DataPaths, RootPaths, new_run_id, run_paths, setup_paths
from trainer.run_state import STARTING_FLOOR_S, Outcome, RunFacts, derive_state, eta_s, has_ended, outcome_from_json

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs/recipes/coding_v1.yaml"

numbers = st.floats(-1e6, 1e6).map(lambda x: float(f"{x:.7g}"))
losses = st.none() | numbers | st.sampled_from([math.inf, -math.inf])


@given(
    st.builds(
        Progress,
        st.integers(0, 10**6),
        st.integers(1, 10**6),
        losses,
        st.none() | numbers,
        numbers,
        numbers,
        st.none() | numbers,
        st.dictionaries(st.sampled_from(["loss_soul", "tok", "gnorm"]), numbers),
    )
)
def test_progress_round_trip(progress):
    assert parse_line(format_progress(progress)) == [progress]


def test_progress_spells_out_nan():
    line = format_progress(Progress(3, 9, math.nan, 1e-5, 0.5, 5, 2.0))
    assert " loss=nan " in line
    assert math.isnan(parse_line(line)[0].loss)


def test_progress_keys_stand_in_their_order():
    line = format_progress(Progress(3, 9, 2.5, 1e-5, 0.5, 5, 2.0, {"loss_soul": 2.25}))
    assert line == "ZY_PROGRESS step=3 total=9 loss=2.5 lr=1e-05 epoch=0.5 total_epochs=5 thr=2 loss_soul=2.25"


@pytest.mark.parametrize(
    "line",
    [
        "ZY_PROGRESS step=5 total=75 epoch=1 total_epochs=3 loss=2.5 lr=1e-05 thr=0.25",
        "ZY_PROGRESS step=5 total=75 loss=2.5000 lr=1.00e-05 epoch=1.00 total_epochs=3 thr=0.25",
        "[rank0]: ZY_PROGRESS step=5 total=75 loss=2.5 lr=1e-05 epoch=1 total_epochs=3 thr=0.25 new_key=word",
        "\r 10%|#  | 5/75\x1b[0m ZY_PROGRESS step=5 total=75 loss=2.5 lr=1e-05 epoch=1 total_epochs=3 thr=0.25\r",
    ],
)
def test_progress_of_both_first_pipelines_and_with_noise(line):
    assert parse_line(line) == [Progress(5, 75, 2.5, 1e-5, 1.0, 3.0, 0.25)]


def test_two_lines_glued_together():
    one = format_progress(Progress(1, 9, 2.5, 1e-5, 0.5, 5, 2.0))
    assert parse_line(one + format_event(Event("finished", {"step": "1"}))) == [
        Progress(1, 9, 2.5, 1e-5, 0.5, 5, 2.0), Event("finished", {"step": "1"}),
    ]  # fmt: skip


@given(st.text())
def test_any_other_text_is_no_progress(text):
    assert all(isinstance(item, (Progress, Event)) for item in parse_line(text))


@given(st.text())
def test_torn_progress_never_raises(text):
    parse_line("ZY_PROGRESS step=" + text)


def test_event_values_are_single_words():
    with pytest.raises(ValueError, match="one word"):
        format_event(Event("started", {"model": "a b"}))


def test_recipe_of_the_seed_loads_with_its_numbers():
    recipe = load_recipe(RECIPE, environment={}).value
    assert (recipe.learning_rate, recipe.num_train_epochs, recipe.max_seq_len) == (1e-5, 5, 4096)
    assert (recipe.lr_scheduler_type, recipe.precision, recipe.gpus, recipe.deepspeed) == (
        "cosine",
        "auto",
        4,
        "zero3_offload",
    )
    assert recipe.base_model_dir == "/data/guanghu/checkpoints/qwen2_5_7b_sft/best"


def test_recipe_takes_every_variable_of_the_first_pipeline():
    resolved = load_recipe(RECIPE, environment={"ZY_LR": "5e-6", "ZY_MAX_SEQ_LEN": "2048", "ZY_GRAD_ACCUM": "8"})
    assert (resolved.value.learning_rate, resolved.value.max_seq_len) == (5e-6, 2048)
    assert accumulation(resolved.value, ranks=4, tokens_per_row=10) == 8
    assert resolved.origins["learning_rate"] == "ZY_LR"


@pytest.mark.parametrize(("rows_tokens", "ranks", "wanted"), [(1024, 4, 4), (4096, 4, 1), (20_000, 4, 1), (100, 2, 82)])
def test_accumulation_comes_nearest_to_the_tokens_per_step(rows_tokens, ranks, wanted):
    recipe = load_recipe(RECIPE, environment={}).value
    assert accumulation(recipe, ranks=ranks, tokens_per_row=rows_tokens) == wanted


def test_optimizer_steps_count_the_smaller_last_step():
    assert optimizer_steps(471, ranks=4, batch_size=1, accumulation_steps=8, epochs=5) == 75


def test_run_paths_are_those_of_the_design():
    paths = run_paths("/data/zy", "v1", "20260503-101500-3fa1")
    assert paths.final == "/data/zy/checkpoints/v1/20260503-101500-3fa1/final"
    assert paths.log == "/data/zy/logs/train-20260503-101500-3fa1.log"
    assert paths.run_id == "20260503-101500-3fa1"
    assert setup_paths("/data/zy", "x").log == DataPaths("/data/zy").setup_log
    assert RootPaths("/opt/zy").release("ab") == "/opt/zy/releases/ab"
    assert new_run_id("20260503-101500").startswith("20260503-101500-")


def facts(**changes):
    return RunFacts(
        **{"outcome": None, "supervisor_alive": True, "last_step": 5, "silent_s": 1.0, "step_s": 2.0, **changes}
    )


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "running"),
        ({"last_step": 0}, "starting"),
        ({"last_step": 0, "silent_s": STARTING_FLOOR_S + 1}, "stalled"),
        ({"silent_s": 599}, "running"),
        ({"silent_s": 601}, "stalled"),
        ({"silent_s": 601, "step_s": 60.0}, "running"),
        ({"supervisor_alive": False}, "lost"),
        ({"supervisor_alive": False, "outcome": Outcome("failed", 1, None, "r", 5, "t")}, "failed"),
    ],
)
def test_state_follows_from_facts(changes, state):
    assert derive_state(facts(**changes)) == state
    assert has_ended(state) == (state in {"lost", "failed"})


def test_eta_is_unknown_before_a_step_time_is():
    assert eta_s(5, 75, None) is None
    assert eta_s(5, 75, 2.0) == 140


def test_outcome_of_a_newer_writer_is_read():
    packed = {
        "state": "killed",
        "exit_code": None,
        "signal": 9,
        "reason": "r",
        "last_step": 3,
        "ended_at": "t",
        "new": 1,
    }
    assert outcome_from_json(packed) == Outcome("killed", None, 9, "r", 3, "t")
    with pytest.raises(ValueError, match="cannot end"):
        Outcome("running", None, None, "r", 0, "t")


def me(name="a"):
    return Lock("alice", "setup-and-train", name, identify(os.getpid()))


def test_lock_names_its_holder(tmp_path):
    path = str(tmp_path / "locks/run.json")
    take_lock(path, me())
    with pytest.raises(ProjectError, match="setup-and-train") as caught:
        take_lock(path, me("b"))
    assert caught.value.exit_code == 8
    assert release_lock(path, identify(os.getpid()))
    assert read_lock(path) is None


def test_lock_of_a_dead_process_is_taken_over(tmp_path):
    path = str(tmp_path / "run.json")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = identify(child.pid)
    take_lock(path, Lock("bob", "setup-only", "x", process))
    child.communicate(b"\n")
    assert not is_alive(process)
    take_lock(path, me())
    assert read_lock(path).owner == "alice"


def test_lock_of_another_boot_or_a_reused_pid_is_stale():
    mine = identify(os.getpid())
    assert is_alive(mine)
    assert not is_alive(Process(mine.pid, mine.start_ticks, "another boot"))
    assert not is_alive(Process(mine.pid, mine.start_ticks + 1, mine.boot_id))


def test_torn_lock_is_taken_over(tmp_path):
    (tmp_path / "run.json").write_text("{")
    take_lock(str(tmp_path / "run.json"), me())
    assert read_lock(str(tmp_path / "run.json")).name == "a"


def test_lock_is_released_by_its_holder_only(tmp_path):
    path = str(tmp_path / "run.json")
    take_lock(path, me())
    assert not release_lock(path, Process(1, 1, "x"))
    assert read_lock(path) is not None


def test_nobody_takes_while_another_looks_at_the_holder(tmp_path):
    """Found by the soak: two removers of one stale lock and a third taker left two holders."""
    path = str(tmp_path / "run.json")
    take_lock(path, Lock("bob", "setup-only", "x", Process(1, 1, "another boot")))
    faster: list[Exception] = []

    def take_too() -> None:
        try:
            take_lock(path, me("faster"))
        except ProjectError as error:
            faster.append(error)

    thread = threading.Thread(target=take_too)

    def looking(process: Process) -> bool:
        thread.start()
        thread.join(0.3)
        return is_alive(process)

    take_lock(path, me("first"), looking)
    thread.join()
    assert [error.code for error in faster] == ["lock_held"]
    assert read_lock(path).name == "first"


def test_of_many_takers_one_wins(tmp_path):
    path = str(tmp_path / "run.json")
    code = (
        "import os,sys;from trainer.locks import *\n"
        "sys.stdin.readline()\n"
        "try: take_lock(sys.argv[1], Lock('o','a',str(os.getpid()),identify(os.getpid()))); print('won', flush=True)\n"
        "except Exception as e: print('lost', flush=True)\n"
        "sys.stdin.readline()"
    )
    takers = [
        subprocess.Popen(
            [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        for _ in range(6)
    ]
    answers = []

    def go(taker):
        taker.stdin.write("\n")
        taker.stdin.flush()
        answers.append(taker.stdout.readline().strip())

    threads = [threading.Thread(target=go, args=(taker,)) for taker in takers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for taker in takers:
        taker.communicate("\n")
    assert sorted(answers) == ["lost"] * 5 + ["won"]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB", "cuda_oom"),
        ("OSError: [Errno 28] No space left on device", "disk_full"),
        ("[launch.py:325:sigkill_handler] ... exits with return code = -9", "host_oom"),
        ("RuntimeError: Ninja is required to load C++ extensions", "no_compiler"),
        ("Exception: Current loss scale already at minimum - cannot decrease scale anymore.", "loss_scale_minimum"),
        ("OSError: [Errno 98] Address already in use", "port_in_use"),
        ("everything is fine, no memory trouble", None),
        ("exits with return code = -90", None),
    ],
)
def test_known_failure_is_found_in_a_log(line, code):
    found = find_remedy(f"before\n{line}\nafter")
    assert (found.code if found else None) == code


def test_every_remedy_is_said_in_both_languages():
    from corpus_builder.say import LANGUAGES, say
    from trainer.remedies import REMEDIES

    assert all(say(f"remedy.{remedy.code}", lang) for remedy in REMEDIES for lang in LANGUAGES)
