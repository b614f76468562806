"""What is predicted for each of several processes is what its meter reads, buckets included."""

import json

import pytest
import torch
from exact_models import convolutions, layers, words
from processes import rank, run_in

import shoestring
from shoestring import SGD, Plan, ShoestringError, apply
from shoestring.cli.main import main
from shoestring.distributed import joined
from shoestring.measuring import measure_allocator
from shoestring.planning.options import PLAIN
from shoestring.planning.search import Search
from shoestring.rates import NOMINAL
from shoestring.structure import tensors
from shoestring.training.apply import lean_task
from shoestring.training.processes import share_of

CASES = {
    "convolutions": (lambda: convolutions(norm=torch.nn.BatchNorm2d, examples=16), Plan()),
    "words in microbatches": (lambda: words(examples=9), Plan(microbatch=2)),
    "sparse layers in FP16": (lambda: layers(examples=64), Plan(nonzero=30, precision="fp16", microbatch=8)),
}


def measured():
    """Predicted and measured peaks of this process, and the same prediction without the others."""
    found = {}
    for name, (make, plan) in CASES.items():
        task = make()
        share = share_of(task, task.batch, rank(), joined().size)
        lean = apply(task.with_(batch=share), plan)
        predicted = shoestring.profile(lean.task)
        for _ in range(3):
            lean.step(share)
        peak = measure_allocator(lambda: lean.step(share), [*lean.held(), *tensors(share)]).peak_bytes  # noqa: B023
        found[name] = predicted.peak_bytes, peak
    return found, joined().bytes_per_second()


def test_the_predicted_peak_of_each_process_is_the_measured_one():
    for found, bandwidth in run_in(2, measured):
        for name, (predicted, peak) in found.items():
            assert predicted == pytest.approx(peak, abs=64), name
        assert bandwidth > 0


def test_a_share_of_the_batch_and_its_buckets_are_what_a_device_needs():
    task = layers(SGD(lr=0.1), examples=2)  # weights and gradients are nearly all of it
    alone, shared = (shoestring.profile(task.with_(devices=devices), calibrate=False) for devices in (1, 2))
    assert shared.peak_bytes > alone.peak_bytes, "the bucket is not counted"
    gradients = sum(parameter.nbytes for parameter in task.model.parameters())
    assert shared.peak_bytes <= alone.peak_bytes + gradients


@pytest.mark.parametrize("devices", [2, 4])
def test_sending_gradients_takes_time_by_the_bandwidth(devices):
    task = layers(examples=64)
    gradients = sum(parameter.nbytes for parameter in task.model.parameters())
    slow = NOMINAL.__class__(**(vars(NOMINAL) | {"link_bytes_per_second": 1e6}))
    fast = NOMINAL.__class__(**(vars(NOMINAL) | {"link_bytes_per_second": 1e9}))
    taken = [Search(task.with_(devices=devices), 10**9, rates).seconds(PLAIN) for rates in (slow, fast)]
    sent = 2 * (devices - 1) / devices * gradients
    assert taken[0] - taken[1] == pytest.approx(sent / 1e6 - sent / 1e9, rel=0.05)


def test_a_plan_for_several_devices_leaves_out_what_they_cannot_do():
    task = layers(examples=64).with_(devices=2)
    search = Search(task, 10**9, NOMINAL)
    assert all("no-gradient" not in str(value) for value, _ in search.candidates.offers["optimizer"])
    with pytest.raises(ShoestringError, match="2 processes add up their gradients"):
        lean_task(task, Plan(optimizer="no-gradient"))


def planned():
    """A plan for less than plain training needs, in this process; and a step under it."""
    task = layers(examples=256)
    share = share_of(task, task.batch, rank(), joined().size)
    plan = shoestring.plan(task.with_(batch=share), "70%")
    return plan.to_json(), float(apply(task.with_(batch=share), plan).step(share))


def test_all_processes_get_the_plan_of_the_first():
    zero, one = run_in(2, planned)
    assert zero == one
    plan = Plan.from_json(zero[0])
    assert plan.techniques() and "no-gradient" not in str(plan.optimizer)


def test_the_command_line_tells_the_memory_of_each_device(capsys):
    arguments = ["profile", "wrn-10-1", "--batch", "8", "--no-calibrate", "--json"]
    peaks = {}
    for devices in (1, 2, 4):
        assert main([*arguments, "--devices", str(devices)]) == 0
        told = json.loads(capsys.readouterr().out)
        peaks[devices] = told["bytes"]["activations"]
        assert told["settings"].get("devices", 1) == devices
    assert peaks[1] > 1.9 * peaks[2] > 1.9 * 1.9 * peaks[4]
    assert main([*arguments, "--devices", "16"]) == 2
    assert "a batch of 8 examples cannot be shared by 16 processes" in capsys.readouterr().err
