"""Adaptive compression: each layer's codec by its measured error, within the bytes that the batch may save."""

import itertools
import random
from collections import Counter

import pytest
import torch
from torch import nn

import shoestring
from shoestring import SGD, Plan, ShoestringError, Task, apply
from shoestring.errors import NoPlanFits, OverBudget
from shoestring.models.images import classification_loss
from shoestring.runs.state import find_stateful
from shoestring.techniques.activations import adaptive
from shoestring.techniques.activations.adaptive import EXACT, choose, rules_of
from shoestring.techniques.activations.gradients import gradients, untouched
from shoestring.techniques.activations.rehearsals import saved_bytes
from shoestring.techniques.activations.saving import SavedPass


class Net(nn.Module):
    """Three convolutions whose gradients differ much in size, a batch norm, and a classifier."""

    def __init__(self):
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.two, self.three = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.one(x)))
        x = torch.relu(self.two(x) * 3)
        return self.head(torch.relu(self.three(x) * 0.1).mean((2, 3)))


def task(batch=32):
    torch.manual_seed(0)
    data = torch.randn(batch, 3, 16, 16), torch.randint(10, (batch,))
    return Task(Net(), classification_loss, data, SGD(lr=0.05, momentum=0.9), name="net")


def hook_of(lean):
    (hook,) = lean.task.after_update
    return hook


def stored(hook):
    return sum(part.bytes[hook.choice[part.name]] for part in hook.parts)


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_best_of_all_choices_that_fit(seed):
    draw = random.Random(seed)
    codecs = ["a", "b", "c"]
    sizes = [{codec: draw.randrange(1, 100) for codec in codecs} for _ in range(5)]
    errors = [{codec: draw.random() for codec in codecs} for _ in range(5)]
    limit = draw.randrange(sum(min(one.values()) for one in sizes), 400)

    def total(table, chosen):
        return sum(one[codec] for one, codec in zip(table, chosen, strict=True))

    fitting = [c for c in itertools.product(codecs, repeat=5) if total(sizes, c) <= limit]
    chosen = choose(sizes, errors, limit)
    assert total(sizes, chosen) <= limit
    assert total(errors, chosen) == pytest.approx(min(total(errors, c) for c in fitting))


def test_the_bytes_are_kept_by_every_choice_and_the_errors_become_the_measured_ones(monkeypatch):
    monkeypatch.setattr(adaptive, "MEASURE_EVERY", 2)
    monkeypatch.setattr(adaptive, "CHOOSE_EVERY", 4)
    one = task()
    lean = apply(one, Plan(activations="adaptive-95KB"))
    hook = hook_of(lean)
    first, usual = dict(hook.choice), {name: dict(errors) for name, errors in hook.errors.items()}
    for _ in range(9):
        lean.step(one.batch)
        assert stored(hook) <= 95_000
        assert [rule.codec for rule in hook.rules] == [
            codec for name, codec in hook.choice.items() if name != adaptive.REST
        ]
    assert hook.measured == 5
    assert hook.errors != usual and hook.choice != first


@pytest.mark.parametrize("model", ["resnet18", "wrn-10-1", "vit-tiny"])
def test_all_that_the_batch_saves_is_within_the_size_masks_and_other_exact_tensors_included(model):
    one = shoestring.builtin(model, device="meta", batch=16)
    parts = hook_of(apply(one, Plan(activations="adaptive-1GB"))).parts
    least, most = (sum(best(part.bytes.values()) for part in parts) for best in (min, max))
    for share in (0.0, 0.3):
        size = least + int(share * (most - least))
        assert saved_bytes(apply(one, Plan(activations=f"adaptive-{size}B")).task) <= size


@pytest.mark.parametrize(("model", "travelling"), [
    ("wrn-10-1", {"batch_norm": 7}),
    pytest.param(
        "vit-tiny", {"layer_norm": 24, "gelu": 12, "scaled_dot_product_attention": 12}, marks=pytest.mark.slow
    ),
])  # fmt: skip
def test_what_travels_has_a_codec_of_its_own_and_is_offered_none_with_a_bias(model, travelling):
    parts = hook_of(apply(shoestring.builtin(model, device="meta", batch=64), Plan(activations="adaptive-1GB"))).parts
    norms = [part for part in parts if ":" in part.name]
    assert Counter(part.name.partition(":")[2] for part in norms) == travelling
    assert all(part.bytes.keys() <= {EXACT, *adaptive.UNBIASED} for part in norms)
    # A module's own rule comes before the rule for all of its operations.
    places = [rule for part in parts for rule in part.rules]
    assert all(operation == "*" for _, operation in places[len(norms) :])


def test_what_travels_is_measured_in_turn_and_finer_rounding_is_told_by_the_coarsest(monkeypatch):
    monkeypatch.setattr(adaptive, "MEASURE_EVERY", 1)
    monkeypatch.setattr(adaptive, "PROBED", 1)
    one = task()
    blocks = [nn.Sequential(nn.Conv2d(width, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for width in (3, 8, 8)]
    one = one.with_(model=nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)))
    lean = apply(one, Plan(activations="adaptive-400KB"))
    hook = hook_of(lean)
    norms = [part.name for part in hook.parts if ":" in part.name]
    assert len(norms) == 3
    assert [part.name for part in hook._probed()] == norms  # all, at the first time
    seen = []
    for _ in range(len(norms) + 1):
        lean.step(one.batch)
        seen += [part.name for part in hook._probed()]
    assert seen == [*norms, norms[0]]
    for name in norms:
        errors = hook.errors[name]
        assert errors["int4"] == pytest.approx(errors["int2"] / 25) and 0 < errors["int8"] < errors["int4"]


def test_its_error_is_at_most_that_of_any_uniform_codec_of_as_many_bytes():
    """Measured on the whole batch, each with the same random numbers."""
    one = task()
    for codec in ("int2", "int4", "pool2"):
        size = sum(
            part.bytes.get(codec, part.bytes[EXACT])
            for part in hook_of(apply(one, Plan(activations="adaptive-10MB"))).parts
        )
        lean = apply(one, Plan(activations=f"adaptive-{size}B"))
        hook = hook_of(lean)
        lean.step(one.batch)
        with untouched(one.model):
            exact = gradients(one, one.batch)
        uniform = rules_of(hook.parts, dict.fromkeys(hook.choice, codec))  # of the rest there is no rule

        def error(rules, exact=exact, hook=hook, lean=lean):
            with untouched(one.model):
                lossy = gradients(hook._under(lean.task, rules), one.batch)
            return sum((exact[name] - lossy[name]).square().sum().item() for name in exact)

        assert error(tuple(hook.rules)) <= error(uniform)


def test_measuring_changes_nothing_of_the_training(monkeypatch):
    """With room for everything the gradients are exact: the weights are those of plain training, to the bit."""
    monkeypatch.setattr(adaptive, "MEASURE_EVERY", 1)
    plain, lean = apply(task(), Plan()), apply(task(), Plan(activations="adaptive-10MB"))
    for _ in range(3):
        torch.manual_seed(1)
        a = plain.step(plain.task.batch)
        torch.manual_seed(1)
        b = lean.step(lean.task.batch)
        assert torch.equal(a, b)
    assert set(hook_of(lean).choice.values()) == {EXACT}
    for one, other in zip(plain.model.state_dict().values(), lean.model.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_choice_and_its_errors_are_part_of_a_runs_state(monkeypatch):
    monkeypatch.setattr(adaptive, "MEASURE_EVERY", 1)
    monkeypatch.setattr(adaptive, "CHOOSE_EVERY", 1)
    one, other = (apply(task(), Plan(activations="adaptive-95KB")) for _ in range(2))
    for _ in range(2):
        one.step(one.task.batch)
    parts, twins = find_stateful(one.task), find_stateful(other.task)
    for name, part in parts.items():
        twins[name].restore(part.state())
    assert hook_of(other).choice == hook_of(one).choice
    assert hook_of(other).rules == hook_of(one).rules == other.task.contexts[-1].rules
    assert hook_of(other).state() == hook_of(one).state()


def test_a_named_budget_is_kept_by_the_prediction_and_plain_adaptive_asks_for_one():
    one = task(256)
    budget = int(
        0.85 * shoestring.profile(one).peak_bytes
    )  # PyTorch's own scratch, by the CPU a third to a half, stays
    plan = shoestring.plan(one, budget, activations="adaptive")
    assert plan.activations.startswith("adaptive-")
    assert plan.predicted_peak_bytes <= budget
    assert shoestring.profile(apply(one, plan).task).peak_bytes == plan.predicted_peak_bytes
    with pytest.raises(ShoestringError, match="adaptive needs a budget"):
        apply(one, Plan(activations="adaptive"))


def test_sizes_and_budgets_that_cannot_be_kept_are_refused_with_the_numbers():
    with pytest.raises(ShoestringError, match=r"adaptive needs at least .* KB for what the batch"):
        apply(task(), Plan(activations="adaptive-1KB"))
    with pytest.raises(ShoestringError, match="is not a size"):
        apply(task(), Plan(activations="adaptive-lots"))
    with pytest.raises(NoPlanFits, match="with the roughest codecs"):
        shoestring.plan(task(), "60KB", activations="adaptive")
    with pytest.raises(OverBudget, match="with activations int4 a step would need"):
        shoestring.plan(task(), "60KB", activations="int4")


def test_it_stands_beside_other_techniques():
    one = task()
    lean = apply(one, Plan(activations="adaptive-95KB", precision="fp16", microbatch=16))
    losses = [lean.step(one.batch).item() for _ in range(3)]
    assert losses[-1] < losses[0]
    assert any(isinstance(context, SavedPass) for context in lean.task.contexts)


@pytest.mark.parametrize("more", [{}, {"microbatch": 8}])
def test_a_share_of_the_saved_bytes_is_that_of_the_whole_batch(more):
    hook = hook_of(apply(task(), Plan(activations="adaptive/6", **more)))
    assert hook.limit == saved_bytes(task()) // 6
    assert stored(hook) <= hook.limit


@pytest.mark.parametrize("share", ["0", "1", "-8", "nan", "inf", "many", "8x"])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(
        ShoestringError, match=f"adaptive/{share} is no share of the saved bytes: give a number above 1"
    ):
        apply(task(), Plan(activations=f"adaptive/{share}"))
