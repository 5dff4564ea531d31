"""Inductor, through AOTAutograd. Imported when it is first used: its own imports take seconds.

What repeats in a graph for inference is compiled once, see blocks.py. Where a backward pass may
come it isn't, see docs/design/0009.

What it compiles for inference is kept in tripwire's store, whole, so that a warm start neither
traces the graph again nor asks torch's caches. They serve where there is a backward pass, which
is compiled when it is first run.

torch builds libraries, and runs what it finds under their names in a folder under /tmp that anyone
may have made. With a store, they are built and found in the store.
"""

from __future__ import annotations

import functools
import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch._functorch.config
import torch._inductor.config
from torch import fx
from torch._inductor import codecache, cpu_vec_isa, list_mode_options
from torch._inductor.compile_fx import compile_fx
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tripwire.backends.artifacts import Artifact, Store, find_store
from tripwire.backends.blocks import fold_blocks
from tripwire.backends.handover import OPEN, handing_over
from tripwire.backends.keys import find_key
from tripwire.backends.rounds import in_rounds
from tripwire.errors import BadOption, BadStore
from tripwire.files import check_ours, check_ours_below, make_folder

try:
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Bundle
except ImportError:  # torch can't write compiled code as a whole yet
    Bundle = None  # type: ignore[assignment, misc]

Runtime = Callable[..., Any]
_log = logging.getLogger("tripwire.backends")


def find_patches(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a mode and options change of Inductor's configuration."""
    patches = dict(options or {}) if mode is None else list_mode_options(mode)
    unknown = sorted(set(patches) - set(torch._inductor.config.get_config_copy()))
    if unknown:
        raise BadOption(
            f"Inductor has no option {unknown[0]!r}; torch._inductor.list_options() lists them.",
            slug="bad-option",
        )
    return patches


def compile_graph(
    module: fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    mode: str | None,
    options: Mapping[str, Any] | None,
) -> Runtime:
    """Compiled code for a graph, from the store or made now."""
    patches = find_patches(mode, options)
    with torch._inductor.config.patch(patches):
        trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in example_inputs)
        store = _settle_kernels(find_store())
        is_open = OPEN in module.meta
        store = None if Bundle is None or trains or is_open else store
        key = None if store is None else find_key(module, example_inputs, patches)
        runtime = None
        if store is not None and key is not None:
            runtime = _load(store, key)
        if runtime is None:
            folds = not (
                trains or is_open or torch._inductor.config.cpp_wrapper
            )  # which can't call blocks
            runtime = _compile(module, example_inputs, patches, store, key, folds=folds)
        has_graphs = torch._inductor.config.triton.cudagraphs
    return in_rounds(runtime) if has_graphs else runtime


def _compile(
    module: fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    patches: Mapping[str, Any],
    store: Store | None,
    key: str | None,
    *,
    folds: bool,
) -> Runtime:
    if all(tensor.device.type == "cpu" for tensor in example_inputs):
        _try_best_isa()
    whole = {} if key is None else {"bundled_autograd_cache": True}
    handed = handing_over(module, example_inputs, shape_env=ShapeEnv())
    with torch._functorch.config.patch(whole), handed as (copied, examples):
        is_folded = folds and fold_blocks(copied, example_inputs)
        try:
            compiled = cast(
                "Runtime",
                compile_fx(
                    copied,
                    examples,
                    config_patches=dict(patches) or None,  # the backward pass is compiled later
                    ignore_shape_env=OPEN not in module.meta,
                ),
            )
        except Exception as error:  # whatever it is, it may not be the user's
            if not is_folded:
                raise
            _log.warning(
                "Equal layers could not be compiled once for all, so the graph is "
                "compiled as a whole: %s",
                error,
            )
            return _compile(module, example_inputs, patches, store, key, folds=False)
        if store is not None and key is not None and getattr(compiled, "serialize", None):
            _keep(store, key, compiled)
    return compiled


def _keep(store: Store, key: str, compiled: Runtime) -> None:
    try:
        payload = Bundle.serialize_compile_artifacts(Bundle(compiled))
    except Exception as error:  # pickle's, or any of those that it calls
        _log.info("Compiled code isn't kept, since it can't be pickled: %s", error)
        return
    store.write(key, Artifact(payload, {"best_isa": _has_best_isa()}))


def _load(store: Store, key: str) -> Runtime | None:
    artifact = store.read(key)
    if artifact is None:
        return None
    if artifact.facts.get("best_isa") and _can_skip_trials():
        _skip_trials()  # it passed on this machine before, with the same versions
    try:
        return cast("Runtime", Bundle.deserialize_compile_artifacts(artifact.payload))
    except Exception as error:
        store.distrust(key, error)
        return None


# --- where torch builds, and finds what it built -----------------------------------------------

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # torch sets it, too, once it has chosen its own
_KERNELS = "TRITON_CACHE_DIR"
_settled: set[str] = set()  # folders that were chosen here, and not by the user


def _settle_kernels(store: Store | None) -> Store | None:
    """Have torch build and look for libraries where nobody else can put any; then the store.

    A folder that the user names stays, if it is the user's. The choice holds for the process: a
    backward pass is compiled when it is first run, and workers are told by the environment.
    """
    if store is None:
        return None
    before = os.environ.get(_FOLDER)
    try:
        if before is None or before in _settled or before == os.path.abspath(default_cache_dir()):
            folder = str(store.make_kernel_folder())
        else:
            why = _find_strangers(os.path.abspath(before))
            if why:
                store.tell_shared(_FOLDER, before, why)
            folder = str(store.make_kernel_folder()) if why else before
    except (OSError, BadStore) as error:
        store.tell_unkept(error)
        return None
    if folder != before:
        _settled.add(folder)
        os.environ[_FOLDER] = folder
        if before is not None and os.environ.get(_KERNELS, "").startswith(before + os.sep):
            del os.environ[_KERNELS]  # torch set it, and sets it again
    _settle_triton(store, folder)
    _settle_headers(folder)
    return store


def _settle_triton(store: Store, folder: str) -> None:
    """A folder that the user names for Triton stays under the same condition."""
    named = os.environ.get(_KERNELS, folder + os.sep)
    if not named.startswith(folder + os.sep) and (why := _find_strangers(os.path.abspath(named))):
        store.tell_shared(_KERNELS, named, why)
        del os.environ[_KERNELS]


@functools.cache
def _find_strangers(folder: str) -> str:
    """Why others may have put something into a folder, if so; a process looks once."""
    try:
        make_folder(folder)
        check_ours(folder)
        check_ours_below(folder)
    except OSError as error:
        return str(error)
    return ""


def _settle_headers(folder: str) -> None:
    """Headers that torch compiled before go into each library; they too lie under /tmp."""
    if hasattr(codecache, "_HEADER_DIR") and _find_strangers(codecache._HEADER_DIR):
        codecache._HEADER_DIR = os.path.join(folder, "precompiled_headers")
        codecache._HEADER_LOCK_DIR = os.path.join(codecache._HEADER_DIR, "locks")
        codecache._precompile_header.cache_clear()


# --- vector instructions -----------------------------------------------------------------------
# Inductor builds and loads a library for each set that the processor offers, ten in all on some,
# a second each; then it takes the first set that passed.


def _find_offered() -> list[cpu_vec_isa.VecISA]:
    """The sets that this processor has, best first; empty where there is no choice."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    has = set(cpu_vec_isa.x86_isa_checker())
    return [isa for isa in cpu_vec_isa.supported_vec_isa_list if has.issuperset(str(isa).split())]


def _try_best_isa() -> None:
    """Have the best set tried, with those that it stands on, and no other if it passes.

    Whoever asks for narrower vectors later gets a set that was not tried.
    """
    if _can_skip_trials():
        offered = _find_offered()
        if offered and offered[0]:  # this is the trial
            _skip_trials()


def _can_skip_trials() -> bool:
    config = torch._inductor.config.cpp
    takes_first = config.simdlen is None and "ATEN_CPU_CAPABILITY" not in os.environ
    is_open = config.vec_isa_ok is None and not _TRIED.cache_info().currsize
    return takes_first and is_open


def _skip_trials() -> None:
    check_build = cpu_vec_isa.VecISA.check_build
    # Some sets build a library whatever the setting says.
    setattr(cpu_vec_isa.VecISA, "check_build", lambda isa, code: True)  # noqa: B010
    try:
        with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
            _TRIED()  # keeps its result
    finally:
        setattr(cpu_vec_isa.VecISA, "check_build", check_build)  # noqa: B010


def _has_best_isa() -> bool:
    """Whether the best set was tried in this process, and passed."""
    return bool(_TRIED.cache_info().currsize) and _TRIED()[:1] == _find_offered()[:1] != []


_TRIED = cpu_vec_isa.valid_vec_isa_list
