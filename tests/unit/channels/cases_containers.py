"""Containers and records: an element replaced, added, removed, moved; a field written."""

from unit.channels.channel import Family

FAMILY = Family("containers")
case, everywhere = FAMILY.case, FAMILY.everywhere

# --- lists, dicts, sets, deques, reached in four ways -------------------------------------------

everywhere(
    "list of floats",
    "[2.0, 3.0]",
    """
    for scale in state:
        x = x * scale + 1
    return x
    """,
    writes=[
        "STATE[0] = 4.0",
        "STATE.append(5.0)",
        "STATE.reverse()",
        "STATE.pop()",
        "STATE.clear()",
    ],
)
everywhere(
    "dict by key",
    "{'scale': 2.0, 'other': 0}",
    "return x * state['scale']",
    writes=["STATE['scale'] = 3.0", "STATE.update(scale=4.0)", "STATE |= {'scale': 5.0}"],
)
case(
    "dict key deleted",
    """
    TABLE = {"scale": 2.0}
    def call(x):
        return x * TABLE["scale"]
    """,
    writes=["del TABLE['scale']", "TABLE['scale'] = 3.0"],
)
everywhere(
    "dict iterated in order",
    "{'a': 2.0, 'b': 3.0}",
    """
    for name, value in state.items():
        x = x * value + len(name)
    return x
    """,
    writes=[
        "STATE['a'] = 4.0",
        "STATE['long'] = 5.0",
        "STATE['a'] = STATE.pop('a')",
        "STATE.clear()",
    ],
)
everywhere(
    "set: membership and size",
    "{'relu', 'bias'}",
    "return (x.relu() if 'relu' in state else x) * len(state)",
    writes=["STATE.discard('relu')", "STATE.add('more')", "STATE.clear()"],
)
everywhere(
    "deque",
    "deque([2.0, 3.0, 4.0], maxlen=3)",
    """
    for scale in state:
        x = x * scale + 1
    return x
    """,
    before="from collections import deque",
    writes=["STATE.rotate(1)", "STATE.appendleft(7.0)", "STATE[1] = 0.5", "STATE.popleft()"],
)
everywhere(
    "list of tensors",
    "[torch.ones(4), torch.full((4,), 2.0)]",
    """
    for bias in state:
        x = x * bias + bias
    return x
    """,
    writes=[
        "STATE[0] = torch.full((4,), 3.0)",
        "STATE[1].add_(1)",
        "STATE.append(torch.ones(4))",
        "STATE[:] = STATE[:1]",
    ],
)
everywhere(
    "nested lists and dicts",
    "{'layers': [{'scale': 2.0}, {'scale': 3.0}], 'shift': (1.0, [2.0])}",
    """
    for layer in state['layers']:
        x = x * layer['scale']
    return x + state['shift'][1][0]
    """,
    writes=[
        "STATE['layers'][1]['scale'] = 4.0",
        "STATE['shift'][1][0] = 5.0",
        "STATE['layers'].pop(0)",
        "STATE['layers'] = []",
    ],
)
everywhere(
    "NumPy array changed in place",
    "np.array([1.0, 2.0, 3.0, 4.0], dtype='float32')",
    "return x * torch.from_numpy(state) + float(state[0])",
    before="import numpy as np",
    writes=["STATE[0] = 5.0", "STATE += 1", "STATE[:] = STATE[::-1].copy()"],
)

# --- how a container is asked -------------------------------------------------------------------

case(
    "dict asked by in and get",
    """
    OPTIONS = {}
    def call(x):
        if "bias" in OPTIONS:
            x = x + OPTIONS["bias"]
        return x * OPTIONS.get("scale", 2.0)
    """,
    writes=["OPTIONS['scale'] = 3.0", "OPTIONS['bias'] = 1.0", "OPTIONS.pop('scale')"],
    unrelated=["OPTIONS['other'] = 1"],
)
case(
    "length of a list",
    """
    LAYERS = ["a", "b"]
    def call(x):
        return x * len(LAYERS)
    """,
    writes=["LAYERS.append('c')", "LAYERS.clear()"],
)
case(
    "truth of a container",
    """
    EXTRA = []
    def call(x):
        return x * 2 if EXTRA else x
    """,
    writes=["EXTRA.append(0)", "EXTRA.pop()"],
)
case(
    "sorted keys",
    """
    TABLE = {"b": 2.0, "a": 3.0}
    def call(x):
        for key in sorted(TABLE):
            x = x * TABLE[key] + 1
        return x
    """,
    writes=["TABLE['0'] = 4.0", "del TABLE['b']"],
)
case(
    "equality of lists",
    """
    LEFT, RIGHT = [1, [2, 3]], [1, [2, 3]]
    def call(x):
        return x if LEFT == RIGHT else -x
    """,
    writes=["RIGHT[1].append(4)", "LEFT[1].append(4)"],
)
case(
    "list element found by index() and max()",
    """
    SCORES = [1.0, 5.0, 2.0]
    def call(x):
        return x * max(SCORES) + SCORES.index(max(SCORES))
    """,
    writes=["SCORES[2] = 9.0", "SCORES.insert(0, 3.0)"],
)
case(
    "slice of a list",
    """
    SCALES = [5.0, 2.0, 3.0]
    def call(x):
        for scale in SCALES[1:]:
            x = x * scale
        return x
    """,
    writes=["SCALES[1:] = [4.0]", "SCALES.insert(0, 8.0)"],
)
case(
    "zip and enumerate over two lists",
    """
    SCALES, SHIFTS = [2.0, 3.0], [1.0, 0.5]
    def call(x):
        for i, (scale, shift) in enumerate(zip(SCALES, SHIFTS)):
            x = x * scale + shift * i
        return x
    """,
    writes=["SHIFTS[1] = 4.0", "SCALES.pop(0)", "SHIFTS.clear()"],
)
case(
    "dict unpacked into a call",
    """
    OPTIONS = {"scale": 2.0}
    def helper(x, scale=1.0, shift=0.0):
        return x * scale + shift
    def call(x):
        return helper(x, **OPTIONS)
    """,
    writes=["OPTIONS['shift'] = 3.0", "del OPTIONS['scale']"],
)
case(
    "container replaced by an equal one, then changed",
    """
    SCALES = [2.0]
    old = SCALES
    def call(x):
        return x * SCALES[0]
    """,
    writes=["SCALES = [2.0]; SCALES[0] = 3.0", "old[0] = 9.0; SCALES = old"],
)
case(
    "one list under two names, then two lists",
    """
    LEFT = RIGHT = [2.0]
    def call(x):
        return x * LEFT[0] + RIGHT[0]
    """,
    writes=["LEFT.append(0); LEFT[0] = 3.0", "RIGHT = [5.0]", "LEFT[0] = 7.0"],
)

# --- other containers ---------------------------------------------------------------------------

case(
    "OrderedDict reordered",
    """
    from collections import OrderedDict
    STEPS = OrderedDict(scale=lambda x: x * 2, shift=lambda x: x + 1)
    def call(x):
        for step in STEPS.values():
            x = step(x)
        return x
    """,
    writes=["STEPS.move_to_end('scale')", "STEPS.popitem(last=False)"],
)
case(
    "defaultdict: a missing key gets its default",
    """
    from collections import defaultdict
    TABLE = defaultdict(lambda: 2.0)
    def call(x):
        return x * TABLE["scale"]
    """,
    writes=[
        "TABLE['scale'] = 3.0",
        "del TABLE['scale']",
        "TABLE.default_factory = float; TABLE.clear()",
    ],
    state="dict(TABLE)",
)
case(
    "Counter",
    """
    from collections import Counter
    SEEN = Counter("aab")
    def call(x):
        return x * SEEN["a"] + SEEN["absent"] + SEEN.most_common(1)[0][1]
    """,
    writes=["SEEN.update('aa')", "SEEN['absent'] = 2", "SEEN.subtract('a')"],
)
case(
    "ChainMap",
    """
    from collections import ChainMap
    LOCAL, SHARED = {}, {"scale": 2.0}
    CHAIN = ChainMap(LOCAL, SHARED)
    def call(x):
        return x * CHAIN["scale"]
    """,
    writes=["SHARED['scale'] = 3.0", "LOCAL['scale'] = 4.0", "del LOCAL['scale']"],
)
case(
    "read-only view of a dict",
    """
    from types import MappingProxyType
    TABLE = {"scale": 2.0}
    VIEW = MappingProxyType(TABLE)
    def call(x):
        return x * VIEW["scale"]
    """,
    writes=["TABLE['scale'] = 3.0"],
)
case(
    "dict subclass with __missing__",
    """
    class Table(dict):
        def __missing__(self, key):
            return 2.0
    TABLE = Table()
    def call(x):
        return x * TABLE["scale"]
    """,
    writes=[
        "TABLE['scale'] = 3.0",
        "del TABLE['scale']",
        "Table.__missing__ = lambda self, key: 4.0",
    ],
)
case(
    "list subclass with attributes",
    """
    class Layers(list): pass
    LAYERS = Layers([2.0])
    LAYERS.shift = 1.0
    def call(x):
        return x * LAYERS[0] + LAYERS.shift
    """,
    writes=["LAYERS[0] = 3.0", "LAYERS.shift = 2.0", "Layers.__getitem__ = lambda self, i: 9.0"],
)
case(
    "bytearray and array",
    """
    from array import array
    RAW, NUMBERS = bytearray(b"ab"), array("d", [1.0, 2.0])
    def call(x):
        return x * RAW[0] + NUMBERS[1]
    """,
    writes=["RAW[0] = 5", "NUMBERS[1] = 7.0"],
)
case(
    "set of numbers, summed",
    """
    NUMBERS = {1, 2}
    def call(x):
        return x * sum(NUMBERS)
    """,
    writes=["NUMBERS.add(7)", "NUMBERS -= {1}"],
)
case(
    "frozenset and tuple replaced",
    """
    FLAGS, SIZES = frozenset({"a"}), (2, 3)
    def call(x):
        return (x if "a" in FLAGS else -x) * SIZES[0]
    """,
    writes=["SIZES = (4, 3)", "FLAGS = frozenset()"],
    unrelated=["OTHER = (4, 3)"],
)
case(
    "NumPy scalar and array replaced",
    """
    import numpy as np
    SCALE, TABLE = np.float32(2.0), np.arange(4)
    def call(x):
        return x * float(SCALE) + torch.tensor(TABLE)
    """,
    writes=["SCALE = np.float32(3.0)", "TABLE = np.ones(4)", "TABLE[2] = 7"],
)

# --- records ------------------------------------------------------------------------------------

case(
    "enum member chosen by a global",
    """
    import enum
    class Mode(enum.Enum):
        FAST = 1
        SLOW = 2
    mode = Mode.FAST
    def call(x):
        return x * 2 if mode is Mode.FAST else x * mode.value
    """,
    writes=["mode = Mode.SLOW", "Mode.SLOW._value_ = 5"],
    unrelated=["other = Mode.SLOW"],
)
case(
    "attribute of an enum member",
    """
    import enum
    class Mode(enum.Enum):
        FAST = 1
        def scale(self):
            return self.factor
    Mode.FAST.factor = 2.0
    def call(x):
        return x * Mode.FAST.scale()
    """,
    writes=["Mode.FAST.factor = 3.0"],
)
everywhere(
    "dataclass field",
    "Config()",
    "return x * state.scale + len(state.names)",
    before="""
    import dataclasses
    @dataclasses.dataclass
    class Config:
        scale: float = 2.0
        names: list = dataclasses.field(default_factory=list)
        other: int = 0
    """,
    writes=["STATE.scale = 3.0", "STATE.names.append('a')"],
    unrelated=["STATE.other = 1"],
)
case(
    "frozen dataclass replaced, and written past its lock",
    """
    import dataclasses
    @dataclasses.dataclass(frozen=True, slots=True)
    class Config:
        scale: float = 2.0
    config = Config()
    def call(x):
        return x * config.scale
    """,
    writes=[
        "config = dataclasses.replace(config, scale=3.0)",
        "object.__setattr__(config, 'scale', 4.0)",
    ],
)
case(
    "namedtuple replaced",
    """
    from collections import namedtuple
    Point = namedtuple("Point", "scale shift")
    point = Point(2.0, [1.0])
    def call(x):
        return x * point.scale + point.shift[0]
    """,
    writes=["point = point._replace(scale=3.0)", "point.shift[0] = 5.0"],
)
case(
    "config object with a nested dict",
    """
    class Config:
        def __init__(self, **kwargs):
            self.rope = {"theta": 2.0, "kind": "plain"}
            self.__dict__.update(kwargs)
    class Net(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config = config
        def forward(self, x):
            rope = self.config.rope
            return x * rope["theta"] if rope["kind"] == "plain" else x / rope["theta"]
    call = Net(Config(layers=2))
    """,
    writes=[
        "call.config.rope['theta'] = 3.0",
        "call.config.rope['kind'] = 'other'",
        "call.config.rope = {'theta': 5.0, 'kind': 'plain'}",
        "call.config = Config()",
    ],
    unrelated=["call.config.layers = 3"],
)

# --- items under other keys than the code spells --------------------------------------------------

case(
    "list in a list, from the end",
    "L = [[1.0], [2.0]]\ndef call(x): return x * L[-1][-1]",
    writes=["L[1][0] = 3.0", "L.append([5.0])", "L[2].append(7.0)"],
)
case(
    "dict in a list on an object, from the end",
    """
    class Run: pass
    run = Run()
    run.history = [{"k": [1.0]}]
    def call(x): return x * run.history[-1]["k"][-1]
    """,
    writes=["run.history[0]['k'][0] = 3.0", "run.history.append({'k': [5.0]})"],
)
case(
    "list in a dict whose keys have no case",
    """
    class Caseless(dict):
        def __getitem__(self, key): return dict.__getitem__(self, key.lower())
    D = Caseless(a=[1.0])
    def call(x): return x * D["A"][0]
    """,
    writes=["dict.__getitem__(D, 'a')[0] = 3.0"],
)
case(
    "list in a list that counts from one",
    """
    class FromOne(list):
        def __getitem__(self, index): return list.__getitem__(self, index - 1)
    L = FromOne([[1.0], [2.0]])
    def call(x): return x * L[1][0]
    """,
    writes=["list.__getitem__(L, 0)[0] = 3.0"],
)
