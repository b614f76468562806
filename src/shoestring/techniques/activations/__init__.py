"""Saved activations: offloaded to a file, rounded to 16 bits, or reduced to one bit per element, chosen by rules.

The card is docs/techniques/activations.md.

    activations="offload"                    every saved tensor goes to a file and comes back when it is needed; exact
    activations="half"                       every saved tensor is rounded to 16 bits; approximate
    activations="masks"                      ReLU and dropout save one bit per element; exact
    activations="pool2", "pool4"             inputs of layers as averages of 2 x 2 or 4 x 4 pixels; approximate
    activations="int8", "int4", "int2"       inputs of layers in a few bits, rounded stochastically; approximate
    activations="pool8+int2"                 averages, and in 2 bits what they leave out; approximate
    activations="adaptive-60MB"              one of these for each layer, by measured errors (adaptive.py); approximate
    activations="adaptive/8"                 the same, in an eighth of the bytes that are saved without it
    activations="blocks.*=offload"           only tensors saved inside these modules
    activations="head:softmax=half,offload"  16 bits for what softmax saves inside `head`, a file for everything else

The first matching rule decides. pool and int (compressed.py) take the inputs of convolutions and linear layers, where
an error stays in the weight's gradient, and those of checkpointed regions; other operations only where a rule names
them ("*:batch_norm=int8"). The forward pass and the loss are the same to the bit, and ReLU saves a mask beside them.
Parameters, buffers and the model's inputs are alive anyway and stay as they are, and so do small tensors.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf, nan
from typing import Any, NamedTuple

from ...errors import NoEffect, NoPlanFits, ShoestringError
from ...passes.mode import askers_of, mode_context, with_mode
from ...task import Task
from ...units import format_bytes, parse_bytes
from ..checkpoint import SWEPT, has_norms
from ..technique import Bounds, Price, Risk, Technique
from .adaptive import EXACT, Adaptive, parts_of
from .codecs import codec_of
from .rehearsals import saved_bytes, takes_any
from .saving import SMALL_BYTES, Rule, SavedPass, is_compressing

EXAMPLES = (
    'offload, half, masks, pool2, int4, pool8+int2, adaptive/8, "blocks.*=offload" or "head:softmax=half,offload"'
)
_ADAPTIVE = re.compile(r"adaptive(?:-(?P<size>.+)|/(?P<parts>.+))?")


class Offer(NamedTuple):
    """A codec that the planner may try: how rough it is, and the cosine of the whole gradient with the exact one."""

    roughness: int
    cosine: str  # on ResNet-18 and on WRN-28-2
    points: float | None = None  # of accuracy in our own training of WRN-28-2: accuracy-compressed.small
    margin: float = 0.0  # 1.96 standard errors


COMPRESSED = {
    "int8": Offer(0, "1.000 and 1.000"),
    "int4": Offer(1, "0.998 and 0.999", -0.45, 0.46),
    "pool2": Offer(2, "0.92 and 0.93", -2.73, 0.35),
    "int2": Offer(2, "0.97 and 0.97"),
}  # docs/techniques/activations.md has the commands


@dataclass(frozen=True)
class Settings:
    """`rules` as in the table above, joined by commas; the first matching one decides.

    >>> Settings("blocks.*=offload,masks").parsed
    (Rule(module='blocks.*', operation='*', codec='offload'),)
    """

    rules: str

    @property
    def parsed(self) -> tuple[Rule, ...]:
        return tuple(_rule(part) for part in self._parts if part != "masks")

    @property
    def adaptive(self) -> bool:
        """Whether the codecs are chosen while training."""
        return _ADAPTIVE.fullmatch(self.rules) is not None

    def limit(self, task: Task) -> int:
        """The bytes that the batch may save, of `adaptive`."""
        found = _ADAPTIVE.fullmatch(self.rules)
        if found and found["size"]:
            return parse_bytes(found["size"])
        if found and found["parts"]:
            return int(saved_bytes(task) / _parts(found["parts"]))
        raise ShoestringError(
            "activations adaptive needs a budget: name what the batch may save (adaptive-60MB, or adaptive/8 for an "
            "eighth of what it saves without), or give --budget beside it (in Python, shoestring.plan(task, budget, "
            "activations='adaptive'))"
        )

    @property
    def masks(self) -> bool:
        """Whether ReLU and dropout save one bit per element."""
        return "masks" in self._parts

    @property
    def _parts(self) -> list[str]:
        return [part.strip() for part in self.rules.split(",")]


def _parts(text: str) -> float:
    """How many times fewer bytes: 8 of adaptive/8."""
    try:
        parts = float(text)
    except ValueError:
        parts = nan
    if not 1 < parts < inf:
        raise ShoestringError(f"adaptive/{text} is no share of the saved bytes: give a number above 1, as adaptive/8")
    return parts


def _rule(text: str) -> Rule:
    where, _, codec = text.rpartition("=")
    if codec_of(codec) is None:
        raise ShoestringError(f"there is no codec {codec!r} (of {text!r}): use {EXAMPLES}")
    module, _, operation = where.partition(":")
    return Rule(module or "*", operation or "*", codec)


def risk(task: Task, rules: str) -> Risk:
    """The highest of the codecs' risks."""
    if Settings(rules).adaptive:
        return Risk.APPROXIMATE
    return max((found.risk for rule in Settings(rules).parsed if (found := codec_of(rule.codec))), default=Risk.EXACT)


def options(task: Task) -> list[str]:
    """What the planner tries: one rule for the whole model."""
    return ["masks", "offload", "half", *COMPRESSED]


def roughness(task: Task, rules: str) -> int:
    return COMPRESSED[rules].roughness if rules in COMPRESSED else 0


def evidence(task: Task, rules: str) -> str:
    """What is known about the gradients of a codec that the planner chose."""
    if rules == "half":
        return "what the backward pass reads is rounded to 11 bits (8 beyond FP16's range): no run of ours has it alone"
    if rules not in COMPRESSED:
        return ""
    offer = COMPRESSED[rules]
    trained = "no run of ours has it alone"
    if offer.points is not None:
        points = f"{offer.points:+.1f} ± {offer.margin:.1f} points"
        trained = f"{points} in our three runs of 10 epochs (docs/results/accuracy-compressed.small.md)"
    return (
        f"{rules}: cosine of the whole gradient with the exact one {offer.cosine} on ResNet-18 and WRN-28-2 with "
        f"CIFAR-10, {trained}; `shoestring fidelity` shows it for your model"
    )


def refuses(task: Task, settings: Mapping[str, Any]) -> str:
    """Why a rule would change nothing beside a plan's other settings, or not enough."""
    activations, checkpoint = settings.get("activations"), str(settings.get("checkpoint", ""))
    if activations == "masks" and (checkpoint or "precision" in settings):
        return "checkpointing and 16 bits save one bit per element of ReLU and dropout already"
    if activations == "half" and "precision" in settings:
        return "what is saved has 16 bits already"
    if activations == "int8" and "precision" in settings:
        return "8 bits of 16 save little: int4 is tried"
    if activations in COMPRESSED and activations != "int4" and checkpoint:
        return "beside checkpointing only the inputs of regions are stored, and int4 is tried for them"
    smallest = "residual-1*" if has_norms(task.model) else "residual-1"
    if activations in ("offload", "half") and checkpoint == SWEPT:
        return f"{SWEPT} reads what it stored several times, a few samples at a time: int4 is tried beside it"
    if activations in ("offload", "int4") and checkpoint not in ("", "no-bn", smallest, "every-4", SWEPT):
        stored = "offloaded" if activations == "offload" else "in 4 bits"
        return f"with activations {stored}, {smallest} or every-4 needs as little memory and recomputes less"
    return ""


def bounds(task: Task, rules: str) -> Bounds:
    """Half leaves half. Masks leave what the next layer saves: 4.25 of the 9 bytes of a ReLU with dropout after it,
    less where a max-pool is between. Beside compressed inputs they are all that is sure to be left, a bit of 32.
    They may be faster than what they replace, and so may averages, for they save multiply-adds."""
    if rules == "masks":
        return Bounds(moving=0.09)
    if rules in COMPRESSED:
        return Bounds(moving=1 / 32, price=None if rules == "pool2" else Price(None, ""))
    price = Price(None, "disk" if rules == "offload" else "memory")
    return Bounds(moving=0.45 if rules == "half" else 0.0, price=price)


def apply(task: Task, settings: Settings) -> Task:
    """A task -> the same task, which stores the activations that its operations save in another form."""
    if settings.adaptive:
        return _adapting(task, settings.limit(task))
    if settings.masks:
        task = _with_masks(task)
    rules = settings.parsed
    if any(is_compressing(rule) for rule in rules):
        task = _with_stores(task)
    return _with_rules(task, rules) if rules else task


def sized(task: Task, rules: str, fits: Callable[[str], bool]) -> str:
    """`adaptive` -> `adaptive-SIZE`, with the largest SIZE, to 3%, for which a step fits the budget."""
    parts = parts_of(_with_stores(task))
    low, high = sum(min(part.bytes.values()) for part in parts), sum(part.bytes[EXACT] for part in parts)
    if fits(f"adaptive-{high}B"):
        return f"adaptive-{high}B"
    if not fits(f"adaptive-{low}B"):
        raise NoPlanFits(
            f"with the roughest codecs, which store {format_bytes(high)} of activations in {format_bytes(low)}, a step "
            "is still over the budget: raise it, or add checkpointing or microbatches"
        )
    while high - low > 0.03 * high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(f"adaptive-{middle}B") else (low, middle)
    return f"adaptive-{low}B"


TECHNIQUE = Technique(
    Settings,
    apply,
    options,
    risk,
    roughness,
    refuses,
    bounds=bounds,
    evidence=evidence,
    open_values=("adaptive",),
    sized=sized,
)


def _adapting(task: Task, limit: int) -> Task:
    """Layers hand their inputs to the rules that the hook chooses, and chooses again."""
    stored = _with_stores(task)
    parts = parts_of(stored)
    if not parts:
        raise NoEffect(f"{type(task.model).__name__} saves nothing that a codec takes: leave out activations adaptive")
    hook = Adaptive(parts, limit)
    return stored.with_(contexts=(*stored.contexts, hook.context), after_update=(*stored.after_update, hook))


def _with_masks(task: Task) -> Task:
    if (context := mode_context(task)) and context.options.masks:
        raise NoEffect(
            f"{askers_of(task)} already saves one bit per element of ReLU and dropout: leave out activations masks"
        )
    lean, _ = with_mode(task, "activations", fuse=False, masks=True, products=False)
    before, after = saved_bytes(task), saved_bytes(lean)
    if after >= before:
        raise NoEffect(
            f"{type(task.model).__name__} would save {after} bytes with masks and saves {before} without: it has no "
            "ReLU or dropout that saves more than it must; leave out activations masks"
        )
    return lean


def _with_stores(task: Task) -> Task:
    """Layers hand their inputs to the rules, and ReLU keeps a mask: else it would hold the next layer's input."""
    if mode_context(task) is None:
        return with_mode(task, "activations", fuse=False, masks=True, products=False, stores=True)[0]
    return with_mode(task, "activations", masks=True, stores=True)[0]


def _with_rules(task: Task, rules: tuple[Rule, ...]) -> Task:
    for rule in rules:
        if not any(fnmatchcase(path, rule.module) for path, _ in task.model.named_modules()):
            near = ", ".join(path for path, _ in list(task.model.named_modules())[1:6])
            raise ShoestringError(
                f"the model has no module {rule.module!r} for activations: its modules are {near}, ..."
            )
    lean = task.with_(contexts=(*task.contexts, SavedPass(rules)))
    if not takes_any(lean):
        raise NoEffect(
            f"nothing that {type(task.model).__name__} saves there for its backward pass has "
            f"{format_bytes(SMALL_BYTES)}, the least that is stored in another form: take a larger batch, name other "
            "modules, or leave it out"
        )
    return lean
