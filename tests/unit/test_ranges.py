from __future__ import annotations

import ast
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tripwire.ranges import (
    find_anchor,
    format_instruction,
    format_source_range,
    to_characters,
    underline,
)


def shown(source: str) -> str:
    """An expression, underlined as a whole."""
    lines = textwrap.dedent(source).strip("\n").split("\n")
    return underline(lines, 0, len(lines[-1]))


@pytest.mark.parametrize(
    ("source", "marks"),
    [
        ("a + b", "~~^~~"),
        ("(a) ** (b)", "~~~~^^~~~~"),
        ("a//b", "~^^~"),
        ("ä @ ö", "~~^~~"),
        ("x[i]", "~^^^"),
        ("f(x)[0]", "~~~~^^^"),
        ("(m)[i][j]", "~~~~~~^^^"),
        ("f(x, y)", "~^^^^^^"),
        ("ü.f(g(1))", "~~~^^^^^^"),
        ("(f)(x)", "~~~^^^"),
        ("a if b else c", "^^^^^^^^^^^^^"),
        ("name", "^^^^"),
        ("not valid python", "^^^^^^^^^^^^^^^^"),
        ("'é' + [1, '+']", "~~~~^~~~~~~~~~"),
    ],
)
def test_the_part_that_matters_has_carets(source, marks):
    assert shown(source) == f"{source}\n{marks}\n"


def test_expressions_over_several_lines_are_marked_line_by_line():
    assert shown(
        """
        (first(
            x)  # a + comment
        ) + (
            second)
        """
    ) == textwrap.dedent(
        """\
        (first(
        ~~~~~~~
            x)  # a + comment
            ~~~~~~~~~~~~~~~~~
        ) + (
        ~~^~~
            second)
            ~~~~~~~
        """
    )
    assert shown("call(\n    a,\n    b)") == ("call(\n~~~~^\n    a,\n    ^^\n    b)\n    ^^\n")
    assert shown("a[\n  1]") == "a[\n~^\n  1]\n  ^^\n"
    assert shown("(a\n\n+ b)") == "(a\n~~\n\n\n+ b)\n^~~~\n"


def test_byte_columns_become_character_columns(tmp_path):
    path = tmp_path / "umlaut.py"
    path.write_text("größe = länge + breite\n")
    line = "größe = länge + breite"
    start = len("größe = ".encode())
    assert format_source_range(str(path), 1, 1, start, len(line.encode())) == (
        "größe = länge + breite\n        ~~~~~~^~~~~~~~\n"
    )


def test_a_range_that_isnt_known_shows_what_is():
    assert format_source_range(__file__, None) == ""
    assert format_source_range("/nowhere/at/all.py", 3) == ""
    assert format_source_range(__file__, 1) == "from __future__ import annotations"


def test_an_instruction_shows_its_expression():
    def function(x):
        return [x][5]

    try:
        function(1)
    except IndexError as error:
        frame = error.__traceback__.tb_next
        text = format_instruction(frame.tb_frame.f_code, frame.tb_lasti)
    assert text == "        return [x][5]\n               ~~~^^^\n"
    assert format_instruction(function.__code__, 10_000) == ""


@given(st.text(), st.integers(0, 50))
def test_offsets_inside_any_text_stay_inside_it(text, offset):
    assert 0 <= to_characters(text, min(offset, len(text.encode(errors="ignore")))) <= len(text)


@given(
    st.recursive(
        st.sampled_from(["a", "ß", "1", "'+'"]),
        lambda e: st.one_of(
            st.tuples(e, st.sampled_from([" + ", "**", " @\n", " # c [ (\n/ "]), e).map(
                lambda t: f"({t[0]}){t[1]}({t[2]})"
            ),
            st.tuples(e, e).map(lambda t: f"({t[0]})[{t[1]}]"),
            st.tuples(e, e).map(lambda t: f"({t[0]})({t[1]}, {t[1]})"),
        ),
        max_leaves=6,
    )
)
def test_an_anchor_is_an_operator_or_a_pair_of_brackets(source):
    try:
        tree = ast.parse(f"(\n{source}\n)", mode="eval").body
    except SyntaxError:
        return
    anchor = find_anchor(source)
    lines = source.split("\n")
    if isinstance(tree, ast.BinOp):
        assert lines[anchor.line][anchor.column : anchor.end_column] in ("+", "**", "@", "/")
    elif isinstance(tree, ast.Subscript | ast.Call):
        opening = lines[anchor.line][anchor.column]
        closing = lines[anchor.end_line][anchor.end_column - 1]
        assert opening + closing == ("[]" if isinstance(tree, ast.Subscript) else "()")
    else:
        assert anchor is None
