"""What each rank holds of a model, before and after training it; launched by DeepSpeed from tests/e2e.

    deepspeed --module tests.ranks_share recipe.json OUT_FOLDER

Each rank writes `OUT_FOLDER/rank-N.json`: {"status": {ds_status: parameters}, "held": numbers in this rank's memory,
"whole": numbers of the model, "changed": names that training changed, "kept": how many others are equal bit for bit}.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from trainer.arguments import Schedule, join_ranks, training_arguments
from trainer.device import Attention, Device, Precision, find_place
from trainer.request import load_request
from trainer.train import leave

CPU, FP32 = Device("cpu", "cpu"), Precision("fp32", "cpu")


def shares(model: Any) -> dict[str, Any]:
    """Return how parameters lie on this rank; ZeRO-3 leaves a placeholder of size 0 and keeps a shard."""
    status = Counter(getattr(getattr(one, "ds_status", None), "name", "WHOLE") for one in model.parameters())
    shards = [getattr(one, "ds_tensor", None) for one in model.parameters()]
    held = sum(one.numel() for one in model.parameters())
    held += sum(shard.numel() for shard in shards if shard is not None)
    return {
        "status": status,
        "held": held,
        "whole": sum(getattr(one, "ds_numel", one.numel()) for one in model.parameters()),
    }


def gathered(model: Any) -> dict[str, Any]:
    """Return every parameter whole."""
    import deepspeed

    is_cut = any(hasattr(one, "ds_id") for one in model.parameters())
    context = deepspeed.zero.GatheredParameters(list(model.parameters())) if is_cut else nullcontext()
    with context:
        return {name: one.detach().clone() for name, one in model.named_parameters()}


def main(recipe_path: str, out: Path) -> None:
    place, request = find_place(), load_request(Path(recipe_path))
    recipe = request.recipe
    join_ranks(CPU, place)
    schedule = Schedule(recipe, rows=4, tokens=4 * 6, ranks=place.ranks)
    arguments = training_arguments(
        recipe, schedule, output_dir=out / "checkpoints", device=CPU, precision=FP32, place=place
    )
    import torch
    from transformers import Trainer

    from trainer.model import load_model

    base_dir = Path(recipe.base_model_dir)
    model = load_model(
        base_dir, precision=FP32, place=place, attention=Attention("sdpa", "test"), lora=recipe.lora, seed=1
    )
    found = shares(model)
    before = gathered(model)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(24).reshape(4, 6)]
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    after = gathered(model)
    found["changed"] = [name for name in before if not torch.equal(before[name], after[name])]
    found["kept"] = len(before) - len(found["changed"])
    (out / f"rank-{place.rank}.json").write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    os.umask(0o077)
    recipe_path, out = (word for word in sys.argv[1:] if not word.startswith("--local_rank"))
    main(recipe_path, Path(out))
    leave(0)
