"""Fake tensors in place of real ones: a model of any size takes part in a step and no byte is allocated."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..errors import ShoestringError
from ..structure import mapped
from ..turns import turn
from .corrections import coo

_CONTAINERS = (list, tuple, dict, OrderedDict)
_WHOLE = (Tensor, nn.Module, type, ModuleType, FunctionType, MethodType, partial)  # not looked into
_EVERY_MODULE = frozenset(vars(nn.Module()))  # attributes that torch itself keeps in a module


class Faker:
    """Makes the fake of a tensor; tensors that share a storage have fakes that share one."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self.mode = mode
        self.device = device
        # The real tensor is held beside its fake: an `id` or an address is reused once its owner is gone.
        self._bases: dict[int, tuple[Any, Tensor]] = {}
        self._fakes: dict[int, tuple[Any, Any]] = {}

    def tree(self, real: Any) -> Any:
        """A tensor, or a structure that holds some, such as a batch -> its fake; the same object gets the same fake."""
        if id(real) not in self._fakes:
            fake = self._tensor(real) if isinstance(real, Tensor) else mapped(self._leaf, real)
            self._fakes[id(real)] = real, fake
        return self._fakes[id(real)][1]

    def _leaf(self, leaf: Any) -> Any:
        return self.tree(leaf) if isinstance(leaf, Tensor) else leaf

    def pairs(self) -> Iterator[tuple[torch.UntypedStorage, Tensor]]:
        """The storages that were faked, each with the fake that stands for all of it."""
        yield from self._bases.values()

    def forget(self) -> None:
        """Drops all fakes, so that they live only as long as their users hold them."""
        self._bases.clear()
        self._fakes.clear()

    def _tensor(self, real: Tensor) -> Tensor:
        fake: Any = self._like(real.detach())
        if isinstance(real, nn.Parameter):
            fake._is_param = True  # what nn.Parameter() makes of a subclass, without another fake on the same storage
            vars(fake).update(vars(real))  # marks that an optimizer or a technique may look for
        return fake.requires_grad_(real.requires_grad)

    def _like(self, real: Tensor) -> Tensor:
        """A tensor -> a fake with the same size, strides, offset and type, on the storage's fake."""
        if real.layout == torch.sparse_coo:
            parts = self.tree(real._indices()), self.tree(real._values())
            with self.mode:
                return coo(*parts, like=real)
        if real.layout != torch.strided:
            return self.mode.from_tensor(real)
        base = self._base(real.untyped_storage())
        place = real.storage_offset(), real.shape, real.stride()
        return fake_on(self.mode, self.device, base.untyped_storage(), real.dtype, *place)

    def _base(self, storage: torch.UntypedStorage) -> Tensor:
        if storage._cdata not in self._bases:
            with torch._C._DisableTorchDispatch():
                meta = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
            self._bases[storage._cdata] = storage, fake_of(self.mode, meta, self.device)
        return self._bases[storage._cdata][1]


def fake_on(
    mode: Any, device: torch.device, storage: torch.UntypedStorage, dtype: torch.dtype, *place: Any
) -> FakeTensor:
    """A fake on the storage of another, at a place (offset, shape, strides), by a tenth of what PyTorch's way costs."""
    with torch._C._DisableTorchDispatch():
        meta = _meta_on(storage, dtype, *place)
    return fake_of(mode, meta, device)


def view_of(func: Any, args: tuple, kwargs: dict) -> FakeTensor:
    """What an operator that gives a view of its first argument makes of a fake: that of its meta kernel."""
    fake, *others = args
    with torch._C._DisableTorchDispatch():
        meta = _meta_on(fake.untyped_storage(), fake.dtype, fake.storage_offset(), fake.shape, fake.stride())
        made = func(meta, *others, **kwargs)
    return fake_of(fake.fake_mode, made, fake.fake_device)


def _meta_on(storage: torch.UntypedStorage, dtype: torch.dtype, *place: Any) -> Tensor:
    return torch.empty(0, dtype=dtype, device="meta").set_(storage, *place)


def fake_of(mode: Any, meta: Tensor, device: torch.device) -> FakeTensor:
    """FakeTensor(mode, meta, device), whose many attributes are the same in all of a mode and a device."""
    fake = Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
    torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(_attributes(mode, device))
    return fake


@lru_cache(maxsize=2)
def _attributes(mode: Any, device: torch.device) -> dict[str, Any]:
    with torch._C._DisableTorchDispatch():
        return dict(vars(FakeTensor(mode, torch.empty(0, device="meta"), device)))


@contextmanager
def faked(model: nn.Module, faker: Faker) -> Iterator[None]:
    """Inside the context, the model's tensors are fakes; afterwards each module is as it was, to the attribute.

    They are swapped and not copied, so that closures over the model and its layers see them too.
    """
    check_can_be_faked(model)
    with ExitStack() as stack:
        stack.enter_context(turn(model, "examined"))
        for parameter in model.parameters():
            stack.callback(setattr, parameter, "grad", parameter.grad)
        for module in list(model.modules()):
            stack.callback(_restore, module, dict(vars(module)))
        stack.callback(_put_back, _contents(model))
        for module in list(model.modules()):
            vars(module).update(_fake_attributes(module, faker))
        yield


def _fake_attributes(module: nn.Module, faker: Faker) -> dict[str, Any]:
    """A module -> its attributes that can hold tensors, faked: an LSTM lists its weights a second time."""
    found = {name: value for name, value in vars(module).items() if name not in _EVERY_MODULE}
    found |= {"_parameters": module._parameters, "_buffers": module._buffers}
    kinds = (Tensor, *_CONTAINERS)
    return {name: faker.tree(value) for name, value in found.items() if isinstance(value, kinds)}


def _restore(module: nn.Module, attributes: dict[str, Any]) -> None:
    # Not by clear() and update(): modules of a class share the keys of their dictionaries until one is cleared.
    for name in vars(module).keys() - attributes.keys():
        del vars(module)[name]
    vars(module).update(attributes)


def _contents(model: nn.Module) -> list[tuple[Any, list[Any]]]:
    """A model -> everything that can be changed in place below its modules' attributes, each with what it holds.

    Above all the hooks: a model that installs some in its first forward pass, behind a flag, would find the flag as it
    was and the hooks still there. Then lists, dictionaries, sets and plain objects, which may come to hold a fake.
    """
    found: dict[int, tuple[Any, list[Any]]] = {}
    todo = [value for module in model.modules() for value in vars(module).values()]
    while todo:
        value = todo.pop()
        if id(value) not in found and (held := _held(value)) is not None:
            found[id(value)] = value, held
            todo += [part for pair in held for part in pair] if _is_mapped(value) else held
    return list(found.values())


def _held(value: Any) -> list[Any] | None:
    """What a list, set, dictionary (its pairs) or plain object (its attributes) holds; None for anything else."""
    if isinstance(value, list | set | deque):
        return list(value)
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, _WHOLE) or not hasattr(value, "__dict__") or type(value).__module__.startswith("torch"):
        return None
    return list(vars(value).items())


def _is_mapped(value: Any) -> bool:
    return not isinstance(value, list | set | deque)


def _put_back(contents: list[tuple[Any, list[Any]]]) -> None:
    for value, before in contents:
        now = _held(value)
        if now is not None and len(now) == len(before) and all(map(_same, now, before)):
            continue
        target = value if isinstance(value, list | set | deque | dict) else vars(value)
        target.clear()
        (target.extend if isinstance(target, list | deque) else target.update)(before)


def _same(now: Any, before: Any) -> bool:
    pair = isinstance(now, tuple) and isinstance(before, tuple) and len(now) == len(before) == 2
    return now is before or (pair and now[0] is before[0] and now[1] is before[1])


def check_can_be_faked(model: nn.Module) -> None:
    """Refuses a model whose tensors cannot be swapped."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ShoestringError(f"{path or 'the model'} is TorchScript: pass the Python module behind it")
