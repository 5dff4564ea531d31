"""Programs about state in corners that were stale, lost an effect or raised, shrunk."""

import pytest
from property.twins import Call, Do, check_twins

CALL = Call("new(4), new(4)", times=3)
_SIDE = (
    "import importlib, sys\nside, other = types.ModuleType('aside'), types.ModuleType('other')\n"
    "side.k, other.k = 2.0, 0.5\nsys.modules['law_side'] = side\n"
    "modes.callback(sys.modules.pop, 'law_side', None)\n"
)
_HALF = "class Half: __slots__ = 'a', 'b'\nhalf = Half()\nhalf.b = 1.0\n"
_OWN = "class Own(threading.local):\n    def __init__(self): self.n = 1.0\nown = Own()\n"
_HOLD = (
    "def hold(v):\n    def get(): return v\n    def put(w):\n        nonlocal v\n        v = w\n"
    "    return get, put\n"
)
_KEPT = "import json\nclass Kept: v = 1.5\nkept, numbers = Kept(), {'v': 1.5, 'n': 3}\n"
_NUMBERS = ["kept.v = 2.5", "kept.v = 4.5", "numbers['v'] = 2.5", "numbers['n'] = 500"]
_HOOKS = (
    "from torch.nn.modules import module as hooks\nfrom torch.optim import optimizer as steps\n"
    "def until(handle):\n    modes.callback(handle.remove)\n    return handle\n"
)
FOUND = {
    "what a thread has of its own": (
        _OWN + "def call(x, y):\n    own.n += 1\n    return x * own.n",
        ["own.n = 5", "own = Own()", "own.n = 2.5"],
    ),
    "what a thread has of its own, in a list": (
        _OWN + "owns = [own]\ndef call(x, y): return x * owns[0].n",
        ["own.n = 5", "owns = [Own()]", "owns = [Own()]\nowns[0].n = 3.0", "owns[0].n = 9.0"],
    ),
    "module under another name than its own": (
        _SIDE + "def call(x, y): return x * importlib.import_module('law_side').k",
        ["sys.modules['law_side'] = other", "other.k = 5.0", "sys.modules['law_side'] = side"],
    ),
    "module that isn't there": (
        _SIDE + "del sys.modules['law_side']\ndef call(x, y):\n"
        "    try: return x * importlib.import_module('law_side').k\n"
        "    except ImportError: return x",
        ["sys.modules['law_side'] = side", "sys.modules['law_side'] = None"],
    ),
    "namespace in the place of a module": (
        _SIDE + "sys.modules['law_side'] = types.SimpleNamespace(k=3.0)\n"
        "def call(x, y): return x * importlib.import_module('law_side').k",
        ["sys.modules['law_side'].k = 4.0", "sys.modules['law_side'] = side"],
    ),
    "slot that is empty beside one that counts": (
        _HALF + "def call(x, y):\n    half.b = half.b + 0.5\n    return x * half.b",
        ["half.b = 3.0", "half.a = 1.0", "del half.a"],
    ),
    "slot whose emptiness ends the call": (
        _HALF + "half.a = 2.0\ndef call(x, y):\n    half.b = half.b + 0.5\n    return x * half.a",
        ["del half.a", "half.a = 1"],
    ),
    "deque in a cell that is replaced": (
        _HOLD + "get, put = hold(collections.deque([1.0, 2.0, 3.0], maxlen=3))\n"
        "def call(x, y):\n    row = get()\n    row.rotate(-1)\n    return x + row[0]",
        ["get().appendleft(2.0)", "get().pop()", "put(collections.deque([4.0]))"],
    ),
    "set in a cell that is replaced": (
        _HOLD + "get, put = hold({1, 2})\n"
        "def call(x, y):\n    row = get()\n    row.add(len(row))\n    return x * len(row)",
        ["get().add(7)", "get().discard(1)", "put({5})", "put({5, 6, 7})"],
    ),
    "number that becomes JSON beside what `default` spells": (
        _KEPT + "def call(x, y):\n"
        "    return x * json.loads(json.dumps([kept], default=lambda o: o.v))[0]",
        _NUMBERS,
    ),
    "number that a user's encoder returns": (
        _KEPT + "class Encoder(json.JSONEncoder):\n    def default(self, o): return o.v\n"
        "def call(x, y): return x * json.loads(json.dumps([kept], cls=Encoder))[0]",
        _NUMBERS,
    ),
    "number in JSON with an indent": (
        _KEPT + "def call(x, y): return x * len(json.dumps([kept.v, numbers], indent=1))",
        _NUMBERS,
    ),
    "number as a key in JSON": (
        _KEPT + "def call(x, y): return x * len(json.dumps({kept.v: 1, numbers['n']: 2}))",
        _NUMBERS,
    ),
    "hooks on all modules, and one that the call makes": (
        _HOOKS + "def call(x, y): return nn.Sequential(nn.ReLU(), nn.Tanh())(x)",
        [
            "handle = until(hooks.register_module_forward_hook(lambda m, a, o: o * 2))",
            "handle.remove()",
            "until(hooks.register_module_module_registration_hook(lambda m, n, c: nn.ELU()))",
        ],
    ),
    "hooks on what modules register": (
        _HOOKS + "class Tiny(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.w = nn.Parameter(torch.ones(4))\n"
        "        self.register_buffer('b', torch.ones(4))\n"
        "def call(x, y):\n    tiny = Tiny()\n    return x * tiny.w.detach() + tiny.b",
        [
            "until(hooks.register_module_buffer_registration_hook(lambda m, n, b: b * 3))",
            "until(hooks.register_module_parameter_registration_hook("
            "lambda m, n, p: nn.Parameter(p.detach() * 2)))",
        ],
    ),
    "hook on a buffer that the call replaces": (
        _HOOKS + "tiny = nn.Module()\ntiny.register_buffer('b', torch.zeros(4))\n"
        "def call(x, y):\n    tiny.b = tiny.b + 1\n    return x + tiny.b",
        ["until(hooks.register_module_buffer_registration_hook(lambda m, n, b: b * 2))"],
    ),
    "hooks on all optimizers": (
        _HOOKS + "w, seen = nn.Parameter(torch.ones(4)), []\nopt = torch.optim.SGD([w], lr=0.5)\n"
        "def call(x, y):\n    opt.zero_grad()\n    (w * y).sum().backward()\n    opt.step()\n"
        "    return x + w.detach()",
        [
            "handle = until(steps.register_optimizer_step_pre_hook(lambda *a: seen.append(1)))",
            "handle.remove()",
            "until(steps.register_optimizer_step_post_hook(lambda *a: w.data.mul_(2)))",
        ],
    ),
    "what `module.to` does with parameters": (
        "modes.callback(torch.__future__.set_overwrite_module_params_on_conversion, False)\n"
        "net = nn.Linear(4, 4)\ndef call(x, y):\n    w = net.weight\n    net.double()\n"
        "    net.float()\n    return net(x), w is net.weight",
        ["torch.__future__.set_overwrite_module_params_on_conversion(True)"],
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_twins_agree_about(name) -> None:
    program, writes = FOUND[name]
    check_twins(program + "\n", [CALL, *[step for text in writes for step in (Do(text), CALL)]])


@pytest.mark.parametrize("held", ["own", "bare"])
def test_twins_agree_about_what_a_thread_has_of_its_own_as_an_argument(held) -> None:
    program = _OWN + "bare = threading.local()\nbare.n = 1.0\ndef call(x, y): return x * x.tag.n\n"
    call = Call(f"tagged(new(4), {held}), new(4)", times=3)
    writes = (f"{held}.n = 5", f"{held}.n = 7.5", "own = Own()\nown.n = 3.0")
    check_twins(program, [call, *[step for text in writes for step in (Do(text), call)]])
