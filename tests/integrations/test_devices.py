"""The same programs on each device: plain and compiled see the same, and calls hit.

On a machine without a GPU these run on the CPU alone. On one with a GPU they also show what only
a GPU has: hooks in torch's own threads, generators, streams, values that must be waited for.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import checkpoint

import tripwire

pytestmark = pytest.mark.filterwarnings("ignore")  # Inductor's own, of a GPU

Compile = Callable[..., Any]
See = Callable[..., None]

FAST = ("eager", "aot_eager")
EAGER, AOT_EAGER, INDUCTOR = {"backend": "eager"}, {"backend": "aot_eager"}, {"backend": "inductor"}
GRAPHS = {"mode": "reduce-overhead"}
ON_CPU = {"eager": EAGER, "aot_eager": AOT_EAGER, "inductor": INDUCTOR}
ON_CUDA = {**ON_CPU, "graphs": GRAPHS} if torch.cuda.is_available() else {}
WHERE = [
    pytest.param(device, how, id=f"{device}-{name}", marks=[pytest.mark.slow] * (name not in FAST))
    for device, ways in (("cpu", ON_CPU), ("cuda", ON_CUDA))
    for name, how in ways.items()
]
PROGRAMS: list[Any] = []


def program(hits: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """At least so many calls of what it compiles must hit, behind each back end."""

    def add(body: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS.append(pytest.param(body, hits, id=body.__name__))
        return body

    return add


@pytest.mark.parametrize(("device", "how"), WHERE)
@pytest.mark.parametrize(("body", "hits"), PROGRAMS)
def test_a_program_is_the_same_compiled(
    body: Callable[..., Any], hits: int, how: dict[str, Any], device: str
) -> None:
    compiled: list[Any] = []

    def compile(fn: Callable[..., Any]) -> Any:
        compiled.append(tripwire.compile(fn, **how))
        return compiled[-1]

    with inductor_config.patch(fallback_random=True):  # else Inductor draws other numbers
        expected = _play(body, device, lambda fn: fn)
        try:
            got = _play(body, device, compile)
        except RuntimeError as error:
            if how is GRAPHS and "overwritten by a subsequent run" in str(error):
                pytest.skip("the program keeps results, whose memory CUDA graphs use again")
            raise
    assert len(got) == len(expected)
    for number, (one, other) in enumerate(zip(expected, got, strict=True)):
        told = functools.partial("{}: {}".format, number)
        torch.testing.assert_close(other, one, rtol=2e-3, atol=2e-3, msg=told)
    reports = [tripwire.explain(one) for one in compiled]
    assert sum(report.hits for report in reports) >= hits, "\n".join(map(str, reports))


def _play(body: Callable[..., Any], device: str, compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    seen: list[Any] = []

    def see(*values: Any) -> None:
        seen.extend(_copy(value) for value in values)

    body(device, compile, see)
    seen.append(torch.rand(2))
    seen.append(torch.rand(2, device=device))
    return seen


def _copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    value = value.detach().cpu()
    return value.clone() if value.is_complex() else value.to(torch.float32, copy=True)


def _net(device: str, *more: nn.Module, width: int = 16) -> nn.Sequential:
    first, last = nn.Linear(width, width), nn.Linear(width, width)
    return nn.Sequential(first, *more, nn.ReLU(), last).to(device)


def _rows(device: str, rows: int = 8, width: int = 16) -> torch.Tensor:
    return torch.randn(rows, width).to(device)


# --- training ---


@program(hits=6)
def a_step_with_dropout_and_batch_norm(device: str, compile: Compile, see: See) -> None:
    net = _net(device, nn.BatchNorm1d(16), nn.Dropout(0.3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    fast = compile(net)
    for _ in range(8):
        optimizer.zero_grad()
        loss = fast(_rows(device)).square().mean()
        loss.backward()
        optimizer.step()
        see(loss, *net.parameters(), *net.buffers())


@program(hits=5)
def a_whole_step_in_one_function(device: str, compile: Compile, see: See) -> None:
    net = _net(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    fast = compile(step)
    for _ in range(8):
        see(fast(_rows(device)), *net.parameters())


@program(hits=5)
def a_fused_optimizer_whose_rate_is_annealed(device: str, compile: Compile, see: See) -> None:
    net = _net(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    plan = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    fast = compile(optimizer.step)
    for _ in range(8):
        optimizer.zero_grad()
        net(_rows(device)).square().mean().backward()
        fast()
        plan.step()
        see(*net.parameters())


@program(hits=5)
def a_scaled_step_under_autocast(device: str, compile: Compile, see: See) -> None:
    net = _net(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            return net(x).float().square().mean()

    fast = compile(forward)
    for number in range(8):
        optimizer.zero_grad()
        x = _rows(device)
        scaler.scale(fast(x * (1e30 if number == 4 else 1))).backward()
        scaler.step(optimizer)
        scaler.update()
        see(scaler.get_scale(), *net.parameters())


@program(hits=4)
def a_step_that_skips_bad_batches(device: str, compile: Compile, see: See) -> None:
    net = _net(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor | None:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if not torch.isfinite(norm):
            return None
        optimizer.step()
        return loss

    fast = compile(step)
    for number in range(10):
        x = _rows(device)
        see(fast(x * (float("inf") if number in (3, 7) else 1)), *net.parameters())


@program(hits=5)
def a_checkpoint_with_dropout(device: str, compile: Compile, see: See) -> None:
    net = _net(device, nn.Dropout(0.5))
    fast = compile(lambda x: checkpoint(net, x, use_reentrant=False).square().sum())
    for _ in range(7):
        net.zero_grad()
        fast(_rows(device)).backward()
        see(*(p.grad for p in net.parameters()))


@program(hits=4)
def a_moving_average_of_weights(device: str, compile: Compile, see: See) -> None:
    net = _net(device)
    teacher = copy.deepcopy(net).requires_grad_(False)

    def update(rate: float) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(list(teacher.parameters()), list(net.parameters()), 1 - rate)

    fast = compile(update)
    for number in range(8):
        for p in net.parameters():
            p.data.add_(0.1)
        fast(1 - 1 / (number + 2))
        see(*teacher.parameters())


@program(hits=4)
def gradients_accumulate_and_are_read(device: str, compile: Compile, see: See) -> None:
    net = _net(device)

    def add(x: torch.Tensor) -> torch.Tensor:
        (net(x).square().mean() / 4).backward()
        return net[0].weight.grad.norm()

    fast = compile(add)
    for number in range(10):
        if number % 4 == 0:
            net.zero_grad()
        see(fast(_rows(device)))


# --- hooks and functions in backward, which a GPU runs in a thread of its own ---


@program(hits=0)
def a_backward_inside_runs_a_hook(device: str, compile: Compile, see: See) -> None:
    net, log, scale = _net(device), [], {"by": 1.0}

    def hook(grad: torch.Tensor) -> torch.Tensor:
        log.append(len(log))
        return grad * scale["by"]

    net[0].weight.register_hook(hook)

    def step(x: torch.Tensor) -> torch.Tensor:
        net.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return net[0].weight.grad + 0

    fast = compile(step)
    for number in range(6):
        scale["by"] = 1.0 + number // 2
        see(fast(_rows(device)), len(log))


@program(hits=3)
def a_backward_outside_runs_a_hook(device: str, compile: Compile, see: See) -> None:
    net, log, scale = _net(device), [], {"by": 1.0}

    def hook(grad: torch.Tensor) -> torch.Tensor:
        log.append(float(grad.sum()))
        return grad * scale["by"]

    net[0].weight.register_hook(hook)
    fast = compile(net)
    for number in range(6):
        net.zero_grad()
        loss = fast(_rows(device)).square().mean()
        scale["by"] = 1.0 + number // 2
        loss.backward()
        see(net[0].weight.grad, log)


class _Scaled(torch.autograd.Function):
    by = 2.0
    runs: list[int] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * _Scaled.by

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        _Scaled.runs.append(1)
        return grad * _Scaled.by * x.sign()


@program(hits=0)
def a_custom_function_counts_its_backwards(device: str, compile: Compile, see: See) -> None:
    _Scaled.by, _Scaled.runs = 2.0, []
    net = _net(device)
    fast = compile(lambda x: _Scaled.apply(net(x)).sum())
    for number in range(8):
        _Scaled.by = 2.0 + number // 4
        net.zero_grad()
        fast(_rows(device)).backward()
        see(net[0].weight.grad, len(_Scaled.runs))


@program(hits=0)
def a_custom_function_in_a_step_in_one_function(device: str, compile: Compile, see: See) -> None:
    _Scaled.by, _Scaled.runs = 2.0, []
    net = _net(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        net.zero_grad()
        loss = _Scaled.apply(net(x)).sum()
        loss.backward()
        return net[0].weight.grad + len(_Scaled.runs)

    fast = compile(step)
    for number in range(8):
        _Scaled.by = 2.0 + number // 4
        see(fast(_rows(device)), len(_Scaled.runs))


@program(hits=3)
def backwards_come_late_and_in_another_thread(device: str, compile: Compile, see: See) -> None:
    net = _net(device, nn.BatchNorm1d(16))
    fast = compile(net)
    for _ in range(5):
        net.zero_grad()
        first, second = fast(_rows(device)).sum(), fast(_rows(device)).square().sum()
        thread = threading.Thread(target=(first + second).backward)
        thread.start()
        thread.join()
        see(first, second, *(p.grad for p in net.parameters()))


# --- values decide ---


@program(hits=6)
def an_early_exit(device: str, compile: Compile, see: See) -> None:
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)).to(device)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        for number, layer in enumerate(layers):
            x = layer(x).relu()
            if x.norm() < 3:
                return x, number
        return x, None

    fast = compile(run)
    with torch.no_grad():
        for number in range(12):
            x, at = fast(_rows(device, 4, 64) * (10.0 if number % 3 == 0 else 1.0))
            see(x, at)


@program(hits=0)
def layers_that_random_numbers_drop(device: str, compile: Compile, see: See) -> None:
    layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2)).to(device)

    def run(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            if torch.rand((), device=device) < 0.5:
                x = F.dropout(layer(x), 0.5)
        return x + torch.rand(16, device=device)

    fast = compile(run)
    for _ in range(12):
        see(fast(_rows(device)))


@program(hits=0)
def a_state_that_is_written_before_a_decision(device: str, compile: Compile, see: See) -> None:
    total = torch.zeros(16, device=device)
    count = {"n": 0}

    def run(x: torch.Tensor) -> torch.Tensor:
        total.add_(x.mean(0))
        count["n"] += 1
        if (total.matmul(total) > 2.0).item():
            total.zero_()
            return x * 0
        return x + total

    fast = compile(run)
    for _ in range(12):
        see(fast(_rows(device)), total, count["n"])


@program(hits=6)
def lengths_out_of_tensors(device: str, compile: Compile, see: See) -> None:
    def run(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = x[:, : int(lengths.max())]
        mask = torch.arange(x.shape[1], device=x.device)[None] < lengths[:, None]
        return (x * mask[..., None]).sum(1) / lengths[:, None]

    fast = compile(run)
    for number in range(12):
        lengths = torch.randint(2, 5 + number, (3,)).to(device)
        see(fast(torch.randn(3, 20, 4).to(device), lengths))


@program(hits=5)
def rows_that_a_mask_picks(device: str, compile: Compile, see: See) -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        kept = x[x.sum(1) > 0]
        if len(kept) == 0:
            return x.mean(0), 0
        return kept.mean(0), len(kept)

    fast = compile(run)
    for _ in range(9):
        see(*fast(_rows(device)))


@program(hits=5)
def losses_kept_as_floats(device: str, compile: Compile, see: See) -> None:
    kept: list[float] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        loss = x.square().mean()
        value = loss.item()
        kept.append(value)
        return loss * value

    fast = compile(run)
    for _ in range(10):
        see(fast(_rows(device)), kept)


# --- caches, sizes, state ---


@program(hits=8)
def a_static_cache(device: str, compile: Compile, see: See) -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys = torch.zeros(1, 2, 16, 8, device=device)
            self.values = torch.zeros_like(self.keys)
            self.seen = 0

    query = nn.Linear(16, 48).to(device)

    def decode(x: torch.Tensor, cache: Cache, at: torch.Tensor) -> torch.Tensor:
        q, k, v = query(x).view(1, -1, 3, 2, 8).permute(2, 0, 3, 1, 4)
        cache.keys.index_copy_(2, at, k)
        cache.values.index_copy_(2, at, v)
        cache.seen += x.shape[1]
        mask = torch.arange(16, device=x.device)[None] <= at[:, None]
        return F.scaled_dot_product_attention(q, cache.keys, cache.values, attn_mask=mask)

    fast = compile(decode)
    with torch.no_grad():
        caches = [Cache(), Cache()]
        for number in range(12):
            cache = caches[number % 2]
            if number == 8:
                caches[0].keys.zero_()
            if number == 9:
                caches[1] = cache = Cache()
            at = torch.tensor([cache.seen], device=device)
            see(fast(torch.randn(1, 1, 16).to(device), cache, at), cache.keys, cache.seen)


@program(hits=8)
def a_growing_cache(device: str, compile: Compile, see: See) -> None:
    query = nn.Linear(16, 48).to(device)

    def decode(x: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None) -> Any:
        q, k, v = query(x).view(1, -1, 3, 2, 8).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        return F.scaled_dot_product_attention(q, k, v), (k, v)

    fast = compile(decode)
    with torch.no_grad():
        past = None
        for _ in range(14):
            out, past = fast(torch.randn(1, 1, 16).to(device), past)
            see(out, *past)


@program(hits=6)
def attention_over_several_lengths(device: str, compile: Compile, see: See) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).to(device)
    fast = compile(layer)
    for length in (3, 5, 7, 9, 4, 6, 8, 10, 11):
        layer.zero_grad()
        x = torch.randn(2, length, 16).to(device)
        out = fast(x)
        out.square().mean().backward()
        see(out, layer.linear1.weight.grad)


@program(hits=4)
def a_model_that_is_moved_and_cast(device: str, compile: Compile, see: See) -> None:
    net = _net(device)
    fast = compile(net)
    for number in range(9):
        if number == 3:
            net.cpu()
        if number == 5:
            net.to(device).double()
        if number == 7:
            net.float()
        weight = net[0].weight
        see(fast(_rows(device).to(weight.device, weight.dtype)))


@program(hits=6)
def calls_on_both_devices_in_turn(device: str, compile: Compile, see: See) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        factor = 2.0 if x.is_cuda else 3.0
        return x * factor + torch.ones(16, device=x.device)

    fast = compile(run)
    for number in range(10):
        see(fast(_rows(device if number % 2 else "cpu")))


@program(hits=5)
def results_that_go_to_the_cpu(device: str, compile: Compile, see: See) -> None:
    mean = torch.randn(16)

    def run(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, Any]:
        x = x.to(device, non_blocking=True)
        y = (x - mean.to(x.device)) * scale
        return y.cpu(), y.sum().cpu()

    fast = compile(run)
    for number in range(8):
        if number == 4:
            mean.add_(1)
        see(*fast(_rows("cpu"), torch.tensor(number + 1.0)))


@program(hits=5)
def a_generator_of_the_device(device: str, compile: Compile, see: See) -> None:
    drawn = torch.Generator(device).manual_seed(3)

    def run(x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape, generator=drawn, device=device) + torch.rand_like(x)

    fast = compile(run)
    for number in range(9):
        if number == 5:
            drawn.manual_seed(3)
        see(fast(_rows(device, 4 + number % 3)))


@program(hits=0)
def work_on_a_stream(device: str, compile: Compile, see: See) -> None:
    stream = torch.cuda.Stream() if device == "cuda" else None

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            if stream is not None:
                stream.wait_stream(torch.cuda.default_stream())
            z = y.matmul(y.T)
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
        return z + 1

    fast = compile(run)
    for _ in range(5):
        see(fast(_rows(device, 256, 256)))


@program(hits=4)
def flags_between_calls(device: str, compile: Compile, see: See) -> None:
    net = _net(device, width=64)
    fast = compile(net)
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for number in range(9):
            torch.backends.cuda.matmul.allow_tf32 = number // 3 == 1
            see(fast(_rows(device, 8, 64)))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@program(hits=6)
def recurrent_layers(device: str, compile: Compile, see: See) -> None:
    layer = nn.LSTM(16, 8, 2, batch_first=True).to(device)
    head = nn.Linear(8, 1).to(device)

    def run(x: torch.Tensor, state: Any) -> Any:
        out, state = layer(x, state)
        return head(out[:, -1]).mean(), tuple(s.detach() for s in state)

    fast = compile(run)
    state = None
    for _ in range(9):
        layer.zero_grad()
        loss, state = fast(torch.randn(2, 5, 16).to(device), state)
        loss.backward()
        see(loss, layer.weight_hh_l0.grad, *state)


@program(hits=5)
def convolutions_in_two_layouts(device: str, compile: Compile, see: See) -> None:
    first, last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
    net = nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), last).to(device)
    fast = compile(net)
    for number in range(10):
        net.zero_grad()
        x = torch.randn(2, 3, 12, 12).to(device)
        if number % 2:
            x = x.to(memory_format=torch.channels_last)
        out = fast(x)
        out.square().mean().backward()
        see(out, out.is_contiguous(memory_format=torch.channels_last), net[0].weight.grad)


@program(hits=5)
def spectra(device: str, compile: Compile, see: See) -> None:
    window = torch.hann_window(16, device=device)

    def run(x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.stft(x, 16, 8, window=window, return_complex=True)
        return torch.istft(spectrum * spectrum.abs().clamp(max=2), 16, 8, window=window)

    fast = compile(run)
    for number in range(8):
        see(fast(torch.randn(2, 64 + 16 * (number % 4)).to(device)))


@program(hits=6)
def threads_call_one_model(device: str, compile: Compile, see: See) -> None:
    net = _net(device).eval()
    fast = compile(net)
    inputs = [_rows(device) for _ in range(12)]
    with torch.no_grad():
        see(fast(inputs[0]), fast(inputs[0]))
    results: dict[int, torch.Tensor] = {}

    def work(begin: int) -> None:
        with torch.no_grad():
            for number in range(begin, 12, 3):
                results[number] = fast(inputs[number])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    see(*(results[number] for number in range(12)))


@program(hits=4)
def an_index_out_of_a_table(device: str, compile: Compile, see: See) -> None:
    alphas = torch.linspace(0.9, 0.1, 10)
    on_device = alphas.to(device)

    def run(x: torch.Tensor, t: int, when: torch.Tensor) -> torch.Tensor:
        return x * alphas[t] + on_device[when] * (1 - on_device[t]).sqrt()

    fast = compile(run)
    for t in range(9, 1, -1):
        see(fast(_rows(device, 4, 16), t, torch.tensor(t, device=device)))
