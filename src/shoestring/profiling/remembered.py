"""What operators make of fake tensors, remembered: most calls of a step were made before, in it or in another trace.

PyTorch's fakes remember as well, but find what they know by a key that takes longer to make than all else of a call.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor

from ..fakes import corrections, fake_of, fake_on, view_of

WRITES, VIEWS, MAKES = "writes", "views", "makes"
_ODD = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_UNTOLD_VIEWS = {torch.ops.aten._unsafe_view.default}  # of their first argument, though their schema does not say so
_UNTOLD_WRITES = {torch.ops.aten.bernoulli_.float}  # value by value
_FACTORIES = {getattr(torch.ops.aten, name).default for name in ("zeros", "ones")} | {
    torch.ops.aten.empty.memory_format
}
_forms: dict[tuple, tuple["_Form", ...] | None] = {}  # None: to be run each time


class _Form(NamedTuple):
    """A tensor as an operator returns it; `shift` is how far it begins behind the tensor that it is a view of."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    shift: int | None = None

    def make(self, given: Sequence[Any]) -> Tensor:
        if self.shift is not None:
            place = given[0].storage_offset() + self.shift, self.shape, self.stride
            return fake_on(given[0].fake_mode, self.device, given[0].untyped_storage(), self.dtype, *place)
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return fake_of(given[0].fake_mode if given else active_fake_mode(), meta, self.device)


def remembered(key: tuple, given: Sequence[Any], args: tuple, kwargs: dict) -> Any:
    """What an operator makes of its arguments, the given tensors among them; it is run where that is not known.

    `key` begins with the operator and is another for other arguments, but for devices.
    """
    func = key[0]
    kind = _kind(func)
    if not kind or not (given or func in _FACTORIES) or not all(map(_is_plain, given)):
        return corrections.run(func, args, kwargs)
    if kind == WRITES:
        return given[0] if _alike(given) else corrections.run(func, args, kwargs)
    key = (*key, *(tensor.fake_device for tensor in given), torch.get_default_dtype())
    if func is torch.ops.aten.as_strided.default:  # its offset is not from the tensor's
        key = (*key, given[0].storage_offset())
    forms = _forms.get(key)
    if forms is not None:
        made = tuple(form.make(given) for form in forms)
        return made if len(func._schema.returns) > 1 else made[0]
    out = view_of(func, args, kwargs) if kind == VIEWS else corrections.run(func, args, kwargs)
    if key not in _forms:
        _forms[key] = _forms_of(out, given, kind)
    return out


@cache
def _kind(func: Any) -> str:
    """Whether an operator writes into its first argument, value by value, gives a view of it, or makes new tensors."""
    schema = func._schema
    if (
        func.namespace != "aten"
        or _ODD & set(func.tags)
        or not all(str(one.type) == "Tensor" for one in schema.returns)
    ):
        return ""
    aliased = [number for number, argument in enumerate(schema.arguments) if argument.alias_info is not None]
    if aliased == [0] and len(schema.returns) == 1:
        if schema.arguments[0].alias_info.is_write:
            return WRITES if torch.Tag.pointwise in func.tags or func in _UNTOLD_WRITES else ""
        return VIEWS
    if func in _UNTOLD_VIEWS:
        return VIEWS
    return MAKES if not aliased and schema.returns else ""


def _is_plain(tensor: Any) -> bool:
    """Whether nothing but its form is known of a fake."""
    return (
        type(tensor) is FakeTensor
        and tensor.layout == torch.strided
        and tensor.constant is None
        and not tensor.dtype.is_complex
    )


def _alike(given: Sequence[Tensor]) -> bool:
    """Whether nothing is broadcast or cast, which might be refused."""
    first = given[0]
    return all(other.shape == first.shape and other.dtype == first.dtype for other in given[1:])


def _forms_of(out: Any, given: Sequence[Any], kind: str) -> tuple[_Form, ...] | None:
    """The forms of what a call returned; None where it is not what operators of its kind return."""
    made = out if isinstance(out, tuple) else (out,)
    if not all(map(_is_plain, made)):
        return None
    shift = made[0].storage_offset() - given[0].storage_offset() if kind == VIEWS else None
    forms = tuple(_Form(one.shape, one.stride(), one.dtype, one.fake_device, shift) for one in made)
    places = [one.untyped_storage()._cdata for one in made]
    if kind == VIEWS:
        return forms if places == [given[0].untyped_storage()._cdata] else None
    old = {tensor.untyped_storage()._cdata for tensor in given}
    sizes = [form.make(given).untyped_storage().nbytes() for form in forms]
    own = len(set(places) - old) == len(made) and sizes == [one.untyped_storage().nbytes() for one in made]
    return forms if own else None
