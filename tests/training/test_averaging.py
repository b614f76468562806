import pytest
import torch
from small import Noise, right_answers, task
from torch import nn

from shoestring import Plan, apply
from shoestring.measuring import measure_allocator
from shoestring.runs.averaging import NoMean, means, write_means
from shoestring.runs.save import check, load_weights, restore_task
from shoestring.runs.tensorfile import TensorFile, write_tensors
from shoestring.techniques import sparsity
from shoestring.techniques.sparsity.conversion import convert_to_dense, from_dense
from shoestring.training.loop import train


def files(tmp_path, *contents):
    for number, tensors in enumerate(contents):
        with (tmp_path / str(number)).open("wb", buffering=0) as file:
            write_tensors(file, tensors)
    return [TensorFile(tmp_path / str(number)) for number in range(len(contents))]


def holder(**tensors):
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_buffer(name, tensor)
    return model


def mean_of(tmp_path, *contents):
    """Tensors of several saves -> those that are written as their mean."""
    write_means(tmp_path / "mean", means(holder(**contents[-1]), files(tmp_path, *contents)))
    written = TensorFile(tmp_path / "mean")
    return {name: written.read(name) for name in written.entries}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_weights_are_the_mean_in_at_least_32_bits(tmp_path, dtype):
    parts = [torch.randn(5, 3, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(10)]
    result = mean_of(tmp_path, *({"w": part} for part in parts))["w"]
    wide = torch.promote_types(dtype, torch.float32)
    expected = torch.stack(parts).to(wide).mean(0).to(dtype)
    assert result.dtype == dtype
    assert torch.allclose(result.double(), expected.double(), atol=torch.finfo(dtype).eps)


def test_ten_large_weights_of_16_bits_do_not_overflow_on_the_way(tmp_path):
    large = torch.full((2,), 60_000.0).half()
    assert torch.equal(mean_of(tmp_path, *({"w": large} for _ in range(10)))["w"], large)


def test_counters_are_the_last_ones(tmp_path):
    assert mean_of(tmp_path, *({"seen": torch.tensor(n)} for n in (10, 20, 30)))["seen"] == 30


@pytest.mark.parametrize("other", [torch.tensor([1, 0], dtype=torch.uint8), torch.ones(3, dtype=torch.uint8)])
def test_weights_under_masks_that_changed_are_not_averaged_and_no_file_is_left(tmp_path, other):
    mask = torch.tensor([0, 1], dtype=torch.uint8)
    with pytest.raises(NoMean, match="mask changed between them"):
        mean_of(tmp_path, {"mask": other}, {"mask": mask})
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


def test_one_tensor_at_a_time_is_in_memory(tmp_path):
    names, size = [f"w{n}" for n in range(8)], 400_000
    contents = [{name: torch.zeros(size // 4) for name in names} for _ in range(4)]
    found = means(holder(**contents[0]), files(tmp_path, *contents))
    used = measure_allocator(lambda: write_means(tmp_path / "mean", found))
    assert used.peak_bytes <= 2 * size + 1_000  # the sum, and the one that is added


# -- in a run whose layers are rewired ---------------------------------------------------------------------------
def rewired(method="dsr"):
    """A task whose layers are rewired after every update or two, so that no two saves have the same nonzeros."""
    return sparsity.apply(task(), sparsity.Settings(40, method, frequency_multiplier=100))


def ends_of(folder, updates, method):
    """The dense models of a run's saves."""
    for update in updates:
        sparse = rewired(method)
        restore_task(sparse, check(folder / "saves" / f"update-{update:010d}"))
        yield convert_to_dense(sparse.model)


@pytest.mark.parametrize("method", ["dsr", "set", "static"])
def test_the_mean_of_rewired_models_is_the_mean_of_the_dense_ones_and_a_file_of_the_plain_model(tmp_path, method):
    lean = rewired(method)
    how = {"epochs": 5, "average": 3, "evaluation": right_answers(), "run": tmp_path}
    record = train(lean, Noise(), **how)
    plain = task().model
    load_weights(plain, tmp_path / "averaged.safetensors")
    ends = list(ends_of(tmp_path, (15, 20, 25), method))
    for name, mean in plain.named_parameters():
        torch.testing.assert_close(mean, sum(end.get_parameter(name) for end in ends) / 3)
    kept = [(end.blocks[0].conv.weight != 0) for end in ends]
    assert torch.equal(kept[0], kept[2]) == (method == "static")
    assert record.finished and record.averaged_quality == right_answers()(plain)
    for name, weight in ends[-1].named_parameters():  # the live model is as it was after the last update
        assert torch.equal(convert_to_dense(lean.model).get_parameter(name), weight)


def test_a_sparse_run_in_fp16_that_is_averaged_ends_and_may_be_resumed(tmp_path):
    how = {"epochs": 3, "average": 2, "run": tmp_path, "evaluation": right_answers()}
    plan = Plan(precision="fp16", microbatch=3)
    assert train(apply(rewired(), plan), Noise(), **how).finished
    averaged = (tmp_path / "averaged.safetensors").read_bytes()
    assert train(apply(rewired(), plan), Noise(), resume=True, **how).finished
    assert (tmp_path / "averaged.safetensors").read_bytes() == averaged


@pytest.mark.parametrize("sparse", [False, True])
def test_an_evaluation_of_the_mean_that_fails_leaves_the_last_weights(tmp_path, sparse):
    lean, whole, calls = (rewired() if sparse else task()), right_answers(), []

    def failing(model):
        calls.append(model)
        if len(calls) == 4:
            raise RuntimeError("out of data")
        return whole.measure(model)

    evaluation = type(whole)("accuracy", failing)
    with pytest.raises(RuntimeError, match="out of data"):
        train(lean, Noise(), epochs=3, average=2, evaluation=evaluation, run=tmp_path)
    model = lean.model
    saved = {name: tensor.clone() for name, tensor in model.named_parameters()}
    restore_task(lean, check(tmp_path / "saves" / "update-0000000015"))
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.named_parameters())


def test_layers_that_share_their_nonzeros_have_one_mean(tmp_path):
    torch.manual_seed(0)
    first, second = nn.Linear(20, 30), nn.Linear(20, 30)
    second.weight = first.weight
    model = from_dense(nn.Sequential(first, nn.Linear(30, 20), second), 30, layers=("0", "2"))
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    found = means(model, files(tmp_path, tensors, tensors))
    assert "0.weight" in found and not {"2.weight", "0.values", "0.index", "2.index"} & set(found)
    assert torch.equal(found["0.weight"].make(), model[0].dense_weight())


class Histogram(nn.Module):
    """A model with counters that are no mask, and that have no mean either."""

    def __init__(self):
        super().__init__()
        self.inner = task().model
        self.register_buffer("labels", torch.zeros(3, dtype=torch.long))

    def forward(self, images):
        self.labels += 1
        return self.inner(images)


def test_a_run_whose_saves_have_no_mean_ends_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="cannot be averaged: labels changed between them"):
        record = train(task(model=Histogram()), Noise(), epochs=3, average=2, run=tmp_path)
    assert record.finished and record.averaged_quality is None
    assert not (tmp_path / "averaged.safetensors").exists()
