"""Merges an adapter into its base model and proves it: `python -m trainer.merge REQUEST.json`.

    REQUEST = {"base_model_dir": str, "adapter_dir": str, "out_dir": str, "probe": [token ids], "result": path}
    result  = {"difference": float, "adapter": float, "tolerance": float, "dtype": str}

On the CPU, in a process of its own: in the trainer's, transformers would cut the model up for ZeRO-3's ranks. It takes
one copy of the model, in the type that the base is stored in; a base that was trained in 4 bits (QLoRA) is merged
whole. Logits are compared between base with adapter, before, and the written folder, opened anew, after; the probe is
best a trained sample, where the adapter does most.

Side effects: reads both folders; writes model files to `out_dir`, without a tokenizer, and `result`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corpus_builder.errors import ProjectError, format_error_line, parse_error_line
from corpus_builder.frame import load_frame
from trainer.base_model import check_base_model
from trainer.final import keep_base_config, stop_at_turn_end

if TYPE_CHECKING:
    from torch import Tensor

#: How far the merged model may be from base and adapter, as `distance`, by the type of its weights. Merging rounds
#: each weight, a relative error of up to u = 2**-8 (bf16), 2**-11 (fp16), 2**-24 (fp32); how much of it reaches the
#: logits depends on depth and scale. Measured with random Qwen2 models of 2 to 28 layers and adapters on all linear
#: layers: 0.4 to 2.5 u in 16 bits at transformers' own initialisation (std 0.02), up to 26 u at five times that;
#: 4 to 23 u and up to 400 u in 32 bits, where the order of additions counts; SmolLM2-135M after 12 steps on the probe:
#: 13 u in bf16 (0.05, where the adapter does 0.35), 2 to 4 u in fp16. The limits are 32 u and 1,700 u. A merge
#: with a wrong scale, or a lost adapter, is as far off as the adapter itself: 0.04 and more in the same models.
TOLERANCE = {"bfloat16": 0.125, "float16": 0.016, "float32": 1e-4}
PROBE_TOKENS = 256  # enough to hold an answer; seconds of a large model on a CPU
#: Variables by which a launcher, accelerate or DeepSpeed tells a process that it is one rank of several.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CROSS_RANK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What the comparison found: distances of logits on the probe.

    Attributes:
        difference: of the merged model from base and adapter.
        adapter: of base and adapter from the base alone: what there was to lose.
        tolerance: the largest `difference` that rounding explains.
        dtype: of the merged weights, torch's name.
    """

    difference: float
    adapter: float
    tolerance: float
    dtype: str

    @property
    def is_faithful(self) -> bool:
        """Whether rounding explains the difference, and it leaves at least half of what the adapter does.

        An adapter that moves the base by little more than one rounding is lost in it, which no fixed limit would see.
        """
        return self.difference <= min(self.tolerance, self.adapter / 2)


def merge_adapter(
    base_model_dir: Path, adapter_dir: Path, out_dir: Path, *, probe_ids: Sequence[int], **save_arguments: Any
) -> Merged:
    """Write the base with the adapter merged in to `out_dir`, in the type that the base is stored in.

    Args:
        probe_ids: Token ids to compare logits on.
        save_arguments: Of transformers' `save_pretrained`.

    Raises:
        ProjectError: `merge_differs`: the written model answers otherwise; its files stay for a look.
    """
    import torch
    from peft import PeftModel

    from trainer.model import load_weights

    probe = torch.tensor([list(probe_ids)])
    base = load_weights(base_model_dir, dtype="auto")
    of_base = centred_logits(base, probe)
    model = PeftModel.from_pretrained(base, str(adapter_dir))
    before = centred_logits(model, probe)
    merged = model.merge_and_unload(safe_merge=True)
    untie_what_differs(merged)
    stop_at_turn_end(merged, load_frame(base_model_dir))
    merged.save_pretrained(str(out_dir), **save_arguments)
    keep_base_config(base_model_dir, out_dir)
    del base, model, merged

    written = load_weights(out_dir, dtype="auto")
    dtype = str(written.dtype).removeprefix("torch.")
    found = Merged(
        difference=distance(centred_logits(written, probe), before),
        adapter=distance(before, of_base),
        tolerance=TOLERANCE.get(dtype, TOLERANCE["float32"]),
        dtype=dtype,
    )
    if not found.is_faithful:
        raise ProjectError("merge_differs", difference=f"{found.difference:.2g}", path=str(adapter_dir))
    return found


def centred_logits(model: Any, probe: Tensor) -> Tensor:
    """Return the logits (T, V) of a probe (1, T) less each position's mean, which probabilities ignore.

    Computed in 32 bits whatever the weights have: 16 would add more noise than merging (measured: 2 to 3 times).
    """
    import torch

    model.eval()
    with torch.no_grad(), weights_in_32_bits(model):
        logits: Tensor = model(input_ids=probe, use_cache=False).logits[0]
    return logits - logits.mean(dim=-1, keepdim=True)


@contextmanager
def weights_in_32_bits(model: Any) -> Iterator[None]:
    """Have each module's own weights in 32 bits while it runs, and only then: one module's at a time in memory."""
    kept: dict[int, Any] = {}

    def widen(module: Any, _: Any) -> None:
        for parameter in module.parameters(recurse=False):
            kept[id(parameter)] = parameter.data
            parameter.data = parameter.data.float()

    def narrow(module: Any, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = kept.pop(id(parameter))

    handles = [module.register_forward_pre_hook(widen) for module in model.modules()]
    handles += [module.register_forward_hook(narrow) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def distance(one: Tensor, other: Tensor) -> float:
    """Return how far `one` is from `other`, relative to `other`'s size; infinite where either is not finite."""
    found = float((one - other).norm() / other.norm())
    return found if found == found else float("inf")


def untie_what_differs(model: Any) -> None:
    """Have the configuration say that input and output embeddings are two, where merging made them two.

    A model with tied embeddings of which one was trained would else be written as one of them, and opened as both.
    PEFT 0.21 does the same; the versions before it that we take may not.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if model.config.tie_word_embeddings and head.weight is not embedding.weight:
        model.config.tie_word_embeddings = False


def run_merge(base_model_dir: Path, adapter_dir: Path, out_dir: Path, *, probe_ids: Sequence[int]) -> Merged:
    """Return what `merge_adapter` found, in a child process that knows of no GPU and no other rank.

    Raises:
        ProjectError: the child's own; `final_incomplete`: it ended without a word, as when memory runs out.
    """
    with tempfile.TemporaryDirectory() as folder:
        request, result = Path(folder, "request.json"), Path(folder, "result.json")
        places = {"base_model_dir": base_model_dir, "adapter_dir": adapter_dir, "out_dir": out_dir, "result": result}
        asked = {name: str(path.absolute()) for name, path in places.items()}
        probe = [int(token) for token in probe_ids[:PROBE_TOKENS]]
        request.write_text(json.dumps({**asked, "probe": probe}), "utf-8")  # 0700: it holds a sample
        child = subprocess.run(
            [sys.executable, "-m", "trainer.merge", str(request)],
            env=child_environment(os.environ), stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        sys.stderr.write("".join(line for line in child.stderr.splitlines(keepends=True) if not parse_error_line(line)))
        if child.returncode == 0:
            return Merged(**json.loads(result.read_text("utf-8")))
    errors = [error for line in child.stderr.splitlines() if (error := parse_error_line(line)) is not None]
    if errors:
        raise errors[-1]
    raise ProjectError("final_incomplete", path=str(out_dir), missing=f"merge (exit {child.returncode})")


def child_environment(environment: Any) -> dict[str, str]:
    """Return an environment in which a process is alone and on the CPU, with all cores."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in (*RANK_VARIABLES, "OMP_NUM_THREADS") and not name.startswith("ACCELERATE_")
    }
    return kept | {"CUDA_VISIBLE_DEVICES": ""}


def main(argv: Sequence[str]) -> int:
    """Merge as a request file says."""
    os.umask(0o077)
    (request_path,) = argv
    try:
        asked = json.loads(Path(request_path).read_text("utf-8"))
        check_base_model(asked["base_model_dir"])
        found = merge_adapter(
            Path(asked["base_model_dir"]),
            Path(asked["adapter_dir"]),
            Path(asked["out_dir"]),
            probe_ids=asked["probe"],
        )
    except ProjectError as error:
        print(format_error_line(error), file=sys.stderr, flush=True)
        return error.exit_code
    Path(asked["result"]).write_text(json.dumps(asdict(found)), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
