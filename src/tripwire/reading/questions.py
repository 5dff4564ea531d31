"""Questions: state of Python's and torch's that no dict holds, asked again before each call.

Nobody can watch such state, and to ask for all of it would cost more than a hit. So each
question has words: names that code must contain to come to the answer, or modules whose
classes and functions ask for it themselves. An entry asks only the questions whose words are in
the code that ran, or whose modules that code can reach.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch

from tripwire.reading.torchstate import find_precisions
from tripwire.values.classes import isinstance


@dataclass(frozen=True, slots=True)
class Question:
    """A piece of state, who may read it, and how to ask."""

    about: str
    words: frozenset[str]
    ask: Callable[[], object]
    slug: str  # of the refusal, where a run leaves it changed
    home: str  # all that this module and those below it compute may hang on it
    is_libraries: bool  # imports change it, too: that is no effect of a run that doesn't name it

    def is_at_home(self, modules: Iterable[str]) -> bool:
        """Whether what one of these modules computes may hang on it, under whatever name."""
        within = f"{self.home}."
        return bool(self.home) and any(m == self.home or m.startswith(within) for m in modules)

    def answer(self) -> Answer:
        """Ask now."""
        return Answer(self, self.ask())


@dataclass(frozen=True, slots=True)
class Answer:
    """What a question got before a run."""

    question: Question
    seen: object  # None where what is asked about wasn't loaded yet


def ask_all() -> tuple[Answer, ...]:
    """Every question with its answer now."""
    return tuple(question.answer() for question in QUESTIONS)


def _question(
    about: str,
    words: str,
    ask: Callable[[], object],
    slug: str = "process-state",
    home: str = "",
    is_libraries: bool = False,
) -> Question:
    return Question(about, frozenset(words.split()), ask, slug, home, is_libraries)


_SWITCHES = {
    name: getattr(torch._C, name)
    for name in [
        "_get_cudnn_enabled",
        "_get_cudnn_benchmark",
        "_get_cudnn_deterministic",
        "_get_cudnn_depthwise_kernel",
        "_get_cublas_allow_fp16_accumulation",
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_get_cpu_allow_fp16_reduced_precision_reduction",
        "_get_mkldnn_enabled",
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
        "_get_sdp_priority_order",
        "_get_math_sdp_allow_fp16_bf16_reduction",
        "_get_blas_preferred_backend",
        "_get_linalg_preferred_backend",
        "_get_rocm_fa_preferred_backend",
        "_get_sm_carveout_experimental",
    ]
    if hasattr(torch._C, name)  # some came with later versions
}


def sample_backends() -> object:
    """The switches of torch.backends that change what a call computes."""
    return (
        [ask() for ask in _SWITCHES.values()],
        # torch raises here once back ends were told apart
        _ask_or_none(torch._C._get_cudnn_allow_tf32),
        _ask_or_none(torch._C._get_cublas_allow_tf32),
        find_precisions(),
        torch.backends.opt_einsum.enabled,
        torch.backends.mha.get_fastpath_enabled(),
    )


def _ask_or_none(ask: Callable[[], object]) -> object:
    try:
        return ask()
    except RuntimeError:
        return None


def _decimal_context() -> object:
    """Precision, rounding and traps; the flags are results, and change all the time."""
    decimal = sys.modules.get("decimal")
    if decimal is None:
        return None
    now = decimal.getcontext()
    traps = tuple(now.traps.items())
    return now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp, traps


def _numpy_errors() -> object:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else tuple(numpy.geterr().items())


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
    return tuple(torch.utils._pytree.SUPPORTED_NODES.items())


def _data_worker() -> object:
    return torch.utils.data.get_worker_info()


def _thread() -> object:
    return threading.get_ident(), threading.current_thread().name


QUESTIONS = (
    _question(
        "torch.backends",
        "backends cudnn mkldnn opt_einsum mha flash_sdp_enabled mem_efficient_sdp_enabled "
        "math_sdp_enabled cudnn_sdp_enabled fp32_precision allow_tf32 "
        f"_get_cudnn_allow_tf32 _get_cublas_allow_tf32 {' '.join(_SWITCHES)}",
        sample_backends,
        home="torch.backends",
    ),
    _question(
        "the seed of torch's generator", "initial_seed", torch.initial_seed, "generator-reseeded"
    ),
    _question(
        "anomaly mode",
        "is_anomaly_enabled is_anomaly_check_nan_enabled",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
    ),
    _question(
        "whether the profiler runs",
        "_profiler_enabled _profiler_type _is_profiler_enabled",
        lambda: (torch._C._autograd._profiler_enabled(), torch._C._autograd._profiler_type()),
    ),
    _question(
        "which torch.func transforms go on",
        "_functorch functorch pyfunctorch peek_interpreter_stack get_interpreter_stack "
        "maybe_current_level get_dynamic_layer_stack_depth _are_functorch_transforms_active "
        "retrieve_current_functorch_interpreter",
        torch._C._functorch.get_dynamic_layer_stack_depth,
    ),
    _question(
        "the backward that runs",
        "_current_graph_task_id _current_autograd_node _will_engine_execute_node",
        torch._C._current_graph_task_id,
    ),
    _question(
        "whether saved tensors may have hooks",
        "_saved_tensors_hooks_is_enabled _saved_tensors_hooks_get_disabled_error_message",
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message,
    ),
    _question(
        "whether tensors have a say in torch's calls",
        "_is_torch_function_enabled _is_torch_function_all_disabled",
        lambda: (torch._C._is_torch_function_enabled(), torch._C._is_torch_function_all_disabled()),
    ),
    _question(
        "whether deterministic algorithms only warn",
        "is_deterministic_algorithms_warn_only_enabled get_deterministic_debug_mode",
        torch.is_deterministic_algorithms_warn_only_enabled,
    ),
    _question(
        "whether sparse tensors are checked",
        "check_sparse_tensor_invariants is_enabled sparse_coo_tensor sparse_compressed_tensor "
        "sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor sparse_bsc_tensor",
        torch.sparse.check_sparse_tensor_invariants.is_enabled,
    ),
    _question(
        "whether autograd has threads",
        "is_multithreading_enabled _is_multithreading_enabled",
        torch.autograd.is_multithreading_enabled,
    ),
    _question(
        "whether new memory is filled",
        "fill_uninitialized_memory",
        lambda: cast("Any", torch.utils.deterministic).fill_uninitialized_memory,
    ),
    _question("autocast's cache", "is_autocast_cache_enabled", torch.is_autocast_cache_enabled),
    _question("whether torch always warns", "is_warn_always_enabled", torch.is_warn_always_enabled),
    _question(
        "the decimal context",
        "decimal Decimal getcontext localcontext",
        _decimal_context,
        home="decimal",
    ),
    _question("NumPy's error state", "numpy geterr geterrcall", _numpy_errors, home="numpy"),
    _question("how tensors are printed", "set_printoptions PRINT_OPTS", _print_options),
    _question("the levels of loggers", "getLogger", _log_levels, is_libraries=True),
    _question(
        "the filters of warnings",
        "simplefilter filterwarnings resetwarnings",
        lambda: list(warnings.filters),
        is_libraries=True,
    ),
    _question(
        "whether parametrizations are cached",
        "",
        _cached_parametrizations,
        home="torch.nn.utils.parametrize",
        is_libraries=True,
    ),
    _question(
        "whether distributions check their arguments",
        f"set_default_validate_args {' '.join(torch.distributions.__all__)}",
        _validates_distributions,
        home="torch.distributions.distribution",
    ),
    _question("the table of divergences", "kl_divergence", _divergences, is_libraries=True),
    _question(
        "which classes are trees",
        "tree_map tree_map_ tree_flatten tree_unflatten tree_leaves tree_structure tree_map_only "
        "tree_any tree_all tree_iter",
        _pytrees,
        is_libraries=True,
    ),
    _question("the worker that loads data", "get_worker_info", _data_worker),
    _question("the thread", "current_thread", _thread),
    _question("the recursion limit", "getrecursionlimit", sys.getrecursionlimit),
)
