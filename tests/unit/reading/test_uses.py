"""Uses: what code may read is told from its bytecode, and never too little."""

import dis
import functools
import types

from tripwire.ranges import SourceRange
from tripwire.reading import bytecode as module
from tripwire.reading.bytecode import find_uses
from tripwire.reading.uses import Computed, Step, StepKind, Use, Uses, join, merge

CFG = {"a": {"b": 1}}
COUNT = 0


def of(fn) -> Uses:
    return find_uses(fn.__code__)


def attribute(fn, name) -> Use:
    return of(fn).steps[Step(StepKind.ATTRIBUTE, name)]


def argument(fn, name) -> Use:
    return of(fn).steps[Step(StepKind.LOCAL, name)]


def keys(*names, **others) -> Use:
    return Use(keys=frozenset(names), **others)


def body(source) -> Uses:
    """The uses of a function whose body is `source`, with arguments `self`, `d` and `x`."""
    lines = "\n    ".join(source.split("\n"))
    namespace: dict = {}
    exec(f"def f(self, d, x):\n    {lines}", namespace)
    return find_uses(namespace["f"].__code__)


def use_of_d(source) -> Use:
    return body(source).steps[Step(StepKind.LOCAL, "d")]


WHOLE = Use(whole=True)


# --- names ---------------------------------------------------------------------------------------


def test_attributes_are_loaded_ones_with_their_first_line() -> None:
    def f(self, x):
        y = self.scale
        return self.scale.bias(x) + y.mean()

    first = f.__code__.co_firstlineno
    assert of(f).attributes == {"scale": first + 1, "bias": first + 2, "mean": first + 2}


def test_stored_attributes_are_no_loads_but_deleted_ones_must_be_there() -> None:
    def f(self, x):
        self.seen = x
        del x.cache

    assert of(f).attributes.keys() == {"cache"}
    assert of(f).stored_attributes == {"seen", "cache"}


def test_string_constants_that_could_be_names_count_as_attributes() -> None:
    names = body('return ["scale", "a b", "block.bias", x in ("left", "right"), 3]').attributes
    assert set(names) == {"scale", "block", "bias", "left", "right"}
    assert set(body('return "returned"').attributes) == {"returned"}


def test_docstrings_and_keywords_of_calls_are_no_attributes() -> None:
    assert set(body('"""docstring"""\nreturn d(x, keyword=1, other=x)').attributes) == set()


def test_globals_are_loaded_ones_with_their_first_line() -> None:
    def f(x):
        return len(CFG) + COUNT

    first = f.__code__.co_firstlineno
    assert of(f).globals == {"len": first + 1, "CFG": first + 1, "COUNT": first + 1}


def test_written_globals_are_told_apart() -> None:
    def f():
        global COUNT, CFG
        COUNT = 1
        del CFG

    assert of(f).globals == {}
    assert of(f).stored_globals == {"COUNT", "CFG"}


def test_class_bodies_look_names_up_as_globals() -> None:
    code = compile("class A(B):\n    x = y\n    def f(self): return z", "<test>", "exec")
    inner = next(c for c in code.co_consts if isinstance(c, types.CodeType))
    assert "B" in find_uses(code).globals
    assert "y" in find_uses(inner).globals
    assert "z" not in find_uses(inner).globals
    assert {"x", "f"} <= find_uses(inner).stored_globals


def test_class_bodies_read_variables_of_the_function_around() -> None:
    code = compile("def f(v):\n  class A:\n    x = v['k']", "<test>", "exec")
    while code.co_name != "A":
        code = next(c for c in code.co_consts if isinstance(c, types.CodeType))
    assert find_uses(code).steps[Step(StepKind.FREE, "v")] == keys("k")


def test_imports_are_told_as_written() -> None:
    source = "import a.b\nimport c as d\nfrom e import g\nfrom . import h\nfrom ..i.j import k"
    code = compile("def f():\n  " + source.replace("\n", "\n  "), "<test>", "exec")
    found = find_uses(code.co_consts[0])
    assert found.imports == {"a.b", "c", "e", ".", "..i.j"}
    assert {"g", "h", "k"} <= set(found.attributes)
    assert body('__import__("json")').imports == {"json"}


def test_nested_functions_are_told_by_their_own_code() -> None:
    def f(x):
        return lambda y: y.inner

    assert "inner" not in of(f).attributes
    assert "inner" in of(f(1)).attributes


def test_super_and_match_load_attributes() -> None:
    class A:
        def f(self, x):
            match x:
                case A(left=1, right=r):
                    return r
                case {"key": value}:
                    return value
            return super().lower(x) + super().plain

    assert {"left", "right", "lower", "plain"} <= set(of(A.f).attributes)
    assert attribute(A.f, "left") == attribute(A.f, "right") == WHOLE
    assert argument(A.f, "self") == WHOLE
    assert not of(A.f).has_dynamic_names


def test_format_strings_load_the_attributes_that_they_spell() -> None:
    found = body('return "{0.scale} {x.block.bias}".format(d, x=x)')
    assert {"scale", "block", "bias"} <= set(found.attributes)
    assert found.steps[Step(StepKind.ATTRIBUTE, "scale")] == WHOLE
    assert not found.has_dynamic_names
    assert body("return self.template.format(x)").has_dynamic_names


def test_names_that_are_computed_are_told_from_constant_ones() -> None:
    assert not body("return getattr(x, 'name'), hasattr(x, 'other')").computes_names
    assert body("return getattr(x, 'na' + y)").computes_names
    assert body("return hasattr(x, y)").computes_names
    assert body("return map(getattr, x, y)").computes_names
    assert join([body("return getattr(x, y)"), body("return x")]).computes_names


# --- dynamic names -------------------------------------------------------------------------------


def test_constant_names_are_not_dynamic() -> None:
    for source in (
        'getattr(x, "name")',
        'getattr(x, "name", None)',
        'getattr(self.f(x, k=1)[0], "name", [d, f"{x}"])',
        'getattr(getattr(x, "first"), "name")',
        'hasattr(x, "name")',
        'setattr(x, "name", d[x])',
        'delattr(x, "name")',
        'operator.attrgetter("name")',
        'attrgetter("other.name", "third")(x)',
        'methodcaller("name", d)',
        'object.__getattribute__(x, "name")',
        'object.__setattr__(x, "name", d)',
        'x.__dict__["name"]',
        'x.__dict__.get("name", d)',
        '"name" in x.__dict__',
        'x.__dict__["name"] = d',
        "x.plain",
    ):
        found = body(source)
        assert not found.has_dynamic_names, source
        assert "name" in found.attributes or "plain" in found.attributes


def test_computed_names_are_dynamic() -> None:
    for source in (
        "builtins.getattr(x, d)",
        "operator.attrgetter(d)",
        'operator.attrgetter("a", d)',
        "operator.attrgetter(*d)",
        "methodcaller(d)",
        "object.__getattribute__(x, d)",
        "object.__setattr__(x, d, 1)",
        "vars(x)",
        "dir(x)",
        "return x.__dict__",
        "x.__dict__[d]",
        "x.__dict__.update(d)",
        "for k in x.__dict__: pass",
        'getattr(x, "__dict__")[d]',
        "inspect.getmembers(x)",
        "x.__reduce_ex__(2)",
        "match x:\n    case Point(a, b): pass",
    ):
        assert body(source).has_dynamic_names, source


def test_names_given_to_builtins_are_left_to_whoever_records_them() -> None:
    for source in (
        "getattr(x, d)",
        'getattr(x, f"name{d}")',
        "hasattr(x, d)",
        "setattr(x, d, 1)",
        "delattr(x, d)",
        "map(getattr, x, d)",
    ):
        assert not body(source).has_dynamic_names, source


def test_a_method_that_looks_at_self_as_a_whole_opens_self_alone() -> None:
    for source in (
        "return self.__dict__",
        "self.__dict__[d]",
        "super().__getattribute__(d)",
        "super().__setattr__(d, 1)",
    ):
        assert body(source).opens_self, source
        assert not body(source).has_dynamic_names, source
    assert body("return x.__dict__").has_dynamic_names


def test_a_super_method_with_a_constant_name_is_not_dynamic() -> None:
    class A:
        def get(self):
            return super().__getattribute__("name")

        def set(self, value):
            super().__setattr__("name", value)

        def set_any(self, name, value):
            super().__setattr__(name, value)

    assert not of(A.get).has_dynamic_names
    assert attribute(A.get, "name") == WHOLE
    assert not of(A.set).has_dynamic_names
    assert of(A.set).stored_attributes == {"name"}
    assert not of(A.set_any).has_dynamic_names
    assert of(A.set_any).opens_self


def test_names_stored_by_a_call_are_stored_attributes() -> None:
    found = body('setattr(x, "a", 1)\ndelattr(x, "b")\nx.__dict__["c"] = 1')
    assert found.stored_attributes == {"a", "b", "c"}


def test_getattr_is_a_step_like_any_other() -> None:
    assert attribute(lambda s: getattr(s, "cfg")["k"], "cfg") == keys("k")
    assert attribute(lambda s: (s.cfg["k"], getattr(s, "cfg")), "cfg") == keys("k", whole=True)
    assert attribute(lambda s: getattr(s.cfg, "k", 1), "cfg") == Use(attributes=frozenset({"k"}))
    assert attribute(lambda s: (s.cfg["k"], s.__dict__["cfg"]), "cfg").whole


# --- refusals ------------------------------------------------------------------------------------


def test_code_behind_our_back_is_refused_with_its_line() -> None:
    def f(x):
        x = x + 1
        return eval("x")

    name, offset = of(f).refused
    place = SourceRange((f.__code__, offset)).place
    assert (name, place.line) == ("eval", f.__code__.co_firstlineno + 2)


def test_each_way_behind_our_back_is_refused() -> None:
    for name, source in {
        "globals": "globals()",
        "exec": "exec(x)",
        "compile": "compile(x)",
        "__import__": "__import__(x)",
        "_getframe": "sys._getframe(1)",
        "currentframe": "inspect.currentframe()",
        "stack": "inspect.stack()",
        "get_objects": "import gc\ngc.get_objects()",
        "get_referrers": "gc.get_referrers(x)",
        "f_locals": "x.f_locals",
        "__globals__": 'x.__globals__["y"]',
    }.items():
        refused = body(source).refused
        assert refused is not None and refused[0] == name, source
    assert body('getattr(sys, "_getframe")()').refused[0] == "_getframe"
    assert body("from sys import _getframe").refused[0] == "_getframe"


def test_names_that_only_look_alike_are_not_refused() -> None:
    source = (
        'locals()\ntorch.stack(x)\nself.eval()\nre.compile("a+")\nd.get_objects()\n__import__("a")'
    )
    assert body(source).refused is None


# --- how values are used -------------------------------------------------------------------------


def test_constant_keys_are_told() -> None:
    for source in (
        'd["k"]',
        'return d["k"]',
        'd.get("k")',
        'd.get("k", x)',
        '"k" in d',
        'if "k" not in d: pass',
        'return x, d["k"], self',
        'x(d["k"], *x)',
        "f\"{d['k']}\"",
        'with x: d["k"]',
        'try:\n    d["k"]\nfinally:\n    x()',
        'while d["k"]: x = x["n"]',
        'y = d["k"]',
        '0 < d["k"] < 3',
        '(y := d["k"])',
    ):
        found = use_of_d(source)
        assert found.keys == {"k"} and not found.whole, source


def test_other_uses_are_whole() -> None:
    for source in (
        "return d",
        "y = d",
        "(y := d)",
        "x(d)",
        "x(k=d)",
        "x(*d)",
        "x(**d)",
        "d()",
        "[*d]",
        "{**d}",
        "len(d)",
        "for k in d: pass",
        "[k for k in d]",
        "d[x]",
        "del d[x]",
        "d[1:2]",
        "d[x:]",
        "3 in d",
        "d in x",
        "d == 1",
        "d is x",
        "d is None",
        "if d is not None: pass",
        "d",
        "try:\n    d\nexcept NameError:\n    pass",
        "0 < d < 3",
        "d + 1",
        "-d",
        "not d",
        "if d: pass",
        "while d: pass",
        "y = d or x",
        "y = x and d",
        "yield d",
        "raise d",
        "assert d",
        "with d: pass",
        "self.d = d",
        'self["k"] = d',
        "x[d]",
        "a, b = d",
        "a, *b = d",
        "match d:\n    case {'k': 1}: pass",
        "match d:\n    case [1, *_]: pass",
        "lambda: d",
        "d.keys()",
        "d.update(x)",
        "y = d.items",
        "d.get(x)",
        'd.get("k", default=x)',
        'd.get(*["k"])',
        'd[x if self else "k"]',
        "d.append(x if self else 1)",
        "d += x",
        'd += "s"',
        "y = d.__dict__",
        "y = d if x else self",
        'print(f"{d}")',
        'print(f"{x:{d}}")',
        "async def g(): pass\nreturn d",
        "@d\ndef g(): pass",
        "class A(d): pass",
        "def g(y=d): pass",
        "import y\ny.z(d)",
        "try:\n    x()\nexcept d:\n    pass",
        "del d.x, self\nx.y(d)",
    ):
        assert use_of_d(source).whole, source


def test_a_value_that_is_written_through_was_needed() -> None:
    through = Use(attributes=frozenset({"x"}))
    for source in ("d.x = 1", "del d.x", 'setattr(d, "x", 1)', 'delattr(d, "x")'):
        assert use_of_d(source) == through, source


def test_what_is_only_asked_for_was_read() -> None:
    asked = Use(tested=True)
    assert body('"k" in d').steps[Step(StepKind.ITEM, "k")] == asked
    assert body('d.get("k")').steps[Step(StepKind.ITEM, "k")] == WHOLE
    assert body('hasattr(d, "k")').steps[Step(StepKind.ATTRIBUTE, "k")] == asked
    assert use_of_d('hasattr(d, "k")') == Use(attributes=frozenset({"k"}))


def test_a_test_for_a_computed_key_is_one_for_any() -> None:
    assert use_of_d("x in d") == keys(Computed.KEY)
    assert body("x in d").steps[Step(StepKind.ITEM, Computed.KEY)] == Use(tested=True)


def test_a_default_is_stored_where_there_is_nothing() -> None:
    for source, key in (('"k"', "k"), ("x.y", Computed.KEY)):
        used = use_of_d(f"d.setdefault({source}, []).append(x.z)")
        assert used == Use(keys=frozenset({key}), stored_keys=frozenset({key}))
        found = body(f"d.setdefault({source}, []).append(x.z)").steps[Step(StepKind.ITEM, key)]
        assert found == Use(appended=True, tested=True)


def test_chains_pass_from_step_to_step() -> None:
    def f():
        return CFG["a"]["b"]

    assert of(f).steps == {
        Step(StepKind.GLOBAL, "CFG"): keys("a"),
        Step(StepKind.ITEM, "a"): keys("b"),
        Step(StepKind.ITEM, "b"): WHOLE,
    }


def test_attributes_of_a_value_are_not_the_whole_of_it() -> None:
    assert attribute(lambda s: s.cfg.scale, "cfg") == Use(attributes=frozenset({"scale"}))
    assert attribute(lambda s: s.cfg["scale"], "cfg") == keys("scale")
    assert argument(lambda s: s.cfg["scale"], "s") == Use(attributes=frozenset({"cfg"}))


def test_keys_can_be_numbers_tuples_and_none() -> None:
    assert use_of_d("d[0], d[-1], d[1, -2], d[None], d[...], d[b'k'], d[True, 'x']") == keys(
        0, -1, (1, -2), None, ..., b"k", (True, "x")
    )


def test_stored_and_deleted_keys_are_no_reads() -> None:
    assert use_of_d('d["n"] = x\ndel d["m"]') == Use(stored_keys=frozenset({"n", "m"}))
    assert use_of_d('x["a"] = d["n"] = self') == Use(stored_keys=frozenset({"n"}))
    assert use_of_d("d[x] = self") == Use(stored_keys=frozenset({Computed.KEY}))


def test_values_that_only_grow_are_told() -> None:
    for method in ("append", "extend", "add"):
        assert use_of_d(f"d.{method}(x.y)") == Use(appended=True)
        for whole in ("return {}", "x = {} or self", "x({})"):
            used = use_of_d(whole.format(f"d.{method}(x.y)"))
            assert used == Use(appended=True, whole=True, only_grown=True)


def test_of_a_module_methods_of_containers_are_taken_too() -> None:
    assert use_of_d("d.add(x.y)\nd.b").taken == {"add", "append", "extend", "b"}
    assert use_of_d('return d.get("scale")').taken == {"get", "setdefault"}
    assert use_of_d("return d.b").taken == {"b"}


def test_updates_are_told_wherever_the_value_lives() -> None:
    class A:
        def f(self, obj, d):
            global COUNT
            nonlocal count
            self.step += 1
            obj.n -= 2
            obj.inner.m += 0.5
            obj.make().q -= 1
            COUNT += 1
            d["k"] += 1
            count += 1
            self.plain = self.plain + 1
            d["p"] = d["p"] - 1
            self.table["t"] += 1

    count = 0
    steps = of(A.f).steps
    for step in (
        *(Step(StepKind.ATTRIBUTE, name) for name in ("step", "n", "m", "q", "plain")),
        *(Step(StepKind.ITEM, key) for key in "kpt"),
        Step(StepKind.GLOBAL, "COUNT"),
        Step(StepKind.FREE, "count"),
    ):
        assert steps[step] == Use(updated=True), step
    assert steps[Step(StepKind.ATTRIBUTE, "table")] == keys("t", stored_keys=frozenset("t"))
    assert not steps[Step(StepKind.LOCAL, "self")].whole


def test_a_sum_that_goes_elsewhere_is_no_update() -> None:
    for source in (
        "self.n = x.n + 1",
        "self.m = self.n + 1",
        "self.a.n = self.b.n + 1",
        "self.n += x",
        'self.n += "s"',
        "y = self.n + 1",
        "self, self.n = x, self.n + 1",
        "x[1:], self.n = d, self.n + 1",
        "self.n = 1 + self.n",
        'x["n"] = self.n + 1',
        "n = self.n + 1",
        "y = self.n = self.n + 1",
    ):
        found = body(source).steps[Step(StepKind.ATTRIBUTE, "n")]
        assert found.whole, source
    assert body('d["n"] = x["n"] + 1').steps[Step(StepKind.ITEM, "n")] == WHOLE
    assert body('d["n"] = d["m"] + 1').steps[Step(StepKind.ITEM, "m")] == WHOLE


def test_an_update_and_another_load_are_both_told() -> None:
    def f(self):
        self.n += 1
        return self.n

    assert attribute(f, "n") == Use(updated=True, whole=True)


def test_all_occurrences_count_together() -> None:
    assert use_of_d('d["a"]\nd.get("b")\nd["c"] = 1\nd.x\nd.append(1)') == Use(
        keys=frozenset("ab"),
        stored_keys=frozenset("c"),
        attributes=frozenset({"x"}),
        appended=True,
    )
    assert use_of_d('d["a"]\nx(d)') == keys("a", whole=True)


def test_methods_are_steps_that_are_used_whole() -> None:
    assert attribute(lambda s, x: s.layer(x), "layer") == WHOLE
    assert argument(lambda s, x: s.layer(x), "s") == Use(
        attributes=frozenset({"layer"}), whole=True
    )


def test_only_arguments_are_local_steps() -> None:
    def f(a, /, b, *args, c, **kwargs):
        d = a["k"], b["k"], args[0], c["k"], kwargs["k"]
        return d

    locals_ = {s.name: u for s, u in of(f).steps.items() if s.kind is StepKind.LOCAL}
    assert locals_ == {
        **dict.fromkeys(("a", "b", "c", "kwargs"), keys("k")),
        "args": keys(0),
    }


def test_an_argument_shared_with_an_inner_function_is_whole() -> None:
    def f(v):
        def g():
            return v["inner"]

        return g, v["outer"]

    assert argument(f, "v") == keys("outer", whole=True)
    inner = next(c for c in f.__code__.co_consts if isinstance(c, types.CodeType))
    assert find_uses(inner).steps[Step(StepKind.FREE, "v")] == keys("inner")


def test_comprehensions_keep_what_they_use_of_outer_values() -> None:
    def f(self, xs):
        return [self.cfg["k"] * x for x in xs if self.on], {v: k for k, v in self.all.items()}

    codes = [f.__code__, *(c for c in f.__code__.co_consts if isinstance(c, types.CodeType))]
    together = join(map(find_uses, codes))
    assert together.steps[Step(StepKind.ATTRIBUTE, "cfg")] == keys("k")
    assert together.steps[Step(StepKind.ATTRIBUTE, "all")].whole
    assert together.steps[Step(StepKind.ATTRIBUTE, "on")].whole


def test_a_comprehension_variable_may_shadow_an_argument() -> None:
    def f(x, ys):
        return [x["in"] for x in ys], x["out"]

    assert "out" in argument(f, "x").keys
    assert argument(f, "ys").whole


def test_handlers_finally_and_with_lose_nothing() -> None:
    def f(self, d):
        try:
            with self.lock, self.other:
                d["try"]
        except KeyError as e:
            d["except"]
            raise ValueError(e.args) from self.cause
        else:
            d["else"]
        finally:
            d["finally"]

    assert argument(f, "d") == keys("try", "except", "else", "finally")
    for name in ("lock", "other", "cause"):
        assert attribute(f, name) == WHOLE


def test_generators_and_coroutines_are_followed() -> None:
    def f(d):
        yield d["a"]
        yield from d["b"]

    async def g(d):
        async with d["c"]:
            await d["e"]
        return [z async for z in d["f"]]

    assert argument(f, "d") == keys("a", "b")
    assert argument(g, "d") == keys("c", "e", "f")


# --- size ----------------------------------------------------------------------------------------


def test_names_and_jumps_beyond_a_byte_are_decoded() -> None:
    lines = [f"self.a{i} = d['k{i}'] if self.b{i} else G{i}" for i in range(700)]
    loop = "for i in x:\n    " + "\n    ".join(lines) + "\ngetattr(self, 'end')\nreturn self.last"
    found = body(loop)
    assert set(found.stored_attributes) == {f"a{i}" for i in range(700)}
    assert set(found.globals) == {*(f"G{i}" for i in range(700)), "getattr"}
    assert {f"b{i}" for i in range(700)} | {"last", "end"} <= set(found.attributes)
    assert found.attributes["last"] == 704
    assert found.steps[Step(StepKind.LOCAL, "d")] == keys(*(f"k{i}" for i in range(700)))
    assert found.steps[Step(StepKind.ITEM, "k699")] == WHOLE
    assert not found.has_dynamic_names


def test_long_calls_and_displays_keep_the_stack_in_step() -> None:
    many = ", ".join(f"d['k{i}']" for i in range(300))
    assert use_of_d(f"x({many})").keys == use_of_d(f"[{many}]").keys
    assert not use_of_d(f"x({many}, n=[{many}])").whole
    assert not use_of_d("{" + ", ".join(f"'a{i}': d['k{i}']" for i in range(50)) + "}").whole


# --- joining and keeping -------------------------------------------------------------------------


def test_merge_unites_what_two_places_do() -> None:
    a = Use(frozenset("a"), frozenset("s"), frozenset("x"), appended=True)
    b = Use(frozenset("b"), frozenset("t"), frozenset("y"), updated=True, whole=True)
    both = Use(frozenset("ab"), frozenset("st"), frozenset("xy"), True, True, whole=True)
    assert merge(a, b) == both
    assert merge(a, Use(tested=True)).tested
    assert merge(a, Use()) == a


def test_join_unites_code_objects_and_keeps_the_first_line() -> None:
    def f(self):
        self.x = self.cfg["a"] + COUNT
        return eval

    def g(self, name):
        global CFG
        import json

        CFG = self.cfg["b"] + COUNT
        return getattr(json, name), exec

    both = join([of(f), of(g)])
    assert both.attributes["cfg"] == f.__code__.co_firstlineno + 1
    assert both.globals["COUNT"] == f.__code__.co_firstlineno + 1
    assert both.stored_attributes == {"x"} and both.stored_globals == {"CFG"}
    assert both.imports == {"json"} and not both.has_dynamic_names
    assert both.refused == of(f).refused
    assert both.steps[Step(StepKind.ATTRIBUTE, "cfg")] == keys("a", "b")
    assert join([]).steps == {}


def test_a_code_object_is_walked_once() -> None:
    def f(x):
        return x

    assert of(f) is of(f)
    twin = f.__code__.replace()
    assert twin == f.__code__ and find_uses(twin) is not of(f)


def test_every_instruction_that_carries_a_name_is_known() -> None:
    carrying = {*dis.hasname, *dis.haslocal, *dis.hasfree}
    named = {dis.opname[opcode] for opcode in carrying if opcode < 256}
    known = {name for name in named if not name.startswith(("INSTRUMENTED_", "<"))}
    assert {"LOAD_FAST", "LOAD_GLOBAL", "STORE_ATTR"} <= known
    given_up = {name for name in known if module._find_carry_out(name, 0) is module._Pass.give_up}
    assert not given_up


def test_the_stack_is_kept_as_deep_as_the_interpreter_says(monkeypatch) -> None:
    wrong = []

    def compared(opcode, carry_out):
        def carry_out_and_compare(walk, argument):
            walk.pad(400)
            before = len(walk.stack)
            carry_out(walk, argument)
            name = dis.opname[opcode]
            if walk.stack and name not in ("PRECALL", "CALL"):  # 3.11 counts these two together
                given = argument if opcode >= dis.HAVE_ARGUMENT else None
                if len(walk.stack) - before != dis.stack_effect(opcode, given, jump=False):
                    wrong.append((name, argument))

        return carry_out_and_compare

    monkeypatch.setattr(
        module, "_CARRY_OUT", [compared(*pair) for pair in enumerate(module._CARRY_OUT)]
    )
    for library in (dis, functools, types):
        with open(library.__file__, encoding="utf-8") as file:
            waiting = [compile(file.read(), library.__file__, "exec")]
        while waiting:
            code = waiting.pop()
            module._Pass(code).run()
            waiting += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    assert wrong == []


def test_comparing_identity_is_noted_but_not_with_none_true_and_false():
    for text, asks in {
        "a is b": True,
        "a is not b.c": True,
        "operator.is_(a, b)": True,
        "a is None": False,
        "a is not True or a is ...": False,
        "(a or b) is None": False,
        "a == b": False,
        "all(x for x in a)": False,
    }.items():
        code = compile(f"def f(a, b, operator): return {text}", "<text>", "exec").co_consts[0]
        assert bool(find_uses(code).asked) is asks, text
