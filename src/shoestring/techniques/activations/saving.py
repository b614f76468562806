"""The pass in which rules decide in which form each saved tensor is stored."""

import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode

from ...ambient import Ambient
from ...ledger import Phase
from ...passes.checksums import is_traced
from ...passes.saved_tensors import AsIs, Deduplicated, OneUse, Store, Stored, storing
from ...phases import current_phase
from ...structure import tensors
from .codecs import Codec, View, codec_of

SMALL_BYTES = 64 * 1024
# Operations that are linear in their input, so that an error in it stays in the weight's gradient; "" is the input of a
# checkpointed region. Their inputs are what a compressing codec takes, unless a rule names other operations.
LINEAR = frozenset(
    ("", "conv1d", "conv2d", "conv3d", "conv_transpose2d", "linear", "sparse_convolution", "sparse_linear")
)


class Rule(NamedTuple):
    """Tensors that `operation` saves in `module` (both with * and ?) are kept by `codec`."""

    module: str
    operation: str
    codec: str


class Kept(NamedTuple):
    """A tensor that was compressed: where, the parameter that its operation was called with, bytes before and after."""

    module: str
    operation: str
    weight: str
    codec: str
    exact_bytes: int
    stored_bytes: int


def is_compressing(rule: Rule) -> bool:
    """Whether the rule's codec compresses the inputs of layers."""
    codec = codec_of(rule.codec)
    return codec is not None and codec.pack is not None


@dataclass(frozen=True)
class SavedPass:
    """The context of a pass in which the rules decide. The number of the pass is part of a run's state: with it, the
    seed and a tensor's place in the model, stochastic rounding is the same in a run that was resumed."""

    rules: Sequence[Rule]  # a list may change between two passes
    seed: int = 0
    least_bytes: int | None = None  # a smaller tensor is stored as it is; None: SMALL_BYTES
    _passes: list[int] = field(default_factory=lambda: [0], compare=False, repr=False)

    @contextmanager
    def __call__(self, model: nn.Module) -> Iterator["Saver"]:
        if not is_traced():
            self._passes[0] += 1
        with ExitStack() as stack:
            words = sorted({rule.codec for rule in self.rules})
            codecs = {word: codec for word in words if (codec := codec_of(word)) is not None}
            stores = {word: stack.enter_context(codec.opened()) for word, codec in codecs.items() if codec.opened}
            saver = Saver(self.rules, codecs, stores, model, (self.seed, self._passes[0]), self.least_bytes)
            stack.enter_context(Ambient.during(pass_number=self._passes))
            stack.enter_context(saver.place.following(model))
            stack.enter_context(storing(saver.keep))
            yield saver

    def state(self) -> dict[str, int]:
        return {"passes": self._passes[0]}

    def restore(self, state: dict[str, int]) -> None:
        self._passes[0] = state["passes"]


class Saver:
    """Decides by the rules; packs a tensor once, and of a view the view or its base, whichever is smaller."""

    def __init__(
        self,
        rules: Sequence[Rule],
        codecs: dict[str, Codec],
        stores: dict[str, Store],
        model: nn.Module,
        noise: tuple[int, int] = (0, 0),
        least_bytes: int | None = None,
    ) -> None:
        self.least_bytes = SMALL_BYTES if least_bytes is None else least_bytes
        self.rules, self.codecs, self.stores, self.noise = rules, codecs, stores, noise
        self.place = Place(model)
        self.shared = {word: Deduplicated() for word in codecs}
        self.drawn: Counter[str] = Counter()  # how often each place of the model has drawn random numbers in this pass
        self.taken = 0
        self.compressed: list[Kept] = []

    def keep(self, tensor: Tensor) -> Stored:
        rule = self._rule(tensor)
        if rule is None or rule.codec == "whole" or tensor.layout != torch.strided or self.place.holds(tensor):
            return AsIs(tensor)
        codec = self.codecs[rule.codec]
        with torch.no_grad(), torch._C.DisableTorchFunction():
            storage_bytes = tensor.untyped_storage().nbytes()
            if tensor.nbytes < self.least_bytes:
                # A small view would keep its whole base alive.
                return AsIs(tensor.detach().clone() if storage_bytes >= self.least_bytes else tensor)
            channel = self._channel(tensor)
            if not codec.takes(tensor, channel):
                return AsIs(tensor)
            self.taken += 1
            shared = self.shared[rule.codec]
            if codec.pack is not None:
                pack = partial(codec.pack, channel=channel, draw=self._draw)
                packed = shared.once(tensor.detach(), pack)
                self._note(tensor, packed, rule.codec)
                return OneUse(packed)
            if tensor.nbytes >= storage_bytes:
                base = _base(tensor)
                return View(tensor, OneUse(shared.once(base, self.stores[rule.codec])))
            return OneUse(shared.once(tensor.detach(), self.stores[rule.codec]))

    def _note(self, tensor: Tensor, packed: Any, codec: str) -> None:
        """Tells a rehearsal, the only one that asks, what became of a tensor."""
        if is_traced():
            place, sizes = self.place, (tensor.nbytes, packed.nbytes)
            self.compressed.append(Kept(place.module, place.operation, place.weight, codec, *sizes))

    def _rule(self, tensor: Tensor) -> Rule | None:
        """The first rule that fits the place; a compressing codec takes the inputs of linear maps only, and no matrix
        (a classifier's features) among them, unless its rule names the operation."""
        module, operation = self.place.module, self.place.operation
        for rule in self.rules:
            named = rule.operation != "*" or self.codecs[rule.codec].pack is None
            suits = named or (operation in LINEAR and tensor.dim() > 2)
            if suits and fnmatchcase(module, rule.module) and fnmatchcase(operation, rule.operation):
                return rule
        return None

    def _channel(self, tensor: Tensor) -> int:
        """The dimension of the channels: 1 of a map that is convolved, the last of tokens."""
        operation = self.place.operation
        return 1 if "conv" in operation or "norm" in operation or (not operation and tensor.dim() == 4) else -1

    def _draw(self) -> tuple[int, int]:
        """The key of the next random numbers, from the seed, the process, the place in the model, and the number of the
        pass."""
        seed, number = self.noise
        place, rank = f"{self.place.module}:{self.place.operation}", Ambient.now().rank
        self.drawn[place] += 1
        words = f"{seed} {place} {self.drawn[place]}{f' {rank}' if rank else ''}"
        return zlib.crc32(words.encode()), number


def _base(tensor: Tensor) -> Tensor:
    """All of a tensor's storage, flat."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), 0)


class Place(TorchFunctionMode):
    """Which operation of which module is running, and which tensors somebody outside the pass holds."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.thread = threading.get_ident()  # hooks for all modules are called in every thread
        self.modules = [""]
        self.operation = ""
        self.arguments: tuple = ()
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.held = {storage_number(t) for t in (*model.parameters(), *model.buffers()) if t.layout == torch.strided}
        self.inputs: list[StorageWeakRef] = []  # while they live, no new storage gets the same number

    @property
    def module(self) -> str:
        return self.modules[-1]

    @property
    def weight(self) -> str:
        """The first parameter that the operation was called with, by its name; "" if there is none."""
        return next((self.names[id(value)] for value in self.arguments if id(value) in self.names), "")

    def holds(self, tensor: Tensor) -> bool:
        return storage_number(tensor) in self.held

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
            self.held |= {storage_number(tensor) for tensor in inputs}
        self.modules.append(self.paths.get(id(module), self.module))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self.thread:
            self.modules.pop()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        outer = self.operation, self.arguments
        name = getattr(func, "__name__", "")  # what is stored during backward() is a region's input, made again
        self.operation, self.arguments = "" if name == "backward" else name, (*args, *(kwargs or {}).values())
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.operation, self.arguments = outer


def storage_number(tensor: Tensor) -> int:
    """Which storage a tensor is in: equal for tensors that share one."""
    return tensor.untyped_storage()._cdata
