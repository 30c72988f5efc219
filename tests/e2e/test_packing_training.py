"""Packed rows and the loss in the head, in real trainings: two ZeRO-3 ranks on CPUs, one process, a real small model.

Under ZeRO-3 each rank holds half of every weight, the head's too: a loss that read it outside the head's forward
would see an empty shard, and one whose gradient went past DeepSpeed's hooks would train two different heads.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from corpus_builder.frame import load_frame
from tests.tiny_run import Ended, TinyRun, make_run, tiny_samples, write_base_model
from tests.tokenizers_real import CACHE
from trainer.arguments import load_deepspeed
from trainer.encode import encode_corpus
from trainer.encoded import EncodedSet
from trainer.packing import one_each, pack
from trainer.progress import Event, parse_line

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]
#: Rows of 128 tokens: two or three of the tiny samples in each. Two rows per step over all ranks.
PACKED = {"packing": True, "max_seq_len": 128, "per_device_train_batch_size": 1, "num_train_epochs": 3}


def event_values(ended: Ended, name: str) -> dict[str, str]:
    """Return the values of the first event of that name."""
    items = (item for line in ended.stdout.splitlines() for item in parse_line(line))
    return next(item.values for item in items if isinstance(item, Event) and item.name == name)


@pytest.fixture(scope="module", params=["untied", pytest.param("tied", marks=pytest.mark.soak)])
def base_dir(request, tmp_path_factory) -> Path:
    """The tiny model with a head of its own, and with the embedding as its head."""
    folder = write_base_model(tmp_path_factory.mktemp("base") / "base", tiny_samples())
    if request.param == "tied":
        retie(folder)
    return folder


def retie(folder: Path) -> None:
    """Write the model of a folder again, with one matrix for embedding and head."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, tie_word_embeddings=True)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def every_weight_in_shards(tmp_path_factory) -> str:
    """The usual preset, but that it cuts the smallest weights too: by default a head this small stays whole."""
    preset = load_deepspeed("zero3_offload")
    preset["zero_optimization"] |= {"stage3_param_persistence_threshold": 0, "stage3_model_persistence_threshold": 0}
    path = tmp_path_factory.mktemp("preset") / "shards.json"
    path.write_text(json.dumps(preset))
    return str(path)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, base_dir, every_weight_in_shards) -> tuple[TinyRun, Ended]:
    keys = PACKED | {"gradient_accumulation_steps": 1, "deepspeed": every_weight_in_shards}
    run = make_run(tmp_path_factory.mktemp("two"), base_dir, tiny_samples(), **keys)
    return run, run.launch()


def test_two_ranks_and_one_process_give_the_same_curve(two_ranks, base_dir, tmp_path):
    _, ended = two_ranks
    assert ended.exit_code == 0, ended.stderr[-4000:]
    run = make_run(tmp_path, base_dir, tiny_samples(), gradient_accumulation_steps=2, **PACKED)
    alone = run.launch(alone=True)
    assert alone.exit_code == 0, alone.stderr[-4000:]
    assert len(ended.points) > 10
    assert [point.loss for point in alone.points] == pytest.approx([point.loss for point in ended.points], abs=1e-4)
    assert ended.points[-1].loss < 0.8 * ended.points[0].loss


def test_two_ranks_train_the_weights_that_one_process_trains(two_ranks, base_dir, tmp_path):
    """Every weight, the head's above all; what Adam does with rounding near 0 bounds how near they come."""
    from safetensors.torch import load_file

    run, ended = two_ranks
    assert ended.exit_code == 0, ended.stderr[-4000:]
    alone = make_run(tmp_path, base_dir, tiny_samples(), gradient_accumulation_steps=2, **PACKED)
    assert alone.launch(alone=True).exit_code == 0
    of_two, of_one, before = (load_file(Path(folder) / "model.safetensors") for folder in
                              (run.paths.final, alone.paths.final, base_dir))  # fmt: skip
    assert of_two.keys() == of_one.keys()
    for name, weights in of_one.items():
        moved = (weights - before[name]).norm()
        assert (of_two[name] - weights).norm() <= 0.01 * moved, name


def test_rows_are_packed_and_samples_are_counted(two_ranks, base_dir):
    run, ended = two_ranks
    corpus = encode_corpus(tiny_samples(), load_frame(base_dir), max_seq_len=128).train
    rows = len(pack(corpus.lengths, 128))
    packed = event_values(ended, "packed")
    assert (int(packed["samples"]), int(packed["rows"])) == (len(corpus), rows)
    assert rows < len(corpus)
    # What a line says per second, times the seconds since the last one, is samples and tokens: their ratio is exact.
    tokens_per_sample = [point.extras["tok"] / point.thr for point in ended.points]
    steps = len(ended.points) // run.recipe.num_train_epochs
    assert np.mean(tokens_per_sample) == pytest.approx(corpus.trained_tokens / len(corpus), rel=0.25)
    assert steps == -(-rows // 2)


def test_tokens_per_step_is_kept_with_packed_rows(base_dir, tmp_path):
    """250 tokens per step are 250 tokens of samples, whatever the rows hold: packing takes no steps away."""
    keys = PACKED | {"tokens_per_step": 250, "num_train_epochs": 2}
    run = make_run(tmp_path, base_dir, tiny_samples(), **keys)
    ended = run.launch(alone=True)
    assert ended.exit_code == 0, ended.stderr[-4000:]
    corpus = encode_corpus(tiny_samples(), load_frame(base_dir), max_seq_len=128).train
    steps_per_epoch = int(event_values(ended, "started")["steps"]) / 2
    assert corpus.tokens / steps_per_epoch == pytest.approx(250, rel=0.25)


def test_a_model_that_cannot_keep_samples_apart_trains_unpacked_and_says_so(base_dir, tmp_path):
    config = json.loads((base_dir / "config.json").read_text())
    own = tmp_path / "base"
    own.mkdir()
    for path in base_dir.iterdir():
        (own / path.name).symlink_to(path)
    (own / "config.json").unlink()
    layers = config["num_hidden_layers"]
    config |= {"layer_types": ["chunked_attention"] * layers}
    (own / "config.json").write_text(json.dumps(config))
    run = make_run(tmp_path / "run", own, tiny_samples(), **PACKED | {"num_train_epochs": 1})
    ended = run.launch(alone=True)
    assert "rows are not packed: layers of type chunked_attention" in ended.stdout
    assert "packed" not in ended.events


# --- a real model -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2_dir() -> Path:
    from controller.demo_model import write_demo_model

    return write_demo_model(CACHE / "demo-model")


@pytest.mark.parametrize("is_flat", [pytest.param(False, marks=pytest.mark.soak), True], ids=["padded", "flat"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_samples_of_a_real_model_lose_what_they_lose_alone(smollm2_dir, attention, is_flat):
    import torch

    from trainer.dataset import Collator, Rows
    from trainer.loss import token_losses
    from trainer.model import load_weights

    samples: EncodedSet = encode_corpus(tiny_samples(12), load_frame(smollm2_dir), max_seq_len=256).train
    model = load_weights(smollm2_dir, dtype=torch.float32, attn_implementation=attention).eval()
    packing = pack(samples.lengths, 256)
    assert len(packing) < len(samples)
    alone = Rows(samples, one_each(len(samples)))
    rows = Rows(samples, packing)
    separate = torch.cat(
        [token_losses(model, Collator(0, is_packed=False)([alone[int(index)]]))[0] for index in packing.samples]
    )
    collate = Collator(0, is_packed=True, is_flat=is_flat)
    packed, _, _ = token_losses(model, collate([rows[index] for index in range(len(packing))]))
    assert len(packed) == samples.trained_tokens
    assert (packed - separate).abs().max() <= 5e-5
    assert abs(packed.mean() - separate.mean()) <= 1e-5
