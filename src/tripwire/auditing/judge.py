"""Judge: compares a compiled callable with its plain one after each write.

It makes one write at a time. Before every call it restores everything to what it was after the
write, random generators included, so that both sides find the same. It calls until compiled code
has run: a traced call is the plain call, and proves nothing. Then it undoes the write, and compiled
code must give the first answer again.
"""

from __future__ import annotations

import inspect
import logging
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType, NoneType
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace
from rich import progress as bars
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn
from rich.table import Column
from torch import nn

from tripwire.auditing.alternatives import CannotWrite
from tripwire.auditing.findings import Audit, AuditedPlace, Finding, PlaceKind, Status, Unreached
from tripwire.auditing.holdings import HeldArguments
from tripwire.auditing.images import (
    Image,
    ImageNode,
    Plain,
    RaisedImage,
    World,
    describe,
    find_difference,
    image_of_error,
)
from tripwire.auditing.walking import Ran, Walk
from tripwire.auditing.writes import Trial, find_writes
from tripwire.dispatch.compiled import compile_callable, find_dispatcher
from tripwire.dispatch.dispatcher import Dispatcher
from tripwire.dispatch.entry import Entry
from tripwire.errors import COUNT_OR_NONE, FLAG, BadOption, Kind, check_kinds
from tripwire.values.classes import isinstance, name_of

if TYPE_CHECKING:
    from tripwire.tracing import Refusal

CALLS_TO_SETTLE = 4
_NOTHING_WRITTEN = AuditedPlace(PlaceKind.ARGUMENT, "the call itself", "nothing written")


@dataclass(frozen=True, slots=True)
class DispatcherMark:
    """What a dispatcher had done at one moment."""

    hits: int
    newest: tuple[Entry, ...]  # one, or none
    refusals: dict[Refusal, int]


class Subject:
    """What is audited: the plain callable, and its compiled forms, made as needed."""

    def __init__(self, compiled: Any) -> None:
        self.bound: tuple[Any, ...] = ()  # what a compiled method is bound to
        if isinstance(compiled, MethodType):
            self.bound, compiled = (compiled.__self__,), compiled.__func__
        dispatcher = find_dispatcher(compiled)
        if dispatcher is None:
            raise BadOption(
                f"audit takes what tripwire.compile returned, not {_name(compiled)}.",
                slug="not-compiled",
            )
        self.target = dispatcher.target
        self.name = dispatcher.name
        # A refusal is a status here, and not an error; failures are the judge's to see.
        self._options = replace(
            dispatcher.options, fullgraph=False, failures=None, witness=None, check=False
        )
        self.renew()

    def renew(self) -> None:
        """Forget all compiled code."""
        made = compile_callable(self.target, self.name, self._options)
        dispatcher = find_dispatcher(made)
        assert dispatcher is not None
        self._compiled, self._dispatcher = made, dispatcher

    def run_plainly(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The plain call: nothing compiled runs inside it either."""
        with _all_plain():
            return self.target(*args, **kwargs)

    def run_compiled(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The compiled call."""
        return self._compiled(*args, **kwargs)

    def mark(self) -> DispatcherMark:
        """Where things stand."""
        dispatcher = self._dispatcher
        return DispatcherMark(dispatcher.count_hits(), dispatcher.entries[:1], dispatcher.refusals)

    def did_hit(self, mark: DispatcherMark) -> bool:
        """Whether compiled code ran since."""
        return self._dispatcher.count_hits() > mark.hits

    def did_trace(self, mark: DispatcherMark) -> bool:
        """Whether new code was compiled since."""
        return self._dispatcher.entries[:1] != mark.newest

    def was_refused(self, mark: DispatcherMark) -> bool:
        """Whether a call was refused since."""
        return bool(self._refused_since(mark))

    def _refused_since(self, mark: DispatcherMark) -> list[Refusal]:
        return [r for r, n in self._dispatcher.refusals.items() if n != mark.refusals.get(r)]

    def why_plain(self, mark: DispatcherMark) -> str:
        """Why a call since ran as plain Python."""
        reasons = self._refused_since(mark) or list(self._dispatcher.refusals)
        return (
            " ".join(str(reasons[-1]).split()) if reasons else "no compiled code ran in three calls"
        )


def _name(value: object) -> str:
    return f"{name_of(type(value))} {getattr(value, '__qualname__', '')}".strip()


@contextmanager
def _all_plain() -> Iterator[None]:
    """Everything compiled runs as plain Python in here."""
    whole = Dispatcher.__call__

    def run_target(self: Dispatcher, *args: Any, **kwargs: Any) -> Any:
        return self.target(*args, **kwargs)

    Dispatcher.__call__ = run_target  # type: ignore[method-assign]
    try:
        yield
    finally:
        Dispatcher.__call__ = whole  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """What a call gave: its result or its error, what it changed, gradients if asked for."""

    image: ImageNode

    @property
    def result(self) -> Image:
        """What it returned or raised."""
        return self.image.parts[0][1]

    def differs_from(self, wanted: CallAnswer) -> str:
        """The first difference in words, or nothing."""
        return find_difference(wanted.image, self.image)

    def describe(self) -> str:
        """The answer in a few words."""
        changes = self.image.parts[1][1]
        assert isinstance(changes, ImageNode)
        effects = [f"{key} = {describe(part)}" for key, part in changes.parts[:-1]]
        more = f", {len(effects) - 1} more" if len(effects) > 1 else ""
        return describe(self.result) + (f"; {effects[0]}{more}" if effects else "")


Progress = Callable[[int, int, str], None]  # done, of how many, where


_KINDS: dict[str, Kind] = {
    "seconds": ((int, float, NoneType), "a number or None"),
    "places": COUNT_OR_NONE,
    "seed": COUNT_OR_NONE,
    "gradients": FLAG,
    "kinds": ((str, tuple, list, set, frozenset), "a tuple of names"),
}


@dataclass(frozen=True, slots=True)
class Auditor:
    """How to audit.

    seconds, places: stop after so much time, or so many writes. The writes are drawn at random,
        every kind of place in turn.
    seed: of that draw; None for a fresh one, which the audit prints.
    gradients: compare gradients as well.
    kinds: places of these kinds only, by their names in the table.
    progress: called with writes done, writes in all and the next place; without it, a terminal
        shows a bar.
    """

    seconds: float | None = None
    places: int | None = None
    seed: int | None = None
    gradients: bool = False
    kinds: tuple[str, ...] = ()
    progress: Progress | None = None

    def __post_init__(self) -> None:
        check_kinds({field: getattr(self, field) for field in _KINDS}, _KINDS)
        for name, bound in (("seconds", self.seconds), ("places", self.places)):
            if bound is not None and (isinstance(bound, bool) or not bound > 0):
                raise BadOption(f"{name} is {bound!r}; it must be above 0.", slug="bad-option")
        unknown = set(self.kinds) - set(PlaceKind)
        if unknown or isinstance(self.kinds, str):
            raise BadOption(
                f"kinds is {self.kinds!r}; it can hold {', '.join(PlaceKind)}.", slug="bad-option"
            )

    def audit(self, compiled: Any, /, *args: Any, **kwargs: Any) -> Audit:
        """Audit a compiled callable with the arguments of one call."""
        subject = Subject(compiled)
        with _quietly(), _progress_of(self) as progress:
            return _Judge(self, subject, [*subject.bound, *args], kwargs, progress).judge()


def audit(compiled: Any, /, *args: Any, **kwargs: Any) -> Audit:
    """Write to every place that a call could read, one at a time, and compare with the plain call.

    Arguments go to the callable as they are. `Auditor` takes the options. Afterwards everything is
    as it was before.
    """
    return Auditor().audit(compiled, *args, **kwargs)


@contextmanager
def _progress_of(options: Auditor) -> Iterator[Progress]:
    """The user's own, a bar on a terminal, or nothing."""
    console = Console(stderr=True)
    if options.progress is not None:
        yield options.progress
    elif not console.is_terminal:
        yield lambda done, total, place: None
    else:
        columns = (TextColumn("{task.completed}/{task.total}"), BarColumn())
        place = TextColumn("{task.description}", table_column=Column(no_wrap=True))
        # No thread draws it: another thread in the midst of a call would be the call's affair.
        with bars.Progress(
            *columns, place, console=console, transient=True, auto_refresh=False
        ) as bar:
            task = bar.add_task("")

            def show(done: int, total: int, place: str) -> None:
                told = escape(place)
                bar.update(task, completed=done, total=total, description=told, refresh=True)

            yield show


@contextmanager
def _quietly() -> Iterator[None]:
    """Without warnings and logs of calls that are made on purpose."""
    loggers = [logging.getLogger(f"tripwire.{name}") for name in ("refusals", "recompiles")]
    before = [logger.disabled for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.disabled = True
            yield
        finally:
            for logger, was in zip(loggers, before, strict=True):
                logger.disabled = was


class _Judge:
    """One audit."""

    def __init__(
        self,
        options: Auditor,
        subject: Subject,
        args: list[Any],
        kwargs: dict[str, Any],
        progress: Progress,
    ) -> None:
        self._options = options
        self._progress = progress
        self._subject = subject
        self._args = args
        self._kwargs = kwargs
        self._arguments = HeldArguments(_names_of(subject.target, args), args, kwargs)
        self._ran = Ran.before(subject.target)
        self._findings: list[Finding] = []
        self._unreached: list[Unreached] = []
        self._is_compiled = True
        self._around: Callable[[], Any] = ExitStack

    def judge(self) -> Audit:
        began = time.perf_counter()
        seed = self._options.seed
        if seed is None:
            seed = random.SystemRandom().randrange(10**6)
        before = World(self._walk())
        try:
            self._settle()
            walk = self._walk()
            self._base = World(walk, before)
            self._expected = self._answer(self._base, self._subject.run_plainly)
            self._check_repeatable()
            writes = self._choose(find_writes(walk, self._ran), seed)
            if self._judge_unwritten():
                self._try_all(writes, began)
        finally:
            before.put_back()
        return Audit(
            self._subject.name,
            tuple(self._findings),
            len(writes),
            seed,
            time.perf_counter() - began,
            (*walk.unreached, *self._unreached),
        )

    # --- before the writes ---

    def _walk(self) -> Walk:
        walk = Walk(self._ran)
        walk.visit(self._subject.name, self._subject.target)
        walk.add_arguments(self._arguments)
        walk.add_environment()
        return walk

    def _settle(self) -> None:
        """Let first calls do what they do once: fill caches, make buffers. Arguments stay."""
        walk = Walk(self._ran)
        walk.add_arguments(self._arguments)
        given = World(walk)
        try:
            self._ran, _ = Ran.of(lambda: self._subject.run_plainly(self._args, self._kwargs))
        except Exception as error:
            raise BadOption(
                f"{self._subject.name} raises with these arguments before the audit has written "
                f"anything: {name_of(type(error))}: {error}. Audit a call that returns.",
                slug="audit-call-raises",
            ) from error
        given.put_back()
        for run in (self._subject.run_plainly, *[self._subject.run_compiled] * CALLS_TO_SETTLE):
            try:
                run(self._args, self._kwargs)
            except Exception:  # found again below, and told
                break
            finally:
                given.put_back()

    def _check_repeatable(self) -> None:
        difference = self._compare_plain(self._base, self._expected)
        if difference:
            raise BadOption(
                f"{self._subject.name}: two plain calls gave two answers: {difference}. A "
                "callable that reads a clock, a file or a counter that can't be put back can't "
                "be audited.",
                slug="audit-not-repeatable",
            )

    def _compare_plain(self, world: World, expected: CallAnswer) -> str:
        """How a second plain call differs from the first, if it does."""
        return self._answer(world, self._subject.run_plainly).differs_from(expected)

    def _judge_unwritten(self) -> bool:
        """Whether compiled code is right while nothing is written."""
        self._arm()
        got = self._answer(self._base, self._subject.run_compiled)
        difference = got.differs_from(self._expected)
        if difference:
            self._add(_NOTHING_WRITTEN, Status.WRONG, self._expected, got, difference)
        return not difference

    def _arm(self) -> None:
        """Have compiled code that is valid for the world as it is, if there can be any."""
        for attempt in range(2 * CALLS_TO_SETTLE if self._is_compiled else 0):
            mark = self._subject.mark()
            self._answer(self._base, self._subject.run_compiled)
            if self._subject.did_hit(mark):
                return
            if attempt == CALLS_TO_SETTLE - 1:
                self._subject.renew()
        self._is_compiled = False

    def _choose(self, writes: list[Trial], seed: int) -> list[Trial]:
        """All of them, in an order in which every beginning is a fair sample of the kinds."""
        wanted = self._options.kinds
        chance = random.Random(seed)
        groups: dict[PlaceKind, list[Trial]] = {kind: [] for kind in PlaceKind}
        for write in writes:
            if not wanted or write.place.kind in wanted:
                groups[write.place.kind].append(write)
        for group in groups.values():
            chance.shuffle(group)
        ordered: list[Trial] = []
        while any(groups.values()):
            ordered += [group.pop() for group in groups.values() if group]
        return ordered

    # --- the writes ---

    def _try_all(self, writes: list[Trial], began: float) -> None:
        chosen = writes[: self._options.places]
        for done, write in enumerate(chosen):
            self._progress(done, len(chosen), str(write.place))
            if self._options.seconds is not None:
                if time.perf_counter() - began > self._options.seconds:
                    break
            try:
                self._try(write)
            except CannotWrite as error:
                self._unreached.append(Unreached(write.place.path, str(error)))
            finally:
                self._around = ExitStack
                self._base.put_back()

    def _try(self, write: Trial) -> None:
        subject = self._subject
        with ExitStack() as stack:
            try:
                stack.enter_context(write.in_force())
            except (TypeError, AttributeError, RuntimeError, ValueError) as error:
                raise CannotWrite(f"it can't be written: {error}") from None
            self._around = write.around_call
            world = World(self._walk(), self._base)
            expected = self._answer(world, subject.run_plainly)
            asked = subject.mark()
            answers, ran_plainly = self._ask_compiled(world)
            why = subject.why_plain(asked) if ran_plainly else ""
            differ = any(got.differs_from(expected) for got in answers)
            unsettled = self._compare_plain(world, expected) if differ else ""
        self._around = ExitStack
        self._base.put_back()
        if unsettled:
            self._arm()
            raise CannotWrite(f"two plain calls after the write gave two answers: {unsettled}")
        mark = subject.mark()
        after = self._answer(self._base, subject.run_compiled)
        is_armed = subject.did_hit(mark)
        self._conclude(write.place, expected, answers, after, why)
        if self._findings[-1].status.is_fault:
            subject.renew()
        if not is_armed or self._findings[-1].status.is_fault:
            self._arm()

    def _ask_compiled(self, world: World) -> tuple[list[CallAnswer], bool]:
        """Until compiled code has run, which takes a few calls; whether it never did."""
        answers = []
        for _ in range(3):  # a run may find that numbers have to be plain: then the next is traced
            mark = self._subject.mark()
            answers.append(self._answer(world, self._subject.run_compiled))
            if self._subject.did_hit(mark):
                return answers, False
            if not self._subject.did_trace(mark) and isinstance(answers[-1].result, RaisedImage):
                return answers, False
            if self._subject.was_refused(mark):
                break
        return answers, True

    def _conclude(
        self,
        place: AuditedPlace,
        expected: CallAnswer,
        answers: list[CallAnswer],
        after: CallAnswer,
        why: str,
    ) -> None:
        has_changed = bool(expected.differs_from(self._expected))
        for got in answers:
            difference = got.differs_from(expected)
            if difference:
                is_old = has_changed and not got.differs_from(self._expected)
                status = Status.STALE if is_old else Status.WRONG
                self._add(place, status, expected, got, difference)
                return
        difference = after.differs_from(self._expected)
        if difference:
            is_old = has_changed and not after.differs_from(expected)
            status = Status.STALE if is_old else Status.WRONG
            detail = f"after the write was undone: {difference}"
            self._add(place, status, self._expected, after, detail)
        elif why:
            self._add(place, Status.REFUSED, expected, answers[-1], why)
        else:
            status = Status.FOLLOWED if has_changed else Status.NO_EFFECT
            self._add(place, status, expected, answers[-1], "")

    def _add(
        self,
        place: AuditedPlace,
        status: Status,
        expected: CallAnswer,
        got: CallAnswer,
        detail: str,
    ) -> None:
        self._findings.append(Finding(place, status, expected.describe(), got.describe(), detail))

    # --- calls ---

    def _answer(self, world: World, run: Callable[[list[Any], dict[str, Any]], Any]) -> CallAnswer:
        """One call in a world, which is as it was afterwards."""
        try:
            camera = world.camera()
            gradients: Image = Plain(CallAnswer, "")
            try:
                with self._around():
                    result = run(list(self._args), dict(self._kwargs))
            except Exception as error:
                image: Image = image_of_error(error)
            else:
                image = camera.take(result, "")
                if self._options.gradients:
                    gradients = camera.take(_gradients_of(result, world), "gradient")
                del result
            changes = world.take_changes(camera)
        finally:
            world.put_back()
        parts = (("", image), ("", changes), ("gradients", gradients))
        return CallAnswer(ImageNode(CallAnswer, parts))


def _gradients_of(result: Any, world: World) -> dict[str, Any]:
    """Of everything that requires them, for one sum of all results."""
    found: list[torch.Tensor] = []
    _gather(result, found, set())
    leaves = world.leaves()
    if not found or not leaves:
        return {}
    with torch.enable_grad():
        total: Any = sum((t * 1.5).sum() for t in found)
        try:
            made = torch.autograd.grad(total, [leaf for _, leaf in leaves], allow_unused=True)
        except RuntimeError as error:
            return {"error": str(error)}
    return {path: grad for (path, _), grad in zip(leaves, made, strict=True)}


def _gather(value: Any, found: list[torch.Tensor], seen: set[int]) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if value.requires_grad and value.is_floating_point():
            found.append(value)
    elif isinstance(value, dict):
        for item in value.values():
            _gather(item, found, seen)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _gather(item, found, seen)


def _names_of(target: Any, args: list[Any]) -> tuple[str, ...]:
    """What the callable calls its positional arguments."""
    function = target.forward if isinstance(target, nn.Module) else target
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in by_position]
    rest = [p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL]
    return (
        *names[: len(args)],
        *(f"{rest[0] if rest else 'args'}[{i}]" for i in range(len(args) - len(names))),
    )
