"""Packing: what Inductor compiled for a CPU is kept so that running it needs no compiler.

torch keeps compiled code in a form that imports all of Inductor to load it, and asks g++ for its
version and for a preprocessed header: 0.8 of the 1.2 s of processor time that a warm start with 12
layers took (bench_start.py). None of it is needed to run the code. The names that the code imports
from the compiler exist elsewhere, too; its libraries are found by their names; and a class of
tripwire's calls it.

Some code may need the compiler: code for a GPU, or code that calls an operator which the compiler's
modules define. Such code is kept as torch keeps it.
"""

from __future__ import annotations

import copy
import importlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch._functorch._aot_autograd import aot_autograd_result
from torch._inductor import codecache
from torch._inductor.output_code import CompiledFxGraph, OutputCode

from tripwire.imports import importing
from tripwire.values.classes import isinstance

try:
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Bundle
except ImportError:  # torch can't write compiled code as a whole yet
    Bundle = None  # type: ignore[assignment, misc]

CAN_PACK = Bundle is not None
_TAKES_ANY_CODE = hasattr(aot_autograd_result, "BundledOutputCodeLoadable")  # not CompiledFxGraph
_HEAD_ENDS = "async_compile = AsyncCompile()"
_LIGHT = {
    "from torch._inductor.codegen.memory_planning import _align as align\n": (
        "from torch._inductor.utils import _align as align\n"
    ),
    "from torch._inductor.select_algorithm import extern_kernels\n": (
        "from torch._C import _VariableFunctions as extern_kernels; "
        "from tripwire.backends.packing import find_kernel\n"
    ),
}
_BUILDS = re.compile(r"^(\w+) = (?=async_compile\.cpp_pybinding\()", re.MULTILINE)
# Operators beside torch's oldest: modules of the compiler define some in Python.
_OTHER_OPERATORS = re.compile(r"\b(inductor_ops|_quantized)\b|\btorch\.ops\b(?!\.(aten|mkldnn)\b)")


def can_pack(compiled: object) -> bool:
    """Whether torch can write this code."""
    return CAN_PACK and getattr(compiled, "serialize", None) is not None


def pack(compiled: Any) -> bytes:
    """Compiled code as bytes. Raises whatever pickle does, and those that it calls."""
    packed = SimpleNamespace(serialize=lambda: _lighten(compiled.serialize()))
    return Bundle.serialize_compile_artifacts(Bundle(packed))


def unpack(payload: bytes) -> Callable[..., Any]:
    """The code again. Raises anything where it can't be had."""
    with importing():  # what it brings imports parts of Inductor
        return cast("Callable[..., Any]", Bundle.deserialize_compile_artifacts(payload))


@dataclass
class LightCode(OutputCode):
    """Compiled code for a CPU, without what only Inductor's own caches and GPUs need."""

    code: CompiledFxGraph
    _boxed_call: bool = True

    def post_compile(
        self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any
    ) -> None:
        """Load it."""
        self.code.after_deserialization(constants)
        self.code.post_compile(example_inputs, constants, graph_kwargs)

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Run it."""
        return self.code.current_callable(inputs)  # type: ignore[misc]  # it is loaded


def find_kernel(name: str) -> Callable[..., Any] | None:
    """What torch built under this name; None if it has to be built again."""
    key, _, extension = name.partition(".")
    path = codecache.get_path(key, extension)[2]
    if not os.path.exists(path):
        return None
    try:
        library: Any = codecache.CppPythonBindingsCodeCache._load_library(path, key)
    except ImportError:  # a full disk, say, left half of it; torch would load it, too
        os.unlink(path)
        return None
    return cast("Callable[..., Any]", library.kernel)


# --- before it is packed ---


def _lighten(entry: Any) -> Any:
    parts = {name: getattr(entry, name) for name in ("compiled_fw", "compiled_bw")}
    light = {
        name: replace(part, result=_lighten_code(part.result))
        for name, part in parts.items()
        if part is not None and type(part.result) is CompiledFxGraph
    }
    return replace(entry, **light) if _TAKES_ANY_CODE else entry


def _lighten_code(code: CompiledFxGraph) -> OutputCode:
    head, end, body = code.source_code.partition(_HEAD_ENDS)
    kernels = _find_kernels(code, body)
    if (
        set(code.device_types) != {"cpu"}
        or not end
        or not all(line in head for line in _LIGHT)
        or _OTHER_OPERATORS.search(body)
        or not _calls_plain_kernels(body)
        or kernels is None
    ):
        return code
    for line, instead in _LIGHT.items():
        head = head.replace(line, instead)
    body = _BUILDS.sub(lambda m: f"{m[0]}find_kernel({kernels[m[1]]!r}) or ", body)
    light = copy.copy(code)  # the other one runs
    light.source_code = head + end + body
    light.cache_key, _ = codecache.PyCodeCache.write(light.source_code)
    light.fx_kwargs = {**code.fx_kwargs, "get_decomp_fn": None}  # type: ignore[typeddict-item]
    return LightCode(light)


def _find_kernels(code: CompiledFxGraph, body: str) -> dict[str, str] | None:
    """The names of the libraries behind the functions that code builds; None if not of all."""
    loaded = [one for one in codecache.PyCodeCache.modules if one.key == code.cache_key]
    functions = vars(loaded[-1]) if loaded else {}
    found = {}
    for name in _BUILDS.findall(body):
        library = getattr(functions.get(name), "__self__", None)
        if not isinstance(library, ModuleType) or library.__file__ is None:
            return None
        found[name] = Path(library.__file__).name
    return found


def _calls_plain_kernels(body: str) -> bool:
    """Whether the kernels that code calls by name are torch's own functions of that name."""
    kernels = importlib.import_module("torch._inductor.select_algorithm").extern_kernels
    plain = torch._C._VariableFunctions
    names = re.findall(r"\bextern_kernels\b\.?(\w*)", body)
    return all(
        name and getattr(kernels, name, None) is getattr(plain, name, kernels) for name in names
    )
