"""The state that a region's calls depend on besides arguments: buffers; generators and autocast of every device."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .buffers import Buffers, Slot
from .checksums import is_traced

CPU = torch.device("cpu")


def devices_of(tensors: Iterable[Any]) -> frozenset[torch.device]:
    """The devices, besides the CPU, on which there are tensors with values."""
    if is_traced():  # a fake may say that it is on a device which this machine does not have
        return frozenset()
    return frozenset(t.device for t in tensors if isinstance(t, Tensor) and t.device.type not in ("cpu", "meta"))


class State:
    """Random states and autocast as they are now, on the CPU and on these devices, and buffers."""

    __slots__ = ("autocast", "buffers", "random")

    def __init__(self, devices: Iterable[torch.device] = (), buffers: Sequence[Slot] = ()) -> None:
        self.random = {device: _random_state(device) for device in (CPU, *devices)}
        kinds = {device.type for device in self.random if torch.amp.is_autocast_available(device.type)}
        self.autocast = {kind: _autocast(kind) for kind in kinds}
        self.buffers = Buffers(buffers)

    def forget_if_unused(self) -> None:
        """Drops the states (5 KB on the CPU) of generators that were not used since; unchanged buffers likewise."""
        self.buffers.forget_unchanged()
        # A trace has no values, but the generator's state is real there too.
        with _disable_current_modes() if is_traced() else nullcontext():
            self.random = {
                device: state for device, state in self.random.items() if not torch.equal(state, _random_state(device))
            }

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The state is the recorded one inside the context, and the present one afterwards."""
        with ExitStack() as stack:
            stack.enter_context(self.buffers.restored())
            for kind, (enabled, dtype) in self.autocast.items():
                if (enabled, dtype) != _autocast(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled))
            for device, state in self.random.items():
                stack.callback(_set_random_state, device, _random_state(device))
                _set_random_state(device, state)
            yield


def _autocast(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _random_state(device: torch.device) -> Tensor:
    if device == CPU:
        return torch.get_rng_state()
    with torch.get_device_module(device).device(device.index):
        return torch.get_device_module(device).get_rng_state()


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device == CPU:
        torch.set_rng_state(state)
        return
    with torch.get_device_module(device).device(device.index):
        torch.get_device_module(device).set_rng_state(state)
