"""Nested structures: a function on every leaf of lists, tuples and mappings, whatever their classes.

torch's own tree functions (`torch.utils._pytree`) enter a class only if somebody has registered it. A tokenizer's
BatchEncoding and a list of a script's own are leaves to them. Here every list, tuple and mapping is entered, as in
Hugging Face Accelerate.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any


def is_namedtuple(data: Any) -> bool:
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """The items of `generator` in a list, tuple or namedtuple of the type of `obj`."""
    if is_namedtuple(obj):
        return type(obj)(*generator)
    return type(obj)(generator)


def map_nested(
    function: Callable[[Any], Any],
    data: Any,
    is_leaf: Callable[[Any], bool] | None = None,
    skip_keys: Collection[Any] = (),
) -> Any:
    """The structure of `data`, of the same classes, with `function(leaf)` in place of each leaf.

    Args:
        is_leaf: true for lists, tuples and mappings that `function` is to get whole.
        skip_keys: keys of mappings whose values stay as they are.
    """

    def walk(data: Any) -> Any:
        if is_leaf is not None and is_leaf(data):
            return function(data)
        if isinstance(data, (tuple, list)):
            return honor_type(data, [walk(item) for item in data])
        if isinstance(data, Mapping):
            content = {}
            for key, value in data.items():
                content[key] = value if key in skip_keys else walk(value)
            mapping_class: Any = type(data)
            return mapping_class(content)
        return function(data)

    return walk(data)


def zip_nested(
    function: Callable[..., Any], data: Any, *others: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """The structure of `data` with `function(leaf, *others)` in place of each leaf.

    Args:
        others: structures like `data`, of which `function` gets the leaf of the same place.
        is_leaf: true for lists, tuples and mappings in `data` that `function` is to get whole.
    """

    def walk(data: Any, *others: Any) -> Any:
        if is_leaf is not None and is_leaf(data):
            return function(data, *others)
        if isinstance(data, (tuple, list)):
            zipped = []
            for index, item in enumerate(data):
                zipped.append(walk(item, *(other[index] for other in others)))
            return honor_type(data, zipped)
        if isinstance(data, Mapping):
            content = {}
            for key, value in data.items():
                content[key] = walk(value, *(other[key] for other in others))
            mapping_class: Any = type(data)
            return mapping_class(content)
        return function(data, *others)

    return walk(data, *others)


def leaves(data: Any, is_leaf: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """What `map_nested` calls its function on, in the same order: whatever is no list, tuple or mapping itself."""
    is_whole = is_leaf is not None and is_leaf(data)
    if is_whole or not isinstance(data, (tuple, list, Mapping)):
        yield data
        return
    values = data.values() if isinstance(data, Mapping) else data
    for item in list(values):
        yield from leaves(item, is_leaf)
