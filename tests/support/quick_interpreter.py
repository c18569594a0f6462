"""Triton's interpreter with less to do, two thirds of whose time go where no result depends on it, and under any numpy.

Call `use` where TRITON_INTERPRET=1, before a kernel runs. What is computed stays the same, but for the order in which a
dot product is summed: as on a GPU, it does not depend on where in its tile a row is. That of numpy's BLAS does on some
machines (OpenBLAS with AVX2), so that tests which compare bits would fail there.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_SHAPES: dict[tuple[int, ...], tuple[Any, Any]] = {}
_BLOCKS: dict[tuple[int, ...], tuple[Any, int]] = {}
_DTYPES: dict[str, Any] = {}
_BUILTINS: dict[Any, list[tuple[str, Any]]] = {}
_patched: set[ModuleType] = set()  # by the launch that runs
_patch_lang, _get_np_dtype = interpreter._patch_lang, interpreter._get_np_dtype
_patch_tensor_any = interpreter._patch_lang_tensor
_init_block, _broadcast_any = tl.core.block_type.__init__, TritonSemantic.broadcast_impl_value


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    """Tensors of one shape share what says so."""
    shape = tuple(type.shape) if type.is_block() else ()
    if shape not in _SHAPES:
        made = tl.core.tuple([tl.constexpr(size) for size in shape])
        _SHAPES[shape] = tl.constexpr(math.prod(shape)), made
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _SHAPES[shape]


def _quick_block(self: Any, element_ty: Any, shape: Any) -> None:
    """A shape is checked once."""
    key = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    if key not in _BLOCKS:
        _init_block(self, element_ty, shape)
        _BLOCKS[key] = self.shape, self.numel
    self.element_ty, (self.shape, self.numel) = element_ty, _BLOCKS[key]
    self.name = f"<{key}, {element_ty}>"


def _np_dtype(dtype: Any) -> Any:
    """Looked up once for each type, without a table that is made anew each time."""
    element = dtype.element_ty if isinstance(dtype, tl.core.block_type) else dtype
    if element.name not in _DTYPES:
        _DTYPES[element.name] = _get_np_dtype(element)
    return _DTYPES[element.name]


def _broadcast(self: Any, left: Any, right: Any) -> Any:
    """Blocks of one shape are what they are."""
    if left.type.is_block() and right.type.is_block() and left.type.shape.values == right.type.shape.values:
        return left, right
    return _broadcast_any(self, left, right)


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Members are looked for once, not at each launch."""
    if package not in _BUILTINS:
        _BUILTINS[package] = [each for each in inspect.getmembers(package) if tl.core.is_builtin(each[1])]
    for name, member in _BUILTINS[package]:
        interpreter._patch_attr(package, name, member, builder, scope)


def _patch_once(function: Any) -> Any:
    """A launch patches Triton's language once, and not again for each function that the kernel calls."""
    wanted = {each for each in (tl, tl.core) if any(each is value for value in function.__globals__.values())}
    if wanted and wanted <= _patched:
        return interpreter._LangPatchScope()
    scope = _patch_lang(function)
    _patched.update(wanted)
    restore = scope.restore

    def restored() -> None:
        _patched.clear()
        restore()

    scope.restore = restored
    return scope


def _patch_tensor(tensor: Any, scope: Any) -> None:
    """Scalars are arrays of one element, of which numpy makes no number from 2.4 on unless it is asked for the item."""
    _patch_tensor_any(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _matmul(left: NDArray[Any], right: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """Compute numpy's matmul without BLAS, summed in float64.

    Sequential sums in float32 would be less exact than those of BLAS.
    """
    both = (each.astype(np.float64) for each in (left, right))
    sums: NDArray[Any] = np.einsum("...mk,...kn->...mn", *both, optimize=False)
    return sums.astype(dtype)


def _without_blas() -> ModuleType:
    """Return numpy for the interpreter alone, with `_matmul`."""
    module = ModuleType(np.__name__)
    vars(module).update(vars(np), matmul=_matmul)
    return module


@functools.cache
def use() -> None:
    """Replace the interpreter's functions, from now on, in this process."""
    builder = interpreter.interpreter_builder
    # An overflow of integers is looked for in every sum and product, and nothing said of it but in debug.
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._get_np_dtype = _np_dtype
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang, interpreter._patch_lang_tensor = _patch_once, _patch_tensor
    TritonSemantic.broadcast_impl_value = _broadcast
    interpreter.np = _without_blas()
    tl.core.tensor.__init__, tl.core.block_type.__init__ = _init_tensor, _quick_block
