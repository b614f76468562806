"""Checkpoint strategies on models that users bring: which blocks, in what order of calls, under what conditions."""

import random

import pytest
import torch
import torch.nn.functional as F
from runs import distance, doubled, run
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from shoestring import SGD, Plan, ShoestringError, Task, apply, builtin
from shoestring.errors import NoEffect
from shoestring.ledger import Phase
from shoestring.passes.mode import with_mode
from shoestring.profiling import profile
from shoestring.techniques import checkpoint

STRATEGIES = ("residual-1", "residual-1*", "residual-2", "residual-2*", "every-2", "optimal")
WIDTH = 16


class Block(nn.Module):
    """A residual block; `inside` is what happens between its two layers."""

    def __init__(self, inside=torch.tanh):
        super().__init__()
        self.up, self.down, self.inside = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), inside

    def forward(self, x):
        return x + self.down(self.inside(self.up(x)))


class Chain(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(WIDTH, WIDTH), nn.ModuleList(blocks), nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def classify(model, batch):
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def task(make, loss=classify):
    """`make()` builds the model; the same weights and batch each time."""
    torch.manual_seed(0)
    model = make()
    return Task(model, loss, (torch.randn(8, WIDTH), torch.randint(3, (8,))), SGD(lr=0.1))


def same_as_plain(make, strategy, loss=classify):
    """Whether lean steps in FP64 have plain training's gradients, buffers and random numbers."""
    plain = run(doubled(task(make, loss)))
    lean = run(apply(doubled(task(make, loss)), Plan(checkpoint=strategy)).task)
    gradients = all(distance(a, b) < 1e-10 for a, b in zip(lean.gradients, plain.gradients, strict=True))
    buffers = all(torch.allclose(lean.buffers[name], plain.buffers[name], rtol=1e-10) for name in plain.buffers)
    return gradients and buffers and torch.equal(lean.random, plain.random)


# -- words and models that do not fit -------------------------------------------------------------------------------
@pytest.mark.parametrize("text", ["residual", "residual-0", "residual-2***", "every-2*", "every", "all", "optimal-x"])
def test_an_unknown_strategy_is_refused_with_those_that_exist(text):
    with pytest.raises(ShoestringError):
        apply(task(lambda: Chain([Block(), Block()])), Plan(checkpoint=text))


def test_the_strategy_none_in_a_plan_changes_nothing():
    given = task(lambda: Chain([Block(), Block()]))
    assert apply(given, Plan(checkpoint="none")).task.contexts == ()
    with pytest.raises(NoEffect, match="leave it out"):
        checkpoint.apply(given, checkpoint.Settings("none"))


def test_a_model_without_blocks_is_refused_by_name():
    with pytest.raises(ShoestringError, match=r"Linear has no repeated blocks for residual-1"):
        apply(task(lambda: nn.Linear(WIDTH, 3)), Plan(checkpoint="residual-1"))


def test_a_model_without_batch_norm_is_refused_by_name():
    with pytest.raises(ShoestringError, match="Chain has no batch norm"):
        apply(task(lambda: Chain([Block(), Block()])), Plan(checkpoint="no-bn"))


def test_blocks_can_be_named_by_hand():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.head = Block(), Block(torch.sin), nn.Linear(WIDTH, 3)

        def forward(self, x):
            return self.head(self.two(self.one(x)))

    plain = run(doubled(task(Named)))
    settings = checkpoint.Settings("residual-2", blocks=("one", "t?o"))
    lean = run(checkpoint.apply(doubled(task(Named)), settings))
    assert distance(lean.gradients[-1], plain.gradients[-1]) < 1e-10
    with pytest.raises(ShoestringError, match="no module 'three' to checkpoint: its modules are one, "):
        checkpoint.apply(task(Named), checkpoint.Settings("residual-1", blocks=("three",)))


@pytest.mark.parametrize("strategy", ["residual-1", "residual-2", "residual-2*", "optimal"])
def test_blocks_beside_each_other_are_regions_of_their_own(strategy):
    class Parallel(Chain):
        def forward(self, x):
            x = self.stem(x)
            return self.head(sum(block(x) for block in self.blocks))

    assert same_as_plain(lambda: Parallel([Block(nn.Dropout(0.2)), Block(), Block()]), strategy)


# -- what users' models do --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dropout_draws_the_same_numbers(strategy):
    assert same_as_plain(lambda: Chain([Block(nn.Dropout(0.3)) for _ in range(4)]), strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_users_own_checkpoint_inside_a_block(strategy):
    class Nested(Block):
        def forward(self, x):
            return torch_checkpoint(super().forward, x, use_reentrant=False)

    assert same_as_plain(lambda: Chain([Nested(nn.Dropout(0.3)) for _ in range(3)]), strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_block_that_is_called_twice(strategy):
    class Twice(Chain):
        def forward(self, x):
            x = self.stem(x)
            for block in (*self.blocks, *self.blocks):
                x = block(x)
            return self.head(x)

    assert same_as_plain(lambda: Twice([Block(nn.Dropout(0.2)), Block()]), strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_block_that_two_places_share(strategy):
    def make():
        shared = Block(nn.Dropout(0.2))
        return Chain([shared, Block(), shared])

    assert same_as_plain(make, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_batch_norm_that_is_called_twice_a_pass(strategy):
    class Normed(Block):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            return super().forward(F.relu(self.norm(F.relu(self.norm(x)))))

    assert same_as_plain(lambda: Chain([Normed() for _ in range(3)]), strategy)


class Means(nn.Module):
    """Follows the mean of what it sees in a buffer, in place or by a new one; `steps` counts its calls."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        with torch.no_grad():
            if self.in_place:
                self.mean.lerp_(x.mean(), 0.1)
                self.steps += 1
            else:
                self.mean, self.steps = self.mean + 0.1 * (x.mean() - self.mean), self.steps + 1
        return torch.tanh(x)


NORMS = {
    "batch norm": lambda: nn.BatchNorm1d(2 * WIDTH),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (8, 4)), nn.InstanceNorm1d(8, track_running_stats=True), nn.Flatten()
    ),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(2 * WIDTH, 2 * WIDTH)),
    "spectral norm by a hook": lambda: nn.utils.spectral_norm(nn.Linear(2 * WIDTH, 2 * WIDTH)),
    "a mean in place": lambda: Means(True),
    "a mean by a new buffer": lambda: Means(False),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "every-2"])
def test_what_a_block_counts_in_its_buffers_it_counts_once(strategy, norm):
    assert same_as_plain(lambda: Chain([Block(NORMS[norm]()) for _ in range(4)]), strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_blocks_that_take_and_return_several_things(strategy):
    class Pair(Block):
        def forward(self, state, scale=1.0):
            x, seen = state
            return super().forward(x) * scale, {"seen": seen["seen"] + x.mean()}

    class Pairs(Chain):
        def forward(self, x):
            state = self.stem(x), {"seen": x.new_zeros(())}
            for block in self.blocks:
                state = block(state, scale=0.5)
            return self.head(state[0]) + state[1]["seen"]

    assert same_as_plain(lambda: Pairs([Pair(), Pair(), Pair()]), strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_blocks_with_something_between_them(strategy):
    class Between(Chain):
        def forward(self, x):
            for block in self.blocks:
                x = torch.sin(block(x))
            return self.head(x)

    def make():
        model = Between([Block(nn.Dropout(0.2)) for _ in range(3)])
        model.stem.requires_grad_(False)
        return model

    plain, lean = run(doubled(task(make)), 1), run(apply(doubled(task(make)), Plan(checkpoint=strategy)).task, 1)
    assert distance(lean.gradients[0], plain.gradients[0]) < 1e-10


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_blocks_that_the_code_calls_in_another_way_than_when_the_plan_was_made(strategy):
    class Turning(Chain):
        turned = False

        def forward(self, x):
            x = self.stem(x)
            for block in reversed(self.blocks) if self.turned else self.blocks:
                x = block(x)
            return self.head(x)

    plain, lean = task(lambda: Turning([Block() for _ in range(4)])), task(lambda: Turning([Block() for _ in range(4)]))
    lean = apply(lean, Plan(checkpoint=strategy)).task
    plain.model.turned = lean.model.turned = True
    assert distance(run(lean, 1).gradients[0], run(plain, 1).gradients[0]) < 1e-6


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_operations_in_place_inside_a_block(strategy):
    class InPlace(Block):
        def forward(self, x):
            hidden = self.up(x)
            hidden.mul_(0.5)
            hidden = F.relu(hidden, inplace=True).tanh()
            out = self.down(hidden)
            out += x
            return out

    assert same_as_plain(lambda: Chain([InPlace() for _ in range(3)]), strategy)


@pytest.mark.parametrize("strategy", ["residual-1", "residual-2*", "optimal"])
def test_a_block_that_changes_its_input_is_refused_by_name(strategy):
    class Greedy(Block):
        def forward(self, x):
            return super().forward(x.mul_(2))

    lean = apply(task(lambda: Chain([Greedy() for _ in range(3)])), Plan(checkpoint=strategy))
    with pytest.raises(ShoestringError, match=r"blocks\.\d.* changes its input in place"):
        lean.step(lean.task.batch)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_blocks(strategy):
    def make():
        model = Chain([Block() for _ in range(4)])
        model.blocks[1].requires_grad_(False)
        model.stem.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        return model

    plain = run(doubled(task(make)))
    lean = run(apply(doubled(task(make)), Plan(checkpoint=strategy)).task)
    assert distance(lean.gradients[-1], plain.gradients[-1]) < 1e-10


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_autocast_is_restored_when_a_block_runs_again(strategy):
    def loss(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = model(batch[0])
        return F.cross_entropy(scores.float(), batch[1])

    def make():
        return Chain([Block() for _ in range(3)])

    plain, lean = run(task(make, loss), 1), run(apply(task(make, loss), Plan(checkpoint=strategy)).task, 1)
    assert distance(lean.gradients[0], plain.gradients[0]) < 1e-6
    without = run(task(make), 1)
    assert distance(lean.gradients[0], without.gradients[0]) > 1e-4  # it was 16-bit arithmetic


# -- forwards that are not deterministic ----------------------------------------------------------------------------
class Moody(Block):
    """Does something else each time it runs: other values, or other shapes."""

    def __init__(self, change):
        super().__init__()
        self.change, self.runs = change, 0

    def forward(self, x):
        self.runs += 1
        if self.change == "shape" and self.runs % 2:
            return x + self.down(self.up(x))
        scale = {"none": 1.0, "random": random.random()}.get(self.change, float(self.runs))
        return x + self.down(torch.tanh(self.up(x) * scale))


@pytest.mark.parametrize("change", ["random", "counter", "shape"])
@pytest.mark.parametrize("strategy", ["residual-1", "residual-2*"])
def test_a_forward_that_is_not_deterministic_is_refused_by_name(strategy, change):
    lean = apply(task(lambda: Chain([Moody("none"), Moody(change), Moody("none")])), Plan(checkpoint=strategy))
    with pytest.raises(ShoestringError, match=r"blocks\.1.* not deterministic; leave it out of checkpointing"):
        for _ in range(3):
            lean.step(lean.task.batch)


class Tossing(Block):
    """Multiplies what is between its layers by numbers that no generator of torch's gives; saves more after that."""

    def forward(self, x):
        hidden = torch.tanh(self.up(x)) * random.random()
        return x + torch.tanh(self.down(hidden).relu() * 0)


@pytest.mark.parametrize("strategy", ["residual-1", "residual-2", "residual-2*"])
def test_other_values_are_found_where_the_last_saved_tensor_is_the_same(strategy):
    lean = apply(task(lambda: Chain([Tossing() for _ in range(3)])), Plan(checkpoint=strategy))
    with pytest.raises(ShoestringError, match=r"blocks\.\d.* saved other values of \(8, \d+\) .* not deterministic"):
        lean.step(lean.task.batch)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_regions_whose_inputs_are_kept_in_16_bits_train(strategy):
    def wide():
        torch.manual_seed(0)
        chain = Chain([Block() for _ in range(4)])
        return Task(chain, classify, (torch.randn(4096, WIDTH), torch.randint(3, (4096,))), SGD(lr=0.1))

    plain, lean = run(wide(), 1), run(apply(wide(), Plan(checkpoint=strategy, activations="half")).task, 1)
    assert 0 < distance(lean.gradients[0], plain.gradients[0]) < 1e-3


# -- hooks ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("where", ["blocks.1", "blocks.1.up", "blocks.1.down"])
def test_a_hook_that_looks_is_called_once_a_pass(strategy, where):
    lean = apply(task(lambda: Chain([Block() for _ in range(4)])), Plan(checkpoint=strategy))
    seen, layer = [], lean.model.get_submodule(where)
    layer.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    layer.register_forward_hook(lambda module, args, kwargs, output: seen.append(kwargs), with_kwargs=True)
    hooks = dict(layer._forward_hooks)
    lean.step(lean.task.batch)
    assert len(seen) == 2
    assert layer._forward_hooks == hooks


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_hook_that_changes_the_output_is_part_of_the_block(strategy):
    def make():
        model = Chain([Block() for _ in range(4)])
        model.blocks[1].up.register_forward_hook(lambda module, args, output: output * 0.5)
        model.blocks[2].down.register_forward_pre_hook(lambda module, args: args[0].sin())
        return model

    assert same_as_plain(make, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_weight_that_a_hook_makes_is_made_again(strategy):
    def make():
        model = Chain([Block() for _ in range(3)])
        prune.random_unstructured(model.blocks[1].up, "weight", 0.5)
        nn.utils.parametrizations.weight_norm(model.blocks[2].down)
        return model

    assert same_as_plain(make, strategy)


def test_a_hook_that_removes_itself_is_gone():
    lean = apply(task(lambda: Chain([Block() for _ in range(3)])), Plan(checkpoint="residual-1"))
    layer, seen = lean.model.blocks[0].up, []

    def once(module, args, output):
        seen.append(output)
        handle.remove()

    handle = layer.register_forward_hook(once)
    for _ in range(2):
        lean.step(lean.task.batch)
    assert len(seen) == 1
    assert not layer._forward_hooks


# -- what a trace and a mode must see -------------------------------------------------------------------------------
def test_the_random_state_that_each_drawing_region_keeps_is_in_the_profile():
    def states(inside):
        lean = apply(task(lambda: Chain([Block(inside) for _ in range(3)])), Plan(checkpoint="residual-1")).task
        found = profile(lean, steps=1)
        start = next(e.born for e in found.ledger.entries if e.phase == Phase.BACKWARD)
        return [e.bytes for e in found.ledger.live_at(start) if e.operation == "get_rng_state"]

    assert states(nn.Dropout(0.3)) == [5056] * 3
    assert states(torch.tanh) == []


def test_the_layers_inside_attention_are_lean_too():
    model = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True)
    given = Task(model, lambda m, x: m(x).square().mean(), torch.randn(2, 5, WIDTH), SGD(lr=0.1))
    lean, _ = with_mode(given, "checkpoint")
    with lean.contexts[0](model):
        loss = given.loss(model, given.batch)
    nodes, products = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        products |= {node} if node.name() == "LeanProductBackward" else set()
        nodes += [parent for parent, _ in node.next_functions if parent is not None]
    assert len(products) == 4  # into heads, out of them, up, down


def test_regions_of_more_blocks_than_there_are_are_refused():
    task = builtin("wrn-10-1", batch=2)  # three blocks
    assert checkpoint.apply(task, checkpoint.Settings("residual-3*"))
    with pytest.raises(ShoestringError, match=r"regions of 99 blocks, and WideResNet has 3: use residual-3\* or less"):
        checkpoint.apply(task, checkpoint.Settings("residual-99*"))
