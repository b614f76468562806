"""Values beside fakes: small tensors from the batch are computed for real, so that a trace takes the path of a run.

A model may look at its masks, ids and lengths, or draw a number, and go another way for it. A fake has no values; here
the storage of a fake has a real one beside it, as long as every operator that wrote to it could be run for real. A
random number has two: the smallest and the largest that can be drawn.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from ..randomness import may_draw

LIMIT = 1 << 16  # elements of a tensor that is computed for real
DRAWN = 1 << 10  # of one that is drawn: whoever asks reads a few; masks of dropout would be real memory, twice
_BELOW_ONE = 1 - 2.0**-24

Storages = tuple[torch.UntypedStorage, ...]


class Values:
    """The real storages beside those of fakes, by address; one for each of the ways in which draws may fall."""

    def __init__(self) -> None:
        self._held: dict[int, Storages] = {}
        self._lent: set[int] = set()  # of the user's own storages, which are not to be written

    def lend(self, fake: Tensor, real: torch.UntypedStorage) -> None:
        """Lets the fake's storage stand for this one, which is read and never written."""
        if real.device.type == "cpu":
            self._held[_key(fake)] = (real,)
            self._lent.add(_key(fake))

    def drop(self, tensor: Tensor) -> None:
        """Forgets a tensor's values: nobody knows those of a tensor that is only there to take its place."""
        if tensor.layout == torch.strided:
            self.forget(_key(tensor))

    def forget(self, key: int) -> None:
        """Drops the storage of that address: it is freed, or its values are no longer known."""
        self._held.pop(key, None)
        self._lent.discard(key)

    def of(self, tensor: Tensor) -> tuple[Tensor, ...] | None:
        """A tensor -> its values, if they are known: one, or two that depend on a draw."""
        if tensor.numel() > LIMIT or tensor.layout != torch.strided:
            return None
        if not isinstance(tensor, FakeTensor):
            return None if tensor.requires_grad or tensor.is_meta else (tensor,)
        if tensor.constant is not None:
            return (tensor.constant,)
        return self._views(tensor, self._held.get(_key(tensor)))

    def follow(self, func: Any, args: tuple, kwargs: dict, given: list[Tensor], out: Any) -> None:
        """Runs an operator that was called on fakes, `given` among its arguments, on their values too, or drops the
        values that it wrote to."""
        if func.is_view:
            self._lend_views(given, out)
            return
        if not (may_draw(func) or self._is_concerned(func, given)):
            return
        written = [_key(tensor) for tensor in _written(func, args, kwargs)]
        outs = list(tensors_among([out]))
        extremes = _extremes(func, args, kwargs)
        if extremes is not None and len(outs) == 1 and outs[0].numel() <= DRAWN:
            self._draw(outs[0], extremes)
        elif not self._run(func, args, kwargs, outs, written):
            for key in written:
                self.forget(key)

    def _lend_views(self, given: list[Tensor], out: Any) -> None:
        """A view of a real tensor is a fake on a storage of its own; one of a fake has that fake's."""
        for real in given:
            if not isinstance(real, FakeTensor) and self.of(real) is not None:
                for view in tensors_among([out]):
                    self.lend(view, real.untyped_storage())

    def _is_concerned(self, func: Any, given: list[Tensor]) -> bool:
        """Whether a call has known values only, or may write into some; of most calls neither is true, and quickly."""
        may_be_known = [
            type(tensor) is not FakeTensor or tensor.constant is not None or self._is_held(tensor) for tensor in given
        ]
        return all(may_be_known) or (func._schema.is_mutable and any(may_be_known))

    def _is_held(self, tensor: Tensor) -> bool:
        return tensor.layout == torch.strided and _key(tensor) in self._held  # a sparse tensor has no storage

    def run(self, func: Any, args: tuple, kwargs: dict) -> list[Any] | None:
        """An operator and its arguments -> its result for their values; None if some are not known."""
        tensors = list(tensors_among([args, list(kwargs.values())]))
        known: dict[int, tuple[Tensor, ...]] = {}
        for tensor in tensors:
            values = self.of(tensor)
            if values is None:
                return None
            known[id(tensor)] = values
        results = []
        with no_dispatch(), torch.no_grad():
            for way in range(max((len(values) for values in known.values()), default=1)):
                real_args, real_kwargs = (_swapped(part, known, way) for part in (args, kwargs))
                try:
                    results.append(func(*real_args, **real_kwargs))
                except Exception:  # it worked on the fakes, so the values are not those of a run
                    return None
        return results

    def keep(self, fake: Tensor, reals: Iterable[Tensor]) -> None:
        """Records the values of a fake that was just made."""
        reals = list(reals)
        storages = tuple(real.untyped_storage() for real in reals)
        same = all(_geometry(real) == _geometry(fake) for real in reals)
        if same and all(storage.nbytes() == fake.untyped_storage().nbytes() for storage in storages):
            self._held[_key(fake)] = storages

    def _run(self, func: Any, args: tuple, kwargs: dict, outs: list[Tensor], written: list[int]) -> bool:
        if may_draw(func) or any(out.numel() > LIMIT for out in outs):
            return False
        if func.namespace != "aten" or (not written and not outs):
            return False
        self._make_writable(written, args, kwargs)
        results = self.run(func, args, kwargs)
        if results is None:
            return False
        made = [list(tensors_among([result])) for result in results]
        for number, out in enumerate(outs):
            if _key(out) not in self._held and all(len(parts) == len(outs) for parts in made):
                self.keep(out, [parts[number] for parts in made])
        return True

    def _make_writable(self, written: list[int], args: tuple, kwargs: dict) -> None:
        """Copies of the tensors to be written: never the user's own, and one for each way."""
        if not written:
            return
        tensors = tensors_among([args, list(kwargs.values())])
        ways = max((len(values) for tensor in tensors if (values := self.of(tensor))), default=1)
        for key in set(written) & set(self._held):
            held = self._held[key]
            if key in self._lent or len(held) < ways:
                with no_dispatch():
                    self._held[key] = tuple(held[way % len(held)].clone() for way in range(ways))
                self._lent.discard(key)

    def _draw(self, out: Tensor, extremes: tuple[float, float]) -> None:
        self.forget(_key(out))
        with no_dispatch():
            size = out.untyped_storage().nbytes() // out.itemsize
            flat = [torch.full((size,), extreme, dtype=out.dtype) for extreme in extremes]
        if size == out.numel():
            self._held[_key(out)] = tuple(part.untyped_storage() for part in flat)

    def _views(self, tensor: Tensor, held: Storages | None) -> tuple[Tensor, ...] | None:
        if held is None or held[0].nbytes() != tensor.untyped_storage().nbytes():
            return None
        with no_dispatch():
            place = tensor.storage_offset(), tensor.shape, tensor.stride()
            return tuple(torch.empty(0, dtype=tensor.dtype).set_(storage, *place) for storage in held)


def _extremes(func: Any, args: tuple, kwargs: dict) -> tuple[float, float] | None:
    """An operator that draws -> the smallest and the largest number that it can draw; None for any other."""
    name, numbers = func._overloadpacket.__name__, [arg for arg in args if isinstance(arg, int | float)]
    if name in ("rand", "rand_like"):
        return 0.0, _BELOW_ONE
    if name == "uniform_":
        low, high = ([*numbers, 0.0, 1.0] if not numbers else [*numbers, 1.0])[:2]
        return low, low + (high - low) * _BELOW_ONE
    if name in ("bernoulli", "bernoulli_") and func._overloadname in ("p", "float"):
        chance = numbers[0] if numbers else kwargs.get("p", 0.5)
        return float(chance >= 1), float(chance > 0)
    if name in ("randint", "randint_like") and numbers:
        return (numbers[0], numbers[1] - 1) if len(numbers) > 1 else (0, numbers[0] - 1)
    if name in ("randn", "randn_like"):
        return -4.0, 4.0
    return None


def _written(func: Any, args: tuple, kwargs: dict) -> Iterator[Tensor]:
    """The tensors that a call writes to."""
    if func._schema.is_mutable:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from tensors_among([args[place] if place < len(args) else kwargs.get(argument.name)])


def _swapped(value: Any, known: dict[int, tuple[Tensor, ...]], way: int) -> Any:
    if isinstance(value, Tensor):
        values = known[id(value)]
        return values[way % len(values)]
    if isinstance(value, list | tuple):
        return type(value)(_swapped(part, known, way) for part in value)
    if isinstance(value, dict):
        return {name: _swapped(part, known, way) for name, part in value.items()}
    return value


def tensors_among(values: Iterable[Any]) -> Iterator[Tensor]:
    """An operator's arguments or results, lists among them -> the tensors."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_among(value)


def _geometry(tensor: Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
