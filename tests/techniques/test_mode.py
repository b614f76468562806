"""The lean mode is shared by techniques: what each turns on, and errors name the setting that asked for it."""

import pytest
import torch
from torch import nn

from shoestring import SGD, Plan, Task, apply
from shoestring.errors import NoEffect, ShoestringError
from shoestring.passes.mode import mode_context
from shoestring.techniques import microbatch

ASKING = {
    "precision fp16": {"precision": "fp16"},
    "precision bf16": {"precision": "bf16"},
    "checkpoint no-bn": {"checkpoint": "no-bn"},
    "checkpoint every-2": {"checkpoint": "every-2"},
    "precision fp16 and checkpoint every-2": {"precision": "fp16", "checkpoint": "every-2"},
}


def a_task():
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Dropout(0.5))
    model = nn.Sequential(*layers, nn.Linear(8 * 12 * 12, 4))
    return Task(model, lambda m, x: m(x).square().mean(), torch.randn(8, 3, 16, 16), SGD(lr=0.1))


@pytest.mark.parametrize("words", ASKING)
def test_masks_that_would_change_nothing_are_refused_with_the_settings_that_save_them_already(words):
    with pytest.raises(NoEffect, match=f"^{words} already saves one bit per element"):
        apply(a_task(), Plan(**ASKING[words], activations="masks"))


@pytest.mark.parametrize("words", [*ASKING, "activations masks"])
def test_simulated_microbatches_are_refused_with_the_settings_that_they_do_not_work_with(words):
    task = apply(a_task(), Plan(**ASKING.get(words, {"activations": "masks"}))).task
    with pytest.raises(ShoestringError, match=f"do not work with {words}: use true microbatches"):
        microbatch.apply(task, microbatch.Settings(4, simulated=True))


@pytest.mark.parametrize(
    "plan, fuses",
    [({"precision": "fp16"}, True), ({"checkpoint": "no-bn"}, True), ({"activations": "masks"}, False),
     ({"checkpoint": "every-2"}, False), ({"precision": "fp16", "checkpoint": "every-2"}, False),
     ({"precision": "fp16", "checkpoint": "no-bn"}, True)],
    ids=str,
)  # fmt: skip
def test_precision_fuses_batch_norm_unless_a_checkpoint_strategy_does_not(plan, fuses):
    context = mode_context(apply(a_task(), Plan(**plan)).task)
    assert context.options.fuse is fuses and context.options.masks
