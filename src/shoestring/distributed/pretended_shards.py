"""FSDP2 in a trace: a model on fake tensors is sharded by FSDP2 itself, over processes that are not there.

What FSDP2 gathers, frees and reduces is then seen by the tracer as it happens in a run. One thing no operator shows:
storages that FSDP2 resizes. The tracer is told of them.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from .sharding import shard
from .world import World


@contextmanager
def pretended_shards(
    model: nn.Module, settings: dict[str, Any], world: World, resized: Callable[[Tensor], None]
) -> Iterator[None]:
    """A model as process 0 of a pretended world has it, while inside; `resized` is told of each tensor whose storage
    was resized."""
    classes = [(module, type(module)) for module in model.modules()]
    with ExitStack() as stack:
        stack.callback(_forget, classes)
        shard(model, settings, world, stack.enter_context(_mesh(world.size)))
        stack.enter_context(_telling(resized))
        yield


@contextmanager
def _mesh(size: int) -> Iterator[Any]:
    """A mesh of so many processes: beside those that there are, if there are any, without a word to them."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.testing._internal.distributed.fake_pg import FakeStore  # its import makes the backend known

    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    group: Any = dist.group.WORLD if alone else dist.new_group(backend="fake", use_local_synchronization=True)
    with unset_fake_temporarily():  # a mesh reads its ranks
        # Its name makes it another mesh than that of a run, for which DTensor would take what it remembers of this one.
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pretended",))
    try:
        yield mesh
    finally:
        dist.destroy_process_group(group)


@contextmanager
def _telling(resized: Callable[[Tensor], None]) -> Iterator[None]:
    """Tells of storages that FSDP2 resizes, which no operator does; and does not show the tensors of full size on which
    DTensor only looks what shape a result has."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    def telling(act: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        def resize(tensor: Tensor) -> None:
            act(tensor)
            resized(tensor)

        return resize

    def unseen(act: Callable[..., Any]) -> Callable[..., Any]:
        def look(*args: Any) -> Any:
            with _disable_current_modes():
                return act(*args)

        return look

    with ExitStack() as stack:
        for home, name, wrap in (
            (_fsdp_param, "alloc_storage", telling),
            (_fsdp_param, "free_storage", telling),
            (ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen),
        ):
            stack.callback(setattr, home, name, getattr(home, name))
            setattr(home, name, wrap(getattr(home, name)))
        yield


def _forget(classes: list[tuple[nn.Module, type]]) -> None:
    """Makes FSDP2 forget modules, which it knows by their classes and in a table."""
    from torch.distributed._composable_state import _module_state_mapping

    for module, kind in classes:
        module.__class__ = kind
        _module_state_mapping.pop(module, None)
