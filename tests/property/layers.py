"""Layers and draws: what ordinary modules and distributions do unseen, one production each.

Layers that draw, or write to their weights, inside one call of torch; distributions, by which a
program decides; what custom functions get for their arguments; and the old ways to make a tensor.
"""

from __future__ import annotations

from property.traits import Trait

_ROWS = ("new(4), new(4)", "new(2, 4), new(4)", "new(3, 4), new(4)")
_WANTED = ("new(4).requires_grad_(), new(4)", *_ROWS[:2])

_USES = {"Size": "s.numel()", "Config": "s.a", "First": "next(iter(s.values()))", "Sum": "sum(s)"}


def _write_function(name: str) -> str:
    """A custom function that computes with what it is given beside a tensor."""
    return (
        f"class By{name}(torch.autograd.Function):\n    @staticmethod\n"
        f"    def forward(ctx, t, s):\n        ctx.s = s\n        return t * {_USES[name]}\n"
        f"    @staticmethod\n    def backward(ctx, g):\n        s = ctx.s\n"
        f"        return g * {_USES[name]}, None\n"
    )


LAYERS = (
    Trait(
        "layers that draw",
        (
            "t = t + gru(x.reshape(-1, 1, 4).float())[0].sum()",
            "out, memory.h = gru(y.reshape(1, 1, 4).float(), memory.h)\n"
            "memory.h = memory.h.detach()\nt = t + out.reshape(4)",
            "t = t + mha(*[x.reshape(-1, 1, 4).float()] * 3)[0].sum(0)",
            "out = gru(y.reshape(1, 1, 4).float())[0].sum()\nif out > 0:\n    t = t * 2\n"
            "t = t + out",
            "if mha(*[y.reshape(1, 1, 4).float()] * 3)[0].sum() > 0:\n    t = t - 1",
            "gru(y.reshape(1, 1, 4).float())\nt = t + torch.rand(4)",
            "nn.init.kaiming_uniform_(lin.weight)\nt = t + lin.weight.detach().sum()",
            "lin.reset_parameters()\nif lin.bias.sum() > 0:\n    t = t + 1",
            "nn.init.normal_(lin.bias)\nt = t + lin(y.float())",
            "t = t + words(torch.tensor([1, 2])).sum(0)",
            "made = nn.Linear(4, 4)\nt = t + made(y.float()).detach()",
        ),
        _ROWS,
        ("", "torch.no_grad()"),
        (
            "gru.eval()",
            "gru.train()",
            "gru.dropout = 0.0",
            "gru.weight_ih_l0.data.mul_(0.5)",
            "mha.eval()",
            "mha.train()",
            "mha.dropout = 0.25",
            "words.weight.data.mul_(5)",
            "words.max_norm = 0.5",
            "memory.h = torch.ones(2, 1, 4)",
            "lin.weight.data.fill_(1.0)",
            "torch.manual_seed(3)",
        ),
        "torch.manual_seed(0)\ngru, mha = nn.GRU(4, 4, 2, dropout=0.5), "
        "nn.MultiheadAttention(4, 2, dropout=0.5)\n"
        "lin, words = nn.Linear(4, 4), nn.Embedding(5, 4, max_norm=1.0)\n"
        "class Memory: h = torch.zeros(2, 1, 4)\nmemory = Memory()",
    ),
    Trait(
        "operators that write beside their result",
        (
            "part = [(t * 1).detach()]\ntorch._amp_foreach_non_finite_check_and_unscale_("
            "part, kept.found.zero_(), kept.scale)\nif kept.found.item():\n    t = t * 2\n"
            "t = t + part[0]",
            "torch._amp_update_scale_(kept.scale, kept.count, kept.found, 2.0, 0.5, 2)\n"
            "t = t * kept.count.item() + kept.scale",
            "t = t + torch.fused_moving_avg_obs_fake_quant(y.float(), kept.on, kept.on, kept.low, "
            "kept.high, kept.unit, kept.zero, 0.5, 0, 255, 0)\nif kept.high.item() > 1:\n"
            "    t = t - 1",
            "torch._fused_sgd_([kept.w], [y.detach().float()], [kept.m], weight_decay=0.0, "
            "momentum=0.5, lr=0.5, dampening=0.0, nesterov=False, maximize=False, "
            "is_first_step=False)\nif kept.m.sum().item() > 2:\n    t = t * 2\nt = t + kept.w",
            "t = t + F.batch_norm(x.reshape(-1, 4).float(), kept.m, kept.w, training=True)[0]\n"
            "if kept.m.sum() > 1:\n    t = t + kept.m",
        ),
        (*_ROWS, "new(4) * float('inf'), new(4) * 3"),
        ("", "torch.no_grad()"),
        (
            "kept.found.fill_(1.0)",
            "kept.scale = torch.ones(1)",
            "kept.count.zero_()",
            "kept.high = torch.zeros(1)",
            "kept.m.zero_()",
            "kept.w = torch.ones(4)",
        ),
        "class Kept: pass\nkept = Kept()\nkept.found, kept.scale = torch.zeros(1), torch.ones(1)\n"
        "kept.count, kept.zero = torch.zeros(1, dtype=torch.int32), "
        "torch.zeros(1, dtype=torch.int32)\n"
        "kept.on, kept.unit = torch.tensor([1]), torch.ones(1)\n"
        "kept.low, kept.high = torch.zeros(1), torch.zeros(1)\n"
        "kept.w, kept.m = torch.ones(4), torch.zeros(4)",
    ),
    Trait(
        "distributions",
        (
            "lam = dist.Beta(knobs.a, 1.0).sample().item()\nt = t * lam + (1 - lam) * y",
            "lam = dist.Beta(knobs.a, 1.0).sample()\nif lam > 0.5:\n    t = t * 2\nt = t + lam",
            "act = dist.Categorical(logits=y.float() * knobs.a).sample()\nt = t + act",
            "act = dist.Categorical(logits=y.float()).sample().item()\n"
            "knobs.counts[act] = knobs.counts.get(act, 0) + 1\nt = t * knobs.counts[act]",
            "d = dist.Normal(y.float(), knobs.a)\ns = d.rsample()\nt = t + s + d.log_prob(s)",
            "t = t + dist.Geometric(torch.full((4,), 0.5)).sample()",
            "t = t + dist.Dirichlet(torch.ones(4) * knobs.a).rsample()",
            "t = t + dist.Bernoulli(0.5).sample((4,))",
            "t = t + dist.kl_divergence(dist.Normal(y.float(), 1.0), dist.Normal(0.0, knobs.a))",
            "t = t * dist.Poisson(knobs.a).sample()",
        ),
        _ROWS,
        sites=("knobs.a = 0.5", "knobs.a = 1.5", "knobs.a = 3.0", "knobs.counts.clear()"),
        setup="from torch import distributions as dist\n"
        "class Knobs: a, counts = 1.0, {}\nknobs = Knobs()",
    ),
    Trait(
        "arguments of a custom function",
        (
            "t = BySize.apply(t, t.shape)",
            "t = BySize.apply(t, x.shape[:1])",
            "t = ByConfig.apply(t, config)",
            "t = ByFirst.apply(t, ordered)",
            "t = BySum.apply(t, rates)",
            "t = BySum.apply(t, [float(x.dim()), 2.0])",
            "t = BySum.apply(t, counted)\nt = t * len(counted)",
            "t = ByConfig.apply(t, pair)",
            "rates[0] = rates[0] * 0.5\nt = BySum.apply(t, rates)",
        ),
        _WANTED,
        sites=(
            "config['a'] = 3.0",
            "config['a'] = 0.5",
            "config = Config(a=4.0)",
            "ordered.move_to_end('a')",
            "ordered['b'] = 5.0",
            "ordered['a'] = 0.25",
            "rates[0] = 3.0",
            "rates.append(1.5)",
            "rates = [0.25, 4.0]",
            "counted.k = 3.0",
            "counted.append(2.5)",
            "pair = Pair(3.0, 1.0)",
            "pair = Pair(0.5, 1.0)",
        ),
        setup="class Config(dict): __getattr__ = dict.__getitem__\n"
        "class Counted(list): k = 2.0\nPair = collections.namedtuple('Pair', 'a b')\n"
        "config, pair, counted = Config(a=2.0), Pair(2.0, 1.0), Counted([1.0])\n"
        "ordered, rates = collections.OrderedDict(a=1.0, b=2.0), [2.0, 1.0]\n"
        + "".join(map(_write_function, _USES)),
    ),
    Trait(
        "tensors made in old ways",
        (
            "t = t + x.new(x.size()).fill_(2.0)",
            "t = t + x.new(x.shape[0], 4).zero_().sum() + x.new(x.shape).fill_(1.0).numel()",
            "t = t + x.new([1.0, old.k])",
            "t = t + torch.Tensor(4).fill_(old.k) + torch.FloatTensor([1, 2, 3, 4])",
            "t = t + torch.zeros(x.size()).type_as(x)",
            "torch.add(y, old.k, out=old.out)\nt = t + old.out",
            "t = t + old.room.shape[0]",
            "if old.room.numel() == 0:\n    torch.ones(4, out=old.room)\nt = t * old.room",
            "old.room.resize_(4).copy_(y)\nt = t + old.room",
            "t = t + torch.cat([old.room.reshape(-1), y]).sum()",
        ),
        _ROWS,
        sites=(
            "old.k = 3.0",
            "old.k = 0.5",
            "old.room = torch.zeros(0)",
            "old.room.resize_(0)",
            "torch.ones(4, out=old.room.resize_(0))",
            "torch.ones(2, 2, out=old.room.resize_(0))",
            "old.out = torch.zeros(4)",
            "old.out.zero_()",
        ),
        setup="class Old: k = 2.0\nold = Old()\nold.out, old.room = torch.zeros(4), torch.zeros(0)",
    ),
)
