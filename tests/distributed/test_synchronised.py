"""Synchronised batch norm: several processes compute what one computes on the whole batch."""

import pytest
import torch
from exact_models import convolutions
from processes import raised, rank, run_in
from runs import doubled
from torch import nn

import shoestring
from shoestring import SGD, Plan, apply
from shoestring.techniques.microbatch.pieces import cut

SHARES = {2: [slice(0, 5), slice(5, 8)], 4: [slice(0, 2), slice(2, 5), slice(5, 6), slice(6, 8)]}
PLANS = {"nothing": Plan(), "shards": Plan(shard="fsdp")}


def task():
    return doubled(convolutions(SGD(lr=0.1, momentum=0.9), nn.BatchNorm2d, examples=8)).with_(sync_batch_norm=True)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def trained(lean, share):
    """Three steps -> losses, parameters and buffers."""
    losses = [float(lean.step(share)) for _ in range(3)]
    return losses, [whole(tensor) for tensor in (*lean.model.parameters(), *lean.model.buffers())]


def in_shares(size):
    found = {
        name: trained(apply(task(), plan), cut(task().batch, SHARES[size][rank()])) for name, plan in PLANS.items()
    }
    refused = raised(lambda: apply(task(), Plan(checkpoint="no-bn")).step(cut(task().batch, SHARES[size][rank()])))
    none = cut(task().batch, slice(0, 0 if rank() else 8))
    return found, refused, raised(lambda: apply(task(), Plan()).step(none))


@pytest.mark.parametrize("size", [2, 4])
def test_several_processes_compute_what_one_does_on_the_whole_batch(size):
    losses, tensors = trained(apply(task(), Plan()), task().batch)
    for found, refused, none in run_in(size, in_shares, size):
        for name, (their_losses, theirs) in found.items():
            assert their_losses == pytest.approx(losses, rel=1e-10), name
            for tensor, wanted in zip(theirs, tensors, strict=True):
                torch.testing.assert_close(tensor, wanted, rtol=1e-9, atol=1e-10)
        assert "checkpoint computes batch norm by its own kernels" in refused[1]
        assert "synchronised batch norm each must have as many" in none[1]


def test_the_statistics_that_are_sent_are_in_the_trace_and_nothing_is_left_behind():
    shared = task().with_(devices=2)
    assert shoestring.profile(shared, calibrate=False).peak_bytes > 0
    assert not [norm for norm in shared.model.modules() if "forward" in vars(norm)]
