"""What the NKI compiler would refuse and plain Python runs: a check of a kernel's source.

The simulator executes kernels as Python, so it cannot notice most of this. Sources: nki-language-guide.rst (values,
classes, control flow), migration/index.rst (what each version dropped), the reference of VirtualRegister.
"""

import ast
import inspect
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any

from nki_ops.simulator.launch import Kernel
from nki_ops.simulator.memory import NKIObject

RULES = {
    "identity": "`is` and `is not` are not supported; use == and !=",
    "keyword-only": "the `*` separator is not supported; parameters with defaults go last",
    "list-argument": "a kernel's arguments cannot be lists; use a tuple",
    "dict-key": "dictionary keys must be strings",
    "class-base": "classes in kernels derive from nl.NKIObject, or from Enum, and from nothing else",
    "value": "kernels know None, bool, 32-bit integers and floats, strings and tensors",
    "library": "library functions cannot be called inside a kernel",
    "removed": "removed from NKI; use slices or .ap",
    "statement": "not part of the kernel language",
    "register": "Python cannot see a register's value; use it as scalar_offset or loop bound only",
    "decorated": "functions that kernels call must not be decorated with nki.jit",
    "mutable-global": "kernels are cached by their arguments and must not read mutable globals",
    "deprecated": "deprecated",
}
_REMOVED = ("arange", "mgrid", "par_dim")
_DEPRECATED = {
    "affine_range": "range",
    "sequential_range": "range",
    "static_range": "range",
    "dynamic_range": "nl.fori_loop",
    "psum_fmax": "psum_bank_fmax",
    "total_available_sbuf_size": "sbuf_fmax_bytes",
} | {f"{e}_engine": f"nisa.engine.{e}" for e in ("tensor", "vector", "scalar", "gpsimd", "unknown")}
_STATEMENTS = (
    ast.Try,
    ast.TryStar,
    ast.Yield,
    ast.YieldFrom,
    ast.Await,
    ast.AsyncFunctionDef,
    ast.AsyncFor,
    ast.AsyncWith,
    ast.Import,
    ast.ImportFrom,
    ast.Global,
    ast.Nonlocal,
)
_UNKNOWN = object()
_LIBRARY_PATHS = tuple(sysconfig.get_paths()[p] for p in ("stdlib", "purelib", "platlib"))


@dataclass(frozen=True)
class Violation:
    """One place where a kernel leaves the language."""

    rule: str
    detail: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.detail}: {RULES[self.rule]}"


def check_subset(kernel: Callable) -> list[Violation]:
    """Violations in a kernel and in every Python function and class it uses, by file and line.

    Args:
        kernel: decorated or plain; its source must be at hand.
    """
    entry = kernel.function if isinstance(kernel, Kernel) else kernel
    queue: list[Any] = [entry]
    seen: set[int] = set()
    found: list[Violation] = []
    while queue:
        item = queue.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, type):
            found += _check_class(item)
            methods = [f for f in vars(item).values() if isinstance(f, FunctionType)]
            queue += [f for f in methods if f.__module__ == item.__module__]
            continue
        visitor = _Function(item, entry)
        found += visitor.found
        queue += visitor.used
    return sorted(set(found), key=lambda v: (v.file, v.line, v.rule, v.detail))


def _check_class(cls: type) -> list[Violation]:
    if set(cls.__bases__) <= {NKIObject} or issubclass(cls, Enum):
        return []
    line = inspect.getsourcelines(cls)[1]
    return [Violation("class-base", f"class {cls.__name__}", inspect.getsourcefile(cls) or "?", line)]


class _Function(ast.NodeVisitor):
    """Walks one function; collects violations, and the functions and classes to look at next."""

    def __init__(self, function: FunctionType, entry: Callable) -> None:
        self.found: list[Violation] = []
        self.used: list[Any] = []
        self.function = function
        self.home = entry.__module__.split(".")[0]
        try:
            lines, first = inspect.getsourcelines(function)
        except (OSError, TypeError):
            return  # a dataclass's own __init__ and the like have no source
        self.file, self.first = inspect.getsourcefile(function) or "?", first
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
        self.names = dict(inspect.getclosurevars(function).nonlocals) | {"__globals__": function.__globals__}
        self.registers = set(_register_names(tree))
        if isinstance(tree, ast.FunctionDef):
            self.local = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            self.local |= {a.arg for n in ast.walk(tree) if isinstance(n, ast.arguments) for a in _all_args(n)}
            self._arguments(tree, is_entry=function is entry)
            for statement in tree.body:
                self.visit(statement)

    def report(self, rule: str, node: ast.AST, detail: str) -> None:
        line = self.first + getattr(node, "lineno", 1) - 1
        self.found.append(Violation(rule, detail, self.file, line))

    def resolve(self, node: ast.AST) -> Any:
        """The object that a name or dotted name stands for before the kernel runs; _UNKNOWN for anything else."""
        if isinstance(node, ast.Name):
            if node.id in self.local:
                return _UNKNOWN
            return self.names.get(node.id, self.function.__globals__.get(node.id, _UNKNOWN))
        if isinstance(node, ast.Attribute):
            base = self.resolve(node.value)
            return getattr(base, node.attr, _UNKNOWN) if isinstance(base, (ModuleType, type)) else _UNKNOWN
        return _UNKNOWN

    def _arguments(self, tree: ast.FunctionDef, is_entry: bool) -> None:
        if tree.args.kwonlyargs:
            self.report("keyword-only", tree, f"{tree.name}(*, {tree.args.kwonlyargs[0].arg})")
        for default in tree.args.defaults if is_entry else ():
            if isinstance(default, ast.List):
                self.report("list-argument", default, ast.unparse(default))

    # ---- what is met on the way

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, _STATEMENTS):
            self.report("statement", node, type(node).__name__.lower())
        super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._arguments(node, is_entry=False)
        for statement in node.body:  # annotations and decorators are Python's
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if any(self.resolve(b) is not NKIObject for b in node.bases) or not node.bases:
            self.report("class-base", node, f"class {node.name}")

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            call = item.context_expr
            if not (isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "no_reorder"):
                self.report("statement", node, f"with {ast.unparse(call)}")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            self.report("identity", node, ast.unparse(node))
        self._no_registers(node, node.left, *node.comparators)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._no_registers(node, node.left, node.right)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self._no_registers(node.test, node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._no_registers(node.test, node.test)
        self.generic_visit(node)

    def _no_registers(self, where: ast.AST, *parts: ast.AST) -> None:
        for part in parts:
            if isinstance(part, ast.Name) and part.id in self.registers:
                self.report("register", where, ast.unparse(where))

    def visit_Dict(self, node: ast.Dict) -> None:
        for key in node.keys:
            if isinstance(key, ast.Constant) and not isinstance(key.value, str):
                self.report("dict-key", node, repr(key.value))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        wide = isinstance(value, int) and not -(2**31) <= value < 2**32
        if isinstance(value, (complex, bytes)) or wide:
            self.report("value", node, repr(value))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        base = self.resolve(node.value)
        if _is_nki(base) and node.attr in _REMOVED:
            self.report("removed", node, ast.unparse(node))
        if node.attr in _DEPRECATED and (_is_nki(base) or getattr(node.value, "attr", "") == "tile_size"):
            self.report("deprecated", node, f"{ast.unparse(node)}, use {_DEPRECATED[node.attr]}")
        elif not _is_nki(base):
            self._follow(node)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            if isinstance(self.resolve(node), (list, dict, set)):
                self.report("mutable-global", node, node.id)
            self._follow(node)

    def visit_Call(self, node: ast.Call) -> None:
        target = self.resolve(node.func)
        root = node.func
        while isinstance(root, ast.Attribute):
            root = root.value
        module = self.resolve(root)
        if isinstance(target, Kernel):
            self.report("decorated", node, ast.unparse(node.func))
        elif isinstance(module, ModuleType) and not _is_nki(module) and not isinstance(target, FunctionType):
            self.report("library", node, ast.unparse(node.func))
        elif isinstance(target, FunctionType) and self._is_library(target):
            self.report("library", node, ast.unparse(node.func))
        if any(k.arg == "mask" for k in node.keywords) and _is_nki(module):
            self.report("removed", node, f"{ast.unparse(node.func)}(mask=)")
        if isinstance(node.func, ast.Name) and node.func.id in ("range", "int", "float", "bool"):
            self._no_registers(node, *node.args)
        self.generic_visit(node)

    def _follow(self, node: ast.AST) -> None:
        """Queues a user's function or class."""
        target = self.resolve(node)
        if isinstance(target, (FunctionType, type)) and not _is_nki(inspect.getmodule(target)):
            if not self._is_library(target):
                self.used.append(target)

    def _is_library(self, target: Any) -> bool:
        """Whether a function or class is neither NKI's nor the user's: Python's own, or another package's."""
        module = inspect.getmodule(target)
        if module is not None and (_is_nki(module) or module.__name__.split(".")[0] == self.home):
            return False
        path = getattr(module, "__file__", None)
        return path is None or path.startswith(_LIBRARY_PATHS)


def _is_nki(module: Any) -> bool:
    """Whether a module belongs to NKI, the simulator's or the real one."""
    name = getattr(module, "__name__", "") if isinstance(module, ModuleType) else ""
    return name == "nki" or name.startswith(("nki.", "nki_ops.simulator"))


def _all_args(arguments: ast.arguments) -> Iterator[ast.arg]:
    yield from arguments.posonlyargs + arguments.args + arguments.kwonlyargs
    yield from (a for a in (arguments.vararg, arguments.kwarg) if a is not None)


def _register_names(tree: ast.AST) -> Iterator[str]:
    """Names that hold registers: results of register_alloc, and parameters of loop bodies."""
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _call_name(node.value) == "register_alloc":
            yield from (t.id for t in node.targets if isinstance(t, ast.Name))
        if (
            isinstance(node, ast.For)
            and _call_name(node.iter) == "dynamic_range"
            and isinstance(node.target, ast.Name)
        ):
            yield node.target.id
        if isinstance(node, ast.Call) and _call_name(node) in ("fori_loop", "while_loop"):
            for body in node.args:
                if isinstance(body, ast.Name) and body.id in functions:
                    yield from (a.arg for a in functions[body.id].args.args[:1])
                if isinstance(body, ast.Lambda):
                    yield from (a.arg for a in body.args.args[:1])


def _call_name(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))
