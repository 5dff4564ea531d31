"""Programs that were written for torch.compile find what they look for."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import threading

import pytest
import torch
from torch import nn

import tripwire
from tripwire.errors import BadOption, CannotTrace

compile_eager = functools.partial(tripwire.compile, backend="eager")
X = torch.ones(2, 3)


def plus(x, by=1.0):
    return x + by


# --- arguments ---


def test_compile_takes_what_the_installed_torch_compile_takes() -> None:
    theirs = inspect.signature(torch.compile).parameters
    ours = inspect.signature(tripwire.compile).parameters
    assert theirs.keys() <= ours.keys()
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind, name
        assert ours[name].default == parameter.default, name


def test_the_callable_may_be_given_by_name() -> None:
    compiled = tripwire.compile(model=plus, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(X), X + 1)
    assert compiled.statistics().hits == 2


def test_a_decorator_hands_every_option_on() -> None:
    given = {
        "fullgraph": True,
        "recompile_limit": 3,
        "cache_size": 5,
        "dynamic": False,
        "check": True,
    }
    made = tripwire.compile(backend="eager", **given)(plus)
    direct = tripwire.compile(plus, backend="eager", **given)
    assert made._dispatcher.options == direct._dispatcher.options


def test_recompile_limit_ends_new_entries_and_keeps_the_old(caplog) -> None:
    compiled = compile_eager(plus, recompile_limit=2, dynamic=False)
    for by in (1.0, 2.0, 3.0, 4.0, 1.0, 2.0):
        assert torch.equal(compiled(X, by), X + by)
    done = compiled.statistics()
    assert (done.traces, done.hits, done.entries) == (2, 2, 2)
    assert caplog.text.count("[recompile-limit]") == 1


def test_recompile_limit_raises_with_fullgraph() -> None:
    compiled = compile_eager(plus, recompile_limit=1, fullgraph=True, dynamic=False)
    compiled(X, 1.0)
    with pytest.raises(CannotTrace) as raised:
        compiled(X, 2.0)
    assert raised.value.slug == "recompile-limit"
    assert torch.equal(compiled(X, 1.0), X + 1)


def test_replacing_with_an_unknown_option_is_an_error_at_once() -> None:
    with (
        pytest.raises(TypeError, match="backened"),
        tripwire.replacing_torch_compile(backened="eager"),
    ):
        pass
    assert torch.compile is not tripwire.compile


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(BadOption):
        compile_eager(plus, recompile_limit=0)


def test_a_filter_of_dynamos_guards_changes_nothing(caplog) -> None:
    options = {"guard_filter_fn": lambda guards: [False for _ in guards]}
    compiled = compile_eager(plus, options=options, dynamic=False)
    assert torch.equal(compiled(X, 1.0), X + 1)
    assert torch.equal(compiled(X, 5.0), X + 5)
    assert "guard_filter_fn" in caplog.text
    assert list(options) == ["guard_filter_fn"]


def test_the_default_back_end_is_what_torch_was_told(monkeypatch) -> None:
    import torch._dynamo

    monkeypatch.delenv("TRIPWIRE_BACKEND", raising=False)

    seen = []

    def own(module, inputs):
        seen.append(module)
        return module.forward

    torch.compiler.set_default_backend(own)
    try:
        compiled = tripwire.compile(plus)
    finally:
        torch.compiler.set_default_backend(None)
    compiled(X)
    assert len(seen) == 1


# --- modules ---


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.scale = 2.0

    def forward(self, x):
        return self.inner(x) * self.scale


def test_orig_mod_is_the_original() -> None:
    net = Net()
    compiled = compile_eager(net)
    assert compiled._orig_mod is net
    assert list(compiled.state_dict()) == list(net.state_dict())
    assert not hasattr(net, "_orig_mod")
    assert compiled._orig_mod.inner is compiled.inner


def test_orig_mod_can_be_set_to_what_it_is_and_to_nothing_else() -> None:
    net = Net()
    compiled = compile_eager(net)
    compiled._orig_mod = net
    with pytest.raises(AttributeError, match="_orig_mod"):
        compiled._orig_mod = Net()
    assert [name for name, _ in net.named_modules()] == ["", "inner"]
    compiled.scale = 3.0
    assert net.scale == 3.0


@pytest.mark.parametrize("target", [Net(), plus], ids=["module", "function"])
def test_what_is_compiled_is_compiled_again_with_the_options_of_now(target) -> None:
    first = compile_eager(target)
    first(X)
    again = compile_eager(first, fullgraph=True)
    for _ in range(3):
        assert torch.equal(again(X), target(X))
    assert (again.statistics().traces, again.statistics().hits) == (1, 2)
    assert first.statistics().calls == 1
    assert again._dispatcher.target is target if target is plus else again._orig_mod is target


def test_a_slice_of_a_compiled_sequential_has_no_original() -> None:
    part = compile_eager(nn.Sequential(nn.ReLU(), nn.Tanh()))[:1]
    assert not hasattr(part, "_orig_mod")


@pytest.mark.parametrize("calls", [3])
def test_a_class_is_decorated_and_stays_a_class(calls) -> None:
    @compile_eager
    class Decorated(Net):
        pass

    assert isinstance(Decorated, type)
    nets = [Decorated(), Decorated()]
    nets[1].scale = 3.0
    for _ in range(calls):
        for net in nets:
            assert isinstance(net, Decorated)
            assert torch.equal(net(X), net.inner(X) * net.scale)
    nets[0].scale = 5.0
    assert torch.equal(nets[0](X), nets[0].inner(X) * 5.0)
    for net in nets:
        assert net._compiled_call_impl.statistics().hits == 2
        copied = copy.deepcopy(net)
        assert torch.equal(copied(X), net(X))


def test_a_decorated_class_inside_a_compiled_module_is_part_of_its_trace() -> None:
    decorated = compile_eager(type("Decorated", (Net,), {}))
    outer = nn.Sequential(decorated(), nn.ReLU())
    compiled = compile_eager(outer)
    for _ in range(3):
        assert torch.equal(compiled(X), outer[1](Net.forward(outer[0], X)))
    assert compiled.statistics().hits == 2
    assert outer[0]._compiled_call_impl is None


def test_a_class_of_callables_is_decorated() -> None:
    @compile_eager
    class Adder:
        def __init__(self, by):
            self.by = by

        def __call__(self, x):
            return x + self.by

    adder = Adder(2.0)
    for _ in range(3):
        assert torch.equal(adder(X), X + 2)
    adder.by = 3.0
    assert torch.equal(adder(X), X + 3)
    assert Adder.__call__.statistics().hits >= 1


def test_what_is_compiled_in_place_can_be_asked_like_what_compile_returned() -> None:
    @compile_eager
    class Adder:
        def __call__(self, x):
            return x + 1

    class Box:
        @compile_eager
        def add(self, x):
            return x + 1

    module, decorated = Net(), compile_eager(type("Decorated", (Net,), {}))()
    with tripwire.replacing_torch_compile():
        module.compile(backend="eager")
    for compiled in (module, decorated, Adder(), Box().add):
        for _ in range(3):
            compiled(X)
        assert (tripwire.statistics(compiled).traces, tripwire.statistics(compiled).hits) == (1, 2)
        assert tripwire.explain(compiled).hits == 2
    for plain in (Net(), plus, 3):
        with pytest.raises(BadOption, match="not-compiled"):
            tripwire.statistics(plain)


def test_a_class_without_call_is_refused() -> None:
    with pytest.raises(BadOption) as raised:
        compile_eager(type("Plain", (), {}))
    assert raised.value.slug == "not-callable"


# --- stances ---


@pytest.fixture
def stance():
    yield lambda *args, **kwargs: torch.compiler.set_stance(*args, **kwargs)
    torch.compiler.set_stance("default")


def test_force_eager_runs_plain_python_and_keeps_what_is_compiled(stance) -> None:
    seen = []

    def noted(x):
        seen.append(None)
        return x + 1

    compiled = compile_eager(plus)
    compiled(X)
    fresh = compile_eager(noted)
    with stance("force_eager"):
        for _ in range(3):
            assert torch.equal(compiled(X), X + 1)
            assert torch.equal(fresh(X), X + 1)
    assert (compiled.statistics().hits, fresh.statistics().traces) == (0, 0)
    assert compiled.statistics().calls == 4
    compiled(X)
    assert compiled.statistics().hits == 1


def test_eager_on_recompile_uses_what_is_compiled_and_makes_nothing_new(stance) -> None:
    compiled = compile_eager(plus, dynamic=False)
    compiled(X, 1.0)
    with stance("eager_on_recompile"):
        assert torch.equal(compiled(X, 1.0), X + 1)
        assert torch.equal(compiled(X, 2.0), X + 2)
    done = compiled.statistics()
    assert (done.hits, done.traces) == (1, 1)
    assert torch.equal(compiled(X, 2.0), X + 2)
    assert compiled.statistics().traces == 2


def test_fail_on_recompile_raises_with_the_reason(stance) -> None:
    compiled = compile_eager(plus, dynamic=False)
    compiled(X, 1.0)
    with stance("fail_on_recompile"):
        assert torch.equal(compiled(X, 1.0), X + 1)
        with pytest.raises(CannotTrace, match="by") as raised:
            compiled(X, 2.0)
    assert raised.value.slug == "fail-on-recompile"


def test_a_forced_back_end_has_entries_of_its_own(stance) -> None:
    used = []

    def own(module, inputs):
        used.append("made")
        return lambda *args: used.append("ran") or module.forward(*args)

    compiled = compile_eager(plus)
    for _ in range(2):
        compiled(X)
    with stance(force_backend=own):
        for _ in range(3):
            assert torch.equal(compiled(X), X + 1)
    assert used == ["made", "ran", "ran"]
    compiled(X)
    assert compiled.statistics().hits == 2


def test_a_stance_holds_for_modules_and_inner_dispatchers(stance) -> None:
    compiled = compile_eager(Net())
    with stance("force_eager"):
        compiled(X)
    assert compiled.statistics().traces == 0
    compiled(X)
    assert compiled.statistics().traces == 1


# --- reset ---


@pytest.mark.parametrize("how", ["tripwire", "torch"])
def test_reset_forgets_what_was_compiled(how) -> None:
    import torch._dynamo

    compiled, net = compile_eager(plus), compile_eager(Net())
    for _ in range(2):
        compiled(X), net(X)
    tripwire.reset() if how == "tripwire" else torch.compiler.reset()
    for made in (compiled, net):
        assert made.statistics().entries == made.statistics().calls == 0
        made(X)
        assert made.statistics().traces == 1
        made(X)
        assert made.statistics().hits == 1
    torch.compiler.reset()
    assert compiled.statistics().calls == 0


def test_a_reset_while_code_runs_leaves_the_call_alone() -> None:
    def resetting(x):
        y = x + 1
        if torch.is_grad_enabled():
            tripwire.reset()
        return y * 2

    compiled = compile_eager(resetting)
    for _ in range(3):
        assert torch.equal(compiled(X), (X + 1) * 2)


# --- torch.compile replaced ---


def test_a_librarys_torch_compile_is_ours_while_replaced() -> None:
    before, code = torch.compile, torch.compile.__code__
    imported = torch.compile  # as `from torch import compile` has it
    with tripwire.replacing_torch_compile():
        made = torch.compile(plus, backend="eager")
        decorated = imported(backend="eager", dynamic=False)(plus)
        through = torch.compiler.compile(plus, backend="eager")
        net = Net()
        net.compile(backend="eager")
    assert torch.compile is before
    assert torch.compile.__code__ is code
    for compiled in (made, decorated, through, net._compiled_call_impl):
        assert isinstance(compiled, type(compile_eager(plus)))
    for _ in range(3):
        assert torch.equal(net(X), net.inner(X) * 2.0)
    assert net._compiled_call_impl.statistics().hits == 2
    assert "tripwire" not in type(torch.compile(plus)).__module__


def test_replacing_nests_is_undone_after_an_error_and_takes_options() -> None:
    code = torch.compile.__code__
    with pytest.raises(ZeroDivisionError):
        with tripwire.replacing_torch_compile(backend="eager"):
            with tripwire.replacing_torch_compile(backend="eager", fullgraph=True):
                assert torch.compile(plus, mode=None)._dispatcher.options.fullgraph
            assert not torch.compile(plus)._dispatcher.options.fullgraph
            1 / 0
    assert torch.compile.__code__ is code


def test_an_option_that_tripwire_does_not_know_is_left_out(caplog) -> None:
    with tripwire.replacing_torch_compile():
        compiled = torch.compile(plus, backend="eager", of_tomorrow=1)
    assert torch.equal(compiled(X), X + 1)
    assert "of_tomorrow" in caplog.text


def test_other_threads_find_the_replacement_too() -> None:
    made = []
    with tripwire.replacing_torch_compile():
        thread = threading.Thread(target=lambda: made.append(torch.compile(plus, backend="eager")))
        thread.start()
        thread.join()
    assert torch.equal(made[0](X), X + 1)
    assert made[0].statistics().traces + made[0].statistics().refusals >= 0


def test_what_torch_compiles_for_itself_stays_torchs() -> None:
    path = torch.nn.attention.__file__
    scope = {"torch": torch, "plus": plus}
    own = compile("made = torch.compile(plus, backend='eager')", path, "exec")
    with tripwire.replacing_torch_compile():
        exec(own, scope)
    assert not hasattr(scope["made"], "statistics")


def test_a_compiled_module_in_pickles_has_its_original() -> None:
    net = pickle.loads(pickle.dumps(compile_eager(Net())))
    assert torch.equal(net(X), net._orig_mod(X))


def test_partials_are_compiled_and_follow_what_they_bind() -> None:
    bound = functools.partial(plus, by=2.0)
    compiled = compile_eager(bound)
    for _ in range(3):
        assert torch.equal(compiled(X), X + 2)
    assert torch.equal(compiled(X, by=4.0), X + 4)
    assert compiled.statistics().hits == 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_dynamo_is_to_leave_alone_is_compiled_as_any_other_function(backend) -> None:
    @torch._dynamo.disable
    def left_alone(x):
        return x * SCALE["by"]

    compiled = tripwire.compile(lambda x: left_alone(x) + 1, backend=backend)
    for by in (2.0, 2.0, 3.0, 3.0):
        SCALE["by"] = by
        for _ in range(3):
            torch.testing.assert_close(compiled(torch.ones(2)), torch.ones(2) * by + 1)
    assert compiled.statistics().hits >= 9


SCALE = {"by": 2.0}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_backward_inside_is_compiled_or_runs_between_compiled_parts(backend) -> None:
    net, twin = nn.Linear(3, 3), nn.Linear(3, 3)
    twin.load_state_dict(net.state_dict())

    def step(model):
        def run(x):
            loss = model(x).sin().sum()
            loss.backward()
            return loss.detach()

        return run

    compiled, plain = tripwire.compile(step(net), backend=backend), step(twin)
    for size in (2, 2, 2, 2):
        x = torch.ones(size, 3)
        torch.testing.assert_close(compiled(x), plain(x))
        torch.testing.assert_close(net.weight.grad, twin.weight.grad)
    assert (compiled.statistics().traces, compiled.statistics().hits) == (1, 3)
