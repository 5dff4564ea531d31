"""Questions: state of Python's and torch's that no dict holds, asked again before each call.

Nobody can watch such state, and to ask for all of it would cost more than a hit. So each
question has words: names that code must contain to come to the answer, or modules whose
classes and functions ask for it themselves. An entry asks only the questions whose words are in
the code that ran, or whose modules that code can reach.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from tripwire.tracing.torchstate import find_matmul_precision


@dataclass(frozen=True, slots=True)
class Question:
    """A piece of state, who may read it, and how to ask."""

    about: str
    words: frozenset[str]
    ask: Callable[[], object]
    slug: str  # of the refusal, where a run leaves it changed
    home: str  # all that this module computes may hang on it, under whatever name

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
) -> Question:
    return Question(about, frozenset(words.split()), ask, slug, home)


def sample_backends() -> object:
    """The switches of torch.backends that change what a call computes."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    cuda: Any = torch.backends.cuda
    return (
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        _ask_or_none(lambda: cudnn.allow_tf32),  # once back ends were told apart, torch raises
        _ask_or_none(lambda: matmul.allow_tf32),
        find_matmul_precision(),
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.mkldnn.enabled,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
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


def _thread() -> object:
    return threading.get_ident(), threading.current_thread().name


QUESTIONS = (
    _question(
        "torch.backends",
        "backends cudnn mkldnn opt_einsum mha flash_sdp_enabled mem_efficient_sdp_enabled "
        "math_sdp_enabled cudnn_sdp_enabled",
        sample_backends,
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
    _question("the thread", "current_thread", _thread),
    _question("the recursion limit", "getrecursionlimit", sys.getrecursionlimit),
)
