"""Finds a piece of code by its syntax, and puts another in its place.

A pattern is Python: one expression, or statements that follow one another. It matches code with the
same syntax tree, so spaces, line breaks, comments and quotes do not matter. A name that begins with
``$`` stands for any expression or name, and for the same one wherever the pattern repeats it; the
replacement may use it as well. Names of local variables are written so, and may change freely. An
ellipsis as the last statement of a block stands for the rest of the block, also in the replacement.

Code in C is compared token by token, without spaces and comments. There a name with ``$`` stands
for one name or number.
"""

from __future__ import annotations

import ast
import builtins
import copy
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

PLACEHOLDER = "ANY__"  # What a `$` becomes, because names in Python have none.
REST = "..."  # The key of the statements that an ellipsis stands for.
IGNORED_FIELDS = frozenset({"ctx", "kind", "type_comment"})


class PatternError(ValueError):
    """A pattern does not match exactly once, or is no code."""


def replace_code(source: str, find: str, plant: str, within: str = "") -> str:
    """Returns a Python module's ``source`` with the one match of ``find`` replaced by ``plant``.

    Parameters
    ----------
    within
        The qualified name of a function or class, such as ``Session.commit``, to look into; the
        whole module if empty.

    Raises
    ------
    PatternError
        If there is not exactly one match, or no such function, or if the replacement uses a name
        that does not exist there: such a bug would be an accident that any test notices.
    """
    tree = ast.parse(source)
    pattern, replacement = _parse(find), _parse(plant)
    matches = list(_find_matches(_scope(tree, within), pattern))
    if len(matches) != 1:
        place = within or "the module"
        raise PatternError(f"{place} holds this {len(matches)} times, and not once: {find}")
    match = matches[0]
    _check_names(tree, match, replacement)
    match.put(replacement)
    return ast.unparse(ast.fix_missing_locations(tree))


def replace_c(source: str, find: str, plant: str) -> str:
    """Returns C ``source`` with the one match of ``find`` replaced by ``plant``."""
    tokens, pattern = list(_c_tokens(source)), [token[0] for token in _c_tokens(find)]
    spans = []
    for first in range(len(tokens) - len(pattern) + 1):
        bound: dict[str, str] = {}
        window = tokens[first : first + len(pattern)]
        if all(_same_token(p, token[0], bound) for p, token in zip(pattern, window, strict=True)):
            spans.append((window[0][1], window[-1][2], bound))
    if len(spans) != 1:
        raise PatternError(f"the file holds this {len(spans)} times, and not once: {find}")
    start, stop, bound = spans[0]
    new = re.sub(r"\$\w+", lambda name: bound[name[0]], plant)
    return source[:start] + new + source[stop:]


# -- Python ------------------------------------------------------------------------------------

Pattern = ast.expr | list[ast.stmt]
Bound = dict[str, Any]
"""What each placeholder stands for: an expression, a name, or the rest of a block."""


@dataclass
class Match:
    """A place in a tree: the owner of the field, where in its list, and how many statements."""

    owner: ast.AST
    name: str
    index: int | None = None
    count: int = 0
    bound: Bound = field(default_factory=dict)

    def put(self, replacement: Pattern) -> None:
        """Replaces what was matched."""
        if isinstance(replacement, ast.expr) and self.count:  # statements by one expression
            replacement = [ast.Expr(replacement)]
        new = _substitute(replacement, self.bound)
        if self.count:
            assert self.index is not None
            getattr(self.owner, self.name)[self.index : self.index + self.count] = new
        elif isinstance(new, list):
            raise PatternError("an expression can be replaced by an expression only")
        elif self.index is None:
            setattr(self.owner, self.name, new)
        else:
            getattr(self.owner, self.name)[self.index] = new


def _parse(text: str) -> Pattern:
    code = textwrap.dedent(text).strip().replace("$", PLACEHOLDER)
    try:
        return ast.parse(f"({code}\n)", mode="eval").body
    except SyntaxError:
        pass
    try:
        body = ast.parse(code).body
    except SyntaxError as error:
        raise PatternError(f"this is no code: {text}") from error
    return body or [ast.Pass()]


def _scope(tree: ast.Module, within: str) -> ast.AST:
    scope: ast.AST = tree
    for name in filter(None, within.split(".")):
        inner = [
            node
            for node in ast.walk(scope)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and node.name == name
        ]
        if len(inner) != 1:
            raise PatternError(f"there are {len(inner)} functions or classes {within}, and not one")
        scope = inner[0]
    return scope


def _find_matches(scope: ast.AST, pattern: Pattern) -> Iterator[Match]:
    for owner in ast.walk(scope):
        for name, value in ast.iter_fields(owner):
            if isinstance(pattern, list):
                if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                    yield from _find_statements(owner, name, value, pattern)
            else:
                places: Any = enumerate(value) if isinstance(value, list) else [(None, value)]
                for index, node in places:
                    bound: Bound = {}
                    if isinstance(node, ast.expr) and _is_same(pattern, node, bound):
                        yield Match(owner, name, index, bound=bound)


def _find_statements(
    owner: ast.AST, name: str, body: list[ast.stmt], pattern: list[ast.stmt]
) -> Iterator[Match]:
    for first in range(len(body) - len(pattern) + 1):
        bound: Bound = {}
        if _is_same(pattern, body[first : first + len(pattern)], bound):
            yield Match(owner, name, first, len(pattern), bound)


def _is_same(pattern: Any, node: Any, bound: Bound) -> bool:
    """Whether ``node`` is what ``pattern`` describes; notes in ``bound`` what placeholders are."""
    if isinstance(pattern, ast.Name) and pattern.id.startswith(PLACEHOLDER):
        return isinstance(node, ast.expr) and _bind(pattern.id, node, bound)
    if isinstance(pattern, str) and pattern.startswith(PLACEHOLDER):
        return isinstance(node, str) and _bind(pattern, node, bound)
    if isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and all(
            _is_same(value, getattr(node, name, None), bound)
            for name, value in ast.iter_fields(pattern)
            if name not in IGNORED_FIELDS
        )
    if isinstance(pattern, list):
        if not isinstance(node, list):
            return False
        if pattern and _is_rest(pattern[-1]):
            known = len(pattern) - 1
            bound[REST] = node[known:]
            return _is_same(pattern[:-1], node[:known], bound)
        return len(pattern) == len(node) and all(
            _is_same(p, n, bound) for p, n in zip(pattern, node, strict=True)
        )
    return type(pattern) is type(node) and bool(pattern == node)


def _bind(name: str, node: ast.AST | str, bound: Bound) -> bool:
    value: ast.AST | str = node.id if isinstance(node, ast.Name) else node
    return _written(bound.setdefault(name, value)) == _written(value)


def _written(value: ast.AST | str) -> str:
    return value if isinstance(value, str) else ast.unparse(value)


class _Filler(ast.NodeTransformer):
    """Puts what the placeholders stand for into a replacement."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound

    def visit(self, node: ast.AST) -> Any:
        if _is_rest(node):
            return self._value(REST)
        for name, value in ast.iter_fields(node):
            if isinstance(value, str) and value.startswith(PLACEHOLDER):
                filled = self._value(value)
                if not isinstance(filled, str):
                    return filled
                setattr(node, name, filled)
        return self.generic_visit(node)

    def _value(self, name: str) -> Any:
        if name not in self._bound:
            raise PatternError(f"the pattern has no {name.replace(PLACEHOLDER, '$')}")
        return copy.deepcopy(self._bound[name])


def _substitute(replacement: Pattern, bound: Bound) -> Any:
    """The replacement with every placeholder filled in."""
    filler = _Filler(bound)
    if isinstance(replacement, ast.expr):
        return filler.visit(copy.deepcopy(replacement))
    return filler.visit(ast.Module(copy.deepcopy(replacement), [])).body


def _is_rest(node: Any) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and node.value.value is ...
    )


def _check_names(tree: ast.Module, match: Match, replacement: Pattern) -> None:
    """Refuses a replacement with a name that is known neither in its function nor in the module."""
    new = ast.Module(replacement if isinstance(replacement, list) else [ast.Expr(replacement)], [])
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and any(inner is match.owner for inner in ast.walk(node))
    ]
    known = {*dir(builtins), *_defined_names(tree), *_defined_names(new)}
    for function in around:
        known |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        known |= _defined_names(function)
    used = {node.id for node in ast.walk(new) if isinstance(node, ast.Name)}
    unknown = sorted(name for name in used - known if not name.startswith(PLACEHOLDER))
    if unknown:
        raise PatternError(f"nothing is called {', '.join(unknown)} there")


def _defined_names(scope: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """What a module or function defines, itself or in a comprehension: not in inner functions."""
    names = set()
    queue: list[ast.AST] = [scope]
    while queue:
        node = queue.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
        inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if inner and node is not scope:
            names.add(node.name)
        else:
            queue += ast.iter_child_nodes(node)
    return names


# -- C -----------------------------------------------------------------------------------------

C_TOKEN = re.compile(
    r"""(?P<skipped>\s+|//[^\n]*|/\*.*?\*/)
      | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*'  # a string, a character
      | \$?[A-Za-z_]\w*                        # a name
      | \.?\d(?:[eEpP][+-]|[\w.])*             # a number
      | .                                      # anything else, a character at a time
    """,
    re.VERBOSE | re.DOTALL,
)


def _c_tokens(source: str) -> Iterator[tuple[str, int, int]]:
    for match in C_TOKEN.finditer(source):
        if match["skipped"] is None:
            yield match[0], match.start(), match.end()


def _same_token(pattern: str, token: str, bound: dict[str, str]) -> bool:
    if pattern.startswith("$"):
        return re.match(r"\w", token) is not None and bound.setdefault(pattern, token) == token
    return pattern == token
