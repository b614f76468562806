"""Saved activations: offloaded to a file, rounded to 16 bits, or reduced to one bit per element, chosen by rules.

The card is docs/techniques/activations.md.

    activations="offload"                    every saved tensor goes to a file and comes back when it is needed; exact
    activations="half"                       every saved tensor is rounded to 16 bits; approximate
    activations="masks"                      ReLU and dropout save one bit per element; exact
    activations="blocks.*=offload"           only tensors saved inside these modules
    activations="head:softmax=half,offload"  16 bits for what softmax saves inside `head`, a file for everything else

The first matching rule decides. Parameters, buffers and the model's inputs are alive anyway and stay as they are, and
so do small tensors.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode

from ...errors import NoEffect, ShoestringError
from ...ledger import Phase
from ...passes.mode import askers_of, mode_context, with_mode
from ...passes.saved_tensors import AsIs, Deduplicated, OneUse, Store, Stored, storing
from ...phases import current_phase
from ...profiling.dry import dry_run
from ...structure import tensors
from ...task import Task
from ..checkpoint import has_norms
from ..technique import Bounds, Price, Risk, Technique
from .codecs import CODECS, View

SMALL_BYTES = 64 * 1024
EXAMPLES = 'offload, half, masks, "blocks.*=offload" or "head:softmax=half,offload"'


class Rule(NamedTuple):
    """Tensors that `operation` saves in `module` (both with * and ?) are stored by `codec`."""

    module: str
    operation: str
    codec: str


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
    def masks(self) -> bool:
        """Whether ReLU and dropout save one bit per element."""
        return "masks" in self._parts

    @property
    def _parts(self) -> list[str]:
        return [part.strip() for part in self.rules.split(",")]


def _rule(text: str) -> Rule:
    where, _, codec = text.rpartition("=")
    if codec not in CODECS:
        raise ShoestringError(f"there is no codec {codec!r} (of {text!r}): use {EXAMPLES}")
    module, _, operation = where.partition(":")
    return Rule(module or "*", operation or "*", codec)


def risk(task: Task, rules: str) -> Risk:
    """The highest of the codecs' risks."""
    return max((CODECS[rule.codec].risk for rule in Settings(rules).parsed), default=Risk.EXACT)


def options(task: Task) -> list[str]:
    """What the planner tries: one rule for the whole model."""
    return ["masks", "offload", "half"]


def refuses(task: Task, settings: Mapping[str, Any]) -> str:
    """Why a rule would change nothing beside a plan's other settings, or not enough."""
    activations, checkpoint = settings.get("activations"), str(settings.get("checkpoint", ""))
    if activations == "masks" and (checkpoint or "precision" in settings):
        return "checkpointing and 16 bits save one bit per element of ReLU and dropout already"
    if activations == "half" and "precision" in settings:
        return "what is saved has 16 bits already"
    smallest = "residual-1*" if has_norms(task.model) else "residual-1"
    if activations == "offload" and checkpoint not in ("", "no-bn", smallest, "every-4"):
        return f"with activations offloaded, {smallest} or every-4 needs as little memory and recomputes less"
    return ""


def bounds(task: Task, rules: str) -> Bounds:
    """Half leaves half. Masks leave what the next layer saves, 4.25 of the 9 bytes of a ReLU with dropout after it, and
    may be faster than what they replace."""
    if rules == "masks":
        return Bounds(moving=0.4)
    price = Price(None, "disk" if rules == "offload" else "memory")
    return Bounds(moving=0.45 if rules == "half" else 0.0, price=price)


def apply(task: Task, settings: Settings) -> Task:
    """A task -> the same task, which stores the activations that its operations save in another form."""
    if settings.masks:
        task = _with_masks(task)
    if settings.parsed:
        task = _with_rules(task, settings.parsed)
    return task


TECHNIQUE = Technique(Settings, apply, options, risk, refuses=refuses, bounds=bounds)


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


def _with_rules(task: Task, rules: tuple[Rule, ...]) -> Task:
    for rule in rules:
        if not any(fnmatchcase(path, rule.module) for path, _ in task.model.named_modules()):
            near = ", ".join(path for path, _ in list(task.model.named_modules())[1:6])
            raise ShoestringError(
                f"the model has no module {rule.module!r} for activations: its modules are {near}, ..."
            )
    lean = task.with_(contexts=(*task.contexts, SavedPass(rules)))
    if not rehearse(lean):
        raise NoEffect(
            f"of what {type(task.model).__name__} saves, nothing of {SMALL_BYTES} bytes or more falls under the "
            "rules of activations: leave it out, or name other modules"
        )
    return lean


# -- the pass ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SavedPass:
    """The context of a pass in which the rules decide how saved tensors are stored."""

    rules: tuple[Rule, ...]

    @contextmanager
    def __call__(self, model: nn.Module) -> Iterator["Saver"]:
        with ExitStack() as stack:
            keepers = {name: stack.enter_context(CODECS[name].opened()) for name in {r.codec for r in self.rules}}
            saver = Saver(self.rules, keepers, model)
            stack.enter_context(saver.place.following(model))
            stack.enter_context(storing(saver.keep))
            yield saver


class Saver:
    """Applies the rules. A tensor is packed once; for a view, the view or its base, whichever is smaller."""

    def __init__(self, rules: tuple[Rule, ...], keepers: dict[str, Store], model: nn.Module) -> None:
        self.rules, self.keepers, self.place = rules, keepers, Place(model)
        self.shared = {name: Deduplicated() for name in keepers}
        self.taken = 0

    def keep(self, tensor: Tensor) -> Stored:
        codec = self._codec()
        if codec == "whole" or tensor.layout != torch.strided or self.place.holds(tensor):
            return AsIs(tensor)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            storage_bytes = tensor.untyped_storage().nbytes()
            if tensor.nbytes < SMALL_BYTES:
                # A small view would keep its whole base alive.
                return AsIs(tensor.detach().clone() if storage_bytes >= SMALL_BYTES else tensor)
            if not CODECS[codec].takes(tensor):
                return AsIs(tensor)
            self.taken += 1
            if tensor.nbytes >= storage_bytes:
                base = _base(tensor)
                return View(tensor, OneUse(self.shared[codec].once(base, self.keepers[codec])))
            return OneUse(self.shared[codec].once(tensor.detach(), self.keepers[codec]))

    def _codec(self) -> str:
        module, operation = self.place.module, self.place.operation
        fitting = (r.codec for r in self.rules if fnmatchcase(module, r.module) and fnmatchcase(operation, r.operation))
        return next(fitting, "whole")


def _base(tensor: Tensor) -> Tensor:
    """All of a tensor's storage, flat."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), 0)


class Place(TorchFunctionMode):
    """Tracks the running operation and its module, and the tensors that are alive outside the pass anyway."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.thread = threading.get_ident()  # hooks for all modules are called in every thread
        self.modules = [""]
        self.operation = ""
        self.held = {_number(t) for t in (*model.parameters(), *model.buffers()) if t.layout == torch.strided}
        self.inputs: list[StorageWeakRef] = []  # while they live, no new storage gets the same number

    @property
    def module(self) -> str:
        return self.modules[-1]

    def holds(self, tensor: Tensor) -> bool:
        return _number(tensor) in self.held

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(module_hooks.register_module_forward_pre_hook(self._enter).remove)
            stack.callback(module_hooks.register_module_forward_hook(self._leave, always_call=True).remove)
            stack.enter_context(self)
            yield

    def _enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() != self.thread:
            return
        if (
            len(self.modules) == 1 and current_phase() != Phase.RECOMPUTE
        ):  # what the model is called with is the caller's
            inputs = [tensor for tensor in tensors(args) if not tensor.requires_grad]
            self.inputs += [StorageWeakRef(tensor.untyped_storage()) for tensor in inputs]
            self.held |= {_number(tensor) for tensor in inputs}
        self.modules.append(self.paths.get(id(module), self.module))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self.thread:
            self.modules.pop()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        outer, self.operation = self.operation, getattr(func, "__name__", "")
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.operation = outer


def _number(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


# -- rehearsals -------------------------------------------------------------------------------------------------
def rehearse(task: Task) -> int:
    """Runs the forward pass of one microbatch on fake tensors -> how many saved tensors the rules matched."""

    def look(batch: Any) -> int:
        with _forward(task, batch) as savers:
            return sum(saver.taken for saver in savers)

    return dry_run(task, _piece(task), look)


def saved_bytes(task: Task) -> int:
    """The bytes of all storages that operations save in the forward pass of one microbatch."""

    def look(batch: Any) -> int:
        found: dict[int, Tensor] = {}

        def note(tensor: Tensor) -> AsIs:
            found[_number(tensor)] = tensor
            return AsIs(tensor)

        with storing(note), _forward(task, batch):
            return sum(tensor.untyped_storage().nbytes() for tensor in found.values())

    return dry_run(task, _piece(task), look)


@contextmanager
def _forward(task: Task, batch: Any) -> Iterator[list[Saver]]:
    """Runs the forward pass of a microbatch -> its savers, while what they saved is alive."""
    with ExitStack() as stack:
        entered = [stack.enter_context(context(task.model)) for context in task.contexts]
        loss = task.loss_of(task.model, batch)
        yield [saver for saver in entered if isinstance(saver, Saver)]
        del loss


def _piece(task: Task) -> Any:
    return next(iter(task.split(task.batch)))
