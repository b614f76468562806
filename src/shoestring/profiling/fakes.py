"""Fake tensors in place of real ones: a model of any size takes part in a step and no byte is allocated."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree


class Faker:
    """Makes a fake twin of a tensor; tensors that share a storage have twins that share one."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self.mode = mode
        self.device = device
        self._bases: dict[int, tuple[Tensor, Any]] = {}  # the real storage is kept, or its number could be reused
        self._parameters: dict[int, nn.Parameter] = {}

    def tensor(self, real: Tensor) -> Tensor:
        """A real or meta tensor -> its fake, with the same size, strides, offset and dtype."""
        storage = real.untyped_storage()
        with self.mode:
            if storage._cdata not in self._bases:
                numel = storage.nbytes() // real.element_size()
                base = torch.empty(numel, dtype=real.dtype, device=self.device)
                self._bases[storage._cdata] = base, storage
            base = self._bases[storage._cdata][0]
            base = base if base.dtype == real.dtype else base.view(real.dtype)
            return torch.as_strided(base, real.shape, real.stride(), real.storage_offset())

    def parameter(self, real: nn.Parameter) -> nn.Parameter:
        """A parameter -> its fake; a tied one has one fake, however many names it has."""
        if id(real) not in self._parameters:
            self._parameters[id(real)] = nn.Parameter(self.tensor(real.detach()), requires_grad=real.requires_grad)
        return self._parameters[id(real)]

    def tree(self, batch: Any) -> Any:
        """A batch of any structure -> the same with fakes in place of its tensors."""
        return pytree.tree_map_only(Tensor, self.tensor, batch)


@contextmanager
def faked(model: nn.Module, faker: Faker) -> Iterator[None]:
    """The model's parameters and buffers are fakes inside the context, and the real ones again after it.

    They are swapped and not copied, so that closures over the model and its layers see them too.
    """
    homes = [home for module in model.modules() for home in (module._parameters, module._buffers)]
    real = [dict(home) for home in homes]
    gradients = [(p, p.grad) for p in model.parameters()]
    try:
        for home in homes:
            for name, value in home.items():
                if isinstance(value, nn.Parameter):
                    home[name] = faker.parameter(value)
                elif value is not None:
                    home[name] = faker.tensor(value)
        yield
    finally:
        for home, values in zip(homes, real, strict=True):
            home.clear()
            home.update(values)
        for parameter, gradient in gradients:
            parameter.grad = gradient
