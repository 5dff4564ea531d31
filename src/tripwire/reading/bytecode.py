"""Bytecode: what a code object may read, told from its instructions alone.

Attribute names, globals and keys are taken from the instructions, so nothing is hooked while
the code runs. Each instruction is carried out once, in order, on a stack of values of which
only the origin is known; whatever takes a value off that stack is a use of it (account.py).
The walk forgets the stack at every jump and at every place that a forward jump leads to, and
a value that is forgotten counts as used as a whole.

What no instruction names is not seen: special methods behind operators, an alias of
`getattr` under another name, attributes that C code looks up by itself.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import CodeType

from tripwire.reading.account import (
    NAME_ARGUMENT,
    NULL,
    REFUSED_ATTRIBUTES,
    REFUSED_GLOBALS,
    TAKES_NAMES,
    Account,
    Grown,
    Increment,
    Literal,
    Loaded,
    LoadedMethod,
    Picked,
    StackValue,
    is_no_number,
    is_singleton,
    names_in,
)
from tripwire.reading.uses import GROWING, Computed, Step, StepKind, Uses
from tripwire.values.classes import isinstance


def find_uses(code: CodeType) -> Uses:
    """What `code` may read and write; functions nested in it are code objects of their own."""
    found = _found.get(id(code))
    if found is None:
        if len(_found) >= 65_536:  # a program that makes code without end
            _found.clear()
        found = _found[id(code)] = (_Pass(code).run(), code)
    return found[0]


# By identity: code objects hash and compare by content. The code is kept alive, so that its
# identity is never reused.
_found: dict[int, tuple[Uses, CodeType]] = {}


_HAS_METHOD_BIT = sys.version_info >= (3, 12)  # LOAD_ATTR took over LOAD_METHOD
_NULL_FIRST = sys.version_info < (3, 13)  # the empty slot lies below the callable
_ALWAYS_KEYWORDS = sys.version_info >= (3, 14)  # CALL_FUNCTION_EX takes NULL for none
_CACHE = dis.opmap["CACHE"]
_EXTENDED_ARG = dis.opmap["EXTENDED_ARG"]
_CALL_KW = dis.opmap.get("CALL_KW", -1)  # 3.13: the names are a constant on the stack
# Only sums can be repeated without knowing the number: + - += -=, by CPython's numbers.
_OPERATIONS: list[tuple[str, str]] = dis._nb_ops  # type: ignore[attr-defined]
_NAMESPACES = frozenset({"__dict__", "modules"})  # whose items are attributes, or modules
_SUMS = frozenset(
    number for number, (_, sign) in enumerate(_OPERATIONS) if sign in ("+", "-", "+=", "-=")
)
_SUBSCR = next(  # 3.14: an item is loaded as an operation of two operands
    (number for number, (name, _) in enumerate(_OPERATIONS) if name == "NB_SUBSCR"), -1
)
_NAMED = (StepKind.GLOBAL, StepKind.ATTRIBUTE)


def _find_variable(value: StackValue | None) -> Step | None:
    """The global or the free variable that a value is; None for anything else."""
    if isinstance(value, Loaded) and value.kind in (StepKind.GLOBAL, StepKind.FREE):
        return Step(value.kind, value.name)
    return None


class _Pass(Account):
    """One pass over a code object's instructions."""

    def __init__(self, code: CodeType) -> None:
        super().__init__(code)
        variables = code.co_varnames
        cells = tuple(name for name in code.co_cellvars if name not in variables)
        self.raw = code.co_code
        self.consts = code.co_consts
        self.names = code.co_names
        self.variables = (*variables, *cells, *code.co_freevars)
        self.targets: set[int] = set()  # offsets that a jump seen so far leads to
        self.keywords = False  # KW_NAMES stood before the call

    def run(self) -> Uses:
        raw = self.raw
        targets = self.targets
        argument = 0
        for at, opcode, low in zip(range(0, len(raw), 2), raw[::2], raw[1::2], strict=True):
            if opcode == _CACHE:
                continue
            if at in targets:
                self.give_up()
            argument = argument << 8 | low
            if opcode == _EXTENDED_ARG:
                continue
            self.at = at
            _CARRY_OUT[opcode](self, argument)
            argument = 0
        self.give_up()
        self.close()
        return self.freeze()

    # Constants and variables.

    def load_const(self, argument: int) -> None:
        constant = self.consts[argument]
        # 3.13: the keywords of a call name no attribute.
        if isinstance(constant, (str, tuple, frozenset)) and self.raw[self.at + 2] != _CALL_KW:
            for name in names_in(constant):
                self.attributes.setdefault(name, self.at)
        # 3.14 has slices as constants, and what they take out of a list is under no key.
        self.stack.append(None if isinstance(constant, slice) else Literal(constant))

    def load_small_int(self, number: int) -> None:
        self.stack.append(Literal(number))

    def load_common_constant(self, _: int) -> None:
        """Push what exists once, as None does: AssertionError; `all`, to compare it with `all`."""
        self.stack.append(Literal(None))

    def return_const(self, argument: int) -> None:
        for name in names_in(self.consts[argument]):
            self.attributes.setdefault(name, self.at)
        self.give_up()

    def push_null(self, _: int) -> None:
        self.stack.append(NULL)

    def load_fast(self, index: int) -> None:
        name = self.variables[index]
        tally = self.tally(StepKind.LOCAL, name)
        if name in self.shared:  # 3.13 loads cells so
            tally.whole = True
            self.stack.append(None)
        else:
            self.stack.append(Loaded(StepKind.LOCAL, name, tally, None))

    def load_closure(self, index: int) -> None:
        """An inner function gets the cell; what it does with it is told by its own code."""
        self.tally(StepKind.LOCAL, self.variables[index]).whole = True
        self.stack.append(None)

    def store_fast(self, index: int) -> None:
        self.store(self.pop(), StepKind.LOCAL, self.variables[index], None)

    def load_fast_load_fast(self, indices: int) -> None:
        self.load_fast(indices >> 4)
        self.load_fast(indices & 15)

    def store_fast_load_fast(self, indices: int) -> None:
        self.store_fast(indices >> 4)
        self.load_fast(indices & 15)

    def store_fast_store_fast(self, indices: int) -> None:
        self.store_fast(indices >> 4)
        self.store_fast(indices & 15)

    def kind_of_cell(self, name: str) -> StepKind:
        return StepKind.LOCAL if name in self.arguments else StepKind.FREE

    def load_deref(self, index: int) -> None:
        name = self.variables[index]
        kind = self.kind_of_cell(name)
        self.stack.append(Loaded(kind, name, self.tally(kind, name), None))

    def load_from_dict_or_deref(self, index: int) -> None:
        self.drop(1)
        self.load_deref(index)

    def store_deref(self, index: int) -> None:
        name = self.variables[index]
        self.store(self.pop(), self.kind_of_cell(name), name, None)

    def load_name(self, index: int) -> None:
        name = self.names[index]
        self.globals.setdefault(name, self.at)
        if name in REFUSED_GLOBALS:
            self.refuse(name, self.at)
        self.stack.append(Loaded(StepKind.GLOBAL, name, self.tally(StepKind.GLOBAL, name), None))

    def load_global(self, argument: int) -> None:
        if argument & 1 and _NULL_FIRST:  # a call follows
            self.stack.append(NULL)
        self.load_name(argument >> 1)
        if argument & 1 and not _NULL_FIRST:
            self.stack.append(NULL)

    def load_from_dict_or_globals(self, index: int) -> None:
        self.drop(1)
        self.load_name(index)

    def store_name(self, index: int) -> None:
        name = self.names[index]
        self.stored_globals.add(name)
        self.store(self.pop(), StepKind.GLOBAL, name, None)

    def delete_name(self, index: int) -> None:
        self.stored_globals.add(self.names[index])
        self.replace(StepKind.GLOBAL, self.names[index])

    # Attributes.

    def load_attr(self, argument: int) -> None:
        if not _HAS_METHOD_BIT:
            name = self.names[argument]
        elif argument & 1:
            self.load_method(argument >> 1)
            return
        else:
            name = self.names[argument >> 1]
        self.stack.append(self.attribute_of(self.pop(), name, called=False))

    def load_method(self, index: int) -> None:
        self.stack.append(self.attribute_of(self.pop(), self.names[index], called=True))
        self.stack.append(None)  # the object, as the method's first argument

    def load_super_attr(self, argument: int) -> None:
        self.drop(3)
        name = self.names[argument >> 2]
        if argument & 1:
            self.stack += self.attribute_of(None, name, called=True), None
        else:
            self.stack.append(self.attribute_of(None, name, called=False))

    def store_attr(self, index: int) -> None:
        owner = self.pop()
        self.store_named(owner, self.names[index])
        self.store(self.pop(), StepKind.ATTRIBUTE, self.names[index], owner)

    def delete_attr(self, index: int) -> None:
        owner = self.pop()
        self.store_named(owner, self.names[index])
        self.load_named(self.names[index])  # it must be there
        self.replace(StepKind.ATTRIBUTE, self.names[index], owner)

    def store_named(self, owner: StackValue | None, name: str) -> None:
        """`owner.name` is stored or deleted: the owner was needed for it."""
        self.stored_attributes.add(name)
        if isinstance(owner, Loaded):
            owner.tally.attributes.add(name)
        elif owner is not None:
            owner.escape()

    def import_name(self, index: int) -> None:
        self.drop(1)
        level = self.pop_const()
        dots = level.value if level is not None and isinstance(level.value, int) else 0
        self.imports.add("." * dots + self.names[index])
        self.stack.append(None)

    def import_from(self, index: int) -> None:
        name = self.names[index]
        self.load_named(name)
        if name in REFUSED_GLOBALS or name in REFUSED_ATTRIBUTES:
            self.refuse(name, self.at)
        self.stack.append(None)

    def import_star(self, _: int) -> None:
        self.dynamic = True
        self.give_up()

    def call_intrinsic_1(self, number: int) -> None:
        if number == 2:  # INTRINSIC_IMPORT_STAR
            self.dynamic = True
        self.drop(1)
        self.stack.append(None)

    def match_class(self, positional: int) -> None:
        names = self.pop_const()
        for name in names_in(names.value) if names is not None else ():
            self.load_named(name)
        if positional or names is None:  # the class's `__match_args__` spells the rest
            self.load_named("__match_args__")
            self.dynamic = True
        self.drop(2)
        self.stack.append(None)

    # Items, tests and sums.

    def binary_subscr(self, _: int) -> None:
        key = self.pop_const()
        owner = self.pop()
        if key is not None:
            self.stack.append(self.item_of(owner, key.value))
        elif type(owner) is Loaded and owner.name not in _NAMESPACES:
            self.stack.append(Picked(owner))
        else:
            _escape(owner)
            self.stack.append(None)

    def store_subscr(self, _: int) -> None:
        key = self.pop_const()
        owner = self.pop()
        if isinstance(owner, Loaded):
            owner.tally.stored_keys.add(Computed.KEY if key is None else key.value)
        elif owner is not None:
            owner.escape()
        name = key.value if key is not None else StackValue()  # equal to no name
        self.store(self.pop(), StepKind.ITEM, name, owner)

    def delete_subscr(self, _: int) -> None:
        key = self.pop_const()
        owner = self.pop()
        if key is not None and isinstance(owner, Loaded):
            owner.tally.stored_keys.add(key.value)
            self.replace(StepKind.ITEM, key.value)
        elif owner is not None:
            owner.escape()

    def contains_op(self, _: int) -> None:
        owner = self.pop()
        key = self.pop_const()
        # `3 in v` asks a list for a value, `v[3]` for a place: one key can't stand for both.
        if (
            key is not None
            and isinstance(owner, Loaded)
            and not isinstance(key.value, (int, float, complex))
        ):
            self.item_of(owner, key.value).tally.tested = True
        elif type(owner) is Loaded and owner.name not in _NAMESPACES and key is None:
            self.item_of(owner, Computed.KEY).tally.tested = True
        elif type(owner) is Loaded:  # as `owner.__contains__(...)` is, it hands nothing out
            owner.tally.attributes.add("__contains__")
            owner.tally.whole = True
        elif owner is not None:
            owner.escape()
        self.stack.append(None)

    def is_op(self, _: int) -> None:
        values = [self.pop(), self.pop()]
        if not any(map(is_singleton, values)):
            self.asked.add(tuple(filter(None, map(_find_variable, values))))
        if not any(map(is_no_number, values)):
            self.identities.add(tuple(filter(None, map(self.spell_operand, values))))
        for value in values:
            if value is not None:
                value.escape()
        self.stack.append(None)

    def binary_op(self, operation: int) -> None:
        if operation == _SUBSCR:
            self.binary_subscr(operation)
            return
        right = self.pop_const()
        left = self.pop()
        if (
            operation in _SUMS
            and right is not None
            and isinstance(right.value, (int, float, complex))
            and isinstance(left, Loaded)
        ):
            self.stack.append(Increment(left))
            return
        if left is not None:
            left.escape()
        self.stack.append(None)

    # The stack itself.

    def pop_top(self, _: int) -> None:
        value = self.pop()
        if isinstance(value, Grown):
            value.value.tally.appended = True
        elif value is not None:  # `try: self.cache` asks whether it is there
            value.escape()

    def copy(self, depth: int) -> None:
        self.pad(depth)
        value = self.stack[-depth]
        if value is None:  # its copies must know each other
            value = self.stack[-depth] = StackValue()
        self.stack.append(value)

    def swap(self, depth: int) -> None:
        self.pad(depth)
        self.stack[-1], self.stack[-depth] = self.stack[-depth], self.stack[-1]

    # Jumps and calls.

    def jump(self, distance: int) -> None:
        after = self.at + 2
        while self.raw[after] == _CACHE:
            after += 2
        self.targets.add(after + 2 * distance)
        self.give_up()

    def kw_names(self, _: int) -> None:
        self.keywords = True

    def call_kw(self, count: int) -> None:
        self.drop(1)
        self.keywords = True
        self.call(count)

    def call(self, count: int) -> None:
        self.pad(count + 2)
        arguments = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        second, first = self.stack.pop(), self.stack.pop()
        if first is NULL:
            called = second
        else:
            called = first
            if second is not NULL and not isinstance(first, LoadedMethod):
                arguments.insert(0, second)  # a decorator or a comprehension, without NULL
        keywords, self.keywords = self.keywords, False
        for argument in arguments:
            if isinstance(argument, Loaded) and argument.kind in _NAMED:
                self.passed.setdefault(str(argument.name), self.at)
        if keywords or not isinstance(called, Loaded) or not self.call_known(called, arguments):
            _escape(called, *arguments)
            self.stack.append(None)

    def call_known(self, called: Loaded, arguments: list[StackValue | None]) -> bool:
        """Carry out a call that uses its object in a way that its name tells, if it does."""
        name = called.name
        if called.kind is not StepKind.ATTRIBUTE and called.kind is not StepKind.GLOBAL:
            return False
        if name in TAKES_NAMES:
            return self.call_with_name(called, str(name), arguments)
        if name == "super" and not arguments:  # takes the first argument from the frame
            for first in self.code.co_varnames[:1]:
                self.tally(StepKind.LOCAL, first).whole = True
        if not isinstance(called, LoadedMethod):
            return False
        owner = called.owner
        if name in GROWING and isinstance(owner, Picked):
            owner = self.item_of(owner.owner, Computed.KEY)
        if name in ("get", "setdefault") and 1 <= len(arguments) <= 2:
            key = arguments[0].value if isinstance(arguments[0], Literal) else Computed.KEY
            if name == "setdefault":
                self.set_default(owner, key)
            if key is not Computed.KEY:
                result: StackValue = self.item_of(owner, key)
            elif type(owner) is Loaded:
                result = Picked(owner)
            else:
                return False
        elif name in GROWING and isinstance(owner, Loaded):
            result = Grown(owner)
        else:
            return False
        called.tally.whole = True
        _escape(*arguments)
        self.stack.append(result)
        return True

    def set_default(self, owner: StackValue | None, key: object) -> None:
        """`owner.setdefault(key, ...)` asks whether there is one, and may store one."""
        if isinstance(owner, Loaded):
            owner.tally.stored_keys.add(key)
        self.tally(StepKind.ITEM, key).tested = True
        self.replace(StepKind.ITEM, key)

    def call_with_name(self, called: Loaded, name: str, arguments: list[StackValue | None]) -> bool:
        """Carry out `getattr` and its kin, if the attribute's name is a constant."""
        index = NAME_ARGUMENT.get(name, 0)
        spelled = arguments if name == "attrgetter" else arguments[index:][:1]
        words = [value.value for value in spelled if isinstance(value, Literal)]
        if not words or len(words) < len(spelled) or not all(isinstance(w, str) for w in words):
            return False
        word = str(words[0])
        result = None
        if name in ("getattr", "hasattr"):
            result = self.attribute_of(arguments[0], word, called=False)
            _escape(*arguments[2:])
        elif name in ("setattr", "delattr"):
            self.store_named(arguments[0], word)
            if name == "delattr":
                self.load_named(word)
            self.replace(StepKind.ATTRIBUTE, word)
            _escape(*arguments[2:])
        else:
            _escape(*arguments)
        if name == "__import__":
            self.imports.add(word)
        elif name in ("__setattr__", "__delattr__"):
            self.stored_attributes.add(word)
            if name == "__delattr__":
                self.load_named(word)
            self.replace(StepKind.ATTRIBUTE, word)
        elif name == "hasattr":
            self.tally(StepKind.ATTRIBUTE, word).tested = True
        elif name not in ("getattr", "setattr", "delattr"):
            for each in words:
                self.load_named(each)
        if isinstance(called, LoadedMethod):
            called.escape_owner()
        self.stack.append(result if name == "getattr" else None)
        return True


def _escape(*values: StackValue | None) -> None:
    for value in values:
        if value is not None:
            value.escape()


# --- instructions --------------------------------------------------------------------------------

_CarryOut = Callable[[_Pass, int], None]


def _plain(pops: int, pushes: int) -> _CarryOut:
    """An instruction that uses as a whole what it takes."""
    pushed = [None] * pushes

    def carry_out(walk: _Pass, _: int) -> None:
        walk.drop(pops)
        walk.stack += pushed

    return carry_out


def _counted(pops: Callable[[int], int]) -> _CarryOut:
    """An instruction whose argument tells how many values it turns into one."""

    def carry_out(walk: _Pass, argument: int) -> None:
        walk.drop(pops(argument))
        walk.stack.append(None)

    return carry_out


def _unpack_sequence(walk: _Pass, count: int) -> None:
    walk.drop(1)
    walk.stack += [None] * count


def _unpack_ex(walk: _Pass, counts: int) -> None:
    walk.drop(1)
    walk.stack += [None] * ((counts & 0xFF) + 1 + (counts >> 8))


# Of Python 3.11 to 3.14: instructions that no method of the pass is named after. One that has
# neither makes the pass give up, which loses precision but no name: all that carry one are here.
_BY_NAME: dict[str, _CarryOut] = {
    "LOAD_FAST_CHECK": _Pass.load_fast,
    "LOAD_FAST_BORROW": _Pass.load_fast,
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": _Pass.load_fast_load_fast,
    "LOAD_CLASSDEREF": _Pass.load_deref,
    "STORE_GLOBAL": _Pass.store_name,
    "DELETE_GLOBAL": _Pass.delete_name,
    "CALL_FUNCTION_EX": _counted(lambda flags: 3 + (_ALWAYS_KEYWORDS or flags & 1)),
    "BUILD_INTERPOLATION": _counted(lambda flags: 2 + (flags & 1)),
    "BUILD_MAP": _counted(lambda count: 2 * count),
    "BUILD_CONST_KEY_MAP": _counted(lambda count: count + 1),
    "FORMAT_VALUE": _counted(lambda flags: 2 if flags & 4 else 1),
    "MAKE_FUNCTION": _counted(lambda flags: 1 + (flags & 15).bit_count()),
    "UNPACK_SEQUENCE": _unpack_sequence,
    "UNPACK_EX": _unpack_ex,
    "BEFORE_WITH": _plain(1, 2),
    "LOAD_SPECIAL": _plain(1, 2),
    "BUILD_TEMPLATE": _plain(2, 1),
    "MAP_ADD": _plain(2, 0),
    "BINARY_SLICE": _plain(3, 1),
}
for _names, _carry_out in {
    "COPY_FREE_VARS DELETE_DEREF DELETE_FAST MAKE_CELL NOP NOT_TAKEN PRECALL RESUME "
    "SETUP_ANNOTATIONS": _plain(0, 0),
    # LOAD_FAST_AND_CLEAR keeps a variable aside for an inlined comprehension; it is put back.
    "LOAD_ASSERTION_ERROR LOAD_BUILD_CLASS LOAD_FAST_AND_CLEAR LOAD_LOCALS": _plain(0, 1),
    "CONVERT_VALUE FORMAT_SIMPLE GET_ITER LIST_TO_TUPLE TO_BOOL "
    "UNARY_INVERT UNARY_NEGATIVE UNARY_NOT UNARY_POSITIVE": _plain(1, 1),
    "DICT_MERGE DICT_UPDATE LIST_APPEND LIST_EXTEND POP_ITER SET_ADD SET_UPDATE": _plain(1, 0),
    "CALL_INTRINSIC_2 COMPARE_OP FORMAT_WITH_SPEC SET_FUNCTION_ATTRIBUTE": _plain(2, 1),
    "BUILD_LIST BUILD_SET BUILD_SLICE BUILD_STRING BUILD_TUPLE": _counted(lambda count: count),
}.items():
    _BY_NAME.update(dict.fromkeys(_names.split(), _carry_out))


def _find_carry_out(name: str, opcode: int) -> _CarryOut:
    if opcode in dis.hasjrel:
        return _Pass.give_up if "BACKWARD" in name else _Pass.jump
    named: _CarryOut = getattr(_Pass, name.lower(), _Pass.give_up)
    return _BY_NAME.get(name, named)


_CARRY_OUT = [_find_carry_out(name, opcode) for opcode, name in enumerate(dis.opname[:256])]
