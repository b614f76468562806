"""What can be profiled without being there, and what cannot be seen: declared, or refused with the reason."""

import importlib
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shoestring import SGD, Adam, Plan, ShoestringError, Task, apply, builtin
from shoestring.kernels import flops
from shoestring.measuring import measure_process
from shoestring.profiling import profile


def square(model, batch):
    return model(batch).square().mean()


def task(model=None, batch=None, loss=square, **fields) -> Task:
    batch = torch.randn(8, 4) if batch is None else batch
    return Task(model or nn.Linear(4, 2), loss, batch, fields.pop("optimizer", SGD()), **fields)


# -- models that are not there -------------------------------------------------------------------------------
def test_a_model_on_meta_has_the_profile_of_the_real_one():
    meta, real = builtin("wrn-10-1", batch=4, device="meta"), builtin("wrn-10-1", batch=4)
    assert profile(meta).to_json() == profile(real).to_json()


def test_a_batch_on_meta_will_do():
    assert profile(task(batch=torch.empty(8, 4, device="meta"))).to_json() == profile(task()).to_json()


def test_a_constant_that_is_no_buffer_may_be_on_meta_too():
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(4, 2)
            self.scale = torch.ones(2)

        def forward(self, x):
            return super().forward(x) * self.scale

    with torch.device("meta"):
        model = Scaled()
    assert profile(task(model)).to_json() == profile(task(Scaled())).to_json()


def test_a_model_of_ten_times_the_machines_memory_is_profiled():
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    width = 16384
    layers = -(-10 * machine // (width * width * 4))
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    results = []
    reading = measure_process(lambda: results.append(profile(task(model, torch.randn(2, width), optimizer=Adam()))))
    assert results[0].bytes_by_category["model"] == layers * width * width * 4 >= 10 * machine
    assert results[0].peak_bytes > 40 * machine  # gradients and Adam's two states besides
    assert reading.peak_bytes - reading.start_bytes < 1e9


# -- what cannot be seen is declared -------------------------------------------------------------------------
def test_reading_a_value_that_is_learned_is_declared():
    def scaled(model, batch):
        return square(model, batch) * model.weight.max().item()

    assert any("the batch does not tell is read" in words for words in profile(task(loss=scaled)).unseen)


def test_a_parameter_that_the_loss_holds_by_itself_is_declared():
    model = nn.Linear(4, 2)
    weight = model.weight
    result = profile(task(model, loss=lambda model, batch: square(model, batch) + weight.square().sum()))
    assert any("'weight' is used directly" in words for words in result.unseen)
    assert weight.grad is None


def test_scratch_that_was_not_calibrated_is_declared_and_what_was_is_not():
    result = profile(task())
    assert any("not calibrated" in words for words in result.unseen)
    table = dict.fromkeys(map(str, result.signatures), 0)
    assert profile(task(), table).unseen == []


def test_scratch_from_the_table_is_workspace_at_the_peak():
    signatures = profile(task()).signatures
    product = next(s for s in signatures if s.op == "aten.addmm.default")
    result = profile(task(), {str(product): 1_000_000})
    assert result.peak.operation == "addmm.default"
    assert result.bytes_by_category["workspace"] == result.workspace_peak_bytes == 1_000_000
    assert result.tensor_peak_bytes == profile(task()).peak_bytes


# -- what cannot be traced is refused ------------------------------------------------------------------------
@torch.library.custom_op("shoestring_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@pytest.mark.parametrize(
    "loss, words",
    [
        (
            lambda m, b: m(b).mean() * torch.bincount(m(b)[:, 0].long()).numel(),
            "aten.bincount.default makes depends on the data; move it",
        ),
        (lambda m, b: m(b).mean() + double(b).mean(), "a custom operator has no fake; register one"),
        (lambda m, b: m(b).mean() * float(b.numpy().sum()), r"read with .numpy\(\); move it"),
    ],
    ids=["bincount", "custom op", "numpy"],
)
def test_what_cannot_be_traced_is_refused_with_a_way_out(loss, words):
    with pytest.raises(ShoestringError, match=f"mine cannot be traced: .*{words}"):
        profile(task(loss=loss, name="mine"))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"loss": lambda m, b: m(b)}, r"the loss has shape \(8, 2\), not a single number: return its mean"),
        ({"loss": lambda m, b: b.sum()}, "the loss does not depend on any trainable parameter"),
        ({"loss": lambda m, b: m(b).mean().detach()}, "the loss does not depend on any trainable parameter"),
        ({"loss": lambda m, b: 1.0}, "the loss is float, not a tensor"),
        ({"model": nn.Linear(4, 2).requires_grad_(False)}, "no parameter that requires a gradient"),
        ({"model": nn.Flatten()}, "no parameter that requires a gradient"),
        ({"model": torch.jit.script(nn.Linear(4, 2))}, "the model is TorchScript"),
        ({"model": nn.LazyLinear(2)}, "weight of a lazy layer has no size yet"),
        ({"batch": {}}, "holds no tensor with a first dimension"),
        ({"batch": torch.zeros(0, 4)}, "the batch holds no items"),
        ({"split": lambda batch: []}, "the batch holds no items"),
    ],
)
def test_a_task_that_cannot_be_trained_is_refused_with_the_reason(changes, words):
    with pytest.raises(ShoestringError, match=words):
        profile(task(**changes))


def test_a_batch_on_another_device_is_refused():
    with FakeTensorMode():
        elsewhere = torch.zeros(8, 4, device="cuda:0")
    with pytest.raises(ShoestringError, match=r"on different devices \(cpu, cuda:0\): move them to one"):
        profile(task(batch=elsewhere))


def by_method(model):
    model[0].compile(backend="eager")
    return model


def by_forward(model):
    model[0].forward = torch.compile(model[0].forward, backend="eager")
    return model


def inside(model):
    model[0] = torch.compile(model[0], backend="eager")
    return model


@pytest.mark.parametrize("form, name", [
    (lambda model: torch.compile(model, backend="eager"), "the model (OptimizedModule)"),
    (by_method, "0 (Linear)"), (by_forward, "0 (Linear)"), (inside, "0 (OptimizedModule)"),
], ids=["whole", "method", "forward", "inside"])  # fmt: skip
def test_a_compiled_module_is_refused_by_profiles_and_by_what_looks_at_saved_tensors(form, name):
    def compiled():
        return task(form(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))))

    said = re.escape(f"{name} is under torch.compile")
    with pytest.raises(ShoestringError, match=said):
        profile(compiled())
    for word in ("int4", "pool2", "masks"):
        with pytest.raises(ShoestringError, match=said):
            apply(compiled(), Plan(activations=word))


def test_a_module_that_torch_compile_is_told_to_leave_alone_is_profiled():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].forward = torch.compiler.disable(model[0].forward)
    assert profile(task(model)).peak_bytes == profile(task(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))).peak_bytes


def test_a_mistake_in_the_users_code_stays_their_own_error_and_is_told_once(capfd):
    with pytest.raises(RuntimeError, match=r"\[8, 5\] X \[4, 2\]"):
        profile(task(batch=torch.zeros(8, 5)))
    assert capfd.readouterr() == ("", "")


# -- what PyTorch itself may know one day --------------------------------------------------------------------
def test_a_flop_formula_that_pytorch_has_already_is_not_registered_twice():
    importlib.reload(flops)  # all of ours are there already
    result = profile(task())
    assert result.flops["forward"] == 2 * 8 * 4 * 2


def test_the_range_of_pytorch_that_is_declared_is_the_range_that_is_tested():
    root = Path(__file__).parents[2]
    declared = re.search(r'"torch>=([\d.]+),<([\d.]+)"', (root / "pyproject.toml").read_text())
    tested = re.search(r"^VERSIONS := python\S+:(\S+) python\S+:(\S+)$", (root / "Makefile").read_text(), re.MULTILINE)
    oldest, newest = (tuple(map(int, version.split(".")[:2])) for version in tested.groups())
    assert oldest == tuple(map(int, declared[1].split(".")))
    assert (newest[0], newest[1] + 1) == tuple(map(int, declared[2].split(".")))
