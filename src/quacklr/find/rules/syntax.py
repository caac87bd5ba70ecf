"""The source of what a module runs, as syntax trees that can be asked what a name or a number stands for."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from torch import nn

from quacklr.find.rules.module_source import functions

PRODUCTS = {"matmul", "einsum", "bmm", "baddbmm"}


class FunctionSource(NamedTuple):
    """The syntax tree of a function, and the module that it is called with."""

    owner: nn.Module
    function: Any
    tree: ast.AST

    def assigned(self, name: str) -> Iterator[ast.expr]:
        """The expressions that a local name stands for."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    yield from _matched(target, node.value, name)

    def number(self, node: ast.expr, depth: int = 0) -> int | None:
        """The whole number that an expression stands for, if that can be seen."""
        if isinstance(node, ast.Constant):
            return node.value if type(node.value) is int else None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            value = getattr(self.owner, node.attr, None)
            return value if type(value) is int else None
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self.number(node.operand, depth)
            return None if inner is None else -inner
        if isinstance(node, ast.BinOp):
            left, right = self.number(node.left, depth), self.number(node.right, depth)
            return None if left is None or right is None else _computed(node.op, left, right)
        if isinstance(node, ast.Name) and depth < 5:
            known = {self.number(value, depth + 1) for value in self.assigned(node.id)}
            if not known:
                value = getattr(self.function, "__globals__", {}).get(node.id)
                return value if type(value) is int else None
            return known.pop() if len(known) == 1 else None
        return None

    def sizes(self, call: ast.Call) -> list[ast.expr]:
        """The sizes that a reshape is given, as far as they are written out."""
        given: list[ast.expr] = list(call.args[1:] if name_of(call.func) == "unflatten" else call.args)
        if len(given) == 1 and isinstance(given[0], ast.Name):
            given = next(([value] for value in self.assigned(given[0].id)), given)
        while len(given) == 1 and isinstance(given[0], ast.BinOp):  # x.size()[:-1] + (heads, d)
            given = [given[0].right]
        return list(given[0].elts) if len(given) == 1 and isinstance(given[0], ast.Tuple | ast.List) else given

    def is_product(
        self, node: ast.AST, sources: Collection[FunctionSource], seen: frozenset[str] = frozenset()
    ) -> bool:
        """Whether an expression is made of a matrix product, here or where this function is called."""
        parameters = set(inspect.signature(self.function).parameters) - {"self"}
        for part in ast.walk(node):
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.MatMult):
                return not is_transposed(part.left)  # q.mT @ k is of channels with channels
            if isinstance(part, ast.Call) and name_of(part.func) in PRODUCTS:
                return not (part.args and is_transposed(part.args[0]))
            if not isinstance(part, ast.Name) or part.id in seen:
                continue
            if any(self.is_product(value, sources, seen | {part.id}) for value in self.assigned(part.id)):
                return True
            if part.id in parameters and self._is_given_a_product(sources, seen | {part.id}):
                return True
        return False

    def _is_given_a_product(self, sources: Collection[FunctionSource], seen: frozenset[str]) -> bool:
        names = {self.function.__name__} | {
            name for s in sources for name, child in s.owner.named_children() if child is self.owner
        }
        for source in sources:
            for call in (node for node in ast.walk(source.tree) if isinstance(node, ast.Call)):
                if source is not self and name_of(call.func) in names:
                    given = [*call.args, *(keyword.value for keyword in call.keywords)]
                    if any(source.is_product(each, sources, seen) for each in given):
                        return True
        return False


def sources_of(module: nn.Module) -> list[FunctionSource] | None:
    """The syntax trees of all that a module's forward runs; None if one cannot be had."""
    found = []
    for owner, function in functions(module):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):
            return None
        if function.__name__ not in ("<lambda>", getattr(tree.body[0], "name", "")):
            return None  # the file was edited after it was imported
        found.append(FunctionSource(owner, function, tree))
    return found


def _matched(target: ast.expr, value: ast.expr, name: str) -> Iterator[ast.expr]:
    if isinstance(target, ast.Name) and target.id == name:
        yield value
    elif isinstance(target, ast.Tuple | ast.List):
        if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
            for one, other in zip(target.elts, value.elts, strict=True):
                yield from _matched(one, other, name)
        else:
            for one in target.elts:
                yield from _matched(one, value, name)


def _computed(op: ast.operator, left: int, right: int) -> int | None:
    if isinstance(op, ast.Mult):
        return left * right
    if isinstance(op, ast.FloorDiv) and right:
        return left // right
    return left + right if isinstance(op, ast.Add) else left - right if isinstance(op, ast.Sub) else None


def name_of(function: ast.expr) -> str:
    """The last part of a dotted name; empty for other expressions."""
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def is_transposed(node: ast.expr) -> bool:
    """Whether the last two axes of something are swapped, as in `q.mT`."""
    called = node.func if isinstance(node, ast.Call) else node
    axes = [ast.unparse(each) for each in node.args] if isinstance(node, ast.Call) else []
    return name_of(called) in ("mT", "T") or (name_of(called) in ("transpose", "swapaxes") and {*axes} == {"-1", "-2"})
