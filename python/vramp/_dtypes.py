"""Element types of arrays, without NumPy unless the program has imported it."""

from __future__ import annotations

import sys

# Name: (letter of NumPy's type strings, code of DLPack, bits).
_TYPES = {
    "bool": ("b", 6, 8),
    "int8": ("i", 0, 8),
    "int16": ("i", 0, 16),
    "int32": ("i", 0, 32),
    "int64": ("i", 0, 64),
    "uint8": ("u", 1, 8),
    "uint16": ("u", 1, 16),
    "uint32": ("u", 1, 32),
    "uint64": ("u", 1, 64),
    "float16": ("f", 2, 16),
    "float32": ("f", 2, 32),
    "float64": ("f", 2, 64),
    "complex64": ("c", 5, 64),
    "complex128": ("c", 5, 128),
    # NumPy has no type string for it. DLPack does.
    "bfloat16": ("", 4, 16),
}

_PYTHON = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}


def _code(name: str) -> str:
    letter, _, bits = _TYPES[name]
    if not letter:
        return ""
    return f"{'|' if bits == 8 else '<'}{letter}{bits // 8}"


_BY_CODE = {_code(name).lstrip("<|"): name for name in _TYPES if _code(name)}


def _name(dtype: object) -> str | None:
    if dtype is None:
        return "uint8"
    if isinstance(dtype, type) and dtype in _PYTHON:
        return _PYTHON[dtype]
    if isinstance(dtype, str):
        if dtype in _TYPES:
            return dtype
        return None if dtype.startswith(">") else _BY_CODE.get(dtype.lstrip("<|="))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        try:
            dtype = numpy.dtype(dtype)
        except TypeError:
            pass
    # A dtype of NumPy or CuPy has a type string, and one of PyTorch a name after a dot.
    code = getattr(dtype, "str", None)
    if isinstance(code, str):
        return _name(code)
    last = str(dtype).rpartition(".")[2]
    return last if last in _TYPES else None


def parse(dtype: object) -> tuple[str, str, int, int]:
    """Returns name, NumPy's type string, DLPack's code and bits. Raises TypeError."""
    name = _name(dtype)
    if name is None:
        raise TypeError(f"{dtype!r} is no element type of an array: use one of {', '.join(_TYPES)}")
    _, kind, bits = _TYPES[name]
    return name, _code(name), kind, bits
