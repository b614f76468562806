"""Models that checkpoint by themselves, or keep a cache of keys and values: checkpointed regions take their place."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from runs import distance, run
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from shoestring import SGD, Plan, ShoestringError, Task, apply
from shoestring.passes.switches import switched
from shoestring.profiling import profile

STRATEGIES = ("residual-1", "residual-2*", "optimal")
WIDTH = 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.dropout(torch.tanh(self.norm(self.up(x))), 0.2))


def one_by_one(use_reentrant):
    def call(blocks, x):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    return call


def some(blocks, x):
    for number, block in enumerate(blocks):
        x = checkpoint(lambda x, b=block: b(x).sin(), x, use_reentrant=False) if number % 2 else block(x).sin()
    return x


CALLS = {
    "none": lambda blocks, x: nn.Sequential(*blocks)(x),
    "reentrant": one_by_one(True),
    "not reentrant": one_by_one(False),
    "some": some,
    "sequential": lambda blocks, x: checkpoint_sequential(blocks, 2, x, use_reentrant=False),
    "all": lambda blocks, x: checkpoint(nn.Sequential(*blocks), x, use_reentrant=False),
}


class Chain(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(WIDTH, WIDTH), nn.ModuleList(), nn.Linear(WIDTH, 3)
        self.blocks.extend(Block() for _ in range(4))
        self.how = how

    def forward(self, x):
        return self.head(CALLS[self.how](self.blocks, self.stem(x)))


def task(how):
    torch.manual_seed(0)
    batch = torch.randn(8, WIDTH), torch.randint(3, (8,))
    return Task(Chain(how), lambda m, b: F.cross_entropy(m(b[0]), b[1]), batch, SGD(lr=0.1))


@pytest.mark.parametrize("how", [how for how in CALLS if how != "none"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_that_checkpoints_its_blocks_trains_as_if_it_did_not(strategy, how):
    plain = run(task("none" if how != "some" else "some"), 1)
    lean = run(apply(task(how), Plan(checkpoint=strategy)).task, 1)
    assert distance(lean.gradients[0], plain.gradients[0]) < 1e-6
    if how != "some":  # whose plain run counts batches twice
        assert all(torch.allclose(lean.buffers[name], plain.buffers[name]) for name in plain.buffers)


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "sequential", "all"])
def test_a_model_that_checkpoints_its_blocks_is_profiled_as_if_it_did_not(how):
    def peak(how):
        return profile(apply(task(how), Plan(checkpoint="residual-1")).task).peak_bytes

    assert peak(how) == peak("none")


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "sequential", "all"])
@pytest.mark.parametrize("plan", [Plan(checkpoint="no-bn"), Plan(checkpoint="every-3"), Plan(precision="fp16")])
def test_lean_operations_in_a_model_that_checkpoints_compute_what_they_compute_without(plan, how):
    without, lean = run(apply(task("none"), plan).task, 1), run(apply(task(how), plan).task, 1)
    assert distance(lean.gradients[0], without.gradients[0]) == 0
    assert all(torch.equal(lean.buffers[name], without.buffers[name]) for name in without.buffers)


def test_torch_checkpoints_again_after_a_step_and_meanwhile_in_other_threads():
    originals = torch_checkpoint.CheckpointFunction, torch_checkpoint._checkpoint_without_reentrant_generator
    seen = []

    def runs_of_a_checkpoint(use_reentrant):
        runs = []
        x = torch.ones(3, requires_grad=True)
        checkpoint(lambda x: (runs.append(1), x.exp())[1], x, use_reentrant=use_reentrant).sum().backward()
        return len(runs)

    with switched(nn.Module()):
        assert [runs_of_a_checkpoint(way) for way in (True, False)] == [1, 1]
        thread = threading.Thread(target=lambda: seen.extend(runs_of_a_checkpoint(way) for way in (True, False)))
        thread.start()
        thread.join()
        with switched(nn.Module()):
            pass
        assert runs_of_a_checkpoint(False) == 1
    assert seen == [2, 2]
    assert originals == (torch_checkpoint.CheckpointFunction, torch_checkpoint._checkpoint_without_reentrant_generator)


def test_switches_are_set_back_whatever_was_raised():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model.config = model[0].config = SimpleNamespace(use_cache=True)
    model[1].config, model[0].gradient_checkpointing = SimpleNamespace(use_cache=False), True
    with pytest.raises(ValueError, match="no"), switched(model):
        assert (model.config.use_cache, model[0].gradient_checkpointing) == (False, False)
        raise ValueError("no")
    assert (model.config.use_cache, model[1].config.use_cache) == (True, False)
    assert model[0].gradient_checkpointing is True
    assert "gradient_checkpointing" not in vars(model[1])


# -- transformers -----------------------------------------------------------------------------------------------------
def gpt2(library):
    config = library.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=WIDTH, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return library.GPT2LMHeadModel(config)


def gemma(library):
    config = library.GemmaConfig(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    return library.GemmaForCausalLM(config)


def t5(library):
    config = library.T5Config(
        vocab_size=64, d_model=WIDTH, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return library.T5ForConditionalGeneration(config)


def language(make, prepare=lambda model: None, **call):
    library = pytest.importorskip("transformers")
    library.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = make(library)
    prepare(model.train())
    ids = torch.randint(64, (4, 12))
    return Task(model, lambda m, b: m(input_ids=b, labels=b, **call).loss, ids, SGD(lr=0.1))


PREPARED = {
    "cache on": lambda model: setattr(model.config, "use_cache", True),
    "checkpointing": lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}),
    "reentrant checkpointing": lambda model: model.gradient_checkpointing_enable({"use_reentrant": True}),
}


@pytest.mark.parametrize("prepared", PREPARED)
@pytest.mark.parametrize(("make", "strategy"), [(gpt2, "residual-1"), (gemma, "residual-2*"), (t5, "optimal")])
def test_transformers_with_their_cache_or_checkpointing_on_train_as_without(strategy, make, prepared):
    plain = run(language(make), 1)
    given = language(make, PREPARED[prepared])
    before = given.model.config.use_cache, given.model.is_gradient_checkpointing
    lean = run(apply(given, Plan(checkpoint=strategy)).task, 1)
    assert distance(lean.gradients[0], plain.gradients[0]) < 1e-6
    assert (given.model.config.use_cache, given.model.is_gradient_checkpointing) == before
    assert profile(apply(given, Plan(checkpoint=strategy)).task, steps=1).peak_bytes > 0


def test_a_cache_that_is_asked_for_and_cannot_be_rerun_is_named():
    lean = apply(language(t5, use_cache=True), Plan(checkpoint="residual-1"))
    with pytest.raises(ShoestringError, match=r"changes the EncoderDecoderCache .* use_cache=False"):
        lean.step(lean.task.batch)
