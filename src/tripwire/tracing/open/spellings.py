"""Spellings: calls that torch computes for one size alone, in terms of calls that leave it open.

`torch.linspace(0, 1, n)` takes n for a plain int. Where a size or a number that such a call depends
on is open, the shadow asks the spelling for the form of the result, and compilers get the spelling
in the call's place. The run, and the back end "eager", make the call itself: a spelling may round
otherwise.

A spelling is given real tensors, fake ones, or a graph's proxies, so it asks them nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.nn import functional

from tripwire.tracing.open.symbols import expression_of, is_open_symbol
from tripwire.tracing.state import FACTS, NodeFacts
from tripwire.values.classes import is_exactly
from tripwire.values.numbers import OpenInt, is_taken

SPELLED = "tripwire_spelled"  # in a node's meta: its spelling
Spelling = Callable[..., Any]
_LARGER: Callable[[Any, Any], Any] = torch.sym_max
FindFake = Callable[[torch.Tensor], Any]  # None: all of its sizes are fixed


def find_spelling(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], find: FindFake
) -> Spelling | None:
    """How to write a call of which something is open; None: as it is."""
    look = _LOOKS.get(func)
    if look is None or not (args or func in _FACTORIES):
        return None
    return look(find, *args, **kwargs)


class MadeCall(NamedTuple):
    """A call that the run made."""

    func: Callable[..., Any]
    args: Sequence[Any]
    results: Sequence[torch.Tensor]


def find_form(call: MadeCall, find: FindFake) -> Spelling | None:
    """What tells the form of a call's results, where no other calls can stand for it."""
    look = _FORMS.get(call.func)
    return None if look is None else look(call, find)


def spell_calls(graph: fx.Graph) -> None:
    """Put spellings in the place of their calls."""
    proxy: Any = functools.partial(fx.Proxy, tracer=fx.proxy.GraphAppendingTracer(graph))
    for node in list(graph.nodes):
        spelling: Spelling | None = node.meta.get(SPELLED)
        if spelling is None or node.op == "placeholder":  # a part of a graph gets what another made
            continue
        before = node.prev
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), proxy)
        with graph.inserting_before(node):
            made = spelling(*args, **kwargs).node
        facts: NodeFacts = node.meta[FACTS]
        steps = {k: v for k, v in node.meta.items() if k != SPELLED}
        steps[FACTS] = facts._replace(memory=(), written=())
        while before.next is not node:
            before = before.next
            before.meta = dict(steps)
        made.meta[FACTS] = facts
        node.replace_all_uses_with(made)
        graph.erase_node(node)


# --- evenly spaced numbers ---


def _look_at_linspace(
    find: FindFake,
    start: Any,
    end: Any,
    steps: Any,
    *,
    dtype: Any = None,
    device: Any = None,
    **options: Any,
) -> Spelling | None:
    if not (is_exactly(start, int, float) and is_exactly(end, int, float)):
        return None
    kind = _find_kind(steps, dtype, options)
    return None if kind is None else functools.partial(_spell_linspace, kind=kind)


def _find_kind(steps: Any, dtype: Any, options: dict[str, Any]) -> torch.dtype | None:
    """The dtype of what is made for an open number of steps; None: torch makes it as it is."""
    kind: torch.dtype = dtype or torch.get_default_dtype()
    is_plain = all(_USUAL.get(name) is value for name, value in options.items())
    return kind if is_plain and _is_open_int(steps) and kind.is_floating_point else None


_USUAL = {"layout": torch.strided, "requires_grad": False, "pin_memory": False}


def _spell_linspace(
    start: float, end: float, steps: Any, *, kind: torch.dtype, device: Any = None, **_: Any
) -> Any:
    places = torch.arange(steps, dtype=torch.float64, device=device)
    step = (end - start) / _LARGER(steps - 1, 1)
    return (places * step + start).to(kind)


def _look_at_logspace(
    find: FindFake, start: Any, end: Any, steps: Any, base: float = 10.0, **options: Any
) -> Spelling | None:
    spelling = _look_at_linspace(find, start, end, steps, **options)
    if spelling is None or not is_exactly(base, int, float):
        return None
    return functools.partial(_spell_logspace, spelling)


def _spell_logspace(
    exponents: Spelling, start: float, end: float, steps: Any, base: float = 10.0, **options: Any
) -> Any:
    return base ** exponents(start, end, steps, **options)


def _look_at_frequencies(
    spelling: Spelling,
    find: FindFake,
    n: Any,
    d: Any = 1.0,
    *,
    dtype: Any = None,
    device: Any = None,
    **options: Any,
) -> Spelling | None:
    kind = _find_kind(n, dtype, options)
    if kind is None or not is_exactly(d, int, float) or not d or not n > 0:
        return None
    return functools.partial(spelling, kind=kind)


def _spell_fftfreq(
    n: Any, d: float = 1.0, *, kind: torch.dtype, device: Any = None, **_: Any
) -> Any:
    places = torch.arange(n, dtype=torch.float64, device=device)
    half = n // 2
    return (((places + half) % n - half) / (n * d)).to(kind)


def _spell_rfftfreq(
    n: Any, d: float = 1.0, *, kind: torch.dtype, device: Any = None, **_: Any
) -> Any:
    return (torch.arange(n // 2 + 1, dtype=torch.float64, device=device) / (n * d)).to(kind)


# --- windows ---


def _look_at_window(
    shape: Callable[..., Any],
    find: FindFake,
    window_length: Any,
    periodic: Any = True,
    *shaped: Any,
    dtype: Any = None,
    device: Any = None,
    alpha: Any = 0,
    beta: Any = 0,
    **options: Any,
) -> Spelling | None:
    kind = _find_kind(window_length, dtype, options)
    is_plain = all(is_exactly(number, int, float) for number in (*shaped, alpha, beta))
    if kind is None or not is_exactly(periodic, bool) or not is_plain or not window_length > 1:
        return None
    return functools.partial(_spell_window, shape, kind=kind)


def _spell_window(
    shape: Callable[..., Any],
    window_length: Any,
    periodic: bool = True,
    *shaped: float,
    kind: torch.dtype,
    device: Any = None,
    dtype: Any = None,
    layout: Any = None,
    requires_grad: Any = None,
    pin_memory: Any = None,
    **named: float,
) -> Any:
    length = window_length if periodic else window_length - 1
    places = torch.arange(window_length, dtype=torch.float64, device=device) / length
    return shape(places, *shaped, **named).to(kind)


def _hann(places: Any) -> Any:
    return 0.5 - 0.5 * torch.cos(places * (2 * math.pi))


def _hamming(places: Any, alpha: float = 0.54, beta: float = 0.46) -> Any:
    return alpha - beta * torch.cos(places * (2 * math.pi))


def _blackman(places: Any) -> Any:
    turns = places * (2 * math.pi)
    return 0.42 - 0.5 * torch.cos(turns) + 0.08 * torch.cos(2 * turns)


def _bartlett(places: Any) -> Any:
    return 1 - torch.abs(2 * places - 1)


def _kaiser(places: Any, beta: float = 12.0) -> Any:
    inside = torch.sqrt(torch.clamp(1 - torch.square(2 * places - 1), min=0))
    return torch.special.i0(beta * inside) / torch.special.i0(beta + 0 * places)


# --- classes as rows of zeros and a one ---


def _look_at_one_hot(find: FindFake, tensor: Any, num_classes: Any = -1) -> Spelling | None:
    if not _is_open_int(num_classes):
        return None
    return functools.partial(_spell_one_hot, device=tensor.device)


def _spell_one_hot(tensor: Any, num_classes: Any, *, device: torch.device) -> Any:
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=device)).to(torch.int64)


# --- pools over the whole of a tensor ---


def _look_at_pool(
    dims: int,
    spelling: Spelling,
    find: FindFake,
    tensor: Any,
    kernel_size: Any,
    *args: Any,
    **how: Any,
) -> Spelling | None:
    sizes = kernel_size if is_exactly(kernel_size, tuple, list, torch.Size) else [kernel_size]
    fake = find(tensor)
    if args or (how and how != _UNSAID) or fake is None or len(sizes) != dims:
        return None
    whole = fake.size()[-dims:]
    if not any(map(_is_open_int, sizes)) or not all(map(_are_equal, sizes, whole)):
        return None
    return spelling


def _look_at_max1(find: FindFake, tensor: Any, *args: Any, **how: Any) -> Spelling | None:
    found = _look_at_pool(1, _spell_max1, find, tensor, *args, **how)
    if found is None and find(tensor) is not None and not how.get("return_indices"):
        return _spell_max_by_places
    return found


# What torch.nn.functional says where nothing was said.
_UNSAID = {"stride": None, "padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}


def _spell_max1(tensor: Any, kernel_size: Any, **_: Any) -> Any:
    return torch.max(tensor, -1, keepdim=True)[0]


def _spell_max_by_places(*args: Any, return_indices: bool = False, **how: Any) -> Any:
    """`max_pool1d` itself needs sizes (torch 2.13)."""
    return functional.max_pool1d_with_indices(*args, **how)[0]


def _spell_max2(tensor: Any, kernel_size: Any, **_: Any) -> Any:
    return torch.max(tensor.flatten(-2), -1, keepdim=True)[0].unsqueeze(-1)


def _spell_mean1(tensor: Any, kernel_size: Any) -> Any:
    return tensor.mean(-1, keepdim=True)


def _spell_mean2(tensor: Any, kernel_size: Any) -> Any:
    return tensor.mean((-2, -1), keepdim=True)


# --- forms ---


def _look_at_layers(call: MadeCall, find: FindFake) -> Spelling | None:
    """Recurrent layers: torch goes through the sequence in Python, and so needs its length.

    An LSTM without gradient is one call to a library, on a CPU.
    """
    args, result = call.args, call.results[0]
    if len(args) != 9 or result.dim() != 3:  # a packed sequence
        return None
    fake, batch_first = find(args[0]), args[-1]
    if fake is None or not is_open_symbol(fake.size(1 if batch_first else 0)):
        return None
    if call.func == torch.lstm and result.is_cpu and not result.requires_grad:
        return None
    return functools.partial(_form_layers, is_turned=not result.is_contiguous())


def _form_layers(
    given: Any,
    states: Any,
    weights: Any,
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    *,
    is_turned: bool,
) -> tuple[torch.Tensor, ...]:
    states = states if is_exactly(states, tuple, list) else (states,)
    first, second, _ = given.size()
    width = states[0].size(2) * (2 if bidirectional else 1)
    if is_turned:
        output = states[0].new_empty((second, first, width)).transpose(0, 1)
    else:
        output = states[0].new_empty((first, second, width))
    return output, *map(torch.empty_like, states)


def _look_at_ctc(call: MadeCall, find: FindFake) -> Spelling:
    return functools.partial(_form_ctc, is_mean=not call.results[0].dim())


def _form_ctc(log_probs: Any, *_: Any, is_mean: bool, **how: Any) -> torch.Tensor:
    made: torch.Tensor = log_probs.new_empty(() if is_mean else (log_probs.size(1),))
    return made


def _look_at_steps(call: MadeCall, find: FindFake) -> Spelling:
    made = call.results[0]
    return functools.partial(_form_steps, kind=made.dtype, device=made.device)


def _form_steps(
    start: Any, end: Any, steps: Any, *_: Any, kind: torch.dtype, device: Any, **how: Any
) -> torch.Tensor:
    return torch.empty((steps,), dtype=kind, device=device)


def _look_at_triangle(call: MadeCall, find: FindFake) -> Spelling | None:
    """Where in a square the elements below or above a diagonal are."""
    row, col, offset = (*call.args, 0)[:3] if len(call.args) > 1 else (None, None, 0)
    if not (_is_open_int(row) and _is_open_int(col) and _are_equal(row, col.symbol)):
        return None
    is_within = offset <= 0 if call.func is torch.tril_indices else offset >= 0
    if not is_exactly(offset, int) or not is_within or not row >= abs(offset):
        return None
    return functools.partial(_form_triangle, call.results[0].dtype, call.results[0].device)


def _form_triangle(
    kind: torch.dtype, device: Any, row: Any, col: Any, offset: int = 0, **how: Any
) -> torch.Tensor:
    side = row - abs(offset)
    return torch.empty((2, side * (side + 1) // 2), dtype=kind, device=device)


def _look_at_pairs(call: MadeCall, find: FindFake) -> Spelling | None:
    is_of_pairs = len(call.args) == 1 and call.results[0].shape[-1:] == (2,)
    return _form_pairs if is_of_pairs else None


def _form_pairs(given: Any, *_: Any, **how: Any) -> torch.Tensor:
    count = given.size(0)
    made: torch.Tensor = given.new_empty((count * (count - 1) // 2, 2))
    return made


def _look_at_powers(call: MadeCall, find: FindFake) -> Spelling:
    return functools.partial(_form_powers, kind=call.results[0].dtype)


def _form_powers(
    given: Any,
    N: Any = None,  # noqa: N803
    increasing: bool = False,
    *,
    kind: torch.dtype,
) -> torch.Tensor:
    count = given.size(0)
    made: torch.Tensor = given.new_empty((count, count if N is None else N), dtype=kind)
    return made


def _look_at_covariance(call: MadeCall, find: FindFake) -> Spelling:
    return _form_covariance


def _form_covariance(given: Any, **how: Any) -> torch.Tensor:
    sides = (given.size(0),) * 2 if given.dim() == 2 else ()
    made: torch.Tensor = given.new_empty(sides)
    return made


_FORMS: dict[Callable[..., Any], Callable[[MadeCall, FindFake], Spelling | None]] = {
    **dict.fromkeys((torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu), _look_at_layers),
    **dict.fromkeys((torch.ctc_loss, functional.ctc_loss), _look_at_ctc),
    **dict.fromkeys((torch.linspace, torch.logspace), _look_at_steps),
    **dict.fromkeys((torch.tril_indices, torch.triu_indices), _look_at_triangle),
    torch.combinations: _look_at_pairs,
    torch.vander: _look_at_powers,
    **dict.fromkeys((torch.cov, torch.corrcoef), _look_at_covariance),
    **dict.fromkeys((torch.Tensor.cov, torch.Tensor.corrcoef), _look_at_covariance),
}


def _is_open_int(number: object) -> bool:
    return is_exactly(number, OpenInt) and not is_taken(number) and is_open_symbol(number.symbol)  # type: ignore[attr-defined]


def _are_equal(number: Any, size: Any) -> bool:
    """Whether they are always equal: nobody is asked."""
    symbol = number.symbol if is_exactly(number, OpenInt) else number
    return bool(expression_of(symbol) == expression_of(size))


_LOOKS: dict[Callable[..., Any], Callable[..., Spelling | None]] = {
    torch.linspace: _look_at_linspace,
    torch.logspace: _look_at_logspace,
    torch.fft.fftfreq: functools.partial(_look_at_frequencies, _spell_fftfreq),
    torch.fft.rfftfreq: functools.partial(_look_at_frequencies, _spell_rfftfreq),
    torch.hann_window: functools.partial(_look_at_window, _hann),
    torch.hamming_window: functools.partial(_look_at_window, _hamming),
    torch.blackman_window: functools.partial(_look_at_window, _blackman),
    torch.bartlett_window: functools.partial(_look_at_window, _bartlett),
    torch.kaiser_window: functools.partial(_look_at_window, _kaiser),
    torch._C._nn.one_hot: _look_at_one_hot,
    functional.max_pool1d: _look_at_max1,
    functional.max_pool2d: functools.partial(_look_at_pool, 2, _spell_max2),
    torch.avg_pool1d: functools.partial(_look_at_pool, 1, _spell_mean1),
    torch._C._nn.avg_pool2d: functools.partial(_look_at_pool, 2, _spell_mean2),
}
# Those that get no tensor, so that all of their arguments may be named.
_FACTORIES = frozenset(
    {torch.linspace, torch.logspace, torch.fft.fftfreq, torch.fft.rfftfreq}
    | {torch.hann_window, torch.hamming_window, torch.blackman_window}
    | {torch.bartlett_window, torch.kaiser_window}
)
