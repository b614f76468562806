"""The tracer: follows every storage of a training step from its birth to its death and writes the ledger."""

import sys
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.nn.modules import module as module_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..kernels.define import scratch_of
from ..ledger import Category, Ledger, Phase
from ..signature import Signature, signature_of
from .flops import flops_of

_CATEGORY = {
    Phase.BUILD: Category.MODEL,
    Phase.FORWARD: Category.ACTIVATION,
    Phase.RECOMPUTE: Category.ACTIVATION,
    Phase.BACKWARD: Category.ACTIVATION_GRADIENT,
    Phase.UPDATE: Category.OPTIMIZER,
}


class Tracer(TorchDispatchMode):
    """Sees each operator below autograd. `workspace` tells the bytes that an operator needs inside itself."""

    def __init__(self, workspace: dict[str, int | None] | None = None) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.phase = Phase.BUILD
        self.flops: dict[Phase, int] = dict.fromkeys(Phase, 0)
        self.signatures: dict[Signature, None] = {}  # in order of appearance
        self.unseen: dict[str, None] = {}
        self.workspace = workspace or {}
        self._numbers: dict[int, int] = {}  # storage -> its number in the ledger
        self._watches: dict[int, weakref.ref] = {}
        self._paths: dict[int, str] = {}
        self._stack: list[str] = [""]
        self._nodes: list[int] = []  # autograd sequence numbers in order, and the module that made each
        self._node_modules: list[str] = []

    # -- what the step tells ------------------------------------------------------------------------------------
    def enter_phase(self, phase: Phase) -> None:
        self.phase = phase

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        phase = self._current_phase()
        module = self._current_module(phase)
        if func is torch.ops.aten.add.Tensor and phase == Phase.BACKWARD and _engine_adds_in_place(args[0]):
            func = torch.ops.aten.add_.Tensor
        try:
            out, scratch = self._call(func, args, kwargs)
        except DataDependentOutputException:
            self.unseen["a value that depends on the data was read (.item() or a branch): 1 was assumed"] = None
            return 1
        for tensor in _tensors((args, kwargs)):
            self.watch(tensor, Category.INPUT, "", "made outside the step", Phase.BUILD)
        for tensor in _tensors(out):
            self.watch(tensor, _CATEGORY[phase], module, func.__name__, phase)
        self.flops[phase] += flops_of(func, args, kwargs, out)
        if scratch:
            self.ledger.death(self.ledger.birth(scratch, Category.WORKSPACE, module, func.__name__, phase))
        return out

    def _call(self, func: Any, args: tuple, kwargs: dict) -> tuple[Any, int]:
        """Runs the operator -> its result, and the bytes that it needs inside itself as far as they are known."""
        if func.namespace == "shoestring":
            return scratch_of(lambda: func(*args, **kwargs))
        if func.namespace == "profiler":
            return func(*args, **kwargs), 0
        signature = signature_of(func, args, kwargs)
        self.signatures[signature] = None
        return func(*args, **kwargs), self.workspace.get(str(signature)) or 0

    def watch(self, tensor: Tensor, category: Category, module: str, operation: str, phase: Phase) -> None:
        """Writes the tensor's storage down if it is new, or if it changed its size."""
        for storage in _storages(tensor):
            key, size = storage._cdata, storage.nbytes()
            number = self._numbers.get(key)
            if number is None:
                self._numbers[key] = self.ledger.birth(size, category, module, operation, phase)
                self._watches[key] = weakref.ref(storage, lambda _, key=key: self._forget(key))
            elif self.ledger.entries[number].bytes != size:
                self._numbers[key] = self.ledger.resize(number, size)

    def _forget(self, key: int) -> None:
        del self._watches[key]
        self.ledger.death(self._numbers.pop(key))

    def claim(self, tensor: Tensor, category: Category, module: str) -> None:
        """The tensor's storage turned out to be of this category (a gradient, say) all its life."""
        for storage in _storages(tensor):
            if (number := self._numbers.get(storage._cdata)) is not None:
                entry = self.ledger.entries[number]
                if entry.category not in (Category.MODEL, Category.INPUT):
                    entry.category, entry.module = category, module

    # -- where we are -------------------------------------------------------------------------------------------
    def _current_phase(self) -> Phase:
        # Backward formulas run without recording; what records inside the backward pass is a forward done again.
        if self.phase == Phase.BACKWARD and torch.is_grad_enabled():
            return Phase.RECOMPUTE
        return self.phase

    def _current_module(self, phase: Phase) -> str:
        if phase == Phase.FORWARD:
            sequence = torch._C._autograd._get_sequence_nr() - 1
            if not self._nodes or sequence > self._nodes[-1]:
                self._nodes.append(sequence)
                self._node_modules.append(self._stack[-1])
        elif phase == Phase.BACKWARD and (node := torch._C._current_autograd_node()) is not None:
            place = bisect_right(self._nodes, node._sequence_nr()) - 1
            return self._node_modules[place] if place >= 0 else ""
        return self._stack[-1]

    @contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """Follows which of the model's modules is running, and whose gradient is being accumulated."""
        self._paths = {id(module): path for path, module in model.named_modules()}
        with ExitStack() as stack:
            for hook in (
                module_hooks.register_module_forward_pre_hook(self._push),
                module_hooks.register_module_forward_hook(self._pop, always_call=True),
            ):
                stack.callback(hook.remove)
            for path, parameter in model.named_parameters():
                self.watch(parameter, Category.MODEL, path.rpartition(".")[0], "parameter", Phase.BUILD)
                if parameter.requires_grad:
                    stack.callback(parameter.register_post_accumulate_grad_hook(self._gradient_of(path)).remove)
            for path, buffer in model.named_buffers():
                self.watch(buffer, Category.MODEL, path.rpartition(".")[0], "buffer", Phase.BUILD)
            with self:
                yield

    def _push(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._paths.get(id(module), type(module).__name__))

    def _pop(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def _gradient_of(self, path: str) -> Any:
        home = path.rpartition(".")[0]

        def claim(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self.claim(parameter.grad, Category.GRADIENT, home)

        return claim


def _engine_adds_in_place(gradient: Tensor) -> bool:
    """Whether the autograd engine would add a second gradient into this one, as it does for a real tensor.

    It does where it holds the last reference. For fake tensors it never does, so the trace does it in its place.
    The counts are those of a tensor that only the engine holds, seen from a dispatch mode that the engine called.
    """
    caller = sys._getframe(2).f_code.co_name
    held = gradient._use_count(), torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
    return caller == "_engine_run_backward" and held == (4, 2) and gradient.layout == torch.strided


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    if tensor.layout == torch.strided:
        return [tensor.untyped_storage()]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices().untyped_storage(), tensor._values().untyped_storage()]
    return [part.untyped_storage() for part in (tensor.values(),)]
