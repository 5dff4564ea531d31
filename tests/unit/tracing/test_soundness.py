"""Cases in which a tracer could be silently wrong: each is right, refused, or a branch."""

import collections
import contextlib
import copy
import enum
import functools
import gc
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
from support import check_same, check_traces, quiet_trace, refusal_of
from torch import nn
from torch.utils import _pytree as pytree

import tripwire
from tripwire import CannotTrace, InputMismatch
from tripwire.tracing.observe import Observer


def ones():
    return torch.ones(3)


X = torch.tensor([1.0, 2.0, 3.0])
Y = torch.tensor([4.0, 5.0, 6.0])


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


class Bag:
    pass


def function(forward, backward=lambda ctx, grad: grad):
    space = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Custom", (torch.autograd.Function,), space)


# --- arguments that aren't tensors --------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "traced", "called"),
    [
        (lambda x, m: x * 2 if m is Mode.FAST else x * 3, Mode.FAST, Mode.SLOW),
        (lambda x, s: x[s], slice(0, 2), slice(1, 3)),
        (lambda x, g: g(x), torch.neg, torch.abs),
        (lambda x, a: x + torch.tensor(a), np.ones(3, "f"), np.zeros(3, "f")),
        (lambda x, a: x * float(a), np.float64(1), np.float64(2)),
        (lambda x, s: x * len(s), {1}, {1, 2}),
        (lambda x, b: x * b[0], bytearray(b"a"), bytearray(b"b")),
        (lambda x, m: m(x), nn.Hardtanh(-1, 1), nn.Hardtanh(-9, 9)),
        (lambda x, c: c(2.0) * x, float, int),
    ],
)
def test_other_plain_arguments_are_refused(fn, traced, called) -> None:
    trace = quiet_trace(fn, X, traced)
    check_same(fn(Y, traced), trace(Y, traced))
    with pytest.raises(InputMismatch):
        trace(Y, called)


def test_equal_plain_arguments_are_accepted() -> None:
    def f(x, s, a, names):
        return x[s] * float(a.sum()) * len(names)

    trace = quiet_trace(f, X, slice(0, 2), np.ones(2), {"a", "b"})
    check_same(
        f(Y, slice(0, 2), np.ones(2), {"b", "a"}), trace(Y, slice(0, 2), np.ones(2), {"b", "a"})
    )


def test_two_inputs_may_not_become_one() -> None:
    trace = quiet_trace(lambda a, b: a.add_(1) + b, ones(), ones())
    x = ones()
    with pytest.raises(InputMismatch) as caught:
        trace(x, x)
    assert caught.value.slug == "input-alias"


def test_strides_count_where_a_call_may_return_its_argument() -> None:
    def f(x):
        y = x.contiguous()
        x.add_(1)
        return y

    trace = quiet_trace(f, torch.zeros(2, 3))
    with pytest.raises(InputMismatch, match="strides"):
        trace(torch.zeros(3, 2).t())
    free = quiet_trace(lambda x: x * 2, torch.zeros(2, 3))
    assert free(torch.zeros(3, 2).t()).shape == (2, 3)


def test_requires_grad_counts_where_it_was_read() -> None:
    trace = quiet_trace(lambda x: x * 2 if x.requires_grad else x * 3, ones())
    with pytest.raises(InputMismatch, match="requires grad"):
        trace(ones().requires_grad_())
    free = quiet_trace(lambda x: x * 2, ones())
    assert free(ones().requires_grad_()).requires_grad


Batch = collections.namedtuple("Batch", "X Y")


def test_attribute_names_are_not_taken_for_globals() -> None:
    trace = quiet_trace(lambda batch: batch.X * 2, Batch(X, Y))
    check_same(Y * 2, trace(Batch(Y, Y.clone())))


class WithDefault:
    def method(self, value, reference=X):
        return value - reference


def test_a_default_of_a_method_that_is_also_the_argument_is_noticed() -> None:
    trace = quiet_trace(lambda v, obj: obj.method(v), X, holder := WithDefault())
    with pytest.raises(InputMismatch):
        trace(Y, holder)


def test_a_tensors_own_method_knows_its_tensor() -> None:
    trace = quiet_trace(X.add, Y)
    check_same(X + X, trace(X.clone()))
    with pytest.raises(InputMismatch):
        quiet_trace(X.add, X)(Y)


def test_wrappers_may_have_another_signature() -> None:
    def inner(x, scale):
        return x * scale

    @functools.wraps(inner)
    def outer(x):
        return inner(x, 2.0)

    check_same(Y * 2, quiet_trace(outer, X)(Y))


def test_arguments_may_contain_themselves() -> None:
    loop = [X]
    loop.append(loop)
    check_same(X * 2, quiet_trace(lambda items: items[0] * 2, loop).result)


# --- results ------------------------------------------------------------------------------------


class SubDict(dict):
    pass


class SubList(list):
    pass


class Slots:
    __slots__ = ("y",)


def nested_slots(x):
    bag, slots = Bag(), Slots()
    slots.y = x * 2
    bag.inner = slots
    return bag


class Callable_:
    def __call__(self):
        return None


def callable_object(x):
    made = Callable_()
    made.y = x * 2
    return made


@pytest.mark.parametrize(
    "make",
    [
        lambda x: SubDict(y=x * 3),
        lambda x: SubList([x * 3]),
        lambda x: collections.Counter({"y": x * 3}),
    ],
)
def test_subclasses_of_containers_are_built_anew(make) -> None:
    trace = quiet_trace(make, torch.ones(2))
    for scale in (1, 2):
        made, plain = trace(torch.ones(2) * scale), make(torch.ones(2) * scale)
        assert type(made) is type(plain)
        assert str(made) == str(plain)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: (x, functools.partial(torch.neg, x * 3)),
        lambda x: {x * 2: x},
        lambda x: (x, (lambda y: lambda: y)(x * 3)),
    ],
)
def test_results_that_would_keep_the_runs_own_tensors_are_refused(make) -> None:
    assert refusal_of(make, X) == "unbuildable-result"


def test_objects_in_objects_are_built_anew() -> None:
    assert quiet_trace(nested_slots, X)(Y).inner.y.tolist() == [8, 10, 12]
    assert quiet_trace(callable_object, X)(Y).y.tolist() == [8, 10, 12]


class Pair:
    def __init__(self, a, b):
        self.a, self.b = a, b


pytree.register_pytree_node(
    Pair, lambda p: ([[p.a], [p.b]], None), lambda c, _: Pair(c[0][0], c[1][0])
)


def test_temporaries_of_pytree_are_not_taken_for_one_object() -> None:
    got = quiet_trace(lambda x: [Pair(x, x * 2), Pair(x * 3, x * 4)], X)(Y)
    assert [(p.a[0].item(), p.b[0].item()) for p in got] == [(4, 8), (12, 16)]


def test_an_input_that_the_run_changed_is_no_result() -> None:
    def f(x, store):
        store["y"] = x * 2
        return store

    assert refusal_of(f, X, {}) == "unbuildable-result"


# --- code that runs inside a call ---------------------------------------------------------------


def test_a_custom_function_that_closes_over_the_run_is_refused() -> None:
    def f(x):
        weight = x.sum()
        return function(lambda ctx, a: a * weight).apply(x)

    assert refusal_of(f, X) == "opaque-object"


def test_an_object_with_tensors_given_to_a_custom_function_is_refused() -> None:
    def f(x):
        bag = Bag()
        bag.w = x.sum()
        return function(lambda ctx, a, o: a * o.w, lambda ctx, g: (g, None)).apply(x, bag)

    assert refusal_of(f, X) == "opaque-object"


def test_numbers_beside_tensors_are_branches() -> None:
    both = function(lambda ctx, a: (a * 2, int(a.sum())), lambda ctx, g, _: g)

    def f(x):
        y, n = both.apply(x)
        return y * n

    assert [b.value for b in quiet_trace(f, X).branches] == [(2, 6)]


def test_sizes_from_opaque_calls_are_branches() -> None:
    @torch.jit.script
    def scripted(x):
        return x[x > 2]

    trace = quiet_trace(lambda x: x * scripted(x).shape[0], X)
    assert [b.op for b in trace.branches] == ["shape"]


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        if a.sum() < 10:
            raise ValueError
        return a * 2

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_a_caught_failure_of_a_custom_function_is_refused() -> None:
    def f(x):
        try:
            return Failing.apply(x)
        except ValueError:
            return x * 0

    assert refusal_of(f, X) == "caught-exception"


# --- writes that nothing records ----------------------------------------------------------------


def in_thread(x):
    total = torch.zeros(3)
    thread = threading.Thread(target=total.add_, args=(x,))
    thread.start()
    thread.join()
    return total * 1


def real_part(x):
    z = torch.complex(x, x)
    z.real = x * 5
    return z * 1


def without_torch_function(x):
    total = torch.zeros(3)
    with torch._C.DisableTorchFunction():
        total.add_(x)
    return total


@pytest.mark.parametrize("fn", [in_thread, real_part, without_torch_function])
def test_unseen_writes_are_refused(fn) -> None:
    assert refusal_of(fn, X) == "unseen-write"


class Scripted(nn.Module):
    def forward(self, x):
        x.add_(1)
        return x


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_refused() -> None:
    module = torch.jit.script(Scripted())
    assert refusal_of(lambda x: module(x), ones()) == "scripted-module"


def test_writes_to_shared_memory_that_are_recorded_are_no_unseen_writes() -> None:
    def f(x):
        y = x * 2
        view = y[1:]
        y.add_(1)
        view.mul_(2)
        other = y.detach()
        other[0] = 7.0
        return y + view.sum() + other

    check_traces(f, lambda s: (X * s,))


def test_the_first_gradient_is_a_branch() -> None:
    def step(w, x):
        if w.grad is not None:
            w.grad = None
        (w * x).sum().backward()
        return w.grad.clone()

    trace = quiet_trace(step, ones().requires_grad_(), X)
    assert [(b.op, b.value) for b in trace.branches] == [("grad", None)]


# --- gradients ----------------------------------------------------------------------------------


def test_backward_hooks_are_refused_unless_no_gradient_is_wanted() -> None:
    for register in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        layer = nn.Linear(3, 1)
        getattr(layer, register)(lambda *a: None)
        assert refusal_of(layer, X) == "backward-hook"
        with torch.no_grad():
            quiet_trace(layer, X)


def test_hooks_on_the_autograd_graph_are_refused() -> None:
    def on_grad_fn(x):
        y = x * 2
        y.grad_fn.register_hook(lambda *a: None)
        return y

    def on_saved(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return x.sin()

    assert refusal_of(on_grad_fn, ones().requires_grad_()) == "autograd-graph"
    assert refusal_of(on_saved, ones().requires_grad_()) == "backward-hook"


# --- torch's state ------------------------------------------------------------------------------


def default_dtype(x):
    torch.set_default_dtype(torch.float64)
    y = torch.ones(3)
    torch.set_default_dtype(torch.float32)
    return x + y


def reseeded(x):
    torch.default_generator.manual_seed(123)
    return torch.rand(3) + x


def dispatch_mode(x):
    from torch.utils._python_dispatch import TorchDispatchMode

    class AddOne(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with AddOne():
        return x * 2


@pytest.mark.parametrize(
    ("fn", "slug"),
    [
        (default_dtype, "torch-state-changed"),
        (reseeded, "generator-reseeded"),
        (dispatch_mode, "dispatch-mode"),
    ],
)
def test_state_set_and_restored_inside_is_refused(fn, slug) -> None:
    with torch.random.fork_rng():
        assert refusal_of(fn, X) == slug


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_fast_paths_of_torch_are_taken_as_in_eager() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).eval()
    mask = torch.zeros(1, 4, dtype=torch.bool)
    mask[0, 2:] = True

    @torch.no_grad()
    def f(x):
        return encoder(x, src_key_padding_mask=mask)

    x = torch.rand(1, 4, 8)
    trace = quiet_trace(f, x)
    check_same(f(x), trace.result)
    check_same(f(x * 2), trace(x * 2))


def test_a_patch_of_the_users_on_module_calls_stays_in_force(monkeypatch) -> None:
    plain = nn.Module.__call__
    monkeypatch.setattr(nn.Module, "__call__", lambda self, *a, **k: plain(self, *a, **k) * 10)
    layer = nn.Identity()
    check_same(X * 10, quiet_trace(layer, X).result)


def test_a_failed_graph_leaves_inference_mode_though_the_error_is_kept() -> None:
    embedding = nn.Embedding(5, 3)

    def f(i):
        with torch.inference_mode():
            y = embedding(i) * 2
        return y.clone()

    trace = quiet_trace(f, torch.tensor([1, 2]))
    with pytest.raises(IndexError) as kept:
        trace(torch.tensor([1, 99]))
    assert not torch.is_inference_mode_enabled()
    assert kept.value is not None


# --- data-dependent sizes -----------------------------------------------------------------------


def data_replaced(x):
    y = x.clone()
    y.data = x[x > 1]
    return x * len(y)


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda x, k: x * len(x.topk(k)[0]), (X, torch.tensor(2))),
        (lambda x: x * len(torch.repeat_interleave(x.long())), (X,)),
        (lambda x, n: x * len(x[:n]), (X, torch.tensor([2]))),
        (lambda x, k: x * len(torch.diag(x, k)), (X, torch.tensor(1))),
        (lambda x, n: x * len(torch.hann_window(n)), (X, torch.tensor(4))),
        (
            lambda x: (x.data.__class__, b := x.clone(), setattr(b, "data", x[x > 1]), x * len(b))[
                3
            ],
            (X,),
        ),
    ],
)
def test_sizes_given_as_tensors_are_branches(fn, args) -> None:
    assert quiet_trace(fn, *args).branches


# --- copies, effects, leaks ---------------------------------------------------------------------


def test_deepcopy_of_shared_memory_is_refused() -> None:
    def f(x):
        a, b = copy.deepcopy((x, x[:1]))
        a.add_(1)
        return b

    assert refusal_of(f, X) == "tensor-memory"


class Rewriter(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = float("0.5")
        self.kept = torch.ones(2)

    def forward(self, x):
        for _ in range(4):
            self.rate = self.rate + 1.5
            self.kept = self.kept * 2
        return x + 1


def test_effects_are_told_though_identities_come_again() -> None:
    for _ in range(30):
        written = {str(effect) for effect in quiet_trace(Rewriter(), X).effects}
        assert written == {"L['self'].rate", "L['self'].kept"}


def test_lazy_modules_must_be_called_before() -> None:
    layer = nn.LazyLinear(2)
    assert refusal_of(layer, X) == "lazy-parameter"
    fresh = nn.LazyLinear(2)
    fresh(X)
    check_same(fresh(Y), quiet_trace(fresh, X)(Y))


def test_names_and_numbers_that_fx_cant_spell() -> None:
    def f(x):
        self = x * complex(float("nan"), 1)
        return torch.view_as_real(self) + 1

    check_traces(f, lambda s: (X * s,), grads=False)


def test_a_function_that_calls_a_trace_can_be_traced() -> None:
    inner = quiet_trace(lambda x: x * 2, X)
    assert quiet_trace(lambda x: inner(x) + 1, X).effects == ()


def test_custom_functions_made_in_a_loop_are_not_kept() -> None:
    refs = []

    def f(x):
        made = function(lambda ctx, a: a * 2)
        refs.append(weakref.ref(made))
        return made.apply(x)

    for _ in range(5):
        quiet_trace(f, X)
    import gc

    gc.collect()
    assert not any(ref() is not None for ref in refs)


def test_a_trace_inside_a_custom_function_is_a_nested_trace() -> None:
    nested = function(lambda ctx, a: tripwire.trace(torch.sin, a).result)
    with pytest.raises(tripwire.CannotTrace) as caught:
        quiet_trace(lambda x: nested.apply(x), X)
    assert caught.value.slug == "nested-trace"


# --- metadata, paths, results: found by review ----------------------------------------------------


def test_an_unseen_write_after_a_recorded_one_is_refused() -> None:
    def f(x):
        total = torch.zeros(3)
        total.add_(x)
        with torch._C.DisableTorchFunction():
            total.mul_(5)
        return total * 1

    assert refusal_of(f, X) == "unseen-write"


class Sub(torch.Tensor):
    pass


LEAF = torch.ones(3, requires_grad=True)


@pytest.mark.parametrize(
    ("fn", "traced", "called"),
    [
        (lambda x: x * 2 if x.is_sparse else x * 3, X, X.to_sparse()),
        (lambda x: x * 2 if isinstance(x, Sub) else x * 3, X, X.as_subclass(Sub)),
        (lambda x: x * 2 if x.is_leaf else x * 3, LEAF, LEAF * 1),
        (lambda x: x * (1 + x.storage_offset()), X, torch.arange(4.0)[1:]),
        (lambda x: x * 2 if x.is_conj() else x * 3, X + 0j, (X + 0j).conj()),
    ],
)
def test_other_kinds_of_tensors_are_refused_where_python_can_tell(fn, traced, called) -> None:
    trace = quiet_trace(fn, traced)
    with pytest.raises(InputMismatch):
        trace(called)


def test_version_counters_are_branches() -> None:
    assert [b.op for b in quiet_trace(lambda x: x * x._version, X).branches] == ["_version"]


class Shadowed(nn.Module):
    def __init__(self):
        super().__init__()
        self.__dict__["w"] = torch.tensor(2.0)

    @property
    def w(self):
        return self.__dict__["w"] * 10

    def forward(self, x):
        return x * self.w


def test_an_attribute_behind_a_property_is_not_taken_for_it() -> None:
    model = Shadowed()
    trace = quiet_trace(model, X)
    for value in (2.0, 3.0):
        model.__dict__["w"].fill_(value)
        check_same(model(Y), trace(Y))


def test_modules_in_another_order_than_their_names() -> None:
    layers = collections.OrderedDict([("1", nn.Linear(3, 3)), ("0", nn.Linear(3, 3))])
    model = nn.Sequential(layers)
    trace = quiet_trace(model, X)
    check_same(model(Y), trace(Y))


def test_builtins_without_a_signature_compare_their_keywords() -> None:
    trace = quiet_trace(torch.add, X, Y, alpha=2)
    for kwargs in ({}, {"alpha": 3}, {"alpha": 2, "out": None}):
        with pytest.raises(InputMismatch):
            trace(X, Y, **kwargs)


def test_a_generator_seeded_by_the_run_is_refused() -> None:
    def f(x, generator):
        generator.manual_seed(5)
        return x + torch.rand(3, generator=generator)

    assert refusal_of(f, X, torch.Generator().manual_seed(1)) == "generator-reseeded"


class Raising:
    __slots__ = ()

    def __getattr__(self, name):
        raise RuntimeError(name)


def test_looking_at_objects_runs_none_of_their_code() -> None:
    target = Bag()
    holder = Bag()
    holder.proxy = weakref.proxy(target)
    holder.raising = Raising()
    del target
    assert quiet_trace(lambda x, h: x + 1, X, holder).statistics().ops == 1


class Info:
    def __init__(self):
        self.notes = ["first"]


def test_objects_without_tensors_are_made_anew_for_every_call() -> None:
    trace = quiet_trace(lambda x: (x + 1, Info()), X)
    trace(Y)[1].notes.append("mine")
    assert trace(Y)[1].notes == ["first"]


def test_an_empty_tuple_is_itself_and_nothing_elses_value() -> None:
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.state = ()

        def forward(self, x):
            return x + 1, ()

    holder = Holder()
    trace = quiet_trace(holder, X)
    holder.state = (1, 2)
    assert trace(Y)[1] == ()


def test_force_outplace_finds_writes_of_every_spelling() -> None:
    tracer = tripwire.Tracer(force_outplace=True)
    for fn in (
        lambda x: nn.functional.relu(x, inplace=True),
        nn.ReLU(inplace=True),
        lambda x: torch.relu_(input=x),
    ):
        with pytest.raises(tripwire.CannotTrace) as caught:
            tracer.trace(fn, ones())
        assert caught.value.slug == "no-outplace-form"
    wide = torch.ones(3, dtype=torch.float64)
    assert tracer.trace(lambda x: x.add_(other=wide), ones())(ones()).dtype == torch.float32


def test_sets_of_tensors_that_the_run_changes() -> None:
    def f(x, seen):
        seen.add(x * 2)
        return x + 1

    assert len(quiet_trace(f, X, {Y}).effects) == 1


def test_nan_that_met_numpy_is_no_change() -> None:
    trace = quiet_trace(lambda x: x * x.numpy().shape[0], torch.tensor([float("nan"), 1.0]))
    assert trace.statistics().ops == 1


def test_a_function_around_a_generator_is_no_generator_function() -> None:
    def generate(x):
        yield x * 2

    @functools.wraps(generate)
    def f(x):
        return list(generate(x))

    assert quiet_trace(f, X)(Y)[0].tolist() == [8, 10, 12]


class OwnCall(nn.Module):
    def __call__(self, x, *, scale):
        return super().__call__(x) * scale

    def forward(self, x):
        return x + 1


def test_a_module_with_a_call_of_its_own() -> None:
    model = OwnCall()
    trace = quiet_trace(model, X, scale=2.0)
    check_same(model(Y, scale=2.0), trace(Y, scale=2.0))


def test_infinite_recursion_keeps_the_users_frames() -> None:
    def f(x):
        return f(x)

    with pytest.raises(RecursionError) as caught:
        quiet_trace(f, X)
    names = [entry.name for entry in caught.traceback]
    assert names.count("f") > 100


def test_infinite_recursion_is_told_where_an_audit_hook_fails_for_it_too() -> None:
    def f(x):
        return f(x)

    # There is no way to take it away again. In Python, it needs recursion of its own.
    sys.addaudithook(lambda name, args: None)
    for _ in range(3):
        with pytest.raises(RecursionError):
            quiet_trace(f, X)


def test_a_profile_function_set_by_the_run_stays() -> None:
    def mine(frame, event, arg):
        pass

    def f(x):
        sys.setprofile(mine)
        return x + 1

    try:
        quiet_trace(f, X)
        assert sys.getprofile() is mine
    finally:
        sys.setprofile(None)


def test_check_accepts_results_of_user_classes() -> None:
    tripwire.Tracer(check=True).trace(nested_slots, X)


def test_names_of_parts_dont_hide_the_module() -> None:
    def f(x):
        self, other = x.split([1, 2])
        return self + other + torch.tensor(np.ones(1, "f"))

    check_traces(f, lambda s: (X * s,))


def test_a_callback_of_the_collector_is_no_part_of_the_run() -> None:
    space = {"count": 0}
    exec("def note(phase, info):\n    global count\n    count += 1", space)
    note = space["note"]

    def f(x):
        gc.collect()
        return x + 1

    gc.callbacks.append(note)
    try:
        trace = quiet_trace(f, X)
        assert gc.callbacks[-1] is note
    finally:
        gc.callbacks.remove(note)
    assert not trace.effects
    assert space["count"]


SCALE = 2.0


def scaled(x):
    return x * SCALE


def calls_another(x):
    return scaled(x)


@contextlib.contextmanager
def collecting_in(code, when=lambda: True):
    """Collect garbage once, before a line of some code, as Python 3.12 does between any two."""
    left = [True]

    def look(frame, event, arg):
        if frame.f_code is code and left and when():
            left.clear()
            gc.collect()
        return look if frame.f_code is code else None

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)
    assert not left


@pytest.fixture
def callbacks():
    """Those of the collector, as they were afterwards."""
    before = gc.callbacks[:]
    yield gc.callbacks
    gc.callbacks[:] = before


def test_a_collection_while_an_observer_starts_hides_nothing(callbacks, monkeypatch) -> None:
    compiled = tripwire.compile(calls_another, backend="eager", fullgraph=True)
    first = []

    def has_one_more():
        first[:] = first or [len(callbacks)]
        return len(callbacks) == first[0] + 1

    with collecting_in(Observer.start.__code__, has_one_more):
        compiled(X)
    monkeypatch.setitem(globals(), "SCALE", 5.0)
    assert torch.equal(compiled(X), X * 5)


@pytest.mark.parametrize("last", ["start", "stop"])
def test_a_callback_that_goes_while_it_is_called_hides_nothing(callbacks, last) -> None:
    """Python leaves out the one after it, which is the observer's."""

    def go(phase, info):
        if phase == last:
            callbacks.remove(go)

    def come():
        callbacks.insert(-1, go)
        return True

    compiled = tripwire.compile(calls_another, backend="eager", fullgraph=True)
    with collecting_in(calls_another.__code__, come):
        with pytest.raises(CannotTrace, match="gc.callbacks") as caught:
            compiled(X)
    assert caught.value.slug == "not-observed"
    assert torch.equal(compiled(X), X * 2)
