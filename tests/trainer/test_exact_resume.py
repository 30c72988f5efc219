"""DeepSpeed's CPU Adam after a resume: the very steps that an undisturbed run takes, on its own compiled kernel."""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch

from trainer.build_locks import EXTENSIONS_DIR, extensions_dir
from trainer.exact_resume import replay_steps

pytestmark = pytest.mark.e2e
STEPS = 40
GRADIENTS = torch.randn(STEPS, 512, generator=torch.Generator().manual_seed(1))


class Trained:
    """One weight and its Adam; a new compiled half is what a new process would have."""

    def __init__(self) -> None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        self.weight = torch.nn.Parameter(torch.ones(512))
        self.adam = DeepSpeedCPUAdam([self.weight], lr=3e-3)
        self._empty = copy.deepcopy(self.adam.state_dict())

    def new_process(self, weight, state) -> None:
        """Forget what only the compiled half knows."""
        group = self.adam.param_groups[0]
        self.adam.ds_opt_adam.destroy_adam(self.adam.opt_id)
        self.adam.ds_opt_adam.create_adam(
            self.adam.opt_id, group["lr"], *group["betas"], group["eps"], group["weight_decay"], True, False
        )
        self.weight.data.copy_(weight)
        self.adam.load_state_dict(copy.deepcopy(state))

    def train(self, steps, stop_before=()) -> dict:
        """Take steps; return weight and state as they stand before each step of `stop_before`."""
        kept = {}
        for step in steps:
            if step in stop_before:
                kept[step] = self.weight.detach().clone(), copy.deepcopy(self.adam.state_dict())
            self.weight.grad = GRADIENTS[step].clone()
            self.adam.step()
        return kept


@pytest.fixture(scope="module")
def trained():
    patch = pytest.MonkeyPatch()
    patch.setenv("DS_ACCELERATOR", "cpu")
    patch.setenv(EXTENSIONS_DIR, extensions_dir(sys.executable))  # where a setup has built the kernel
    yield Trained()
    patch.undo()


@pytest.mark.parametrize(("is_replayed", "is_exact"), [(True, True), (False, False)])
def test_stopped_before_any_step_it_ends_in_the_same_bits_only_where_its_steps_are_replayed(
    trained, is_replayed, is_exact
):
    trained.new_process(torch.ones(512), trained._empty)
    stopped = trained.train(range(STEPS), stop_before=range(1, STEPS))
    whole = trained.weight.detach().clone()
    ends = []
    for stop, (weight, state) in stopped.items():
        trained.new_process(weight, state)
        if is_replayed:
            assert replay_steps(SimpleNamespace(optimizer=SimpleNamespace(optimizer=trained.adam))) == stop
        trained.train(range(stop, STEPS))
        ends.append(torch.equal(trained.weight, whole))
    assert all(ends) is is_exact  # False, False turns True once DeepSpeed mends it: then `exact_resume` can go


def test_another_optimizer_is_left_alone():
    assert replay_steps(SimpleNamespace(optimizer=torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]))) == 0
