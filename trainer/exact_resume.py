"""What DeepSpeed forgets at a resume, given back. Side effects: changes the optimizer's inner state.

Its CPU Adam holds beta ** t as a 32-bit product, multiplied once per step. After a load it takes `pow(beta, t)` instead
(0.19, csrc/includes/cpu_adam.h, IncrementStep), which may be another last bit; in 1 - beta2 ** t that is 1e-5 of the
early steps' length. Seen: 4.8e-7 of a weight at most after 40 steps and one stop (tests/trainer/test_exact_resume.py,
its steps not replayed), 3.8e-6 after 24 steps of two ranks and two kills.
"""

from __future__ import annotations

from typing import Any

import torch


def replay_steps(engine: Any) -> int:
    """Have a DeepSpeed engine's CPU Adam count its loaded steps one by one, on nothing; return how many.

    0 where another optimizer works, or none was loaded. A step takes about a microsecond.
    """
    adam = getattr(engine.optimizer, "optimizer", None)
    if adam is None or not hasattr(adam, "ds_opt_adam"):
        return 0
    done = max((int(state["step"]) for state in adam.state.values() if "step" in state), default=0)
    group, nothing = adam.param_groups[0], torch.empty(0)
    (beta1, beta2), (eps, decay) = group["betas"], (group["eps"], group["weight_decay"])
    for step in range(1, done + 1):
        adam.ds_opt_adam.adam_update(
            adam.opt_id, step, group["lr"], beta1, beta2, eps, decay, group["bias_correction"], *[nothing] * 4
        )
    return done
