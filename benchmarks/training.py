"""Training on the CPU, Trainer against Trainer: ours packed, Hugging Face's one document per micro-batch.

The same documents, model, optimizer and passes; the fastest pass of each counts. `large_vocabulary`: a Qwen2 of four
layers with 151,936 words. `smollm2`: SmolLM2-135M's shape, random weights. The gain is the loss's, not packing's: on a
CPU a row without padding is as good as a packed one.
"""

from __future__ import annotations

from benchmarks.measure import Claim, report
from benchmarks.train_step import Side, run_side

ROUNDS = {"large_vocabulary": 1, "smollm2": 2}
PASSES = 3


def fastest(size: str) -> tuple[Side, Side]:
    """Return our side and Hugging Face's, each the fastest of its rounds, which take turns."""
    rounds = [[run_side(way, size, passes=PASSES) for way in ("ours", "huggingface")] for _ in range(ROUNDS[size])]
    ours, theirs = (min(sides, key=lambda side: side.seconds) for sides in zip(*rounds, strict=True))
    return ours, theirs


def main() -> int:
    large, small = fastest("large_vocabulary"), fastest("smollm2")
    return report(
        "training",
        about=(__doc__ or "").strip(),
        packages=("torch", "transformers", "accelerate"),
        claims=[
            Claim("speed of Hugging Face's, V = 151,936", large[1].seconds / large[0].seconds, 1.4),
            Claim("time of Hugging Face's, SmolLM2's shape", small[0].seconds / small[1].seconds, 1.05, at_most=True),
            Claim(
                "largest difference of the losses, in nats",
                max(
                    abs(one - other)
                    for sides in (large, small)
                    for one, other in zip(sides[0].losses, sides[1].losses, strict=True)
                ),
                1e-3,
                at_most=True,
            ),
        ],
        numbers=[
            ("V = 151,936, ours", large[0].row()),
            ("V = 151,936, Hugging Face", large[1].row()),
            ("SmolLM2's shape, ours", small[0].row()),
            ("SmolLM2's shape, Hugging Face", small[1].row()),
        ],
    )


if __name__ == "__main__":
    raise SystemExit(main())
