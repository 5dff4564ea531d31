"""Delays: programs whose backward comes late, and what is written between a call and its backward.

What a backward reads, it reads when it runs; plain autograd keeps only what the call saved. So a
write in between counts for a custom function's `backward`, for hooks, for a checkpoint's second run
and for what unpacks a saved tensor, and not for operations of torch. `BACKS` are the ways to ask.
"""

from __future__ import annotations

from property.traits import FOUR, Trait

_GRAD = "torch.autograd.grad(%l, %i, allow_unused=True, retain_graph=True)"


def _ask(loss: str, inputs: str) -> str:
    return _GRAD.replace("%l", loss).replace("%i", inputs)


BACKS = (
    _ask("total", "leaves"),
    _ask("total", "leaves"),
    _ask("first", "leaves"),
    _ask("total", "leaves[:1]"),
    _ask("total", "leaves[-1:]"),
    "total.backward(retain_graph=True)",
    "total.backward(retain_graph=True)",
    "first.backward(retain_graph=True)",
    "total.backward(inputs=leaves[:1], retain_graph=True)",
    "total.backward()",
    "None",  # the results die
)
BACKS_AROUND = (
    *("", "", "", "", ""),
    "torch.no_grad()",
    "torch.enable_grad()",
    "torch.autocast('cpu', torch.bfloat16)",
)

_ROWS = ("new(4).requires_grad_(), new(4)", "new(4).requires_grad_(), new(4).requires_grad_()")


_READING = (
    "rate, rows, pair = 2.0, [2.0, 3.0], (1.0, 2.0)\n"
    "class Dial:\n    scale = 2.0\n    def turn(self, g): return g * self.scale\n"
    "dial, calls = Dial(), []\n"
    "def twice(g): return g * 2\ndef outer(g): return twice(g) + 1\n"
    "def make(k):\n    def held(g): return g * k\n    def put(v):\n        nonlocal k\n"
    "        k = v\n    return held, put\nheld, put = make(2.0)"
)
_FUNCTION = (
    "class Late%n(torch.autograd.Function):\n    gain, table = 2.0, {'k': 2.0}\n"
    "    @staticmethod\n    def forward(ctx, t):\n        ctx.save_for_backward(t)\n"
    "        ctx.k = rate\n        return t * 2\n"
    "    @staticmethod\n    def backward(ctx, g):\n        (t,) = ctx.saved_tensors\n        %b",
    "t = Late%n.apply(t)",
)
_BACKWARDS = (
    "return g * rate",
    "return dial.turn(g) * dial.scale",
    "return g * Late0.gain + Late0.table['k']",
    "return twice(g)",
    "return outer(g) * t.sin()",
    "return g * math.floor(2.5)",
    "return torch.sin(g) + F.relu(t)",
    "return g * sum(rows) + pair[0]",
    "return g * ctx.k",
    "ctx.k += 1\nreturn g * ctx.k",
    "calls.append(1.0)\nreturn g * len(calls)",
    "return g * 3 + t",
    "return g * (2 if torch.is_grad_enabled() else 3)",
    "return (g * torch.ones(4)).float()",
    "return held(g)",
)

_NET = (
    "class Net2(nn.Module):\n    scale = 2.0\n    def __init__(self):\n"
    "        super().__init__()\n        self.w = nn.Parameter(torch.arange(4.0))\n"
    "        self.lin = nn.Linear(4, 4)\n"
    "        self.lin.weight = nn.Parameter(torch.arange(16.0).reshape(4, 4) / 8)\n"
    "        self.lin.bias = nn.Parameter(torch.ones(4))\n"
    "    def forward(self, t): return self.lin(t.float()) * self.w\n"
    "net, seen = Net2(), []\nopt = torch.optim.SGD(net.parameters(), lr=0.5)\n"
    "def note(*a): seen.append(len(a))\n"
)
_USES = ("t = net(t)", "t = net(t) + net(y)", "t = t * net.w", "t = net.lin(t.float()).relu()")
_MOVES = "with torch.no_grad(): mem.u.lerp_(x.detach().float(), 0.1)\n"

DELAYS = (
    Trait(
        "late backward that reads",
        _BACKWARDS,
        _ROWS,
        sites=(
            "rate = 5.0",
            "dial.scale = 5.0",
            "Dial.scale = 7.0",
            "dial = Dial()",
            "Dial.turn = lambda self, g: g * 11",
            "Late0.gain = 5.0",
            "Late0.table['k'] = 5.0",
            "Late0 = type('Other', (), {'gain': 3.0, 'table': {'k': 1.0}})",
            "rows.append(4.0)",
            "pair = (7.0, 1.0)",
            "put(5.0)",
            "calls.clear()",
            "math = types.SimpleNamespace(floor=lambda v: 9)",
            "F = types.SimpleNamespace(relu=lambda v: v * 9)",
            "torch.set_default_dtype(torch.float64)",
            "torch.set_grad_enabled(False)",
        ),
        setup=_READING,
        helper=_FUNCTION,
        late=True,
    ),
    Trait(
        "late backward that reads what was passed",
        (
            "t = Keeps.apply(t, x.tag)",
            "t = Keeps.apply(t, x.tag) + len(x.tag)",
            "t = Keeps.apply(t, {0: x.tag[0]})",
            "t = Copies.apply(t, x.tag)",
            "t = Keeps.apply(t, (x.tag[0], x.tag))",
        ),
        (
            "tagged(new(4).requires_grad_(), rates), new(4)",
            "tagged(new(4).requires_grad_(), table), new(4)",
            "tagged(new(4).requires_grad_(), [2.0, 3.0]), new(4)",
        ),
        sites=(
            "rates[0] = 5.0",
            "rates[0] = 0.5",
            "rates.append(4.0)",
            "rates = [7.0]",
            "table[0] = 5.0",
            "table[1] = 5.0",
            "table = {0: 7.0}",
        ),
        setup="rates, table = [2.0, 3.0], {0: 2.0}\n"
        "class Keeps(torch.autograd.Function):\n    @staticmethod\n"
        "    def forward(ctx, t, held):\n        ctx.held = held\n        return t * 2\n"
        "    @staticmethod\n    def backward(ctx, g): return g * ctx.held[0], None\n"
        "class Copies(Keeps):\n    @staticmethod\n    def forward(ctx, t, held):\n"
        "        ctx.held = dict(enumerate(held))\n        return t * 2\n",
        late=True,
    ),
    Trait(
        "late backward that is another by then",
        _BACKWARDS,
        _ROWS,
        sites=(
            "twice = lambda g: g * 7",
            "outer = lambda g: g * 5",
            "def longer(g): return g * 9\ntwice.__code__ = longer.__code__",
            "Late0.backward = staticmethod(lambda ctx, g: g * 13)",
            "Late0.forward = staticmethod(lambda ctx, t: t * 13)",
            "def other(ctx, g): return g * 17\nLate0.backward.__code__ = other.__code__",
            "Late0 = type('Late0', (torch.autograd.Function,), dict(vars(Late0)))",
            "del twice",
        ),
        setup=_READING,
        helper=_FUNCTION,
        late=True,
    ),
    Trait(
        "hooks between a call and its backward",
        _USES,
        _ROWS,
        sites=(
            "handle = net.w.register_hook(lambda g: g * 3)",
            "handle = net.w.register_hook(lambda g: g * net.scale)",
            "handle = net.lin.bias.register_hook(note)",
            "handle = net.w.register_post_accumulate_grad_hook(note)",
            "handle = outs[0].register_hook(lambda g: g * 5)",
            "handle = outs[-1].register_hook(note)",
            "outs[0].retain_grad()",
            "handle = net.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].sum()))",
            "handle = net.lin.register_full_backward_pre_hook(lambda m, g: (g[0] * net.scale,))",
            "handle = net.register_forward_hook(lambda m, a, o: o * 2)",
            "handle.remove()",
            "net.scale = 5.0",
        ),
        setup=_NET + "handle = net.w.register_hook(lambda g: g * net.scale)",
        late=True,
    ),
    Trait(
        "weights between a call and its backward",
        (*_USES, "mem.h = (mem.h * net.w)\nt = t + mem.h"),
        _ROWS,
        sites=(
            "with torch.no_grad(): net.w.add_(1)",
            "with torch.no_grad(): net.lin.bias.add_(1)",
            "with torch.no_grad(): net.lin.weight.mul_(2)",
            "net.w.requires_grad_(not net.w.requires_grad)",
            "net.lin.weight.requires_grad_(False)",
            "net.w.grad = None",
            "net.w.grad = torch.ones(4)",
            "net.w = nn.Parameter(torch.full((4,), 3.0))",
            "opt.step()",
            "opt.zero_grad()",
            "net.load_state_dict({k: v * 0 + 1 for k, v in net.state_dict().items()})",
            "mem.h = mem.h.detach()",
            "mem.h = torch.ones(4)",
            "net = copy.deepcopy(net)",
            "del net.w",
        ),
        setup=_NET + "class Mem: pass\nmem = Mem()\nmem.h = torch.ones(4)",
        late=True,
    ),
    Trait(
        "weights that change unseen by autograd",
        (*_USES, "net.w.data.mul_(0.5)\nt = t * net.w"),
        _ROWS,
        sites=(
            "net.w.data.mul_(2)",
            "net.w.data = torch.full((4,), 5.0)",
            "net.lin.weight.data = torch.ones(4, 4)",
            "net.double()",
            "net.float()",
        ),
        setup=_NET,
        late=True,
    ),
    Trait(
        "state that a call moves, and uses behind a cut",
        (
            f"{_MOVES}if torch.isfinite(t).all():\n    t = t * mem.u.exp()",
            f"{_MOVES}t = t * t[t == t].numel()\nt = t * mem.u.exp() + mem.u.cos() * t",
            f"{_MOVES}v = mem.u[:2]\nif t.sum() < 10**9:\n    t = t * v.exp().sum()",
            f"{_MOVES}if torch.isfinite(t).all():\n    t = t * mem.n.exp()\nmem.n.add_(0.5)",
        ),
        _ROWS,
        sites=("mem.u = torch.ones(4)", "mem.n = torch.ones(())", "net.w.grad = None"),
        setup=_NET + "class Mem: pass\nmem = Mem()\nmem.u, mem.n = torch.ones(4), torch.ones(())",
        late=True,
    ),
    Trait(
        "torch's state in a late backward",
        (*_USES, "t = Made.apply(t)", "t = F.linear(t.float(), net.lin.weight)"),
        _ROWS,
        ("", "torch.autocast('cpu', torch.bfloat16)"),
        (
            "torch.set_grad_enabled(False)",
            "torch.set_grad_enabled(True)",
            "torch.set_default_dtype(torch.float64)",
            "torch.set_default_dtype(torch.float32)",
            "torch.set_autocast_enabled('cpu', True)",
            "torch.set_autocast_enabled('cpu', False)",
            "torch.use_deterministic_algorithms(True)",
            "torch.use_deterministic_algorithms(False)",
            "torch.set_float32_matmul_precision('high')",
            "torch.manual_seed(5)",
        ),
        _NET + "class Made(torch.autograd.Function):\n    @staticmethod\n"
        "    def forward(ctx, t): return t * 2\n    @staticmethod\n"
        "    def backward(ctx, g): return (g * torch.ones(4) * torch.is_grad_enabled()).float()\n",
        late=True,
    ),
    Trait(
        "checkpoint before a late backward",  # nothing that it reads is written: docs/laws.md
        (
            "t = again(block, t * 1, use_reentrant=False)",
            "t = again(lambda v: v.sin() * deep.weight[0], t.float() * 1, use_reentrant=False)",
            "t = again(deep, t.float() * 1, use_reentrant=False)",
            "t = again(lambda v: F.dropout(v * 2, 0.5).sin(), t * 1, use_reentrant=False)",
            "t = again(block, t * 1, use_reentrant=True)",
        ),
        _ROWS,
        ("", "torch.autocast('cpu', torch.bfloat16)"),
        (
            "handle = deep.weight.register_hook(lambda g: g * 3)",
            "handle = outs[0].register_hook(lambda g: g * 5)",
            "deep.weight.grad = torch.ones(4, 4)",
            "deep.bias.grad = None",
            "torch.manual_seed(5)",
            "torch.set_grad_enabled(False)",
            "torch.set_autocast_enabled('cpu', True)",
            "torch.set_autocast_enabled('cpu', False)",
        ),
        "from torch.utils.checkpoint import checkpoint as again\ndeep = nn.Linear(4, 4)\n"
        "def block(v): return (v.sin() * 3).sin() * deep.bias",
        late=True,
    ),
    Trait(
        "saved tensors that hooks unpack",
        (
            "with saved(pack, unpack):\n    t = t.sin() * net.w",
            "with saved(pack, unpack):\n    t = net(t)",
            "with saved(lambda v: v, lambda v: v * rate):\n    t = t.sin()",
            "with torch.autograd.graph.save_on_cpu():\n    t = t.sin()",
        ),
        _ROWS,
        ("", "torch.autograd.graph.saved_tensors_hooks(pack, unpack)"),
        sites=("rate = 5.0", "unpack = lambda v: v * 7", "seen.clear()"),
        setup=_NET + "saved, rate = torch.autograd.graph.saved_tensors_hooks, 2.0\n"
        "def pack(v):\n    seen.append(1)\n    return v\n"
        "def unpack(v):\n    seen.append(2)\n    return v * rate",
        late=True,
    ),
    Trait(
        "results in parts",
        ("a, b = t.sin(), y * net.w", "a = net(t)\nb = a.detach() * net.w", "a, b = t, net(y)"),
        (*_ROWS, *FOUR),
        sites=("net.w.grad = None", "net.w = nn.Parameter(torch.full((4,), 3.0))", "mem.h = None"),
        setup=_NET + "class Mem: pass\nmem = Mem()",
        returns=("(a, b)", "(b, a)", "[a, b, t]", "{'a': a * b, 'b': b}", "(a, a[:2], b)"),
        late=True,
    ),
)
