"""Traits: what a program can be about beside its slots, with the calls and writes that show it.

The first table asks for something of a call's arguments or of torch's state. The others are classes
of programs, one production each: counters, identity, containers that a run stores, stand-ins,
custom autograd, results, and what torch may hand back instead of a copy. A production's name is
what `machine.py --about NAME` takes.
"""

from __future__ import annotations

from dataclasses import dataclass

FOUR = ("new(4), new(4)",)


@dataclass(frozen=True)
class Trait:
    """Something that a program does, or asks for.

    A program that has it is called with each of the forms, and inside each of the contexts; the
    sites are written between its calls.
    """

    name: str
    statements: tuple[str, ...]
    forms: tuple[str, ...] = FOUR
    around: tuple[str, ...] = ("",)
    sites: tuple[str, ...] = ()
    setup: str = ""
    helper: tuple[str, str] | None = None  # a definition that a statement stands in, and its use
    returns: tuple[str, ...] = ()  # what the program returns, where that is the matter
    late: bool = False  # its backwards come late: the sites are written in between


_ASKED = (
    Trait(
        "dtype of an argument",
        ("if x.dtype == torch.float64:\n    t = t + 1", "t = t * x.element_size()"),
        ("new(4), new(4)", "new(4, dtype=torch.float64), new(4)"),
    ),
    Trait(
        "shape",
        (
            "t = t * x.shape[0]",
            "t = t + x.numel()",
            "for row in x:\n    t = t + row.sum()",
            "t = t + len(x)",
            "t = t.reshape(x.shape[0], -1)",
            "if x.dim() == 1:\n    t = t * 2",
            "t = t + torch.ones(x.size(0), 4).sum()",
        ),
        ("new(2, 4), new(4)", "new(3, 4), new(4)", "new(4), new(4)", "new(0, 4), new(4)"),
    ),
    Trait(
        "kind of a size",
        (
            "t = t * kind_of(x.shape[0])",
            "if x.shape[0] > 2:\n    t = t * kind_of(x.shape[0])",
            "if x.shape[0] > 3:\n    t = t + exact(x.numel())",
            "t = t + max(x.shape[0], True)",
            "t = t * kept_for(x.shape[0])",
        ),
        ("new(2, 4), new(4)", "new(3, 4), new(4)", "new(4, 4), new(4)", "new(5, 4), new(4)"),
        setup="import datetime\nkept = []\ndef kind_of(n): return 2 if type(n) is int else 3\n"
        "def exact(n): return datetime.timedelta(n).days\n"
        "@functools.lru_cache(2)\ndef kept_for(n):\n    kept.append(n)\n    return n",
    ),
    Trait(
        "stride",
        ("t = t + x.stride(0)", "if x.is_contiguous():\n    t = t * 2"),
        ("new(2, 4), new(4)", "new(4, 2).t(), new(4)", "new(1, 4).expand(2, 4), new(4)"),
    ),
    Trait("offset", ("t = t + x.storage_offset()",), ("new(8)[:4], new(4)", "new(8)[4:], new(4)")),
    Trait(
        "need for gradients",
        ("if x.requires_grad:\n    t = t * 2", "t = t + (x * 2).requires_grad"),
        ("new(4), new(4)", "new(4).requires_grad_(), new(4)"),
    ),
    Trait(
        "leaf",
        ("t = t * (2 if x.is_leaf else 3)",),
        ("new(4).requires_grad_(), new(4)", "new(4).requires_grad_() * 1, new(4)"),
    ),
    Trait(
        "class of a tensor",
        ("if isinstance(x, nn.Parameter):\n    t = t * 2",),
        ("new(4).requires_grad_(), new(4)", "nn.Parameter(new(4)), new(4)"),
    ),
    Trait(
        "attribute of a tensor",
        ("t = t * getattr(x, 'tag', 1.0)",),
        ("new(4), new(4)", "tagged(new(4), 2.0), new(4)", "tagged(new(4), 3.0), new(4)"),
    ),
    Trait(
        "object as argument",
        (
            "t = x.tag.apply(t)",
            "t = t * x.tag.bonus",
            "t = t * x.tag.value if hasattr(x.tag, 'extra') else t - x.tag.value",
        ),
        (
            "tagged(new(4), Low(2.0)), new(4)",
            "tagged(new(4), High(2.0)), new(4)",
            "tagged(new(4), Low(2.0, bonus=7.0)), new(4)",
            "tagged(new(4), Low(2.0, extra=1.0)), new(4)",
        ),
    ),
    Trait(
        "identity",
        ("if x is y:\n    t = t * 3", "t = t * (2 if y is not x else 5)"),
        ("new(4), new(4)", "(z := new(4)), z"),
    ),
    Trait(
        "memory",
        (
            "x.mul_(2)\nt = t + y",
            "y[0] = 3.0\nt = t + x * 2",
            "y.add_(x)\nx.add_(y)",
        ),
        (
            "new(4), new(4)",
            "(z := new(8))[:4], z[2:6]",
            "(z := new(4)), z.view(4)",
            "(z := new(4)), z.detach()",
        ),
    ),
    Trait(
        "value",
        (
            "if (x > 0).all():\n    t = t * 2",
            "if x.sum() > 0:\n    t = t - 1",
            "t = t * (2 if bool(x[..., 0].sum() > 0) else 3)",
            "t = t + int((x > 0).sum())",
            "while t.sum() < 0:\n    t = t + 10",
            "assert x.min() > -9, 'too small'",
            "if x.sum().item() > 0:\n    t = t + 1",
            "t = t * (x.max() > 0).item()",
        ),
        ("new(4).abs() + 1, new(4)", "-new(4).abs() - 1, new(4)"),
    ),
    Trait(
        "grad mode",
        ("if torch.is_grad_enabled():\n    t = t + 1", "t = t * (t * 2).requires_grad"),
        ("new(4).requires_grad_(), new(4)",),
        ("", "torch.no_grad()", "torch.enable_grad()"),
        ("torch.set_grad_enabled(False)", "torch.set_grad_enabled(True)"),
    ),
    Trait(
        "inference mode",
        (
            "if torch.is_inference_mode_enabled():\n    t = t + 1",
            "t = t * (1 if (t * 2).is_inference() else 2)",
        ),
        around=("torch.no_grad()", "torch.inference_mode()"),  # they differ in nothing else
    ),
    Trait(
        "autocast",
        (
            "if torch.is_autocast_enabled('cpu'):\n    t = t + 1",
            "if (t @ torch.eye(4)).dtype == torch.bfloat16:\n    t = t * 2",
            "t = t * (2 if torch.get_autocast_dtype('cpu') == torch.float16 else 1)",
        ),
        around=(
            "",
            "torch.autocast('cpu', torch.bfloat16)",
            "torch.autocast('cpu', torch.float16)",
        ),
    ),
    Trait(
        "default dtype",
        (
            "if torch.get_default_dtype() == torch.float64:\n    t = t + 1",
            "if torch.ones(4).dtype == torch.float64:\n    t = t + 1",
            "t = t * torch.tensor(2.0).element_size()",
        ),
        sites=("torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float32)"),
    ),
    Trait(
        "other flags",
        (
            "if torch.are_deterministic_algorithms_enabled():\n    t = t + 1",
            "t = t + len(torch.get_float32_matmul_precision())",
        ),
        sites=(
            "torch.use_deterministic_algorithms(True)",
            "torch.use_deterministic_algorithms(False)",
            "torch.set_float32_matmul_precision('high')",
        ),
    ),
    Trait(
        "tables of a module",
        ("t = layer(t)", "t = t * layer.weight.sum()", "t = t + layer.count"),
        sites=(
            "layer.weight = nn.Parameter(torch.full((4,), 5.0))",
            "layer._parameters['weight'] = nn.Parameter(torch.full((4,), 7.0))",
            "layer.count = torch.ones(())",
            "layer._buffers['count'] = torch.full((), 3.0)",
        ),
    ),
    Trait(
        "bases of a class",
        ("t = leaf.apply(t)", "t = t * Leaf.bonus", "t = t + len(Leaf.__mro__)"),
        sites=("Leaf.__bases__ = (High,)", "Leaf.__bases__ = (Low,)"),
    ),
    Trait(
        "order of a dict",
        (
            "for v in ranks.values():\n    t = t * 2 + v",
            "t = t * next(iter(ranks.values()))",
            "t = t + list(ranks).index('a')",
        ),
        sites=("ranks.move_to_end('a')", "ranks.move_to_end('b')", "ranks['a'] = ranks.pop('a')"),
    ),
    Trait(
        "context variable",
        ("t = t * knob.get()", "if knob.get() > 2:\n    t = t + 1"),
        sites=("knob.set(3.0)", "knob.set(2.0)", "knob.set(7.0)"),
    ),
    Trait(
        "end of a list",
        ("t = t * rows[-1][-1]", "rows[-1].append(1.0)\nt = t * len(rows[-1])"),
        sites=("rows[1][0] = 3.0", "rows.append([5.0])", "rows[-1].append(7.0)", "rows.reverse()"),
    ),
    Trait(
        "builtins",
        ("t = t + len([1, 2]) * abs(-2)", "t = t * max(1, 2) + round(2.6)"),
        sites=(
            "len = lambda v: 7",
            "abs = lambda v: 9.0",
            "max = lambda *a, **k: 5.0",
            "round = lambda v: 4",
            "del len, abs, max, round",
            "__builtins__ = {**vars(__import__('builtins'))}",
        ),
    ),
)

# --- counters: stored before they are summed, read in between, in every kind of place -------------

_COUNTS = (
    "%c = 0\nfor _ in range(3):\n    %c += 1",
    "%c = 0\nfor _ in range(x.dim()):\n    %c += 1",
    "%c = 0\n%c += 1\nt = t + %c",
    "%c = 2\n%c = %c * %c\nt = t * %c",
    "%c += 1\nif %c > 4:\n    %c = 0",
    "t = t + %c\n%c = 0\n%c -= 1",
    "%c += 2\n%c -= 1",
    "%c = %c + 1\nt = t * %c\n%c = 7",
    "before = %c\n%c = before + 1\n%c = before + 2",
    "%c = 1.5\nfor v in (2.0, 3.0):\n    %c *= v",
    "%c = 0\nwhile %c < x.shape[0]:\n    %c += 1\nt = t * %c",
)


def _count(
    place: str,
    path: str,
    setup: str,
    sites: tuple[str, ...],
    helper: tuple[str, str] | None = None,
) -> Trait:
    statements = tuple(text.replace("%c", path) for text in _COUNTS)
    forms = ("new(4), new(4)", "new(2, 4), new(4)")
    written = (f"{path} = 5", f"{path} = 1.5") if helper is None else ()
    return Trait(f"counter in {place}", statements, forms, ("",), (*written, *sites), setup, helper)


_COUNTERS = (
    _count(
        "an attribute",
        "tally.n",
        "class Tally: pass\ntally = Tally()\ntally.n = 0",
        ("tally = copy.copy(tally)", "del tally.n", "Tally.n = 3", "tally.__dict__ = {'n': 4}"),
    ),
    _count(
        "__dict__",
        "tally.__dict__['n']",
        "class Tally: pass\ntally = Tally()\ntally.n = 0",
        ("tally.n = 4", "tally = copy.copy(tally)"),
    ),
    _count("a class", "Tally.n", "class Tally:\n    n = 0", ("del Tally.n",)),
    _count(
        "a slot",
        "tally.n",
        "class Tally:\n    __slots__ = ('n',)\ntally = Tally()\ntally.n = 0",
        ("tally = copy.copy(tally)", "del tally.n"),
    ),
    _count(
        "a module's attribute",
        "counting.n",
        "counting = nn.Linear(4, 4)\ncounting.n = 0",
        ("counting = copy.deepcopy(counting)", "counting.train(not counting.training)"),
    ),
    _count("a dict item", "counts['n']", "counts = {'n': 0}", ("counts = {'n': 2}",)),
    _count(
        "a list item", "counts[0]", "counts = [0, 1.0]", ("counts.insert(0, 2)", "counts = [2]")
    ),
    _count(
        "a global",
        "ticks",
        "ticks = 0",
        ("ticks = 5", "ticks = 1.5", "globals()['ticks'] = 6"),
        ("def tick%n(t, x, y):\n    global ticks\n    %b\n    return t", "t = tick%n(t, x, y)"),
    ),
    _count(
        "a cell",
        "ticks",
        "",
        ("tick0, peek0, put0 = make0()", "put0(5)", "put0(1.5)"),
        (
            "def make%n():\n    ticks = 0\n    def tick(t, x, y):\n        nonlocal ticks\n"
            "        %b\n        return t\n    def peek(): return ticks\n"
            "    def put(v):\n        nonlocal ticks\n        ticks = v\n"
            "    return tick, peek, put\ntick%n, peek%n, put%n = make%n()",
            "t = tick%n(t, x, y)",
        ),
    ),
    Trait(
        "cell shared by functions",
        (
            "up()\nt = t + grow()",
            "up(10)\nup()\nt = t * peek()",
            "grow()\nup()",
            "up()\njump()",
            "jump()\nup(2)\njump()",
            "t = t * up()\nt = t + peek()",
            "for act in (up, grow, up):\n    act()",
            "t = t + up(x.dim())\ngrow()",
            "ways['up']()\nt = t * ways['peek']()\nup()",
        ),
        ("new(4), new(4)", "new(2, 4), new(4)"),
        sites=(
            "up(5)",
            "grow()",
            "up, grow, jump, peek = share()",
            "up.__closure__[0].cell_contents = 3",
            "ways['up'] = grow",
        ),
        setup=(
            "def share():\n    n = 1\n    def up(k=1):\n        nonlocal n\n        n += k\n"
            "        return n\n    def grow():\n        nonlocal n\n        n *= 2\n"
            "        return n\n    def jump():\n        nonlocal n\n        n += 10\n"
            "    def peek(): return n\n    return up, grow, jump, peek\n"
            "up, grow, jump, peek = share()\nways = {'up': up, 'peek': peek}"
        ),
    ),
)

# --- identity: of arguments and state, of keys, through references --------------------------------

_KEYS = (
    "class Key:\n    def __init__(self, value): self.value = value\n"
    "one, two = Key(2.0), Key(3.0)\nfirst, second = torch.ones(4), torch.zeros(4)"
)
_KEYED = (
    "tagged(new(4), one), new(4)",
    "tagged(new(4), two), new(4)",
    "tagged(new(4), Key(5.0)), new(4)",
)
_KNOWN = ("new(4), new(4)", "first, new(4)", "second, new(4)", "first, first")

_IDENTITIES = (
    Trait(
        "argument that is state",
        (
            "if x is keep.last:\n    t = t * 3\nkeep.last = x",
            "t = t * (2 if x is first else 5)",
            "if any(x is s for s in met):\n    t = t + 1\nelse:\n    met.append(x)",
            "t = t + (y is keep.last)\nkeep.last = y",
            "if id(x) == id(first):\n    t = t - 1",
            "if keep.last is None or keep.last is not x:\n    t = t * 2\n    keep.last = x",
            "t = t * (3 if [first, second][0] is y else 4)",
        ),
        (*_KNOWN, "(keep.last if keep.last is not None else new(4)), new(4)"),
        sites=(
            "first = torch.ones(4)",
            "keep.last = first",
            "keep.last = None",
            "met.clear()",
            "met.append(first)",
            "first, second = second, first",
        ),
        setup=f"{_KEYS}\nclass Keep:\n    last = None\nkeep, met = Keep(), []",
    ),
    Trait(
        "tensor as default argument",
        ("t = t + against(x)", "t = against(t)", "t = against(y) + t", "against(x)\nt = touch(t)"),
        _KNOWN,
        sites=(
            "against.__defaults__ = (second,)",
            "first = torch.ones(4)",
            "against.__defaults__ = (torch.ones(4),)",
            "touch.__kwdefaults__ = {'w': second}",
        ),
        setup=f"{_KEYS}\ndef against(v, w=first): return v * (3 if v is w else 2)\n"
        "def touch(v, *, w=first):\n    w.add_(1)\n    return v + w",
    ),
    Trait(
        "keys that are tensors",
        (
            "t = t * by_tensor.get(x, 1.0)",
            "if x in bag:\n    t = t + 1",
            "by_tensor[x] = by_tensor.get(x, 0.0) + 1",
            "memory.setdefault(x, torch.zeros(4)).add_(1)",
            "met.append(x)\nmemory[x] = y * 2",
            "met.append(x)\nmemory[x, 1] = memory.get((x, 1), 0) + y",
            "bag.add(x)\nt = t * len(bag)",
            "t = t + memory[x] if x in memory else t",
            "if hash(x) == hash(first):\n    t = t * 2",
        ),
        _KNOWN,
        sites=(
            "by_tensor[first] = 7.0",
            "by_tensor.pop(first, None)",
            "bag.discard(first)",
            "bag.add(second)",
            "memory[second] = torch.ones(4)",
            "first = torch.ones(4)",
            "memory = {first: torch.full((4,), 2.0)}",
            "memory.clear()",
        ),
        setup=f"{_KEYS}\nby_tensor, bag, memory = {{first: 2.0, second: 3.0}}, {{first}}, {{}}\n"
        "met = []",
    ),
    Trait(
        "keys that are objects",
        (
            "t = t * by_key.get(x.tag, 1.0)",
            "if x.tag in chosen:\n    t = t + 1",
            "by_key[x.tag] = by_key.get(x.tag, 0.0) + 1",
            "states.setdefault(x.tag, torch.zeros(4)).add_(1)",
            "t = t * cost(x.tag)",
            "t = t * cost(one)",
            "if x.tag is one:\n    t = t * 2",
        ),
        _KEYED,
        sites=(
            "by_key[one] = 7.0",
            "by_key.pop(two, None)",
            "chosen.add(two)",
            "one.value = 6.0",
            "cost.cache_clear()",
            "one = Key(4.0)",
            "one, two = two, one",
        ),
        setup=f"{_KEYS}\nby_key, chosen, states = {{one: 2.0, two: 3.0}}, {{one}}, {{}}\n"
        "@functools.lru_cache\ndef cost(k): return k.value",
    ),
    Trait(
        "weak references",
        (
            "if ref() is x:\n    t = t * 3",
            "t = t * (2 if gone() is None else 3)",
            "t = t * weak.get(one, 5.0)",
            "if ref() is not None:\n    t = t + ref()",
            "mine = weakref.ref(x)\nt = t * (2 if mine() is first else 3)",
        ),
        _KNOWN,
        sites=(
            "one = Key(2.0); gc.collect()",
            "first = torch.ones(4); gc.collect()",
            "ref = weakref.ref(second)",
            "weak[one] = 4.0",
            "gone = weakref.ref(two)",
        ),
        setup=f"{_KEYS}\nref, gone = weakref.ref(first), weakref.ref(one)\n"
        "weak = weakref.WeakKeyDictionary({one: 2.0})",
    ),
    Trait(
        "weak references as arguments",
        (
            "t = t * (2 if x.tag() is None else 3)",
            "t = t * (2 if x.tag() is one else 3)",
            "t = t * (7.0 if x.tag() is None else x.tag().value)",
        ),
        (
            "tagged(new(4), weakref.ref(one)), new(4)",
            "tagged(new(4), weakref.ref(two)), new(4)",
            "tagged(new(4), weakref.ref(Key(5.0))), new(4)",
        ),
        sites=("one = Key(2.0); gc.collect()", "one.value = 6.0", "two.value = 7.0"),
        setup=_KEYS,
    ),
    Trait(
        "plain containers that are argument and state",
        (
            "if x.tag is pair:\n    t = t * 3",
            "t = t * (2 if x.tag is frozen else 3)",
            "if x.tag is raw:\n    raw.append(1)\nt = t * len(raw)",
            "t = t + len(x.tag)",
            "if any(x.tag is v for v in (pair, raw)):\n    t = t + 1",
            "if isinstance(x.tag, bytearray):\n    x.tag.extend(b'c')\nt = t * sum(raw)",
        ),
        (
            "tagged(new(4), pair), new(4)",
            "tagged(new(4), tuple([1.0, 2.0])), new(4)",
            "tagged(new(4), frozen), new(4)",
            "tagged(new(4), frozenset([1])), new(4)",
            "tagged(new(4), raw), new(4)",
            "tagged(new(4), bytearray(b'ab')), new(4)",
        ),
        sites=("pair = tuple([1.0, 2.0])", "frozen = frozenset([1])", "raw[0] = 7", "raw.clear()"),
        setup="pair, frozen, raw = tuple([1.0, 2.0]), frozenset([1]), bytearray(b'ab')",
    ),
    Trait(
        "views of mappings as arguments",
        ("t = t * x.tag['a']", "for v in x.tag.values():\n    t = t + v", "t = t * len(x.tag)"),
        (
            "tagged(new(4), types.MappingProxyType({'a': 2.0})), new(4)",
            "tagged(new(4), types.MappingProxyType({'a': 3.0, 'b': 1.0})), new(4)",
            "tagged(new(4), view), new(4)",
        ),
        sites=("under['a'] = 9.0", "under['c'] = 1.0"),
        setup="under = {'a': 4.0}\nview = types.MappingProxyType(under)",
    ),
)

# --- containers that a run stores, and a later call reads -----------------------------------------

_STORES = (
    "if x.dim() > 1 and %l:\n    t = t + %l[0].sum()\nelse:\n    %l = [t.detach(), y * 2]",
    "if x.dim() > 1:\n    t = t + len(%d)\nelse:\n    %d = {'a': t.detach(), 'n': 2.0}",
    "if x.dim() > 1 and %p:\n    t = t * %p[1]\nelse:\n    %p = (t.detach(), 3.0)",
    "if %l:\n    t = t + %l[0].sum()\n%l = [t.detach(), y * 2]",
    "for m in %l:\n    t = t + m.sum()\n%l = [x.detach()]",
    "%l = [*%l[-1:], t.detach()]\nt = t + len(%l)",
    "%l = [y, y]\nif %l[0] is %l[1]:\n    t = t * 2",
    "%l.append(y * 2)\nif len(%l) > 2:\n    %l = []",
    "t = t + len(%l)\n%l = %l[1:] or [t.detach(), x.detach()]",
    "if 'a' in %d:\n    t = t + %d['a'].sum()\n%d = {'a': t.detach(), 'n': 1.0}",
    "%d = {**%d, 'n': %d.get('n', 0.0) + 1}\nt = t * %d['n']",
    "t = t + len(%d)\n%d = {k: v for k, v in %d.items() if k != 'n'}",
    "%d = {'a': y, 'b': [t.detach()]}\nt = t + %d['b'][0].sum()",
    "%d['a'] = t.detach()\n%d = dict(%d)",
    "%l = %d['l'] = [t.detach()]\n%d['l'].append(y)",
    "if %p:\n    t = t + %p[0].sum() * %p[1]\n%p = (t.detach(), len(%p) + 1.0)",
    "a, b = %p or (y, 1.0)\nt = t + a.sum() * b\n%p = (t.detach(), b)",
    "%p = (x, 2.0)\nt = t * %p[1]",
    "if %p and %p[0] is x:\n    t = t * 3\n%p = (x, 1.0)",
)
_STORED_SITES = (
    "%l = []",
    "%l = [torch.ones(4)]",
    "%l.append(torch.ones(4))",
    "%l[0] = torch.zeros(4)",
    "%d = {}",
    "%d['n'] = 5.0",
    "%d.pop('a', None)",
    "%p = ()",
    "%p = (torch.ones(4), 4.0)",
    "%p[0].mul_(2)",
)


def _store(
    place: str, path: str, setup: str, sites: tuple[str, ...] = (), helper: bool = False
) -> Trait:
    """`path` with `%s` for what is stored there: a list, a dict, a pair."""

    def fill(text: str) -> str:
        for mark, name in (("%l", "maps"), ("%d", "table"), ("%p", "pair")):
            text = text.replace(mark, path.replace("%s", name))
        return text

    around = (
        "def keep%n(t, x, y):\n    global maps, table, pair\n    %b\n    return t",
        "t = keep%n(t, x, y)",
    )
    return Trait(
        f"containers stored in {place}",
        tuple(map(fill, _STORES)),
        ("new(4), new(4)", "new(2, 4), new(4)", "new(4).requires_grad_(), new(4)"),
        sites=(*map(fill, _STORED_SITES), *sites),
        setup=fill(f"{setup}\n%l, %d, %p = [], {{}}, ()"),
        helper=around if helper else None,
    )


_STORED = (
    _store(
        "an attribute",
        "keep.%s",
        "class Keep: pass\nkeep = Keep()",
        ("keep = copy.copy(keep)", "keep = copy.deepcopy(keep)"),
    ),
    _store(
        "a module's attribute",
        "keep.%s",
        "keep = nn.Linear(4, 4)",
        ("keep = copy.deepcopy(keep)", "keep.eval()"),
    ),
    _store("a class", "Keep.%s", "class Keep: pass"),
    _store("a slot", "keep.%s", "class Keep: __slots__ = 'maps', 'table', 'pair'\nkeep = Keep()"),
    _store("a dict item", "keep['%s']", "keep = {}", ("keep = dict(keep)",)),
    _store("a global", "%s", "", helper=True),
)

# --- stand-ins: objects whose class says that it is another ---------------------------------------

_STAND_INS = (
    Trait(
        "stand-ins",
        (
            "t = t * mocked.scale",
            "if isinstance(mocked, Conf):\n    t = t + 1",
            "t = mocked.gain(t)",
            "mocked.gain(1.0)\nt = t + mocked.gain.call_count",
            "t = t * lazy.scale",
            "t = lazy.gain(t)",
            "if isinstance(lazy, Conf) and type(lazy) is Lazy:\n    t = t * 2",
            "lazy.scale = lazy.scale + 1.0\nt = t * lazy.scale",
            "if lazy.__class__ is Conf:\n    t = t - 1",
            "t = t * (2 if isinstance(liar, nn.Module) else 3)",
            "t = t * liar.scale if issubclass(liar.__class__, nn.Linear) else t + liar.scale",
            "if isinstance(like, torch.Tensor):\n    t = t * like.scale",
            "t = t + len(listed)\nif isinstance(listed, list):\n    t = t * 2",
            "t = t * x.tag.scale if isinstance(x.tag, Conf) else t + x.tag.scale",
            "t = x.tag.gain(t) if isinstance(x.tag, Conf) else t",
            "match x.tag:\n    case Conf(scale=s): t = t * s\n    case _: t = t + 7",
        ),
        (
            "tagged(new(4), lazy), new(4)",
            "tagged(new(4), Conf()), new(4)",
            "tagged(new(4), liar), new(4)",
            "tagged(new(4), Lazy(Conf)), new(4)",
            "tagged(new(4), mocked), new(4)",
        ),
        sites=(
            "mocked.scale = 3.0",
            "mocked.gain.side_effect = lambda t: t * 5",
            "mocked.gain.reset_mock()",
            "mocked.mock_add_spec(nn.Linear)",
            "lazy.scale = 5.0",
            "lazy = Lazy(Conf)",
            "lazy.__dict__['made'] = None",
            "lazy.__dict__['make'] = Other",
            "Conf.scale = 7.0",
            "Lazy.__class__ = property(lambda self: int)",
            "liar.says = Conf",
            "liar.scale = 9.0",
            "like.says = int",
            "listed.says = tuple",
            "listed.of = 5",
        ),
        setup="from unittest import mock\n"
        "class Conf:\n    scale = 2.0\n    def gain(self, t): return t * 3\n"
        "class Other(Conf): scale = 4.0\n"
        "class Lazy:\n    def __init__(self, make): self.__dict__.update(make=make, made=None)\n"
        "    def there(self):\n        if self.made is None:\n"
        "            self.__dict__['made'] = self.make()\n        return self.made\n"
        "    def __getattr__(self, name): return getattr(self.there(), name)\n"
        "    def __setattr__(self, name, v): setattr(self.there(), name, v)\n"
        "    __class__ = property(lambda self: type(self.there()))\n"
        "class Liar:\n    scale = 3.0\n    def __init__(self, says): self.says = says\n"
        "    def gain(self, t): return t * 2\n    __class__ = property(lambda self: self.says)\n"
        "class Sized(Liar):\n    of = 2\n    def __len__(self): return self.of\n"
        "lazy, liar, like, listed = Lazy(Conf), Liar(nn.Linear), Liar(torch.Tensor), Sized(list)\n"
        "mocked = mock.NonCallableMagicMock(spec=Conf, scale=2.0)\n"
        "mocked.gain.side_effect = lambda t: t * 4",
    ),
)

# --- custom autograd: what a body does ------------------------------------------------------------

_METER = (
    "class Meter(torch.autograd.Function):\n    calls, scale, met = 0, 2.0, []\n"
    "    @staticmethod\n    def forward(ctx, t):\n        Meter.calls += 1\n"
    "        Meter.met.append(tuple(t.shape))\n        ctx.scale = Meter.scale\n"
    "        return t * Meter.scale\n"
    "    @staticmethod\n    def backward(ctx, g):\n        return g * ctx.scale * Meter.scale"
)
_AUTOGRAD = (
    Trait(
        "effects of a Function",
        ("t = Meter.apply(t)", "t = Meter.apply(t) + Meter.apply(x)", "Meter.apply(y)"),
        ("new(4).requires_grad_(), new(4)", "new(4), new(4)", "new(2, 4), new(4)"),
        sites=(
            "Meter.scale = 3.0",
            "Meter.calls = 10",
            "Meter.met.clear()",
            "Meter.backward = staticmethod(lambda ctx, g: g * 11)",
            "Meter.forward = staticmethod(lambda ctx, t: t * 13)",
        ),
        setup=_METER,
    ),
    Trait(
        "leaf made in the run",
        (
            "w = torch.ones(4, requires_grad=True)\nt = t * w",
            "w = torch.zeros(4).requires_grad_()\nt = t + w",
            "w = nn.Parameter(torch.ones(4))\nt = t * w",
            "w = t.detach().requires_grad_()\nt = w * 2",
            "w = nn.Parameter(x * 2)\nt = t * w",
            "w = torch.ones(4, requires_grad=True)\n"
            "(g,) = torch.autograd.grad((w * y).sum(), w)\nt = t + g",
            "made.w = torch.ones(4, requires_grad=True)\nt = t * made.w",
            "made.w = nn.Linear(4, 4).requires_grad_(False).weight[0].clone().fill_(2)\n"
            "made.w.requires_grad_()\nt = t * made.w",
            "t = torch.full((4,), 2.0, requires_grad=True)",
        ),
        ("new(4), new(4)", "new(4).requires_grad_(), new(4)"),
        ("", "torch.no_grad()"),
        setup="class Made: pass\nmade = Made()",
    ),
    Trait(
        "state cut off from its past",
        (
            "mem.h = torch.tanh(mem.w * mem.h.detach() + x)\nt = t + mem.h",
            "t = t * mem.w + mem.h\nmem.h = t.detach()",
            "mem.h = mem.h.detach() * mem.w\nt = t + mem.h.sum()",
        ),
        ("new(4), new(4)", "new(4).requires_grad_(), new(4)"),
        ("", "torch.no_grad()"),
        ("mem.h = torch.zeros(4)", "mem.w = nn.Parameter(torch.full((4,), 0.5))"),
        "class Mem: pass\nmem = Mem()\nmem.h, mem.w = torch.zeros(4), nn.Parameter(torch.ones(4))",
    ),
    Trait(
        "switches of autocast",
        (
            "torch.set_autocast_enabled('cpu', True)\nt = t @ torch.eye(4)\n"
            "torch.set_autocast_enabled('cpu', False)",
            "torch.set_autocast_enabled('cpu', not torch.is_autocast_enabled('cpu'))",
            "torch.set_autocast_enabled('cpu', True)",
            "torch.set_autocast_dtype('cpu', torch.float16)",
            "was = torch.is_autocast_enabled('cpu')\ntorch.set_autocast_enabled('cpu', True)\n"
            "try:\n    t = t @ torch.eye(4)\nfinally:\n    torch.set_autocast_enabled('cpu', was)",
        ),
        sites=(
            "torch.set_autocast_enabled('cpu', True)",
            "torch.set_autocast_enabled('cpu', False)",
            "torch.set_autocast_dtype('cpu', torch.float16)",
        ),
    ),
    Trait(
        "switches of grad mode",
        (
            "torch.set_grad_enabled(False)\nt = t * 2\ntorch.set_grad_enabled(True)",
            "torch.set_grad_enabled(not torch.is_grad_enabled())",
            "torch._C._set_grad_enabled(False)\nt = t + y",
        ),
        ("new(4).requires_grad_(), new(4)", "new(4), new(4)"),
        ("", "torch.no_grad()"),
        ("torch.set_grad_enabled(False)", "torch.set_grad_enabled(True)"),
    ),
)

# --- memory: what torch may hand back instead of a copy; pieces of one storage --------------------

_RETURNS_ITS_ARGUMENT = (
    "F.dropout(x, 0.5, training=False)",
    "F.alpha_dropout(x, 0.5, training=False)",
    "drop(x)",
    "same(x)",
    "x.contiguous()",
    "x.to(torch.float32)",
    "x.float()",
    "x.type_as(y)",
    "x.cpu()",
    "x.reshape(x.shape)",
    "x.expand(x.shape)",
    "x.view_as(x)",
    "torch.atleast_1d(x)",
    "torch.broadcast_tensors(x, x)[0]",
    "x.resolve_conj()",
    "x.requires_grad_(False)",
    "x.detach()",
    "x.squeeze()",
)
_THEN = (
    "t = %e\nt += y",
    "t = %e\nt.mul_(2)",
    "t = %e\nt[..., 0] = 5.0",
    "if %e is x:\n    t = t * 3",
    "t = %e\ny.add_(1)\nx.mul_(2)",
)
_MEMORY = (
    Trait(
        "result that may be the argument",
        tuple(then.replace("%e", e) for e in _RETURNS_ITS_ARGUMENT for then in _THEN),
        (
            "new(4), new(4)",
            "new(4, dtype=torch.float64), new(4)",
            "new(2, 4).t()[:, 0], new(2)",
            "new(8)[::2], new(4)",
        ),
        sites=("drop.train()", "drop.eval()", "drop.p = 0.0"),
        setup="drop, same = nn.Dropout(0.5).eval(), nn.Identity()",
    ),
    Trait(
        "pieces of one storage",
        (
            "v = x[..., 1:3]\nv.add_(1)",
            "t = torch.as_strided(x, (2,), (1,))\nt.add_(1)\nt = x * 2",
            "t = t * (2 if x.data_ptr() == whole.data_ptr() else 3)",
            "if x._base is whole:\n    t = t * 5",
            "t = t[..., window]",
            "x[..., window] = 0.0",
            "whole[1] = 9.0\nt = t + x",
            "x.add_(whole[:4])\nt = t + whole[:4]",
            "if x.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():\n"
            "    t = t + 1",
            "parts = x.split(2, -1)\nparts[0].mul_(2)\nt = t + x",
        ),
        ("new(4), new(4)", "whole[:4], new(4)", "whole[2:6], new(4)", "whole[:4], whole[2:6]"),
        sites=(
            "window = slice(1, 3)",
            "window = slice(None)",
            "whole = torch.ones(8)",
            "whole.zero_()",
        ),
        setup="whole, window = torch.arange(8.0), slice(0, 2)",
    ),
    Trait(
        "sizes from values",
        (
            "t = t + x.nonzero().shape[0]",
            "t = t + x[x > 0].sum()",
            "t = t[t > 0].sum() + y",
            "t = t + torch.unique(x).numel()",
            "i = y.abs().sum().long() % 4\nt = t + levels[i]",
            "t = t + levels[x.argmax()]",
            "t = t + torch.tensor([x.sum(), x.max()]).sum()",
            "t = t.clone()\nt[x.argmax():] = 0",
            "t = t + torch.masked_select(x, x > 0).sum()",
        ),
        ("new(4), new(4)", "new(4).abs() + 1, new(4)", "new(4).requires_grad_(), new(4)"),
        sites=("levels = torch.arange(4.0) * 2",),
        setup="levels = torch.arange(4.0)",
    ),
)

# --- results: what a program makes and hands out --------------------------------------------------

_MADE_RESULTS = (
    "class Pair(collections.namedtuple('Pair', 'a b')):\n    bonus = 1.0\n"
    "class Scaled(collections.namedtuple('Scaled', 'a b')):\n"
    "    def __new__(cls, a, b=None): return super().__new__(cls, a, a * 2)\n"
    "def noted(r, note):\n    r.note = note\n    return r\n"
)
_OBJECTS = (
    "class Gain:\n    def __init__(self, value): self._value = value\n    @property\n"
    "    def value(self): return self._value\n    @value.setter\n"
    "    def value(self, v): self._value = v * 10\n"
    "class Fixed:\n    def __init__(self, value): self.__dict__['value'] = value\n"
    "    value = property(lambda self: self.__dict__['value'])\n"
    "@dataclasses.dataclass(frozen=True)\nclass Frozen:\n    a: object\n    b: float = 1.0\n"
    "@dataclasses.dataclass(slots=True)\nclass Slotted:\n    a: object\n    b: float = 1.0\n"
    "class Logged(dict):\n    def __setitem__(self, k, v): super().__setitem__(k, [v])\n"
    "class Counted(list):\n    total = 0\n"
    "def half(c, **d):\n    r = c.__new__(c)\n    r.__dict__.update(d)\n    return r\n"
    "class Held: pass\nheld = Held()\nheld.gain = Gain(2.0)"
)
_RESULTS = (
    Trait(
        "named tuples",
        ("t = t * 2", "t = Pair(t, 2.0).a", "kept_pair = Scaled(t)\nt = kept_pair.b"),
        sites=("Pair.bonus = 2.0",),
        setup=_MADE_RESULTS,
        returns=(
            "Pair(t, x)",
            "noted(Pair(t, 1.0), 2.0)",
            "noted(Pair(t, x), t)",
            "Scaled(t)",
            "[Scaled(t), Pair(t, Scaled(x))]",
            "t.max(0)",
        ),
    ),
    Trait(
        "objects that are made",
        (
            "held.gain.value = 4.2",
            "held.gain = Gain(t.detach())",
            "held.made = Frozen(t.detach())",
            "held.gain.value = t.detach()",
            "t = t * 2",
        ),
        sites=("held.gain.value = 1.0", "held.gain = Gain(3.0)"),
        setup=_OBJECTS,
        returns=(
            "Gain(t)",
            "Fixed(t)",
            "Frozen(t)",
            "Slotted(t, 2.0)",
            "Logged(a=t)",
            "Counted([t, 1.0])",
            "half(Gain, _value=t)",
            "half(Fixed)",
            "(t, held.gain)",
            "[Gain(2.0), t]",
        ),
    ),
)

# --- what Python keeps about code -----------------------------------------------------------------

_NOTES = (
    Trait(
        "annotations and fields",
        (
            "t = t * Form.__annotations__['a']",
            "t = t * len(Form.__annotations__)",
            "t = t * len(dataclasses.fields(Form))",
            "t = t + dataclasses.fields(Form)[0].default",
            "t = t * noted_by.__annotations__['v']",
            "t = t * len(Form.__dataclass_fields__)",
        ),
        sites=(
            "Form.__annotations__['a'] = 5.0",
            "Form.__annotations__ = {'a': 6.0}",
            "noted_by.__annotations__['v'] = 7.0",
            "Form.__dataclass_fields__['a'].default = 8.0",
            "Form.__dataclass_fields__.pop('b', None)",
        ),
        setup="@dataclasses.dataclass\nclass Form:\n    a: 2.0 = 3.0\n    b: 1.0 = 4.0\n"
        "def noted_by(v: 2.0): return v",
    ),
    Trait(
        "branch that doesn't run",
        (
            "if quiet.on:\n    t = t * unread.scale + len(unread.rows)",
            "if x.dim() > 7:\n    t = unread.forward(t)",
            "if quiet.on:\n    unread.scale += 1\n    held_back.append(t)",
            "if quiet.on:\n    t = t * (time.time() * 0 + 2) + random.randrange(1)",
            "t = t * unread.scale if quiet.on else t * 2",
            "t = quiet.on and unread.scale or t",
            "def unused(t):\n    return t * unread.scale * random.randrange(1)\nt = t * 2",
            "try:\n    t = t * 2\nexcept ValueError:\n    t = t * unread.scale",
        ),
        sites=(
            "unread.scale = 3.0",
            "unread.rows.append(2.0)",
            "del unread.scale",
            "unread = None",
            "quiet.on = True",
            "quiet.on = False",
        ),
        setup="import random, time\nclass Some: pass\nquiet, unread = Some(), Some()\n"
        "quiet.on, unread.scale, unread.rows, held_back = False, 2.0, [1.0], []\n"
        "unread.forward = lambda t: t * 9",
    ),
)

TRAITS = (
    *(*_ASKED, *_COUNTERS, *_IDENTITIES, *_STORED, *_STAND_INS),
    *(*_AUTOGRAD, *_MEMORY, *_RESULTS, *_NOTES),
)
