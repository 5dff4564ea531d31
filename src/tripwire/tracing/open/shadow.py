"""Shadow: the run with symbolic sizes, beside the real one. It tells which sizes stay open.

A shadow goes beside the real run: a fake tensor with symbolic sizes for each tensor whose size may
differ on the next call. A torch call that gets such a tensor, or an open number, runs a second time
on the fakes, which takes no memory and computes only shapes. Equal questions are asked once, so
equal layers cost little after the first. Python gets open numbers for the sizes, of which the
ledger is kept (ledger.py).

If the shadow can't follow a call, the numbers that lead there are closed.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Set
from types import CodeType, FrameType
from typing import Any

import torch

from tripwire.reading.effects import place_of
from tripwire.reading.holders import Holder
from tripwire.reading.structure import PartPlan
from tripwire.reading.tensors import PLAIN_TENSORS, TensorMeta, iter_given
from tripwire.rulebook.rules import Call, Query, words
from tripwire.tracing.open.draws import Draw
from tripwire.tracing.open.fakes import Fakes, hint_of, measure
from tripwire.tracing.open.following import Follower
from tripwire.tracing.open.ledger import RunLedger
from tripwire.tracing.open.opening import (
    ARITHMETIC,
    LARGEST_OPEN,
    OF_NUMPYS,
    Decision,
    Opening,
    OpenNumber,
    Place,
    Planted,
    Sweep,
)
from tripwire.tracing.open.soundings import Soundings
from tripwire.tracing.open.symbols import forget_environments, is_open_symbol
from tripwire.tracing.state import FACTS, TracingState
from tripwire.values.classes import FLOATS, is_exactly, isinstance
from tripwire.values.numbers import (
    OpenFloat,
    OpenInt,
    attempt,
    holds_numbers,
    is_numpys,
    is_open,
    is_taken,
    iter_leaves,
    iter_numbers,
    map_leaves,
    of_run,
    spell_items,
)


class Shadow(RunLedger):
    """Which sizes and numbers of one run are open so far."""

    def __init__(self, state: TracingState, opening: Opening) -> None:
        super().__init__(state, opening)
        self.fakes = Fakes(state, self.symbols, opening)
        self.soundings = Soundings(self, state, opening)
        self.numbers: dict[str, OpenNumber] = {}  # of the call, by path
        self.planted: list[Planted] = []  # those of them that the world holds
        state.reach.holders.open_number = self._open_held
        self.is_idle = False  # whether nothing was open, once the run is over
        self.has_tuples = False  # whether there were some, once the run is over
        self._fixed: frozenset[Place] = frozenset()  # what was fixed when the run was over
        self.tuples: dict[int, tuple[object, object]] = {}  # that the run got, and those before
        self._held: dict[int, str] = {}  # of those that the world holds: what guards have for it
        self._follows_functions = False  # whether code of the user's asks torch's symbols
        self.fixed: set[Place] = set()  # floats that the run left open, and its compiler didn't
        self.draws = opening.draws  # whether numbers out of Python's generator are open,
        self.drawn: dict[str, Draw] = {}  # and those that are, by path

    # --- what is open from the beginning ---

    def open_passed(self, value: Any, path: str) -> Any:
        """Leave what is passed open, if it is to be: an int, a float, some of them in a tuple."""
        if not holds_numbers(value):
            return value
        return self._open_within(value, path, self._opening.wants_number)

    def _open_within(
        self, value: Any, path: str, is_wanted: Callable[[str], bool], label: str = ""
    ) -> Any:
        """A number that is open where it is to be; a tuple with such numbers; or the value."""
        if is_exactly(value, int, *FLOATS):
            number = self.open_number(value, path) if is_wanted(path) else None
            return value if number is None else number
        if not self._opening.tuples or not holds_numbers(value):
            return value
        before = tuple(tuple.__iter__(value))
        items = [
            self._open_within(v, p, is_wanted, label and f"_item({label}, {index})")
            for index, (p, v) in enumerate(spell_items(value, path))
        ]
        if all(map(operator.is_, items, before)):
            return value
        made = tuple(items) if is_exactly(value, tuple) else type(value)._make(items)
        self.tuples[id(made)] = made, value
        if label:
            self._held[id(made)] = label
        return made

    def find_passed(self, value: object) -> object:
        """The tuple that was passed, where the run got another one for it; else the value."""
        _, original = self.tuples.get(id(value), (value, value))
        return original if id(original) in self._state.reach.fresh else value

    def plan_held(self, value: object) -> PartPlan | None:
        """How a call gets a tuple that the world holds, where the run got another one for it."""
        found = self._held.get(id(value))
        return None if found is None else self.formulas.plan_output(found)

    def _open_held(self, holder: Holder, key: Any, value: Any) -> object:
        """Leave open what something holds, if it is to be; None: it isn't."""
        opening = self._opening
        if holder.anchored:
            spot = holder.kind.spot(holder.owner, key)
            if spot not in opening.spots or opening.spots[spot] is not value:
                return None  # or the run has written it by now
            path = str(holder.step(key))
            while any(one.path == path for one in self.planted):
                path += "'"  # another one, of which the same is said
            label = f"h{len(self.planted)}"
            opened = self._open_within(value, path, lambda path: True, label)
            if opened is value:
                return None
            self.planted.append(Planted(place_of(holder), key, path, spot, value, label))
            return opened
        if not (opening.numbers or opening.everything):
            return None
        opened = self.open_passed(value, str(holder.step(key)))
        return None if opened is value else opened

    def is_open_at(self, holder: Holder, key: Any) -> bool:
        """Whether a number was planted, and nothing closed it: conditions say which may come."""
        spot = holder.kind.spot(holder.owner, key)
        planted = next((one for one in self.planted if one.spot in {spot}), None)
        return planted is not None and not self._is_among(planted, self.symbols.closed.keys())

    def was_open_at(self, holder: Holder, key: Any) -> bool:
        """Whether a number was planted, or some, and not all of them were closed."""
        spot, closed = holder.kind.spot(holder.owner, key), self.symbols.closed
        planted = [one for one in self.planted if one.spot in {spot}]
        paths = [path for one in planted for path, _ in iter_numbers(one.value, one.path)]
        return not paths or any((path, None) not in closed for path in paths)

    def _is_among(self, planted: Planted, closed: Set[Place]) -> bool:
        """Whether it was closed, or one of its numbers was."""
        paths = (path for path, _ in iter_numbers(planted.value, planted.path))
        return any((path, None) in closed for path in paths)

    def find_closed(self, closed: Set[Place]) -> set[tuple[int, Any]]:
        """Where the world holds numbers that were closed, of which these are."""
        return {one.spot for one in self.planted if self._is_among(one, closed)}

    def open_number(self, value: Any, path: str) -> OpenInt | OpenFloat | None:
        """Leave a number of the call open, if it can be."""
        # A shape environment knows neither nan nor infinity, nor the sign of zero.
        if is_exactly(value, *FLOATS) and (not math.isfinite(value) or value == 0):
            return None
        if is_exactly(value, int) and abs(value) > LARGEST_OPEN:
            return None
        if path not in self.numbers:
            label = f"n{len(self.numbers)}"
            with self._state.aside():
                number = self.symbols.make(value, label)
                self.symbols.note(number, label, (path, None))
                self.numbers[path] = OpenNumber(label, number, type(value))
        if not self.numbers[path].was(value):
            return None  # of another place
        with self._state.aside():
            opened: OpenInt | OpenFloat = self._wrap(self.numbers[path].symbol, value)
            return opened

    def open_drawn(self, one: Draw, value: int | float) -> OpenInt | OpenFloat | None:
        """Leave a number open that a generator gave, if it can be."""
        path = str(one)
        while path in self.drawn:
            path += "'"
        number = self.open_number(value, path)
        if number is not None:
            self.drawn[path] = one
            if one.values is not None:
                with self._state.aside():
                    self.symbols.bound(number.symbol, one.least, one.least + one.values - 1)
        return number

    def is_fixed(self, path: str) -> bool:
        """Whether the run, or its compiler, had to close a number of the call."""
        return (path, None) in self.symbols.closed

    def list_asked(self, paths: Iterable[str]) -> set[str]:
        """What the run decided by these numbers."""
        names = {str(self.numbers[path].symbol.node._expr) for path in paths}
        texts = (one.text for one in self.decisions if not one.closed_by)
        return {text for text in texts if not names.isdisjoint(re.findall(r"\w+", text))}

    # --- numbers out of tensors ---

    def takes(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether what a call gives is left open: the number, or a few, in a tensor."""
        if not self._opening.takes or kwargs or len(args) != 1 or not self.is_live():
            return False
        (tensor,) = args
        if id(type(tensor)) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
            return False
        if tensor.dtype not in _TAKEN_OF:
            return False
        if name == "item":
            return bool(tensor.numel() == 1)
        return name == "tolist" and tensor.dim() > 0 and 0 < tensor.numel() <= _MOST_TAKEN

    @property
    def asks_for_counts(self) -> bool:
        """Whether Python gets sizes that values decide on from the tensor, on each call.

        Then an open size that they depend on as well may stay open.
        """
        return self._opening.takes

    def takes_sizes(self, tensor: object) -> bool:
        """Whether sizes of a tensor are left open though values decide on them."""
        if not self._opening.takes or not self.is_live() or id(type(tensor)) not in PLAIN_TENSORS:
            return False
        return isinstance(tensor, torch.Tensor) and self.is_sized_by_values(tensor)

    def has_lengths(self, sequences: Any) -> bool:
        """Whether tensors of one kind have several lengths that are open."""
        if not all(id(type(one)) in PLAIN_TENSORS for one in sequences) or not self.is_live():
            return False
        if len({(one.shape[1:], one.dtype, one.dim()) for one in sequences}) != 1:
            return False
        fakes = [fake for fake in map(self.fakes.find, sequences) if fake is not None]
        return sum(is_open_symbol(fake.size(0)) for fake in fakes) > 1

    def cast(self, cls: type, number: OpenInt | OpenFloat) -> Any:
        """What `float` or `int` gives of an open number; NotImplemented: a plain one."""
        if number.ledger is not self or not self.is_live():
            return NotImplemented
        if is_exactly(number.value, cls):
            return number
        return self.compute((cls, number), attempt(cls, number))

    def close_sizes(self, rule: Call, given: Any) -> None:
        """Close numbers out of tensors that a call may take for a size, a dimension or an index.

        Those that can be computed before a call get a symbol instead.
        """
        if rule.name == "_pad_packed_sequence" and self.is_sized_by_values(given[0][0]):
            return  # it runs as it is, and so does what takes its result
        for leaf in filter(is_numpys, filter(is_open, iter_leaves(given))):
            if rule.name not in OF_NUMPYS:  # it may ask for the type
                self.close(leaf, rule.name)
        for leaf in filter(is_taken, iter_leaves(given)):
            is_size = rule.name not in ARITHMETIC if is_exactly(leaf, OpenInt) else rule.of_shapes
            is_size = is_size or rule.name in _SIZED_BY_FLOATS
            if is_size and not self.soundings.sound(leaf):
                self.close(leaf, rule.name)

    def sound(self, number: OpenInt) -> bool:
        """Give a number out of a tensor a symbol, if it can be computed before a call."""
        with self._state.aside():
            return self.soundings.sound(number)

    # --- what Python asks a tensor ---

    def answer(
        self, rule: Query, given: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
    ) -> Any:
        """What Python gets for a question about sizes, where the real tensor answered `value`."""
        with self._state.aside():
            for leaf in filter(is_open, iter_leaves(given)):
                self.close(leaf, f"{rule.name}()")
        fake = self.fakes.find(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        name = rule.name
        if fake is None or not rule.of_size or name == "storage_offset":
            return value
        with self._state.aside():
            found = measure(fake, name, *args[1:], **kwargs)
            self.note_decisions()
            is_tuple = is_exactly(value, torch.Size, tuple)
            hints = tuple(map(hint_of, found)) if is_tuple and found is not None else hint_of(found)
            if hints != value:  # strides where the size is 1, perhaps
                self.close_arguments((args, kwargs), f"{name}()")
                return value
            if is_tuple:
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
            is_open(leaf) or (isinstance(leaf, torch.Tensor) and self.fakes.find(leaf) is not None)
            for leaf in iter_leaves(value)
        )

    def is_sized_by_values(self, tensor: torch.Tensor) -> bool:
        """Whether values decide on a size: it has no symbol, and runs as it is."""
        known = self._state.values.find(tensor)
        return known is not None and bool(known.sized_by)

    def follow(
        self, rule: Call, func: Callable[..., Any], args: Any, kwargs: Any, value: Any
    ) -> None:
        """Do in the shadow what a call did, and see which sizes of its result are open."""
        Follower(self, self._state, self._opening).follow(rule, func, args, kwargs, value)
        for symbol in self.symbols.find_open().values() if self.fakes.is_slow else ():
            self._close(self.symbols.symbol_of(symbol), "torch, which thinks about it for too long")

    def close_call(self, given: Any, by: str, *, is_known: bool = False) -> None:
        """Close what a call gets that the shadow can't make.

        is_known: it can, but has no symbols for numbers out of tensors.
        """
        taken = filter(is_taken, iter_leaves(given))
        with self._state.aside():
            self.close_arguments(tuple(taken) if is_known else given, by)

    def follow_function(
        self, rule: Call, run: Callable[..., Any], args: Any, value: Any, writes: bool
    ) -> None:
        """Run a custom function on fakes: its code is known to do nothing but compute."""
        if writes or not list(iter_given(value)):  # of no result it tells why there is none
            self.close_call(args, rule.name)
        elif self.has_open(args):
            asked = len(self.symbols.env.guards)
            self.follow(rule, run, args, {}, value)
            self._follows_functions = True
            self._pin_inexact(self.symbols.env.guards[asked:], rule.name)

    def close_arguments(self, value: Any, by: str) -> None:
        """Close all that leads to a call that can't be followed."""
        for leaf in iter_leaves(value):
            if is_open(leaf):
                self.close(leaf, by)
            elif isinstance(leaf, torch.Tensor) and (fake := self.fakes.find(leaf)) is not None:
                for symbol in (*fake.size(), *fake.stride(), fake.storage_offset()):
                    self._close(symbol, by)

    # --- the end of the run ---

    def pass_sizes(self) -> None:
        """Make open sizes inputs of a graph with gradients: a compiler's backward needs them.

        What it keeps for the backward may have the size 2*s0 alone. Dynamo passes all of them.
        """
        facts = (node.meta.get(FACTS) for node in self._state.graph().nodes if node.all_input_nodes)
        values = (one.value for one in facts if one is not None)
        if not any(isinstance(one, TensorMeta) and one.requires_grad for one in values):
            return
        for _, known in self._state.inputs:
            tensor = known()
            opened = None if tensor is None else self.fakes.find_opened(tensor)
            for size in () if opened is None else opened.fake.size():
                if is_open_symbol(size):
                    self.formulas.pass_size(size)

    def end(self) -> None:
        """The run is over: numbers are what they are."""
        self._has_ended = True
        self.fakes.end()

    def is_told_by(self, code: CodeType) -> bool:
        """Whether a function may tell an open number from a plain one."""
        return self._opening.is_told_by(code)

    def withdraw(self, frame: FrameType, end: CodeType) -> None:
        """Put plain numbers in the place of open ones while the run, which was refused, goes on."""
        self._state.reach.holders.uproot()
        sweep = self._build_sweep()
        if sweep is not None:
            sweep.run_in(frame, end)

    def _build_sweep(self) -> Sweep | None:
        alive = [number for ref in self._handed_out if (number := ref()) is not None]
        if not alive:
            return None
        originals = {key: original for key, (_, original) in self.tuples.items()}
        return Sweep(alive, originals, [one.owner for one in self._state.reach.holders.all])

    def settle(self, result: object) -> object:
        """Put plain numbers in the place of open ones, wherever the run left some."""
        self.end()
        self._state.reach.holders.uproot()
        self.formulas.end()
        self.soundings.end()
        self.is_idle = not (self._handed_out or self.fakes.opened or self.numbers)
        self._fixed = frozenset(self.symbols.find_fixed())
        sweep = self._build_sweep()
        self._handed_out.clear()
        if sweep is not None:
            result = sweep.run(result)
        self.has_tuples = bool(self.tuples)
        self.tuples.clear()
        self._held.clear()
        return result

    def find_conditions(self) -> list[str]:
        """What must hold of another call, in the guard function's words. No more can be added."""
        labelled: list[tuple[str, Any]] = [(o.label, o.fake) for o in self.fakes.opened.values()]
        labelled += [(o.label, o.symbol) for o in self.numbers.values()]
        labelled += self.symbols.computed.items()
        conditions = self.symbols.env.produce_guards(
            [value for _, value in labelled],
            [self.symbols.name_source(label) for label, _ in labelled],
            ignore_static=False,
        )
        self._note_closed_by_compiler()
        self.symbols.env.freeze()
        # Where a tensor begins in its memory matters to nobody here.
        conditions = [one for one in conditions if ".storage_offset() == " not in one]
        return [*conditions, *self._conditions]

    def tell_conditions(self, conditions: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Conditions, each as it is and for people, who don't know the guard function's labels."""
        paths = {one.label: path for path, one in self.fakes.opened.items()}
        paths |= {one.label: path for path, one in self.numbers.items()}
        for condition in conditions:
            told = re.sub(r"\b[nt]\d+\b", lambda found: paths.get(found[0], found[0]), condition)
            yield condition, told.replace(".size()[", ".shape[")

    def float_names(self) -> set[str]:
        """The names of symbols that stand for floats."""
        opened = [one.symbol for one in self.numbers.values()]
        symbols = [*opened, *self.symbols.computed.values(), *self.symbols.carriers]
        return {str(one.node._expr) for one in symbols if isinstance(one, torch.SymFloat)}

    def _note_closed_by_compiler(self) -> None:
        """A compiler fixes sizes and numbers that it has no code for."""
        before = set(self.symbols.closed)
        if self._follows_functions:  # of which it compiled backwards
            self._pin_inexact(self.symbols.env.guards[self._told :], "the back end")
        fixed = self.symbols.find_fixed()
        closed = [symbol for place, symbol in fixed.items() if place not in self._fixed]
        closed += [one.node._expr for one in self.symbols.computed.values()]
        for expr in closed:
            value = self.symbols.env.replace(expr)
            if value.free_symbols or not self.symbols.is_news(expr):
                continue
            number = int(value) if value.is_Integer else float(value)
            text = f"{self.symbols.name(expr)} == {number!r}"
            decision = Decision(text, self.formulas.find_use(expr), "the back end")
            self.decisions.append(decision)
            self.symbols.note_closed({expr}, str(decision))
        self.fixed = self.symbols.closed.keys() - before

    def forget(self) -> None:
        """Let go of the run's tensors: weak references would get in the way of swap_tensors."""
        del self._state  # compiled code may keep the shadow, and the run's state keeps much
        self.fakes.forget()
        self.formulas.forget()
        self.soundings.forget()
        forget_environments()


_TAKEN_OF = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
)
_SIZED_BY_FLOATS = words("arange range linspace logspace interpolate upsample full")
_MOST_TAKEN = 16  # numbers of a list
