"""Session: one observed run, from its preparation to the Trace that it becomes.

Before the run, what it can reach is copied. While it goes on, functions that start are reached
as well. Afterwards the reads, the writes and the result are planned, and whatever can't be
repeated or seen is a refusal.
"""

from __future__ import annotations

import builtins
import functools
import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import CodeType, FrameType, FunctionType, GeneratorType
from typing import Any

import torch
from msgspec.structs import replace
from torch._functorch import eager_transforms, vmap

from tripwire.env import is_library_file, is_own_code
from tripwire.imports import import_dynamo
from tripwire.reading.binding import Binding
from tripwire.reading.bytecode import find_uses
from tripwire.reading.effects import Effects, EffectStep, plan_effects, plan_marks, refer_to
from tripwire.reading.holders import Holder, Write
from tripwire.reading.names import (
    asks_for_modes,
    differentiates_again,
    fingerprint,
    needs_plain_numbers,
    returns_plain_number,
)
from tripwire.reading.reads import ReadSet
from tripwire.reading.sources import Item, Local, Running, Source
from tripwire.reading.structure import Planner, Unbuildable, build_skeleton, holds_mutable
from tripwire.reading.tensors import iter_tensors, version_of
from tripwire.reading.torchstate import Answer, ask_all, find_changes, sample_torch_state
from tripwire.rulebook.refusals import Refusal, Refused
from tripwire.rulebook.rules import COMPILED, Refuse
from tripwire.tracing import casts, hooks, memos
from tripwire.tracing.observe import Observer, observing
from tripwire.tracing.open.draws import Advance
from tripwire.tracing.outlines import outline_levels
from tripwire.tracing.outside import Outside
from tripwire.tracing.recorder import Recorder, recording, stop_recording
from tripwire.tracing.result import Completion, Effect, Input, Run, Trace, _LazyModule, build_inputs
from tripwire.tracing.state import CURRENT, TracingState, drop_unused_inputs, drop_unused_parts
from tripwire.values.classes import MADE_BY_PYTHON, find_in_class, isinstance, name_of
from tripwire.values.contents import resolve_import

# Functions of torch's that Dynamo must leave alone (`checkpoint`, for one) are wrapped here, and
# import it when they first run. Observed, that took 17.7 s of CPU time, where plain code takes 1.9.
# So do transforms of torch.func.
_IMPORTS_DYNAMO = frozenset({torch._compile.__file__, vmap.__file__, eager_transforms.__file__})


# A run is refused, and nobody is told: the next one has the numbers closed.
TOLD = "open-number-told"
_NO_TENSORS = (
    "{} returned no tensor ({}), so there is no graph to run. A graph computes tensors, not Python "
    "values."
)
_TOLD = "a function starts whose `type` or `is` could tell an open number from a plain one."


def run_user(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The user's call. Source ranges end at this frame."""
    return fn(*args, **kwargs)


class Session:
    """One run: prepares a state, executes, freezes."""

    def __init__(
        self,
        state: TracingState,
        binding: Binding,
        bound: dict[str, object],
        expressions: dict[str, str],
        complete: bool,
    ) -> None:
        self.state = state
        self.binding = binding
        self.bound = bound
        self.expressions = expressions
        self.complete = complete
        state.outside = Outside() if complete else None
        self.memos = memos.RunMemos(state) if complete else None
        self.shape: tuple[int, tuple[str, ...], bool] = (0, (), False)
        self.codes: list[CodeType] = []
        self.adopted: set[int] = set()  # those of them that may run out of sight, by identity
        self.blind = Observer.blind
        self.recorder: Recorder | None = None
        self.namespaces: dict[str, dict[str, Any]] = {"builtins": vars(builtins)}
        # Compared where the trace itself is called; compiled code has guards.
        self.skeletons = {
            str(source): build_skeleton(value, source)
            for value, source in ([] if complete else binding.sources(bound))
        }
        self._started: set[int] = set()
        self.before = sample_torch_state()
        self.answers = ask_all()
        for value, source in binding.sources(bound):
            anchored = isinstance(source, Local) and source.name not in expressions
            for tensor, path in iter_tensors(value, source):
                known = state.values.add(tensor)
                known.sources.setdefault(path, anchored)
                if known.node is None:
                    state.lift(tensor, known)
        for name, value in bound.items():
            state.reach.walk(value, Local(name), name not in expressions)
        function = binding.function
        if function is not None:
            if binding.owner is None:
                state.reach.walk_traced(function)
            state.reach.known_code.add(id(function.__code__))
            self.on_start(function.__code__, function.__globals__)

    def on_start(self, code: CodeType, namespace: dict[str, Any]) -> None:
        """Reach the globals that a function names, when it first starts."""
        if id(code) in self._started:  # the traced one was reached before the run
            return
        self._started.add(id(code))
        function = self.binding.function
        own = function is not None and namespace is function.__globals__
        module = "" if own else str(namespace.get("__name__", "?"))
        while self.namespaces.setdefault(module, namespace) is not namespace:
            module += "'"  # another namespace has the same name
        shadow = self.state.shadow
        if shadow is not None and self.state.refusal is None and shadow.is_told_by(code):
            self.state.refuse(Refusal(TOLD, _TOLD, self.state.capture_range(2)))
            self._withdraw(sys._getframe(1))
            if asks_for_modes(code) and self.recorder is not None:
                self.recorder.leave()
        self.state.run_aside(self._reach_from, code, namespace, module)

    def on_library_start(self, code: CodeType) -> None:
        """A function of torch's or the standard library's starts for the first time."""
        if code.co_filename in _IMPORTS_DYNAMO and "torch._dynamo" not in sys.modules:
            with hooks.lifted(self):
                self.state.run_aside(import_dynamo)
        self.state.reach.walk_library_code(code)

    def _reach_from(self, code: CodeType, namespace: dict[str, Any], module: str) -> None:
        reach = self.state.reach
        reach.walk_function(code, namespace, module)
        for name in find_uses(code).imports:
            reach.walk_import(resolve_import(name, namespace))
        if id(code) not in reach.known_code and code.co_flags & inspect.CO_OPTIMIZED:
            self._adopt(code)
        reach.known_code.update(id(const) for const in code.co_consts if type(const) is CodeType)

    def _adopt(self, code: CodeType) -> None:
        """Reach the functions with this code: no path that was walked leads to one."""
        for function in gc.get_referrers(code):
            if isinstance(function, FunctionType) and function.__code__ is code:
                self.state.reach.walk(function, Running(function.__qualname__), True)

    def on_refused(self, refuse: Refuse) -> None:
        """A function of torch's starts that can't be followed, or one of C's that acts."""
        self.state.refuse(Refusal(refuse.slug, refuse.reason, self.state.capture_range(2)))
        if refuse is COMPILED:  # Dynamo would look into every patch
            hooks.uninstall(self)
        else:
            hooks.release(self)
        # A function that C++ has takes an open number for a symbol, and no mode stands before it.
        self._withdraw(sys._getframe(1))
        # Open numbers that weren't found may still go to torch, which must get plain ones.
        stays = self.state.shadow is not None and not refuse.of_modes
        keeps = CURRENT.kept is not None and CURRENT.kept.is_for_failures()
        if self.recorder is not None and not keeps and not stays:
            self.recorder.leave()

    on_impure = on_refused

    def _withdraw(self, frame: FrameType) -> None:
        """Leave no open number to a run that is refused."""
        shadow = self.state.shadow
        if shadow is not None:
            self.state.run_aside(shadow.withdraw, frame, run_user.__code__)

    def open_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with open numbers among them."""
        shadow = self.state.shadow
        if shadow is None or self.state.refusal is not None:
            return args, kwargs
        positional, named = list(args), dict(kwargs)
        for name, expression in self.expressions.items():
            value: Any = self.bound[name]
            if expression.startswith("{"):  # **kwargs
                steps = ((key, str(Item(Local(name), key))) for key in value)
                named |= {key: shadow.open_passed(value[key], path) for key, path in steps}
                continue
            opened = shadow.open_passed(value, str(Local(name)))
            if opened is not value:
                exec(
                    f"{expression} = opened",
                    {"args": positional, "kwargs": named, "opened": opened},
                )
        return tuple(positional), named

    def execute(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            CURRENT.tracing = True
            self.state.lifted = functools.partial(hooks.lifted, self)
            observer = self.state.observer = observing(self, watch_calls=self.complete)
            shadow = self.state.shadow
            observer.has_open = shadow is not None
            draws = observer.leaves_draws = shadow is not None and shadow.draws
            numbers = nullcontext() if shadow is None else casts.casting(draws=draws)
            with (
                hooks.installed(self),
                casts.making(),
                memos.remembering(self.memos),
                numbers,
                observer,
                recording(self.state) as self.recorder,
            ):
                self.state.reach.reader.start()
                result = run_user(fn, args, kwargs)
                if self.state.outside is not None and self.state.refusal is None:
                    self.state.outside.close_rest(shadow)
            self.state.reach.reader.stop()
            CURRENT.tracing = False
        except BaseException:
            self._leave_all()
            raise
        return result

    def _leave_all(self) -> None:
        """Leave once more whatever was entered: an interrupt may have hit the leaving itself."""
        CURRENT.tracing = False
        self.state.reach.reader.stop()
        stop_recording(self.state)
        if self.state.observer is not None:
            self.state.observer.stop()
        casts.stop()
        memos.stop()
        hooks.uninstall(self)

    def leave(self) -> None:
        """Keep the code that ran, and let go of the observer: what was reached must die in time."""
        observer, self.state.observer = self.state.observer, None
        self.state.lifted = nullcontext  # it knows this session
        self.recorder = None
        self.state.reach.close()
        if observer is not None:
            self.blind = observer.blind
            self.codes = observer.codes()
            self.adopted = observer.adopted
            observer.forget()

    def freeze(self, result: object, torch_state: tuple[object, ...]) -> Run:
        """The finished run as a Trace, or its refusal."""
        state = self.state
        self._result = result
        try:
            self._check_torch_state()
            state.check_exposed_memory()
            for tensor, known in state.values.live():
                if known.version != version_of(tensor):
                    state.check_seen(tensor, known)
            if state.refusal is None:
                trace = self._build(result)
                modules, outputs = self._list_modules(), tuple(self._outputs)
                was_alone = state.reach.holders.is_alone()
                return Run(trace.result, trace, None, modules, torch_state, outputs, was_alone)
        except Refused as refused:
            state.refuse(refused.refusal)
        was_alone, modules = state.reach.holders.is_alone(), self._list_modules()
        return Run(self._settle(), None, state.refusal, modules, was_alone=was_alone)

    def _settle(self) -> object:
        """The result with plain numbers in the place of open ones; the user's objects as well."""
        if self.state.shadow is not None:
            self._result = self.state.shadow.settle(self._result)
        return self._result

    def _check_torch_state(self) -> None:
        for answer in self.answers:
            if not answer.flag.is_libraries:
                self._check_answer(answer)
        if any(generator.initial_seed() != seed for generator, seed in self.state.reach.generators):
            raise Refused("generator-reseeded", "a torch.Generator was seeded by the run.")
        changed = set(find_changes(self.before)) - {"grad mode"}
        if changed:
            raise Refused(
                "torch-state-changed",
                f"the function leaves torch's {', '.join(sorted(changed))} changed, and the "
                "graph wouldn't. Set it outside, or restore it before returning.",
            )

    def _check_answer(self, answer: Answer) -> None:
        if answer.seen is not None and answer.flag.get() != answer.seen:
            raise Refused(
                answer.flag.slug,
                f"the function leaves {answer.flag.name} changed, and a compiled call "
                "wouldn't. Set it outside, or restore it before returning.",
            )

    def _build(self, result: object) -> Trace:
        state = self.state
        name = self.binding.name
        if isinstance(result, GeneratorType) or find_in_class(type(result), "__await__"):
            raise Refused(
                "lazy-result",
                f"{name} returned a {name_of(type(result))}, whose code hasn't run yet. "
                "Return a list or a tuple.",
            )
        reads = self._reads()
        if self.complete:
            self._check_reads(reads)
            self._check_tables()
            self._check_libraries(reads)
        writes = list(state.reach.holders.find_writes())
        self._writes = writes
        if self.complete:
            state.reach.holders.check_unwritten(writes)
        planner = self._planner(writes)
        effects = None
        try:
            if self.complete:
                own, inner = state.inner.split(writes)
                state.stores.check(reads, state.reach)
                effects = plan_effects(
                    *(own, reads, planner.plan, state.reach.holders.facts_of),
                    *(self._attributes_of, inner, self._was_open, self._may_be_another),
                )
            self._kept = len(planner.tensors)
            plan = planner.plan(result)
            risks = [] if state.shadow is None else state.shadow.formulas.list_risks()
            self._risks = tuple((planner.plan(risk), type(risk.value)) for risk in risks)
            if effects is not None:
                said = () if state.outside is None else tuple(state.outside.plan(state, planner))
                marks = self._plan_marks(planner)
                drawn = {} if state.shadow is None else state.shadow.drawn
                draws = [Advance(tuple(drawn.values()))] if drawn else []
                effects = replace(effects, steps=(*effects.steps, *marks, *draws, *said))
        except Unbuildable as error:
            raise Refused("unbuildable-result", f"{self.binding.name}: {error}") from None
        tensors = self._outputs = planner.tensors
        outputs = tuple(state.node_of(tensor) for tensor in tensors)  # may make more inputs
        state.check_kept_arrays(self._outputs)
        if self.memos is not None:
            self.memos.check(self._outputs)
        graph = state.graph()
        graph.output(outputs)
        drop_unused_parts(state)
        if self.complete:
            drop_unused_inputs(state)
            if state.shadow is not None:
                state.shadow.pass_sizes()
        if state.has_levels:
            outline_levels(state, bool(self.before["grad mode"]))
        inputs = build_inputs(self.state)
        result = self._settle()
        if effects is None or not effects.steps:
            self._check_result(result, tensors, inputs)
        return Trace(
            name=name,
            inputs=inputs,
            outputs=plan,
            result=result,
            branches=tuple(state.branches),
            effects=tuple(map(Effect, dict.fromkeys(write.source for write in writes))),
            reads=reads,
            constants=tuple(state.constants),
            torch_state=self.before,
            strides_matter=state.strides_matter,
            requires_grad_matters=state.requires_grad_matters,
            binding=self.binding,
            namespaces=self.namespaces,
            skeletons=self.skeletons,
            shadow=None if state.shadow is None or state.shadow.is_idle else state.shadow,
            completion=None if effects is None else self._completion(effects, planner, reads),
            _module=_LazyModule(graph, tuple(state.constants), _class_name(name)),
        )

    def _planner(self, writes: list[Write]) -> Planner:
        written = {id(write.holder.owner) for write in writes}
        if self.complete:  # effects come first, and leave what was written as it should be
            fresh = self.state.reach.fresh
            planner = Planner(
                self.state.reach.find_source,
                hold=lambda value: None if id(value) in fresh else refer_to(value),
                find_owner=self.state.reach.holders.find_owner,
            )
            if self.state.shadow is not None:
                planner.plan_number = self.state.shadow.formulas.plan
                planner.find_original = self.state.shadow.find_passed
                planner.plan_held = self.state.shadow.plan_held
            return planner
        return Planner(self.state.reach.find_source, lambda value: id(value) in written)

    def _reads(self) -> ReadSet:
        reach = self.state.reach
        # What Python made for a class was reached when somebody asked that very class for it.
        reach.walk_names(frozenset(self.state.computed_names) - MADE_BY_PYTHON)
        codes = self.codes
        function = self.binding.function
        if function is not None and not any(code is function.__code__ for code in codes):
            codes.insert(0, function.__code__)
        # Library code is asked by the user's for annotations and fields of the user's classes.
        reach.walk_names(reach.find_made(codes))
        reach.note_constants(codes)
        computed, tested = self.state.computed_names, self.state.tested_names
        return ReadSet(reach, codes, frozenset(computed), frozenset(tested), self.adopted)

    def _check_reads(self, reads: ReadSet) -> None:
        """Refuse reads that can't be seen (L2)."""
        if self.blind:
            raise Refused("not-observed", self.blind)
        if self.state.reach.reader.has_lost_sight:
            raise Refused(
                "not-observed",
                "the run changed how attributes of a class are looked up, so tripwire didn't see "
                "what it read afterwards.",
            )
        if reads.refused is not None:
            name, place = reads.refused
            raise Refused(
                "reads-frames",
                f"`{name}` looks at frames, namespaces or code as a whole, so tripwire can't tell "
                "what it reads. Read the names that you need one by one.",
                place,
            )
        if self.state.attribute_at is not None and reads.compares_identity:
            raise Refused(
                "reads-identity",
                "the function takes `.grad` or `._base` of a tensor here, and also compares with "
                "`is`. The next call may find another tensor there. Compare outside.",
                self.state.attribute_at,
            )
        for refuse, line in self.state.reach.handed_on:
            raise Refused(refuse.slug, f"{line}: {refuse.reason}")
        reach = self.state.reach
        for value, path in (*reach.opaque, *(reach.drawing if reads.looks_behind_methods else ())):
            if reads.is_read(value, path):
                raise Refused(
                    "hidden-state",
                    f"{path} is a {name_of(type(value))}: its state is hidden in C, so tripwire "
                    "can't notice a change. Read what you need from it outside, and pass that in.",
                )

    def _attributes_of(self, value: object) -> dict[str, object]:
        """What Python had put on a tensor before the run."""
        return self.state.attributes.get(id(value), (None, {}))[1]

    def _plan_marks(self, planner: Planner) -> list[EffectStep]:
        """Attributes that the run puts on tensors, on those that it returns or stores as well."""
        steps: list[EffectStep] = []
        for tensor, known in self.state.values.live():
            if known.sources:
                marks = list(plan_marks(tensor, self._attributes_of(tensor), planner.plan))
                if marks and any(known.sources.values()):
                    raise Refused(
                        "tensor-attribute",
                        f"the run sets an attribute of the tensor {next(iter(known.sources))}, "
                        "which is the same on every call. Set it before the first call, or keep "
                        "it elsewhere.",
                    )
                steps += marks
        for tensor in planner.tensors:  # grows: an attribute may hold more tensors
            found = self.state.values.find(tensor)
            if found is None or not found.sources:
                steps += plan_marks(tensor, {}, planner.plan)
        return steps

    def _was_open(self, holder: Holder, key: Any) -> bool:
        """Whether an open number lay there, and any of it may be another on the next call."""
        if not self.state.reach.holders.is_planted(holder, key):
            return False
        shadow = self.state.shadow
        return shadow is None or shadow.was_open_at(holder, key)

    def _may_be_another(self, holder: Holder, key: Any) -> bool:
        """Whether guards take what lies there as it is: an open number, or what is exchanged."""
        state = self.state
        met = any(one is holder and key in {at} for one, at, _ in state.reach.exchanged_met)
        return met or (state.shadow is not None and state.shadow.is_open_at(holder, key))

    def _check_tables(self) -> None:
        filled = self.state.reach.find_filled()
        if filled is not None:
            raise Refused(
                "module-changed",
                f"the run put something into {filled}, which was empty: a hook, a "
                "parameter, a buffer or a submodule. Do it before the first call.",
            )

    def _check_libraries(self, reads: ReadSet) -> None:
        for holder, key in self.state.reach.holders.find_library_writes(reads.stored):
            raise Refused(
                "library-changed",
                f"the run sets {holder.step(key)}, which all other code can see. Keep it in a "
                "module or a class of your own.",
            )

    def _completion(self, effects: Effects, planner: Planner, reads: ReadSet) -> Completion:
        reach = self.state.reach
        paths = [write.holder.path for write in self._writes if not write.holder.anchored]
        return Completion(
            effects,
            tuple(dict.fromkeys([*paths, *planner.fetched])),
            self.shape,
            self._environment(reads),
            self._find_answers(reads),
            self.expressions,
            self.bound,
            reach,
            tuple(known() for _, known in self.state.inputs),
            tuple(tuple(known.sources.items()) for _, known in self.state.inputs),
            tuple(self._find_asked(reads)),
            {key: attributes for key, (_, attributes) in self.state.attributes.items()},
            self._asks_for_types(),
            sum(count * least for count, least in self.state.durations.values()),
            sum(least for count, least in self.state.durations.values() if count == 1),
            frozenset(planner.handed_out),
            self._risks,
            self._kept,
            frozenset() if self.memos is None else self.memos.find_unneeded(),
        )

    def _asks_for_types(self) -> bool:
        return any(
            returns_plain_number(code)
            if is_library_file(code.co_filename)
            else not is_own_code(code) and needs_plain_numbers(code)
            for code in self.codes
        )

    def _find_asked(self, reads: ReadSet) -> Iterator[tuple[torch.Tensor, Source]]:
        """State that Python could ask for its form, and that no recorded call got."""
        lifted = {id(known) for _, known in self.state.inputs}
        written = {str(write.source) for write in self._writes}
        passed = self.memos.find_places(reads.holders) if self.memos is not None else ()
        for tensor, known in self.state.values.live():
            if id(known) not in lifted:
                anchored = (path for path, is_anchored in known.sources.items() if is_anchored)
                if passed:
                    anchored = (path for path in anchored if not f"{path}[".startswith(passed))
                paths = (path for path in anchored if not written or str(path) not in written)
                path = next(paths, None)
                if path is not None:
                    yield tensor, path

    def _environment(self, reads: ReadSet) -> frozenset[str] | None:
        variables = self.state.environment
        if variables is None or "environb" in reads.names:  # which reads them all, in bytes
            return None
        return frozenset(variables)

    def _find_answers(self, reads: ReadSet) -> tuple[Answer, ...]:
        """What the executed code may have asked for, by its names."""
        named = reads.names | reads.uses.globals.keys()
        homes = self.state.reach.homes
        asked = [answer for answer in self.answers if answer.flag.may_be_asked(named, homes)]
        for answer in asked:
            self._check_answer(answer)
        # None: the module in question was first imported by the run.
        return tuple(a if a.seen is not None else a.flag.answer() for a in asked)

    def _list_modules(self) -> tuple[torch.nn.Module, ...]:
        """The modules to compile on their own if the run is refused.

        None where gradients are asked for gradients: AOTAutograd's code has no second derivative.
        What happens after a refusal isn't seen; then the code says it.
        """
        users = (code for code in self.codes if not is_library_file(code.co_filename))
        if self.state.differentiates_again or any(map(differentiates_again, users)):
            return ()
        return tuple(self.state.modules.values())

    def _check_result(
        self, result: object, tensors: list[torch.Tensor], inputs: tuple[Input, ...]
    ) -> None:
        name, strict = self.binding.name, self.state.strict
        written = any(wanted.written for wanted in inputs)
        if result is None and (strict or not (written or self.complete)):
            raise Refused(
                "returns-nothing",
                f"{name} returned None"
                + (": strict tracing wants a result." if written else ", and changed no tensor.")
                + " A graph can't hold side effects alone. Return the tensors that it computes.",
            )
        if not (tensors or written or self.complete):
            raise Refused("no-tensors", _NO_TENSORS.format(name, fingerprint(result)))
        if strict and holds_mutable(result):
            raise Refused(
                "mutable-result",
                f"{name} returned a list or a dict. Strict tracing allows tensors and tuples "
                "only, since a caller could change the others. Use strict=False.",
            )


def _class_name(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name) or "traced"
