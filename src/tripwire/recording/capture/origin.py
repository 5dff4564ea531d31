"""Origin: a record names a library's things, and holds of the user's what a policy allows.

A library is the standard library, an installed package, or tripwire itself: code that will be
there, under the same names, where the record is replayed. A thing belongs to a library only if
its module and its name lead to that very object, so a replaced or wrapped one is the user's.
No user code runs here: attributes are looked up only in libraries' objects.
"""

from __future__ import annotations

import contextlib
import enum
import fnmatch
import functools
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tripwire.errors import COUNT_OR_NONE, BadOption, Kind, check_kinds
from tripwire.recording.format.blobs import NewBlob
from tripwire.recording.format.manifest import Omission
from tripwire.recording.format.nodes import Library
from tripwire.values.classes import class_dict, isinstance, module_of, mro, name_of
from tripwire.values.contents import own_dict

_OWN_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 2)) + os.sep
_STDLIB_ROOTS = tuple(
    {
        os.path.abspath(path) + os.sep
        for key in ("stdlib", "platstdlib")
        if (path := sysconfig.get_path(key))
    }
)
_PACKAGE_FOLDERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


@functools.cache
def is_packaged_file(filename: str) -> bool:
    """Whether a file belongs to the standard library, an installed package or tripwire."""
    return filename.startswith(("<frozen ", _OWN_ROOT, *_STDLIB_ROOTS)) or any(
        folder in filename for folder in _PACKAGE_FOLDERS
    )


def is_own_file(filename: str) -> bool:
    """Whether a file belongs to tripwire. Known without torch, unlike `env.is_own_file`."""
    return filename.startswith(_OWN_ROOT)


_TORCH_FOLDERS = tuple(f"{folder}torch{os.sep}" for folder in _PACKAGE_FOLDERS)


@functools.cache
def is_base_file(filename: str) -> bool:
    """Whether a file belongs to torch, the standard library or tripwire."""
    if any(folder in filename for folder in _PACKAGE_FOLDERS):
        return any(folder in filename for folder in _TORCH_FOLDERS)
    return is_packaged_file(filename)


# --- modules -------------------------------------------------------------------------------------

_dict_of_module = vars(types.ModuleType)["__dict__"].__get__


def module_dict(module: types.ModuleType) -> dict[str, object]:
    """A module's namespace, as it is."""
    found: dict[str, object] = _dict_of_module(module)
    return found


def is_installed_module(name: str) -> bool:
    """Whether a module, by name, is a library's. Modules that aren't loaded are nobody's."""
    module = sys.modules.get(name)
    if name == "__main__" or not issubclass(type(module), types.ModuleType):
        return False
    assert module is not None
    space = module_dict(module)
    file = space.get("__file__")
    if isinstance(file, str) and os.path.isabs(file):
        return is_packaged_file(file)
    paths = space.get("__path__")
    if type(paths) is list and paths:
        return all(isinstance(path, str) and is_packaged_file(path + os.sep) for path in paths)
    top, dot, _ = name.partition(".")
    if dot:  # made by its package: torch.ops, say
        return is_installed_module(top)
    return name in sys.stdlib_module_names or file is not None


def is_third_party_module(name: str) -> bool:
    """Whether a module is of a package that knows nothing of torch's or Python's conventions.

    Those of torch, NumPy and the standard library ask objects for what their own classes have;
    other packages may ask any object for anything.
    """
    if name.partition(".")[0] in (*_CONVENTIONAL, *sys.stdlib_module_names):
        return False
    return is_installed_module(name)


_CONVENTIONAL = ("torch", "numpy", "tripwire", "functorch")


def module_name(module: types.ModuleType) -> str:
    """The name that a module goes by."""
    name = module_dict(module).get("__name__")
    return name if isinstance(name, str) else "?"


def find_library_namespace(space: dict[str, object]) -> Library | None:
    """The library's module whose namespace this is."""
    name = dict.get(space, "__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or not issubclass(type(module), types.ModuleType):
        return None
    if module_dict(module) is space and is_installed_module(str(name)):
        return Library(str(name), "__dict__")
    return None


# --- things in modules ---------------------------------------------------------------------------


def find_library(value: object) -> Library | None:
    """Where a library holds this very object; None if none does."""
    kind = type(value)
    if issubclass(kind, types.ModuleType):
        return _find_module(value)
    if issubclass(kind, type):
        return _find_class(value)
    if kind is types.FunctionType:
        return _find_function(value)
    if kind is types.BuiltinFunctionType:  # also methods of C objects
        return _find_builtin(value)
    if isinstance(value, _DESCRIPTORS):
        return _find_descriptor(value)
    return _find_object(value)


_DESCRIPTORS = (
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.ClassMethodDescriptorType,
)


def resolve(module: types.ModuleType, name: str) -> object:
    """What a dotted name leads to, below a library's module."""
    value: object = module
    for part in name.split(".") if name else ():
        value = getattr(value, part)
    return value


def _find_at(module: object, name: object, value: object) -> Library | None:
    """That place in a library, if it has this very object there."""
    if not (isinstance(module, str) and isinstance(name, str) and is_installed_module(module)):
        return None
    try:
        found = resolve(sys.modules[module], name)
    except Exception:  # a library's own lookups may raise what they like: then it isn't there
        return None
    return Library(module, name) if found is value else None


def _find_module(module: object) -> Library | None:
    assert isinstance(module, types.ModuleType)
    name = module_name(module)
    if sys.modules.get(name) is module and is_installed_module(name):
        return Library(name, "")
    return None


def _find_class(cls: Any) -> Library | None:
    module, qualname = module_of(cls), name_of(cls)
    found = _find_at(module, qualname, cls)
    if found is None and is_installed_module(module):
        found = _search(qualname.rpartition(".")[2], cls) or _search_values("types", cls)
    return found


def _find_in_class(owner: type, name: str, value: object) -> Library | None:
    found = _find_class(owner)
    return found and _find_at(found.module, f"{found.name}.{name}", value)


def _find_function(function: object) -> Library | None:
    assert isinstance(function, types.FunctionType)
    if not is_packaged_file(function.__code__.co_filename):
        # A library makes some of its functions from text; they still live in its namespace.
        if not function.__code__.co_filename.startswith("<"):
            return None
        if find_library_namespace(function.__globals__) is None:
            return None
    return (
        _find_at(function.__module__, function.__qualname__, function)
        or _find_at(function.__globals__.get("__name__"), function.__qualname__, function)
        # One that a library wrapped and put elsewhere: torch.manual_seed, once dynamo is imported.
        or _search(function.__name__, function)
    )


def _find_builtin(function: object) -> Library | None:
    assert isinstance(function, types.BuiltinFunctionType)
    name, owner = function.__name__, function.__self__
    found = _find_in_class(owner, name, function) if isinstance(owner, type) else None
    found = found or _find_at(function.__module__, function.__qualname__, function)
    if found is None and not issubclass(type(owner), types.ModuleType):
        found = _find_at(module_of(type(owner)), name, function)  # random.random
        if owner is not None and not isinstance(owner, type):
            return found
    return found or _search(name, function)


def _find_descriptor(descriptor: object) -> Library | None:
    owner: type = descriptor.__objclass__  # type: ignore[attr-defined]
    return _find_in_class(owner, descriptor.__name__, descriptor)  # type: ignore[attr-defined]


def _find_object(value: object) -> Library | None:
    """An object that a library keeps in a module: `typing.Any`, `dataclasses.MISSING`."""
    if value is sys.stdout or value is sys.stderr or value is sys.stdin:
        names = ("stdout", "stderr", "stdin")
        return Library("sys", next(name for name in names if value is getattr(sys, name)))
    kind = type(value)
    if name_of(kind) == "cython_function_or_method":
        return _find_cython_function(value, kind)
    home = module_of(kind)
    if home == "builtins" or not is_installed_module(home):
        return None
    found = _search_values(home, value)
    if found is not None:
        return found
    if kind.__name__ in ("OpOverload", "OpOverloadPacket") and home == "torch._ops":
        return _find_at("torch", f"ops.{value}", value)
    if home == "numpy" and kind.__name__ == "ufunc":
        return _search(str(getattr(value, "__name__", "")), value)
    said = own_dict(value) or {}  # a C object that goes for a function: np.linalg.norm
    return _find_at(said.get("__module__"), said.get("__qualname__"), value)


def _find_cython_function(value: object, kind: type) -> Library | None:
    """A function that Cython compiled. Each version of it has a type of its own for them."""
    told: list[Any] = [class_dict(kind).get(name) for name in ("__module__", "__qualname__")]
    if any(type(descriptor) not in _DESCRIPTORS for descriptor in told):
        return None
    module, qualname = (descriptor.__get__(value) for descriptor in told)
    return _find_at(module, qualname, value)


def _search_values(module: str, value: object) -> Library | None:
    """An object among the values of one library's module."""
    for name, held in list(module_dict(sys.modules[module]).items()):
        if held is value and isinstance(name, str):
            return Library(module, name)
    return None


def _search(name: str, value: object) -> Library | None:
    """An object by its name among all of the libraries' modules; the shortest path wins."""
    homes = [
        module
        for module, space in _loaded()
        if space.get(name) is value and is_installed_module(module)
    ]
    if not homes:
        return None
    return Library(min(homes, key=lambda home: (home.count("."), home.startswith("_"), home)), name)


def _loaded() -> Iterator[tuple[str, dict[str, object]]]:
    for name, module in list(sys.modules.items()):
        if issubclass(type(module), types.ModuleType):
            yield name, module_dict(module)


# --- patches ---
#
# Libraries are named in a record, not put into it, so a replaced function would be the library's
# own again at replay. Functions of the user's that stand in a library's module, or in a class of a
# library's that the call met, are recorded with their place. They stand there while a replay runs.


Patch = tuple[object, str, object]  # a module or class, a name in it, what is there

_MISSING = object()


def find_patches(met: Iterable[object]) -> list[Patch]:
    """Every patch in a library's module, and those in classes among the values that were met."""
    found: list[Patch] = []
    for name, module in list(sys.modules.items()):
        if issubclass(type(module), types.ModuleType):
            foreign = _find_foreign(module_dict(module))
            if foreign and is_installed_module(name):
                found += [(module, key, value) for key, value in foreign]
    classes: dict[int, type] = {}
    for value in met:
        cls = value if isinstance(value, type) else type(value)
        classes.update((id(base), base) for base in mro(cls))
    for cls in classes.values():
        foreign = _find_foreign(class_dict(cls))
        if foreign and find_library(cls) is not None:
            found += [(cls, key, value) for key, value in foreign]
    return found


def _find_foreign(space: Any) -> list[tuple[str, object]]:
    """The user's functions in a namespace: most have none, and 100,000 names are looked at."""
    found = {
        id(value): value
        for value in list(space.values())
        if type(value) is types.FunctionType and value.__code__.co_filename not in _of_libraries
    }
    return [
        (key, value)
        for key, value in (list(space.items()) if found else ())
        if id(value) in found and type(key) is str and _is_users_file(value.__code__.co_filename)
    ]


_of_libraries: set[str] = set()  # files that were asked about


def _is_users_file(name: str) -> bool:
    """Whether a function was written by the user: libraries make theirs from text, too."""
    if name.startswith("<") or is_packaged_file(name):
        _of_libraries.add(name)
        return False
    return True


@contextlib.contextmanager
def applied(patches: Iterable[Patch]) -> Iterator[None]:
    """The patches of a record in their places; what was there comes back."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            before = vars(owner).get(name, _MISSING)
            stack.callback(_put, owner, name, before)
            setattr(owner, name, value)
        yield


def _put(owner: object, name: str, value: object) -> None:
    if value is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


# --- how much of each tensor is kept ---
# A tensor shares its bytes with every other one of the same storage, so the strictest treatment
# of any of them counts for all. A gradient is treated at least as strictly as its tensor. Bytes
# that a policy holds back are held back wherever they lie: an array over a tensor's memory shows
# no more than the tensor may.


class Treatment(enum.IntEnum):
    """How much is kept, from everything to nothing."""

    FULL = 0
    STATISTICS = 1
    SHAPE = 2
    REDACTED = 3

    @staticmethod
    def of(name: str | Treatment) -> Treatment:
        """The treatment of that name: "full", "statistics", "shape" or "redacted"."""
        if isinstance(name, Treatment):
            return name
        if not isinstance(name, str) or name.upper() not in Treatment.__members__:
            raise BadOption(
                f"{name!r} is not a way to keep a tensor. Use full, statistics, shape or redacted.",
                slug="bad-option",
            )
        return Treatment[name.upper()]

    @property
    def label(self) -> str:
        return self.name.lower()


Chooser = Callable[[str, object], "str | Treatment"]
_KINDS: dict[str, Kind] = {
    "tensors": ((str, Mapping, Callable), "a name, a mapping or a function"),
    "max_bytes": COUNT_OR_NONE,
}


@dataclass(frozen=True, slots=True)
class Policy:
    """A treatment for each tensor by its path, and a cap on the bytes of all together.

    `choose` is a treatment for every tensor, a mapping from patterns of paths (as in
    `fnmatch`, the first that fits counts; none means full), or a function of the path and the
    tensor. Where the cap is passed, the largest tensors are kept as statistics only.
    """

    choose: str | Mapping[str, str] | Chooser = "full"
    cap: int | None = None

    def __post_init__(self) -> None:
        check_kinds({"tensors": self.choose, "max_bytes": self.cap}, _KINDS)
        if self.cap is not None and self.cap < 0:
            raise BadOption(f"max_bytes is {self.cap}; it can't be below 0.", slug="bad-option")
        if isinstance(self.choose, str):
            Treatment.of(self.choose)
        elif isinstance(self.choose, Mapping):
            for pattern, name in self.choose.items():
                check_kinds({"tensors' key": pattern}, {"tensors' key": ((str,), "a string")})
                Treatment.of(name)

    def treat(self, path: str, tensor: object) -> Treatment:
        """What is kept of a tensor."""
        if callable(self.choose):
            return Treatment.of(self.choose(path, tensor))
        if isinstance(self.choose, str):
            return Treatment.of(self.choose)
        for pattern, name in self.choose.items():
            if fnmatch.fnmatchcase(path, _literal_brackets(pattern)):
                return Treatment.of(name)
        return Treatment.FULL

    def describe(self) -> str:
        """The policy in words, for the manifest."""
        if callable(self.choose):
            chosen = "chosen by a function"
        elif isinstance(self.choose, str):
            chosen = self.choose
        else:
            chosen = ", ".join(f"{pattern}: {name}" for pattern, name in self.choose.items())
        return chosen if self.cap is None else f"{chosen}; at most {self.cap} bytes of tensors"


def _literal_brackets(pattern: str) -> str:
    """Paths are full of brackets (`args[0]`), so here they mean themselves."""
    return pattern.replace("[", "[[]")


KEEP_ALL = Policy()


# --- which bytes are kept, decided when all of them are known ---


Key = tuple[str, int]  # a device and an address on it


class KeptBytes(Protocol):
    """Bytes that may become a blob: a storage, or an array."""

    treatment: Treatment
    why: str  # a treatment that isn't full
    blob: int
    shares: bool  # what shares its memory shares it again

    @property
    def memory(self) -> tuple[int, int]:
        """Where the bytes lie in this process: from, to."""

    @property
    def size(self) -> int:
        """How many bytes there are."""

    def settle(self) -> None:
        """All users are known: find the strictest treatment and the extent."""

    def form(self) -> tuple[str, tuple[int, ...]]:
        """Their dtype and shape in tensors.safetensors."""

    def paths(self) -> list[str]:
        """The paths by which the bytes were reached."""

    def chunks(self) -> Iterator[memoryview | bytes]:
        """The bytes, piece by piece."""

    def keep(self) -> None:
        """Copy the bytes as they are now, where nothing tells of a later write."""


class Blobs:
    """The storages and arrays that a record keeps."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.settled: list[NewBlob] = []
        self.left_out: list[Omission] = []
        self._kept: list[KeptBytes] = []
        self._by_key: dict[Key, KeptBytes] = {}

    def add(self, kept: KeptBytes) -> None:
        """Keep these bytes."""
        self._kept.append(kept)

    def find(self, key: Key) -> KeptBytes | None:
        """The bytes that were added under a key."""
        return self._by_key.get(key)

    def add_once(self, key: Key, kept: KeptBytes) -> None:
        """Keep bytes that others may use as well, under a key."""
        self._by_key[key] = kept
        self.add(kept)

    def arrays(self) -> list[KeptBytes]:
        """Those that aren't storages of tensors."""
        return [kept for kept in self._kept if not kept.shares]

    def keep(self) -> None:
        """Have the bytes of now, where nothing tells of a later write."""
        for kept in self._kept:
            kept.keep()

    def settle(self) -> None:
        """Decide what is kept, number the blobs, say what is left out."""
        for kept in self._kept:
            kept.settle()
        self._guard_shared_memory()
        self._apply_cap()
        self._tell_of_shared_arrays()
        full = [kept for kept in self._kept if kept.treatment is Treatment.FULL]
        forms: dict[object, int] = {}
        # Those of one form lie together, in the order in which forms were met.
        for kept in sorted(full, key=lambda kept: forms.setdefault(kept.form(), len(forms))):
            kept.blob = len(self.settled)
            self.settled.append(NewBlob(*kept.form(), kept.size, kept))
        for kept in self._kept:
            if kept.treatment is not Treatment.FULL:
                why = f"values left out by {kept.why}: {kept.treatment.label} only"
                self.left_out += [Omission(path, why) for path in kept.paths()]

    def _guard_shared_memory(self) -> None:
        strict = [(kept.memory, kept.treatment) for kept in self._kept if kept.treatment]
        for kept in self._kept if strict else ():
            low, high = kept.memory
            for (first, last), treatment in strict:
                if first < high and low < last:
                    kept.treatment = max(kept.treatment, treatment)

    def _tell_of_shared_arrays(self) -> None:
        """An array over memory that something else has comes back with memory of its own."""
        for kept in self._kept:
            low, high = kept.memory
            if kept.shares or low == high:
                continue
            others = (other.memory for other in self._kept if other is not kept)
            if any(first < high and low < last for first, last in others):
                why = "it shares memory with another value; at replay it has memory of its own"
                self.left_out += [Omission(path, why) for path in kept.paths()]

    def _apply_cap(self) -> None:
        cap = self.policy.cap
        if cap is None:
            return
        full = [kept for kept in self._kept if kept.treatment is Treatment.FULL]
        total = sum(kept.size for kept in full)
        for kept in sorted(full, key=lambda kept: -kept.size):
            if total <= cap:
                break
            kept.treatment = Treatment.STATISTICS
            kept.why = f"the cap of {cap} bytes"
            total -= kept.size
