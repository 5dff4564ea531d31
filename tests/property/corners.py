"""Corners: state that lies where few look, one production each.

What a thread has of its own, slots that are empty, containers that only a cell holds, modules that
are imported by name, hooks on everything, and numbers that become text.
"""

from __future__ import annotations

from property.traits import Trait

_ROWS = ("new(4), new(4)", "new(2, 4), new(4)")
_HOOK = "handle = {}; modes.callback(handle.remove)"

CORNERS = (
    Trait(
        "what a thread has of its own",
        (
            "t = t * own.n",
            "own.n += 1\nt = t * own.n",
            "own.rows = (*own.rows, 1.0)\nt = t + len(own.rows)",
            "t = t * x.tag.n",
            "t = t * getattr(x.tag, 'extra', 3.0) + bare.n",
            "t = t * owns[0].n",
        ),
        ("tagged(new(4), own), new(4)", "tagged(new(4), bare), new(4)"),
        sites=(
            "own.n = 5.0",
            "own = Own()",
            "own.rows = ()",
            "own.extra = 7.0",
            "own.__dict__['n'] = 6.0",
            "Own.rows = (1.0, 2.0)",
            "bare.n = 4.0",
            "del bare.n",
            "owns[0] = Own()",
            "owns[0].n = 8.0",
        ),
        setup="class Own(threading.local):\n    rows = ()\n    def __init__(self): self.n = 2.0\n"
        "own, bare, owns = Own(), threading.local(), [Own()]\nbare.n = 3.0",
    ),
    Trait(
        "slots that are empty",
        (
            "half.b = half.b + 1.5\nt = t * half.b",
            "half.b = half.b * 0.5\nt = t * half.a",
            "t = t * (half.a if hasattr(half, 'a') else half.b)",
            "made = Half()\nmade.b = half.b * 2\nhalf.b += 1\nt = t + made.b",
        ),
        _ROWS,
        sites=("half.a = 1.0", "del half.a", "half.b = 3.0", "half = Half()\nhalf.b = 4.0"),
        setup="class Half: __slots__ = 'a', 'b'\nhalf = Half()\nhalf.b = 1.0",
    ),
    Trait(
        "containers that only a cell holds",
        (
            "row = get()\nrow.rotate(-1)\nt = t + row[0]",
            "row = get()\nrow.append(row.popleft() * 2)\nt = t * row[0]",
            "marks().add(len(marks()))\nt = t * len(marks())",
        ),
        _ROWS,
        sites=(
            "put(collections.deque([4.0]))",
            "put(collections.deque([1.0, 2.0, 3.0], maxlen=3))",
            "get().append(9.0)",
            "get().appendleft(0.5)",
            "mark({5})",
            "mark({5, 6})",
            "marks().discard(1)",
        ),
        setup="def hold(v):\n    def get(): return v\n    def put(w):\n        nonlocal v\n"
        "        v = w\n    return get, put\n"
        "get, put = hold(collections.deque([1.0, 2.0, 3.0], maxlen=3))\nmarks, mark = hold({1, 2})",
    ),
    Trait(
        "modules that are imported by name",
        (
            "t = t * importlib.import_module('law_side').k",
            "try:\n    t = t * importlib.import_module('law_absent').k\n"
            "except ImportError:\n    t = t + 1",
            "t = t * __import__('law_side').k",
        ),
        sites=(
            "side.k = 3.0",
            "other.k = 4.0",
            "sys.modules['law_side'] = other",
            "sys.modules['law_side'] = side",
            "sys.modules['law_side'] = types.SimpleNamespace(k=5.0)",
            "sys.modules['law_absent'] = other",
            "sys.modules['law_absent'] = None",
            "sys.modules.pop('law_absent', None)",
        ),
        setup="import importlib, sys\n"
        "side, other = types.ModuleType('aside'), types.ModuleType('law_other')\n"
        "side.k, other.k = 2.0, 0.5\nsys.modules['law_side'] = side\n"
        "modes.callback(sys.modules.pop, 'law_side', None)\n"
        "modes.callback(sys.modules.pop, 'law_absent', None)",
    ),
    Trait(
        "hooks on everything",
        (
            "t = nn.Sequential(nn.ReLU(), nn.Tanh())(t)",
            "made = Tiny()\nt = made(t) * made.w.detach() + made.b",
            "tiny.b = tiny.b + 1\nt = t + tiny.b",
            "t = tiny(t)",
            "with torch.enable_grad():\n    tiny.w.grad = None\n"
            "    (tiny.w * y.detach().float()).sum().backward()\n    opt.step()\n"
            "t = t + tiny.w.detach()",
        ),
        sites=(
            _HOOK.format("hooks.register_module_forward_hook(lambda m, a, o: o * 2)"),
            _HOOK.format(
                "hooks.register_module_parameter_registration_hook("
                "lambda m, n, p: nn.Parameter(p.detach() * 2))"
            ),
            _HOOK.format("hooks.register_module_buffer_registration_hook(lambda m, n, b: b * 3)"),
            _HOOK.format(
                "hooks.register_module_module_registration_hook(lambda m, n, c: nn.Identity())"
            ),
            _HOOK.format("steps.register_optimizer_step_pre_hook(lambda *a: seen.append(1))"),
            _HOOK.format("steps.register_optimizer_step_post_hook(lambda *a: seen.append(2))"),
            "handle.remove()",
        ),
        setup="from torch.nn.modules import module as hooks\n"
        "from torch.optim import optimizer as steps\n"
        "class Tiny(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.w = nn.Parameter(torch.ones(4))\n"
        "        self.register_buffer('b', torch.ones(4))\n"
        "    def forward(self, t): return t * 2\n"
        "tiny, seen = Tiny(), []\nopt = torch.optim.SGD(tiny.parameters(), lr=0.5)\n"
        "handle = tiny.register_forward_hook(lambda m, a, o: o + 1)",
    ),
    Trait(
        "numbers that become JSON",
        (
            "t = t * len(json.dumps(numbers))",
            "t = t * json.loads(json.dumps(numbers, indent=1))['v']",
            "t = t * json.loads(json.dumps([kept], default=lambda o: o.v))[0]",
            "t = t * json.loads(json.dumps([kept], cls=Encoder))[0]",
            "t = t + len(json.dumps({numbers['v']: 1, numbers['n']: [numbers['n']]}))",
            "t = t + len(Encoder(indent=2, sort_keys=True).encode([kept, numbers]))",
        ),
        _ROWS,
        sites=(
            "numbers['v'] = 2.5",
            "numbers['v'] = 10.25",
            "numbers['n'] = 4",
            "numbers['n'] = 500",
            "kept.v = 2.5",
            "kept.v = 12.5",
            "Encoder.default = lambda self, o: 7.0",
        ),
        setup="import json\nclass Kept: v = 1.5\nkept, numbers = Kept(), {'v': 1.5, 'n': 3}\n"
        "class Encoder(json.JSONEncoder):\n    def default(self, o): return o.v",
    ),
)
