"""Compressed activations: the loss is untouched to the last bit, gradients are made from what is stored, and what
cannot be compressed is stored as it is."""

import copy
import warnings
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoestring
from shoestring import SGD, Plan, ShoestringError, Task, apply
from shoestring.models.images import classification_loss
from shoestring.models.vit import VisionTransformer
from shoestring.passes.layers import Convolution, Linear, PlainConvolution
from shoestring.passes.norms import in_parts
from shoestring.techniques.activations import saved_bytes
from shoestring.techniques.activations.codecs import codec_of
from shoestring.techniques.activations.compressed import Compressed, Pooled, Quantised

NORMS = "int8,*:batch_norm=int8"
WORDS = ("pool2", "pool4", "int8", "int4", "int2", "pool4+int2", "pool2+int8")


class Net(nn.Module):
    """Convolutions of several kinds, a max-pool, in-place ReLUs, a shortcut that skips pixels, a classifier."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.body = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 5, 1, 2))
        self.shortcut = nn.Conv2d(16, 32, 1, 2)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = self.pool(self.stem(x))
        x = F.relu(self.body(x) + self.shortcut(x))
        return self.head(F.relu(self.depthwise(x)).mean((2, 3)))


def images(count=16, size=36):
    return torch.randn(count, 3, size, size), torch.randint(10, (count,))


def net(last=False):
    torch.manual_seed(0)
    model, (x, y) = Net(), images()
    if last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    return Task(model, classification_loss, (x, y), SGD(lr=0.1))


def vit():
    torch.manual_seed(0)
    return Task(VisionTransformer(image=32, width=96, depth=2), classification_loss, images(16, 32), SGD(lr=0.1))


def gradients(task, plan=None):
    """The loss and the gradients of one pass, of a copy of the model."""
    model = copy.deepcopy(task.model)
    lean = apply(task.with_(model=model), plan).task if plan else task.with_(model=model)
    with ExitStack() as stack:
        for context in lean.contexts:
            stack.enter_context(context(model))
        loss = lean.loss_of(model, lean.batch)
        loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def cosine(a, b):
    return F.cosine_similarity(*(torch.cat([g.flatten().double() for g in side.values()]) for side in (a, b)), 0).item()


@pytest.mark.parametrize("make", [net, lambda: net(last=True), vit], ids=["net", "channels_last", "vit"])
@pytest.mark.parametrize("word", [*WORDS, NORMS])
def test_the_loss_has_the_bits_of_plain_training_and_gradients_point_its_way(make, word):
    task = make()
    (loss, exact), (found, lossy) = gradients(task), gradients(task, Plan(activations=word))
    assert torch.equal(found, loss)
    least = {"int8": 0.9995, NORMS: 0.999, "pool2+int8": 0.9995, "int4": 0.98}.get(word, 0.5)
    assert least < cosine(lossy, exact) < 1 - 1e-9
    assert all(gradient.isfinite().all() for gradient in lossy.values())


def test_gradients_of_what_is_stored_exactly_have_the_bits_of_plain_training():
    """Biases, norms and the classifier do not read what was compressed, as long as nothing upstream did."""
    task = net()
    (_, exact), (_, lossy) = gradients(task), gradients(task, Plan(activations="int2"))
    for name in ("head.weight", "head.bias", "depthwise.bias", "stem.1.weight", "body.1.bias", "shortcut.bias"):
        torch.testing.assert_close(lossy[name], exact[name], rtol=1e-5, atol=1e-7)
    # A 1 x 1 convolution of stride 2 reads one pixel of four: these are stored, and compressed.
    assert not torch.equal(lossy["body.3.weight"], exact["body.3.weight"])


def test_masks_of_in_place_relu_and_places_of_max_pool_are_exact():
    task = net()
    (loss, exact), (found, lean) = gradients(task), gradients(task, Plan(activations="masks"))
    torch.testing.assert_close(found, loss)
    for name, gradient in exact.items():
        torch.testing.assert_close(lean[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("shape", [(4, 6, 20, 17), (5, 1, 33, 8), (3, 65, 24), (3, 40, 24), (3, 6, 5, 24)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_samples_come_back_near_what_they_were_and_in_fewer_bytes(word, shape, dtype):
    x = torch.randn(shape, dtype=torch.float64).cumsum(1).to(dtype)
    channel = 1 if shape[1] <= 6 and shape[-1] != 24 else -1
    codec = codec_of(word)
    if not codec.takes(x, channel):
        pytest.skip("the map has fewer pixels than a block")
    packed = codec.pack(x, channel=channel, draw=lambda: (1, 2))
    back = packed.take()
    assert back.shape == x.shape and back.dtype == dtype
    torch.testing.assert_close(torch.cat([packed.samples(0, 2), packed.samples(2, len(x))]), back)
    if word in ("int8", "pool2+int8"):
        torch.testing.assert_close(back.double(), x.double(), rtol=0, atol=0.02 * x.double().abs().max().item() + 0.02)


def layer(kind, x, channel):
    if kind == "linear":
        return Linear(torch.randn(7, x.shape[-1], dtype=x.dtype), None)
    groups = 2 if kind == "groups" else 1
    weight = torch.randn(8, x.shape[1] // groups, 3, 3, dtype=x.dtype)
    make = Convolution if kind == "own" else PlainConvolution
    return make(weight, None, (2, 1), (1, 1), (1, 2), groups)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("kind", ["plain", "own", "groups", "linear", "patches", "maps"])
def test_the_weights_gradient_from_the_stored_form_is_that_of_the_expanded_tensor(word, kind):
    shape = {"linear": (3, 41, 12), "patches": (3, 37, 12), "maps": (3, 9, 8, 12)}.get(kind, (5, 6, 19, 16))
    x = torch.randn(shape, dtype=torch.float64)
    channel = 1 if shape[1] == 6 else -1
    made = layer("linear" if channel == -1 else kind, x, channel)
    grad = torch.randn_like(made.forward(x, None))
    packed = codec_of(word).pack(x, channel=channel, draw=lambda: (1, 2))
    assert isinstance(packed, Compressed)
    wanted = made.weight_gradient(grad, packed.take(), None)
    torch.testing.assert_close(packed.weight_gradient(made, grad), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(5, 3, 9, 7), (6, 4, 11), (7, 5)], ids=str)
def test_the_gradient_of_batch_norm_from_the_stored_form_is_that_of_the_expanded_input(shape, affine):
    """With the statistics of the exact input: they were computed in the forward pass."""
    x, grad = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    gamma = torch.rand(shape[1], dtype=torch.float64) if affine else None
    pixels = [0, *range(2, len(shape))]
    mean, invstd = x.mean(pixels), (x.var(pixels, unbiased=False) + 1e-5).rsqrt()
    packed = Quantised(x, 4, (1, 2))
    wide = packed.take()
    settings = (None, None, mean, invstd, True, 1e-5, [True, True, True])
    wanted = torch.ops.aten.native_batch_norm_backward(grad, wide, gamma, *settings)
    for found, right in zip(in_parts(grad, packed, mean, invstd, gamma, False), wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


def test_bytes_are_those_of_the_word():
    x = torch.randn(4, 16, 32, 32)
    stored = {word: codec_of(word).pack(x, channel=1, draw=lambda: (0, 0)).nbytes / x.nbytes for word in WORDS}
    assert stored["pool2"] == 1 / 4 and stored["pool4"] == 1 / 16
    assert stored["int8"] == (8 + 1 / 8) / 32 and stored["int4"] == (4 + 1 / 8) / 32
    assert stored["int2"] == (2 + 1 / 8) / 32
    assert stored["pool4+int2"] == stored["int2"] + 1 / 32


def test_the_class_token_of_a_grid_of_patches_stays_exact():
    x = torch.randn(2, 50, 8)
    back = Pooled(x, 2, -1).take()
    assert torch.equal(back[:, 0], x[:, 0])
    block = x[:, 1:].view(2, 7, 7, 8)[:, :2, :2].mean((1, 2))
    torch.testing.assert_close(back[:, 1], block)


def test_rounding_depends_on_the_pass_and_the_place_and_not_on_threads():
    task = net()
    model = copy.deepcopy(task.model)
    lean = apply(task.with_(model=model), Plan(activations="int2"))
    context = lean.task.contexts[-1]

    def gradient():
        model.zero_grad()
        with ExitStack() as stack:
            for entered in lean.task.contexts:
                stack.enter_context(entered(model))
            lean.task.loss_of(model, task.batch).backward()
        return model.body[3].weight.grad.clone()

    start = context.state()
    first, second = gradient(), gradient()
    context.restore(start)
    assert torch.equal(gradient(), first) and not torch.equal(first, second)


def test_a_profile_does_not_count_as_a_pass():
    lean = apply(net(), Plan(activations="int4"))
    before = lean.task.contexts[-1].state()
    shoestring.profile(lean.task, calibrate=False)
    assert lean.task.contexts[-1].state() == before


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_stored_exactly_and_said(bad):
    x = torch.randn(2, 4, 16, 16)
    x[1, 2, 3, 4] = bad
    with pytest.warns(UserWarning, match="holds NaN or infinity and is stored exactly"):
        packed = codec_of("int4").pack(x, channel=1, draw=lambda: (0, 0))
    torch.testing.assert_close(packed.take(), x, equal_nan=True)


@pytest.mark.parametrize(("tensor", "channel"), [
    (torch.zeros(4, 4, 8, 8, dtype=torch.int64), 1),
    (torch.zeros(4, 4, 8, 8, dtype=torch.bool), 1),
    (torch.zeros(4, 4, 8, 8, dtype=torch.complex64), 1),
    (torch.zeros(8), -1),
])  # fmt: skip
def test_integers_masks_complex_numbers_and_vectors_are_no_ones_to_compress(tensor, channel):
    assert not any(codec_of(word).takes(tensor, channel) for word in WORDS)


def test_a_pool_larger_than_the_map_leaves_it_exact():
    takes = codec_of("pool8").takes
    assert takes(torch.zeros(1, 1, 8, 8), 1) and not takes(torch.zeros(1, 1, 8, 7), 1)
    assert takes(torch.zeros(1, 8, 3), -1) and not takes(torch.zeros(1, 7, 3), -1)


def test_a_norms_input_is_compressed_only_where_a_rule_names_it():
    task = net()
    plain, named = (apply(net(), Plan(activations=word)).task for word in ("int4", "int4,*:batch_norm=int4"))
    peaks = [shoestring.profile(each, calibrate=False).peak_bytes for each in (task, plain, named)]
    assert peaks[0] > peaks[1] > peaks[2]


@pytest.mark.parametrize("word", ["pool", "pool0", "pool1", "int3", "int16", "pool2+int3", "int4+pool2", "pool-2", ""])
def test_a_word_that_is_no_codec_is_refused(word):
    with pytest.raises(ShoestringError, match="there is no codec"):
        apply(net(), Plan(activations=word))


def test_a_rule_that_names_no_module_is_refused():
    with pytest.raises(ShoestringError, match=r"the model has no module 'nowhere.\*'"):
        apply(net(), Plan(activations="nowhere.*=pool2"))


def test_a_shortcut_that_skips_pixels_can_stay_exact_at_the_quarter_that_it_reads():
    task = net()
    (_, exact), (_, lossy) = gradients(task), gradients(task, Plan(activations="shortcut=whole,pool2"))
    torch.testing.assert_close(lossy["shortcut.weight"], exact["shortcut.weight"], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(lossy["body.0.weight"], exact["body.0.weight"], rtol=1e-2)
    saved = [saved_bytes(apply(net(), Plan(activations=rules)).task) for rules in ("pool2", "shortcut=whole,pool2")]
    quarter = 16 * 16 * 9 * 9 * 4  # of the map of 18 x 18 that both branches read
    assert saved[1] - saved[0] == quarter - 16 * 16 * 5 * 5 * 4


def test_quantised_groups_stay_inside_a_channel_that_is_long_enough():
    x = torch.randn(2, 3, 20, 20) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    error = (Quantised(x, 4, (0, 0)).take() - x).abs().amax((0, 2, 3))
    assert (error < torch.tensor([1e-3, 1.0, 1e3])).all()


def test_nothing_is_warned_of_in_a_plain_run():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(net(), Plan(activations="int4"))


@pytest.mark.parametrize(
    "kernel, stride, groups", [(1, (2, 2), 1), (1, (2, 1), 2), (3, (2, 2), 1), (3, (2, 3), 2), (5, (2, 2), 1)]
)
def test_a_strided_layers_input_gradient_in_pieces_is_pytorchs(monkeypatch, kernel, stride, groups):
    monkeypatch.setattr("shoestring.passes.layers.PIECE_BYTES", 20_000)
    x = torch.randn(6, 8, 15, 14, dtype=torch.float64, requires_grad=True)
    weight, padding = torch.randn(4, 8 // groups, kernel, kernel, dtype=torch.float64), (kernel // 2, kernel // 2)
    y = F.conv2d(x, weight, None, stride, padding, 1, groups)
    grad = torch.randn_like(y)
    y.backward(grad)
    layer = PlainConvolution(weight, None, stride, padding, (1, 1), groups)
    torch.testing.assert_close(layer.input_gradient(grad, x.shape), x.grad)
