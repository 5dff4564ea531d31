"""Generations: what was made since the latest install."""

import copy
import io
import pickle
from collections.abc import MutableMapping

import pytest
import torch
from torch import nn

from tripwire.writes.trackers import (
    GenerationTracker,
    install_generation_tagging,
    is_dynamic_nn_module,
)


@pytest.fixture(autouse=True)
def nothing_stays():
    before = {name: vars(nn.Module)[name] for name in ("__init__", "__setstate__")}
    names = set(vars(nn.Module))
    GenerationTracker.clear()
    yield
    assert {name: vars(nn.Module)[name] for name in before} == before
    assert set(vars(nn.Module)) == names
    GenerationTracker.clear()


class Loaded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


def test_a_module_is_tagged_when_it_is_made_and_not_otherwise() -> None:
    before = nn.Linear(2, 2)
    with install_generation_tagging():
        during = nn.Linear(2, 2)
        assert GenerationTracker.check(during)
        assert not GenerationTracker.check(before)
    after = nn.Linear(2, 2)
    assert GenerationTracker.get_generation_value(during) == 1
    assert GenerationTracker.get_generation_value(before) == -1
    assert GenerationTracker.get_generation_value(after) == -1


def test_each_install_starts_a_new_generation() -> None:
    with install_generation_tagging():
        old = nn.Linear(2, 2)
        with install_generation_tagging():
            new = nn.Linear(2, 2)
            assert not GenerationTracker.check(old)
            assert GenerationTracker.check(new)
            assert GenerationTracker.get_generation_value(old) == 1
            assert GenerationTracker.get_generation_value(new) == 2


def test_overlapping_installs_patch_once_and_unpatch_with_the_last() -> None:
    plain = nn.Module.__init__
    first = install_generation_tagging()
    patched = nn.Module.__init__
    second = install_generation_tagging()
    assert nn.Module.__init__ is patched is not plain
    first.undo()
    first.undo()
    assert nn.Module.__init__ is patched
    second.undo()
    assert nn.Module.__init__ is plain


def test_unpickling_and_copying_tag_the_new_instance() -> None:
    module = Loaded()
    data = pickle.dumps(module)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    with install_generation_tagging():
        made = [pickle.loads(data), copy.deepcopy(module), torch.load(file, weights_only=False)]
        for new in made:
            assert GenerationTracker.check(new)
            assert GenerationTracker.check(new.inner)
    assert not GenerationTracker.check(module)


def test_a_constructor_that_raises_raises_the_same_and_unpatches() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), install_generation_tagging():
        Broken()
    with pytest.raises(TypeError, match="unexpected keyword"), install_generation_tagging():
        nn.Module(unknown=1)


def test_what_a_user_put_over_the_patch_stays() -> None:
    plain = nn.Module.__init__
    tagging = install_generation_tagging()
    tagged = nn.Module.__init__

    def users(self, *args, **kwargs):
        tagged(self, *args, **kwargs)

    nn.Module.__init__ = users
    try:
        tagging.undo()
        assert nn.Module.__init__ is users
        module = nn.Linear(2, 2)  # through our function, which tags no more
        assert GenerationTracker.get_generation_value(module) == -1
    finally:
        nn.Module.__init__ = plain


def test_a_tag_goes_with_its_module() -> None:
    with install_generation_tagging():
        for _ in range(100):
            nn.Linear(2, 2)
    assert len(GenerationTracker.generation_values) == 0


def test_clear_forgets_tags_classes_and_the_count() -> None:
    class Net(nn.Module):
        pass

    with install_generation_tagging():
        module = Net()
    GenerationTracker.mark_class_dynamic(Net)
    GenerationTracker.clear()
    assert GenerationTracker.generation == 0
    assert GenerationTracker.get_generation_value(module) == -1
    assert not GenerationTracker.check(module)
    assert not is_dynamic_nn_module(module)


def test_an_untagged_object_is_not_of_generation_zero() -> None:
    assert not GenerationTracker.check(nn.Linear(2, 2))
    assert not GenerationTracker.check([])
    assert GenerationTracker.get_generation_value(3) == -1


def test_what_can_not_be_weakly_referenced_can_not_be_tagged() -> None:
    with pytest.raises(TypeError, match="weakly referenced"):
        GenerationTracker.tag([])


@pytest.mark.parametrize("wrong", [int, 3, nn.Linear(1, 1)])
def test_only_classes_of_modules_can_be_dynamic(wrong) -> None:
    with pytest.raises(TypeError, match="modules"):
        GenerationTracker.mark_class_dynamic(wrong)


# --- dynamic modules ---------------------------------------------------------------------------


def test_a_plain_module_is_not_dynamic() -> None:
    assert not is_dynamic_nn_module(nn.Linear(2, 2))
    assert not is_dynamic_nn_module(nn.Linear(2, 2), is_export=True)
    assert not is_dynamic_nn_module(object())
    assert not is_dynamic_nn_module([])


def test_a_module_with_its_own_forward_is_dynamic() -> None:
    module = nn.Linear(2, 2)
    module.forward = lambda x: x
    assert is_dynamic_nn_module(module)
    module.torchdynamo_force_dynamic = False  # doesn't outweigh it
    assert is_dynamic_nn_module(module, is_export=True)


def test_a_module_that_is_also_a_mapping_is_dynamic() -> None:
    class Bag(nn.Module, MutableMapping):
        __getitem__ = __setitem__ = __delitem__ = lambda self, *args: None
        __iter__ = lambda self: iter(())
        __len__ = lambda self: 0

    class Items(dict, nn.Module):
        def __init__(self):
            nn.Module.__init__(self)

    assert is_dynamic_nn_module(Bag())
    assert is_dynamic_nn_module(Items())


@pytest.mark.parametrize("forced", [True, False])
def test_the_flag_decides_either_way(forced) -> None:
    with install_generation_tagging():
        module = nn.Linear(2, 2)
        module.torchdynamo_force_dynamic = forced
        assert is_dynamic_nn_module(module) is forced


def test_backward_global_hooks_count_always_and_forward_ones_outside_export() -> None:
    module = nn.Linear(2, 2)
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        assert is_dynamic_nn_module(module)
        assert is_dynamic_nn_module(module, is_export=True)
        assert not is_dynamic_nn_module(object())
    finally:
        handle.remove()
        nn.modules.module._global_is_full_backward_hook = None
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert is_dynamic_nn_module(module)
        assert not is_dynamic_nn_module(module, is_export=True)
    finally:
        handle.remove()


def test_a_dynamic_class_counts_for_its_own_modules_only() -> None:
    class Net(nn.Module):
        pass

    class Below(Net):
        pass

    GenerationTracker.mark_class_dynamic(Net)
    assert is_dynamic_nn_module(Net())
    assert not is_dynamic_nn_module(Below())


def test_a_module_made_in_this_generation_is_dynamic_until_the_next() -> None:
    with install_generation_tagging():
        module = nn.Linear(2, 2)
        assert is_dynamic_nn_module(module)
    assert is_dynamic_nn_module(module)
    with install_generation_tagging():
        assert not is_dynamic_nn_module(module)
