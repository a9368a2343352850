"""Nested structures: a function on every leaf of lists, tuples and mappings, whatever their classes.

torch's own tree functions (`torch.utils._pytree`) enter a class only if somebody has registered it. A tokenizer's
BatchEncoding and a list of a script's own are leaves to them. Here every list, tuple and mapping is entered, as in
Hugging Face Accelerate.
"""

import copy
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple


class NamedLeaf(NamedTuple):
    """A leaf, and the way to it as a script writes it: `['boxes'][0]`. A structure that is itself a leaf has no way."""

    name: str
    leaf: Any


def is_namedtuple(data: Any) -> bool:
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """The items of `generator` in a list, tuple or namedtuple of the type of `obj`.

    A class of a script may have a constructor of its own. So `type(obj)(items)` is tried; where it raises, or gives
    another length, a copy of a list is filled with the items, and a tuple is made without the constructor.
    """
    items = list(generator)
    arguments = items if is_namedtuple(obj) else [items]
    made = _construct(type(obj), *arguments)
    if made is not None and len(made) == len(items):
        return made
    if isinstance(obj, tuple):
        return tuple.__new__(type(obj), items)
    made = copy.copy(obj)
    made[:] = items
    return made


def _mapping_like(data: Mapping, content: dict[Any, Any]) -> Any:
    """The items of `content`, which has the keys of `data`, in a mapping of the type of `data`, see `honor_type`."""
    made = _construct(type(data), content)
    if made is not None and made.keys() == content.keys():
        return made
    if not isinstance(data, (dict, UserDict)):  # A copy of another kind might share its items with `data`.
        raise TypeError(f"a {type(data).__name__} cannot be made of a dict with its items")
    made = copy.copy(data)
    for key, value in content.items():
        made[key] = value
    return made


def _construct(kind: Callable[..., Any], *arguments: Any) -> Any:
    """`kind(*arguments)`, or None where that raises: the constructor of a defaultdict takes a factory first."""
    try:
        return kind(*arguments)
    except Exception:  # A class of the script's own may raise anything.
        return None


def map_nested(
    function: Callable[..., Any],
    data: Any,
    *others: Any,
    is_leaf: Callable[[Any], bool] | None = None,
    skip_keys: Collection[Any] = (),
) -> Any:
    """The structure of `data`, of the same classes, with `function(leaf, *others)` in place of each leaf.

    Args:
        others: structures like `data`, of which `function` gets the leaf of the same place.
        is_leaf: true for lists, tuples and mappings in `data` that `function` is to get whole.
        skip_keys: keys of mappings whose values stay as they are.
    """

    def walk(part: Any, *other_parts: Any) -> Any:
        if is_leaf is not None and is_leaf(part):
            return function(part, *other_parts)
        if isinstance(part, (tuple, list)):
            places = zip(part, *other_parts, strict=True)
            return honor_type(part, [walk(*items) for items in places])
        if isinstance(part, Mapping):
            content = {}
            for key, value in part.items():
                content[key] = value
                if key not in skip_keys:
                    content[key] = walk(value, *(other[key] for other in other_parts))
            return _mapping_like(part, content)
        return function(part, *other_parts)

    return walk(data, *others)


def leaves(data: Any, is_leaf: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """The leaves, in the order of `map_nested`: whatever is no list, tuple or mapping itself."""
    for _, leaf in named_leaves(data, is_leaf):
        yield leaf


def has_leaf(condition: Callable[[Any], bool], data: Any) -> bool:
    """True if `condition` is true for a leaf of `data`."""
    if isinstance(data, (tuple, list)):
        return any(has_leaf(condition, item) for item in data)
    if isinstance(data, Mapping):
        return any(has_leaf(condition, item) for item in data.values())
    return condition(data)


# The order of the leaves has to be that of `map_nested`, by which `replace_leaves` puts others in their places.
def named_leaves(data: Any, is_leaf: Callable[[Any], bool] | None = None, name: str = "") -> Iterator[NamedLeaf]:
    """The leaves of `data`, which is at `name` in a larger structure, each with its own name."""
    is_whole = is_leaf is not None and is_leaf(data)
    if is_whole or not isinstance(data, (tuple, list, Mapping)):
        yield NamedLeaf(name, data)
        return
    items = data.items() if isinstance(data, Mapping) else enumerate(data)
    for place, (key, item) in enumerate(items):
        # The standard `repr` shows an address, which differs between processes.
        shown = f"<key {place}>" if type(key).__repr__ is object.__repr__ else repr(key)
        yield from named_leaves(item, is_leaf, f"{name}[{shown}]")


def replace_leaves(data: Any, new_leaves: Iterable[Any], is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """The structure of `data` with `new_leaves`, which come in the order of `leaves`, in place of its own."""
    remaining = iter(new_leaves)
    return map_nested(lambda _: next(remaining), data, is_leaf=is_leaf)


class SortedLeaves:
    """The leaves of `data` by their names: in the same order on all ranks, whatever the order of a mapping's keys.

    Those of {"y": 2, "x": 1} are 1 and 2. `replace_sorted([10, 20])` returns {"y": 20, "x": 10}. A key that has no
    `__repr__` of its own is named by its place, so all ranks have to insert such keys in one order.
    """

    def __init__(self, data: Any, is_leaf: Callable[[Any], bool] | None = None) -> None:
        self._data = data
        self._is_leaf = is_leaf
        in_structure = list(named_leaves(data, is_leaf))
        # `named[i]` is leaf number `_order[i]` of the structure: [1, 0] in the example.
        self._order = sorted(range(len(in_structure)), key=lambda number: in_structure[number].name)
        self.named = [in_structure[number] for number in self._order]

    def replace_sorted(self, new_leaves: Iterable[Any]) -> Any:
        """The structure of `data` with `new_leaves`, which come in the order of `named`, in place of its own."""
        by_number = dict(zip(self._order, new_leaves, strict=True))
        in_structure = [by_number[number] for number in range(len(by_number))]
        return replace_leaves(self._data, in_structure, self._is_leaf)
