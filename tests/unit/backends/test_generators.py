"""A call draws from the torch.Generator that it is given, also in code out of a cache."""

from __future__ import annotations

import _thread
import threading

import pytest
import torch
from torch._inductor import compile_fx

import tripwire
from tripwire.backends import handover

DRAWS = {
    "randn": lambda x, g: torch.randn(4, generator=g) + x,
    "randn_like": lambda x, g: torch.randn_like(x, generator=g) + x,
    "rand, then computed with": lambda x, g: (torch.rand(4, generator=g) * x).relu() * 2,
    "randint": lambda x, g: torch.randint(9, (4,), generator=g) + x,
    "randperm": lambda x, g: x[torch.randperm(4, generator=g)],
    "bernoulli": lambda x, g: torch.bernoulli(x.sigmoid(), generator=g) * x,
    "normal of a tensor": lambda x, g: torch.normal(x, 1.0, generator=g),
    "normal_ in place": lambda x, g: x.clone().normal_(generator=g) + x,
    "uniform_ of a part": lambda x, g: torch.cat([x[:2].clone().uniform_(generator=g), x]),
    "multinomial": lambda x, g: torch.multinomial(x.sigmoid(), 2, generator=g) * 2,
    "two of them": lambda x, g: torch.rand(4, generator=g) * x + torch.randn(4, generator=g),
}


def play(draw, backend) -> list[torch.Tensor]:
    held = {"generator": torch.Generator().manual_seed(1)}

    def call(x):
        return draw(x, held["generator"])

    compiled = call if backend is None else tripwire.compile(call, backend=backend)
    torch.manual_seed(0)
    seen = []
    for seed in (5, 6, 1):
        for _ in range(3):
            seen.append(compiled(torch.arange(4.0)))
            seen.append(held["generator"].get_state())
        held["generator"] = torch.Generator().manual_seed(seed)
    if backend is not None:
        assert tripwire.statistics(compiled).hits >= 6
    return [*seen, torch.get_rng_state()]


def check(name: str, backend: str) -> None:
    expected = play(DRAWS[name], None)
    torch.testing.assert_close(play(DRAWS[name], backend), expected)
    # The same graph again: its code comes from the back end's cache.
    torch.testing.assert_close(play(DRAWS[name], backend), expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", DRAWS)
def test_a_call_draws_from_the_generator_that_it_is_given(name, backend) -> None:
    check(name, backend)


@pytest.mark.parametrize("name", ["randn", "bernoulli", "two of them"])
def test_code_out_of_inductors_cache_draws_from_it_too(name) -> None:
    check(name, "inductor")


def test_the_line_that_draws_is_told(caplog) -> None:
    play(DRAWS["rand, then computed with"], "aot_eager")
    assert "draws from a torch.Generator" in caplog.text


@pytest.fixture
def running():
    """Starts threads, which end with the test."""
    over, threads = threading.Event(), []

    def start(owner: str) -> None:
        def target() -> None:
            over.wait()

        target.__module__ = owner
        threads.append(threading.Thread(target=target))
        threads[-1].start()

    yield start
    over.set()
    for thread in threads:
        thread.join()


def draws_while_compiling(monkeypatch) -> bool:
    """Whether what Inductor draws to time kernels shows in the program's own numbers."""
    whole = compile_fx._compile_fx_inner

    def timing(*args, **kwargs):
        torch.rand(3)
        return whole(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "_compile_fx_inner", timing)
    torch.manual_seed(3)
    compiled = tripwire.compile(lambda x: x.sin() * 2, backend="inductor")
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled(torch.randn(2, 3))
        compiled(torch.randn(2, 3))
    got = torch.rand(2)
    torch.manual_seed(3)
    torch.randn(2, 2, 3)
    return not torch.equal(got, torch.rand(2))


@pytest.mark.parametrize("owner", [None, "torch._inductor.compile_worker.subproc_pool", "tqdm._m"])
def test_numbers_that_inductor_draws_are_not_the_programs(owner, running, monkeypatch) -> None:
    if owner is not None:
        running(owner)
    assert not draws_while_compiling(monkeypatch)


def test_generators_are_left_alone_beside_a_thread_of_the_programs(running, monkeypatch) -> None:
    running("server")
    assert draws_while_compiling(monkeypatch)


@pytest.mark.parametrize("has_dummy", [False, True])
def test_a_thread_that_python_doesnt_know_compiles_for_one_that_waits(has_dummy) -> None:
    """So does autograd on a GPU."""
    told, done = [], threading.Event()

    def ask() -> None:
        if has_dummy:
            threading.current_thread()  # so does logging
        told.append(handover._may_draw_elsewhere())
        done.set()

    _thread.start_new_thread(ask, ())
    assert done.wait(10)
    assert told == [False]
    assert not handover._may_draw_elsewhere()
