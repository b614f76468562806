"""Tensors in structures of any kind: the one place where batches are flattened and rebuilt.

Containers are lists, tuples, named tuples, every `Mapping` (a dict, a UserDict, transformers' BatchEncoding),
dataclasses and whatever is registered with `torch.utils._pytree`. Anything else is a leaf. Containers are rebuilt as
the type that they were, so that a loss finds `batch.labels` where it was. A leaf's path is its keys joined by dots:
"inputs.mask", "0.ids".
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .errors import ShoestringError

Rebuild = Callable[[Sequence[Any]], Any]  # leaves in order -> the structure


class _Kind(NamedTuple):
    """A container type: `children(node)` gives (key, child) in order, `rebuild(like, children)` a node like `like`."""

    children: Callable[[Any], list[tuple[Any, Any]]]
    rebuild: Callable[[Any, list[Any]], Any]


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of a structure, in order."""
    if (kind := _kind(tree)) is None:
        yield tree
    else:
        for _, child in kind.children(tree):
            yield from leaves(child)


def tensors(tree: Any) -> list[Tensor]:
    """The tensors in a structure, in order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def named_leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves with their paths.

    >>> list(named_leaves({"ids": [1, 2], "name": "x"}))
    [('ids.0', 1), ('ids.1', 2), ('name', 'x')]
    """
    if (kind := _kind(tree)) is None:
        yield path, tree
    else:
        for key, child in kind.children(tree):
            yield from named_leaves(child, _inside(path, key))


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The structure with `function(leaf)` in place of each leaf."""
    return mapped_by_name(lambda _, leaf: function(leaf), tree)


def mapped_by_name(
    function: Callable[[str, Any], Any],
    tree: Any,
    is_leaf: Callable[[str, Any], bool] = lambda path, node: False,
    path: str = "",
) -> Any:
    """The structure with `function(path, leaf)` in place of each leaf, and of each node that `is_leaf(path, node)`.

    Lists and dicts are copied, so that changing the result does not change the original. Other objects are
    returned as they are if nothing in them changed: other code may hold them too.
    """
    kind = _kind(tree)
    if kind is None or is_leaf(path, tree):
        return function(path, tree)
    before = kind.children(tree)
    after = [mapped_by_name(function, child, is_leaf, _inside(path, key)) for key, child in before]
    plain = isinstance(tree, list | dict)
    unchanged = not plain and all(new is old for new, (_, old) in zip(after, before, strict=True))
    return tree if unchanged else kind.rebuild(tree, after)


def flatten(tree: Any) -> tuple[list[Any], Rebuild]:
    """A structure -> its leaves, and a function that rebuilds it from new leaves and holds none of the old ones."""
    found: list[Any] = []
    form = _taken_apart(tree, found)
    return found, lambda new: _put_together(form, iter(new))


def _taken_apart(tree: Any, found: list[Any]) -> Any:
    """A structure -> its shape: None for a leaf; else the kind, an empty node and the shapes of the children."""
    if (kind := _kind(tree)) is None:
        found.append(tree)
        return None
    children = [child for _, child in kind.children(tree)]
    return kind, kind.rebuild(tree, [None] * len(children)), [_taken_apart(child, found) for child in children]


def _put_together(form: Any, new: Iterator[Any]) -> Any:
    if form is None:
        return next(new)
    kind, empty, children = form
    return kind.rebuild(empty, [_put_together(child, new) for child in children])


def _inside(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


# -- kinds ----------------------------------------------------------------------------------------------------------
def _kind(node: Any) -> _Kind | None:
    """The kind of a container; None for a leaf."""
    kind: Any = type(node)
    if kind in pytree.SUPPORTED_NODES and kind not in _PLAIN:  # looked up each time: a library may register it later
        return _REGISTERED
    return _kind_of(kind)


@cache
def _kind_of(kind: type) -> _Kind | None:
    if issubclass(kind, Tensor | nn.Module):
        return None
    if issubclass(kind, list):
        return _LIST
    if issubclass(kind, tuple):
        return _NAMED_TUPLE if hasattr(kind, "_fields") else _TUPLE if kind is tuple else None
    if issubclass(kind, Mapping):
        return _MAPPING
    return _DATACLASS if dataclasses.is_dataclass(kind) else None


def _like_list(like: list, children: list[Any]) -> list:
    if type(like) is list:
        return children
    made = copy.copy(like)
    made[:] = children
    return made


def _like_mapping(like: Mapping, children: list[Any]) -> Mapping:
    """A copy keeps the object's other attributes; if a copy would share its items, the type is called instead."""
    items = dict(zip(like, children, strict=True))
    if type(like) is dict:
        return items
    if isinstance(like, MutableMapping) and (isinstance(like, dict | UserDict) or hasattr(like, "__copy__")):
        made = copy.copy(like)
        for key, child in items.items():
            made[key] = child
        return made
    try:
        return type(like)(items)  # type: ignore[call-arg]
    except Exception as error:
        raise ShoestringError(
            f"a {type(like).__name__} in the batch cannot be made from a dict ({error}): give it a __copy__, or "
            "register it with torch.utils._pytree.register_pytree_node"
        ) from error


def _fields(node: Any) -> list[tuple[str, Any]]:
    names = [field.name for field in dataclasses.fields(node)]
    return [(name, getattr(node, name)) for name in names if hasattr(node, name)]


def _like_dataclass(like: Any, children: list[Any]) -> Any:
    made = copy.copy(like)  # not by its __init__, which may have other arguments, checks or side effects
    for (name, _), child in zip(_fields(like), children, strict=True):
        object.__setattr__(made, name, child)  # frozen ones too
    return made


def _registered_children(node: Any) -> list[tuple[Any, Any]]:
    children, _ = pytree.SUPPORTED_NODES[type(node)].flatten_fn(node)
    keys = list(node) if isinstance(node, Mapping) and len(node) == len(children) else range(len(children))
    return list(zip(keys, children, strict=True))


def _like_registered(like: Any, children: list[Any]) -> Any:
    record = pytree.SUPPORTED_NODES[type(like)]
    return record.unflatten_fn(children, record.flatten_fn(like)[1])


_PLAIN = (list, tuple, dict)
_LIST = _Kind(lambda node: list(enumerate(node)), _like_list)
_TUPLE = _Kind(lambda node: list(enumerate(node)), lambda like, children: tuple(children))
_NAMED_TUPLE = _Kind(
    lambda node: list(zip(node._fields, node, strict=True)), lambda like, children: type(like)._make(children)
)
_MAPPING = _Kind(lambda node: [(key, node[key]) for key in node], _like_mapping)
_DATACLASS = _Kind(_fields, _like_dataclass)
_REGISTERED = _Kind(_registered_children, _like_registered)
