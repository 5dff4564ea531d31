"""Images: values as they were at one moment, to be compared after the objects have moved on.

Objects that the walk knows are compared by identity. Everything else is compared by type and
content; tensors by class, form, values and which memory they share. A `World` is everything that a
walk found; it can be restored.
"""

from __future__ import annotations

import math
import random
import re
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from tripwire.auditing.holdings import Contents, Holding, own_dict, spell
from tripwire.auditing.walking import Walk
from tripwire.values.classes import find_in_class, ids_of, isinstance, module_of, name_of

DEEPEST = 12
_PLAIN = ids_of(bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, slots=True)
class KnownObject:
    """An object of the walked world."""

    path: str


@dataclass(frozen=True, slots=True, eq=False)
class Plain:
    """A number, a string, or something else that is no more than its text."""

    cls: type
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class TensorImage:
    """A tensor."""

    cls: type
    form: tuple[Any, ...]
    memory: str  # the walked tensor, or the earlier part of the image, that it shares memory with
    values: torch.Tensor | None  # None: it can't be copied


@dataclass(frozen=True, slots=True, eq=False)
class ImageNode:
    """Something that is made of parts."""

    cls: type
    parts: tuple[tuple[str, Image], ...]


@dataclass(frozen=True, slots=True, eq=False)
class RaisedImage:
    """An exception."""

    cls: type
    message: str


Image = KnownObject | Plain | TensorImage | ImageNode | RaisedImage


class Camera:
    """Makes images of one moment, and notes which tensors and which memory are the same."""

    def __init__(self, known: Mapping[int, str], memories: Mapping[int, str]) -> None:
        self._known = known
        self._memories = dict(memories)
        self._seen: dict[int, str] = {}

    def take(self, value: Any, path: str, depth: int = 0) -> Image:
        """An image of a value."""
        cls = type(value)  # and not isinstance, which may run the user's code
        if issubclass(cls, torch.Tensor) and id(value) not in self._known:
            return self._take_tensor(value, path)
        if id(cls) in _PLAIN:
            return Plain(cls, _spell_plain(value))
        if id(value) in self._known:
            return KnownObject(self._known[id(value)])
        if id(value) in self._seen:
            return KnownObject(f"the same as {self._seen[id(value)]}")
        if issubclass(cls, type):
            return Plain(cls, name_of(value))
        if issubclass(cls, types.FunctionType):
            return Plain(cls, value.__qualname__)
        if issubclass(cls, types.ModuleType):
            return Plain(cls, str((own_dict(value) or {}).get("__name__")))
        self._seen[id(value)] = path
        if depth >= DEEPEST:
            return Plain(cls, "")
        return self._take_parts(value, path, depth)

    def _take_parts(self, value: Any, path: str, depth: int) -> Image:
        cls = type(value)
        parts: list[tuple[str, Any]] = []
        if issubclass(cls, dict):
            parts += [(f"[{spell(key)}]", item) for key, item in dict.items(value)]
        elif issubclass(cls, (list, tuple, deque)):
            parts += [(f"[{index}]", item) for index, item in enumerate(value)]
        elif issubclass(cls, (set, frozenset)):
            parts += sorted((f"{{{spell(item)}}}", None) for item in value)
        elif module_of(cls) == "numpy":
            return Plain(cls, f"{getattr(value, 'dtype', '')} {value!r}")
        parts += [(f".{name}", item) for name, item in (own_dict(value) or {}).items()]
        if not parts and _has_own_text(cls):
            return Plain(cls, without_addresses(spell(value)))
        return ImageNode(cls, tuple((key, self.take(v, path + key, depth + 1)) for key, v in parts))

    def _take_tensor(self, tensor: torch.Tensor, path: str) -> Image:
        if id(tensor) in self._seen:
            return KnownObject(f"the same as {self._seen[id(tensor)]}")
        self._seen[id(tensor)] = path
        memory = memory_of(tensor)
        shares = self._memories.setdefault(memory, path) if memory else path
        return TensorImage(
            type(tensor), form_of(tensor), "" if shares == path else shares, copy_values(tensor)
        )


def memory_of(tensor: torch.Tensor) -> int:
    """Where a tensor's memory begins; 0 for none."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or not tensor.numel():
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a wrapper without a storage
        return 0


def form_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What can be asked of a tensor besides its values."""
    strided = tensor.layout is torch.strided
    strides = tuple(
        stride if size > 1 else 0
        for size, stride in zip(tensor.shape, tensor.stride() if strided else (), strict=strided)
    )
    return (
        tensor.dtype,
        tuple(tensor.shape),
        strides if tensor.numel() else (),
        tensor.device,
        tensor.requires_grad,
    )


_WORDS = ("dtype", "shape", "strides", "device", "requires_grad")


def copy_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy that nobody else has."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        try:
            return tensor.detach().clone().requires_grad_(False)
        except (RuntimeError, NotImplementedError):
            return None


def _has_own_text(cls: type) -> bool:
    """A library's value, such as a dtype or a number: its text says what it is."""
    containers = (dict, list, tuple, deque, set, frozenset)
    return not issubclass(cls, containers) and find_in_class(cls, "__repr__") is not object.__repr__


def _spell_plain(value: Any) -> str:
    if isinstance(value, float):
        return "nan" if math.isnan(value) else float(value).hex()
    return repr(value)


def without_addresses(text: str) -> str:
    """The same for objects that are made anew."""
    return re.sub(r"0x[0-9a-f]{6,}", "0x…", text)


def image_of_error(error: BaseException) -> RaisedImage:
    """An exception, by type and message."""
    if isinstance(error, RecursionError):  # its message tells where the limit was met, by chance
        return RaisedImage(type(error), "maximum recursion depth exceeded")
    return RaisedImage(type(error), without_addresses(str(error)))


# --- comparing ---


def find_difference(
    wanted: Image, got: Image, path: str = "", coarse: tuple[float, float] | None = None
) -> str:
    """The first difference in words, or nothing.

    coarse: the tolerance of the coarsest dtype that is part of the whole. Under autocast a gradient
    is float32, and was computed in bfloat16.
    """
    where = path or "result"
    if coarse is None:
        coarse = max(map(_tolerance_of, _iter_tensors(wanted)), default=_EXACT)
    match wanted, got:
        case (TensorImage(), TensorImage()):
            return _compare_tensors(wanted, got, where, coarse)
        case (ImageNode(), ImageNode()):
            return _compare_nodes(wanted, got, path, coarse)
        case (KnownObject(left), KnownObject(right)) if left == right:
            return ""
        case (Plain(cls, left), Plain(other, right)) if cls is other and left == right:
            return ""
        case (RaisedImage(cls, left), RaisedImage(other, right)) if cls is other and left == right:
            return ""
    return f"{where}: {describe(got)}, not {describe(wanted)}"


def _iter_tensors(image: Image) -> Iterator[TensorImage]:
    if isinstance(image, TensorImage):
        yield image
    elif isinstance(image, ImageNode):
        for _, part in image.parts:
            yield from _iter_tensors(part)


def _compare_nodes(
    wanted: ImageNode, got: ImageNode, path: str, coarse: tuple[float, float]
) -> str:
    where = path or "result"
    if wanted.cls is not got.cls:
        return f"{where}: a {name_of(got.cls)}, not a {name_of(wanted.cls)}"
    keys, found = [key for key, _ in wanted.parts], [key for key, _ in got.parts]
    if keys != found:
        return f"{where}: it holds {', '.join(found)}, not {', '.join(keys)}"
    for (key, left), (_, right) in zip(wanted.parts, got.parts, strict=True):
        difference = find_difference(left, right, path + key, coarse)
        if difference:
            return difference
    return ""


def _compare_tensors(
    wanted: TensorImage, got: TensorImage, where: str, coarse: tuple[float, float]
) -> str:
    if wanted.cls is not got.cls:
        return f"{where}: a {name_of(got.cls)}, not a {name_of(wanted.cls)}"
    for word, left, right in zip(_WORDS, wanted.form, got.form, strict=True):
        if left != right:
            return f"{where}: {word} is {right}, not {left}"
    if wanted.values is not None and got.values is not None:
        if not _are_close(wanted.values, got.values, coarse):
            return f"{where}: {describe(got)}, not {describe(wanted)}"
    if wanted.memory != got.memory:
        return (
            f"{where}: it shares memory with {got.memory or 'nothing'}, "
            f"not with {wanted.memory or 'nothing'}"
        )
    return ""


# Relative and absolute, as torch.testing.assert_close has them.
_TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}


_EXACT = (0.0, 0.0)


def _tolerance_of(image: TensorImage) -> tuple[float, float]:
    return _TOLERANCES.get(image.form[0], _EXACT)


def _are_close(left: torch.Tensor, right: torch.Tensor, coarse: tuple[float, float]) -> bool:
    """Equal, or as close as two ways to compute the same come."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        try:
            if torch.equal(left, right):
                return True
            if left.dtype not in _TOLERANCES:
                return False
            relative, absolute = max(_TOLERANCES[left.dtype], coarse)
            if torch.allclose(left, right, relative, absolute, equal_nan=True):
                return True
            # Sums over many elements, as in gradients: small ones carry the rounding of large ones.
            size = float(left.nan_to_num(posinf=0, neginf=0).abs().max())
            return torch.allclose(left, right, relative, 8 * relative * size, equal_nan=True)
        except (RuntimeError, NotImplementedError):  # a dtype without arithmetic, a meta tensor
            return True


def describe(image: Image) -> str:
    """An image in a few words."""
    match image:
        case KnownObject(path):
            return path
        case Plain(cls, text):
            return f"{_short(text)}" if text else f"a {name_of(cls)}"
        case RaisedImage(cls, message):
            return f"{name_of(cls)}: {_short(message)}"
        case TensorImage():
            return _describe_tensor(image)
        case ImageNode(cls, parts):
            inner = next((describe(part) for _, part in parts), "")
            return f"{name_of(cls)} of {len(parts)}" + (f": {inner}" if inner else "")


def _describe_tensor(image: TensorImage) -> str:
    dtype, shape = str(image.form[0]).removeprefix("torch."), list(image.form[1])
    if image.values is None:
        return f"{dtype}{shape}"
    try:
        first = image.values.reshape(-1)[:3].tolist()
    except (RuntimeError, NotImplementedError):
        return f"{dtype}{shape}"
    shown = ", ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in first)
    return f"{dtype}{shape} {shown}{', …' if image.values.numel() > 3 else ''}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 90 else line[:89] + "…"


# --- all that a walk found, at one moment ---


_BY_VALUE = (bool, int, float, complex, str, bytes, tuple, frozenset)


@dataclass(frozen=True, slots=True)
class _SavedTensor:
    """A tensor as it was."""

    path: str
    tensor: torch.Tensor
    form: tuple[Any, ...]
    data: torch.Tensor  # the same memory, in the form that it had
    values: torch.Tensor | None
    grad: torch.Tensor | None
    history: object  # grad_fn

    @staticmethod
    def of(path: str, tensor: torch.Tensor, earlier: _SavedTensor | None) -> _SavedTensor:
        with torch._C.DisableTorchFunction():
            is_known = earlier is not None and earlier.is_in_form() and earlier.has_values()
            return _SavedTensor(
                path,
                tensor,
                form_of(tensor),
                tensor.detach(),
                # One copy serves all moments at which the values were the same.
                earlier.values if earlier is not None and is_known else copy_values(tensor),
                tensor.grad if tensor.is_leaf else None,
                tensor.grad_fn,
            )

    def is_in_form(self) -> bool:
        return form_of(self.tensor) == self.form and self.tensor.grad_fn is self.history

    def has_values(self) -> bool:
        return self.values is None or _same_bits(self.tensor.detach(), self.values)

    def put_back(self) -> None:
        tensor = self.tensor
        if not self.is_in_form() or memory_of(tensor) != memory_of(self.data):
            if self.history is None and tensor.grad_fn is not None:
                tensor.detach_()
            tensor.data = self.data
            if tensor.is_leaf:
                tensor.requires_grad_(self.form[-1])
        if not self.has_values():
            assert self.values is not None
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.detach().copy_(self.values)
        if tensor.is_leaf and tensor.grad is not self.grad:
            tensor.grad = self.grad


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if torch.equal(left, right):
        return True
    return bool(left.is_floating_point() and torch.equal(left.isnan(), right.isnan())) and bool(
        torch.equal(left.nan_to_num(), right.nan_to_num())
    )


class SavedGenerators:
    """Random generators, as they were; and the counter that torch names hooks by."""

    def __init__(self, generators: list[torch.Generator]) -> None:
        default = [torch.default_generator, *torch.cuda.default_generators]
        self._torch = [(g, g.get_state()) for g in (*default, *generators)]
        self._python = random.getstate()
        self._next_hook = RemovableHandle.next_id
        numpy: Any = sys.modules.get("numpy")
        self._numpy = None if numpy is None else (numpy.random, numpy.random.get_state())

    def put_back(self) -> None:
        """Set the generators, and the counter, back to what they were."""
        for generator, state in self._torch:
            generator.set_state(state)
        random.setstate(self._python)
        RemovableHandle.next_id = self._next_hook
        if self._numpy is not None:
            self._numpy[0].set_state(self._numpy[1])

    def take(self) -> Image:
        """An image of them: it shows how many numbers each has drawn."""
        states = [(f"generator {i}", _image_of(g)) for i, (g, _) in enumerate(self._torch)]
        python = Plain(SavedGenerators, str(hash(random.getstate())))
        return ImageNode(SavedGenerators, (*states, ("Python's", python)))


def _image_of(generator: torch.Generator) -> Image:
    state = generator.get_state()
    return TensorImage(torch.Generator, form_of(state), "", state)


class World:
    """Everything that a walk found, as it was at one moment."""

    def __init__(self, walk: Walk, earlier: World | None = None) -> None:
        self._walk = walk
        known = {} if earlier is None else {id(k.tensor): k for k in earlier.tensors}
        self._held: list[tuple[Holding, Contents]] = [(h, h.contents()) for h in walk.holdings]
        self.tensors: list[_SavedTensor] = [
            _SavedTensor.of(path, tensor, known.get(key))
            for key, (path, tensor) in walk.tensors.items()
        ]
        self._arrays = [(path, array, array.copy()) for path, array in walk.arrays]
        self._generators = SavedGenerators(walk.generators)
        self._memories = {memory_of(k.tensor): k.path for k in self.tensors if memory_of(k.tensor)}

    def put_back(self) -> None:
        """Set everything back to what it was."""
        for holding, contents in self._held:
            holding.rewrite(contents)
        for kept in self.tensors:
            kept.put_back()
        for _, array, values in self._arrays:
            if array.flags.writeable:  # what it shows of another's memory is put back there
                array[...] = values
        self._generators.put_back()

    def camera(self) -> Camera:
        """For images of what a call returned and left behind."""
        return Camera(self._walk.known, self._memories)

    def take_changes(self, camera: Camera) -> Image:
        """An image of what differs now from that moment."""
        parts: list[tuple[str, Image]] = []
        for holding, contents in self._held:
            parts += _take_changed(holding, contents, camera)
        for kept in self.tensors:
            if not kept.is_in_form() or not kept.has_values():
                form, values = form_of(kept.tensor), copy_values(kept.tensor)
                parts.append((kept.path, TensorImage(type(kept.tensor), form, "", values)))
            if kept.tensor.is_leaf and kept.tensor.grad is not kept.grad:
                name = f"{kept.path}.grad"
                parts.append((name, camera.take(kept.tensor.grad, name)))
        for path, array, values in self._arrays:
            if array.tobytes() != values.tobytes():
                parts.append((path, Plain(type(array), repr(array))))
        return ImageNode(World, (*parts, ("random state", self._generators.take())))

    def leaves(self) -> list[tuple[str, torch.Tensor]]:
        """Tensors that gradients can be asked of."""
        return [
            (kept.path, kept.tensor)
            for kept in self.tensors
            if kept.tensor.is_leaf and kept.tensor.requires_grad
        ]


def _take_changed(holding: Holding, contents: Contents, camera: Camera) -> list[tuple[str, Image]]:
    now = holding.contents()
    parts: list[tuple[str, Image]] = []
    for key in [*contents, *(key for key in now if key not in contents)]:
        path = holding.spell(key)
        if key not in now:
            parts.append((path, Plain(World, "gone")))
        elif key not in contents or not _is_same(now[key], contents[key], camera):
            parts.append((path, camera.take(now[key], path)))
    return parts


def _is_same(now: Any, before: Any, camera: Camera) -> bool:
    """One object, or two that nobody can tell apart but by identity."""
    if now is before:
        return True
    if type(now) is not type(before) or not isinstance(now, _BY_VALUE):
        return False
    return not find_difference(camera.take(before, ""), camera.take(now, ""))
