"""What the pickle inside a torch file describes, read without unpickling it.

The usual unpickler calls whatever functions a pickle names. The one here calls nothing: it knows the few instructions
that a dictionary of tensors needs, takes the few names that torch writes as words, and refuses the rest.
"""

from __future__ import annotations

import math
import pickletools
import struct
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from multilora_jax.safetensors_file import FileError

_MAX_INTEGER, _MAX_DIMENSIONS = 2**63, 32
_ORDERED_DICT = "collections.OrderedDict"
_REBUILD_TENSOR, _REBUILD_PARAMETER = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"
_DTYPES = {
    "torch.FloatStorage": np.dtype("<f4"),
    "torch.HalfStorage": np.dtype("<f2"),
    "torch.BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
}
_OTHER_STORAGES = frozenset(
    f"torch.{kind}Storage"
    for kind in ("Double", "Long", "Int", "Short", "Char", "Byte", "Bool", "ComplexFloat", "ComplexDouble")
)


class UnsafePickleError(FileError):
    """A pickle that asks for more than a dictionary of tensors, and might do harm where it is opened."""

    def __init__(self, message: str):
        super().__init__("corrupt", message)


@dataclass(frozen=True)
class Storage:
    """The bytes of one or more tensors: `size` numbers of `dtype`, in the archive's entry data/`key`."""

    dtype: np.dtype
    key: str
    size: int


@dataclass(frozen=True)
class View:
    """A tensor; `offset` and `strides` count elements of the storage, and reach no further than it."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class _Name:
    """A function or class that the pickle names; here it is a word and nothing more."""

    name: str


def read_description(text: bytes) -> dict[str, View]:
    """The tensors by name, in the order of the pickle.

    Raises:
        UnsafePickleError: the pickle asks for code, or uses instructions that no dictionary of tensors needs.
        FileError: `corrupt`, or `unsupported_dtype` for anything but float32, float16 and bfloat16.
    """
    try:
        value = _run(text)
    # pickletools raises ValueError for what is no pickle; the rest are instructions that do not fit together.
    except (ValueError, LookupError, TypeError, struct.error, OverflowError):
        raise _corrupt("the description of its tensors is damaged") from None
    if not isinstance(value, dict):
        raise _corrupt("it holds no dictionary of tensors")
    for name, view in value.items():
        if not isinstance(name, str) or not isinstance(view, View):
            what = shown(name) if isinstance(name, str) else "a number"
            raise _corrupt(f"its entry {what} is no tensor, or has no name")
    return value


def shown(text: str) -> str:
    """A stranger's text as messages give it: cut, its control characters escaped."""
    return repr(text[:200])[1:-1]


def _corrupt(what: str) -> FileError:
    return FileError("corrupt", what)


_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = frozenset({
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
})  # fmt: skip


def _run(text: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def pop_mark() -> list[Any]:
        position = len(stack) - 1
        while stack[position] is not _MARK:  # an IndexError where there is none
            position -= 1
        items = stack[position + 1 :]
        del stack[position:]
        return items

    argument: Any
    for opcode, argument, _ in pickletools.genops(text):
        name = opcode.name
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "TUPLE":
            stack.append(tuple(pop_mark()))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "GLOBAL":
            stack.append(_named(argument.replace(" ", ".", 1)))
        elif name == "STACK_GLOBAL":
            module, attribute = stack[-2:]
            stack[-2:] = [_named(f"{_text(module)}.{_text(attribute)}")]
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif name == "REDUCE":
            arguments = stack.pop()
            stack.append(_rebuild(stack.pop(), arguments))
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            _set_items(stack[-1], [key, value])
        elif name == "SETITEMS":
            items = pop_mark()
            _set_items(stack[-1], items)
        elif name == "APPEND":
            item = stack.pop()
            _list(stack[-1]).append(item)
        elif name == "APPENDS":
            items = pop_mark()
            _list(stack[-1]).extend(items)
        elif name == "BUILD":
            # The attributes of an OrderedDict, where torch keeps the versions of a model's modules.
            stack.pop()
            if not isinstance(stack[-1], dict):
                raise UnsafePickleError("it sets the state of an object that is no dictionary")
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise UnsafePickleError(f"it uses the pickle instruction {name}, which no dictionary of tensors needs")
    raise ValueError("no end")


def _named(name: str) -> _Name:
    if name in _OTHER_STORAGES:
        raise FileError(
            "unsupported_dtype",
            f"a tensor is kept in a {name}; only float32, float16 and bfloat16 are read",
        )
    if name not in (_ORDERED_DICT, _REBUILD_TENSOR, _REBUILD_PARAMETER) and name not in _DTYPES:
        raise UnsafePickleError(f"it asks for {shown(name)}, which is no part of a dictionary of tensors")
    return _Name(name)


def _set_items(target: Any, items: list[Any]) -> None:
    keys, values = items[::2], items[1::2]
    # Other keys could take for ever to hash.
    if not isinstance(target, dict) or not all(isinstance(key, str | int) for key in keys):
        raise UnsafePickleError("it fills something that is no dictionary from names or numbers")
    target.update(zip(keys, values, strict=True))


def _list(target: Any) -> list[Any]:
    if not isinstance(target, list):
        raise UnsafePickleError("it appends to something that is no list")
    return target


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a name must be a text")
    return value


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_INTEGER


def _storage(value: Any) -> Storage:
    match value:
        case ("storage", _Name(name), str(key), str(), size) if name in _DTYPES and _is_size(size):
            return Storage(_DTYPES[name], key, size)
    raise _corrupt("it refers to something that is no storage of a tensor")


def _rebuild(function: Any, arguments: Any) -> Any:
    """What torch's own functions would return; none is called."""
    if not isinstance(function, _Name) or not isinstance(arguments, tuple):
        raise UnsafePickleError("it calls something that is no function of torch's")
    if function.name == _ORDERED_DICT and not arguments:
        return {}
    if function.name == _REBUILD_PARAMETER and len(arguments) == 3 and isinstance(arguments[0], View):
        return arguments[0]
    if function.name == _REBUILD_TENSOR and len(arguments) in (6, 7):
        return _checked_view(*arguments[:4], extra=list(arguments[6:]))
    raise UnsafePickleError(f"it calls {function.name} in a way that torch does not")


def _checked_view(storage: Any, offset: Any, shape: Any, strides: Any, extra: list[Any]) -> View:
    well_formed = (
        isinstance(storage, Storage) and _is_size(offset) and isinstance(shape, tuple) and isinstance(strides, tuple)
        and len(shape) == len(strides) <= _MAX_DIMENSIONS and all(map(_is_size, (*shape, *strides)))
    )  # fmt: skip
    if not well_formed or extra not in ([], [None]):
        raise _corrupt("a tensor is described in a way that torch does not use")
    count = math.prod(shape)
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    # A view may not repeat its storage either: a small file could ask for any amount of memory.
    if count and (last >= storage.size or count > storage.size):
        raise _corrupt(f"a tensor of shape {shape} reaches beyond its storage of {storage.size} numbers")
    return View(storage, offset, shape, strides)
