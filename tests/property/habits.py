"""Habits: what ordinary programs of PyTorch do all the time, one production each.

The other traits each ask for one kind of read or write. A habit puts several together as people do:
a cache that grows and the number that says how far it is filled; a training step; running
statistics; a config whose fields vary. Numbers are short in binary, so that sums are exact.
"""

from __future__ import annotations

from property.traits import Trait

_ROWS = ("new(2, 4), new(4)", "new(3, 4), new(4)", "new(5, 4), new(4)", "new(4), new(4)")

_CACHES = (
    Trait(
        "cache that grows",
        (
            "cache.keys = torch.cat([cache.keys, y[None]])\nt = t + cache.keys.sum(0)",
            "if cache.last is None:\n    cache.last = y[None]\nelse:\n"
            "    cache.last = torch.cat([cache.last, y[None]])\nt = t * cache.last.shape[0]",
            "cache.parts.append(y.detach())\nt = t + torch.stack(cache.parts).sum(0)",
            "cache.parts.append(y.detach())\nif len(cache.parts) > 3:\n    cache.parts.pop(0)\n"
            "t = t + cache.parts[0]",
            "k, v = cache.pair\ncache.pair = torch.cat([k, y[None]]), torch.cat([v, y[None] * 2])\n"
            "t = t + (cache.pair[0] * cache.pair[1]).sum(0)",
            "t = t + cache.keys.shape[0]\nif cache.keys.shape[0] < 6:\n"
            "    cache.keys = torch.cat([cache.keys, t.reshape(-1, 4).detach().float()])",
            "cache.update(y[None])\nt = t + cache.keys[-1] * cache.seen",
        ),
        _ROWS,
        sites=(
            "cache = Cache()",
            "cache.keys = cache.keys[:1]",
            "cache.keys = torch.ones(3, 4)",
            "cache.last = None",
            "cache.parts.clear()",
            "cache.parts = [torch.ones(4)]",
            "cache.seen = 0",
            "cache = copy.deepcopy(cache)",
        ),
        setup="class Cache:\n    def __init__(self):\n"
        "        self.keys, self.last = torch.zeros(1, 4), None\n"
        "        self.parts, self.seen = [], 0\n"
        "        self.pair = torch.zeros(1, 4), torch.ones(1, 4)\n"
        "    def update(self, k):\n        self.keys = torch.cat([self.keys, k])\n"
        "        self.seen += k.shape[0]\ncache = Cache()",
    ),
    Trait(
        "place in a cache",  # of a fixed size: a number says how far it is filled
        (
            "ring.data[ring.at] = y\nring.at = (ring.at + 1) % 6\nt = t + ring.data.sum(0)",
            "n = x.reshape(-1, 4).shape[0]\nif ring.at + n > 6:\n    ring.at = 0\n"
            "ring.data[ring.at : ring.at + n] = x.reshape(-1, 4).detach()\nring.at += n\n"
            "t = t + ring.data[: ring.at].sum(0)",
            "t = t + ring.data[ring.at]",
            "t = t + ring.data.narrow(0, ring.at, 1).sum(0)",
            "ring.data.index_copy_(0, ring.place, y[None])\nring.place.add_(1).remainder_(6)\n"
            "t = t + ring.data.sum(0)",
            "t = t * ring.table[:, ring.at : ring.at + 4].sum()\nring.at = (ring.at + 2) % 5",
            "t = t + ring.data[-1 - ring.at % 3]\nring.at = ring.at // 2",
            "keep = torch.arange(6) <= ring.at\nt = t + ring.data[keep].sum(0)",
            "ring.at = (ring.at + 1) % 6\nif ring.at in {1, 4}:\n    t = t * 2",
            "t = t * ring.rates.get(ring.at, 1.0)\nring.at = (ring.at + 1) % 6",
            "t = t + 1 if int(ring.place) in range(1, 4) else t\nring.place.add_(1)",
            "i = torch.randint(0, 5, (1,)).item()\nt = t * ring.table[:, i : i + 4].sum()",
            "if ring.data.shape[0] != x.reshape(-1, 4).shape[0]:\n"
            "    ring.data = torch.full((x.reshape(-1, 4).shape[0], 4), 2.0)\n"
            "t = t + ring.data.sum(0)",
        ),
        _ROWS,
        sites=(
            "ring.at = 0",
            "ring.at = 3",
            "ring.at = 5",
            "ring.data.zero_()",
            "ring.data = torch.full((6, 4), 2.0)",
            "ring.data = torch.ones(8, 4)",
            "ring.place.fill_(4)",
            "ring.rates[ring.at] = 4.0",
            "ring = copy.copy(ring)",
        ),
        setup="class Ring: pass\nring = Ring()\nring.at, ring.data = 0, torch.ones(6, 4)\n"
        "ring.rates = {1: 2.0, 3: 0.5}\n"
        "ring.place, ring.table = torch.tensor([0]), torch.arange(18.0).reshape(2, 9)",
    ),
    Trait(
        "table that is made longer on demand",
        (
            "t = t + rope.rows(x.reshape(-1, 4).shape[0]).sum(0)",
            "t = t * rope.rows(2)[1]\nt = t + rope.made",
            "n = x.reshape(-1, 4).shape[0]\nif rope.mask.shape[0] < n:\n"
            "    rope.mask = torch.tril(torch.ones(n, n))\nt = t + rope.mask[:n, :n].sum()",
            "t = t + memo(x.shape[0])",
            "n = x.shape[0]\nif n not in rope.known:\n    rope.known[n] = torch.arange(n).sum()\n"
            "t = t + rope.known[n]",
        ),
        _ROWS,
        sites=(
            "rope = Rope()",
            "rope.table, rope.made = torch.zeros(1, 4), 1",
            "rope.base = 3.0",
            "rope.base, rope.made = 5.0, 0",
            "rope.known.clear()",
            "memo.cache_clear()",
            "rope.mask = torch.ones(8, 8)",
        ),
        setup="class Rope:\n    base = 2.0\n    def __init__(self):\n"
        "        self.table, self.made, self.known = torch.zeros(0, 4), 0, {}\n"
        "        self.mask = torch.ones(1, 1)\n"
        "    def rows(self, n):\n        if n > self.made:\n            self.made = n\n"
        "            self.table = torch.arange(n)[:, None] * self.base + torch.zeros(4)\n"
        "        return self.table[:n]\nrope = Rope()\n"
        "@functools.lru_cache\ndef memo(n): return torch.full((4,), float(n))",
    ),
)

_TRAINED = (
    Trait(
        "training step",
        (
            "opt.zero_grad()\nloss = (net.w * y).sum() * 0.5\nloss.backward()\nopt.step()\n"
            "t = t + loss.detach()",
            "loss = net(y)\nopt.zero_grad()\nloss.backward()\nopt.step()\nt = t + loss.detach()",
            "opt.zero_grad(set_to_none=False)\nloss = net(y)\nloss.backward()\nopt.step()\n"
            "t = t * net.w.detach()",
            "net(y).backward()\nnet.n += 1\nif net.n % 2 == 0:\n    opt.step()\n"
            "    opt.zero_grad()\nt = t + net.w.detach()",
            "(g,) = torch.autograd.grad(net(y), net.w)\nwith torch.no_grad():\n"
            "    net.w -= net.rate * g\nt = t + net.w.detach()",
            "net(y).backward()\nwith torch.no_grad():\n    for p in net.parameters():\n"
            "        p.sub_(p.grad, alpha=net.rate)\n        p.grad = None\nt = t + net.w.detach()",
            "net(y).backward()\ntorch.nn.utils.clip_grad_value_(net.w, 0.5)\nopt.step()\n"
            "t = t + net.w.grad",
            "with torch.no_grad():\n    for e, p in zip(mean.parameters(), net.parameters()):\n"
            "        e.mul_(0.5).add_(p, alpha=0.5)\nt = t + mean.w.detach()",
            "t = t * (0.0 if net.w.grad is None else net.w.grad)",
            "for group in opt.param_groups:\n    group['lr'] *= 0.5\nt = t * group['lr']",
        ),
        (*_ROWS[:2], "new(4).requires_grad_(), new(4)"),
        ("", "torch.enable_grad()"),
        (
            "opt.param_groups[0]['lr'] = 0.25",
            "opt.param_groups[0]['momentum'] = 0.5",
            "opt = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.5)",
            "opt = torch.optim.SGD(net.parameters(), lr=0.5, weight_decay=0.5, foreach=False)",
            "opt.load_state_dict(opt.state_dict())",
            "opt.state.clear()",
            "net.w.grad = None",
            "net.w.grad = torch.ones(4)",
            "net.w.requires_grad_(not net.w.requires_grad)",
            "net.rate = 0.25",
            "net.w = nn.Parameter(torch.full((4,), 2.0))",
            "net.w.data.fill_(1.0)",
            "net.load_state_dict({'w': torch.full((4,), 3.0)})",
        ),
        "class Model(nn.Module):\n    n, rate = 0, 0.5\n    def __init__(self):\n"
        "        super().__init__()\n        self.w = nn.Parameter(torch.ones(4))\n"
        "    def forward(self, y): return (self.w * y.detach().float()).sum()\n"
        "net, mean = Model(), Model()\nopt = torch.optim.SGD(net.parameters(), lr=0.5)",
    ),
    Trait(
        "code inside a backward",  # hooks, custom functions and checkpoints run again on each call
        (
            "dial.w.grad = None\n(dial.w * y.detach().float()).sum().backward()\n"
            "t = t + dial.w.grad * dial.scale",
            "dial.now = dial.scale * 2\ndial.w.grad = None\n"
            "(dial.w * y.detach().float()).sum().backward()\nt = t + dial.w.grad",
            "(g,) = torch.autograd.grad(Scaled.apply(dial.w * y.detach().float()).sum(), dial.w)\n"
            "t = t + g * dial.scale",
            "dial.steps += 1\nScaled.apply(dial.w * y.detach().float()).sum().backward()\n"
            "t = t + dial.w.grad",
            "torch.utils.checkpoint.checkpoint(lambda v: v * dial.w * dial.scale, "
            "y.detach().float(), use_reentrant=False).sum().backward()\n"
            "t = t + dial.w.grad * dial.scale",
            "dial.v.sum().backward()\nt = t * dial.fired",
            "t = t * dial.scale + dial.steps",
        ),
        (*_ROWS[:2], "new(4).requires_grad_(), new(4)"),
        ("", "torch.enable_grad()"),
        (
            "dial.scale = 4.0",
            "dial.scale += 0.5",
            "dial.now = 0.5",
            "dial.steps = 7",
            "dial.fired = 3",
            "dial.w.grad = None",
            "dial.w.grad = torch.ones(4)",
            "dial.w = nn.Parameter(torch.full((4,), 2.0))",
        ),
        "class Dial: pass\ndial = Dial()\n"
        "dial.scale, dial.now, dial.steps, dial.fired = 2.0, 1.0, 0, 0\n"
        "dial.w, dial.v = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))\n"
        "dial.w.register_hook(lambda g: dial.now / dial.scale + g * dial.scale)\n"
        "def fire(g): dial.fired += 1\ndial.v.register_hook(fire)\n"
        "class Scaled(torch.autograd.Function):\n    @staticmethod\n"
        "    def forward(ctx, t):\n        ctx.scale = dial.scale\n        return t * dial.scale\n"
        "    @staticmethod\n    def backward(ctx, g): return g * ctx.scale + dial.steps",
    ),
    Trait(
        "running statistics",
        (
            "t = bn(t)",
            "t = bn(t) + bn(t * 2)",
            "t = t + bn.running_mean + bn.num_batches_tracked",
            "bn.eval()\nt = bn(t)\nbn.train()",
            "with torch.no_grad():\n    bn(t)\nt = t * bn.running_var",
            "t = stat(t)",
            "t = stat(t) * stat.seen",
            "was = bn.training\nbn.train(x.shape[0] > 2)\nt = bn(t)\nbn.train(was)",
        ),
        _ROWS[:3],
        ("", "torch.no_grad()"),
        (
            "bn.eval()",
            "bn.train()",
            "bn.momentum = None",
            "bn.momentum = 0.25",
            "bn.eps = 0.5",
            "bn.reset_running_stats()",
            "bn.track_running_stats = False",
            "bn.running_mean = torch.full((4,), 2.0)",
            "bn.running_mean = bn.running_var = None",
            "bn.weight = None",
            "bn = copy.deepcopy(bn)",
            "stat.mean.zero_()",
            "stat.mean = torch.ones(4)",
            "stat.seen = 5",
            "stat.seen = 0",
            "stat.eval()",
        ),
        "class Stat(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.register_buffer('mean', torch.zeros(4))\n        self.seen = 0\n"
        "    def forward(self, t):\n        if self.training:\n            self.seen += 1\n"
        "            self.mean.lerp_(t.detach().float().reshape(-1, 4).sum(0), 0.5)\n"
        "        return t - self.mean\n"
        "bn, stat = nn.BatchNorm1d(4), Stat()",
    ),
    Trait(
        "weights that are one",
        (
            "t = tied.out(tied.enter(t))",
            "t = t * (2 if tied.enter.weight is tied.out.weight else 3)",
            "t = t + len(list(tied.parameters()))",
            "for p in tied.parameters():\n    t = t + p.sum()",
            "with torch.no_grad():\n    tied.enter.weight.mul_(0.5)\nt = t + tied.out.weight.sum()",
            "t = t + F.linear(t, tied.out.weight)",
            "t = sum([m(t) for m in tied.children()])",
        ),
        ("new(4), new(4)", "new(2, 4), new(4)", "new(4).requires_grad_(), new(4)"),
        sites=(
            "tied.out.weight = tied.enter.weight",
            "tied.out.weight = nn.Parameter(torch.eye(4) * 2)",
            "tied.enter.weight = nn.Parameter(torch.eye(4))",
            "tied.enter.weight.data.mul_(2)",
            "tied.out.weight.requires_grad_(False)",
            "tied = copy.deepcopy(tied)",
            "tied.out = tied.enter",
            "tied.out = nn.Identity()",
            "tied.load_state_dict({k: v * 0 + 1 for k, v in tied.state_dict().items()})",
        ),
        setup="class Tied(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.enter = nn.Linear(4, 4, bias=False)\n"
        "        self.out = nn.Linear(4, 4, bias=False)\n"
        "        self.enter.weight = nn.Parameter(torch.arange(16.0).reshape(4, 4) / 8)\n"
        "        self.out.weight = self.enter.weight\ntied = Tied()",
    ),
    Trait(
        "tensors by name",
        (
            "for k, v in state.items():\n    state[k] = v + 1\nt = t + state['a']",
            "for v in state.values():\n    v.mul_(0.5).add_(y.detach())\nt = t + state['b']",
            "state['a'] += y.detach()\nt = t + state['a']",
            "state['c'] = state.pop('c', state['a']) * 2\nt = t + len(state)",
            "state.update({k: v.clone() for k, v in state.items()})\nt = t * state['a']",
            "new_state = {k: v * 2 for k, v in state.items()}\nt = t + sum(new_state.values())",
            "old = state['a']\nstate['a'] = state['b']\nstate['b'] = old\nt = t + state['a']",
            "t = t + torch.stack([state[k] for k in sorted(state)]).sum(0)",
            "state['n'] = state['n'] + 1 if 'n' in state else torch.zeros(4)\nt = t + state['n']",
        ),
        ("new(4), new(4)", "new(2, 4), new(4)"),
        sites=(
            "state['a'] = torch.full((4,), 4.0)",
            "state['b'] = state['a']",
            "state.pop('c', None)",
            "state.pop('n', None)",
            "state['a'].zero_()",
            "state['d'] = torch.ones(4)",
            "state = dict(state)",
            "state = {'b': torch.ones(4), 'a': torch.zeros(4)}",
            "state['a'] = state['a'].double()",
        ),
        setup="state = {'a': torch.ones(4), 'b': torch.full((4,), 2.0)}",
    ),
)

_PYTHON = (
    Trait(
        "config whose fields vary",
        (
            "t = t * x.tag.scale",
            "t = t * x.tag.scale ** x.tag.depth",
            "for _ in range(x.tag.depth):\n    t = t * x.tag.scale",
            "t = t + x.tag.total",
            "t = t * dataclasses.asdict(x.tag)['scale']",
            "t = t + (x.tag.scale if x.tag.depth > 1 else 7.0)",
            "t = t * dataclasses.replace(x.tag, depth=4).total",
            "if x.tag == base:\n    t = t * 3",
            "t = t * getattr(torch, x.tag.name)(torch.full((4,), x.tag.scale))",
            "t = t * base.scale + base.depth\nbase.scale *= 0.5",
            "t = t * {**vars(x.tag), 'extra': 1.0}['scale']",
            "t = t[..., x.tag.depth % 4 :].sum() + y",
            "base.depth = (base.depth + x.tag.depth) % 8\nt = t + base.depth",
        ),
        (
            "tagged(new(4), Config(2.0)), new(4)",
            "tagged(new(4), Config(3.0)), new(4)",
            "tagged(new(4), Config(0.5, 2)), new(4)",
            "tagged(new(4), Config(1.5, 3, 'cos')), new(4)",
            "tagged(new(4), base), new(4)",
            "tagged(new(4), dataclasses.replace(base, scale=2.5)), new(4)",
        ),
        sites=(
            "base.scale = 4.0",
            "base.scale = 2",
            "base.depth = 3",
            "base.name = 'cos'",
            "Config.total = property(lambda self: 9.0)",
            "Config.depth = 5",
            "del base.depth",
            "base = Config(6.0, 2)",
            "Config.__eq__ = lambda self, other: True",
        ),
        setup="@dataclasses.dataclass\nclass Config:\n    scale: float\n    depth: int = 1\n"
        "    name: str = 'sin'\n    @property\n"
        "    def total(self): return self.scale * self.depth\n"
        "base = Config(2.0)",
    ),
    Trait(
        "numbers that calls pass",
        (
            "t = t * x.tag",
            "t = t + line[x.tag % 4 : x.tag % 4 + 4]",
            "t = t + line[x.tag % 5]",
            "t = t + torch.roll(y, x.tag)",
            "t = t + y[..., -(x.tag % 3) - 1 :].sum()",
            "t = t + torch.arange(x.tag + 1).sum()",
            "t = t + torch.zeros(x.tag + 1, 4).shape[0] * x.tag",
            "for i in range(x.tag % 4):\n    t = t + line[i]",
            "if x.tag > 4:\n    t = t - x.tag",
            "t = t * (x.tag / 4) ** 2 - x.tag // 3",
            "line[x.tag % 8] = x.tag\nt = t + line.sum()",
            "seen.append(x.tag)\nt = t + sum(seen) * len(seen)",
            "last.n, before = x.tag, last.n\nt = t + before - last.n",
            "totals[x.tag % 2] = totals.get(x.tag % 2, 0) + x.tag\nt = t + totals[x.tag % 2]",
            "t = t.clone()\nt[..., x.tag % 4] = x.tag",
            "t = t + max(x.tag, 3) - min(x.tag, 5) + abs(x.tag - 4)",
            "a, b = divmod(x.tag, 3)\nt = t * a + b",
            "t = t + (x.tag & 3) + (x.tag << 1) + int(x.tag * 0.5)",
        ),
        (
            "tagged(new(4), 2), new(4)",
            "tagged(new(4), 3), new(4)",
            "tagged(new(4), 5), new(4)",
            "tagged(new(4), 6), new(4)",
            "tagged(new(4), 7), new(4)",
            "tagged(new(4), 2.5), new(4)",
        ),
        sites=("line = torch.arange(9.0) * 2", "seen.clear()", "last.n = 4", "totals.clear()"),
        setup="line, seen, totals = torch.arange(9.0), [], {}\nclass Last: n = 0\nlast = Last()",
    ),
    Trait(
        "numbers out of tensors",
        (
            "n = int(x.abs().sum()) % 4\nt = t + line[n : n + 4]",
            "n = y.argmax().item()\nt = t + line[n]",
            "for i in (y > 0).tolist():\n    t = t * (2 if i else 3)",
            "for n in y.long().tolist():\n    t = t + n",
            "a, b, *rest = y.tolist()\nt = t * a + b + len(rest)",
            "if x.sum().item() > y.sum().item():\n    t = t + 1",
            "best.value = max(best.value, float(y.max()))\nt = t * best.value",
            "loss = y.sum().item()\nif loss < best.value:\n    best.value = loss\n"
            "    best.bad = 0\n"
            "else:\n    best.bad += 1\nt = t + best.bad",
            "best.log.append(y.sum().item())\nt = t + len(best.log)",
            "t = t + line[: int((y > 0).sum())].sum()",
            "t = t * (1 + y.nonzero().shape[0])",
            "n = len(y[y > 0])\nt = t + torch.ones(n, 4).sum(0)",
            "for v in y:\n    if v > 0:\n        t = t + v",
            "t = t + max(y) - min(y)",
            "first, *others = y\nt = t * first + sum(others)",
            "for i, row in enumerate(reversed(y)):\n    t = t + row * i",
            "while best.left > 0 and y.sum() > best.left:\n    best.left -= 1\nt = t + best.left",
            "t = t + y.sum().item() * 0.5 - round(y.max().item())",
        ),
        (
            "new(4), new(4)",
            "new(4).abs() + 1, new(4)",
            "new(4), -new(4).abs()",
            "new(2, 4), new(4)",
        ),
        sites=(
            "line = torch.arange(9.0) * 2",
            "best.value = 0.0",
            "best.bad = 3",
            "best.log.clear()",
            "best.left = 4",
            "best = Best()",
        ),
        setup="line = torch.arange(9.0)\nclass Best:\n    value, bad, left = 0.5, 0, 3\n"
        "    def __init__(self): self.log = []\nbest = Best()",
    ),
    Trait(
        "value that decides in the middle",  # what was drawn and written by then is undone
        (
            "if torch.rand(()) > 0.5:\n    t = t * 2\nelse:\n    t = t - 1",
            "gate.n.add_(y.detach().float())\nif gate.n.sum() > 0:\n    gate.n.zero_()\n"
            "    t = t + 1",
            "gate.n.add_(1)\nif torch.rand(2).sum() > 1:\n    t = t + gate.n\n    gate.seen += 1",
            "gate.w.grad = None\nwith torch.enable_grad():\n"
            "    (gate.w * y.detach().float()).sum().backward()\n"
            "if gate.w.grad.sum() > 0:\n    with torch.no_grad():\n"
            "        gate.w.sub_(gate.w.grad * 0.5)\nelse:\n    gate.bad.append(gate.seen)\n"
            "t = t + gate.w.detach()",
            "with torch.enable_grad():\n    (gate.w * y.detach().float()).sum().backward()\n"
            "if gate.w.grad.abs().max() > 2:\n    gate.w.grad = None\n    t = t * 2",
            "if gate.w.grad is not None:\n    gate.w.grad.mul_(0.5)\n"
            "    t = t * 2 if gate.w.grad.sum() > 1 else t",
            "for _ in range(torch.randint(0, 3, (1,)).item()):\n    t = t + 1",
            "gate.n.mul_(0.5)\nfor v in gate.n.tolist():\n    t = t + (1 if v > 0 else 2)",
            "gate.n += 1\nkept = y[gate.n > 2]\nt = t + kept.numel()",
            "best = gate.n.add_(y.detach().float()).max().item()\n"
            "if best > gate.best:\n    gate.best, gate.seen = best, 0\nt = t * gate.seen",
            "if torch.rand(()) > 0.75:\n    raise ValueError('drawn')",
            "gate.n.add_(1)\nif gate.n[0] > 5:\n    raise KeyError(gate.seen)\nt = t + gate.n",
        ),
        ("new(4), new(4)", "new(2, 4), new(4)", "new(4), -new(4).abs()"),
        ("", "torch.no_grad()"),
        (
            "gate.n.zero_()",
            "gate.n = torch.ones(4)",
            "gate.w.grad = None",
            "gate.w.grad = torch.ones(4)",
            "gate.w.data.fill_(1.0)",
            "gate.seen = 3",
            "gate.best = 0.0",
            "gate.bad.clear()",
            "torch.manual_seed(3)",
        ),
        "class Gate:\n    seen, best = 0, 0.0\n    def __init__(self):\n"
        "        self.n, self.w = torch.zeros(4), nn.Parameter(torch.ones(4))\n"
        "        self.bad = []\ngate = Gate()",
    ),
    Trait(
        "what is printed and logged",
        (
            "print('begun', 2, None, sep='-')",
            "print(t.shape, t.dtype, [len(teller.items)])",
            "print(f'{y.sum().item():.2f} of {len(x)} {teller.name}')",
            "low, high = y.min().item(), y.max().item()\nprint(f'{low:.2f}..{high:.2f}', high)",
            "said = f'{y.sum().item():.1f}'\nprint(said)\nt = t + len(said)",
            "if teller.loud:\n    print(f'{teller.name}: {y.max().item():.1f}', end='!')",
            "teller.n += 1\nif teller.n % 3 == 0:\n    print(f'call {teller.n}')",
            "teller.log.info('%s %.2f', teller.name, y.sum().item())",
            "teller.log.info(f'{y.sum().item():.1f}')\nteller.log.debug('never')",
            "print(teller.items, {'name': teller.name})\nteller.items.append(teller.n)",
            "print(y[0])\nt = t + 1",
            "copied = y.detach().clone()\nprint(copied[0])\ncopied.add_(1)\nt = t + copied",
            "print(f'{y.sum().item():.1f}' if teller.loud else teller.n)",
            "for v in y:\n    print(f'{v.item():.2f}', end=' ')",
        ),
        _ROWS[1:],
        sites=(
            "teller.loud = not teller.loud",
            "teller.name = teller.name + 'b'",
            "teller.items.append('x')",
            "teller.items = []",
            "teller.n = 7",
            "teller.log.setLevel(30)",
            "teller.log.setLevel(20)",
            "teller.logger = 'law_world.other'",
        ),
        setup="import logging\nclass Printing(logging.Handler):\n"
        "    def emit(self, record):\n"
        "        print(record.name, record.lineno, record.funcName, record.getMessage())\n"
        "class Teller:\n    loud, name, n, logger = True, 'a', 0, 'law_world'\n"
        "    def __init__(self):\n        self.items = []\n"
        "        self.log.handlers[:], self.log.propagate = [Printing()], False\n"
        "        self.log.setLevel(20)\n"
        "    @property\n    def log(self): return logging.getLogger(self.logger)\n"
        "teller = Teller()",
    ),
    Trait(
        "containers in a named tuple",
        (
            "t = t * settings[0]['scale']",
            "scales, shifts = settings\nt = t * scales['scale'] + shifts[0]",
            "for part in settings:\n    t = t + len(part)",
            "t = t * settings.scales['scale'] + settings.shifts[-1]",
            "t = t * settings._asdict()['scales']['scale']",
            "t = t + sum(settings.total())",
            "t = t + sum(sum(part) if isinstance(part, list) else 1 for part in settings)",
            "settings.shifts.append(1.0)\nt = t + len(settings[1])",
        ),
        _ROWS,
        sites=(
            "settings.scales['scale'] = 3.0",
            "settings.scales['other'] = 1.0",
            "settings.shifts[0] = 2.0",
            "settings.shifts.append(4.0)",
            "settings.shifts.clear()",
            "settings = Settings({'scale': 4.0}, [0.5])",
            "settings = settings._replace(shifts=[0.25])",
        ),
        setup="class Settings(collections.namedtuple('Settings', 'scales shifts')):\n"
        "    def total(self): return self[1]\n"
        "settings = Settings({'scale': 2.0}, [0.5])",
    ),
    Trait(
        "contexts and generators of one's own",
        (
            "with swapped(gains, 3.0):\n    t = t * gains.now",
            "with swapped(gains, 3.0) as before, swapped(gains, before + 1):\n"
            "    t = t * gains.now",
            "with Nested():\n    t = t * gains.now * Nested.depth",
            "with contextlib.ExitStack() as stack:\n"
            "    stack.callback(setattr, gains, 'n', gains.n + 1)\n"
            "    t = t * gains.n",
            "with contextlib.suppress(KeyError):\n    t = t * gains.table['k']\n    t = t + 1",
            "for v in steps(3):\n    t = t + v",
            "t = t + sum(v * gains.now for v in steps(2))",
            "t = t * next(v for v in steps(4) if v > gains.now)",
            "both = steps(2), steps(2)\nfor a, b in zip(*both):\n    t = t * a + b",
            "talk = echo()\nnext(talk)\nt = t + talk.send(gains.now) + talk.send(2.0)",
            "def deeper(n):\n    yield n\n    if n > 0:\n        yield from deeper(n - 1)\n"
            "t = t + sum(deeper(int(gains.now)))",
            "fns = [lambda v, k=k: v * k + gains.now for k in (1.0, 2.0)]\nfor f in fns:\n"
            "    t = f(t)",
            "with torch.no_grad(), swapped(gains, 2.5):\n    t = t + gains.now",
            "try:\n    with swapped(gains, 9.0):\n        raise KeyError('k')\nexcept KeyError:\n"
            "    t = t * gains.now",
        ),
        ("new(4), new(4)", "new(2, 4), new(4)", "new(4).requires_grad_(), new(4)"),
        sites=(
            "gains.now = 4.0",
            "gains.now = 1",
            "gains.n = 5",
            "gains.table['k'] = 2.0",
            "gains.table.clear()",
            "Nested.depth = 3",
            "Nested.__exit__ = lambda self, *a: None",
            "Gains.now = 6.0",
            "def steps(n): yield from range(n, 2 * n)",
            "def echo():\n    while True: got = yield 1.0",
        ),
        setup="class Gains: now, n = 2.0, 0\ngains = Gains()\ngains.table = {}\n"
        "@contextlib.contextmanager\ndef swapped(o, v):\n    before, o.now = o.now, v\n    try:\n"
        "        yield before\n    finally:\n        o.now = before\n"
        "class Nested:\n    depth = 0\n    def __enter__(self):\n        Nested.depth += 1\n"
        "    def __exit__(self, *a):\n        Nested.depth -= 1\n"
        "def steps(n):\n    for i in range(n):\n        gains.n += 1\n        yield i\n"
        "def echo():\n    got = 0.0\n    while True:\n        got = yield got * 2",
    ),
    Trait(
        "operators of a class",
        (
            "t = t + (unit + unit).v",
            "t = (unit @ t) * 2",
            "t = t * unit[1]",
            "for v in unit:\n    t = t + v",
            "if 2.0 in unit:\n    t = t * 2",
            "if unit == Unit(2.0):\n    t = t + 1",
            "t = t * (3 if unit < Unit(3.0) else 4)",
            "t = t + float(unit) + int(unit)",
            "unit[0] = unit[0] + 1\nt = t * unit[0]",
            "more = unit\nmore += Unit(1.0)\nt = t * more.v",
            "t = t * -unit.v if unit else t",
            "t = t + sorted([Unit(3.0), unit])[0].v",
            "t = t * pick(unit)",
            "t = t * pick(x.dim())",
            "t = scaled(t)",
            "t = scaled(t, k=scaled.keywords['k'] + 1)",
            "t = t + {Unit(2.0): 5.0}.get(unit, 1.0)",
            "t = f'{unit:g}'.count('2') * t + len(str(unit))",
            "t = t * operator.attrgetter('v')(unit) + operator.itemgetter(1)(unit)",
        ),
        ("new(4), new(4)", "new(2, 4), new(4)"),
        sites=(
            "unit.v = 3.0",
            "unit.v = 2",
            "unit.parts[1] = 4.0",
            "unit.parts.append(2.0)",
            "Unit.__add__ = lambda self, other: Unit(9.0)",
            "Unit.__matmul__ = lambda self, t: t - 1",
            "Unit.__contains__ = lambda self, v: v == 7",
            "Unit.__eq__ = lambda self, other: False\nUnit.__hash__ = lambda self: 1",
            "Unit.__iter__ = lambda self: iter([5.0])",
            "Unit.__lt__ = lambda self, other: False",
            "Unit.__getitem__ = lambda self, i: 6.0",
            "Unit.__iadd__ = lambda self, other: self",
            "Unit.__format__ = lambda self, spec: '222'",
            "pick.register(Unit, lambda v: 11.0)",
            "pick.register(int, lambda v: 13.0)",
            "scaled.keywords['k'] = 4.0",
            "scaled = functools.partial(scale, k=5.0)",
            "unit = Unit(3.0)",
            "unit.__class__ = type('Sub', (Unit,), {'__float__': lambda self: 8.0})",
        ),
        setup="import operator\n@functools.total_ordering\nclass Unit:\n"
        "    def __init__(self, v):\n"
        "        self.v, self.parts = v, [1.0, v]\n"
        "    def __add__(self, o): return Unit(self.v + o.v)\n"
        "    def __matmul__(self, t): return t * self.v\n"
        "    def __getitem__(self, i): return self.parts[i]\n"
        "    def __setitem__(self, i, v): self.parts[i] = v\n"
        "    def __iter__(self): return iter(self.parts)\n"
        "    def __contains__(self, v): return v in self.parts\n"
        "    def __eq__(self, o): return isinstance(o, Unit) and self.v == o.v\n"
        "    def __hash__(self): return hash(self.v)\n"
        "    def __lt__(self, o): return self.v < o.v\n"
        "    def __float__(self): return float(self.v)\n    def __int__(self): return int(self.v)\n"
        "    def __bool__(self): return self.v > 1\n"
        "    def __format__(self, spec): return format(self.v, spec)\n"
        "    def __str__(self): return f'<{self.v}>'\nunit = Unit(2.0)\n"
        "@functools.singledispatch\ndef pick(v): return 2.0\n@pick.register\n"
        "def _(v: Unit): return v.v\n"
        "def scale(t, k=1.0): return t * k\nscaled = functools.partial(scale, k=3.0)",
    ),
    Trait(
        "iterators of the library",
        (
            "for a, b in itertools.product(rates, [1, 2]):\n    t = t * a + b",
            "for v in itertools.accumulate(rates):\n    t = t + v",
            "for v in itertools.islice(itertools.cycle(rates), 3):\n    t = t * v",
            "for i, (a, b) in enumerate(zip(rates, rates[1:])):\n    t = t + a * i - b",
            "for k, group in itertools.groupby(rates, key=lambda v: v > 1):\n"
            "    t = t + sum(group) + k",
            "for v in itertools.chain(rates, filter(None, rates)):\n    t = t + v",
            "for n, v in zip(itertools.count(places.n), rates):\n    t = t + n * v",
            "t = t + collections.Counter(rates).most_common(1)[0][0]",
            "t = t * collections.ChainMap(over, under)['k']",
            "for v in sorted(rates, key=lambda v: -v):\n    t = t * 2 + v",
            "t = t + sum(map(operator.mul, rates, reversed(rates)))",
            "t = t * functools.reduce(operator.add, rates, places.n)",
            "t = t * any(v > 2 for v in rates) + all(rates)",
            "a, *b = rates\nt = t * a + sum(b)",
            "rates.sort()\nt = t * rates[0]",
            "t = t + [i for i, v in enumerate(rates) if v > 1][0]",
            "places.n = next(i for i in itertools.count(places.n) if i % 2 == 0) + 1\n"
            "t = t * places.n",
        ),
        ("new(4), new(4)", "new(2, 4), new(4)"),
        sites=(
            "rates[0] = 3.0",
            "rates.append(1.5)",
            "rates.reverse()",
            "rates = [1, 2.0]",
            "rates = tuple(rates)",
            "places.n = 4",
            "over['k'] = 5.0",
            "over.clear()",
            "under['k'] = 7.0",
        ),
        setup="import itertools, operator\n"
        "rates, over, under = [2.0, 0.5], {'k': 2.0}, {'k': 3.0}\n"
        "class Places: n = 1\nplaces = Places()",
    ),
)

_TRANSFORMED = (
    Trait(
        "transforms of torch.func",
        (
            "t = t + torch.vmap(lambda r: r * law.rate + law.base)(y)",
            "t = t + torch.func.grad(law.energy)(y)",
            "t = t + torch.vmap(torch.func.grad(lambda r: r * r * law.rate))(y)",
            "t = t + torch.func.grad(law.counted)(y) * law.calls",
            "made, pull = torch.func.vjp(lambda v: v * law.weight, y)\nt = t + pull(made)[0]",
            "t = t + torch.func.jvp(lambda v: v * law.weight, (y,), (y,))[1]",
            "t = t + torch.func.jacrev(lambda v: v * law.weight * law.parts[0])(y).sum(0)",
            "t = t + torch.func.hessian(law.energy)(y).sum(0)",
            "slope, value = torch.func.grad_and_value(law.energy)(y)\n"
            "t = t + slope if value > 2 else t * value",
            "t = t + torch.vmap(lambda r: r * sum(law.parts), chunk_size=2)(y)",
            "t = t + torch.vmap(lambda r, w: r * w, in_dims=(None, 0))(y, law.weight).sum(0)",
        ),
        ("new(4), new(4)", "new(2, 4), new(4)"),
        sites=(
            "law.rate = 3.0",
            "law.base = 0.5",
            "Law.base = 2.0",
            "law.weight = torch.full((4,), 0.5)",
            "law.weight.mul_(2)",
            "law.parts[0] = 2.0",
            "law.parts.append(1.5)",
            "law.calls = 5",
            "law = Law()",
        ),
        setup="class Law:\n    base = 1.0\n    def __init__(self):\n"
        "        self.rate, self.calls, self.parts = 2.0, 0, [1.0]\n"
        "        self.weight = torch.full((4,), 2.0)\n"
        "    def energy(self, v): return (v * v * self.rate * self.base).sum()\n"
        "    def counted(self, v):\n        self.calls += 1\n        return self.energy(v)\n"
        "law = Law()",
    ),
)

HABITS = (*_CACHES, *_TRAINED, *_PYTHON, *_TRANSFORMED)
