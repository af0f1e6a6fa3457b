"""Small faults that can be put into a module: one changed node of its syntax tree each."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(), ast.LtE: ast.Lt(), ast.Gt: ast.GtE(), ast.GtE: ast.Gt(), ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(), ast.Is: ast.IsNot(), ast.IsNot: ast.Is(), ast.In: ast.NotIn(), ast.NotIn: ast.In(),
}  # fmt: skip
OPERATORS: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(), ast.Sub: ast.Add(), ast.Mult: ast.Add(), ast.FloorDiv: ast.Mult(), ast.Div: ast.Mult(),
    ast.Mod: ast.FloorDiv(), ast.BitOr: ast.BitAnd(), ast.BitAnd: ast.BitOr(),
}  # fmt: skip
# Calls whose absence changes no behaviour but a log line.
SILENT = ("log.", "self._log", "structlog.", "request_logger(")


@dataclass(frozen=True)
class SmallFault:
    """One replaced stretch of a file's text."""

    path: str
    line: int
    start: int  # offset in the file
    end: int
    before: str
    after: str
    code: str = ""  # the line, by which a fault is known when lines above it move

    def apply(self, text: str) -> str:
        return text[: self.start] + self.after + text[self.end :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {one_line(self.before)} -> {one_line(self.after)}"


def one_line(text: str) -> str:
    return " ".join(text.split())


def faults_of(path: str, root: Path) -> list[SmallFault]:
    """Every fault that can be put into a file."""
    text = (root / path).read_text(encoding="utf-8")
    starts, lines = [0], text.splitlines(keepends=True)
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    data, found = text.encode(), []
    for node, changed in _changes(ast.parse(text)):
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        before = data[start:end].decode()
        first, last = len(data[:start].decode()), len(data[:end].decode())
        after = changed if isinstance(changed, str) else f"({ast.unparse(changed)})"
        code = lines[node.lineno - 1].strip()
        found.append(SmallFault(path, node.lineno, first, last, before, after, code))
    return found


def _changes(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr | str]]:
    for node in _code(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
            yield node, ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]], node.comparators)
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not _is_text(node):
            yield node, ast.BinOp(node.left, OPERATORS[type(node.op)], node.right)
        elif isinstance(node, ast.BoolOp):
            yield node, ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, node.operand
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, repr(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield node, repr(node.value + 1)
        elif isinstance(node, ast.IfExp):
            yield node, ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if not ast.unparse(node.value.func).startswith(SILENT):
                yield node, "pass"
        elif isinstance(node, ast.AugAssign):
            yield node, "pass"
        elif isinstance(node, ast.Continue):
            yield node, "break"
        elif isinstance(node, ast.Break):
            yield node, "continue"
        elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
            yield node, "return None"


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(side, ast.JoinedStr) or _is_string(side) for side in (node.left, node.right))


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """What runs: no annotations, assertions (`strict=True` is one), messages of errors or log lines, nothing for type
    checkers alone, nothing of a class's making (`frozen`, `slots`, `gc`)."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        if name == "keywords" and isinstance(node, ast.ClassDef):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, (ast.Assert, ast.Raise, ast.JoinedStr)):
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.ClassDef) and "Protocol" in {ast.unparse(base) for base in child.bases}:
                continue
            if isinstance(child, ast.Call) and ast.unparse(child.func).startswith(SILENT):
                continue
            if isinstance(child, ast.keyword) and child.arg == "strict":
                continue
            yield child
            yield from _code(child)
