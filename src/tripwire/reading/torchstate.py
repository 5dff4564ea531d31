"""Torch's state, and Python's, that no dict holds: one table of flags.

Nothing reports writes to such state, so an entry checks it before each call. Twelve flags change
what most torch calls compute, or who sees them: they are always checked. Checking all others would
cost more than a hit. Each of the others has words (names that code must contain to read the flag)
or a home (modules whose classes and functions read it themselves). An entry checks only the flags
whose words are in the code that ran, or whose home that code can reach.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from msgspec import Struct
from torch.autograd import forward_ad

from tripwire.values.classes import isinstance
from tripwire.values.identity import is_library_class

Spelling = Callable[[object], str]  # the name that a guard function has for a value


class Flag(Struct, frozen=True):
    """One piece of state: how to read it, and which code depends on it."""

    name: str  # for people
    get: Callable[[], object]  # in the calling thread; None where it is off, or not loaded yet
    # A quicker question, where there is one for what was seen.
    shortcut: Callable[[object, Spelling], str | None] | None = None
    is_computed_with: bool = False  # it changes what torch's calls compute
    words: frozenset[str] = frozenset()
    home: str = ""  # all that this module and those below it compute may depend on it
    slug: str = "process-state"  # of the refusal, where a run leaves it changed
    is_libraries: bool = False  # imports change it, too: no effect of a run that doesn't name it
    # A record doesn't keep it, and tells where it isn't as usual, by what sets it.
    usual: Callable[[], object] | None = None
    set_by: str = ""

    def may_be_asked(self, names: Iterable[str], modules: Iterable[str]) -> bool:
        """Whether code that has these names and can reach these modules comes to it."""
        if not self.words.isdisjoint(names):
            return True
        within = f"{self.home}."
        return bool(self.home) and any(m == self.home or m.startswith(within) for m in modules)

    def spell(self, seen: object, constant: Spelling) -> str:
        """A condition that holds where it is as it was seen. May be empty."""
        short = None if self.shortcut is None else self.shortcut(seen, constant)
        return f"{constant(self.get)}() == {constant(seen)}" if short is None else short

    def is_unusual(self) -> bool:
        """Whether somebody set it, as far as that can be told."""
        now = None if self.usual is None else self.get()
        return self.usual is not None and now is not None and now != self.usual()

    def answer(self) -> Answer:
        """Ask now."""
        return Answer(self, self.get())


class Answer(Struct, frozen=True):
    """What was found before a run."""

    flag: Flag
    seen: object  # None where what is asked about wasn't loaded yet


def ask_all() -> tuple[Answer, ...]:
    """Every flag that isn't always asked, with its answer now."""
    return tuple(flag.answer() for flag in NAMED)


def sample_quickly() -> tuple[object, ...]:
    """The flags that are always asked, in their order."""
    return tuple(flag.get() for flag in ALWAYS)


def name_quickly(state: tuple[object, ...]) -> dict[str, Any]:
    """What `sample_quickly()` gave, by the flags' names."""
    return {flag.name: seen for flag, seen in zip(ALWAYS, state, strict=True)}


def spell_quickly(state: tuple[object, ...], constant: Spelling) -> str:
    """A condition that holds where `sample_quickly()` gives this: 0.66 → 0.42 µs beside that."""
    pairs = zip(ALWAYS, state, strict=True)
    return " and ".join(filter(None, (flag.spell(seen, constant) for flag, seen in pairs)))


def describe_changes(before: tuple[object, ...]) -> str:
    """What of `sample_quickly()` is otherwise now, for people."""
    rows = zip(ALWAYS, before, sample_quickly(), strict=True)
    return ", ".join(f"{flag.name} {a} → {b}" for flag, a, b in rows if a != b)


def sample_torch_state() -> dict[str, object]:
    """What torch's calls are computed with, by name."""
    found = {flag.name: flag.get() for flag in (*ALWAYS, *NAMED) if flag.is_computed_with}
    found["default device"] = torch.get_default_device()  # the same under `torch.device("cpu")`
    return found


def find_changes(before: Mapping[str, object]) -> list[str]:
    """Names of the flags in which torch's state isn't as in a sample."""
    now = sample_torch_state()
    return [name for name, seen in before.items() if now[name] != seen]


# --- how to ask ---


def find_autocast() -> object:
    """What autocast does; None where it is off."""
    return sample_autocast() if torch._C._is_any_autocast_enabled() else None


def sample_autocast() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Whether autocast is on, and to which dtype, by device."""
    return tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    )


def _find_autocast_dtypes() -> object:
    """What autocast would cast to, on or off."""
    return tuple(torch.get_autocast_dtype(device) for device in ("cpu", "cuda"))


def _spell_autocast_dtypes(seen: object, constant: Spelling) -> str:
    get, (cpu, cuda) = constant(torch.get_autocast_dtype), cast("tuple[object, object]", seen)
    return f"{get}('cpu') is {constant(cpu)} and {get}('cuda') is {constant(cuda)}"


def _find_default_device() -> object:
    """A default device is a mode on the stack of torch-function modes."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else None


def _find_dual_level() -> object:
    """Inside a level of forward-mode AD tensors may have tangents, which no metadata shows."""
    return forward_ad._current_level if forward_ad._current_level >= 0 else None


def find_matmul_precision() -> object:
    """One word for all back ends; or, once they were told apart, what each was told."""
    try:
        return _ask_matmul_precision()
    except RuntimeError:  # torch refuses to answer for all of them
        return find_precisions()


def find_precisions() -> object:
    """The precision of float32 in each back end."""
    return tuple(switch.ask() for switch in PRECISIONS)


def _spell_matmul_precision(seen: object, constant: Spelling) -> str | None:
    if not isinstance(seen, str):
        return None
    return f"{constant(_ask_matmul_precision)}() == {constant(seen)}"


_ask_matmul_precision = torch._C._get_float32_matmul_precision

# --- torch.backends ---


class Switch(Struct, frozen=True):
    """A switch of torch.backends that changes what a call computes."""

    word: str  # torch's name for the question
    get: Callable[[], object]
    path: str = ""  # below torch.backends, where a record keeps it
    usual: bool | str = False  # where nobody set it

    def ask(self) -> object:
        """As it is; None where torch refuses to answer, once back ends were told apart."""
        try:
            return self.get()
        except RuntimeError:
            return None

    def find(self) -> bool | str | None:
        """The same as torch.backends gives it; None where this torch doesn't have it."""
        try:
            return type(self.usual)(getattr(*self._find()))
        except (AttributeError, RuntimeError):
            return None

    def set(self, value: object) -> None:
        """Set it, as users do."""
        setattr(*self._find(), value)

    def _find(self) -> tuple[Any, str]:
        """What holds it, and its name there."""
        path, _, last = self.path.rpartition(".")
        return (operator.attrgetter(path)(torch.backends) if path else torch.backends), last


def _precision(backend: str, operation: str, owner: str, usual: str = "none") -> Switch:
    get = functools.partial(torch._C._get_fp32_precision_getter, backend, operation)
    return Switch("fp32_precision", get, f"{owner}fp32_precision", usual)


PRECISIONS = (
    _precision("generic", "all", ""),
    _precision("cuda", "all", "cudnn."),
    _precision("cuda", "matmul", "cuda.matmul."),
    _precision("cuda", "conv", "cudnn.conv.", "tf32"),
    _precision("cuda", "rnn", "cudnn.rnn.", "tf32"),
    _precision("mkldnn", "all", "mkldnn."),
    _precision("mkldnn", "matmul", "mkldnn.matmul."),
    _precision("mkldnn", "conv", "mkldnn.conv."),
    _precision("mkldnn", "rnn", "mkldnn.rnn."),
)
_REDUCED = "reduced_precision_reduction"
_KEPT = (
    ("_get_cudnn_enabled", "cudnn.enabled", True),
    ("_get_cudnn_benchmark", "cudnn.benchmark", False),
    ("_get_cudnn_deterministic", "cudnn.deterministic", False),
    ("_get_cudnn_allow_tf32", "cudnn.allow_tf32", True),
    ("_get_cublas_allow_tf32", "cuda.matmul.allow_tf32", False),
    (f"_get_cublas_allow_fp16_{_REDUCED}", f"cuda.matmul.allow_fp16_{_REDUCED}", True),
    (f"_get_cublas_allow_bf16_{_REDUCED}", f"cuda.matmul.allow_bf16_{_REDUCED}", True),
    ("_get_mkldnn_enabled", "mkldnn.enabled", True),
)
_OTHERS = (
    "_get_cudnn_depthwise_kernel",
    "_get_cublas_allow_fp16_accumulation",
    f"_get_cpu_allow_fp16_{_REDUCED}",
    "_get_mkldnn_deterministic",
    "_get_onednn_allow_tf32",
    "_get_nnpack_enabled",
    "_get_miopen_immediate",
    "_get_qengine",
    "_get_flash_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_math_sdp_enabled",
    "_get_cudnn_sdp_enabled",
    "_get_fa3_sdp_enabled",
    "_get_overrideable_sdp_enabled",
    "_get_math_sdp_allow_fp16_bf16_reduction",
    "_get_blas_preferred_backend",
    "_get_linalg_preferred_backend",
    "_get_rocm_fa_preferred_backend",
    "_get_sm_carveout_experimental",
)
SWITCHES = tuple(
    Switch(word, getattr(torch._C, word), path, usual)
    for word, path, usual in (*_KEPT, *((word, "", False) for word in _OTHERS))
    if hasattr(torch._C, word)  # some came with later versions
)


# torch sets it by itself, in the first attention of a process on CUDA or XPU, to what suits the
# device (`priority_order` in ATen's sdp_utils.cpp; on an H200 [1, 2, 0, 3, 4] → [3, 1, 2, 0, 4]).
# The preferred BLAS is settled by the question itself; no other switch sets itself up.
find_attention_order: Callable[[], object] = torch._C._get_sdp_priority_order


def describe_backends() -> object:
    """All that compiled code may depend on: the switches, and what torch sets up by itself."""
    return sample_backends(), find_attention_order()


def sample_backends() -> object:
    """The switches of torch.backends that change what a call computes, and that users set."""
    return (
        [switch.ask() for switch in (*SWITCHES, *PRECISIONS)],
        torch.backends.opt_einsum.enabled,
        torch.backends.mha.get_fastpath_enabled(),
    )


def find_unusual(switches: Iterable[Switch]) -> dict[str, Any]:
    """Those that a record keeps and that somebody set."""
    found = {one.path: one.find() for one in switches if one.path}
    usual = {one.path: one.usual for one in switches}
    return {path: now for path, now in found.items() if now is not None and now != usual[path]}


@contextlib.contextmanager
def switched(switches: Iterable[Switch], wanted: Mapping[str, object]) -> Iterator[None]:
    """Those that a record keeps as they are wanted, or as usual; put back afterwards."""
    before = [(one, one.find()) for one in switches if one.path]
    changed = [
        (one, now)
        for one, now in before
        if now is not None and now != wanted.get(one.path, one.usual)
    ]
    try:
        for one, _ in changed:
            one.set(wanted.get(one.path, one.usual))
        yield
    finally:
        for one, now in changed:
            one.set(now)


# --- further questions ---


def _decimal_context() -> object:
    """Precision, rounding and traps; the flags are results, and change all the time."""
    decimal = sys.modules.get("decimal")
    return None if decimal is None else _describe_context(decimal.getcontext())


def _describe_context(now: Any) -> object:
    traps = tuple(now.traps.items())
    return now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp, traps


def _numpy_errors() -> object:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else tuple(numpy.geterr().items())


_NUMPY_ERRORS = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}


def _print_options() -> object:
    return tuple(vars(torch._tensor_str.PRINT_OPTS).items())


def _log_levels() -> object:
    """Of each logger that there is, and what holds for all."""
    root = logging.root
    loggers = {"root": root, **root.manager.loggerDict}
    return root.manager.disable, {
        name: (logger.level, logger.disabled, logger.propagate)
        for name, logger in loggers.items()
        if isinstance(logger, logging.Logger)  # a new one is as if there were none
        if logger.level or logger.disabled or not logger.propagate
    }


def _cached_parametrizations() -> object:
    """While they are cached, nobody knows since when: no two answers are the same."""
    parametrize: Any = sys.modules.get("torch.nn.utils.parametrize")
    return object() if parametrize is not None and parametrize._cache_enabled else False


def _validates_distributions() -> object:
    return torch.distributions.Distribution._validate_args


def _divergences() -> object:
    return tuple(torch.distributions.kl._KL_REGISTRY.items())


def _pytrees() -> object:
    """What was said since tripwire was imported, but for what torch says of classes of its own.

    It does when it imports them, in the midst of a run perhaps.
    """
    nodes = torch.utils._pytree.SUPPORTED_NODES
    others = [pair for pair in nodes.items() if _TREES.get(pair[0]) is not pair[1]]
    gone = _TREES.keys() - nodes.keys()
    return tuple(pair for pair in others if not is_library_class(pair[0])), gone


_TREES = dict(torch.utils._pytree.SUPPORTED_NODES)


def _data_worker() -> object:
    return torch.utils.data.get_worker_info()


def _thread() -> object:
    return threading.get_ident(), threading.current_thread().name


# --- the table ---


def _always(
    name: str,
    get: Callable[[], object],
    *,
    off: Callable[[Spelling], str] | None = None,
    shortcut: Callable[[object, Spelling], str | None] | None = None,
    is_computed_with: bool = True,
) -> Flag:
    if off is not None:
        shortcut = lambda seen, constant: off(constant) if seen is None else None  # noqa: E731
    return Flag(name, get, shortcut, is_computed_with)


def _named(name: str, words: str, get: Callable[[], object], **when: Any) -> Flag:
    return Flag(name, get, words=frozenset(words.split()), **when)


ALWAYS = (
    _always("grad mode", torch.is_grad_enabled),
    _always("inference mode", torch.is_inference_mode_enabled),
    _always(
        "autocast",
        find_autocast,
        off=lambda constant: f"not {constant(torch._C._is_any_autocast_enabled)}()",
    ),
    _always("default dtype", torch.get_default_dtype),
    # None: there is no mode, which is asked for itself.
    _always("default device", _find_default_device, off=lambda _: ""),
    _always(
        "number of torch-function modes", torch._C._len_torch_function_stack, is_computed_with=False
    ),
    _always(
        "number of torch-dispatch modes", torch._C._len_torch_dispatch_stack, is_computed_with=False
    ),
    _always(
        "level of forward-mode AD",
        _find_dual_level,
        off=lambda constant: f"{constant(forward_ad)}._current_level < 0",
        is_computed_with=False,
    ),
    _always(
        "torch.jit.trace",
        torch._C._get_tracing_state,
        off=lambda constant: f"{constant(torch._C._get_tracing_state)}() is None",
        is_computed_with=False,
    ),
    _always("deterministic algorithms", torch._C._get_deterministic_algorithms),
    _always("float32 matmul precision", find_matmul_precision, shortcut=_spell_matmul_precision),
    _always("number of threads", torch.get_num_threads),
)
AUTOCAST_DTYPES = _named(
    "autocast's dtypes",
    "get_autocast_dtype get_autocast_cpu_dtype get_autocast_gpu_dtype",
    _find_autocast_dtypes,
    shortcut=_spell_autocast_dtypes,
    is_computed_with=True,
    slug="torch-state-changed",
)
NAMED = (
    _named(
        "torch.backends",
        "backends cudnn mkldnn opt_einsum mha flash_sdp_enabled mem_efficient_sdp_enabled "
        "math_sdp_enabled cudnn_sdp_enabled allow_tf32 "
        + " ".join(switch.word for switch in (*SWITCHES, *PRECISIONS)),
        sample_backends,
        home="torch.backends",
    ),
    _named(
        "the order of attention's kernels",
        "_get_sdp_priority_order _set_sdp_priority_order _cur_sdpa_kernel_backends",
        lambda: find_attention_order(),
        is_libraries=True,  # torch's own, in a run that doesn't name it
    ),
    _named(
        "the seed of torch's generator",
        "initial_seed",
        torch.initial_seed,
        slug="generator-reseeded",
    ),
    _named(
        "anomaly mode",
        "is_anomaly_enabled is_anomaly_check_nan_enabled",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
    ),
    _named(
        "whether the profiler runs",
        "_profiler_enabled _profiler_type _is_profiler_enabled",
        lambda: (torch._C._autograd._profiler_enabled(), torch._C._autograd._profiler_type()),
    ),
    _named(
        "which torch.func transforms go on",
        "_functorch functorch pyfunctorch peek_interpreter_stack get_interpreter_stack "
        "maybe_current_level get_dynamic_layer_stack_depth _are_functorch_transforms_active "
        "retrieve_current_functorch_interpreter",
        torch._C._functorch.get_dynamic_layer_stack_depth,
    ),
    _named(
        "the backward that runs",
        "_current_graph_task_id _current_autograd_node _will_engine_execute_node",
        torch._C._current_graph_task_id,
    ),
    _named(
        "whether saved tensors may have hooks",
        "_saved_tensors_hooks_is_enabled _saved_tensors_hooks_get_disabled_error_message",
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message,
    ),
    _named(
        "whether tensors have a say in torch's calls",
        "_is_torch_function_enabled _is_torch_function_all_disabled",
        lambda: (torch._C._is_torch_function_enabled(), torch._C._is_torch_function_all_disabled()),
    ),
    _named(
        "whether deterministic algorithms only warn",
        "is_deterministic_algorithms_warn_only_enabled get_deterministic_debug_mode",
        torch.is_deterministic_algorithms_warn_only_enabled,
    ),
    _named(
        "whether sparse tensors are checked",
        "check_sparse_tensor_invariants is_enabled sparse_coo_tensor sparse_compressed_tensor "
        "sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor sparse_bsc_tensor",
        torch.sparse.check_sparse_tensor_invariants.is_enabled,
    ),
    _named(
        "whether autograd has threads",
        "is_multithreading_enabled _is_multithreading_enabled",
        torch.autograd.is_multithreading_enabled,
    ),
    _named(
        "whether new memory is filled",
        "fill_uninitialized_memory",
        lambda: cast("Any", torch.utils.deterministic).fill_uninitialized_memory,
    ),
    AUTOCAST_DTYPES,
    _named("autocast's cache", "is_autocast_cache_enabled", torch.is_autocast_cache_enabled),
    _named("whether torch always warns", "is_warn_always_enabled", torch.is_warn_always_enabled),
    _named(
        "the decimal context",
        "decimal Decimal getcontext localcontext",
        _decimal_context,
        home="decimal",
        usual=lambda: _describe_context(sys.modules["decimal"].DefaultContext),
        set_by="decimal.getcontext()",
    ),
    _named(
        "NumPy's error state",
        "numpy geterr geterrcall",
        _numpy_errors,
        home="numpy",
        usual=lambda: tuple(_NUMPY_ERRORS.items()),
        set_by="numpy.seterr",
    ),
    _named(
        "how tensors are printed",
        "set_printoptions PRINT_OPTS",
        _print_options,
        usual=lambda: tuple(vars(type(torch._tensor_str.PRINT_OPTS)()).items()),
        set_by="torch.set_printoptions",
    ),
    _named("the levels of loggers", "getLogger", _log_levels, is_libraries=True),
    _named(
        "the filters of warnings",
        "simplefilter filterwarnings resetwarnings",
        lambda: list(warnings.filters),
        is_libraries=True,
    ),
    _named(
        "whether parametrizations are cached",
        "",
        _cached_parametrizations,
        home="torch.nn.utils.parametrize",
        is_libraries=True,
    ),
    _named(
        "whether distributions check their arguments",
        f"set_default_validate_args {' '.join(torch.distributions.__all__)}",
        _validates_distributions,
        home="torch.distributions.distribution",
    ),
    _named("the table of divergences", "kl_divergence", _divergences, is_libraries=True),
    _named(
        "which classes are trees",
        "tree_map tree_map_ tree_flatten tree_unflatten tree_leaves tree_structure tree_map_only "
        "tree_any tree_all tree_iter",
        _pytrees,
        is_libraries=True,
    ),
    _named("the worker that loads data", "get_worker_info", _data_worker),
    _named("the thread", "current_thread", _thread),
    _named("the recursion limit", "getrecursionlimit", sys.getrecursionlimit),
)
