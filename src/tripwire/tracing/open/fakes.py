"""Fakes: a fake tensor with symbolic sizes goes beside each tensor whose sizes are open.

A torch call that gets such a tensor runs a second time on the fakes, which takes no memory and
computes only shapes. Equal questions are asked once, so equal layers cost little after the first.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from time import thread_time
from typing import Any, NamedTuple, cast

import torch
from torch._C import _functorch
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tripwire.errors import raise_interruption
from tripwire.reading.sources import Source
from tripwire.reading.tensors import (
    PLAIN_TENSORS,
    TensorMeta,
    find_leaf,
    has_sizes,
    is_wrapped,
    iter_given,
    meta_of,
    unwrap,
)
from tripwire.tracing.open.opening import Opening, OpenTensor, Range
from tripwire.tracing.open.symbols import Symbols, expression_of, is_open_symbol
from tripwire.tracing.state import TracingState
from tripwire.values.classes import is_exactly, isinstance
from tripwire.values.numbers import is_open, map_leaves, symbolic

BY_VALUES = "the size of its result depends on values"
_PATIENCE = 10.0  # seconds of a run that torch may think about open sizes; most runs take one


def make_mode(shape_env: ShapeEnv | None, *, static_shapes: bool) -> FakeTensorMode:
    """Torch's mode of fake tensors, which may be entered in any thread."""
    mode = FakeTensorMode(shape_env=shape_env, static_shapes=static_shapes)
    if mode.avoid_device_init and torch._C._has_cuda:
        _set_device_guard()
    return mode


@functools.cache
def _set_device_guard() -> None:
    """Have torch's stand-in for a CUDA device set in a thread that doesn't end.

    Where torch was built for CUDA and there is no GPU, the first thread that enters the mode sets
    one for all, and it dies with that thread (c10::impl::ensureCUDADeviceGuardSet, torch 2.11 to
    2.13). The next to enter then reads memory that was given back, and the process may crash.
    """
    if threading.current_thread() is threading.main_thread():
        torch._C._ensureCUDADeviceGuardSet()
        return
    is_set = threading.Event()

    def stay() -> None:
        try:
            torch._C._ensureCUDADeviceGuardSet()
        finally:
            is_set.set()
        threading.Event().wait()

    threading.Thread(target=stay, name="tripwire-device-guard", daemon=True).start()
    is_set.wait()


class _Hints(NamedTuple):
    """What a fake stands for in this run."""

    fake: FakeTensor
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, fake: FakeTensor) -> _Hints:
        sizes, strides = tuple(map(hint_of, fake.size())), tuple(map(hint_of, fake.stride()))
        return cls(fake, fake.dtype, sizes, strides)


def measure(fake: FakeTensor, name: str, *args: Any, **kwargs: Any) -> Any:
    """What a fake tensor answers to a question about its size; None: it isn't one of these."""
    match name:
        case "shape" | "size":
            return fake.size(*args, **kwargs)
        case "stride":
            return fake.stride(*args, **kwargs)
        case "numel" | "nelement":
            return fake.numel()
        case "nbytes":
            return fake.numel() * fake.element_size()
        case "is_contiguous":
            return fake.is_contiguous(*args, **kwargs)
    return None


class Fakes:
    """The fake tensors of one run."""

    def __init__(self, state: TracingState, symbols: Symbols, opening: Opening) -> None:
        self._state = state
        self._symbols = symbols
        self._opening = opening
        self._awaits = bool(opening.dims or opening.everything or opening.sizes)
        self._met: set[str] = set()  # paths of tensors that the run came to
        self.mode = make_mode(symbols.env, static_shapes=False)
        # The memo keeps what is asked again.
        self._caches, self.mode.cache_enabled = self.mode.cache_enabled, False
        self.opened: dict[str, OpenTensor] = {}  # of the call, by path
        self._fakes: dict[int, tuple[weakref.ref[torch.Tensor], FakeTensor]] = {}
        self._forms: dict[object, FakeTensor] = {}
        self._memo: dict[object, list[Any]] = {}
        self._hints: dict[int, _Hints] = {}  # by a fake's identity
        self._spent = 0.0  # seconds that calls on fakes took

    # --- tensors of the call ---

    def open(self, tensor: torch.Tensor, sources: Mapping[Source, bool]) -> None:
        """Leave some sizes of a tensor of the call open, if they are to be."""
        paths = tuple(map(str, sources))
        path = next((path for path in paths if path in self._opening.dims), paths[0])
        if not self._awaits or path in self._met:
            return
        self._met.update(paths)
        if not has_sizes(tensor):
            return
        label = f"t{len(self.opened)}"
        with self._state.aside(), temporarily_clear_interpreter_stack():
            shape = tensor.size()
            is_passed = not any(sources.values())
            dims = self._opening.choose_dims(path, shape, is_passed=is_passed)
            if not any(d < len(shape) and shape[d] > 1 for d in dims):
                return
            kinds = [
                DimDynamic.DYNAMIC if i in dims else DimDynamic.STATIC for i in range(len(shape))
            ]
            context: Any = StatelessSymbolicContext(kinds)
            source = self._symbols.name_source(label)
            fake = self._make_fake(tensor, symbolic_context=context, source=source)
            note = self._symbols.note
            for index, size in enumerate(fake.size()):
                note(size, f"{label}.size()[{index}]", (path, index))
                self._stay_within(size, self._opening.ranges.get((path, index)))
            for index, stride in enumerate(fake.stride()):
                note(stride, f"{label}.stride()[{index}]")
            note(fake.storage_offset(), f"{label}.storage_offset()")
            self.opened[path] = OpenTensor(label, fake, weakref.ref(tensor))
            self.put(tensor, fake)

    def _stay_within(self, size: Any, marked: Range | None) -> None:
        """Ask whether a size is in its range: what is beyond has code of its own."""
        low, high = marked or (None, None)
        if low is not None:
            bool(size >= low)
        if high is not None:
            bool(size <= high)

    def find_opened(self, tensor: torch.Tensor) -> OpenTensor | None:
        """What of a tensor of the call is open."""
        opened = self.opened.values()
        return next((one for one in opened if one.ref is not None and one.ref() is tensor), None)

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

    def make_like(self, meta: TensorMeta, fake: FakeTensor | None) -> FakeTensor:
        """What a compiler gets for a result of another part, which shares memory with no other."""
        with torch._C.DisableTorchFunction(), torch.no_grad(), self.mode:
            form: Any = (
                meta if fake is None else meta._replace(shape=fake.size(), stride=fake.stride())
            )
            made = form._replace(requires_grad=False).build()
            if meta.requires_grad:
                made.requires_grad_()
                with torch.enable_grad():
                    made = made.view_as(made)  # no leaf
            return cast("FakeTensor", made)

    # --- tensors of the run ---

    def find(self, tensor: torch.Tensor) -> FakeTensor | None:
        """The fake of a tensor with open sizes; None: all of its sizes are fixed."""
        found = self._fakes.get(id(tensor))
        if found is not None and found[0]() is tensor:
            return found[1]
        if self._awaits:  # it may be asked for its size before any call gets it
            known = self._state.values.find(tensor)
            if known is not None and known.sources:
                self.open(tensor, known.sources)
                found = self._fakes.get(id(tensor))
        return None if found is None or found[0]() is not tensor else found[1]

    def put(self, tensor: torch.Tensor, fake: Any) -> None:
        """A tensor has the sizes of this fake, which may all be fixed."""
        symbols = (*fake.size(), *fake.stride())
        if is_wrapped(fake):  # its sizes leave out those that vmap goes over
            inside = unwrap(fake)
            symbols = (*symbols, *inside.size(), *inside.stride())
        if not any(map(is_open_symbol, symbols)):
            self._fakes.pop(id(tensor), None)
            return
        if is_wrapped(fake):
            self._fakes[id(tensor)] = weakref.ref(tensor), fake
            return
        key = (*(fake.dtype, fake.device), *map(expression_of, symbols))
        self._fakes[id(tensor)] = weakref.ref(tensor), self._forms.setdefault(key, fake)

    # --- torch calls ---

    def imitate(
        self, func: Callable[..., Any], args: Any, kwargs: Any, *, in_place: bool
    ) -> list[Any] | str:
        """What a call gives for fakes; or why torch can't tell without the values."""
        if "generator" in kwargs:  # torch takes no symbolic sizes beside one, even if it is None
            kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        key = None if in_place else self._key(func, args, kwargs)
        found = None if key is None else self._memo.get(key)
        if found is None:
            fake = self._fake_of if not in_place else self._copy_of
            begin = thread_time()
            try:
                with self.mode, enable_python_dispatcher():
                    made = _make(func, map_leaves(args, fake), map_leaves(kwargs, fake))
                found = list(iter_given(made))
            except (DynamicOutputShapeException, DataDependentOutputException):
                return BY_VALUES
            except Exception as error:  # any that a meta function raises; told with what it closes
                raise_interruption(error)
                first = str(error).partition("\n")[0]
                return f"torch can't tell its result for open sizes: {first:.100}"
            finally:
                self._spent += thread_time() - begin
            if key is not None:
                self._memo[key] = found
        return found

    @property
    def is_slow(self) -> bool:
        """Whether torch's algebra may take minutes yet: of windows in padded images, say."""
        return self._spent > _PATIENCE

    def are_alike(self, fakes: list[Any], tensors: list[torch.Tensor]) -> bool:
        """Whether fake tensors have the forms of real ones, in this run."""
        return len(fakes) == len(tensors) and all(map(self._is_alike, fakes, tensors))

    def _is_alike(self, fake: FakeTensor, tensor: torch.Tensor) -> bool:
        if not (fake.layout is tensor.layout is torch.strided):
            return False
        found = self._hints.get(id(fake))
        if found is None:  # fakes come again: 36 layers have 74 of them, and 2,500 calls
            found = self._hints[id(fake)] = _Hints.of(fake)
        if found.dtype is not tensor.dtype or found.sizes != tensor.size():
            return False
        strides = tensor.stride()
        # Where the size is 1, torch has several ways to say the same.
        return found.strides == strides or all(
            a == b
            for a, b, size in zip(found.strides, strides, found.sizes, strict=True)
            if size != 1
        )

    def _fake_of(self, value: Any) -> Any:
        """An argument as the shadow has it."""
        if not isinstance(value, torch.Tensor):
            return symbolic(value)
        found = self.find(value)
        if found is not None:
            return found
        if is_wrapped(value):
            return self._wrap_alike(value)
        meta = meta_of(value)._replace(requires_grad=False)
        if meta.stride is None or id(type(value)) not in PLAIN_TENSORS:
            return self.mode.from_tensor(value, static_shapes=True)
        found = self._forms.get(meta)
        if found is None:
            with temporarily_clear_interpreter_stack():  # a level wraps what is made in it
                found = self._forms[meta] = cast("FakeTensor", meta.build())
        return found

    def _wrap_alike(self, value: torch.Tensor) -> Any:
        """A fake that is wrapped as a tensor is, for each level that is still open."""
        fake, level, dim = self._fake_of(_functorch.get_unwrapped(value)), *_find_wrapping(value)
        if level < 0:
            return fake
        if dim < 0:
            return _functorch._wrap_for_grad(fake, level)
        return _functorch._add_batch_dim(fake, dim, level)

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
                _functorch.maybe_current_level(),
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
            fake = self.find(value)
            if fake is not None:
                return id(fake)
            if is_wrapped(value):
                return _find_wrapping(value), self._spell(_functorch.get_unwrapped(value))
            return meta_of(value), value.layout
        if is_open(value):
            return type(value).__name__, expression_of(value.symbol)
        if isinstance(value, (tuple, list)):
            return type(value), *map(self._spell, value)
        if isinstance(value, dict):
            return dict, *((key, self._spell(item)) for key, item in value.items())
        if is_exactly(value, slice):
            return slice, *map(self._spell, (value.start, value.stop, value.step))
        return type(value), value

    # --- the end of the run ---

    def end(self) -> None:
        """Leave the mode to compilers as they want it."""
        self.mode.cache_enabled = self._caches

    def forget(self) -> None:
        """Let go of the run's tensors: weak references would get in the way of swap_tensors."""
        del self._state  # compiled code may keep the fakes, and the run's state keeps much
        for opened in self.opened.values():
            opened.ref = None
        self._fakes.clear()
        self._memo.clear()
        self._hints.clear()
        self._forms.clear()
        describer = self.mode.fake_tensor_converter.meta_converter.describer
        describer.lookup_tensor.clear()
        describer.lookup_storage.clear()


def _make(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What a call makes of fakes.

    Torch's kernels multiply groups of any float dtype, and its meta function (torch 2.13,
    _meta_grouped_mm_common) takes bfloat16 alone. It is asked about that. Who called compares the
    form with that of the real result.
    """
    if getattr(func, "__name__", "") not in ("_grouped_mm", "grouped_mm"):
        return func(*args, **kwargs)
    dtype = args[0].dtype if args and isinstance(args[0], torch.Tensor) else torch.bfloat16
    if dtype is torch.bfloat16 or kwargs.get("out_dtype") is not None:
        return func(*args, **kwargs)

    def stand_in(value: Any) -> Any:
        is_group = isinstance(value, torch.Tensor) and value.dtype is dtype
        return value.to(torch.bfloat16) if is_group else value

    return func(*map_leaves(args, stand_in), **map_leaves(kwargs, stand_in)).to(dtype)


def _find_wrapping(tensor: torch.Tensor) -> tuple[int, int]:
    """The level that a tensor is wrapped for, and the dimension that vmap goes over, or -1."""
    level = _functorch.maybe_get_level(tensor)
    is_batched = _functorch.is_batchedtensor(tensor)
    return level, _functorch.maybe_get_bdim(tensor) if is_batched else -1


def hint_of(symbol: Any) -> Any:
    """The value in this run."""
    return symbol.node.hint if isinstance(symbol, torch.SymInt) else symbol
