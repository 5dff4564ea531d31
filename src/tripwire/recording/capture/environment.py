"""Environment: what is around a call and changes what it computes: torch's switches, packages.

torch's switches are in a record, and set again for a replay. Others are told where they may matter:
a replay runs with the usual ones. Importing this doesn't import torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Set
from typing import Any

from tripwire.recording.format.manifest import Autocast, Environment, Omission
from tripwire.values.classes import isinstance

# --- found, and set again ---


def describe(state: tuple[object, ...]) -> Environment:
    """torch's switches, from what `sample_quickly` found."""
    import torch

    from tripwire.reading.torchstate import SWITCHES, find_unusual, name_quickly

    known = name_quickly(state)
    precision = known["float32 matmul precision"]
    return Environment(
        grad_mode=known["grad mode"],
        inference_mode=known["inference mode"],
        autocast={
            kind: Autocast(enabled, _short(to))
            for kind, enabled, to in known["autocast"] or ()
            if enabled
        },
        autocast_cache=torch.is_autocast_cache_enabled(),
        default_dtype=_short(known["default dtype"]),
        default_device=str(known["default device"] or "cpu"),
        deterministic=bool(known["deterministic algorithms"]),
        deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        matmul_precision=precision if isinstance(precision, str) else "highest",
        num_threads=int(known["number of threads"]),
        flags=find_unusual(SWITCHES),
        precisions=_find_precisions(precision),
    )


def _find_precisions(precision: object) -> dict[str, str]:
    """Precisions of single back ends, where the one word for all doesn't say everything."""
    from tripwire.reading.torchstate import PRECISIONS, find_unusual

    unusual = find_unusual(PRECISIONS)
    if isinstance(precision, str) and all("matmul" in name for name in unusual):
        return {}
    return unusual


def is_switch(path: str) -> bool:
    """Whether a record may name this switch of torch.backends. Nobody can say without torch."""
    if importlib.util.find_spec("torch") is None:
        return False
    from tripwire.reading.torchstate import PRECISIONS, SWITCHES

    return any(path == switch.path for switch in (*SWITCHES, *PRECISIONS) if switch.path)


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def entered(wanted: Environment) -> Iterator[None]:
    """torch's flags as they were when the call began; put back afterwards."""
    if importlib.util.find_spec("torch") is None:  # it was there, and perhaps isn't needed
        yield
        return
    import torch

    from tripwire.reading.torchstate import PRECISIONS, SWITCHES, find_matmul_precision, switched

    precision = find_matmul_precision()
    before = (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        precision,
        torch.get_num_threads(),
        torch.is_autocast_cache_enabled(),
    )
    with contextlib.ExitStack() as stack:
        stack.callback(_set_flags, *before)
        _set_flags(
            getattr(torch, wanted.default_dtype),
            wanted.deterministic,
            wanted.deterministic_warn_only,
            wanted.matmul_precision if isinstance(precision, str) else precision,
            wanted.num_threads or before[4],
            wanted.autocast_cache,
        )
        stack.enter_context(switched(SWITCHES, wanted.flags))
        if wanted.precisions:
            stack.enter_context(switched(PRECISIONS, wanted.precisions))
        device = torch.device(wanted.default_device)
        if device.type != "cpu" and (device.type == "meta" or torch.accelerator.is_available()):
            stack.enter_context(device)
        for kind, autocast in wanted.autocast.items():
            dtype = getattr(torch, autocast.dtype)
            stack.enter_context(torch.autocast(kind, dtype, autocast.enabled))
        if wanted.inference_mode:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(wanted.grad_mode))
        yield


def _set_flags(
    dtype: Any, deterministic: bool, warn_only: bool, precision: object, threads: int, cache: bool
) -> None:
    import torch

    from tripwire.reading.torchstate import find_matmul_precision

    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    # Else each back end was told its own, or is as it should be: leave them alone.
    if isinstance(precision, str) and precision != find_matmul_precision():
        torch.set_float32_matmul_precision(precision)
    torch.set_num_threads(threads)
    torch.set_autocast_cache_enabled(cache)


# --- switches that are told ---

_ENVIRONMENT = ("environ", "environb", "getenv")
_USUAL_LIMIT = 1000


def find_settings(raised: str, names: Set[str]) -> Iterator[Omission]:
    """Settings that may show in a call: by the error that it raised, and the names in its code."""
    from tripwire.reading.torchstate import NAMED

    told = [flag.set_by for flag in NAMED if flag.is_unusual()]
    if raised.endswith("Warning"):
        told.append("warnings.filters")
    if raised == "RecursionError" and sys.getrecursionlimit() != _USUAL_LIMIT:
        told.append("sys.setrecursionlimit")
    for what in told:
        yield Omission(what, "it isn't at its default, and a record doesn't keep it")
    if not names.isdisjoint(_ENVIRONMENT):
        yield Omission("os.environ", "a record doesn't keep the environment's variables")


# --- packages ---


def fresh_packages() -> str:
    """Versions of the installed packages whose modules are loaded, as pip takes them."""
    loaded = {name.partition(".")[0] for name in sys.modules}
    where = tuple((folder, _changed(folder)) for folder in sys.path)
    found = _find_distributions(where)
    names = {dist for top in loaded & found.keys() for dist in found[top]}
    return " ".join(f"{name}=={_find_version(name, where)}" for name in sorted(names))


_Folders = tuple[tuple[str, int], ...]  # where packages are, and when that changed


def _changed(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=1)
def _find_distributions(where: _Folders) -> Mapping[str, list[str]]:
    """Packages by the modules that they bring: a tenth of a second, so it is done once."""
    return importlib.metadata.packages_distributions()


@functools.lru_cache(maxsize=1000)
def _find_version(name: str, where: _Folders) -> str:
    return importlib.metadata.version(name)
