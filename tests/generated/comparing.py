"""Whether a network trains under a plan as it trains under plain PyTorch, in FP64 and in FP32."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from networks import Network, simpler, task
from runs import Run, apart, astray, doubled, run
from torch import Tensor

from shoestring import Plan, ShoestringError, apply
from shoestring.errors import NoEffect

FLOOR = 2**-21  # eight ulps of FP32: in networks this small plain PyTorch's own error may be less by chance

EXACT = {
    "no-bn": Plan(checkpoint="no-bn"),
    "every-2": Plan(checkpoint="every-2"),
    "every-5": Plan(checkpoint="every-5"),
    "residual-1": Plan(checkpoint="residual-1"),
    "residual-1*": Plan(checkpoint="residual-1*"),
    "residual-2": Plan(checkpoint="residual-2"),
    "residual-2*": Plan(checkpoint="residual-2*"),
    "optimal": Plan(checkpoint="optimal"),
    "masks": Plan(activations="masks"),
    "offload": Plan(activations="offload"),
    "residual-2*, offload": Plan(checkpoint="residual-2*", activations="offload"),
    "microbatch": Plan(microbatch=4),
    "residual-1*, microbatch": Plan(checkpoint="residual-1*", microbatch=3),
    "no-gradient": Plan(optimizer="no-gradient"),
    "no-bn, no-gradient": Plan(checkpoint="no-bn", optimizer="no-gradient"),
}


@dataclass(frozen=True)
class Trained:
    """A run, and all that the hook of each module saw."""

    run: Run
    seen: list[tuple[Tensor, ...]]


def trained(task: Any) -> Trained:
    return Trained(run(task), [module.seen for module in task.model.modules() if hasattr(module, "seen")])


@lru_cache(maxsize=64)
def plain(network: Network, data: int, double: bool, split: Any) -> Trained:
    return trained(made(network, data, double).with_(split=split))


def made(network: Network, data: int, double: bool) -> Any:
    given = task(network, data)
    return doubled(given) if double else given


def differences(network: Network, plan: Plan) -> Iterator[str]:
    """What the plan changes in the training of a network: nothing, if it is exact. What is refused is raised."""
    yield from in_fp64(network, plan)
    # A ReLU whose input is 0 but for rounding may go either way and change a gradient visibly: not with other data too.
    if (first := in_fp32(network, plan, 0)) and in_fp32(network, plan, 1):
        yield first


def in_fp64(network: Network, plan: Plan) -> Iterator[str]:
    under_plan = apply(made(network, 0, True), plan).task
    wanted, found = plain(network, 0, True, under_plan.split), trained(under_plan)
    if not astray(found.run, wanted.run) < 1e-9:
        yield f"weights in FP64 are {astray(found.run, wanted.run):.1e} of their way apart"
    if not all(map(same, found.run.losses, wanted.run.losses)):
        yield f"losses in FP64 are {found.run.losses} in place of {wanted.run.losses}"
    for name, buffer in wanted.run.buffers.items():
        if not same(found.run.buffers[name], buffer):
            yield f"buffer {name} is another"
    if not torch.equal(found.run.random, wanted.run.random):
        yield "random numbers go on elsewhere"
    for values, plain_values in zip(found.seen, wanted.seen, strict=True):  # a region that runs again shows them again
        if not all(any(same(value, other) for other in plain_values) for value in values):
            yield "hooks saw other values"


def same(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-9, atol=1e-10)


def in_fp32(network: Network, plan: Plan, data: int) -> str | None:
    under_plan = apply(made(network, data, False), plan).task
    own, wanted = (plain(network, data, double, under_plan.split).run for double in (False, True))
    found = run(under_plan)
    pairs = [(astray(found, wanted), astray(own, wanted), "weights")]
    if not plan.optimizer:  # a lean one has used them up
        steps = zip(found.gradients, own.gradients, wanted.gradients, strict=True)
        pairs += [(apart(f, w), apart(o, w), "gradients") for f, o, w in steps]
    for error, usual, what in pairs:
        if not error <= 2 * usual + FLOOR:
            return f"{what} in FP32 are {error:.1e} from FP64's, plain PyTorch's {usual:.1e}"
    return None


# What a plan may say in place of training: it would change nothing, or the network is not of its kind.
REFUSALS = (
    "has no batch norm",
    "has no repeated blocks",
    "is not called with what",  # blocks that do not follow each other are no region
    "was changed in place after it was saved",  # where a region begins
    "changes its input in place, so it cannot be recomputed",
    "microbatches do not add up",  # batch norm that ignores eval mode: examples meet in the loss
    "got its gradient in two parts",  # a weight that several regions share cannot be updated in the backward pass
)


def is_refusal(error: ShoestringError) -> bool:
    return isinstance(error, NoEffect) or any(words in str(error) for words in REFUSALS)


class Verdict(NamedTuple):
    """Why a network does not train under a plan as it should, and why the plan was refused: both empty if it trains."""

    failure: str = ""
    refusal: str = ""


def verdict(network: Network, plan: Plan) -> Verdict:
    try:
        return Verdict("; ".join(differences(network, plan)))
    except ShoestringError as error:
        return Verdict(refusal=str(error)) if is_refusal(error) else Verdict(f"{type(error).__name__}: {error}")
    except Exception as error:
        return Verdict(f"{type(error).__name__}: {error}")


def least(network: Network, plan: Plan) -> Network:
    """The simplest network like this one that fails too."""
    for other in simpler(network):
        if verdict(other, plan).failure:
            return least(other, plan)
    return network
