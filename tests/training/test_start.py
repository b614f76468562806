"""Starting from weights that users have: in any file, into any form, with clear words where they do not fit."""

import json
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from shoestring import SGD, Plan, ShoestringError, Task, apply
from shoestring.errors import DamagedSave
from shoestring.runs.start import start_from
from shoestring.techniques.sparsity.layer import SparseLayer


def a_model(seed=0, classes=4):
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    return nn.ModuleDict({"body": body, "head": nn.Linear(8, classes)})


class Network(nn.Module):
    def __init__(self, seed=0, classes=4):
        super().__init__()
        self.parts = a_model(seed, classes)

    def forward(self, images):
        return self.parts["head"](self.parts["body"](images).mean((2, 3)))


IMAGES = torch.linspace(-1, 1, 5 * 3 * 8 * 8).view(5, 3, 8, 8)


def a_lean(plan=None, **how):
    def loss(model, x):
        return model(x).square().mean()

    return apply(Task(Network(seed=1, **how), loss, IMAGES, SGD(), microbatches=True), plan or Plan())


def as_file(model, path, kind):
    state = model.state_dict()
    if kind == "safetensors":
        save_file(state, path / "w.safetensors")
        return path / "w.safetensors"
    if kind == "folder":
        save_file(state, path / "model.safetensors")
        return path
    if kind == "shards":
        names = sorted(state)
        homes = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(names)}
        for home in set(homes.values()):
            save_file({name: state[name] for name in names if homes[name] == home}, path / home)
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
        return path
    inside = {"state dict": state, "checkpoint": {"state_dict": state, "epoch": 3}}
    torch.save(inside[kind], path / "w.pt")
    return path / "w.pt"


KINDS = ["safetensors", "folder", "shards", "state dict", "checkpoint"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_its_weights_and_statistics(tmp_path, kind):
    given = Network()
    given.parts["body"][1].running_mean.fill_(0.5)
    lean = a_lean()
    assert start_from(lean.model, as_file(given, tmp_path, kind)).is_whole
    torch.testing.assert_close(lean.model.state_dict(), given.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_layers_take_the_largest_weights(tmp_path, kind):
    given, lean = Network(), a_lean(Plan(nonzero={"nonzero": 25, "layers": ["parts.head"]}))
    start_from(lean.model, as_file(given, tmp_path, kind))
    (layer,) = [module for module in lean.model.modules() if isinstance(module, SparseLayer)]
    dense, wanted = layer.dense_weight(), given.parts["head"].weight
    kept = dense != 0
    assert int(kept.sum()) == layer.values.numel() == 8
    assert torch.equal(dense[kept], wanted[kept]) and wanted[kept].abs().min() >= wanted[~kept].abs().max()
    assert torch.equal(layer.bias, given.parts["head"].bias)
    lean.step(IMAGES)


def test_sixteen_bits_are_rounded_and_what_is_out_of_their_range_is_refused(tmp_path):
    given, lean = Network(), a_lean(Plan(precision="fp16"))
    start_from(lean.model, as_file(given, tmp_path, "safetensors"))
    assert torch.equal(lean.model.parts["head"].weight, given.parts["head"].weight.half())
    given.parts["head"].weight.data[0, 0] = 1e6
    with pytest.raises(ShoestringError, match=r"parts.head.weight has a value of 1e\+06"):
        start_from(lean.model, as_file(given, tmp_path, "safetensors"))


def test_names_and_shapes_that_differ_are_listed_with_what_may_be_meant(tmp_path):
    state = Network(classes=7).state_dict()
    state["parts.heat.bias"] = state.pop("parts.head.bias")
    state["more"] = torch.zeros(1)
    save_file(state, tmp_path / "w.safetensors")
    lean = a_lean()
    before = {name: tensor.clone() for name, tensor in lean.model.state_dict().items()}
    with pytest.raises(ShoestringError) as error:
        start_from(lean.model, tmp_path / "w.safetensors")
    words = str(error.value)
    assert "1 missing (parts.head.bias, did you mean parts.heat.bias?)" in words
    assert "2 unexpected (more, parts.heat.bias)" in words and "--partial" in words
    assert "parts.head.weight: (4, 8) in the model, (7, 8) in the file" in words
    torch.testing.assert_close(lean.model.state_dict(), before, rtol=0, atol=0)  # nothing was read
    fit = start_from(lean.model, tmp_path / "w.safetensors", partial=True)
    assert not fit.is_whole and "parts.body.0.weight" in fit.common
    assert torch.equal(lean.model.parts["body"][0].weight, state["parts.body.0.weight"])
    assert torch.equal(lean.model.parts["head"].weight, before["parts.head.weight"])


def test_a_prefix_is_recognised_and_a_file_with_nothing_in_common_is_refused_even_in_part(tmp_path):
    save_file({f"module.{name}": value for name, value in Network().state_dict().items()}, tmp_path / "w.safetensors")
    with pytest.raises(ShoestringError, match=r"did you mean module.parts.body.0.weight\?.*and 4 more"):
        start_from(a_lean().model, tmp_path / "w.safetensors", partial=True)


def test_of_tensors_that_are_tied_a_file_may_have_one_only(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.read, self.write = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
            self.write.weight = self.read.weight

    weight = torch.randn(6, 4)
    for name in ("read.weight", "write.weight"):
        save_file({name: weight}, tmp_path / "w.safetensors")
        model = Tied()
        assert start_from(model, tmp_path / "w.safetensors").is_whole
        assert torch.equal(model.write.weight, weight)


class Evil:
    def __reduce__(self):
        return print, ("run",)


def test_a_file_that_would_run_code_or_is_no_weights_is_refused_in_one_line(tmp_path, capsys):
    path = tmp_path / "w.pt"
    torch.save({"w": Evil()}, path)
    for content in (path.read_bytes(), pickle.dumps(Evil()), b"PK\x03\x04 cut off"):
        path.write_bytes(content)
        with pytest.raises(ShoestringError, match="cannot be read as weights alone") as error:
            start_from(a_lean().model, path)
        assert "\n" not in str(error.value)
    assert capsys.readouterr().out == ""
    torch.save([1, 2], path)
    with pytest.raises(ShoestringError, match="holds no weights by name"):
        start_from(a_lean().model, path)


def test_a_shape_of_terabytes_is_refused_before_memory_is_taken(tmp_path):
    state = Network().state_dict()
    state["parts.head.weight"] = torch.zeros(1).expand(10**7, 10**6)  # of 4 bytes on disk
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(ShoestringError, match=r"\(10000000, 1000000\) in the file"):
        start_from(a_lean().model, tmp_path / "w.pt")
    header = json.dumps({"w": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}).encode()
    (tmp_path / "w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(DamagedSave, match="ends at byte"):
        start_from(a_lean().model, tmp_path / "w.safetensors")


@pytest.mark.parametrize("home", ["../w.safetensors", "/etc/passwd", 3, None])
def test_an_index_reads_only_files_of_its_folder(tmp_path, home):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": home}}))
    with pytest.raises(ShoestringError, match="outside of the folder"):
        start_from(a_lean().model, tmp_path)


def test_what_is_not_there_or_empty_is_refused(tmp_path):
    with pytest.raises(ShoestringError, match="does not exist"):
        start_from(a_lean().model, tmp_path / "nothing.pt")
    with pytest.raises(ShoestringError, match="holds no weights"):
        start_from(a_lean().model, tmp_path)
    (tmp_path / "empty.pt").touch()
    with pytest.raises(ShoestringError, match="is empty"):
        start_from(a_lean().model, tmp_path / "empty.pt")
