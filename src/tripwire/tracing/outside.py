"""Outside: what a run prints and logs, compiled calls print and log again.

Nothing in a call depends on what `print` or a logger does. So a compiled call does all of it at its
end, in order, with its own numbers and tensors, and through whatever stream and handlers there
are by then. What is printed must be the same at the end as it was when it was printed: plain
values, open numbers, tensors that aren't written afterwards, and containers of these, which are
copied. Anything else is refused as before.

An f-string would close the open numbers in it, and so would `"%d" % n` and `"{}".format(n)`. They
don't, if the text goes nowhere but into such a call: then it is made anew on each call. Bytecode
says where it goes (`texts`); until the call comes, the number waits.
"""

from __future__ import annotations

import builtins
import dis
import functools
import logging
import operator
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct

from tripwire.env import is_library_file, is_own_file
from tripwire.ranges import SourceRange
from tripwire.reading.effects import EffectStep
from tripwire.reading.structure import Building, ConstantPlan, PartPlan, Planner
from tripwire.reading.tensors import PLAIN_TENSORS, GeneratorStates, storage_of, version_of
from tripwire.rulebook.refusals import Refusal, Refused
from tripwire.rulebook.rules import Refuse
from tripwire.tracing.state import CURRENT, TracingState
from tripwire.tracing.texts import (
    SPEAKERS,
    Field,
    Notation,
    Template,
    Waiting,
    find_calls,
    take_apart,
)
from tripwire.values.classes import is_exactly, isinstance, short_name_of
from tripwire.values.identity import PLAIN
from tripwire.values.numbers import OpenFloat, OpenInt, close_values, is_open
from tripwire.writes.patches import Patch

if TYPE_CHECKING:
    from tripwire.tracing.open.shadow import Shadow


class _Unsayable(Exception):
    """What can't be said at the end of the call, and what to do instead."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(what)
        self.what = what
        self.instead = instead

    def refuse_print(self) -> Refuse:
        """Why the call that prints it isn't compiled."""
        return Refuse("prints", _PRINT_OF.format(self.what, self.instead))

    def refuse_log(self) -> Refuse:
        """Why the call that logs it isn't compiled."""
        return Refuse("logs", _LOG_OF.format(self.what, self.instead))


class Said(Struct, frozen=True):
    """A call that is made again at the end of each call."""

    function: Callable[..., object]
    owner: logging.Logger | None  # its first argument, as itself
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[tuple[torch.Tensor, tuple[object, ...]], ...]  # as they were at the time
    streams: tuple[object, ...]
    options: dict[str, object]
    where: SourceRange


class Say(EffectStep, frozen=True):
    """What was printed or logged, as a step of an entry: it is said again."""

    function: Callable[..., object]
    args: tuple[PartPlan, ...]
    kwargs: tuple[tuple[str, PartPlan], ...]

    def apply(self, building: Building) -> None:
        args = [arg.build(building) for arg in self.args]
        self.function(*args, **{name: arg.build(building) for name, arg in self.kwargs})


class TextPlan(PartPlan, frozen=True):
    """A text, with this call's numbers."""

    pieces: tuple[str | tuple[PartPlan, Notation], ...]

    def build(self, building: Building) -> object:
        return "".join(
            piece if isinstance(piece, str) else piece[1].write(piece[0].build(building))
            for piece in self.pieces
        )


class Outside:
    """What one run says to the outside."""

    def __init__(self) -> None:
        self._said: list[Said] = []
        self._waiting: list[Waiting] = []

    def say(
        self,
        state: TracingState,
        function: Callable[..., object],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
        owner: logging.Logger | None = None,
    ) -> None:
        """Make such a call, and note it. Raises _Unsayable where it did nothing."""
        where = state.capture_range(2)
        tensors: dict[int, torch.Tensor] = {}
        with state.aside():
            if _is_in_try(frame, state.ends[0]):
                raise _Unsayable(*_IN_TRY)
            copied = _copy((self._find_texts(frame, args), kwargs), tensors)
            seen = tuple((tensor, _look_at(state, tensor)) for tensor in tensors.values())
            streams, options = _find_streams(), _find_options()
            before, generators = state.inner.look(), GeneratorStates()
            first = () if owner is None else (owner,)
            function(*first, *close_values(args), **close_values(kwargs))
            is_moved = next(generators.find_moved(), None) is not None
            is_apart = not is_moved and state.inner.is_as(before)
        if is_apart:
            given, named = copied
            self._said.append(Said(function, owner, given, named, seen, streams, options, where))
        else:
            state.refuse(Refusal("prints", _STREAM_WRITES, where))

    def plan(self, state: TracingState, planner: Planner) -> Iterator[Say]:
        """The steps that say it again. Raises Refused."""

        def plan(value: Any) -> PartPlan:
            if not isinstance(value, Template):
                return planner.plan(value)
            return TextPlan(
                tuple(
                    piece if isinstance(piece, str) else (planner.plan(piece[0]), piece[1])
                    for piece in value.pieces
                )
            )

        for said in self._said:
            if any(_look_at(state, tensor) != seen for tensor, seen in said.tensors):
                raise Refused("prints", _WRITTEN_LATER, said.where)
            if not all(map(operator.is_, said.streams, _find_streams())):
                raise Refused("prints", _OTHER_STREAM, said.where)
            if said.options != _find_options():
                raise Refused("prints", _OTHER_OPTIONS, said.where)
            args = list(map(plan, said.args))
            if said.owner is not None:
                # One that nothing leads to is the only one of its name.
                is_reached = state.reach.find_source(said.owner) is not None
                first = planner.plan(said.owner) if is_reached else ConstantPlan(said.owner)
                args.insert(0, first)
            kwargs = tuple((name, plan(value)) for name, value in said.kwargs.items())
            yield Say(said.function, tuple(args), kwargs)

    # --- texts ---

    def wait(
        self,
        state: TracingState,
        number: OpenInt | OpenFloat,
        asks: str,
        form: str,
        frame: FrameType,
    ) -> bool:
        """Whether a number that is formatted stays open: its text goes into a call."""
        at = frame.f_lasti
        with state.aside():
            calls = find_calls(frame.f_code)
        for call in calls:
            waiting = Waiting(frame, at, call, number, asks, form, state.capture_range(3))
            fields = (piece for text in call.texts for piece in text if isinstance(piece, Field))
            if any(field.may_hold(waiting) for field in fields):
                self._waiting.append(waiting)
                return True
        return False

    def drop(self, frame: FrameType) -> None:
        """The logger that a frame calls now doesn't want the text: it goes nowhere."""
        self._waiting = [
            w for w in self._waiting if w.frame is not frame or not w.call.is_at(frame.f_lasti)
        ]

    def close_rest(self, shadow: Shadow | None) -> None:
        """Numbers whose text went elsewhere are closed."""
        if shadow is not None:
            for waiting in self._waiting:
                shadow.close_at(waiting.number, f"{waiting.asks.strip('_')}()", waiting.where)
        self._waiting.clear()

    def _find_texts(self, frame: FrameType, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments of the call that a frame makes now, with texts taken apart."""
        here = [w for w in self._waiting if w.frame is frame and w.call.is_at(frame.f_lasti)]
        matches = [
            (pieces, index, *taken)
            for pieces in {pieces for waiting in here for pieces in waiting.call.texts}
            for index, arg in enumerate(args)
            if (taken := take_apart(arg, pieces, here)) is not None
        ]
        found = list(args)
        for pieces, index, template, used in matches:
            if sum(one[0] == pieces or one[1] == index for one in matches) == 1:
                found[index] = template
                self._waiting = [w for w in self._waiting if w not in used]
        return tuple(found)


_PRINT_OF = (
    "`print` is {0}, and compiled code can't print that again at the end of each call. {1}, or "
    "print outside the traced function."
)
_LOG_OF = (
    "a logger is {0}, and compiled code can't log that again at the end of each call. {1}, or log "
    "outside the traced function."
)
_IN_TRY = ("called in a `try`, which may catch what it raises", "Move it out of the `try`")
_OF_ITSELF = ("given a container that holds itself, or too many in each other", "Give it the items")
_TO_A_STREAM = ("given a stream (`file=...`)", "Leave `file=` out")
_WITH_GRAD = (
    "given a tensor that has a `grad_fn`, and the tensor of compiled code has another",
    "Give it `x.item()` or `x.detach()`",
)
_STREAM_WRITES = (
    "printing or logging runs code of a stream or a handler that writes to what the function "
    "reads, or draws random numbers. Print outside the traced function."
)
_WRITTEN_LATER = (
    "a tensor is printed or logged here and written afterwards, and compiled code prints at the "
    "end of the call. Print a copy: `print(x.clone())`."
)
_OTHER_STREAM = (
    "`sys.stdout` or `sys.stderr` is another here than at the end of the call, when compiled code "
    "prints. Redirect outside the traced function."
)
_OTHER_OPTIONS = (
    "torch's print options are others here than at the end of the call, when compiled code prints. "
    "Set them outside the traced function."
)


_CONSTANTS = (torch.dtype, torch.device, Template)
_DEEPEST = 50


def _copy(value: Any, tensors: dict[int, torch.Tensor], around: tuple[int, ...] = ()) -> Any:
    """A value as it is now; tensors are noted. Raises _Unsayable."""
    if is_open(value) or id(type(value)) in PLAIN or is_exactly(value, *_CONSTANTS):
        return value
    if isinstance(value, torch.Tensor):
        # Compiled code has another `grad_fn`, which would be printed.
        if id(type(value)) not in PLAIN_TENSORS:
            raise _cant_copy(value)
        if value.grad_fn is not None:
            raise _Unsayable(*_WITH_GRAD)
        if version_of(value) is None or value.layout is not torch.strided:
            raise _cant_copy(value)
        tensors[id(value)] = value
        return value
    if id(value) in around or len(around) > _DEEPEST:
        raise _Unsayable(*_OF_ITSELF)
    around = (*around, id(value))
    if is_exactly(value, tuple, list, torch.Size):
        return type(value)([_copy(one, tensors, around) for one in value])
    if is_exactly(value, dict):
        pairs = value.items()
        return {_copy(k, tensors, around): _copy(one, tensors, around) for k, one in pairs}
    raise _cant_copy(value)


def _cant_copy(value: object) -> _Unsayable:
    return _Unsayable(
        f"given a `{short_name_of(type(value))}`, which may have changed by then",
        "Give it texts, numbers or plain tensors",
    )


def _look_at(state: TracingState, tensor: torch.Tensor) -> tuple[object, ...]:
    """What moves if a tensor's text may become another; `.data` is counted by no version."""
    storage = storage_of(tensor)
    written = state.written_storages.get(storage)
    return version_of(tensor), tensor.requires_grad, storage, written


def _find_streams() -> tuple[object, ...]:
    return sys.stdout, sys.stderr


def _find_options() -> dict[str, object]:
    return dict(vars(torch._tensor_str.PRINT_OPTS))


# --- what is printed in a `try` ---


def _is_in_try(frame: FrameType | None, end: CodeType | None) -> bool:
    """Whether code of the run may catch what a stream raises: at the end of a call it can't."""
    while frame is not None and frame.f_code is not end:
        file = frame.f_code.co_filename
        if not is_library_file(file) and not is_own_file(file):
            if _has_handler(frame.f_code, frame.f_lasti):
                return True
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=256)
def _has_handler(code: CodeType, place: int) -> bool:
    """Whether a place in a code is in a `try`; a `with` isn't one."""
    names = {step.offset: step.opname for step in dis.get_instructions(code)}
    entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]  # typeshed's gap
    seen: set[int] = set()
    while True:
        targets = [entry.target for entry in entries if entry.start <= place < entry.end]
        if not targets or targets[0] in seen:
            return False
        seen.add(targets[0])
        place = targets[0] + 2  # what a handler raises again goes to the next one around it
        if names[targets[0]] == "PUSH_EXC_INFO" and names.get(place) != "WITH_EXCEPT_START":
            return True


# --- print ---


def _wrap_print(plain: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(plain)
    def print_observed(*args: Any, **kwargs: Any) -> None:
        state, why = CURRENT.state, None
        if state is not None and state.outside is not None and state.refusal is None:
            try:
                if kwargs.get("file") is not None:
                    raise _Unsayable(*_TO_A_STREAM)
                state.outside.say(state, plain, args, kwargs, sys._getframe(1))
            except _Unsayable as unsayable:
                why = unsayable.refuse_print()
            else:
                return
        if state is not None and state.observer is not None:
            state.observer.judge(sys._getframe(1), plain, why=why)
        plain(*args, **kwargs)

    return print_observed


# --- loggers ---

_PRINT = print


def _wrap_log(plain: Callable[..., object]) -> Callable[..., object]:
    def log_observed(
        self: logging.Logger,
        level: int,
        msg: object,
        args: Any,
        exc_info: Any = None,
        extra: Any = None,
        stack_info: bool = False,
        stacklevel: int = 1,
    ) -> None:
        state = CURRENT.state
        outside = None if state is None or state.refusal is not None else state.outside
        more = {"exc_info": exc_info, "extra": extra, "stack_info": stack_info}
        given = ", ".join(f"`{name}`" for name, value in more.items() if value)
        caller = None if outside is None else _find_caller(stacklevel)
        why = None
        if state is not None and outside is not None and caller is not None and _is_known(self):
            log = _Log(level, caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_name)
            try:
                if given:
                    raise _Unsayable(f"given {given}", f"Log without {given}")
                if not is_exactly(args, tuple):  # a dict, for `%(name)s`
                    raise _cant_copy(args)
                outside.say(state, log, (msg, *args), {}, _find_speaker(), self)
            except _Unsayable as unsayable:
                why = unsayable.refuse_log()
            else:
                return
        if state is not None and state.observer is not None:
            # A print in logging's own code is a log.
            state.observer.judge(sys._getframe(2), _PRINT, why=why)
        # Our frames are between the logger and its caller.
        plain(self, level, msg, args, exc_info, extra, stack_info, stacklevel + 2)

    return log_observed


def _wrap_is_enabled(plain: Callable[..., bool]) -> Callable[..., bool]:
    def is_enabled_observed(self: logging.Logger, level: int) -> bool:
        is_enabled = plain(self, level)
        state = CURRENT.state
        if not is_enabled and state is not None and state.outside is not None:
            state.outside.drop(_find_speaker())
        return is_enabled

    return is_enabled_observed


def _is_known(logger: logging.Logger) -> bool:
    """Whether it is the only logger of its name, and finds lines as others do."""
    finds = getattr(logger.findCaller, "__func__", None)
    return finds is logging.Logger.findCaller and logging.getLogger(logger.name) is logger


class _Log(Struct, frozen=True):
    """A message of a logger, from the line that logged it first."""

    level: int
    file: str
    line: int
    function: str

    def __call__(self, logger: logging.Logger, message: object, *args: object) -> None:
        head = logger.name, self.level, self.file, self.line
        # As `Logger._log` passes them: a subclass may want all of them.
        record = logger.makeRecord(*head, message, args, None, self.function, None, None)
        logger.handle(record)


def _find_caller(stacklevel: int) -> FrameType | None:
    """The frame that logs, as `Logger.findCaller` has it."""
    frame: FrameType | None = sys._getframe(3)  # past this one, the hook and its detour
    while frame is not None:
        if frame.f_code.co_filename != logging._srcfile:
            stacklevel -= 1
            if stacklevel <= 0:
                return frame
        frame = frame.f_back
    return None


def _find_speaker() -> FrameType:
    """The frame that calls the logger: nobody else has got the text."""
    frame = sys._getframe(3)
    while frame.f_code in _METHODS and frame.f_back is not None:
        frame = frame.f_back
    return frame


_METHODS = frozenset(
    function.__code__
    for owner in (logging.Logger, logging)
    for name in SPEAKERS
    if isinstance(function := vars(owner).get(name), FunctionType)
)

PATCHES = (
    Patch(builtins, "print", _wrap_print),
    Patch(logging.Logger, "_log", _wrap_log),
    Patch(logging.Logger, "isEnabledFor", _wrap_is_enabled),
)
