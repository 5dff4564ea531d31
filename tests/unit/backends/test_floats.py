"""Floats that vary stay open behind compilers, wherever they go."""

import pytest
import torch
from torch.nn import functional

import tripwire

W = torch.tensor([1.0, 2.0, 0.5, 1.5])
USES = {
    "clamp": lambda x, s: x.clamp(min=-s, max=s),
    "clamp by place": lambda x, s: torch.clamp(x, 1 - s, 1 + s),
    "full": lambda x, s: x + torch.full((x.shape[0], 1), s),
    "full_like": lambda x, s: x * torch.full_like(x, s),
    "new_full": lambda x, s: x * x.new_full((x.shape[0], 1), s),
    "fill_": lambda x, s: x.clone().fill_(s) + x,
    "setitem": lambda x, s: _set(x.clone(), s),
    "masked_fill": lambda x, s: x.masked_fill(x > 0, s),
    "where": lambda x, s: torch.where(x > 0, x, s),
    "where of two numbers": lambda x, s: torch.where(x > 0, s, 0.0) + x,
    "leaky_relu": lambda x, s: functional.leaky_relu(x, s),
    "softplus": lambda x, s: functional.softplus(x, s),
    "normalize": lambda x, s: functional.normalize(x, dim=-1, eps=s),
    "alpha": lambda x, s: x.add(x * x, alpha=s) - torch.sub(x, x, alpha=s),
    "alpha in place": lambda x, s: x.clone().add_(x, alpha=-s),
    "value": lambda x, s: torch.addcmul(x, x, x, value=s),
    "lerp": lambda x, s: torch.lerp(x, x * x, s) + x.lerp(x + 1, weight=s),
    "lerp in place": lambda x, s: x.clone().lerp_(x * x, s),
    "pow": lambda x, s: x.abs() ** s,
    "rpow": lambda x, s: s**x,
    "focal": lambda x, s: (1 - x.sigmoid()) ** s * x,
    "remainder": lambda x, s: x % s,
    "linspace": lambda x, s: x * torch.linspace(0.0, s, 4),
    "tensor": lambda x, s: x * torch.tensor(s),
    "tensor of a list": lambda x, s: x * torch.tensor([s, 1.0, 2.0, s * 2]),
    "tensor of one number": lambda x, s: x * torch.tensor([[s] * 4]),
    "tensor of a dtype": lambda x, s: x * torch.tensor([s * 10] * 4, dtype=torch.int64),
    "as_tensor": lambda x, s: torch.maximum(x, torch.as_tensor(s)),
    "no dimensions": lambda x, s: x.sum().abs() ** s + torch.lerp(x.sum(), x.mean(), s),
    "ints": lambda x, s: x.long().clamp(max=s) + x.long().abs() ** s + x,
    "scale of attention": lambda x, s: _attend(x, scale=s),
    "scale beside a mask": lambda x, s: _attend(x, is_causal=True, scale=s * 2),
    "label_smoothing": lambda x, s: _entropy(x, label_smoothing=s),
    "of a sum": lambda x, s: _entropy(x, label_smoothing=s, reduction="sum"),
    "of each row": lambda x, s: _entropy(x, label_smoothing=s, reduction="none"),
    "of labels with weights": lambda x, s: _entropy(
        x, weight=torch.tensor([1.0, 2, 3, 4]), ignore_index=1, label_smoothing=s
    ),
    "of shares": lambda x, s: functional.cross_entropy(x, x.softmax(-1), label_smoothing=s),
    "layer_norm": lambda x, s: functional.layer_norm(x, (4,), eps=s),
    "layer_norm with weights": lambda x, s: functional.layer_norm(x * s, (4,), W, W + 1, s),
    "rms_norm": lambda x, s: functional.rms_norm(x, (4,), W, s),
    "group_norm": lambda x, s: functional.group_norm(x, 2, eps=s),
    "group_norm of images": lambda x, s: functional.group_norm(
        x.reshape(-1, 2, 2, 1).expand(-1, 2, 2, 3), 2, W[:2], W[2:], eps=s
    ),
    "batch_norm": lambda x, s: functional.batch_norm(x, None, None, training=True, eps=s),
    "batch_norm that runs": lambda x, s: _norm_and_run(x, s),
    "batch_norm of images": lambda x, s: functional.batch_norm(
        x.reshape(-1, 2, 2, 1), W[:2].clone(), W[2:].clone(), training=False, eps=s
    ),
    "two places": lambda x, s: (x * s).clamp(max=s) ** s * torch.tensor(s),
}


def _attend(x, **options):
    return functional.scaled_dot_product_attention(x[None], x[None] + 1, x[None], **options)


def _norm_and_run(x, s):
    mean, var = torch.zeros(4), W.clone()
    return functional.batch_norm(x, mean, var, W, W, True, s / 2, s) + mean + var


def _entropy(x, **options):
    return functional.cross_entropy(x, torch.arange(x.shape[0]) % 4, **options)


# Torch's code takes the value: compilers would fix it.
TAKEN_USES = {
    "huber_loss": lambda x, s: functional.huber_loss(x, x.detach() * 2, delta=s),
    "smooth_l1_loss": lambda x, s: functional.smooth_l1_loss(x, x.detach() * 2, beta=s),
    "quantile": lambda x, s: torch.quantile(x, s / 2),
    "cosine_similarity": lambda x, s: functional.cosine_similarity(x, x * x, eps=s),
    "dropout": lambda x, s: functional.dropout(x, s / 2),
    "dropout2d": lambda x, s: functional.dropout1d(x, s / 2),
    "bernoulli_": lambda x, s: x * torch.empty(x.shape).bernoulli_(s / 2),
    "normal": lambda x, s: x + torch.normal(0.0, s, (x.shape[0], 4)),
    "normal_": lambda x, s: x + torch.empty_like(x).normal_(s, s),
    "of attention": lambda x, s: _attend(x, dropout_p=s / 2),
    "celu": lambda x, s: functional.celu(x, s),
    "instance_norm": lambda x, s: functional.instance_norm(x[:, None], eps=s),
    "addmm": lambda x, s: torch.addmm(x, x @ x.t(), x, beta=s, alpha=1 - s / 2),
    "of 16 bits": lambda x, s: functional.layer_norm(x.bfloat16(), (4,), eps=s).float(),
    "two calls": lambda x, s: functional.celu(functional.dropout(x, s / 2), s) * s,
}


def _set(x, s):
    x[:, 0] = s
    return x


def check(use, backend, traces=3):
    compiled = tripwire.compile(use, backend=backend)
    torch.manual_seed(0)
    for index, rows in enumerate((3, 3, 3, 4, 5, 6, 3)):
        x = torch.randn(rows, 4).abs().add(0.1).requires_grad_()
        number = 0.3 + 0.1 * index
        torch.manual_seed(index)
        expected = use(x, number)
        torch.manual_seed(index)
        found = compiled(x, number)
        torch.testing.assert_close(found, expected)
        wanted = torch.autograd.grad(expected.sum(), x)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), x), wanted)
    assert tripwire.statistics(compiled).traces <= traces


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_float_stays_open(name, backend) -> None:
    check(USES[name], backend)


@pytest.mark.parametrize("name", TAKEN_USES)
@pytest.mark.parametrize(("backend", "traces"), [("eager", 3), ("aot_eager", 4)])
def test_a_float_whose_value_torch_takes_stays_open(name, backend, traces) -> None:
    check(TAKEN_USES[name], backend, traces)


def test_the_call_that_takes_it_runs_uncompiled_and_is_told(caplog) -> None:
    use = TAKEN_USES["huber_loss"]
    compiled = tripwire.compile(use, backend="aot_eager")
    for index in range(4):
        compiled(torch.randn(3, 4), 0.3 + 0.1 * index)
    (told,) = [one.message for one in caplog.records if "graph-cut" in one.message]
    assert f"test_floats.py:{use.__code__.co_firstlineno}: `huber_loss` can't be compiled" in told
    assert "a float that varies" in told


@pytest.mark.parametrize("name", sorted(TAKEN_USES.keys() - {"two calls", "of attention"}))
def test_in_a_full_graph_it_is_fixed_and_told_with_its_line(name) -> None:
    use = TAKEN_USES[name]
    compiled = tripwire.compile(use, backend="aot_eager", fullgraph=True)
    for index in range(4):
        x = torch.randn(3, 4).abs().add(0.1).requires_grad_()
        number = 0.3 + 0.1 * (index // 2)
        torch.manual_seed(index)
        expected = use(x, number)
        torch.manual_seed(index)
        torch.testing.assert_close(compiled(x, number), expected)
    told = str(tripwire.explain(compiled))
    begin = f"closed at test_floats.py:{use.__code__.co_firstlineno} by the back end: "
    closed, again = (line for line in told.splitlines() if begin in line)
    assert again == f"    L['s']: {closed.strip()}"
    assert "L['s']" in closed
    assert closed.endswith(("== 0.4", "== 0.2"))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dropout_without_any_gives_its_argument(backend) -> None:
    def drop(x, p):
        return functional.dropout(x, p)

    compiled = tripwire.compile(drop, backend=backend)
    x = torch.randn(4)
    for p in (0.1, 0.2, 0.3, 0.0, 0.4, 0.0):
        assert (compiled(x, p) is x) == (p == 0)
    with pytest.raises(ValueError, match="dropout probability"):
        compiled(x, 1.5)


_SLOW = ["full", "alpha", "tensor of a list", "label_smoothing", "layer_norm"]
_SLOW += ["batch_norm that runs", "group_norm of images"]


@pytest.mark.parametrize(
    "name",
    ["clamp", "two places", *(pytest.param(name, marks=pytest.mark.slow) for name in _SLOW)],
)
def test_a_float_stays_open_behind_inductor(name) -> None:
    check(USES[name], "inductor")


def test_dropout_stays_open_behind_inductor_and_drops_as_much_as_it_should() -> None:
    def drop(x, p):
        return functional.dropout(x * 2, p)

    compiled = tripwire.compile(drop, backend="inductor", fullgraph=True)
    for index in range(6):
        p = 0.2 + 0.1 * index
        x = torch.ones(200, 100, requires_grad=True)
        found = compiled(x, p)
        (grad,) = torch.autograd.grad(found.sum(), x)
        kept = found != 0
        assert abs(kept.float().mean().item() - (1 - p)) < 0.02
        torch.testing.assert_close(found, kept * 2 / (1 - p))
        torch.testing.assert_close(grad, kept * 2 / (1 - p))
    assert (compiled(x, 1.0) == 0).all()
    with pytest.raises(ValueError, match="dropout probability"):
        compiled(x, 1.5)
    assert tripwire.statistics(compiled).traces <= 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_takes_two_steps_isnt_rounded_twice(dtype) -> None:
    def call(x, s):
        return x.add(x, alpha=s), torch.lerp(x, x * x, s)

    compiled = tripwire.compile(call, backend="aot_eager")
    x = torch.linspace(-3, 3, 101, dtype=dtype)
    for index in range(5):
        number = 0.3 + 0.1 * index
        for found, expected in zip(compiled(x, number), call(x, number), strict=True):
            assert torch.equal(found, expected)


def test_a_float_that_a_compiler_must_know_is_fixed_and_sizes_stay_open() -> None:
    def call(x, s):
        return functional.celu(x, s) + x.clamp(max=s)

    compiled = tripwire.compile(call, backend="aot_eager")
    for rows, number in [(3, 0.5), (3, 0.6), (4, 0.6), (5, 0.6), (6, 0.6), (7, 0.6), (8, 0.6)]:
        x = torch.randn(rows, 4, requires_grad=True)
        torch.testing.assert_close(compiled(x, number), call(x, number))
    assert tripwire.statistics(compiled).traces <= 4
