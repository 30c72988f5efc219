"""The loss at a vocabulary of 151,936 on the CPU: whole logits, the loss in the head, TRL 1.16's Trainer.

A Qwen2 of four layers, hidden size 256, the embedding as its head, two packed rows of 2,048 tokens, 32 bits, AdamW;
each way is a process of its own and the fastest of its passes counts. Memory is what a process takes above itself
before its first pass. TRL runs on the same torch and transformers (`benchmarks/peers.py`); beside it stands our
whole Trainer, not the bare loop. Says nothing of a GPU, where TRL's loss has a kernel of its own.
"""

from __future__ import annotations

import sys

from benchmarks.measure import Claim, report
from benchmarks.peers import TRL, trl_python
from benchmarks.train_step import run_side

SIZE = "large_vocabulary"
PASSES, PASSES_OF_TRAINERS = 3, 2  # TRL's takes minutes on two cores; the first of each only warms up


def main() -> int:
    python = trl_python()
    whole, head = (run_side(way, SIZE, passes=PASSES) for way in ("whole", "head"))
    ours, trl = (
        run_side(way, SIZE, passes=PASSES_OF_TRAINERS, python=one)
        for way, one in (("ours", sys.executable), ("trl", python))
    )
    apart = max(abs(one - other) for one, other in zip(whole.losses, head.losses, strict=True))
    return report(
        "loss",
        about=(__doc__ or "").strip(),
        packages=("torch", "transformers", "accelerate"),
        claims=[
            Claim("memory above base, of whole logits", head.above_base_mb / whole.above_base_mb, 0.35, at_most=True),
            Claim("time, of whole logits", head.seconds / whole.seconds, 0.75, at_most=True),
            Claim("largest difference of the losses, in nats", apart, 1e-5, at_most=True),
            Claim("TRL's time, of our Trainer's", trl.seconds / ours.seconds, 2.5),
        ],
        numbers=[
            ("whole logits, plain loop", whole.row()),
            ("loss in the head, plain loop", head.row()),
            ("loss in the head, our Trainer", ours.row()),
            (f"{TRL}, SFTTrainer", trl.row()),
            ("losses, whole logits", ", ".join(f"{loss:.6f}" for loss in whole.losses)),
            ("losses, in the head", ", ".join(f"{loss:.6f}" for loss in head.losses)),
            ("losses, our Trainer", ", ".join(f"{loss:.6f}" for loss in ours.losses)),
            ("losses, TRL", ", ".join(f"{loss:.4f}" for loss in trl.losses)),
        ],
    )


if __name__ == "__main__":
    raise SystemExit(main())
