"""Runs that are killed, cut short, fed with rot or made to diverge: real processes, a random model of two layers.

Packing is on and every fifth sample is held out. Where one process is enough, one process runs.
"""

import json
import random
import shutil
import signal
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from corpus_builder.errors import ProjectError
from corpus_builder.frame import load_frame
from tests.tiny_run import TinyRun, kill_all, kill_at, make_run, ranks_of, tiny_samples, write_base_model
from trainer.checkpoints import (
    complete_checkpoints,
    estimated_bytes,
    find_fault,
    find_resume_point,
    folder_bytes,
    read_mark,
)
from trainer.device import Place
from trainer.encode import encode_corpus
from trainer.progress import Progress
from trainer.run_paths import CHECKPOINT, CHECKPOINT_COMPLETE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
SMALL = {"packing": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "save_steps": 3}
SAMPLES = tiny_samples(22) + [replace(sample, split="validation") for sample in tiny_samples(27)[22:]]
ADAPTER = {"r": 8, "lora_alpha": 64, "lora_dropout": 0.0}
TWO_RANKS = Place(0, 0, 2, True)


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory) -> Path:
    return write_base_model(tmp_path_factory.mktemp("base") / "base", tiny_samples())


def make(folder: Path, base_dir: Path, samples=SAMPLES, **keys) -> TinyRun:
    return make_run(folder, base_dir, samples, **(SMALL | keys))


def final_bytes(run: TinyRun) -> bytes:
    return (Path(run.paths.final) / "model.safetensors").read_bytes()


def weights(folder: Path | str, file: str = "model.safetensors"):
    from safetensors.torch import load_file

    return load_file(Path(folder) / file)


def greatest_difference(one, other) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def checkpoint_names(run: TinyRun) -> list[str]:
    return [path.name for path in complete_checkpoints(Path(run.paths.checkpoints))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, base_dir):
    """A run of one process that nothing disturbs, and how it ended."""
    run = make(tmp_path_factory.mktemp("alone"), base_dir)
    ended = run.launch(alone=True)
    assert ended.exit_code == 0, ended.stderr[-4000:]
    return run, ended


@pytest.fixture(scope="module")
def together(tmp_path_factory, base_dir):
    """A run of two ranks under ZeRO-3 that nothing disturbs, and how it ended."""
    run = make(tmp_path_factory.mktemp("together"), base_dir)
    ended = run.launch()
    assert ended.exit_code == 0, ended.stderr[-4000:]
    return run, ended


def test_a_kill_at_any_step_changes_no_bit_of_the_result(alone, base_dir, tmp_path):
    undisturbed, undisturbed_ended = alone
    steps = undisturbed_ended.points[-1].step
    at = random.SystemRandom().randrange(4, steps - 2)
    run = make(tmp_path, base_dir)
    first = run.launch(alone=True, on_line=kill_at(at))
    assert first.exit_code == -signal.SIGKILL
    assert not Path(run.paths.final).exists()
    second = run.launch(alone=True)
    assert second.exit_code == 0, second.stderr[-4000:]
    assert "resumed" in second.events
    began = second.points[0].step
    assert [point.step for point in second.points] == list(range(began, steps + 1))
    assert [point.loss for point in second.points] == [p.loss for p in undisturbed_ended.points[began - 1 :]]
    assert [point.lr for point in second.points] == [p.lr for p in undisturbed_ended.points[began - 1 :]]
    assert final_bytes(run) == final_bytes(undisturbed), f"killed at step {at}"


@pytest.mark.soak
def test_a_kill_changes_no_bit_of_adapters_that_are_trained_with_dropout(base_dir, tmp_path):
    """What a dropped neuron is follows from the random state: it goes on as well."""
    lora = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.2}
    undisturbed = make(tmp_path / "undisturbed", base_dir, lora=lora)
    assert undisturbed.launch(alone=True).exit_code == 0
    run = make(tmp_path / "killed", base_dir, lora=lora)
    assert run.launch(alone=True, on_line=kill_at(8)).exit_code == -signal.SIGKILL
    assert run.launch(alone=True).exit_code == 0
    assert final_bytes(run) == final_bytes(undisturbed)
    adapters = [(Path(r.paths.final) / "adapter/adapter_model.safetensors").read_bytes() for r in (run, undisturbed)]
    assert adapters[0] == adapters[1]


def test_a_kill_within_a_save_leaves_no_checkpoint_and_changes_no_bit(alone, base_dir, tmp_path):
    undisturbed, _ = alone
    run = make(tmp_path, base_dir, save_steps=1, save_total_limit=100)
    watcher = SaveKiller(run)
    first = run.launch(alone=True, on_line=watcher.begin)
    watcher.thread.join()
    assert first.exit_code == -signal.SIGKILL, "no save was met half done"
    assert watcher.killed is not None
    assert watcher.killed.is_dir()
    assert not (watcher.killed / CHECKPOINT_COMPLETE).exists()
    before = checkpoint_names(run)
    second = run.launch(alone=True)
    assert second.exit_code == 0, second.stderr[-4000:]
    assert second.points[0].step == int(before[-1].rpartition("-")[2]) + 1
    assert final_bytes(run) == final_bytes(undisturbed)


class SaveKiller:
    """Kills a run as soon as it sees a checkpoint that is being written, after the first whole one."""

    def __init__(self, run: TinyRun) -> None:
        self._run_dir = Path(run.paths.checkpoints)
        self.killed: Path | None = None
        self.thread = threading.Thread(target=lambda: None)

    def begin(self, _: object, child: "subprocess.Popen[str]") -> None:
        """Begin to look at the first line that is told."""
        if self.thread.ident is None:
            self.thread = threading.Thread(target=self._look, args=(child,))
            self.thread.start()

    def _look(self, child: "subprocess.Popen[str]") -> None:
        while child.poll() is None and self.killed is None:
            whole = {path.name for path in complete_checkpoints(self._run_dir)}
            for path in self._run_dir.glob("checkpoint-*"):
                if whole and path.name not in whole and (path / "model.safetensors").exists():
                    kill_all(child)
                    self.killed = path


@pytest.mark.soak
def test_looking_at_held_out_samples_changes_no_bit_of_the_result(alone, base_dir, tmp_path):
    undisturbed, ended = alone
    assert "evaluated" in ended.events
    run = make(tmp_path, base_dir, [sample for sample in SAMPLES if sample.split == "train"])
    blind = run.launch(alone=True)
    assert "evaluated" not in blind.events
    assert final_bytes(run) == final_bytes(undisturbed)


@pytest.mark.parametrize("kind", ["alone", "together"])
def test_the_held_out_loss_is_the_exact_mean_whatever_the_ranks(kind, base_dir, request):
    """Against a plain loop: one sample at a time, whole logits, no packing, no ranks."""
    import torch
    from torch.nn import functional
    from transformers import AutoModelForCausalLM

    run, ended = request.getfixturevalue(kind)
    held_out = encode_corpus(SAMPLES, load_frame(base_dir), max_seq_len=256).validation
    assert len(held_out) == 5
    model = AutoModelForCausalLM.from_pretrained(run.paths.final)
    sums = {name: [0.0, 0.0] for name in ("loss", "loss_soul", "loss_tool")}
    for sample in range(len(held_out)):
        ids = torch.from_numpy(held_out.ids_of(sample).astype("int64"))
        labels = torch.from_numpy(held_out.labels_of(sample).astype("int64"))
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        losses = functional.cross_entropy(logits[:-1], labels[1:], reduction="none", ignore_index=-100)
        weight = float(held_out.weights[sample])
        for name in ("loss", {0: "loss_soul", 2: "loss_tool"}[int(held_out.class_indices[sample])]):
            sums[name][0] += weight * float(losses.sum())
            sums[name][1] += weight * int((labels[1:] != -100).sum())
    said = {key[len("eval_") :]: value for key, value in ended.points[-1].extras.items() if key.startswith("eval_")}
    assert said == pytest.approx({name: total / count for name, (total, count) in sums.items()}, rel=1e-5)


def test_two_ranks_killed_with_a_rotten_newest_checkpoint_end_as_if_nothing_had_been(together, base_dir, tmp_path):
    undisturbed, undisturbed_ended = together
    run = make(tmp_path, base_dir, save_total_limit=3)
    first = run.launch(on_line=kill_at(8))
    assert first.exit_code == -signal.SIGKILL
    assert checkpoint_names(run)[:2] == ["checkpoint-3", "checkpoint-6"]
    newest = complete_checkpoints(Path(run.paths.checkpoints))[-1]
    shard = next(newest.rglob("*rank_1*_optim_states.pt"))
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size // 2)

    second = run.launch()
    assert second.exit_code == 0, second.stderr[-4000:]
    assert second.events[:7].count("checkpoint_skipped") == 1
    assert f"{newest.name} cannot be used: wrong_size" in second.stdout
    began = second.points[0].step
    assert began == int(newest.name.rpartition("-")[2]) - 3 + 1
    wanted = [point.loss for point in undisturbed_ended.points[began - 1 :]]
    assert [point.loss for point in second.points] == pytest.approx(wanted, abs=1e-6)
    assert greatest_difference(weights(run.paths.final), weights(undisturbed.paths.final)) <= 1e-6


@pytest.fixture(scope="module")
def real_checkpoint(together) -> Path:
    """A checkpoint of two ZeRO-3 ranks as they wrote it."""
    run, _ = together
    return complete_checkpoints(Path(run.paths.checkpoints))[-1]


def zero_tensor(path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = weights(path)
    name = sorted(tensors)[0]
    save_file(tensors | {name: torch.empty(0)}, path / "model.safetensors")


def lose_tail(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)


ROT = {
    "missing file": lambda path: next(path.rglob("*rank_1*_optim_states.pt")).unlink(),
    "truncated shard": lambda path: lose_tail(next(path.rglob("*rank_0*_optim_states.pt"))),
    "latest names a missing folder": lambda path: (path / "latest").write_text("global_step999"),
    "zero-size tensor": zero_tensor,
    "broken trainer_state.json": lambda path: lose_tail(path / "trainer_state.json"),
}


@pytest.mark.parametrize("with_sizes", [True, False])
@pytest.mark.parametrize("name", ROT)
def test_each_rot_is_found_in_a_real_checkpoint(real_checkpoint, tmp_path, name, with_sizes):
    path = tmp_path / real_checkpoint.name
    shutil.copytree(real_checkpoint, path)
    if not with_sizes:
        mark = json.loads((path / CHECKPOINT_COMPLETE).read_text()) | {"files": {}}
        (path / CHECKPOINT_COMPLETE).write_text(json.dumps(mark))
    assert find_fault(path) is None
    ROT[name](path)
    assert find_fault(path) is not None


def test_another_number_of_ranks_is_refused_by_the_run_itself(together, base_dir, tmp_path):
    undisturbed, _ = together
    run = make(tmp_path, base_dir, resume_from=undisturbed.paths.checkpoints, gpus=1)
    ended = run.launch()
    (error,) = ended.errors
    assert (error.code, error.values["had"], error.values["now"], ended.exit_code) == ("ranks_changed", 2, 1, 2)
    assert ended.points == []


def test_the_estimate_of_a_first_checkpoint_is_near(alone, together, base_dir):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base_dir)
    for (run, _), is_launched in ((alone, False), (together, True)):
        written = folder_bytes(complete_checkpoints(Path(run.paths.checkpoints))[-1])
        estimate = estimated_bytes(model, is_launched=is_launched, is_model_only=False)
        assert 0.6 < estimate / written < 1.1, "of so small a model, the files that do not grow are a part"


def test_checkpoints_of_the_model_alone_are_small_and_cannot_be_resumed(alone, base_dir, tmp_path):
    undisturbed, _ = alone
    run = make(tmp_path, base_dir, save_only_model=True)
    first = run.launch(alone=True, on_line=kill_at(5))
    assert first.exit_code == -signal.SIGKILL
    (checkpoint,) = complete_checkpoints(Path(run.paths.checkpoints))
    whole = complete_checkpoints(Path(undisturbed.paths.checkpoints))[-1]
    assert folder_bytes(checkpoint) < 0.4 * folder_bytes(whole)
    second = run.launch(alone=True)
    assert [error.code for error in second.errors] == ["checkpoint_model_only"]
    assert second.exit_code == 2


@pytest.mark.parametrize(
    ("lora", "is_alone"),
    [
        pytest.param(None, False, id="full-two ranks"),
        *(
            pytest.param(lora, is_alone, marks=pytest.mark.soak, id=name)
            for name, lora, is_alone in (
                ("full", None, True),
                ("lora", ADAPTER, True),
                ("lora-two ranks", ADAPTER, False),
            )
        ),
    ],
)
def test_the_result_is_the_best_checkpoint_and_the_run_ends_early(base_dir, tmp_path, is_alone, lora):
    """Far too high a rate for two layers: the held-out loss falls first, then it rises."""
    run = make(
        tmp_path, base_dir, num_train_epochs=40, learning_rate=0.03 if lora is None else 0.1, lora=lora,
        warmup_ratio=0.0, save_steps=2, load_best_model_at_end=True, early_stopping_patience=4, save_total_limit=1,
        lr_scheduler_type="constant_with_warmup",
    )  # fmt: skip
    ended = run.launch(alone=is_alone)
    assert ended.exit_code == 0, ended.stderr[-4000:]
    assert "stopped_early" in ended.events
    looks = {point.step: point.extras["eval_loss"] for point in ended.points if "eval_loss" in point.extras}
    best = min(looks, key=looks.get)
    last = max(looks)
    assert last - best == 2 * 4
    names = checkpoint_names(run)
    assert f"checkpoint-{best}" in names
    assert len(names) == 2, "the newest and the best"
    assert f"the result is checkpoint-{best}" in ended.stdout
    file = "model.safetensors" if lora is None else "adapter_model.safetensors"
    result = Path(run.paths.final) / ("" if lora is None else "adapter")
    best_weights = weights(run.paths.checkpoint(best), file)
    assert greatest_difference(weights(result, file), best_weights) == 0
    assert greatest_difference(weights(run.paths.checkpoint(last), file), best_weights) > 0.01
    assert read_mark(Path(run.paths.checkpoint(last))).stale_looks == 4


@pytest.mark.soak
def test_the_last_weights_are_the_result_where_they_are_the_best(base_dir, tmp_path):
    run = make(tmp_path, base_dir, load_best_model_at_end=True)
    ended = run.launch(alone=True)
    assert ended.exit_code == 0, ended.stderr[-4000:]
    looks = [point.extras["eval_loss"] for point in ended.points if "eval_loss" in point.extras]
    assert looks[-1] == min(looks)
    assert "the result is" not in ended.stdout


@pytest.mark.parametrize("keys", [{"load_best_model_at_end": True}, {"early_stopping_patience": 2}])
def test_held_out_samples_that_are_wanted_and_missing_are_named_before_the_model_is_loaded(base_dir, tmp_path, keys):
    ended = make(tmp_path, base_dir, tiny_samples(), **keys).launch(alone=True)
    (error,) = ended.errors
    assert (error.code, error.values) == ("no_validation", {"key": next(iter(keys))})
    assert "precision" not in ended.events


@pytest.mark.parametrize(("is_alone", "norm"), [(True, "nan"), pytest.param(False, "inf", marks=pytest.mark.soak)])
def test_a_gradient_that_is_no_number_stops_the_run_although_its_loss_is_one(base_dir, tmp_path, is_alone, norm):
    """Embeddings of 1e-22 before a norm without epsilon: what comes out is 1, and its slope leaves 32 bits.

    DeepSpeed calls every such norm infinite.
    """
    from safetensors.torch import save_file

    shutil.copytree(base_dir, tmp_path / "base")
    tensors = weights(base_dir)
    tensors["model.embed_tokens.weight"] *= 1e-20
    save_file(tensors, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.0}))
    run = make(tmp_path / "run", tmp_path / "base", save_steps=1)
    ended = run.launch(alone=is_alone)
    error = ended.errors[0]
    assert (error.code, error.values) == ("gradient_not_finite", {"norm": norm, "step": 1})
    assert ended.events[-1] == "nan_stopped"
    assert checkpoint_names(run) == []


def test_a_run_that_was_killed_before_its_pointer_gets_it_at_the_next_start(alone, tmp_path):
    undisturbed, _ = alone
    pointer = Path(undisturbed.data.version_final(undisturbed.recipe.version))
    pointer.unlink()
    assert undisturbed.launch(alone=True).exit_code == 0
    assert pointer.resolve() == Path(undisturbed.paths.final).resolve()
    newer = pointer.parent / "20991231-000000-abcd" / "final"
    newer.mkdir(parents=True)
    pointer.unlink()
    pointer.symlink_to("20991231-000000-abcd/final")
    assert undisturbed.launch(alone=True).exit_code == 0
    assert pointer.resolve() == newer.resolve(), "a newer run's result stays"


@pytest.mark.soak
def test_a_rank_that_is_asked_says_where_it_is(base_dir, tmp_path):
    asked: list[int] = []

    def ask(item: object, child: "subprocess.Popen[str]") -> None:
        if isinstance(item, Progress) and not asked:
            rank = ranks_of(child)[-1]
            rank.send_signal(signal.SIGUSR1)
            asked.append(rank.pid)

    run = make(tmp_path, base_dir, num_train_epochs=20)
    ended = run.launch(on_line=ask, stop_at=10)
    assert ended.exit_code == 0, "it goes on afterwards"
    assert asked
    assert "most recent call first" in ended.stderr
    assert "trainer/train.py" in ended.stderr


def test_the_newest_point_of_a_killed_run_is_in_no_checkpoint_of_another(alone):
    """What was made is what a resume would take: the newest of one process, with what it needs."""
    run, ended = alone
    found = find_resume_point(Path(run.paths.checkpoints), None, Place(0, 0, 1, False))
    assert found.step == max(point.step for point in ended.points[:-1] if point.step % 3 == 0)
    with pytest.raises(ProjectError, match="ranks_changed"):
        find_resume_point(Path(run.paths.checkpoints), None, TWO_RANKS)
    assert all(CHECKPOINT.match(name) for name in checkpoint_names(run))
