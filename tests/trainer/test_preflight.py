"""The preflight's arithmetic, by hand; sizes from real headers; machines from files of their own."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from corpus_builder.errors import ProjectError
from trainer.arguments import PRESETS_DIR, load_deepspeed
from trainer.machine import read_available_bytes, read_cgroup_free_bytes, read_machine
from trainer.pace import find_pace
from trainer.preflight import (
    LIBRARIES_BYTES,
    MAX_LIVE,
    PEAK_TFLOPS,
    Wish,
    activation_bytes,
    advise,
    base_bytes,
    checkpoint_bytes,
    disk_bytes,
    estimate,
    fits,
    layer_bytes_per_token,
    peak_tflops,
    read_zero,
    training_flops,
    with_preset,
)
from trainer.recipe import Lora
from trainer.sizes import ModelSize, read_model_size, read_shapes

HIDDEN, LAYERS, VOCABULARY = 3584, 28, 152_064


def qwen_7b() -> ModelSize:
    """Qwen2.5-7B by its published configuration; biases and norms left out."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qo"}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (512, HIDDEN) for name in "kv"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (18_944, HIDDEN) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (HIDDEN, 18_944)
    return ModelSize(
        shapes=shapes, stored_bytes=0, layers=LAYERS, hidden=HIDDEN, intermediate=18_944, kv=512, vocabulary=VOCABULARY
    )


def wish(**changes) -> Wish:
    size = qwen_7b()
    preset = load_deepspeed("zero3_offload")
    made = Wish(
        size=size, trained=size.parameters, ranks=4, zero=read_zero(preset, hidden=HIDDEN), is_on_gpu=True,
        weight_bytes=2, row_tokens=4096, head_tokens=3000, accumulation=1, checkpointing=True,
    )  # fmt: skip
    return replace(made, **changes)


def part(memory, moment: str, what: str):
    return next(one for one in memory.moments[moment] if one.what == what)


def test_a_7b_model_has_7_6_billion_parameters():
    assert qwen_7b().parameters / 1e9 == pytest.approx(7.615, abs=0.002)


def test_states_of_the_optimizer_lie_on_the_host():
    memory, parameters = estimate(wish()), qwen_7b().parameters
    assert part(memory, "forward", "masters").host_bytes == pytest.approx(4 * parameters)
    assert part(memory, "forward", "optimizer").host_bytes == pytest.approx(8 * parameters)
    assert part(memory, "forward", "weights").device_bytes == pytest.approx(2 * parameters / 4)
    # per rank 1.9e9 gradients: one sub-group of 1e9 and the rest, each pinned block a power of two
    assert part(memory, "forward", "32-bit gradients").host_bytes == 4 * (2**32 + 2**32)
    assert part(memory, "forward", "gradients").host_bytes == 4 * 2**32
    assert part(memory, "save", "weights gathered to be saved").host_bytes == pytest.approx(2 * parameters)


def test_the_seeds_box_holds_the_default_and_not_offloaded_parameters():
    """160 GB of RAM: the default fits with little to spare, parameters offloaded too don't (the seed's box)."""
    there = 160 * 10**9
    memory = estimate(wish())
    assert 0.85 * there < memory.host_bytes < there
    assert memory.gpu_bytes < 32 * 2**30
    params = load_deepspeed("zero3_offload_params")
    assert estimate(with_preset(wish(), params)).host_bytes > there
    assert estimate(with_preset(wish(), params)).gpu_bytes < memory.gpu_bytes


def test_without_offload_the_states_are_the_gpus():
    memory = estimate(with_preset(wish(), load_deepspeed("zero3")))
    assert memory.gpu_bytes > 12 * qwen_7b().parameters / 4
    assert part(memory, "forward", "masters").host_bytes == 0


def test_every_shipped_preset_is_read():
    presets = {path.stem: read_zero(load_deepspeed(path.stem), hidden=64) for path in PRESETS_DIR.glob("*.json")}
    cuts = {name: (one.stage, one.offloads_optimizer, one.offloads_parameters) for name, one in presets.items()}
    assert cuts == {
        "zero2_offload": (2, True, False), "zero3": (3, False, False), "zero3_offload": (3, True, False),
        "zero3_offload_params": (3, True, True),
    }  # fmt: skip
    assert presets["zero3_offload"].reduce_bucket == 64 * 64
    assert presets["zero3_offload"].max_live == MAX_LIVE


def test_activations_with_and_without_recomputation():
    size = qwen_7b()
    whole = LAYERS * 4096 * layer_bytes_per_token(size, 2)
    assert activation_bytes(wish(checkpointing=False)) == whole
    assert activation_bytes(wish()) == pytest.approx(LAYERS * 4096 * HIDDEN * 2 + whole / LAYERS)
    assert activation_bytes(wish(row_tokens=8192)) == 2 * activation_bytes(wish())


def test_logits_in_chunks_do_not_grow_with_the_row():
    chunked = [part(estimate(wish(head_tokens=n)), "forward", "chunk of logits").device_bytes for n in (256, 4096)]
    assert chunked[0] == chunked[1] == 256 * VOCABULARY * 8
    whole = part(estimate(wish(head_tokens=4096, has_head_loss=False)), "forward", "logits")
    assert whole.device_bytes == 4096 * VOCABULARY * 14


def test_one_process_without_deepspeed():
    """16 bytes per parameter and what the CPU's allocator keeps; all of it is host memory."""
    memory = estimate(wish(ranks=1, zero=None, is_on_gpu=False, weight_bytes=4, accumulation=4))
    assert memory.gpu_bytes == 0
    assert memory.host_bytes > 16 * qwen_7b().parameters
    states = part(memory, "step", "weights").device_bytes + part(memory, "step", "optimizer").device_bytes
    assert states == 12 * qwen_7b().parameters


def test_lora_trains_what_it_targets():
    size = qwen_7b()
    per_layer = 2 * (2 * HIDDEN) + 2 * (512 + HIDDEN) + 3 * (18_944 + HIDDEN)
    assert size.trained(Lora(r=8)) == 8 * LAYERS * per_layer
    assert size.trained(Lora(r=8, target_modules=("q_proj",))) == 8 * LAYERS * 2 * HIDDEN
    with_head = size.trained(Lora(r=8, target_modules=("q_proj",), modules_to_save=("lm_head",)))
    assert with_head == 8 * LAYERS * 2 * HIDDEN + VOCABULARY * HIDDEN
    trained = size.trained(Lora())
    assert estimate(wish(trained=trained, has_head_trained=False)).host_bytes < 0.05 * estimate(wish()).host_bytes


def test_merging_takes_a_copy_of_the_base_on_the_host_while_the_ranks_hold_theirs():
    size = replace(qwen_7b(), stored_bytes=15_200_000_000)
    lora = wish(size=size, trained=1000, has_head_trained=False)
    kept, merged = estimate(lora), estimate(replace(lora, is_merged=True))
    copy = size.stored_bytes + 4 * VOCABULARY * HIDDEN + LIBRARIES_BYTES
    gathered = part(kept, "save", "weights gathered to be saved").host_bytes
    states = sum(one.host_bytes for one in kept.moments["save"]) - gathered
    assert merged.host_bytes == pytest.approx(copy + states)
    assert kept.host_bytes < copy
    assert merged.gpu_bytes == kept.gpu_bytes
    on_cpu = replace(lora, is_on_gpu=False, is_merged=True)
    assert estimate(on_cpu).host_bytes > estimate(replace(on_cpu, is_merged=False)).host_bytes
    free = {"gpu_free_bytes": None, "host_free_bytes": 8 << 30}
    assert advise(replace(lora, is_merged=True), {}, **free) == "lora.merge: false"
    assert advise(lora, {}, **free) != "lora.merge: false"


def test_a_base_in_4_bits_takes_a_third():
    """15.2 GB in halves; 6.5e9 of 7.6e9 parameters are linear maps, the tables stay."""
    whole = wish(trained=1000, has_head_trained=False)
    assert base_bytes(whole) == 2 * qwen_7b().parameters
    assert base_bytes(replace(whole, is_4bit=True)) == pytest.approx(5.55e9, rel=0.01)
    assert estimate(replace(whole, is_4bit=True)).gpu_bytes < estimate(whole).gpu_bytes


def test_disk():
    parameters = qwen_7b().parameters
    assert checkpoint_bytes(wish()) == 14 * parameters  # 106 GB, as the seed's checkpoints are
    kept = {"is_model_only": False, "has_best": False, "is_merged": False}
    assert disk_bytes(wish(), kept=3, **kept) == 4 * 14 * parameters + 2 * parameters
    assert disk_bytes(wish(), kept=3, **{**kept, "has_best": True}) == 5 * 14 * parameters + 2 * parameters
    assert disk_bytes(wish(), kept=3, **{**kept, "is_model_only": True}) == 5 * 2 * parameters
    lora = wish(trained=1000)
    assert disk_bytes(lora, kept=1, **kept) == 2 * 14_000 + 2000
    assert disk_bytes(lora, kept=1, **{**kept, "is_merged": True}) == 2 * 14_000 + 2000 + 2 * parameters


@pytest.mark.parametrize(
    ("gpu_gib", "host_gib", "kind"), [(None, 999, None), (32, 149, None), (4, 999, "gpu"), (32, 64, "host")]
)
def test_what_is_too_small(gpu_gib, host_gib, kind):
    gpu = None if gpu_gib is None else gpu_gib * 2**30
    assert fits(estimate(wish()), gpu_free_bytes=gpu, host_free_bytes=host_gib * 2**30) == kind


def advice(asked: Wish, gpu_gib: float, host_gib: float) -> str:
    names = ("zero3", "zero3_offload_params")
    presets = {name: load_deepspeed(name) for name in names}
    return advise(asked, presets, gpu_free_bytes=int(gpu_gib * 2**30), host_free_bytes=int(host_gib * 2**30))


def test_the_least_change_that_fits_is_proposed():
    need = estimate(wish()).gpu_bytes / 2**30
    assert advice(wish(), need - 1, 999) == "deepspeed: zero3_offload_params"
    assert advice(wish(), 80, 64) == "deepspeed: zero3"
    assert advice(wish(checkpointing=False), need + 1, 999) == "gradient_checkpointing: true"
    half = estimate(wish(row_tokens=32_768)).gpu_bytes / 2**30
    assert advice(wish(row_tokens=65_536), half + 0.1, 150).startswith("max_seq_len")
    assert advice(wish(), 2, 8) == "lora:"


def test_operations_and_peaks():
    parameters = qwen_7b().parameters
    assert training_flops(wish(checkpointing=False), 10) == 60.0 * parameters
    assert training_flops(wish(), 10) == 80.0 * parameters
    assert training_flops(wish(trained=0, checkpointing=False), 10) == 40.0 * parameters
    assert peak_tflops("Tesla V100-SXM2-32GB") == PEAK_TFLOPS["V100"]
    assert peak_tflops("NVIDIA H200") == PEAK_TFLOPS["H200"]
    assert peak_tflops("NVIDIA A100-SXM4-80GB") == PEAK_TFLOPS["A100"]
    assert peak_tflops("GRID K520") is None


# --- sizes


def test_a_real_model_counted_by_its_headers(tiny_dir):
    from transformers import AutoModelForCausalLM

    size = read_model_size(tiny_dir)
    model = AutoModelForCausalLM.from_pretrained(tiny_dir)
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert size.stored_bytes == (tiny_dir / "model.safetensors").stat().st_size
    assert (size.layers, size.hidden, size.intermediate, size.kv) == (2, 64, 128, 32)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT's own call
def test_lora_is_counted_as_peft_counts(tiny_dir):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_dir)
    peft = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    trained, _ = peft.get_nb_trainable_parameters()
    assert read_model_size(tiny_dir).trained(Lora(r=4)) == trained


def test_a_shared_head_counts_once(tiny_dir, tmp_path):
    folder = shutil.copytree(tiny_dir, tmp_path / "tied")
    config = json.loads((folder / "config.json").read_text())
    whole = read_model_size(folder)
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert whole.parameters - read_model_size(folder).parameters == 64 * config["vocab_size"]


def test_pickled_weights_are_counted_by_the_config(tiny_dir, tmp_path):
    folder = shutil.copytree(tiny_dir, tmp_path / "pickled")
    exact = read_model_size(folder).parameters
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert read_model_size(folder).parameters == pytest.approx(exact, rel=0.02)  # biases are not in the config


def test_a_model_of_another_family_is_unknown(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "rwkv", "num_hidden_layers": 4}')
    assert read_model_size(tmp_path) is None


def test_a_broken_header_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\x05\x00\x00\x00\x00\x00\x00\x00{nope")
    with pytest.raises(ProjectError, match="base_model_incomplete"):
        read_shapes(tmp_path / "model.safetensors")


# --- machine


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = "MemTotal:       164929536 kB\nMemFree:        1000 kB\nMemAvailable:   157286400 kB\n"
STAT = "anon 1\ninactive_file 1073741824\n"


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n",
          "sys/fs/cgroup/memory.stat": STAT}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{8 << 30}\n",
          "sys/fs/cgroup/memory.current": f"{3 << 30}\n", "sys/fs/cgroup/memory.stat": STAT}, 6 << 30),
        # version 2: the limit of a group around ours counts
        ({"proc/self/cgroup": "0::/pod/job\n", "sys/fs/cgroup/pod/memory.max": f"{8 << 30}\n",
          "sys/fs/cgroup/pod/memory.current": f"{7 << 30}\n", "sys/fs/cgroup/pod/memory.stat": "inactive_file 0\n",
          "sys/fs/cgroup/pod/job/memory.max": "max\n", "sys/fs/cgroup/pod/job/memory.current": "1\n",
          "sys/fs/cgroup/pod/job/memory.stat": STAT}, 1 << 30),
        # version 1
        ({"proc/self/cgroup": "4:memory:/docker/x\n3:cpu:/docker/x\n",
          "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 << 30}\n",
          "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{1 << 30}\n",
          "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n"}, 3 << 30),
        ({"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
          "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n", "sys/fs/cgroup/memory/memory.stat": ""}, None),
    ],
)  # fmt: skip
def test_limits_of_control_groups(tmp_path, files, left):
    assert read_cgroup_free_bytes(write(tmp_path, files)) == left


def test_the_lower_of_ram_and_limit_counts(tmp_path):
    root = write(tmp_path, {"proc/meminfo": MEMINFO})
    assert read_available_bytes(root / "proc/meminfo") == 157_286_400 * 1024
    machine = read_machine(tmp_path / "not" / "there", root=root)
    assert (machine.host_free_bytes, machine.host_limit_by) == (157_286_400 * 1024, "ram")
    assert machine.shm_free_bytes is None
    write(root, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{8 << 30}\n",
                 "sys/fs/cgroup/memory.current": "0\n", "sys/fs/cgroup/memory.stat": ""})  # fmt: skip
    machine = read_machine(tmp_path, root=root)
    assert (machine.host_free_bytes, machine.host_limit_by) == (8 << 30, "cgroup")


def test_this_machine_is_read():
    machine = read_machine(Path("/nowhere/at/all"))
    assert machine.host_free_bytes > 0 < machine.disk_free_bytes


# --- pace


def test_minutes_come_from_an_earlier_run_of_the_same_work(tmp_path, tiny_dir):
    from tests.tiny_run import make_run, tiny_samples
    from trainer.request import load_request
    from trainer.run_paths import run_paths

    run = make_run(tmp_path, tiny_dir, tiny_samples())
    request = load_request(Path(run.paths.recipe))
    assert find_pace(request, None, None, tokens=10, steps=30).minutes is None
    for run_id, learning_rate, sequence, step_s in (
        ("20250101-000000-aaaa", 0.5, 256, 2.0),
        ("20250102-000000-aaaa", 0.5, 512, 9.0),
    ):
        earlier = run_paths(str(tmp_path), run.recipe.version, run_id)
        recipe = run.recipe.model_dump(mode="json") | {"learning_rate": learning_rate, "max_seq_len": sequence}
        write(
            Path(earlier.folder),
            {"recipe.json": json.dumps({"recipe": recipe}), "state.json": json.dumps({"step_s": step_s})},
        )
    pace = find_pace(request, None, None, tokens=10, steps=30)
    assert (pace.minutes, pace.basis) == (1.0, "measured")
    assert "20250101-000000-aaaa" in pace.said


def test_else_from_the_gpus_peak_and_an_assumption_that_is_said(tmp_path, tiny_dir):
    from tests.tiny_run import make_run, tiny_samples
    from trainer.request import load_request

    request = load_request(Path(make_run(tmp_path, tiny_dir, tiny_samples(), num_train_epochs=1).paths.recipe))
    pace = find_pace(request, {"name": "Tesla V100-SXM2-32GB"}, wish(), tokens=1_000_000, steps=30)
    expected_s = training_flops(wish(), 1_000_000) / (4 * 125e12 * 0.3)
    assert pace.minutes == pytest.approx(expected_s / 60)
    assert (pace.basis, "30%" in pace.said) == ("assumed", True)
    assert find_pace(request, {"name": "unheard of"}, wish(), tokens=1, steps=1).basis == "unknown"
