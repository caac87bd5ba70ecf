"""Syntax trees of the functions that a module's forward runs, with the values of names and integers in them."""

from __future__ import annotations

import ast
import inspect
import operator
import textwrap
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from torch import nn

from quacklr.find.tables.module_source import reachable_functions

PRODUCTS = {"matmul", "einsum", "bmm", "baddbmm"}
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
}


class FunctionSource(NamedTuple):
    """The syntax tree of a function, and the module that is `self` in it."""

    owner: nn.Module
    function: Any
    tree: ast.AST

    def calls(self) -> Iterator[ast.Call]:
        """All calls in the function."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))

    def assigned(self, name: str) -> Iterator[ast.expr]:
        """The expressions that are assigned to a local name."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    yield from _values_for(target, node.value, name)

    def int_value(self, node: ast.expr, depth: int = 0) -> int | None:
        """The integer that an expression evaluates to; None if the source does not show it."""
        value: Any = None
        match node:
            case ast.Constant():
                value = node.value
            case ast.Attribute(value=ast.Name(id="self")):
                value = getattr(self.owner, node.attr, None)
            case ast.UnaryOp(op=ast.USub()):
                inner = self.int_value(node.operand, depth)
                value = None if inner is None else -inner
            case ast.BinOp():
                left, right = self.int_value(node.left, depth), self.int_value(node.right, depth)
                compute = OPERATORS.get(type(node.op))
                if compute and left is not None and right is not None and (right or compute is not operator.floordiv):
                    value = compute(left, right)
            case ast.Name() if depth < 5:
                if known := {self.int_value(each, depth + 1) for each in self.assigned(node.id)}:
                    value = known.pop() if len(known) == 1 else None
                else:
                    value = getattr(self.function, "__globals__", {}).get(node.id)
        return value if type(value) is int else None

    def reshape_sizes(self, call: ast.Call) -> list[ast.expr]:
        """The sizes passed to a view, reshape or unflatten, as far as the source lists them."""
        given: list[ast.expr] = list(call.args[1:] if name_of(call.func) == "unflatten" else call.args)
        if len(given) == 1 and isinstance(given[0], ast.Name):
            given = next(([value] for value in self.assigned(given[0].id)), given)
        while len(given) == 1 and isinstance(given[0], ast.BinOp):  # x.size()[:-1] + (heads, d)
            given = [given[0].right]
        return list(given[0].elts) if len(given) == 1 and isinstance(given[0], ast.Tuple | ast.List) else given

    def is_product(
        self, node: ast.AST, sources: Collection[FunctionSource], seen: frozenset[str] = frozenset()
    ) -> bool:
        """Whether an expression is computed from a matrix product, in this function or in one that calls it."""
        parameters = set(inspect.signature(self.function).parameters) - {"self"}
        for part in ast.walk(node):
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.MatMult):
                return not is_transposed(part.left)  # q.mT @ k sums over tokens
            if isinstance(part, ast.Call) and name_of(part.func) in PRODUCTS:
                return not (part.args and is_transposed(part.args[0]))
            if not isinstance(part, ast.Name) or part.id in seen:
                continue
            if any(self.is_product(value, sources, seen | {part.id}) for value in self.assigned(part.id)):
                return True
            if part.id in parameters and self._receives_product(sources, seen | {part.id}):
                return True
        return False

    def _receives_product(self, sources: Collection[FunctionSource], seen: frozenset[str]) -> bool:
        """Whether a caller passes a matrix product to this function."""
        names = {name for s in sources for name, child in s.owner.named_children() if child is self.owner}
        return any(
            source.is_product(argument, sources, seen)
            for source in sources
            if source is not self
            for call in source.calls()
            if name_of(call.func) in {self.function.__name__, *names}
            for argument in [*call.args, *(keyword.value for keyword in call.keywords)]
        )


def function_sources(module: nn.Module) -> list[FunctionSource]:
    """The syntax trees of all functions that a module's forward can reach; empty if the source of one is missing."""
    found = []
    for owner, function in reachable_functions(module):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):
            return []
        if function.__name__ not in ("<lambda>", getattr(tree.body[0], "name", "")):
            return []  # the file was edited after it was imported
        found.append(FunctionSource(owner, function, tree))
    return found


def _values_for(target: ast.expr, value: ast.expr, name: str) -> Iterator[ast.expr]:
    """The parts of an assigned value that the name receives, also if the target is a tuple."""
    if isinstance(target, ast.Name) and target.id == name:
        yield value
    elif isinstance(target, ast.Tuple | ast.List):
        paired = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
        for i, each in enumerate(target.elts):
            yield from _values_for(each, value.elts[i] if paired and isinstance(value, ast.Tuple) else value, name)


def name_of(node: ast.expr) -> str:
    """The last part of a dotted name; empty for other expressions."""
    return getattr(node, "attr", getattr(node, "id", ""))


def is_transposed(node: ast.expr) -> bool:
    """Whether an expression swaps the last two axes of a tensor, as `q.mT` does."""
    called = node.func if isinstance(node, ast.Call) else node
    axes = [ast.unparse(each) for each in node.args] if isinstance(node, ast.Call) else []
    return name_of(called) in ("mT", "T") or (name_of(called) in ("transpose", "swapaxes") and {*axes} == {"-1", "-2"})
