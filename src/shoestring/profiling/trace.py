"""The tracer: follows every storage of a training step from allocation to release and writes the ledger."""

import sys
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from ..ambient import Ambient
from ..distributed import local
from ..kernels.define import fake_call
from ..kernels.flops import flops_of
from ..ledger import BUCKET, Category, Ledger, Phase
from ..patching import ForAllThreads
from ..randomness import draws
from ..signature import Signature, output_key, signature_of
from . import sizes
from .choices import Choices, here, short
from .remembered import remembered
from .scratch import Moment, with_scratch
from .values import Values, tensors_among

_CATEGORY = {
    Phase.BUILD: Category.OPTIMIZER,  # the model is there already: what is built is the optimizer
    Phase.FORWARD: Category.ACTIVATION,
    Phase.RECOMPUTE: Category.ACTIVATION,
    Phase.BACKWARD: Category.ACTIVATION_GRADIENT,
    Phase.UPDATE: Category.OPTIMIZER,
}
_WRAPPERS = ("torch._compile", "torch._dynamo")  # in which torch wraps a dispatch mode
_signatures: dict[Any, Signature] = {}  # of all traces: most of their calls are the same


class Tracer(TorchDispatchMode):
    """Sees each operator below autograd. `workspace` gives the scratch bytes of an operator call."""

    def __init__(self, workspace: Mapping[str, int | None] | None = None, choices: Choices | None = None) -> None:
        super().__init__()
        self.values, self.choices = Values(), choices or Choices()
        self.ledger = Ledger()  # without the scratch inside PyTorch's operators
        self.moments: list[Moment] = []  # at which operators had that scratch
        self.open_outputs: set[str] = set()  # keys of outputs whose size the table did not have
        self.phase = Phase.BUILD
        self.flops: dict[Phase, int] = dict.fromkeys(Phase, 0)
        self.flops_by_width: Counter[int] = Counter()  # of convolutions' maps; 0 for other products
        self.draws = 0  # of random numbers, in the passes
        self.unseen: dict[str, None] = {}
        self.nodes = self.leaves = 0  # of autograd's graph
        self.repeated = (0, 0)  # bytes born and calls of runs that a traced one stands for
        self.sent_bytes = 0  # to other processes, for their shards
        self.workspace = workspace or {}
        self._draws = 0
        self.calls: dict[Any, Signature] = {}  # distinct calls, in order of appearance
        self._numbers: dict[int, int] = {}  # storage -> its number in the ledger
        self._watches: dict[int, weakref.ref] = {}
        self._paths: dict[int, str] = {}
        self._stack: list[str] = [""]
        self._nodes: list[int] = []  # autograd sequence numbers in order, and the module that made each
        self._node_modules: list[str] = []

    @property
    def signatures(self) -> list[Signature]:
        return list(dict.fromkeys(self.calls.values()))

    @property
    def peak_bytes(self) -> int:
        return with_scratch(self.ledger, self.moments, self.workspace).peak().bytes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether PyTorch wraps the dispatch in two more calls, of use to its compiler only."""
        return False

    # -- what the step calls -------------------------------------------------------------------------------
    def enter_phase(self, phase: Phase) -> None:
        self.phase = phase

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if DTensor in types:
            return NotImplemented  # what it does to this process's part comes here again
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # half of all calls: PyTorch asks a tensor for its device
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        phase = self._current_phase()
        module = self._current_module(phase)
        if func is torch.ops.aten.add.Tensor and phase == Phase.BACKWARD and _engine_adds_in_place(args[0]):
            func = torch.ops.aten.add_.Tensor
        given = list(tensors_among([args, kwargs.values()] if kwargs else args))
        try:
            out, scratch, signature = self._call(func, args, kwargs, given)
        except DataDependentOutputException:
            return self._read(func, args)
        except DynamicOutputShapeException:
            out, scratch, signature = self._sized(func, args, kwargs), 0, None
        for tensor in given:
            self.watch(tensor, Category.INPUT, "", "made outside the step", Phase.BUILD)
        for tensor in tensors_among([out]):
            self.watch(tensor, _CATEGORY[phase], module, func.__name__, phase)
        self.values.follow(func, args, kwargs, given, out)
        flops = Ambient.now().times * flops_of(func, args, kwargs, out)
        self.flops[phase] += flops
        if flops:
            self.flops_by_width[_width(func, given)] += flops
        if draws(func, args, kwargs):
            self.draws += phase != Phase.UPDATE
            self._draws += 1  # a fake draws nothing, but a saved state must be seen to be another
            torch.default_generator.manual_seed(self._draws)
        if scratch:
            self.ledger.death(self._birth(scratch, Category.WORKSPACE, module, func.__name__, phase))
        if signature is not None:
            self.moments.append(Moment(self.ledger.time, signature, module, func.__name__, phase))
        return out

    def _read(self, func: Any, args: tuple) -> Any:
        """The result of a call that reads values: that of a real run if they are known, else a choice."""
        results = self.values.run(func, args, {})
        if results is not None and all(result == results[0] for result in results):
            return results[0]
        if results is not None:
            return results[self.choices.choose("a random draw")]
        answer = self.choices.choose("a value that the batch does not tell")
        if func is not torch.ops.aten._local_scalar_dense.default or args[0].dtype == torch.bool:
            return answer
        return float(answer) if args[0].is_floating_point() else int(answer)

    def _sized(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """The result of a call whose size depends on values, or an upper bound, which is reported."""
        found = sizes.made_by(func, args, kwargs, self.values, self.__torch_dispatch__)
        if found is None:
            raise DynamicOutputShapeException(func)
        out, exact = found
        if not exact:
            size = max((tensor.numel() for tensor in tensors_among([out])), default=0)
            self.unseen[f"the size of what {func} makes at {short(here())}: the most that it can be, {size:,}"] = None
        return out

    def _call(self, func: Any, args: tuple, kwargs: dict, given: list[Tensor]) -> tuple[Any, int, Signature | None]:
        """Runs the operator on the given tensors -> its result, and its scratch: bytes, or what to look them up by."""
        if func.namespace == "shoestring":
            return *fake_call(func, args), None
        if func.namespace == "profiler":
            return func(*args, **kwargs), 0, None
        key = func, _key(args), _key(tuple(kwargs.items())) if kwargs else ()
        signature = self._signature(key, args, kwargs)
        out = remembered(key, given, args, kwargs)
        return self._with_hidden_outputs(out, signature), 0, signature

    def _with_hidden_outputs(self, out: Any, signature: Signature) -> Any:
        """Gives outputs whose size only the library knows (oneDNN's LSTM workspace) the calibrated size."""
        if not isinstance(out, tuple):
            return out
        empty = [n for n, part in enumerate(out) if isinstance(part, Tensor) and part.numel() == 0]
        sizes = {n: self.workspace.get(output_key(signature, n)) for n in empty}
        self.open_outputs |= {output_key(signature, n) for n, size in sizes.items() if size is None}
        return tuple(part.new_empty(size) if (size := sizes.get(n)) else part for n, part in enumerate(out))

    def _signature(self, key: tuple, args: tuple, kwargs: dict) -> Signature:
        if key not in self.calls:
            if key not in _signatures:
                _signatures[key] = signature_of(key[0], args, kwargs)
            self.calls[key] = _signatures[key]
        return self.calls[key]

    # -- storages -------------------------------------------------------------------------------------------
    def watch(self, tensor: Tensor, category: Category, module: str, operation: str, phase: Phase) -> None:
        """Records the tensor's storage if it is new, or if its size has changed."""
        for storage in _storages(tensor):
            key, size = storage._cdata, storage.nbytes()
            number = self._numbers.get(key)
            if number is None:
                self._numbers[key] = self._birth(size, category, module, operation, phase)
                self._watches[key] = weakref.ref(storage, self._at_death(key))
            elif self.ledger.entries[number].bytes != size:
                self._numbers[key] = self.ledger.resize(number, size)

    def _birth(self, size: int, *what: Any) -> int:
        if more := Ambient.now().times - 1:
            born, calls = self.repeated
            self.repeated = born + more * size, calls + more
        return self.ledger.birth(size, *what)

    def _at_death(self, key: int) -> Any:
        def forget(_: Any) -> None:
            del self._watches[key]
            self.ledger.death(self._numbers.pop(key))
            self.values.forget(key)

        return forget

    def number_of(self, tensor: Tensor) -> int | None:
        """The number of a dense tensor's storage in the ledger."""
        return self._numbers.get(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None

    def claim(self, tensor: Tensor, category: Category, module: str, operation: str = "") -> None:
        """Sets the category of the tensor's storage (a gradient, say) for its whole life; a bucket stays one."""
        for storage in _storages(tensor):
            if (number := self._numbers.get(storage._cdata)) is not None:
                entry = self.ledger.entries[number]
                if entry.category not in (Category.MODEL, Category.INPUT) and entry.operation != BUCKET:
                    entry.category, entry.module = category, module
                    entry.operation = operation or entry.operation

    # -- where we are ---------------------------------------------------------------------------------------
    def _current_phase(self) -> Phase:
        # Backward formulas run without recording: whatever records inside of one is a recomputed forward.
        if self.phase == Phase.BACKWARD and torch.is_grad_enabled() and torch._C._current_autograd_node():
            return Phase.RECOMPUTE
        return self.phase

    def _current_module(self, phase: Phase) -> str:
        if phase in (Phase.FORWARD, Phase.RECOMPUTE):
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
                self.watch(parameter, Category.MODEL, home(path), "parameter", Phase.BUILD)
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(self._gradient_of(path))
                    stack.callback(hook.remove)
            for path, buffer in model.named_buffers():
                self.watch(buffer, Category.MODEL, home(path), "buffer", Phase.BUILD)
            with Ambient.during(state_made=self._watch_state), _states_told, self:
                yield

    def _watch_state(self, state: Tensor) -> None:
        """The generator's state is 5 KB that no operator allocates: a checkpoint saves one."""
        phase = self._current_phase()
        self.watch(state, _CATEGORY[phase], self._stack[-1], "get_rng_state", phase)

    def _push(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._paths.get(id(module), type(module).__name__))

    def _pop(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def _gradient_of(self, path: str) -> Any:
        def claim(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self.claim(parameter.grad, Category.GRADIENT, home(path))

        return claim


@ForAllThreads
@contextmanager
def _states_told() -> Iterator[None]:
    """Whoever reads PyTorch's generator tells the trace of its thread."""
    get_state = torch.get_rng_state

    def told() -> Tensor:
        state = get_state()
        if (tell := Ambient.now().state_made) is not None:
            tell(state)
        return state

    torch.get_rng_state = told
    try:
        yield
    finally:
        torch.get_rng_state = get_state


def _engine_adds_in_place(gradient: Tensor) -> bool:
    """Whether the autograd engine would add a second gradient into this one, as it does for a real tensor.

    It does if it holds the last reference. For fake tensors it never does, so the trace does it instead.
    The counts are those of a tensor that the engine alone holds, seen from a dispatch mode that it called.
    """
    caller = sys._getframe(2)
    while caller.f_back and caller.f_globals["__name__"].startswith(_WRAPPERS):
        caller = caller.f_back
    if caller.f_code.co_name != "_engine_run_backward" or gradient.layout != torch.strided:
        return False
    tensor: Any = gradient
    return (tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) == (4, 2)


def _width(func: Any, given: list[Tensor]) -> int:
    """The width of the map that a convolution reads; 0 for other operators."""
    if "conv" not in func.__name__:
        return 0
    return max((tensor.shape[-1] for tensor in given if tensor.dim() == 4), default=0)


def home(path: str) -> str:
    """A parameter's path -> its module's."""
    return path.rpartition(".")[0]


def _key(value: Any) -> Any:
    """An argument -> something hashable that is equal for equal signatures only."""
    if isinstance(value, Tensor):
        return value.shape, value.stride() if value.layout == torch.strided else value.layout, value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return type(value), value  # True == 1 == 1.0, but not to an operator


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    return [part.untyped_storage() for part in _parts(tensor)]


def _parts(tensor: Tensor) -> list[Tensor]:
    """A tensor -> the dense tensors that hold its data, in this process."""
    tensor = local(tensor)
    if tensor.layout == torch.strided:
        return [tensor]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
