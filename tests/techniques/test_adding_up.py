"""Microbatches are exact where the loss of the pieces adds up to that of the batch, and refused where it does not."""

import random
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from runs import distance, doubled, run
from torch import nn

import shoestring
from shoestring import SGD, NoPlanFits, Plan, ShoestringError, Task, apply, plan
from shoestring.items import Entries
from shoestring.planning.traces import blank
from shoestring.profiling import profile
from shoestring.techniques import microbatch
from shoestring.techniques.microbatch import split_of
from shoestring.techniques.microbatch.adding_up import judge, undisturbed
from shoestring.techniques.technique import Risk
from shoestring.turns import turn

WORDS = 40


class Language(nn.Module):
    """A causal language model, but for the attention."""

    def __init__(self, dropout=0.1, head=None):
        super().__init__()
        self.embed, self.mix = nn.Embedding(WORDS, 16), nn.GRU(16, 16, batch_first=True)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(16, WORDS)
        if head is not None:
            nn.init.constant_(self.head.weight, head)
            nn.init.constant_(self.head.bias, head)

    def forward(self, ids):
        return self.head(self.drop(self.mix(self.embed(ids))[0]))


def sentences(examples=8, length=12, prompt=0):
    """Ids and labels as a collator makes them: padding, and the prompt, are -100."""
    torch.manual_seed(3)
    ids = torch.randint(3, WORDS, (examples, length))
    lengths = torch.randint(prompt + 2, length + 1, (examples, 1))
    lengths[0], lengths[1] = prompt + 2, length
    real = torch.arange(length) < lengths
    labels = ids.masked_fill(~real | (torch.arange(length) < prompt), -100)
    return {"ids": ids.masked_fill(~real, 0), "attention_mask": real.long(), "labels": labels}


def without(name):
    return {key: value for key, value in sentences().items() if key != name}


def next_token(model, batch):
    scores, labels = model(batch["ids"])[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def same_token(model, batch):
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def mean_of_means(model, batch):
    losses = F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["labels"], reduction="none")
    real = batch["labels"] != -100
    return ((losses * real).sum(1) / real.sum(1)).mean()


def masked_mean(model, batch):
    losses = F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["ids"], reduction="none")
    mask = batch["attention_mask"].float()
    return (losses * mask).sum() / mask.sum()


def contrastive(model, batch):
    left, right = (F.normalize(model(side), dim=1) for side in batch)
    scores = 10 * left @ right.T
    return F.cross_entropy(scores, torch.arange(len(scores)))


def ctc(how):
    def loss(model, batch):
        scores = model(batch["x"]).log_softmax(2).transpose(0, 1)
        return F.ctc_loss(scores, batch["labels"], batch["lengths"], batch["counts"], reduction=how)

    return loss


def spoken():
    torch.manual_seed(0)
    counts = torch.tensor([4, 1, 3, 2, 4, 2])
    batch = {"x": torch.randn(6, 20, 8), "labels": torch.randint(1, 10, (6, 4)), "counts": counts}
    return batch | {"lengths": torch.full((6,), 20)}


def language(loss=next_token, batch=None, **changes):
    torch.manual_seed(0)
    return Task(Language(**changes.pop("model", {})), loss, batch or sentences(), SGD(lr=0.1), **changes)


def pairs(**changes):
    torch.manual_seed(0)
    batch = torch.randn(8, 6), torch.randn(8, 6)
    return Task(nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.1)), contrastive, batch, SGD(lr=0.1), **changes)


def voices(how, **changes):
    torch.manual_seed(0)
    return Task(nn.Linear(8, 10), ctc(how), spoken(), SGD(lr=0.1), **changes)


def verdict(task):
    return judge(task, split_of(task, 1))


def off(task, size=3):
    """By how much the gradient of microbatches is off that of the batch, in FP64 and without dropout."""
    task = doubled(task.with_(optimizer=SGD(lr=0.0)))
    for module in task.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return distance(run(apply(task, Plan(microbatch=size)).task, 1).gradients[0], run(task, 1).gradients[0])


# -- what adds up ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "loss, batch, counted",
    [
        (next_token, sentences(), Entries("labels", shifted=True)),
        (next_token, sentences(prompt=4), None),  # the first label never counts: the usual count is right
        (same_token, sentences(), None),
        (masked_mean, without("labels"), Entries("attention_mask", (0,))),
    ],
)
def test_token_losses_weigh_by_the_labels_that_they_count(loss, batch, counted):
    task = language(loss, batch)
    found = verdict(task)
    assert found.adds_up and found.items == counted
    assert microbatch.risk(task, 3) == Risk.EXACT
    assert off(task) < 1e-12


def test_the_count_that_was_taken_is_told():
    words = "weigh by the entries of 'labels' that are not -100, without the first of each row"
    assert words in verdict(language()).reason


def test_means_over_sentences_weigh_by_examples():
    task = language(mean_of_means)
    assert str(verdict(task).items) == "examples"
    assert off(task) < 1e-12


def test_labels_that_are_left_out_by_another_number_are_found():
    batch = without("attention_mask")
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] == -100, 255)
    task = language(lambda m, b: F.cross_entropy(m(b["ids"]).flatten(0, 1), b["labels"].flatten(), ignore_index=255),
                    batch)  # fmt: skip
    assert verdict(task).items == Entries("labels", (-100, 255))
    assert off(task) < 1e-12


def test_labels_without_a_name_are_found():
    batch = tuple(sentences().values())
    task = language(lambda m, b: F.cross_entropy(m(b[0]).flatten(0, 1), b[2].flatten()), batch)
    assert verdict(task).items == Entries("2")
    assert off(task) < 1e-12


@pytest.mark.parametrize("head", [0.0, 1e-6])
def test_a_last_layer_of_zeros_hides_no_wrong_weights(head):
    """All losses are the logarithm of the words, whatever the weights of the pieces."""
    task = language(model={"head": head})
    assert verdict(task).items == Entries("labels", shifted=True)
    by_examples = verdict(language(model={"head": head}, items=lambda batch: len(batch["ids"])))
    assert by_examples.adds_up is False
    assert bool((task.model.head.weight == head).all()) and bool((task.model.head.bias == head).all())


def test_sums_add_up_when_they_are_said_to_be_sums():
    task = voices("sum", reduction="sum")
    assert verdict(task).adds_up and off(task, 4) < 1e-12
    assert verdict(voices("mean")).adds_up and off(voices("mean"), 4) < 1e-12


def test_items_that_the_user_counts_are_checked():
    right = language(items=lambda batch: int((batch["labels"][:, 1:] != -100).sum()))
    assert verdict(right).adds_up and off(right) < 1e-12
    wrong = verdict(language(items=lambda batch: len(batch["ids"])))
    assert wrong.adds_up is False and "the mean over the entries of 'labels'" in wrong.reason


@pytest.mark.parametrize("norm", [{}, {"track_running_stats": False}])
def test_batch_norm_is_no_matter_of_the_loss(norm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, **norm), nn.Linear(8, 3))
    batch = torch.randn(20, 6), torch.randint(3, (20,))
    task = Task(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batch, SGD(lr=0.1))
    assert verdict(task).adds_up
    assert microbatch.risk(task, 10) == Risk.APPROXIMATE


def test_the_builtin_tasks_are_as_they_say():
    for name, size in (("wrn-10-1", {"batch": 6, "image": 16}), ("dynamicconv-iwslt", {"tokens": 120})):
        task = shoestring.builtin(name, **size)
        assert task.microbatches is True
        assert verdict(task.with_(microbatches=None)).adds_up


# -- what does not --------------------------------------------------------------------------------------------------
def test_in_batch_negatives_are_refused_and_not_offered():
    task = pairs()
    words = r"do not add up to the batch: .* few examples is .* that of their pieces .* Task\(items=..., " \
            r'reduction="mean" or "sum"\), .* microbatches=False'  # fmt: skip
    for use in (microbatch.options, lambda task: apply(task, Plan(microbatch=4))):
        with pytest.raises(ShoestringError, match=words):
            use(task)


def test_a_planner_does_without_microbatches_that_do_not_add_up():
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))
    batch = torch.randn(400, 64), torch.randn(400, 64)
    mean = Task(model, lambda m, b: (m(b[0]) - b[1]).square().mean(), batch, SGD(lr=0.1))
    budget = int(profile(mean).peak_bytes * 0.5)
    assert "microbatch" in plan(mean, budget, risk="exact").techniques()
    for task in (mean.with_(microbatches=False), mean.with_(loss=contrastive)):
        with pytest.raises(NoPlanFits):
            plan(task, budget, risk="exact")


def test_a_sum_is_refused_with_the_word_for_it():
    with pytest.raises(ShoestringError, match=r'in the mean, but their sum: pass Task\(reduction="sum"\)'):
        apply(voices("sum"), Plan(microbatch=2))
    with pytest.raises(ShoestringError, match=r'the mean over the .*: pass Task\(items=..., reduction="mean"\)'):
        apply(voices("mean", reduction="sum"), Plan(microbatch=2))


def test_a_term_that_looks_at_the_whole_batch_is_seen_though_it_is_small():
    def balanced(model, batch):
        scores = model(batch["ids"])
        return next_token(lambda _: scores, batch) + 0.5 * scores.mean((0, 1)).square().mean()

    assert verdict(language(balanced)).adds_up is False


def test_a_mask_that_is_cut_though_all_need_it_is_seen():
    torch.manual_seed(0)
    batch = {"x": torch.randn(6, 6, 4), "mask": torch.ones(6, 6).tril()}
    model = nn.MultiheadAttention(4, 2, batch_first=True)

    def loss(model, batch):
        out, _ = model(batch["x"], batch["x"], batch["x"], attn_mask=batch["mask"].log())
        return out.square().mean()

    task = Task(model, loss, batch, SGD(lr=0.1))
    with pytest.raises(ShoestringError, match="few examples of the batch fails"):
        apply(task, Plan(microbatch=3))
    assert off(task.with_(shared=["mask"])) < 1e-12


def test_a_task_may_say_that_it_has_no_microbatches_or_that_they_add_up():
    for task in (pairs(microbatches=False), language(same_token, microbatches=False)):
        for use in (microbatch.options, lambda task: apply(task, Plan(microbatch=4))):
            with pytest.raises(ShoestringError, match="the task says microbatches=False"):
                use(task)
    assert microbatch.options(pairs(microbatches=True)) and apply(pairs(microbatches=True), Plan(microbatch=4))


# -- what nobody can know -------------------------------------------------------------------------------------------
def test_a_model_without_numbers_is_neutral_at_best():
    task = language()
    task = task.with_(model=blank(task.model))
    assert verdict(task).adds_up is None and "meta" in verdict(task).reason
    assert microbatch.options(task) and microbatch.risk(task, 4) == Risk.NEUTRAL
    assert apply(task, Plan(microbatch=4)).task.settings == {"microbatch": 4}


def test_a_loss_that_draws_is_neutral_unless_no_draw_explains_it():
    def noisy(model, batch):
        x = batch[0] + 0.1 * torch.randn_like(batch[0])
        return (model(x) - batch[1][:, :5]).square().mean()

    assert verdict(pairs().with_(loss=noisy)).adds_up is None
    assert microbatch.risk(pairs().with_(loss=noisy), 4) == Risk.NEUTRAL
    augmented = pairs().with_(loss=lambda m, b: contrastive(m, [side + 0.01 * torch.randn_like(side) for side in b]))
    assert verdict(augmented).adds_up is False


def test_losses_that_are_all_alike_tell_nothing():
    task = Task(nn.Linear(2, 1, bias=False), lambda m, b: m(b).mean(), torch.ones(6, 2), SGD())
    assert verdict(task).adds_up is None


# -- how it is asked ------------------------------------------------------------------------------------------------
class Restless(nn.Module):
    """All that a forward pass may change: statistics, buffers, attributes, hooks, generators."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.seen, self.last, self.hooked = [], None, False

    def forward(self, x):
        if not self.hooked:
            self.hooked = True
            self.layer.register_forward_hook(lambda *_: None)
        torch.rand(3), random.random(), np.random.rand()
        self.calls += 1
        x = self.drop(self.norm(self.layer(x)))
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        self.last = x
        self.seen.append(x.shape)
        return x.square().mean()


def looks(model):
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hooks = [len(module._forward_hooks) for module in model.modules()]
    modes = [module.training for module in model.modules()]
    attributes = (list(model.seen), model.last, model.hooked)
    generators = (torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=True)[1].copy())
    return tensors, hooks, modes, attributes, generators


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("stirred", [True, False])
def test_nothing_is_left_of_the_question(training, stirred):
    torch.manual_seed(0)
    model = Restless().train(training)
    model.norm.eval()
    if stirred:
        nn.init.zeros_(model.norm.weight)
    task = Task(model, lambda m, b: m(b), torch.randn(8, 6), SGD())
    before = looks(model)
    assert verdict(task).adds_up
    after = looks(model)
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert before[1:4] == after[1:4]
    assert torch.equal(before[4][0], after[4][0]) and before[4][1] == after[4][1]
    assert np.array_equal(before[4][2], after[4][2])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_fails_is_as_it_was_too():
    model = Restless()
    before = looks(model)
    with pytest.raises(ZeroDivisionError), undisturbed(model):
        model.eval()
        model(torch.randn(4, 6))
        model.layer.weight.data.zero_()
        raise ZeroDivisionError
    after = looks(model)
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert before[1:4] == after[1:4]


def test_the_batch_is_not_changed_and_few_examples_are_run():
    sizes = []

    class Counting(nn.Linear):
        def forward(self, x):
            sizes.append(len(x))
            assert not torch.is_grad_enabled() and not self.training
            return super().forward(x)

    batch = {"x": torch.randn(300, 4), "y": torch.randn(300, 1)}
    before = {name: tensor.clone() for name, tensor in batch.items()}

    def popping(model, batch):
        return (model(batch.pop("x")) - batch.pop("y")).square().mean()

    assert verdict(Task(Counting(4, 1), popping, batch, SGD())).adds_up
    assert max(sizes) == 5 and len(sizes) < 10
    assert batch.keys() == before.keys() and all(torch.equal(batch[name], before[name]) for name in before)


def test_a_model_with_a_loss_in_training_mode_only_is_asked_there():
    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.drop = nn.Linear(4, 1), nn.Dropout(0.5)

        def forward(self, x):
            scores = self.layer(self.drop(x))
            return scores.square().mean() if self.training else [scores]

    assert verdict(Task(Detector(), lambda m, b: m(b), torch.randn(8, 4), SGD())).adds_up


def test_a_loss_that_differentiates_inside_is_asked_with_gradients():
    def forces(model, batch):
        x = batch.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return gradient.square().mean()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    assert verdict(Task(model, forces, torch.randn(8, 4), SGD())).adds_up


def test_a_model_that_another_thread_has_is_not_asked():
    refused = []

    def ask(task):
        try:
            verdict(task)
        except ShoestringError as error:
            refused.append(str(error))

    task = language()
    with turn(task.model, "trained"):
        thread = threading.Thread(target=ask, args=(task,))
        thread.start()
        thread.join()
    assert len(refused) == 1 and "it is being trained in another thread" in refused[0]


def test_it_is_asked_once_for_a_task():
    calls = []

    def loss(model, batch):
        calls.append(1)
        return model(batch).square().mean()

    task = Task(nn.Linear(4, 1), loss, torch.randn(8, 4), SGD())
    microbatch.options(task)
    asked = len(calls)
    microbatch.options(task), microbatch.risk(task, 4), microbatch.risk(task, 2)
    assert len(calls) == asked > 0


@pytest.mark.parametrize(
    "other", [{"precision": "fp16"}, {"checkpoint": "every-2"}, {"nonzero": 50}, {"activations": "half"}]
)
def test_it_is_asked_beside_other_techniques_too(other):
    torch.manual_seed(0)

    def make(loss):
        model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())))
        return Task(model, loss, (torch.randn(512, 64), torch.randn(512, 64)), SGD(lr=0.1))

    settings = Plan(**other).with_(microbatch=256)
    assert apply(make(lambda m, b: (m(b[0]) - b[1]).square().mean()), settings)
    with pytest.raises(ShoestringError, match="do not add up"):
        apply(make(contrastive), settings)


class Counting(nn.Module):
    """Changes a buffer in each training pass: in place, or by another tensor."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.how = nn.Linear(4, 2), how
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        if self.training and self.how == "in place":
            self.passes += 1
        elif self.training and self.how == "replaced":
            self.passes = self.passes + 1
        return self.linear(x)


@pytest.mark.parametrize("how", ["in place", "replaced", "not at all", "power iteration"])
def test_a_buffer_that_each_pass_changes_makes_microbatches_neutral_and_is_left_as_it_was(how):
    model = Counting(how)
    if how == "power iteration":
        nn.utils.parametrizations.spectral_norm(model.linear)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    task = Task(model, lambda model, batch: model(batch).square().mean(), torch.randn(8, 4), SGD(lr=0.1))
    assert microbatch.risk(task, 2) == (Risk.EXACT if how == "not at all" else Risk.NEUTRAL)
    assert ("is changed by each pass" in microbatch.evidence(task, 2)) == (how != "not at all")
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
