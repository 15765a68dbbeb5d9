"""Let Triton's interpreter skip work that does not change results, so that all cases can run."""

import functools
from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter


def accelerate() -> None:
    """Change the interpreter of this process, which must compile no kernel; kernels compute the same values.

    - Each addition of integers is computed a second time in int64 to detect overflows. Test layers are small.
    - Each launch, and each call of a device function, replaces the operations of `triton.language` by interpreted ones;
      here the first one does, and they stay replaced.
    - The NumPy type of a Triton type is looked up at each operation, in a dictionary that is built for it.
    """
    patch_language = interpreter._patch_lang
    patched: set[int] = set()
    address = interpreter.tl.uint64

    def patch_once(function: Callable[..., Any]) -> Any:
        if id(function.__globals__) not in patched:
            patched.add(id(function.__globals__))
            patch_language(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once
    numpy_type = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: numpy_type(address if dtype.scalar.is_ptr() else dtype.scalar)
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
