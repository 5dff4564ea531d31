"""Shadow: what of a run stays open.

Beside the real run goes a shadow: for each tensor whose size may be another one on the next call, a
fake tensor with symbolic sizes. A torch call that gets such a tensor, or an open number, runs a
second time on these, which takes no memory and computes shapes alone. Equal questions are asked
once: layers that are alike cost little after the first. Python gets open numbers for the sizes
(values/numbers.py); what it decides by them becomes a condition of the trace.

What the shadow can't follow closes the numbers that lead to it.
"""

from __future__ import annotations

import functools
import gc
import math
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import CellType
from typing import Any, cast

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis

from tripwire.ranges import NOWHERE, SourceRange
from tripwire.reading.effects import place_of
from tripwire.reading.holders import Holder
from tripwire.reading.structure import ComputedPlan, NumberPlan, PartPlan, TakenPlan
from tripwire.reading.tensors import PLAIN_TENSORS, find_leaf, iter_given, meta_of
from tripwire.rulebook.rules import SETATTR, Call, Query, words
from tripwire.tracing.opening import (
    LARGEST_OPEN,
    Decision,
    NumberInput,
    Opening,
    OpenNumber,
    OpenTensor,
    Planted,
)
from tripwire.tracing.recorder import add_branch
from tripwire.tracing.state import CURRENT, FACTS, NodeFacts, TracingState
from tripwire.values.classes import class_dict, is_exactly, is_namedtuple, isinstance
from tripwire.values.contents import own_dict, slots_of
from tripwire.values.numbers import (
    Made,
    Number,
    OpenFloat,
    OpenInt,
    is_open,
    is_taken,
    iter_leaves,
    map_leaves,
    of_run,
    symbolic,
)

_LONGEST = 60  # operations in an expression; longer ones are closed


class Shadow:
    """Of one run."""

    def __init__(self, state: TracingState, opening: Opening) -> None:
        from torch._dynamo.source import ConstantSource  # imports much

        self._name_source = ConstantSource
        self._state = state
        self._opening = opening
        self._awaited = set(opening.dims)  # tensors that the run hasn't come to yet
        self._thread = get_ident()
        self._has_ended = False
        _forget_environments()  # of runs that came to nothing
        # Sizes that are equal by chance may differ, and what values decide on is no size.
        self.env = ShapeEnv(
            duck_shape=False,
            allow_scalar_outputs=opening.takes,
            allow_dynamic_output_shape_ops=False,
        )
        self.mode = FakeTensorMode(shape_env=self.env, static_shapes=False)
        # The memo keeps what is asked again.
        self._caches, self.mode.cache_enabled = self.mode.cache_enabled, False
        self.tensors: dict[str, OpenTensor] = {}  # of the call, by path
        self.numbers: dict[str, OpenNumber] = {}  # of the call, by path
        self.planted: list[Planted] = []  # those of them that the world holds
        state.reach.holders.open_number = self._open_held
        self.decisions: list[Decision] = []
        self.closed: set[tuple[str, int | None]] = set()  # paths, and which of the sizes there
        self._places: dict[Any, tuple[str, int | None]] = {}  # of symbols
        self.inputs: dict[str, NumberInput] = {}  # of the graph, before all tensors
        self.outputs: list[str] = []  # numbers that the result holds, as expressions
        self._origins: dict[Any, str] = {}  # of symbols, in the guard function's words
        self._symbols: dict[Any, Any] = {}  # as torch has them
        self._placeholders: list[fx.Node] = []
        self._nodes: dict[object, fx.Node] = {}  # of numbers, by expression or identity
        self._fakes: dict[int, tuple[weakref.ref[torch.Tensor], FakeTensor]] = {}
        self._forms: dict[object, FakeTensor] = {}
        self._memo: dict[object, object] = {}
        self._handed_out: list[weakref.ref[Any]] = []
        # Floats that the graph gets, by expression: the symbol there, and that of the run.
        self._computed: dict[str, tuple[torch.SymFloat, Any]] = {}
        self._kept: list[object] = []  # numbers with a node, whose identity must not come again
        self._carriers: dict[type, Any] = {}
        # Numbers out of tensors: alive, with the tensor that has the value.
        self._taken: dict[int, tuple[Any, torch.Tensor]] = {}
        self.divisors: dict[int, OpenInt | OpenFloat] = {}  # those that must not be zero
        self._asked: set[int] = set()  # those of them that were closed
        self._told = 0  # conditions that the environment had when it was last looked at

    # --- what is open from the beginning ---

    def open_tensor(self, tensor: torch.Tensor, path: str) -> None:
        """Leave some sizes of a tensor of the call open, if they are to be."""
        dims = self._opening.dims.get(path)
        if path not in self._awaited:
            return
        self._awaited.discard(path)
        if not dims or tensor.layout is not torch.strided or id(type(tensor)) not in PLAIN_TENSORS:
            return
        label = f"t{len(self.tensors)}"
        with self._aside():
            shape = tensor.size()
            if not any(d < len(shape) and shape[d] > 1 for d in dims):
                return
            kinds = [
                DimDynamic.DYNAMIC if i in dims else DimDynamic.STATIC for i in range(len(shape))
            ]
            context: Any = StatelessSymbolicContext(kinds)
            source = self._name_source(label)
            fake = self._make_fake(tensor, symbolic_context=context, source=source)
            for index, size in enumerate(fake.size()):
                self._note_origin(size, f"{label}.size()[{index}]", (path, index))
            for index, stride in enumerate(fake.stride()):
                self._note_origin(stride, f"{label}.stride()[{index}]")
            self._note_origin(fake.storage_offset(), f"{label}.storage_offset()")
            self.tensors[path] = OpenTensor(label, fake, weakref.ref(tensor))
            self._put(tensor, fake)

    def _make_fake(self, tensor: torch.Tensor, **how: Any) -> FakeTensor:
        """A fake of a tensor, without its gradient: asking for that can warn, and raise."""
        fake = self.mode.from_tensor(tensor.detach(), **how)
        if tensor.requires_grad:
            fake.requires_grad_()
            if not find_leaf(tensor):
                with torch.enable_grad(), self.mode:
                    fake = cast("FakeTensor", fake.view_as(fake))
        return fake

    def make_static(self, tensor: torch.Tensor) -> FakeTensor:
        """What a compiler gets for an input whose sizes are fixed."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            return self._make_fake(tensor, static_shapes=True)

    def open_number(self, value: Any, path: str) -> Any:
        """Leave an int or a float that is passed open, if it is to be."""
        if path not in self._opening.numbers or not is_exactly(value, int, float):
            return value
        number = self._open(value, path)
        return value if number is None else number

    def _open_held(self, holder: Holder, key: Any, value: Any) -> OpenInt | OpenFloat | None:
        """Leave an int or a float open that something holds, if it is to be."""
        opening = self._opening
        if holder.anchored:
            spot = holder.kind.spot(holder.owner, key)
            if spot not in opening.spots or opening.spots[spot] is not value:
                return None  # or the run has written it by now
            path = str(holder.step(key))
            while path in self.numbers:  # another one, of which the same is said
                path += "'"
            number = self._open(value, path)
            if number is not None:
                self.planted.append(Planted(place_of(holder), key, path, spot))
            return number
        if not opening.numbers:
            return None
        path = str(holder.step(key))
        return self._open(value, path) if path in opening.numbers else None

    def is_open_at(self, holder: Holder, key: Any) -> bool:
        """Whether a number was planted, and nothing closed it: conditions say which may come."""
        spot = holder.kind.spot(holder.owner, key)
        path = next((one.path for one in self.planted if one.spot == spot), None)
        return path is not None and (path, None) not in self.closed

    def _open(self, value: Any, path: str) -> OpenInt | OpenFloat | None:
        # A shape environment knows neither nan nor infinity, nor the sign of zero.
        if not math.isfinite(value) or (is_exactly(value, float) and value == 0):
            return None
        if is_exactly(value, int) and abs(value) > LARGEST_OPEN:
            return None
        if path not in self.numbers:
            label = f"n{len(self.numbers)}"
            source, dynamic = self._name_source(label), DimDynamic.DYNAMIC
            with self._aside():
                symbol = self.env.create_unspecified_symbol(value, source, dynamic)
                make: Any = self.env.create_symintnode
                if is_exactly(value, float):
                    make = self.env.create_symfloatnode
                number = make(symbol, hint=value, source=source)
                self._note_origin(number, label, (path, None))
                self.numbers[path] = OpenNumber(label, number, type(value))
        with self._aside():
            opened: OpenInt | OpenFloat = self._wrap(self.numbers[path].symbol, value)
            return opened

    def _note_origin(
        self, symbol: object, expression: str, place: tuple[str, int | None] | None = None
    ) -> None:
        expr = _expression(symbol)
        if not isinstance(expr, int) and expr.is_Symbol:
            self._origins.setdefault(expr, expression)
            self._symbols.setdefault(expr, symbol)
            if place is not None:
                self._places.setdefault(expr, place)

    # --- numbers: the ledger that values/numbers.py wants ---

    def is_live(self) -> bool:
        """Whether the run goes on, in this thread."""
        return not self._has_ended and get_ident() == self._thread and self._state.refusal is None

    def compute(self, made: tuple[Any, ...], value: Number) -> Any:
        """What comes of a function and its operands, as an open number where it is one."""
        with self._aside():
            if any(map(is_taken, made[1:])):
                return self._wrap_taken(value, made)
            symbol = made[0](*map(symbolic, made[1:]))
            self._note_decisions()
            return self._wrap(symbol, value, made)

    # --- numbers out of tensors ---

    def takes(self, rule: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether what a call gives is left open: the number, or a few, in a tensor."""
        if not self._opening.takes or kwargs or len(args) != 1 or not self.is_live():
            return False
        (tensor,) = args
        if id(type(tensor)) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
            return False
        if tensor.dtype not in _TAKEN_OF:
            return False
        if rule.name == "item":
            return bool(tensor.numel() == 1)
        return rule.name == "tolist" and tensor.dim() == 1 and tensor.numel() <= _MOST_TAKEN

    def note_divisor(self, number: OpenInt | OpenFloat) -> None:
        """A number out of a tensor may not be zero, once it is known."""
        self.divisors.setdefault(id(number), number)

    def close_sizes(self, rule: Call, given: Any) -> None:
        """Close numbers out of tensors that a call may take for a size, a dimension or an index."""
        for leaf in filter(is_taken, iter_leaves(given)):
            is_size = rule.name not in _ARITHMETIC if is_exactly(leaf, OpenInt) else rule.of_shapes
            if is_size or rule.name in _SIZED_BY_FLOATS:
                self.close(leaf, rule.name)

    def hand_out(self, tensor: torch.Tensor) -> Any:
        """A number for a tensor of one element that is the shadow's own: nobody changes it."""
        with self._aside():
            number = self._wrap_taken(tensor.item(), None)
            self._taken[id(number)] = number, tensor
            return number

    def _wrap_taken(self, value: Any, made: Made) -> Any:
        cls: Any = OpenFloat if is_exactly(value, float) else OpenInt
        number = cls(value, value, self, made, self._find_carrier(type(value)))
        self._handed_out.append(weakref.ref(number))
        return number

    def _find_carrier(self, kind: type) -> Any:
        """A symbol that is there only because torch wants one."""
        if kind not in self._carriers:
            value = kind(3)
            source = self._name_source(f"taken_{kind.__name__}")
            symbol = self.env.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
            make: Any = self.env.create_symintnode
            if kind is float:
                make = self.env.create_symfloatnode
            self._carriers[kind] = make(symbol, hint=value, source=source)
        return self._carriers[kind]

    def _ask(self, take: Callable[..., object], numbers: tuple[Any, ...], value: object) -> None:
        """What a program made of numbers out of tensors is asked again before each call."""
        nodes = tuple(self.node_of(n) if is_open(n) else n for n in numbers)
        name = "item" if take is _itself else take.__name__
        add_branch(self._state, name, take, nodes, {}, value, self._where())

    def _find_taken_node(self, number: OpenInt | OpenFloat) -> fx.Node:
        if id(number) not in self._nodes:
            if number.made is None:
                source = self._state.node_of(self._taken[id(number)][1])
                node = self._state.graph().call_method("item", (source,))
            else:
                operands = tuple(self.node_of(o) if is_open(o) else o for o in number.made[1:])
                node = self._state.graph().call_function(number.made[0], operands)
            self._nodes[id(number)] = self._describe(node, number.value)
            self._kept.append(number)
        return self._nodes[id(number)]

    def _wrap(self, symbol: Any, value: Any, made: Made = None) -> Any:
        if not _is_open_symbol(symbol):
            return value
        cls: Any = OpenInt if isinstance(symbol, torch.SymInt) else OpenFloat
        number = cls(symbol, value, self, made)
        if symbol.node.expr.count_ops() > _LONGEST:
            self.close(number, f"an expression of more than {_LONGEST} operations")
            return value
        self._handed_out.append(weakref.ref(number))
        return number

    def close(self, number: OpenInt | OpenFloat, by: str) -> None:
        """The number is its value from now on."""
        if not is_taken(number):
            self._close(number.symbol, by)
        elif id(number) not in self._asked:
            self._asked.add(id(number))
            self._kept.append(number)
            with self._aside():
                self._ask(_itself, (number,), number.value)

    def _close(self, symbol: Any, by: str) -> None:
        with self._aside():
            if _is_open_symbol(symbol):
                text, value = str(symbol.node.expr), symbol.node.hint
                self._note_closed(symbol.node.expr.free_symbols)
                assert bool(symbol == value)
                self._told = len(self.env.guards)
                self.decisions.append(Decision(f"{text} == {value}", self._where(), by))

    def _note_closed(self, symbols: Iterable[Any]) -> None:
        places = map(self._places.get, symbols)
        self.closed.update(place for place in places if place is not None)

    def decide(self, compare: Any, left: object, right: object, answer: bool) -> bool:
        """Note how a question of the program's was answered."""
        if is_taken(left) or is_taken(right):
            with self._aside():
                self._ask(compare, (left, right), answer)
            return answer
        with self._aside():
            found = bool(compare(symbolic(left), symbolic(right)))
            self._note_decisions()
        if found != answer:  # a symbol's arithmetic isn't Python's to the last bit
            for number in (left, right):
                if isinstance(number, (OpenInt, OpenFloat)):
                    self.close(number, compare.__name__)
        return answer

    def _note_decisions(self) -> None:
        fresh = self.env.guards[self._told :]
        self._told = len(self.env.guards)
        if fresh:
            where = self._where()
            self.decisions += [Decision(str(guard.expr), where) for guard in fresh]

    def _where(self) -> SourceRange:
        return self._state.capture_range(2)

    # --- what Python asks a tensor ---

    def answer(
        self, rule: Query, given: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
    ) -> Any:
        """What Python gets for a question about sizes, where the real tensor answered `value`."""
        with self._aside():
            for leaf in filter(is_open, iter_leaves(given)):
                self.close(leaf, f"{rule.name}()")
        fake = self._find(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        name = rule.name
        if fake is None or not rule.of_size or name == "storage_offset":
            return value
        with self._aside():
            found: Any = None
            if name in ("shape", "size", "stride"):
                ask = fake.stride if name == "stride" else fake.size
                found = ask(*args[1:], **kwargs)
            elif name in ("numel", "nelement"):
                found = fake.numel()
            elif name == "nbytes":
                found = fake.numel() * fake.element_size()
            elif name == "is_contiguous":
                found = fake.is_contiguous(*args[1:], **kwargs)
            self._note_decisions()
            if found is None or (is_exactly(value, bool) and found != value):
                self._close_arguments((args, kwargs), f"{name}()")
                return value
            if is_exactly(value, torch.Size, tuple):
                items = [self._wrap(s, v) for s, v in zip(found, value, strict=True)]
                return type(value)(items)
            return value if is_exactly(value, bool) else self._wrap(found, value)

    # --- torch calls ---

    def take(self, value: Any) -> Any:
        """A call's arguments, with numbers of other runs as the plain ones that they are."""
        leaves = iter_leaves(value)
        if any(is_open(leaf) and leaf.ledger is not self for leaf in leaves):
            return map_leaves(value, functools.partial(of_run, self))
        return value

    def close_given(self, value: Any, by: str) -> None:
        """Close the numbers that go to a call whose inside isn't followed."""
        for leaf in filter(is_open, iter_leaves(value)):
            self.close(leaf, by)

    def has_open(self, value: Any) -> bool:
        """Whether an open number, or a tensor of open sizes, is among a call's arguments."""
        return any(
            is_open(leaf) or (isinstance(leaf, torch.Tensor) and self._find(leaf) is not None)
            for leaf in iter_leaves(value)
        )

    def follow(
        self, rule: Call, func: Callable[..., Any], args: Any, kwargs: Any, value: Any
    ) -> None:
        """Do in the shadow what a call did, and see which sizes of its result are open."""
        results = list(iter_given(value))
        if rule.opaque or (rule.target is SETATTR and self.has_open(args)):
            self._close_arguments((args, kwargs), rule.name)
        elif results:
            in_place = rule.writes or kwargs.get("out") is not None
            with self._aside():
                fakes = self._run(rule, func, args, kwargs, in_place)
                self._note_decisions()
                if fakes is None or not _are_alike(fakes, results):
                    self._close_arguments((args, kwargs), rule.name)
                    return
                for tensor, fake in zip(results, fakes, strict=True):
                    self._put(tensor, fake)

    def follow_blindly(self, given: Any, by: str) -> None:
        """A call is made that the shadow can't make."""
        with self._aside():
            self._close_arguments(given, by)

    def _run(
        self, rule: Call, func: Callable[..., Any], args: Any, kwargs: Any, in_place: bool
    ) -> list[Any] | None:
        key = None if in_place else self._key(func, args, kwargs)
        found: Any = None if key is None else self._memo.get(key)
        if found is None:
            fake = self._fake_of if not in_place else self._copy_of
            try:
                with self.mode, enable_python_dispatcher():
                    made = func(*map_leaves(args, fake), **map_leaves(kwargs, fake))
                found = list(iter_given(made))
            except Exception:  # of torch's: it can't tell without the values
                return None
            if key is not None:
                self._memo[key] = found
        return cast("list[Any]", found)

    def _close_arguments(self, value: Any, by: str) -> None:
        """Close all that leads to a call that can't be followed."""
        for leaf in iter_leaves(value):
            if is_open(leaf):
                self.close(leaf, by)
            elif isinstance(leaf, torch.Tensor) and (fake := self._find(leaf)) is not None:
                for symbol in (*fake.size(), *fake.stride(), fake.storage_offset()):
                    self._close(symbol, by)

    # --- fake tensors ---

    def _find(self, tensor: torch.Tensor) -> FakeTensor | None:
        """The fake of a tensor with open sizes; None: all of its sizes are fixed."""
        found = self._fakes.get(id(tensor))
        if found is not None and found[0]() is tensor:
            return found[1]
        if self._awaited:  # it may be asked for its size before any call gets it
            known = self._state.values.find(tensor)
            for path in () if known is None else map(str, tuple(known.sources)):
                if path in self._awaited:
                    self.open_tensor(tensor, path)
                    return self._find(tensor)
        return None

    def _put(self, tensor: torch.Tensor, fake: Any) -> None:
        symbols = (*fake.size(), *fake.stride())
        if not any(map(_is_open_symbol, symbols)):
            self._fakes.pop(id(tensor), None)
            return
        key = (*(fake.dtype, fake.device), *map(_expression, symbols))
        self._fakes[id(tensor)] = weakref.ref(tensor), self._forms.setdefault(key, fake)

    def _fake_of(self, value: Any) -> Any:
        """An argument as the shadow has it."""
        if not isinstance(value, torch.Tensor):
            return symbolic(value)
        found = self._find(value)
        if found is not None:
            return found
        meta = meta_of(value)._replace(requires_grad=False)
        if meta.stride is None or id(type(value)) not in PLAIN_TENSORS:
            return self.mode.from_tensor(value, static_shapes=True)
        found = self._forms.get(meta)
        if found is None:
            found = self._forms[meta] = cast("FakeTensor", meta.build())
        return found

    def _copy_of(self, value: Any) -> Any:
        """The same for a call that may change the form of what it gets."""
        fake = self._fake_of(value)
        return fake.detach() if isinstance(fake, torch.Tensor) else fake

    def _key(self, func: Any, args: Any, kwargs: Any) -> object | None:
        """What the form of a call's result follows from."""
        autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
        try:
            key = (
                func,
                autocast,
                torch.get_default_dtype(),
                self._spell(args),
                self._spell(kwargs),
            )
            hash(key)
        except TypeError:  # something that can't be a key
            return None
        return key

    def _spell(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            fake = self._find(value)
            return id(fake) if fake is not None else (meta_of(value), value.layout)
        if is_open(value):
            return type(value).__name__, _expression(value.symbol)
        if isinstance(value, (tuple, list)):
            return type(value), *map(self._spell, value)
        if isinstance(value, dict):
            return dict, *((key, self._spell(item)) for key, item in value.items())
        if is_exactly(value, slice):
            return slice, *map(self._spell, (value.start, value.stop, value.step))
        return type(value), value

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """What the shadow does is no part of the run."""
        state = self._state
        before, CURRENT.state = CURRENT.state, None
        observer = state.observer if state.observer and not state.observer.paused else None
        if observer is not None:
            observer.pause()
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                yield
        finally:
            if observer is not None:
                observer.resume()
            CURRENT.state = before

    # --- the graph ---

    def node_of(self, number: OpenInt | OpenFloat) -> Any:
        """The node that computes a number; its value where it was closed meanwhile."""
        if is_taken(number):
            return self._find_taken_node(number)
        expr = number.symbol.node.expr
        if not expr.free_symbols:
            return number.value
        made = number.made
        key: Any = expr if made is None else id(number)
        if key not in self._nodes:
            if made is None:
                self._nodes[key] = self._spell_expression(expr, number.symbol)
            elif isinstance(number, OpenFloat):
                self._nodes[key] = self._find_computed(number)
                self._kept.append(number)
            else:
                operands = tuple(self.node_of(o) if is_open(o) else o for o in made[1:])
                node = self._state.graph().call_function(made[0], operands)
                self._nodes[key] = self._describe(node, number.symbol)
                self._kept.append(number)
        return self._nodes[key]

    def _find_computed(self, number: OpenInt | OpenFloat) -> fx.Node:
        """A float that Python computes before the graph runs: a compiler would reorder sums."""
        text = self._print(number)
        if text not in self._computed:
            source = self._name_source(text)
            with self._aside():
                symbol = self.env.create_unspecified_symbol(
                    number.value, source, DimDynamic.DYNAMIC
                )
                made: Any = self.env.create_symfloatnode(symbol, hint=number.value, source=source)
            self._origins[made.node.expr] = text
            self._computed[text] = made, number.symbol
        made, _ = self._computed[text]
        return self._find_input(made.node.expr, made)

    def _describe(self, node: fx.Node, symbol: Any) -> fx.Node:
        node.meta[FACTS] = NodeFacts(NOWHERE, self._state.scopes.current, None, memory=())
        node.meta["example_value"] = symbol
        return node

    def _spell_expression(self, expr: Any, symbol: Any) -> fx.Node:
        """Nodes for the size of a tensor that the run made."""
        if expr.is_Symbol:
            return self._find_input(expr, symbol)
        graph = self._state.graph()
        tracer = fx.proxy.GraphAppendingTracer(graph)
        found = {}
        for one in sorted(expr.free_symbols, key=str):
            found[one] = fx.Proxy(self._find_input(one, self._symbols[one]), tracer)
        last = next(iter(reversed(graph.nodes)))  # torch 2.11 makes no iterator of it
        proxy = sympy_interp(PythonReferenceAnalysis, found, expr)
        while last.next.op != "root":
            last = self._describe(last.next, None)
        return self._describe(proxy.node, symbol)

    def _find_input(self, expr: Any, symbol: Any) -> fx.Node:
        """The node of a symbol: an input of the graph."""
        if expr in self._nodes:
            return self._nodes[expr]
        graph, origin = self._state.graph(), self._origins[expr]
        first = next(iter(graph.nodes), None)
        if self._placeholders:
            with graph.inserting_after(self._placeholders[-1]):
                node = graph.placeholder(str(expr))
        elif first is not None:
            with graph.inserting_before(first):
                node = graph.placeholder(str(expr))
        else:
            node = graph.placeholder(str(expr))
        self._placeholders.append(self._describe(node, symbol))
        self.inputs[origin] = NumberInput(node.name, origin, symbol)
        if isinstance(symbol, torch.SymFloat):
            node = self._describe(graph.call_method("item", (node,)), symbol)
        self._nodes[expr] = node
        return node

    @property
    def last_input(self) -> fx.Node | None:
        """The last of the graph's inputs that are numbers."""
        return self._placeholders[-1] if self._placeholders else None

    # --- the end of the run ---

    def plan_number(
        self, number: OpenInt | OpenFloat, plan: Callable[[object], PartPlan]
    ) -> PartPlan:
        """How a call gets a number that the result, or an effect, holds."""
        if not is_taken(number):
            self.outputs.append(self._print(number))
            return NumberPlan(len(self.outputs) - 1)
        if number.made is None:
            return TakenPlan(plan(self._taken[id(number)][1]))
        return ComputedPlan(number.made[0], tuple(map(plan, number.made[1:])))

    def _print(self, number: Any) -> str:
        """A number in the guard function's words."""
        if not is_open(number):
            return repr(number)
        if not _is_open_symbol(number.symbol):
            return repr(number.value)
        if number.made is None:
            return f"({_Printer(self._origins).doprint(number.symbol.node.expr)})"
        function, *operands = number.made
        return f"{_SPELLED[function].format(*map(self._print, operands))}"

    def end(self) -> None:
        """The run is over: numbers are what they are."""
        self._has_ended = True
        self.mode.cache_enabled = self._caches

    def settle(self, result: object) -> object:
        """Put plain numbers in the place of open ones, wherever the run left some."""
        self.end()
        self._state.reach.holders.uproot()
        self._kept.clear()
        self._taken.clear()
        self.divisors.clear()
        alive = [number for ref in self._handed_out if (number := ref()) is not None]
        self._handed_out.clear()
        if alive:
            result = _Sweep(alive).run(result)
        return result

    def list_open(self) -> tuple[str, ...]:
        """What is still open, each with its symbol."""
        sizes = [
            f"{_spell_place(*place)} = {symbol}"
            for symbol, place in self._places.items()
            if self.env.replace(symbol).free_symbols
        ]
        return tuple(sizes)

    def find_conditions(self) -> list[str]:
        """What must hold of another call, in the guard function's words. No more can be added."""
        labelled: list[tuple[str, Any]] = [(o.label, o.fake) for o in self.tensors.values()]
        labelled += [(o.label, o.symbol) for o in self.numbers.values()]
        labelled += [(text, made) for text, (made, _) in self._computed.items()]
        conditions = self.env.produce_guards(
            [value for _, value in labelled],
            [self._name_source(label) for label, _ in labelled],
            ignore_static=False,
        )
        self._note_closed_floats()
        self.env.freeze()
        # Where a tensor begins in its memory matters to nobody here.
        return [one for one in conditions if ".storage_offset() == " not in one]

    def float_names(self) -> set[str]:
        """Symbols of floats."""
        opened = [one.symbol for one in self.numbers.values()]
        symbols = [*opened, *(made for made, _ in self._computed.values())]
        symbols += self._carriers.values()
        return {str(one.node._expr) for one in symbols if isinstance(one, torch.SymFloat)}

    def _note_closed_floats(self) -> None:
        """A compiler fixes floats that it has no code for."""
        given = {one.symbol.node._expr: one.symbol for one in self.numbers.values()}
        given |= {made.node._expr: symbol for made, symbol in self._computed.values()}
        for expr, symbol in given.items():
            value = self.env.replace(expr)
            closed, symbols = len(self.closed), symbol.node._expr.free_symbols
            if not value.free_symbols:
                self._note_closed(symbols)
            if len(self.closed) > closed:
                text = f"{self._origins[expr]} == {value}"
                self.decisions.append(Decision(text, NOWHERE, "the back end"))

    def find_opened(self, tensor: torch.Tensor) -> OpenTensor | None:
        """What of a tensor of the call is open."""
        opened = self.tensors.values()
        return next((one for one in opened if one.ref is not None and one.ref() is tensor), None)

    def forget(self) -> None:
        """Let go of the run's tensors: weak references would get in the way of swap_tensors."""
        del self._state  # compiled code may keep the shadow, and the run's state keeps much
        for opened in self.tensors.values():
            opened.ref = None
        self._fakes.clear()
        self._memo.clear()
        self._forms.clear()
        _forget_environments()
        describer = self.mode.fake_tensor_converter.meta_converter.describer
        describer.lookup_tensor.clear()
        describer.lookup_storage.clear()


_SPELLED = {
    operator.add: "({} + {})",
    operator.sub: "({} - {})",
    operator.mul: "({} * {})",
    operator.truediv: "({} / {})",
    operator.floordiv: "({} // {})",
    operator.mod: "({} % {})",
    operator.pow: "({} ** {})",
    operator.neg: "(-{})",
    operator.pos: "(+{})",
    operator.abs: "abs({})",
}


class _Printer(PythonPrinter):
    """Writes expressions as Python, symbols by where they come from."""

    def __init__(self, origins: dict[Any, str]) -> None:
        super().__init__()
        self._origins = origins

    def _print_Symbol(self, expr: Any) -> str:  # noqa: N802
        return self._origins[expr]


def _forget_environments() -> None:
    """Empty the caches that torch keeps for all shape environments: they hold each for ever."""
    for member in vars(ShapeEnv).values():
        clear = getattr(member, "cache_clear", None)
        if clear is not None:
            clear()


def _itself(number: object) -> object:
    return number


_TAKEN_OF = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
)
_ARITHMETIC = words(
    "add add_ sub sub_ mul mul_ div div_ true_divide rsub __radd__ __rsub__ __rmul__ __rtruediv__ "
    "__add__ __sub__ __mul__ __truediv__ __iadd__ __isub__ __imul__ __itruediv__ "
    "eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__"
)
_SIZED_BY_FLOATS = words("arange range linspace logspace interpolate upsample full")
_MOST_TAKEN = 16  # numbers of a list


def _spell_place(path: str, dim: int | None) -> str:
    return path if dim is None else f"{path}.shape[{dim}]"


def _is_open_symbol(symbol: object) -> bool:
    is_symbol = isinstance(symbol, (torch.SymInt, torch.SymFloat))
    return is_symbol and bool(symbol.node.expr.free_symbols)  # type: ignore[attr-defined]


def _expression(symbol: Any) -> Any:
    return symbol.node.expr if isinstance(symbol, (torch.SymInt, torch.SymFloat)) else symbol


def _are_alike(fakes: list[Any], tensors: list[torch.Tensor]) -> bool:
    """Whether fake tensors have the forms of real ones, in this run."""
    return len(fakes) == len(tensors) and all(
        fake.layout is tensor.layout is torch.strided
        and fake.dtype is tensor.dtype
        and list(map(_hint, fake.size())) == list(tensor.size())
        and list(map(_hint, fake.stride())) == list(tensor.stride())
        for fake, tensor in zip(fakes, tensors, strict=True)
    )


def _hint(symbol: Any) -> Any:
    return symbol.node.hint if isinstance(symbol, torch.SymInt) else symbol


# --- what the run left behind ------------------------------------------------------------------


class _Sweep:
    """Replaces open numbers by plain ones, wherever they are held."""

    def __init__(self, numbers: list[Any]) -> None:
        self._numbers = numbers
        self._replaced = {id(number): number.value for number in numbers}
        self._old: list[object] = list(numbers)  # alive, so that identities stay theirs

    def run(self, result: object) -> object:
        """Everywhere, and in a result; which may be another object then."""
        fresh: list[object] = list(self._numbers)
        while fresh:
            mine = {id(fresh), id(self._old), id(self._numbers), id(self.__dict__)}
            holders = [h for h in gc.get_referrers(*fresh) if id(h) not in mine]
            fresh = []
            for holder in holders:
                self._replace_in(holder, fresh)
            holders.clear()
        return self._replaced.get(id(result), result)

    def _find(self, value: object) -> Any:
        return self._replaced.get(id(value), value)

    @staticmethod
    def _put(space: dict[Any, Any], key: Any, value: object) -> None:
        """Into a dict; past it where it is a class's, which remembers what it held."""
        classes = gc.get_referrers(space) if "__module__" in space else ()
        for cls in classes:
            if isinstance(cls, type) and gc.get_referents(class_dict(cls))[0] is space:
                type.__setattr__(cls, key, value)
                return
        dict.__setitem__(space, key, value)

    def _replace_in(self, holder: Any, fresh: list[object]) -> None:
        if isinstance(holder, tuple):
            if id(holder) not in self._replaced and any(id(i) in self._replaced for i in holder):
                items = [self._find(item) for item in tuple.__iter__(holder)]
                cls = type(holder)
                made = cls(*items) if is_namedtuple(cls) else cls(items)
                self._replaced[id(holder)] = made
                self._old.append(holder)
                fresh.append(holder)
        elif isinstance(holder, dict):
            if any(id(key) in self._replaced for key in dict.keys(holder)):
                items = [(self._find(k), self._find(v)) for k, v in dict.items(holder)]
                dict.clear(holder)
                dict.update(holder, items)
            for key, value in list(dict.items(holder)):
                if id(value) in self._replaced:
                    self._put(holder, key, self._find(value))
        elif isinstance(holder, list):
            for index, value in enumerate(list.__iter__(holder)):
                if id(value) in self._replaced:
                    list.__setitem__(holder, index, self._find(value))
        elif isinstance(holder, deque):
            for index, value in enumerate(list(deque.__iter__(holder))):
                if id(value) in self._replaced:
                    deque.__setitem__(holder, index, self._find(value))
        elif isinstance(holder, set):
            for value in list(set.__iter__(holder)):
                if id(value) in self._replaced:
                    set.discard(holder, value)
                    set.add(holder, self._find(value))
        elif isinstance(holder, CellType):
            holder.cell_contents = self._find(holder.cell_contents)
        else:
            space = own_dict(holder)
            if space is not None:
                self._replace_in(space, fresh)
            for slot in slots_of(type(holder)).values():
                value = slot.__get__(holder)
                if id(value) in self._replaced:
                    slot.__set__(holder, self._find(value))
