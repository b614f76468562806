"""Small networks as data: blocks of pieces, how blocks are joined, walked and watched; drawn from a seed, and built."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from pieces import ACTIVATIONS, CONVOLUTIONS, NORMS, PIECES, TOKEN_NORMS, TOKENS
from torch import Tensor, nn

from shoestring import SGD, Task

WIDTH, CLASSES, VOCABULARY = 8, 5, 20


@dataclass(frozen=True)
class Network:
    """`blocks`: the names of each block's pieces. `join`, `walk` and `watch` are keys of the tables below."""

    kind: str  # images or tokens
    blocks: tuple[tuple[str, ...], ...]
    join: str = "x + y"
    walk: str = "loop"
    watch: str = "nobody"


# -- how a block's branch joins its input ---------------------------------------------------------------------------
def added_in_place(x, y):
    y += x
    return y


JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x + y": lambda x, y: x + y,
    "y += x": added_in_place,
    "torch.add": lambda x, y: torch.add(input=x, other=y, alpha=0.5),
    "y": lambda x, y: y,
}


class Block(nn.Module):
    def __init__(self, pieces: tuple[str, ...], join: str) -> None:
        super().__init__()
        self.pieces, self.join = nn.Sequential(*(PIECES[name](WIDTH) for name in pieces)), join

    def forward(self, x: Tensor) -> Tensor:
        return JOINS[self.join](x, self.pieces(x))


class PairBlock(Block):
    """Takes a number beside the input, and returns a pair as layers of transformers do."""

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y = super().forward(x) * scale
        return y, y.detach().mean()


# -- how the blocks are walked --------------------------------------------------------------------------------------
def loop(x, blocks):
    for block in blocks:
        x = block(x)
    return x


def by_keyword(x, blocks):
    for block in blocks:
        x = block(x=x)
    return x


def first_again(x, blocks):
    return blocks[0](loop(x, blocks))


def long_skip(x, blocks):
    first = blocks[0](x)
    return first + loop(first, blocks[1:])


def skipped(x, blocks):
    for block in blocks:
        if torch.rand(()) < 0.7:
            x = block(x)
    return x


def pairs(x, blocks):
    total = 0.0
    for block in blocks:
        x, aside = block(x, scale=0.9)
        total = total + aside
    return x * (1 + 0.01 * total)


def some_without_recording(x, blocks):
    with torch.no_grad():
        x = blocks[0](x)
    return loop(x, blocks[1:])


def stages(x, blocks):
    for stage in blocks:
        x = stage(x)
    return x


WALKS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "loop": loop,
    "Sequential": lambda x, blocks: blocks(x),
    "by keyword": by_keyword,
    "the first again": first_again,
    "a long skip": long_skip,
    "skipped at random": skipped,
    "pairs": pairs,
    "the first in no_grad": some_without_recording,
    "stages": stages,
}


# -- who watches ----------------------------------------------------------------------------------------------------
def note(module, args, output):
    seen = (output if isinstance(output, Tensor) else output[0]).detach().clone()
    module.seen = (*getattr(module, "seen", ()), seen)


def smaller(module, args, output):
    return output * 0.9 if isinstance(output, Tensor) else None


def smaller_gradient(module, gradient, output_gradient):
    return tuple(None if g is None else g * 0.5 for g in gradient)


def scaled(module, args, kwargs):
    return tuple(x * 0.9 for x in args), {name: x * 0.9 for name, x in kwargs.items()}


def each_layer(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if not list(module.children())]


WATCHES: dict[str, Callable[[nn.Module], Any]] = {
    "nobody": lambda model: None,
    "hooks that read": lambda model: [m.register_forward_hook(note) for m in each_layer(model)[::2]],
    "hooks that change": lambda model: [m.register_forward_hook(smaller) for m in each_layer(model)[1::3]],
    "a hook on a block": lambda model: model.blocks[0].register_forward_hook(smaller),
    "a hook before a block": lambda model: model.blocks[-1].register_forward_pre_hook(scaled, with_kwargs=True),
    "hooks of gradients": lambda model: model.blocks[-1].register_full_backward_hook(smaller_gradient),
}


# -- the model and its task -----------------------------------------------------------------------------------------
class Model(nn.Module):
    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        is_image = network.kind == "images"
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1) if is_image else nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = blocks_of(network)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = WALKS[self.network.walk](self.stem(x), self.blocks)
        return self.head(x.mean((2, 3)) if self.network.kind == "images" else x.mean(1))


def blocks_of(network: Network) -> nn.Module:
    kind = PairBlock if network.walk == "pairs" else Block
    blocks = [kind(pieces, network.join) for pieces in network.blocks]
    if network.walk == "stages":
        return nn.ModuleList([nn.Sequential(*blocks[:2]), nn.Sequential(*blocks[2:])])
    return nn.Sequential(*blocks) if network.walk == "Sequential" else nn.ModuleList(blocks)


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def task(network: Network, data: int = 0) -> Task:
    """A network -> its task, with the same weights each time, and the batch that the number `data` draws."""
    torch.manual_seed(0)
    model = Model(network)
    WATCHES[network.watch](model)
    torch.manual_seed(data)
    inputs = torch.randn(6, 3, 8, 8) if network.kind == "images" else torch.randint(VOCABULARY, (6, 10))
    return Task(model, classify, (inputs, torch.randint(CLASSES, (6,))), SGD(0.1, momentum=0.9))


# -- drawing them ---------------------------------------------------------------------------------------------------
def draw(seed: int) -> Network:
    """A number -> a network that plain PyTorch can train: it refuses some changes in place."""
    random = Random(seed)
    while not trains(network := any_network(random)):
        pass
    return network


def trains(network: Network) -> bool:
    """Whether plain PyTorch trains it, with every block: one that is skipped here may run in a later pass."""
    given = task(replace(network, walk="loop") if network.walk == "skipped at random" else network)
    try:
        given.loss(given.model, given.batch).backward()
    except RuntimeError:
        return False
    return True


def any_network(random: Random) -> Network:
    """Most choices are the usual ones, so that what fails is not what fails always."""
    kind = random.choice(["images", "images", "tokens"])
    pieces = image_pieces if kind == "images" else token_pieces
    blocks = tuple(pieces(random) for _ in range(random.randint(2, 4)))
    return Network(kind, blocks, usual(random, JOINS), usual(random, WALKS), usual(random, WATCHES))


def usual(random: Random, table: dict[str, Any]) -> str:
    """The first name of a table in half of all cases, else any."""
    names = list(table)
    return names[0] if random.random() < 0.5 else random.choice(names)


def image_pieces(random: Random) -> tuple[str, ...]:
    triples = [(usual(random, NORMS), usual(random, ACTIVATIONS), random.choice(list(CONVOLUTIONS)))
               for _ in range(random.choice([1, 1, 2]))]  # fmt: skip
    if random.random() < 0.3:  # convolution first, as in ResNet
        triples = [(conv, norm, activation) for norm, activation, conv in triples]
    return tuple(piece for triple in triples for piece in triple)


def token_pieces(random: Random) -> tuple[str, ...]:
    return random.choice(TOKEN_NORMS), *random.sample(list(TOKENS), random.randint(1, 3))


def simpler(network: Network) -> list[Network]:
    """Networks that are like this one, with one thing less: for finding the least that fails."""
    firsts = {"join": next(iter(JOINS)), "walk": next(iter(WALKS)), "watch": next(iter(WATCHES))}
    usual = [replace(network, **{key: first}) for key, first in firsts.items() if getattr(network, key) != first]
    blocks = network.blocks
    fewer = [replace(network, blocks=blocks[:i] + blocks[i + 1 :]) for i in range(len(blocks)) if len(blocks) > 1]
    shorter = [replace(network, blocks=(*blocks[:i], block[:j] + block[j + 1 :], *blocks[i + 1 :]))
               for i, block in enumerate(blocks) for j in range(len(block)) if len(block) > 1]  # fmt: skip
    return [*usual, *fewer, *shorter]
