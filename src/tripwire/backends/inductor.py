"""Inductor, through AOTAutograd. Imported when it is first used: its own imports take seconds.

What a graph for inference repeats is compiled once, see blocks.py. This isn't done if a backward
pass may follow, see docs/design/0009.

The compiled code is kept in tripwire's store as a whole, so that a warm start neither traces the
graph again nor asks torch's caches. For that, a backward pass is compiled along with its forward
one.

torch builds libraries, and loads what it finds under their names in a folder under /tmp that anyone
may have made. With a store, they are built and found in the store. Without one, they are in torch's
folder if nobody else may have written there, and otherwise in one that is removed at the end.
"""

from __future__ import annotations

import atexit
import builtins
import copy
import functools
import hashlib
import importlib
import logging
import math
import operator
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch._functorch.config
import torch._inductor.config
from torch import fx
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._guards import TracingContext
from torch._inductor import codecache, cpu_vec_isa, list_mode_options
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tripwire.backends.artifacts import VERSION, Artifact, Store, find_store, tell_unused
from tripwire.backends.backwards import trains
from tripwire.backends.blocks import fold_blocks
from tripwire.backends.handover import (
    OPEN,
    STAYS,
    handing_over,
    hiding_module_hooks,
    in_rounds,
    leaving_generators,
    mark_staying,
    tell_apart,
)
from tripwire.backends.packing import CAN_PACK, can_pack, pack, unpack
from tripwire.errors import BadOption, BadStore, raise_interruption
from tripwire.files import check_ours, check_ours_below, make_folder
from tripwire.imports import importing, uncounted_registrations
from tripwire.reading.tensors import storage_of
from tripwire.reading.torchstate import describe_backends, sample_torch_state
from tripwire.telemetry.compiles import CACHE_GET, CACHE_PUT, add_figures, note_figures
from tripwire.tracing.open.opening import NUMBER, OPEN_INPUT, NumberInput, OpenTensor
from tripwire.tracing.open.symbols import expression_of
from tripwire.tracing.state import STATE
from tripwire.values.classes import isinstance

Runtime = Callable[..., Any]
_EARLY = "force_non_lazy_backward_lowering"  # AOTAutograd's option: the backward isn't put off
_HAS_EARLY = hasattr(torch._functorch.config, _EARLY)
_CACHEABLE = "unsafe_marked_cacheable_functions"  # Inductor's option, by name: a key
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


def import_compiler() -> Any:
    """What compiles; code that is in the store runs without it. 0.7 s, of 1.7 for all of it."""
    with importing():
        return importlib.import_module("torch._inductor.compile_fx")


def compile_graph(
    module: fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    mode: str | None,
    options: Mapping[str, Any] | None,
    on_failed_backward: Callable[[Exception], None] | None = None,
    around_backward: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Runtime:
    """Compiled code for a graph, from the store or made now."""
    patches = find_patches(mode, options)
    with torch._inductor.config.patch(patches), uncounted_registrations():
        is_training = trains(module.graph)
        store = _settle_kernels(find_store())
        is_open = OPEN in module.meta
        has_graphs = torch._inductor.config.triton.cudagraphs
        stay = mark_staying(module.graph, example_inputs) if has_graphs else []
        can_keep = CAN_PACK and not is_open and (_HAS_EARLY or not is_training)
        store = store if can_keep else None
        key = None if store is None else find_key(module, example_inputs, patches)
        runtime = None
        if store is not None and key is not None:
            with CACHE_GET:
                runtime = _load(store, key)
        if runtime is None:
            folds = not (
                is_training or is_open or torch._inductor.config.cpp_wrapper
            )  # which can't call blocks
            compiler = functools.partial(
                _compile_inner,
                open_env=module.meta[OPEN].symbols.env if is_open else None,
                on_failed_backward=on_failed_backward,
                around_backward=around_backward,
            )
            compile_for = functools.partial(_compile, module, example_inputs, patches)
            try:
                runtime = compile_for(store, key, compiler, folds=folds)
            except Exception as error:  # perhaps the backward's: it may never be needed
                raise_interruption(error)
                if key is None or not is_training:
                    raise
                _log.info("Compiled anew, with the backward put off and nothing kept: %s", error)
                runtime = compile_for(None, None, compiler, folds=folds)
    if has_graphs:
        runtime = in_rounds(runtime, stay, module.forward)
    return tell_apart(module.graph, runtime)


def _compile(
    module: fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    patches: Mapping[str, Any],
    store: Store | None,
    key: str | None,
    compiler: Runtime,
    *,
    folds: bool,
) -> Runtime:
    compile_fx = import_compiler().compile_fx
    if all(tensor.device.type == "cpu" for tensor in example_inputs):
        _try_best_isa()
    whole = {} if key is None else {"bundled_autograd_cache": True}
    # What a backward assumes of open sizes is among the conditions if it is compiled by then.
    is_early = key is not None or (OPEN in module.meta and _HAS_EARLY)
    if is_early and trains(module.graph):
        whole[_EARLY] = True
        compiler = functools.partial(compiler, on_failed_backward=None)
    handed = handing_over(module, example_inputs, shape_env=ShapeEnv())
    began = time.perf_counter_ns()
    with (
        torch._functorch.config.patch(whole),
        torch._inductor.config.patch(_find_cacheable()),
        _using_caches(module),
        handed as (copied, examples),
    ):
        is_folded = folds and fold_blocks(copied, example_inputs)
        try:
            compiled = cast(
                "Runtime",
                compile_fx(
                    copied,
                    examples,
                    inner_compile=compiler,
                    config_patches=dict(patches) or None,  # the backward pass is compiled later
                    ignore_shape_env=OPEN not in module.meta,
                ),
            )
        except Exception as error:  # whatever it is, it may not be the user's
            raise_interruption(error)
            if not is_folded:
                raise
            _log.warning(
                "Equal layers could not be compiled once for all, so the graph is "
                "compiled as a whole: %s",
                error,
            )
            return _compile(module, example_inputs, patches, store, key, compiler, folds=False)
        if store is not None and key is not None and can_pack(compiled):
            with CACHE_PUT:
                _keep(store, key, compiled, (time.perf_counter_ns() - began) // 1000)
    return compiled


def _find_cacheable() -> dict[str, Any]:
    """Let AOTAutograd keep graphs that enter autocast: with which options is in the graph's text.

    It keeps none by itself: these functions are private ones of torch's.
    """
    known = getattr(torch._inductor.config, _CACHEABLE, None)
    names = [f"torch.amp.autocast_mode.{name}" for name in ("_enter_autocast", "_exit_autocast")]
    return {} if known is None else {_CACHEABLE: known | dict.fromkeys(names, "tripwire")}


@contextmanager
def _using_caches(module: fx.GraphModule) -> Iterator[None]:
    """Inside, torch's caches aren't asked for a graph with open sizes that they would mistake.

    They keep what code assumes of numbers that are inputs of its graph, and of no others. So code
    for one size would be found again for another. A backward often has none of them as an input.
    """
    if OPEN not in module.meta or (not trains(module.graph) and _passes_sizes(module.graph)):
        yield
        return
    with (
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
    ):
        yield


def _passes_sizes(graph: fx.Graph) -> bool:
    """Whether each open size of the inputs is an input itself."""
    passed: set[Any] = set()
    needed: set[Any] = set()
    for node in graph.find_nodes(op="placeholder"):
        number: NumberInput | None = node.meta.get(NUMBER)
        opened: OpenTensor | None = node.meta.get(OPEN_INPUT)
        if number is not None:
            passed.add(expression_of(number.symbol))
        elif opened is not None:
            sizes = map(expression_of, (*opened.fake.size(), *opened.fake.stride()))
            needed.update(*(size.free_symbols for size in sizes if not isinstance(size, int)))
    return needed <= passed


def _compile_inner(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    open_env: ShapeEnv | None,
    on_failed_backward: Callable[[Exception], None] | None,
    around_backward: Callable[[], AbstractContextManager[None]],
    is_backward: bool = False,
    **settings: Any,
) -> Any:
    """What Inductor makes of a graph of AOTAutograd's.

    A backward that isn't kept is compiled when it is first run. By then a disk may be full, or a
    folder gone, and plain autograd would run.
    """
    compile_fx_inner = import_compiler().compile_fx_inner
    if not is_backward:
        compiled = compile_fx_inner(module, inputs, **settings)
        if open_env is not None:
            _report_open_strides(compiled, open_env)
        return compiled
    _settle_kernels(find_store())
    kept = fx.GraphModule(module, copy.deepcopy(module.graph))  # Inductor changes what it is given
    try:
        convolutions = nullcontext() if open_env is None else _convolving_as_it_is()
        with around_backward(), leaving_generators(), hiding_module_hooks(), convolutions:
            return compile_fx_inner(module, inputs, is_backward=True, **settings)
    except Exception as error:  # whatever it is, it isn't the user's
        raise_interruption(error)
        if on_failed_backward is None:
            raise
        on_failed_backward(error)
        return make_boxed_func(kept.forward)


@contextmanager
def _convolving_as_it_is() -> Iterator[None]:
    """Inside, Inductor takes the backward of a convolution for a call of torch's.

    It does so anyway, unless it tunes kernels. But first it looks for an order of strides, and for
    that fixes heights, widths and lengths (torch 2.13, `convolution_backward_lowering`).
    """
    config: Any = torch._inductor.config
    known = importlib.import_module("torch._inductor.lowering").lowerings
    convolutions = importlib.import_module("torch._inductor.kernel.conv")
    plain = getattr(convolutions, "aten_convolution_backward_fallback", None)
    backward = torch.ops.aten.convolution_backward.default
    if plain is None or config.max_autotune or config.max_autotune_gemm:
        yield
        return
    before = known[backward]
    known[backward] = plain
    try:
        yield
    finally:
        known[backward] = before


def _report_open_strides(compiled: Any, env: ShapeEnv) -> None:
    """Tell AOTAutograd the strides of results by symbols.

    Inductor reports those of this run. Where they aren't the graph's own (convolutions have their
    channels last), the backward would be compiled for them, whatever the size is on another call.
    """
    context = TracingContext.try_get()
    if context is None or not context.output_strides:
        return
    read: Any = env.deserialize_symexpr
    context.output_strides[:] = [
        None if strides is None else tuple(map(read, strides))
        for strides in compiled.output_strides
    ]


def _keep(store: Store, key: str, compiled: Runtime, took_us: int) -> None:
    try:
        payload = pack(compiled)
    except Exception as error:  # pickle's, or any of those that it calls
        raise_interruption(error)
        _log.info("Compiled code isn't kept, since it can't be pickled: %s", error)
        return
    store.write(key, Artifact(payload, {"best_isa": _has_best_isa(), "took_us": took_us}))


def _load(store: Store, key: str) -> Runtime | None:
    note_figures(cache_backend_type="tripwire", cache_version=VERSION)
    artifact = store.read(key)
    if artifact is None:
        note_figures(cache_miss_keys=key)
        add_figures(local_cache_miss_count=1)
        return None
    if artifact.facts.get("best_isa") and _can_skip_trials():
        _skip_trials()  # it passed on this machine before, with the same versions
    try:
        runtime = unpack(artifact.payload)
    except Exception as error:
        raise_interruption(error)
        store.distrust(key, error)
        note_figures(cache_miss_keys=key)
        add_figures(local_cache_miss_count=1)
        return None
    note_figures(cache_hit_keys=key)
    add_figures(local_cache_hit_count=1, cache_saved_time_us=artifact.facts.get("took_us", 0))
    return runtime


# --- where torch builds, and finds what it built -----------------------------------------------

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # torch sets it, too, once it has chosen its own
_KERNELS = "TRITON_CACHE_DIR"
_settled: set[str] = set()  # folders that were chosen here, and not by the user


def _settle_kernels(store: Store | None) -> Store | None:
    """Have torch build and look for libraries where nobody else can put any; then the store.

    A folder that the user names stays, if it is the user's. The choice holds for the process: a
    backward pass is compiled when it is first run, and workers are told by the environment.
    """
    before = os.environ.get(_FOLDER)
    default = os.path.abspath(default_cache_dir())
    own = None
    if store is not None:
        try:
            own = str(store.make_kernel_folder().absolute())  # a program may go elsewhere
        except (OSError, BadStore) as error:
            store.tell_unkept(error)
            store = None
        else:
            if not os.access(own, os.W_OK):  # it can be read all the same
                store.tell_unkept(OSError("it is not writable"))
                own = None
            elif any(map(str.isspace, own)):  # torch splits its commands there
                own = None
    is_named = before not in (None, default, *_settled)
    folder = _find_safe(_FOLDER, (before if is_named else own) or default, own)
    if folder != before:
        _settled.add(folder)
        os.environ[_FOLDER] = folder
        if before is not None and os.environ.get(_KERNELS, "").startswith(before + os.sep):
            del os.environ[_KERNELS]  # torch set it, and sets it again
    named = os.environ.get(_KERNELS, folder + os.sep)
    if not named.startswith(folder + os.sep) and _find_safe(_KERNELS, named, folder) != named:
        del os.environ[_KERNELS]
    _settle_headers(folder)
    return store


def _find_safe(variable: str, folder: str, other: str | None) -> str:
    """A folder, if nobody else may have written in it; else the other, or one for this process."""
    if folder == other:
        return folder
    why = _find_trouble(os.path.abspath(folder))
    if why is None:
        return folder
    instead = other or _find_temporary()
    tell_unused(variable, folder, why, instead)
    return instead


_temporary: list[str] = []  # the last is in use


def _find_temporary() -> str:
    """A folder for this process and its children, which goes when it ends.

    It may go before, since programs clean up /tmp; then anyone could make it anew.
    """
    if not _temporary or _find_trouble(_temporary[-1], make=False) is not None:
        folder, owner = tempfile.mkdtemp(prefix="tripwire-kernels-"), os.getpid()
        atexit.register(
            lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None
        )
        _temporary.append(folder)
    return _temporary[-1]


def _find_trouble(folder: str, make: bool = True) -> OSError | None:
    """Why a folder can't be used, if so: others may have put something into it, for one."""
    try:
        if make:
            make_folder(folder)
        check_ours(folder)
        _check_once(folder)
    except OSError as error:
        return error
    return None


@functools.cache
def _check_once(folder: str) -> None:
    """Look at all that is in a folder: what a process finds to be its own stays so."""
    check_ours_below(folder)


def _settle_headers(folder: str) -> None:
    """Headers that torch compiled before go into each library; they too lie under /tmp."""
    if hasattr(codecache, "_HEADER_DIR") and _find_trouble(codecache._HEADER_DIR):
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


# --- keys ---
#
# Everything that compiled code depends on, as one digest. A graph that can't be described whole has
# no key, and isn't kept.

_PLAIN = (bool, int, float, str, type(None))
# Of what becomes of a graph before it is compiled. Raised with every change to that: code that an
# earlier version compiled is then no more found.
_REVISION = 3


def find_key(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor | None], patches: Mapping[str, Any]
) -> str | None:
    """The digest of a graph, its inputs, the options and everything around them."""
    if any(node.op in ("get_attr", "call_module") for node in module.graph.nodes):
        return None  # constants: their values may be in the code
    called = [node.target for node in module.graph.nodes if node.op == "call_function"]
    if not all(map(_is_known, called)):
        return None
    if not all(type(value) in _PLAIN for value in patches.values()):
        return None
    if not all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in inputs):
        return None
    described = (
        _REVISION,
        module.code,
        _describe_inputs(module, [tensor for tensor in inputs if tensor is not None]),
        sorted(patches.items()),
        _describe_surroundings(inputs),
    )
    return hashlib.sha256(repr(described).encode()).hexdigest()


def _is_known(target: Any) -> bool:
    """Whether a function is torch's or Python's own, and its name in the text says which."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target).startswith(("aten", "prims"))  # others may be defined otherwise
    home = getattr(target, "__module__", None) or ""
    if home in ("_operator", "builtins", "math"):
        return any(
            getattr(owner, target.__name__, None) is target for owner in (operator, builtins, math)
        )
    found: Any = sys.modules.get(home) if home.split(".")[0] == "torch" else None
    for part in getattr(target, "__qualname__", "<locals>").split("."):
        found = getattr(found, part, None)
    return found is target or getattr(torch, getattr(target, "__name__", ""), None) is target


def _describe_inputs(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[object]:
    memory: dict[int, int] = {}
    return [
        (
            tuple(tensor.shape),
            tensor.stride() if tensor.layout is torch.strided else None,
            tensor.storage_offset() if tensor.layout is torch.strided else None,
            tensor.data_ptr() % 16 if tensor.layout is torch.strided else None,
            tensor.dtype,
            tensor.device,
            tensor.layout,
            tensor.requires_grad,
            tensor.is_leaf,
            tensor.is_inference(),
            tensor.is_conj(),
            tensor.is_neg(),
            tensor._is_view(),
            memory.setdefault(storage_of(tensor), len(memory)),  # which share it
            bool(node.meta.get(STATE)),
            bool(node.meta.get(STAYS)),
        )
        for tensor, node in zip(inputs, module.graph.find_nodes(op="placeholder"), strict=True)
    ]


def _describe_surroundings(inputs: Sequence[torch.Tensor | None]) -> list[object]:
    devices = {tensor.device for tensor in inputs if tensor is not None and tensor.is_cuda}
    return [
        torch.__version__,
        torch.version.git_version,
        torch.version.cuda,
        torch.version.hip,
        sys.version,
        platform.system(),
        platform.release(),
        platform.machine(),
        platform.libc_ver(),
        torch.backends.cpu.get_cpu_capability(),
        [str(isa) for isa in _find_offered()],  # libraries are built for all that there is
        sorted(str(torch.cuda.get_device_properties(device)) for device in devices),
        sample_torch_state(),
        describe_backends(),
        torch._inductor.config.save_config_portable(),
        torch._functorch.config.save_config_portable(),
    ]
