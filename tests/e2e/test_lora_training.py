"""LoRA and every DeepSpeed preset, for real: two CPU ranks against one process, on a random model of two layers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_run import ROOT, free_port, make_run, tiny_samples, write_base_model
from trainer.base_model import find_model_faults
from trainer.merge import distance
from trainer.ranks import train_argv

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
#: One preset in `make test` (`zero3_offload` with all weights: test_training.py); the others in the soak.
EACH_PRESET = [
    ("zero3_offload_params", "lora"),
    *(
        pytest.param(preset, method, marks=pytest.mark.soak)
        for preset, method in [
            ("zero2_offload", "full"), ("zero2_offload", "lora"), ("zero3", "full"), ("zero3", "lora"),
            ("zero3_offload", "full"), ("zero3_offload", "lora"), ("zero3_offload_params", "full"),
        ]
    ),
]  # fmt: skip
LORA = {"r": 8, "lora_dropout": 0.0, "modules_to_save": ["lm_head"]}
TWO_RANKS, ALONE = {"gradient_accumulation_steps": 1}, {"gradient_accumulation_steps": 2}  # four rows per step
FEW = {"num_train_epochs": 1}


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory) -> Path:
    return write_base_model(tmp_path_factory.mktemp("base") / "base", tiny_samples())


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, base_dir):
    """LoRA in one process, whole; what two ranks must repeat."""
    run = make_run(tmp_path_factory.mktemp("one"), base_dir, tiny_samples(), lora=LORA, **ALONE)
    return run, run.launch(alone=True)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, base_dir):
    """LoRA under ZeRO-3 with optimizer offload, undisturbed."""
    run = make_run(tmp_path_factory.mktemp("two"), base_dir, tiny_samples(), lora=LORA, **TWO_RANKS)
    return run, run.launch()


def weights_of(final: str) -> dict[str, torch.Tensor]:
    return load_file(Path(final) / "model.safetensors")


def test_two_ranks_learn_and_give_the_curve_of_one(one_process, two_ranks):
    (_, alone), (_, ended) = one_process, two_ranks
    assert (alone.exit_code, ended.exit_code) == (0, 0), ended.stderr[-4000:]
    assert ended.points[-1].loss < 0.9 * ended.points[0].loss
    assert [point.loss for point in ended.points] == pytest.approx([point.loss for point in alone.points], abs=1e-4)
    assert ended.events[-3:] == ["merged", "final_saved", "finished"]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("which", ["one_process", "two_ranks"])
def test_the_merged_result_and_its_adapter_open_and_agree(request, base_dir, which):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run, _ = request.getfixturevalue(which)
    final = Path(run.paths.final)
    assert find_model_faults(str(final)) == []
    assert {path.name for path in (final / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    ids = torch.arange(12).reshape(2, 6)
    with torch.inference_mode():
        merged = AutoModelForCausalLM.from_pretrained(final).eval()(input_ids=ids).logits
        base = AutoModelForCausalLM.from_pretrained(base_dir).eval()
        of_base = base(input_ids=ids).logits
        both = PeftModel.from_pretrained(base, final / "adapter").eval()(input_ids=ids).logits
    assert distance(merged, both) < 1e-5
    assert distance(both, of_base) > 0.1
    assert str(base_dir.parent) not in "".join(path.read_text("utf-8") for path in final.rglob("*.json"))


def test_merging_changes_what_was_adapted_and_nothing_else(two_ranks, base_dir):
    run, _ = two_ranks
    base, merged = load_file(base_dir / "model.safetensors"), weights_of(run.paths.final)
    assert set(base) == set(merged)
    kept = {name for name in base if torch.equal(base[name], merged[name])}
    assert kept == {name for name in base if "norm" in name or "bias" in name or "embed" in name}


@pytest.mark.soak
def test_a_stopped_run_of_two_ranks_goes_on_where_it_was(two_ranks, base_dir, tmp_path):
    undisturbed, whole = two_ranks
    run = make_run(tmp_path, base_dir, tiny_samples(), lora=LORA, **TWO_RANKS)
    first = run.launch(stop_at=8)
    assert first.exit_code == 0, first.stderr[-4000:]
    assert first.events[-2:] == ["checkpoint_saved", "stop_requested"]
    Path(run.paths.stop).unlink()
    second = run.launch()
    assert second.exit_code == 0, second.stderr[-4000:]
    assert "resumed" in second.events
    losses = [point.loss for point in first.points + second.points]
    assert losses == pytest.approx([point.loss for point in whole.points], abs=1e-6)
    merged, meant = weights_of(run.paths.final), weights_of(undisturbed.paths.final)
    assert all(torch.allclose(merged[name], meant[name], rtol=0, atol=1e-6) for name in meant)


@pytest.mark.soak
def test_one_process_with_dropout_resumes_to_the_same_weights(base_dir, tmp_path):
    """Dropout draws from the state that the checkpoint keeps."""
    keys = {"lora": LORA | {"lora_dropout": 0.2, "merge": False}, "num_train_epochs": 1} | ALONE
    undisturbed = make_run(tmp_path / "whole", base_dir, tiny_samples(), **keys)
    whole = undisturbed.launch(alone=True)
    run = make_run(tmp_path / "cut", base_dir, tiny_samples(), **keys)
    Path(run.paths.stop).write_text("checkpoint")
    first = run.launch(alone=True)
    Path(run.paths.stop).unlink()
    second = run.launch(alone=True)
    assert (len(first.points), "resumed" in second.events) == (1, True), second.stderr[-4000:]
    assert [point.loss for point in first.points + second.points] == [point.loss for point in whole.points]
    adapters = [(Path(one.paths.final) / "adapter_model.safetensors").read_bytes() for one in (undisturbed, run)]
    assert adapters[0] == adapters[1]


def test_an_unmerged_result_is_the_adapter_with_its_tokenizer(base_dir, tmp_path):
    run = make_run(tmp_path, base_dir, tiny_samples(), lora=LORA | {"merge": False}, **FEW, **ALONE)
    ended = run.launch(alone=True)
    assert (ended.exit_code, "merged" in ended.events) == (0, False), ended.stderr[-4000:]
    final = Path(run.paths.final)
    assert find_model_faults(str(final)) == []
    names = {path.name for path in final.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert not {"config.json", "README.md", "training_args.bin"} & names
    assert json.loads((final / "adapter_config.json").read_text())["base_model_name_or_path"] == base_dir.name


@pytest.fixture(scope="module")
def few_steps(tmp_path_factory, base_dir):
    """One process, one epoch, for all weights and for LoRA: what every preset must repeat."""
    runs = {}
    for name, keys in {"full": {}, "lora": {"lora": LORA}}.items():
        run = make_run(tmp_path_factory.mktemp(name), base_dir, tiny_samples(), **FEW, **ALONE, **keys)
        runs[name] = (run, run.launch(alone=True))
    return runs


@pytest.mark.parametrize(("preset", "method"), EACH_PRESET)
def test_every_preset_gives_the_curve_and_the_weights_of_one_process(few_steps, base_dir, tmp_path, preset, method):
    meant_run, meant = few_steps[method]
    keys = {"lora": LORA} if method == "lora" else {}
    run = make_run(tmp_path, base_dir, tiny_samples(), deepspeed=preset, **FEW, **TWO_RANKS, **keys)
    ended = run.launch()
    assert (meant.exit_code, ended.exit_code) == (0, 0), ended.stderr[-4000:]
    assert len(ended.points) == 6
    assert [point.loss for point in ended.points] == pytest.approx([point.loss for point in meant.points], abs=1e-4)
    got, wanted = weights_of(run.paths.final), weights_of(meant_run.paths.final)
    assert set(got) == set(wanted)
    assert max(float((got[name] - wanted[name]).abs().max()) for name in wanted) < 1e-3  # Adam near a zero gradient


@pytest.mark.parametrize(
    ("preset", "method"),
    [
        ("zero3_offload", "lora"),
        pytest.param("zero2_offload", "lora", marks=pytest.mark.soak),
        pytest.param("zero3_offload", "full", marks=pytest.mark.soak),
    ],
)
def test_what_a_rank_holds_and_what_training_changes(base_dir, tmp_path, preset, method):
    """ZeRO-3 leaves each rank half of the base from the start; ZeRO-2 leaves it whole. LoRA never touches it."""
    keys = {"lora": {"r": 8, "lora_dropout": 0.0}} if method == "lora" else {}
    run = make_run(tmp_path, base_dir, tiny_samples(), deepspeed=preset, warmup_ratio=0, **TWO_RANKS, **keys)
    *argv, module, recipe = train_argv(run.paths.recipe, sys.executable, ranks=2, gpus=None, master_port=free_port())
    assert module == "trainer.train"
    done = subprocess.run(
        [*argv, "tests.ranks_share", recipe, str(tmp_path)],
        cwd=ROOT, env=run.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    adapters = 2 * 7 * 2 if method == "lora" else 0
    for found in ranks:
        base_parameters = sum(found["status"].values()) - adapters
        if preset == "zero2_offload":
            assert found["status"] == {"WHOLE": base_parameters + adapters}
            assert found["held"] == found["whole"]
        else:
            assert found["status"]["NOT_AVAILABLE"] == base_parameters  # cut up: this rank has a shard of each
            assert found["status"].get("WHOLE", 0) == adapters  # small, and cut up when training begins
            assert found["held"] < 0.75 * found["whole"]
        is_adapter = ["lora_" in name for name in found["changed"]]
        assert len(is_adapter) >= (adapters or base_parameters - 1)
        assert all(is_adapter) if method == "lora" else not any(is_adapter)


@pytest.mark.parametrize(
    ("keys", "code", "values"),
    [
        ({"lora": {"target_modules": ["q_proj", "w_pack"]}}, "lora_no_targets", {"names": "w_pack"}),
        ({"lora": {"load_in_4bit": True}}, "method_unsupported", {"method": "lora.load_in_4bit"}),
        ({"use_liger_kernel": True}, "method_unsupported", {"method": "use_liger_kernel"}),
        ({"attn_implementation": "flash_attention_2"}, "method_unsupported", {"reason": "no CUDA GPU"}),
        ({"report_to": ["swanlab"]}, "tracker_missing", {"name": "swanlab"}),
    ],
    ids=["targets", "4bit", "liger", "flash", "tracker"],
)
def test_what_is_refused_before_the_model_is_loaded(base_dir, tmp_path, keys, code, values):
    ended = make_run(tmp_path, base_dir, tiny_samples(), **keys).launch(alone=True)
    (error,) = ended.errors
    assert (error.code, ended.exit_code) == (code, error.exit_code)
    assert values.items() <= error.values.items()
    assert "started" not in ended.events


def test_tensorboard_gets_our_loss(base_dir, tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed: its events were not written")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    keys = {"report_to": ["tensorboard"], "logging_steps": 1}
    run = make_run(tmp_path, base_dir, tiny_samples(), **keys, **FEW, **ALONE)
    ended = run.launch(alone=True)
    assert ended.exit_code == 0, ended.stderr[-4000:]
    events = EventAccumulator(str(Path(run.paths.checkpoints) / "tensorboard")).Reload()
    for tag, losses in {
        "train/loss": [point.loss for point in ended.points],
        "train/loss_soul": [point.extras["loss_soul"] for point in ended.points if "loss_soul" in point.extras],
    }.items():
        assert [scalar.value for scalar in events.Scalars(tag)] == pytest.approx(losses, rel=1e-5)
