"""The paper's rules against every figure that it prints, and what they refuse."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoestring.errors import ShoestringError
from shoestring.models import builtin
from shoestring.paper import paper_profile
from shoestring.task import SGD, Adam, Task

STARRED = {"precision": "fp16", "checkpoint": "residual-2*"}


def megabytes(size: int, digits: int) -> float:
    return round(size / 1e6, digits)


# -- Table 3 and Figure 5: WRN-28-2 on CIFAR-10 -------------------------------------------------------------


def test_baseline_of_wrn_28_2_is_the_papers_404_8_megabytes():
    profile = paper_profile("wrn-28-2", batch=100)
    assert megabytes(profile.model_bytes, 3) == 5.842
    assert megabytes(profile.optimizer_bytes, 3) == 11.684
    assert megabytes(profile.forward_bytes, 3) == 384.000
    assert megabytes(profile.backward_bytes, 3) == 3.277
    assert megabytes(profile.peak_bytes, 3) == 404.802
    assert (profile.peak.module, profile.peak.operation) == ("", "relu")


@pytest.mark.parametrize(
    ("nonzero", "microbatch", "printed", "exact"),
    [
        (100, 100, 42.6, 42.598),
        (100, 10, 12.2, 12.185),
        (30, 10, 6.7, 6.672),
        (20, 10, 5.6, 5.608),
        (20, 4, 3.6, 3.581),
        (10, 4, 2.5, 2.517),
    ],
)
def test_every_row_of_table_3(nonzero, microbatch, printed, exact):
    profile = paper_profile("wrn-28-2", batch=100, nonzero=nonzero, microbatch=microbatch, **STARRED)
    assert megabytes(profile.peak_bytes, 1) == printed
    assert megabytes(profile.peak_bytes, 3) == exact


def test_reduction_of_each_part_at_30_percent_and_microbatches_of_10():
    whole = paper_profile("wrn-28-2", batch=100)
    lean = paper_profile("wrn-28-2", batch=100, nonzero=30, microbatch=10, **STARRED)
    assert round(whole.activation_bytes / lean.activation_bytes, 1) == 114.6
    assert round(whole.model_bytes / lean.model_bytes, 2) == 3.93
    assert round(whole.optimizer_bytes / lean.optimizer_bytes, 2) == 6.47


@pytest.mark.parametrize(
    ("checkpoint", "activations", "more_flops"),
    [
        ("none", 387.28, 0),
        ("no-bn", 194.66, 0.11),
        ("residual-1", 103.01, 15.6),
        ("residual-1*", 99.64, 15.7),
        ("residual-2", 120.83, 24.4),
        ("residual-2*", 67.17, 31.1),
        ("every-10", 126.98, 30.5),
    ],
)
def test_every_checkpoint_strategy(checkpoint, activations, more_flops):
    profile = paper_profile("wrn-28-2", batch=100, checkpoint=checkpoint)
    assert megabytes(profile.activation_bytes, 2) == activations
    percent = 100 * (profile.flops["ratio"] - 1)
    assert round(percent, 1 if more_flops > 1 else 2) == more_flops


def test_peak_of_residual_2_star_is_at_the_second_convolution_of_block_4():
    profile = paper_profile("wrn-28-2", batch=1, **STARRED)
    assert profile.activation_bytes == (3072 + 5 * 32768) * 2 + 32768 // 8 == 337_920
    assert profile.peak.module == "blocks.3.conv2"


# -- Table 4: the Transformer on IWSLT'14 -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nonzero", "precision", "printed"),
    [
        (100, "fp32", 662), (100, "fp16", 331), (50, "fp32", 380), (50, "fp16", 201),
        (40, "fp32", 315), (40, "fp16", 166), (30, "fp32", 249), (30, "fp16", 131),
    ],
)  # fmt: skip
def test_every_row_of_table_4(nonzero, precision, printed):
    profile = paper_profile(
        "dynamicconv-iwslt",
        tokens=4000,
        microbatch=250,
        nonzero=nonzero,
        precision=precision,
        checkpoint="residual-1",
    )
    assert megabytes(profile.peak_bytes, 0) == printed


def test_baseline_of_the_transformer_is_the_papers_2896_megabytes_within_half_a_percent():
    assert paper_profile("dynamicconv-iwslt", tokens=4000).peak_bytes == pytest.approx(2896e6, rel=0.005)


def test_residual_1_costs_the_transformer_30_percent_more_flops():
    profile = paper_profile("dynamicconv-iwslt", tokens=4000, checkpoint="residual-1")
    assert 100 * (profile.flops["ratio"] - 1) == pytest.approx(29.7, rel=0.005)


def test_the_transformer_keeps_13_layer_outputs_and_three_tensors_of_the_vocabulary_with_residual_1():
    profile = paper_profile("dynamicconv-iwslt", tokens=250, checkpoint="residual-1")
    ids = 2 * 8  # a source and a target id, 8 bytes each
    assert profile.activation_bytes == 250 * (4 * (13 * 512 + 3 * 6632) + ids)


def test_the_transformers_dense_model_and_adam_are_four_times_its_parameters_and_position_tables():
    profile = paper_profile("dynamicconv-iwslt", tokens=250)
    tables = 2 * 1024 * 512
    assert profile.model_bytes + profile.optimizer_bytes == 4 * 4 * (38_685_184 + tables)


# -- other settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", ["none", "residual-2*", "every-7"])
def test_a_smaller_microbatch_never_takes_more_memory(checkpoint):
    sizes = [
        paper_profile("wrn-16-2", batch=100, microbatch=microbatch, checkpoint=checkpoint).peak_bytes
        for microbatch in (1, 2, 7, 50, 100)
    ]
    assert sizes == sorted(sizes)


def test_a_smaller_microbatch_of_tokens_never_takes_more_memory():
    sizes = [
        paper_profile("dynamicconv-iwslt", tokens=1000, microbatch=microbatch).peak_bytes
        for microbatch in (10, 250, 999)
    ]
    assert sizes == sorted(sizes)


def test_microbatches_leave_flops_alone():
    whole, split = (paper_profile("wrn-10-1", batch=100, microbatch=m).flops for m in (100, 4))
    assert whole == split
    assert whole["forward"] == 10 * paper_profile("wrn-10-1", batch=10).flops["forward"]


def test_fewer_nonzeros_take_less_memory_even_with_their_index():
    sizes = [paper_profile("wrn-28-2", batch=1, nonzero=n).model_bytes for n in (5, 10, 20, 50, 100)]
    assert sizes == sorted(sizes)


def test_a_fully_dense_weight_has_no_index():
    dense, all_but_dense = (paper_profile("wrn-10-1", batch=1, nonzero=n).model_bytes for n in (100, 99.999))
    assert dense < all_but_dense


def test_a_users_task_is_counted_with_its_own_batch():
    task = builtin("wrn-10-1", batch=6)
    assert paper_profile(task).to_json() == paper_profile("wrn-10-1", batch=6).to_json()


class Block(nn.Module):
    """A WideResNet's block as people write it: ReLUs in place, the shortcut first, added in place."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.extra, self.stride = c_out - c_in, stride
        self.branch = nn.Sequential(
            *(nn.BatchNorm2d(c_in), nn.ReLU(inplace=True), nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)),
            *(nn.BatchNorm2d(c_out), nn.ReLU(inplace=True), nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)),
        )

    def forward(self, x):
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))
        out = self.branch(x)
        out += shortcut
        return out


@pytest.mark.parametrize("checkpoint", ["none", "no-bn", "every-5", "residual-1", "residual-2*"])
def test_a_wide_resnet_that_a_user_wrote_has_the_same_counts(checkpoint):
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False),
        nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)),
        *(
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        ),
        nn.LogSoftmax(dim=1),
    )
    batch = (torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64))
    task = Task(model, lambda model, batch: F.nll_loss(model(batch[0]), batch[1]), batch, SGD(momentum=0.9))
    theirs, ours = (paper_profile(m, batch=100, nonzero=30, checkpoint=checkpoint) for m in (task, "wrn-10-1"))
    assert theirs.bytes_by_category == ours.bytes_by_category
    assert theirs.flops == ours.flops


def test_what_does_not_lead_to_the_loss_is_not_counted():
    task = builtin("wrn-10-1", batch=4)

    def loss_and_more(model, batch):
        model(batch[0])
        loss = task.loss(model, batch)
        model(batch[0]).mean()
        return loss

    assert paper_profile(task.with_(loss=loss_and_more)).to_json() == paper_profile(task).to_json()


def test_a_users_model_with_projections_and_a_relu_after_the_addition_has_its_blocks_found():
    profile = paper_profile("resnet18", batch=10, checkpoint="residual-1")
    assert profile.peak_bytes < paper_profile("resnet18", batch=10).peak_bytes


def test_plain_sgd_has_gradients_and_no_state():
    task = builtin("wrn-10-1", batch=2)
    plain, momentum, adam = (
        paper_profile(task.with_(optimizer=optimizer)) for optimizer in (SGD(), SGD(momentum=0.9), Adam())
    )
    assert plain.optimizer_bytes == plain.model_bytes
    assert (momentum.optimizer_bytes, adam.optimizer_bytes) == (2 * plain.model_bytes, 3 * plain.model_bytes)


def test_profiling_leaves_the_model_as_it_was():
    task = builtin("wrn-10-1", batch=2)
    before = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    paper_profile(task)
    after = task.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in task.model.modules())


# -- JSON --------------------------------------------------------------------------------------------------


def test_json_has_the_shape_of_a_profile_and_its_sums_agree():
    profile = paper_profile("wrn-28-2", batch=100, nonzero=30, microbatch=10, **STARRED)
    data = json.loads(json.dumps(profile.to_json()))
    assert data["rules"] == "paper"
    assert data["task"] == "wrn-28-2"
    assert data["settings"] == {
        "batch": 100,
        "nonzero": 30,
        "precision": "fp16",
        "microbatch": 10,
        "checkpoint": "residual-2*",
    }
    parts = data["bytes"]
    assert parts["workspace"] == 0
    assert parts["total"] == parts["model"] + parts["optimizer"] + parts["activations"]
    assert parts["total"] == data["peak"]["bytes"] == sum(data["by_category"].values())
    assert parts["total"] == sum(row["bytes"] for row in data["by_module"])
    assert data["peak"]["phase"] == "backward"
    assert set(data["flops"]) == {"forward", "backward", "recompute", "ratio"}
    assert max(profile.ledger.timeline()) == parts["total"]


# -- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"checkpoint": "residual"}, r"no checkpoint strategy 'residual': use one of none, no-bn, every-M"),
        ({"checkpoint": "every-0"}, "no checkpoint strategy 'every-0'"),
        ({"checkpoint": "every-3*"}, r"no checkpoint strategy 'every-3\*'"),
        ({"checkpoint": "none\n"}, "no checkpoint strategy"),
        ({"nonzero": 0}, "nonzero 0 is out of range: give a percentage above 0 and up to 100"),
        ({"nonzero": 100.5}, "nonzero 100.5 is out of range"),
        ({"nonzero": float("nan")}, "nonzero nan is out of range"),
        ({"precision": "bf16"}, "no precision 'bf16': use fp32 or fp16"),
        ({"microbatch": 0}, r"microbatch 0 is out of range: give 1 to 8"),
        ({"microbatch": 9}, r"microbatch 9 is out of range: give 1 to 8"),
        ({"batch": 0}, "batch 0 is out of range"),
        ({"tokens": 100}, "wrn-10-1 has no option 'tokens'"),
    ],
)
def test_settings_that_do_not_exist_are_refused_in_one_line(settings, message):
    with pytest.raises(ShoestringError, match=message) as refusal:
        paper_profile("wrn-10-1", **{"batch": 8} | settings)
    assert "\n" not in str(refusal.value)


def test_a_model_with_an_operation_that_the_rules_do_not_know_is_refused():
    with pytest.raises(ShoestringError, match=r"rules do not count torch\.cat, which the model calls"):
        paper_profile("vit-tiny", batch=2)


def test_residual_strategies_need_residual_blocks():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    batch = (torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64))
    task = Task(model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), batch, SGD())
    assert paper_profile(task, checkpoint="every-2").peak_bytes > 0
    with pytest.raises(ShoestringError, match="no residual blocks"):
        paper_profile(task, checkpoint="residual-1")


def test_a_loss_that_depends_on_no_parameter_is_refused():
    task = builtin("wrn-10-1", batch=2).with_(loss=lambda model, batch: batch[0].mean())
    with pytest.raises(ShoestringError, match="depends on no parameter"):
        paper_profile(task)


def test_an_optimizer_that_the_rules_do_not_know_is_refused():
    task = builtin("wrn-10-1", batch=2).with_(optimizer=lambda parameters: torch.optim.RMSprop(parameters))
    with pytest.raises(ShoestringError, match=r"give the task SGD\(...\) or Adam\(...\)"):
        paper_profile(task)
