"""Every technique is offered to the planner, with an effect and a time that its traces bear out; few are needed."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoestring import SGD, Adam, Task
from shoestring.planning.options import PLAIN, Option
from shoestring.planning.search import Search, plan
from shoestring.profiling import profile
from shoestring.rates import Rates
from shoestring.techniques.technique import Risk

sys.path.insert(0, str(Path(__file__).parents[1]))
import zoo

RATES = Rates(1e11, 8e10, 1e10, 1e-5)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)

    def forward(self, x):
        return x + self.two(F.dropout(F.relu(self.one(self.norm(x))), 0.1, self.training))


def predict(model, batch):
    return F.cross_entropy(model(batch), torch.zeros(len(batch), dtype=torch.long))


def layers(batch=1024, width=64, count=3, optimizer=None):
    torch.manual_seed(0)
    blocks = [Layer(width) for _ in range(count)]
    model = nn.Sequential(nn.Linear(width, width), nn.Sequential(*blocks), nn.Linear(width, 16))
    return Task(model, predict, torch.randn(batch, width), optimizer or Adam())


def option(search, **settings):
    return search.candidates.option(tuple(settings.items()))


@pytest.fixture(scope="module")
def search():
    return Search(layers(), 10**9, RATES)


@pytest.mark.parametrize("name", ["nonzero", "precision", "optimizer", "checkpoint", "activations", "microbatch"])
def test_every_technique_is_offered(search, name):
    values = [value for value, _ in search.candidates.offers[name]]
    assert values, name
    for value in values:
        alone = option(search, **{name: value})
        assert alone in search.candidates.at(alone.risk)


def test_what_is_kept_of_saved_tensors_is_offered_at_its_risk(search):
    assert dict(search.candidates.offers["activations"]) == {
        "masks": Risk.EXACT, "offload": Risk.EXACT, "half": Risk.APPROXIMATE, "int8": Risk.APPROXIMATE,
        "int4": Risk.APPROXIMATE, "pool2": Risk.APPROXIMATE, "int2": Risk.APPROXIMATE,
    }  # fmt: skip


class Convolutions(nn.Sequential):
    """Maps large enough for every codec, and nothing beside them."""

    def __init__(self):
        layers = [layer for _ in range(3) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
        super().__init__(nn.Conv2d(3, 8, 3, padding=1), *layers)

    def forward(self, x):
        return super().forward(x).mean((2, 3))


def convolutions():
    torch.manual_seed(0)
    return Task(Convolutions(), predict, torch.randn(32, 3, 32, 32), SGD())


@pytest.fixture(scope="module")
def codecs():
    return Search(convolutions(), 10**9, RATES)


COMPRESSED = ("int8", "int4", "pool2", "int2")


@pytest.mark.parametrize("word", COMPRESSED)
def test_what_a_codec_surely_leaves_and_the_time_it_surely_takes_are_no_more_than_its_trace(codecs, word):
    one = option(codecs, activations=word)
    codecs.traces.base(())
    assert codecs.time_bound(one) <= codecs.seconds(one)
    assert codecs.lower_bound(one) <= codecs.traces.of(one.settings).peak_bytes
    assert codecs.traces.of(one.settings).peak_bytes < codecs.traces.of(()).peak_bytes


def test_milder_codecs_are_tried_before_rougher_ones(codecs):
    degrees = [codecs.candidates.roughness(option(codecs, activations=word)) for word in COMPRESSED]
    assert degrees == sorted(degrees) and degrees[0] < degrees[1] < degrees[2]


def test_a_plan_with_a_codec_says_how_near_its_gradients_were_and_where(codecs):
    for word in COMPRESSED:
        reasons = codecs.finish(option(codecs, activations=word)).reasons
        (told,) = [reason for reason in reasons if reason.startswith("activations: ")]
        assert f"{word}: cosine" in told and "ResNet-18" in told and "shoestring fidelity" in told
    assert not any(r.startswith("activations: ") for r in codecs.finish(option(codecs, activations="offload")).reasons)


@pytest.mark.parametrize("settings, words", [
    ({"precision": "fp16", "activations": "int8"}, "8 bits of 16 save little"),
    ({"checkpoint": "no-bn", "activations": "pool2"}, "only the inputs of regions are stored"),
    ({"checkpoint": "residual-2*", "activations": "int4"}, "needs as little memory and recomputes less"),
    ({"checkpoint": "residual-2**", "activations": "offload"}, "int4 is tried beside it"),
    ({"checkpoint": "residual-2**", "activations": "half"}, "int4 is tried beside it"),
], ids=str)  # fmt: skip
def test_a_codec_that_would_save_little_beside_another_setting_is_left_out_with_the_reason(codecs, settings, words):
    assert not codecs.candidates.compatible(tuple(settings.items()))
    assert words in codecs.candidates.left_out[tuple(settings.items())].reason


def test_int4_goes_with_16_bits_and_with_checkpoints_of_one_block(codecs):
    for settings in ({"precision": "fp16"}, {"checkpoint": "no-bn"}, {"checkpoint": "residual-1*"}, {"nonzero": 30}):
        assert codecs.candidates.compatible((*settings.items(), ("activations", "int4"))), settings


@pytest.mark.parametrize("word", ["int8", "int4", "int2"])
def test_of_codecs_alone_the_mildest_that_fits_a_budget_is_found(codecs, word):
    traced = codecs.traces.of((("activations", word),))
    search = Search(convolutions(), traced.needed_bytes, RATES)
    offers = [(value, risk) for value, risk in search.candidates.offers["activations"] if value in COMPRESSED]
    search.candidates.offers = {key: [] for key in search.candidates.offers} | {"activations": offers}
    assert search.best(Risk.APPROXIMATE).settings == (("activations", word),)


def test_bf16_goes_with_gradients_that_are_used_up_and_fp16_does_not(search):
    neutral = {o.settings for o in search.candidates.at(Risk.NEUTRAL)}
    assert (("precision", "bf16"), ("optimizer", "8bit+no-gradient")) in neutral
    assert (("precision", "fp16"), ("optimizer", "8bit+no-gradient")) not in neutral
    traced = search.traces.of((("precision", "bf16"), ("optimizer", "8bit+no-gradient")))
    assert traced is not None


EFFECTS = [
    {"nonzero": 30},
    {"nonzero": 10, "microbatch": 41},
    {"optimizer": "8bit"},
    {"optimizer": "no-gradient"},
    {"optimizer": "adafactor+no-gradient"},
    {"optimizer": "sm3+8bit"},
    {"microbatch": 103},
    {"precision": "bf16", "optimizer": "8bit+no-gradient"},
    {"precision": "fp16", "optimizer": "adafactor", "microbatch": 103},
    {"checkpoint": "residual-1", "optimizer": "8bit", "microbatch": 256},
    {"activations": "offload", "microbatch": 512},
]


MOSTLY = [("weights", 64), ("activations", 1024)]


def mostly_in_turn():
    """Each effect where it is mostly on weights or mostly on activations, in turn; the other of the two is slow."""
    for number, settings in enumerate(EFFECTS):
        cases = [(words, batch) for words, batch in MOSTLY if settings.get("microbatch", 0) < batch]
        for place, (words, batch) in enumerate(cases):
            marks = () if place == number % len(cases) else pytest.mark.slow
            yield pytest.param(settings, batch, marks=marks, id=f"mostly {words}-{settings}")


@pytest.mark.parametrize("settings, batch", mostly_in_turn())
def test_an_estimate_is_near_the_trace_and_never_far_above_it(settings, batch):
    one = Search(layers(batch), 10**9, RATES)
    about, _ = one.estimate(option(one, **settings))
    peak = one.traces.of(tuple(settings.items())).peak_bytes
    assert 0.8 * peak <= about <= 1.05 * peak  # what is estimated too high would be passed over in silence


@pytest.mark.parametrize("settings", [{}, {"checkpoint": "residual-1"}], ids=str)
def test_the_time_of_paging_is_the_bytes_that_go_to_disk_and_back_over_its_rate(settings):
    slow, fast = (Search(layers(), 10**9, Rates(1e11, 8e10, 1e10, 1e-5, rate)) for rate in (1e8, 1e9))
    on_disk = option(slow, **settings, activations="offload")
    base = slow.traces.base(slow.traces.key(on_disk.settings))
    assert base.work.offloaded_bytes > 1e6
    extra = slow.seconds(on_disk) - fast.seconds(on_disk)
    assert extra == pytest.approx(2 * base.work.offloaded_bytes * (1e-8 - 1e-9))
    assert slow.traces.base(slow.traces.key(PLAIN.settings)).work.offloaded_bytes == 0


@pytest.mark.slow
def test_where_nothing_else_is_small_enough_tensors_are_paged_out():
    task = zoo.unet()
    search = Search(task, 10**9, RATES)
    others = [o for o in search.candidates.at(Risk.EXACT) if "activations" not in dict(o.settings)]
    least = min(traced.peak_bytes for o in others if (traced := search.traces.of(o.settings)))
    on_disk = search.traces.of(search.smallest(Risk.EXACT)).peak_bytes
    assert on_disk < least
    found = plan(task, (on_disk + 3 * least) // 4, "exact", RATES)
    assert found.activations == "offload" and found.predicted_time_ratio > 1


@pytest.mark.parametrize(
    "settings", [{"checkpoint": "residual-1"}, {"checkpoint": "residual-2*"}, {"checkpoint": "optimal"},
                 {"activations": "offload"}, {"activations": "half"},
                 {"precision": "fp16", "checkpoint": "residual-1"}], ids=str
)  # fmt: skip
@pytest.mark.parametrize("make", [layers, pytest.param(zoo.gpt, marks=pytest.mark.slow)], ids=["layers", "gpt"])
def test_the_bound_of_an_options_time_is_no_more_than_its_time(make, settings):
    task = make()
    search = Search(task, profile(task).peak_bytes // 2, RATES)
    for pair in settings.items():
        if pair[0] == "precision":
            search.traces.base((pair,))
    search.traces.base(())
    one = option(search, **settings)
    bound = search.time_bound(one)
    assert 0 < bound <= search.seconds(one)


# How many traces a search makes decides how long it takes: each is a whole step of Python. Where the calls of a step
# cost more than its bytes, as in tiny models, the bounds say little, and every exact kind is traced.
@pytest.mark.parametrize("share", [0.7, 0.4, 0.2])
def test_where_bytes_cost_most_few_of_the_kinds_of_options_are_traced(share):
    task, traced = layers(16384, 256, 2), []
    plan(task, round(share * profile(task).peak_bytes), "approximate", RATES, progress=traced.append)
    search = Search(task, 1, RATES)
    kinds = {search.traces.key(o.settings) for level in Risk for o in search.candidates.at(level)}
    assert len(traced) <= len(kinds) / 4, traced


@pytest.mark.slow
@pytest.mark.parametrize("budget, most", [("24GB", 24e9), ("16GB", 16e9)])
def test_a_llama_of_7_billion_parameters_is_planned(budget, most):
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=False))
    assert sum(parameter.numel() for parameter in model.parameters()) > 6.7e9
    ids = torch.randint(32000, (4, 512))
    task = Task(model, lambda model, batch: model(input_ids=batch, labels=batch).loss, ids, Adam(), name="llama")
    found = plan(task, budget, "approximate", RATES)
    assert found.predicted_peak_bytes <= most and found.precision == "bf16"


def test_an_option_says_its_settings():
    assert (
        str(Option((("activations", "offload"), ("microbatch", 2)), Risk.EXACT)) == "activations offload, microbatch 2"
    )
    assert str(PLAIN) == "no technique"


def test_sgd_without_state_is_planned_too():
    task = layers(optimizer=SGD(lr=0.1))
    found = plan(task, profile(task).peak_bytes // 2, rates=RATES)
    assert found.predicted_peak_bytes <= profile(task).peak_bytes // 2
