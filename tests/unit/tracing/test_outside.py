"""What a run prints and logs, compiled calls print and log again, with their own numbers."""

from __future__ import annotations

# ruff: noqa: UP031, UP032, F507  # texts as people write them
import builtins
import contextlib
import io
import logging
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tripwire
from tripwire.tracing.texts import Field, find_calls

BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
STATE = SimpleNamespace(step=0, name="run")


@pytest.fixture
def logged():
    """A logger, and the lines that it wrote."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(lineno)d %(funcName)s %(message)s"))
    logger = logging.getLogger("test_outside")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield logger, stream
    logger.removeHandler(handler)


def take(stream):
    text = stream.getvalue()
    stream.truncate(0)
    stream.seek(0)
    return text


def check_prints(program, capsys, *, traces, calls=7, backend="eager"):
    """Compiled calls print what plain ones print; all but the traced ones are hits."""
    compiled = tripwire.compile(program, backend=backend)
    for number in range(calls):
        x = torch.arange(12.0).reshape(3, 4) + number
        expected, text = program(x), capsys.readouterr().out
        assert text or number
        result = compiled(x)
        assert capsys.readouterr().out == text
        torch.testing.assert_close(result, expected)
    told = compiled.statistics()
    assert (told.traces, told.hits) == (traces, calls - traces), tripwire.explain(compiled)


def constants(x):
    print("begin", 1, None, 2.5, sep="-", end="!\n")
    return x * 2


def forms(x):
    print(x.shape, x.dtype, x.device, [x.dim(), {"rows": len(x)}])
    return x * 2


def tensors(x):
    y = x * 2
    print("first", y[0], (y.sum(),))
    return y


def an_argument(x):
    print(x)
    return x * 2


def numbers(x):
    mean = x.mean().item()
    print("mean", mean)
    return x * mean


def a_text(x):
    print(f"mean {x.mean().item():.3f} of {x.shape[0]} rows", flush=True)
    return x * 2


def a_text_of_one_piece(x):
    print(f"{x.sum().item():8.2f}")
    return x * 2


def texts_and_numbers(x):
    low, high = x.min().item(), x.max().item()
    print(f"{low:.1f}..{high:.1f}", high, f"({low} {high:.2e})")
    return x * 2


def text_with_other_values(x):
    digits = "11"
    print(f"{digits} {x.sum().item():.0f} {digits!r:>6} {STATE.name}")
    return x * 2


def texts_in_keywords(x):
    rows, total = x.shape[0], x.sum().item()
    print(f"{total:.1f}", "3", sep=f"{rows}", end=f"{rows}\n")
    print("3", end=f"{rows}\n")
    return x * 2


def equal_texts(x):
    rows, low = x.shape[0], int(x.min().item() + 3)
    print(f"{rows}", end=f"{low}")
    print(f"{rows}", f"{low}", "3")
    return x * 2


def in_a_loop(x):
    for row in range(3):
        print(f"{row}: {x[row].sum().item():.1f}")
    return x * 2


def in_a_helper(x):
    tell(x.sum().item())
    return x * 2


def tell(total):
    print(f"total {total:.2f}")


def by_percents(x):
    rows, mean = x.shape[0], x.mean().item()
    print("%5.1f%% of %s" % (mean, STATE.name), "%d" % mean, "(%s, %s)" % (mean, rows))
    print("%(mean).3e %(mean)s" % {"mean": mean})
    return x * 2


def by_braces(x):
    rows, mean = x.shape[0], x.mean().item()
    print(
        "{:.1f} of {name} {{{}}}".format(mean, rows, name=STATE.name), "{0}{0:>9.2f}".format(mean)
    )
    print(f"{mean!s}")
    return x * 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("program", "traces"),
    [
        (constants, 1),
        (forms, 1),
        (tensors, 1),
        (an_argument, 1),
        (numbers, 2),
        (a_text, 2),
        (a_text_of_one_piece, 2),
        (texts_and_numbers, 2),
        (text_with_other_values, 2),
        (texts_in_keywords, 2),
        (in_a_loop, 2),
        (in_a_helper, 2),
        (by_percents, 2),
        (by_braces, 2),
    ],
)
def test_compiled_calls_print_what_plain_ones_print(program, traces, backend, capsys) -> None:
    check_prints(program, capsys, traces=traces, backend=backend)


def test_a_module_prints_every_third_step(capsys) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = 0
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            self.steps += 1
            y = self.linear(x)
            if self.steps % 3 == 0:
                print(f"step {self.steps}: {y.mean().item():.4f}")
            return y

    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(0)
    compiled = tripwire.compile(Net(), backend="eager")
    for number in range(18):
        x = torch.full((2, 4), float(number))
        expected, text = plain(x), capsys.readouterr().out
        torch.testing.assert_close(compiled(x), expected)
        assert capsys.readouterr().out == text
    assert compiled.statistics().hits >= 13


# --- texts that go elsewhere close their numbers ---


def kept_text(x):
    text = f"{x.sum().item():.0f}"
    print(text)
    return x * len(text)


def text_that_is_kept_as_well(x):
    print(text := f"{x.sum().item():.0f}")
    return x * len(text)


def text_of_a_method(x):
    print(f"{x.sum().item():.0f}".rjust(9))
    return x * 2


def text_for_another_function(x):
    return x * len(str.strip(f"{x.sum().item():.0f}"))


@pytest.mark.parametrize(
    "program",
    [
        equal_texts,
        kept_text,
        text_that_is_kept_as_well,
        text_of_a_method,
        text_for_another_function,
    ],
)
def test_a_text_that_goes_elsewhere_holds_for_its_number(program, capsys) -> None:
    compiled = tripwire.compile(program, backend="eager")
    for number in (0, 1, 40, 400, 0, 1, 40, 400):
        x = torch.arange(12.0).reshape(3, 4) + number
        expected, text = program(x), capsys.readouterr().out
        torch.testing.assert_close(compiled(x), expected)
        assert capsys.readouterr().out == text


class Text(str):
    def __mod__(self, value):
        return f"other {value}"


def as_tuple(*values):
    return values


MIXED = {
    "both open": lambda n, x: print("%d %d" % (n, n)),
    "beside a plain one": lambda n, x: print("%d/%d" % (n, 5)),
    "beside an equal one": lambda n, x: print("%d%d" % (1, n)),
    "by name": lambda n, x: print("%(n)d %(m)d" % {"n": n, "m": 4}),
    "in hexadecimals": lambda n, x: print("%x %o %#X" % (n, n + 1, 255)),
    "as a float": lambda n, x: print("%.2f %g" % (n, n / 4)),
    "a float as an int": lambda n, x: print("%d" % (n / 4)),
    "a width": lambda n, x: print("%*d %d" % (3, 7, n)),
    "a character": lambda n, x: print("%c" % n),
    "an error": lambda n, x: print("%s %s|" % as_tuple(OSError(2, n), "3")),
    "in a list": lambda n, x: print("%s %r" % as_tuple([n], 3)),
    "a text of another class": lambda n, x: print(Text("%d") % n),
    "a text that isn't constant": lambda n, x: print(("%d" if n else "%s") % n),
    "braces": lambda n, x: print("{} {}/{}".format(n, 4, n * 2)),
    "a nested width": lambda n, x: print("{:{w}} {}".format(3, 4, w=n)),
    "an attribute": lambda n, x: print("{0.real} {0}".format(n)),
    "a list in braces": lambda n, x: print("{0} {0[0]}".format([n])),
    "named braces": lambda n, x: print("{n:>4}|{m}".format(n=n, m=4)),
    "a format of an f-string": lambda n, x: print("{} {}".format(f"{n}", n)),
    "kept": lambda n, x: print((text := "%d" % n), x * len(text)),
    "formatted twice": lambda n, x: print("%s|" % ("%d" % n)),
    "out of a tensor": lambda n, x: print("%d {}" % x.sum().item()),
}


@pytest.mark.parametrize("say", MIXED)
def test_texts_by_percents_and_braces_are_those_of_the_call(say, capsys) -> None:
    def program(x, n):
        MIXED[say](n, x)
        return x * n

    compiled = tripwire.compile(program, backend="eager")
    for number in (3, 4, 5, 11, 3, 4, 44):
        x = torch.full((2,), float(number))
        expected, text = program(x, number), capsys.readouterr().out
        torch.testing.assert_close(compiled(x, number), expected)
        assert capsys.readouterr().out == text


def test_a_text_that_fails_leaves_its_numbers_to_nobody(capsys) -> None:
    def program(x, n):
        try:
            print("%d %d" % (n, "a"))
        except TypeError:
            print("%d" % n)
        return x * n

    compiled = tripwire.compile(program, backend="eager")
    for number in (3, 4, 5):
        compiled(torch.ones(2), number)
        assert capsys.readouterr().out == f"{number}\n"


def test_the_text_of_a_keyword_is_not_taken_for_an_argument(capsys) -> None:
    def program(x, number):
        print("2", end=f"{number}")
        return x * number

    compiled = tripwire.compile(program, backend="eager")
    for number in range(1, 7):
        compiled(torch.ones(2), number)
        assert capsys.readouterr().out == f"2{number}"


def test_the_line_that_closed_a_number_is_told(capsys) -> None:
    compiled = tripwire.compile(text_for_another_function, backend="eager", dynamic=True)
    for number in range(3):
        compiled(torch.arange(4.0) + number)
    line = text_for_another_function.__code__.co_firstlineno + 1
    assert f"test_outside.py:{line}" in str(tripwire.explain(compiled))


# --- what can't be printed at the end ---


def written_later(x):
    y = x * 2
    print(y[0])
    y.add_(1)
    return y


def argument_written_later(x):
    print(x[0])
    x.add_(1)
    return x * 2


def written_past_its_version(x):
    y = x * 2
    print(y[0])
    y.data.add_(1)
    return y


def given_other_memory(x):
    y = x * 2
    print(y)
    y.data = x * 3
    return y


MEAN, VARIANCE = torch.zeros(4), torch.ones(4)


def statistics_of_batches(x):
    print(MEAN)
    return nn.functional.batch_norm(x + torch.arange(3.0)[:, None], MEAN, VARIANCE, training=True)


def asked_for_gradients_later(x):
    y = torch.zeros(2)
    print(y)
    y.requires_grad_()
    return x * 2


def with_other_options(x):
    with torch._tensor_str.printoptions(precision=1):
        print(x / 3)
    return x * 2


def redirected(x):
    with contextlib.redirect_stdout(io.StringIO()):
        print("nobody reads this")
    return x * 2


def in_itself(x):
    around = [1]
    around.append(around)
    print(around)
    return x * 2


def with_a_past(x):
    w = torch.ones(4, requires_grad=True)
    y = (x * w).sum()
    print(y)
    return y.detach()


def an_object(x):
    print(STATE)
    return x * 2


def to_another_stream(x):
    print("here", file=sys.__stderr__)
    return x * 2


@pytest.mark.parametrize(
    "program",
    [
        written_later,
        argument_written_later,
        written_past_its_version,
        given_other_memory,
        statistics_of_batches,
        asked_for_gradients_later,
        with_other_options,
        redirected,
        in_itself,
        with_a_past,
        an_object,
        to_another_stream,
    ],
)
def test_other_prints_are_refused_and_print_once_per_call(program, capsys) -> None:
    compiled = tripwire.compile(program, backend="eager")
    for number in range(4):
        MEAN.zero_()
        expected = program(torch.ones(3, 4) + number)
        MEAN.zero_()
        text = capsys.readouterr().out
        torch.testing.assert_close(compiled(torch.ones(3, 4) + number), expected)
        assert capsys.readouterr().out == text
    assert compiled.statistics().hits == 0
    with pytest.raises(tripwire.CannotTrace):
        tripwire.compile(program, backend="eager", fullgraph=True)(torch.ones(3, 4))


def in_a_try(x):
    try:
        print("here")
    finally:
        x = x * 2
    return x


def a_module(x):
    print("of", [nn.Linear(1, 1)])
    return x * 2


@pytest.mark.parametrize(
    ("program", "what", "instead"),
    [
        (with_a_past, "given a tensor that has a `grad_fn`", "`x.item()` or `x.detach()`"),
        (a_module, "given a `Linear`", "texts, numbers or plain tensors"),
        (to_another_stream, "given a stream", "Leave `file=` out"),
        (in_itself, "given a container that holds itself", "Give it the items"),
        (in_a_try, "called in a `try`", "Move it out of the `try`"),
    ],
)
def test_a_refused_print_says_what_cant_be_printed_again(program, what, instead, capsys) -> None:
    seen = tripwire.preview(program, torch.ones(3, 4))
    assert seen.refusal.slug == "prints"
    assert f"`print` is {what}" in seen.refusal.reason
    assert instead in seen.refusal.reason
    assert "print(" in seen.refusal.text


def test_a_stream_that_writes_what_the_call_reads_is_refused(monkeypatch) -> None:
    class Counting(io.StringIO):
        def write(self, text):
            STATE.step += 1
            return super().write(text)

    def count(x):
        print("counted")
        return x * STATE.step

    compiled = tripwire.compile(count, backend="eager")
    monkeypatch.setattr(STATE, "step", 0)
    monkeypatch.setattr(sys, "stdout", Counting())
    results = [compiled(torch.ones(1)).item() for _ in range(4)]
    assert results == [2.0, 4.0, 6.0, 8.0]


# --- print itself ---


def test_the_stream_of_the_call_is_used(monkeypatch) -> None:
    compiled = tripwire.compile(constants, backend="eager")
    texts = []
    for _ in range(4):
        with monkeypatch.context() as world:
            world.setattr(sys, "stdout", io.StringIO())
            compiled(torch.ones(2))
            texts.append(sys.stdout.getvalue())
    assert texts == ["begin-1-None-2.5!\n"] * 4
    assert compiled.statistics().hits == 3


def test_a_print_that_is_replaced_is_called(monkeypatch, capsys) -> None:
    compiled = tripwire.compile(constants, backend="eager")
    compiled(torch.ones(2))
    compiled(torch.ones(2))
    said: list[object] = []
    with monkeypatch.context() as world:
        world.setattr(builtins, "print", lambda *args, **kwargs: said.append(args))
        compiled(torch.ones(2))
    assert said == [("begin", 1, None, 2.5)]


def test_what_print_is_stays_the_same() -> None:
    before = builtins.print, logging.Logger._log.__code__
    tripwire.compile(constants, backend="eager")(torch.ones(2))
    assert (builtins.print, logging.Logger._log.__code__) == before


def test_a_print_that_raises_raises_in_compiled_calls(monkeypatch) -> None:
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    compiled = tripwire.compile(constants, backend="eager")
    compiled(torch.ones(2))
    compiled(torch.ones(2))
    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(BrokenPipeError):
        compiled(torch.ones(2))


def in_a_try(x):
    try:
        with torch.no_grad():
            print("told")
    except BrokenPipeError:
        return x * 3
    return x * 2


def in_a_try_around(x):
    try:
        constants(x)
    except BrokenPipeError:
        return x * 3
    return x * 2


@pytest.mark.parametrize("program", [in_a_try, in_a_try_around])
def test_a_print_that_raises_is_caught_where_it_is_printed(program, monkeypatch) -> None:
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    compiled = tripwire.compile(program, backend="eager")
    for _ in range(3):
        assert compiled(torch.ones(1)).item() == 2
    monkeypatch.setattr(sys, "stdout", Closed())
    assert compiled(torch.ones(1)).item() == 3


# --- loggers ---


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_compiled_calls_log_what_plain_ones_log(logged, backend) -> None:
    logger, stream = logged

    def train(x):
        loss = x.mean()
        logger.info("loss %.3f of %s", loss.item(), x.shape)
        logger.debug("not told")
        logger.warning(f"loss {loss.item():.2f}")
        logger.info("text %s", f"{loss.item():.1f}")
        logger.log(logging.ERROR, "an error that is none", stacklevel=1)
        return x * 2

    compiled = tripwire.compile(train, backend=backend)
    for number in range(6):
        x = torch.arange(4.0) + number
        train(x)
        expected = take(stream)
        compiled(x)
        assert take(stream) == expected
        assert expected.count("\n") == 4
    assert compiled.statistics().hits >= 3


def test_a_loggers_level_is_followed(logged) -> None:
    logger, stream = logged

    def quiet(x):
        logger.info("told")
        return x * 2

    compiled = tripwire.compile(quiet, backend="eager")
    for level, expected in [(20, 1), (20, 1), (20, 1), (30, 0), (30, 0), (20, 1), (20, 1)]:
        logger.setLevel(level)
        compiled(torch.ones(2))
        assert take(stream).count("told") == expected


def test_the_logger_of_this_call_logs(logged) -> None:
    logger, stream = logged
    other = logging.getLogger("test_outside.other")

    def tell(x, log):
        log.info("told by %s", log.name)
        return x * 2

    compiled = tripwire.compile(tell, backend="eager")
    for which in (logger, logger, logger, other, other, logger, other):
        compiled(torch.ones(2), which)
        assert take(stream).endswith(f"told by {which.name}\n")


def test_a_logger_by_name_logs_again(logged) -> None:
    logger, stream = logged

    def tell(x):
        logging.getLogger("test_outside").info("told")
        return x * 2

    compiled = tripwire.compile(tell, backend="eager")
    for _ in range(5):
        compiled(torch.ones(2))
        assert take(stream).endswith("told\n")
    assert compiled.statistics().hits >= 2


@pytest.mark.parametrize("options", [{"exc_info": True}, {"extra": {"a": 1}}, {"stack_info": True}])
def test_messages_with_more_than_a_text_are_refused(logged, options) -> None:
    logger, stream = logged

    def tell(x):
        logger.info("told", **options)
        return x * 2

    compiled = tripwire.compile(tell, backend="eager")
    for _ in range(4):
        compiled(torch.ones(2))
        assert take(stream).count(" tell told") == 1
    assert compiled.statistics().hits == 0
    (name,) = options
    (refusal,) = tripwire.explain(compiled).refusals
    assert (refusal.slug, refusal.text) == ("logs", 'logger.info("told", **options)')
    assert f"a logger is given `{name}`" in refusal.reason
    assert f"Log without `{name}`" in refusal.reason


class Keeping(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


class Numbered(logging.Logger):
    def findCaller(self, *args, **kwargs):
        return "elsewhere.py", 7, "nobody", None


class Strict(logging.Logger):
    def makeRecord(self, name, level, fn, lno, msg, args, exc_info, func, extra, sinfo):
        return super().makeRecord(
            name, level, fn, lno, f"strictly {msg}", args, exc_info, func, extra, sinfo
        )


@pytest.mark.parametrize(
    "tell",
    [
        lambda logger: logger.info("told", exc_info=ValueError()),
        lambda logger: logger.info("told", extra={"a": 1}),
        lambda logger: logger.info("told by %s", STATE),
    ],
)
def test_a_handler_that_only_keeps_gets_each_message(logged, tell) -> None:
    logger, _ = logged
    handler = Keeping()
    logger.handlers[:] = [handler]

    def program(x):
        tell(logger)
        return x * 2

    compiled = tripwire.compile(program, backend="eager")
    for number in range(4):
        compiled(torch.ones(2))
        assert len(handler.texts) == number + 1


@pytest.mark.parametrize("kind", [Numbered, Strict])
def test_what_a_class_of_loggers_does_is_done(logged, kind) -> None:
    _, stream = logged
    logging.setLoggerClass(kind)
    own = logging.getLogger(f"test_outside.{kind.__name__}")
    logging.setLoggerClass(logging.Logger)

    def program(x):
        own.info("told")
        return x * 2

    program(torch.ones(2))
    expected = take(stream)
    compiled = tripwire.compile(program, backend="eager")
    for _ in range(4):
        compiled(torch.ones(2))
        assert take(stream) == expected


def test_a_handler_that_draws_draws_when_it_logs(logged) -> None:
    logger, _ = logged

    class Drawing(logging.Handler):
        def emit(self, record):
            self.drawn = torch.rand(2)

    logger.handlers[:] = [Drawing()]

    def program(x):
        logger.info("told")
        return x * torch.rand(2)

    compiled = tripwire.compile(program, backend="eager")
    for number in range(4):
        torch.manual_seed(number)
        expected = program(torch.ones(2))
        torch.manual_seed(number)
        assert torch.equal(compiled(torch.ones(2)), expected)


class Remembering(logging.LoggerAdapter):
    last = ""

    def process(self, msg, kwargs):
        self.last = msg
        return msg, kwargs


@pytest.mark.parametrize("is_adapted", [False, True])
def test_a_text_that_somebody_gets_on_the_way_holds_for_its_number(logged, is_adapted) -> None:
    logger, stream = logged
    adapter = Remembering(logger, None)

    def tell(text):
        logger.info(text, stacklevel=2)
        return len(text)

    def program(x):
        if is_adapted:
            adapter.info(f"{x.sum().item():.0f}")
            return x * len(adapter.last)
        return x * tell(f"{x.sum().item():.0f}")

    compiled = tripwire.compile(program, backend="eager")
    for number in (0, 1, 40, 400, 0, 1, 40, 400):
        x = torch.arange(4.0) + number
        expected, text = program(x), take(stream)
        torch.testing.assert_close(compiled(x), expected)
        assert take(stream) == text


def test_a_text_that_nobody_wants_keeps_its_number_open_and_nothing_alive(logged) -> None:
    logger, _ = logged

    class Thing:
        pass

    def helper(number):
        thing = Thing()
        logger.debug(f"{number:.2f}")
        return weakref.ref(thing)

    def program(x):
        return x * (2 if helper(x.sum().item())() is None else 3)

    compiled = tripwire.compile(program, backend="eager")
    for number in range(6):
        x = torch.ones(2) + number
        assert torch.equal(compiled(x), x * 2)
    assert compiled.statistics().hits == 4


def test_other_threads_log_their_own_lines_meanwhile(logged) -> None:
    import threading

    logger, stream = logged
    go, done = threading.Event(), threading.Event()

    def speak():
        go.wait(30)
        logger.info("from a thread")
        done.set()

    def wait(x):
        go.set()
        done.wait(30)
        return x * 2

    thread = threading.Thread(target=speak)
    thread.start()
    tripwire.compile(wait, backend="eager")(torch.ones(2))
    thread.join()
    assert take(stream) == f"INFO {speak.__code__.co_firstlineno + 2} speak from a thread\n"


# --- bytecode ---


def test_the_texts_of_a_call_are_found() -> None:
    def tell(a, b):
        print("plain", f"{a:.1f}|{b}", end="")

    (call,) = find_calls(tell.__code__)
    (text,) = call.texts
    assert [piece if isinstance(piece, str) else type(piece) for piece in text] == [
        Field,
        "|",
        Field,
    ]


def test_calls_that_neither_print_nor_log_are_not_waited_for() -> None:
    def tell(a):
        return len(f"{a}") + int(max(f"{a}", key=print))

    assert find_calls(tell.__code__) == ()


def test_a_text_that_is_copied_on_the_stack_is_in_no_call() -> None:
    def tell(a):
        print(text := f"{a}")
        return text

    assert find_calls(tell.__code__) == ()
