"""Claims about the patterns that planted bugs are found by."""

from __future__ import annotations

import ast

import pytest
from patterns import PatternError, replace_c, replace_code

SOURCE = '''
LIMIT = 4

def clip(values, least):
    """Text that does not matter."""
    kept = [max(value, least)  # a comment
            for value in values]
    if len(kept) > LIMIT:
        kept.pop()
        kept.sort()
    return kept

class Clipper:
    def clip(self, values):
        return [max(value, 0) for value in values]
'''


def _same(left: str, right: str) -> bool:
    return ast.dump(ast.parse(left)) == ast.dump(ast.parse(right))


def test_layout_comments_and_local_names_do_not_matter():
    """Claim: a bug fits the code however it is laid out and whatever its local variables are."""
    find, plant = "[max($each, $floor) for $each in $all]", "[min($each, $floor) for $each in $all]"
    new = replace_code(SOURCE, find, plant, "Clipper.clip")
    assert _same(new, SOURCE.replace("max(value, 0)", "min(value, 0)"))


def test_a_pattern_has_to_match_exactly_once():
    """Claim: no match and two matches are errors, and a function tells two apart."""
    with pytest.raises(PatternError, match="0 times"):
        replace_code(SOURCE, "max($value, 7)", "0")
    with pytest.raises(PatternError, match="2 times"):
        replace_code(SOURCE, "max($value, $least)", "0")
    with pytest.raises(PatternError, match="0 functions"):
        replace_code(SOURCE, "max($value, $least)", "0", "Clipper.cut")
    with pytest.raises(PatternError, match="2 functions"):
        replace_code(SOURCE, "max($value, $least)", "0", "clip")


def test_one_placeholder_is_one_thing():
    """Claim: a placeholder that is used twice matches only where both places are alike."""
    assert "same" in replace_code("a = b + b\nc = d + e", "$x + $x", "'same'")
    with pytest.raises(PatternError, match="0 times"):
        replace_code("c = d + e", "$x + $x", "0")


def test_statements_and_the_rest_of_a_block():
    """Claim: statements are replaced within their block, and an ellipsis keeps what follows."""
    new = replace_code(SOURCE, "if len($kept) > LIMIT:\n    ...", "if False:\n    ...")
    assert _same(new, SOURCE.replace("len(kept) > LIMIT", "False"))
    new = replace_code(SOURCE, "if $full:\n    $kept.pop()\n    ...", "if $full:\n    ...")
    assert _same(new, SOURCE.replace("        kept.pop()\n", ""))
    new = replace_code(SOURCE, "$kept.sort()", "None")
    assert _same(new, SOURCE.replace("kept.sort()", "None"))


def test_an_unknown_name_in_a_replacement_is_an_error():
    """Claim: a bug that would be a NameError is refused: any test notices it, which proves nothing.
    Names of the function, the module and Python are fine."""
    for known in ("values", "LIMIT", "Clipper", "sorted(kept)", "[x for x in values]"):
        replace_code(SOURCE, "$kept.pop()", known)
    for unknown in ("valeus", "self", "[x for x in y]", "$other"):
        with pytest.raises(PatternError):
            replace_code(SOURCE, "$kept.pop()", unknown)


def test_c_is_compared_token_by_token():
    """Claim: in C, spaces and comments do not matter, and a placeholder is one name or number."""
    source = 'a = b[i] /* old */ *   2;  // twice\nputs("a = b[i] * 2;");'
    assert replace_c(source, "$to = $from[$at] * 2;", "$to = $from[$at];").startswith(
        "a = b[i];  //"
    )
    with pytest.raises(PatternError, match="0 times"):
        replace_c(source, "a = b[i] * 3;", "")
