"""Names and arguments that only a GPU would meet: all that the repository uses exist and fit, read without running.

Read are a file's imports from this repository, the attributes of modules among them, also where a string names one
(`monkeypatch.setattr(module, "name", ...)`), calls of functions and classes, and launches of kernels. A local variable
hides a module of the same name. Not read: methods, dataclasses that have bases, arguments behind a star.
"""

import ast
import inspect
from collections.abc import Iterable, Iterator
from functools import cache
from inspect import Parameter

import pytest

from tests.test_layers import CODE, TESTS, tree

FILES = {".".join(p.with_suffix("").parts).removesuffix(".__init__"): p for p in (*CODE, *TESTS)}
MODULES = {*FILES, *(".".join(p.parts[:i]) for p in FILES.values() for i in range(1, len(p.parts)))}
OF_ANY_MODULE = {"__name__", "__file__", "__doc__", "__dict__", "__path__", "__spec__", "__all__", "__annotations__"}
OF_VALUES = {*dir(str), *dir(list), *dir(dict)}  # a name that elsewhere means a module may hold one of these
BY_STRING = {"setattr", "getattr", "hasattr", "delattr", "object"}  # the last one: mock.patch.object
LAUNCH_OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion"}
# What a module is called that is chosen when the program runs -> the modules of which it is one: a CPU sees the first.
CHOSEN = {
    **dict.fromkeys(("backend", "get_backend"), ("converters.backends.reference", "converters.backends.hopper")),
    "token_kernels": ("converters.backends.reference_tokens", "converters.kernels.tokens"),
    "ops": ("converters.rules.plain", "converters.rules.fused"),
}

Functions = ast.FunctionDef | ast.AsyncFunctionDef
Definitions = Functions | ast.ClassDef
Scopes = Definitions | ast.Lambda
parsed = cache(lambda module: tree(FILES[module]))


def inside(scope: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a scope, without those of scopes in it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, Scopes):
            yield from inside(node)


def imports(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Local name -> what was imported, by its full name."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
    return found


def made(nodes: Iterable[ast.AST]) -> list[str]:
    """Names that are assigned or defined, not imported; a name as often as it is."""
    names = [n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)]
    names += [n.name for n in nodes if isinstance(n, Definitions)]
    names += [n.arg for n in nodes if isinstance(n, ast.arg)]
    return names + [n.name for n in nodes if isinstance(n, ast.ExceptHandler) and n.name]


@cache
def contents(module: str) -> tuple[dict[str, str], list[str], dict[str, Definitions]]:
    """`imports`, `made` and definitions of a module; nothing for a folder."""
    nodes = list(inside(parsed(module))) if module in FILES else []
    return imports(nodes), made(nodes), {n.name: n for n in nodes if isinstance(n, Definitions)}


def has(module: str, name: str) -> bool:
    imported, own, _ = contents(module)
    return f"{module}.{name}" in MODULES or name in imported or name in own or name in OF_ANY_MODULE


def origin(full: str) -> str:
    """The name under which a thing was made, from one by which it was imported on."""
    module, _, name = full.rpartition(".")
    while full not in MODULES and module in FILES and name in contents(module)[0]:
        full = contents(module)[0][name]
        module, _, name = full.rpartition(".")
    return full


def parameter(name: str, default: ast.AST | None, kind: object = Parameter.POSITIONAL_OR_KEYWORD) -> Parameter:
    return Parameter(name, kind, default=Parameter.empty if default is None else default)


def arguments(function: Functions) -> list[Parameter]:
    a = function.args
    positional = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(positional) - len(a.defaults)) + a.defaults
    found = [parameter(p.arg, d) for p, d in zip(positional, defaults, strict=True)]
    found += [Parameter(a.vararg.arg, Parameter.VAR_POSITIONAL)] if a.vararg else []
    found += [parameter(p.arg, d, Parameter.KEYWORD_ONLY) for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    return found + ([Parameter(a.kwarg.arg, Parameter.VAR_KEYWORD)] if a.kwarg else [])


def fields(made_by: ast.ClassDef) -> list[Parameter] | None:
    """Arguments of a class that has an `__init__`, or is a dataclass without bases."""
    if inits := [n for n in made_by.body if isinstance(n, Functions) and n.name == "__init__"]:
        return arguments(inits[0])[1:]
    decorators = [ast.unparse(d) for d in made_by.decorator_list]
    if made_by.bases or not any(d.startswith("dataclass") for d in decorators):
        return None
    kind = Parameter.KEYWORD_ONLY if "kw_only=True" in "".join(decorators) else Parameter.POSITIONAL_OR_KEYWORD
    return [parameter(n.target.id, n.value, kind) for n in made_by.body if isinstance(n, ast.AnnAssign)]


def signature(full: str) -> inspect.Signature | None:
    """Of the function or class of that name, if the repository has one of it and it can be read."""
    module, _, name = origin(full).rpartition(".")
    _, own, definitions = contents(module)
    node = definitions.get(name) if own.count(name) == 1 else None
    found = fields(node) if isinstance(node, ast.ClassDef) else arguments(node) if node else None
    return None if found is None else inspect.Signature(found)


def misfit(called: inspect.Signature, call: ast.Call) -> str | None:
    """Why these arguments are not those that are called for, or None."""
    given = [n for n in call.args if not isinstance(n, ast.Starred)]
    named = {k.arg: None for k in call.keywords if k.arg}
    starred = len(given) + len(named) < len(call.args) + len(call.keywords)
    if isinstance(call.func, ast.Subscript):
        named = {name: None for name in named if name not in LAUNCH_OPTIONS}
    try:
        (called.bind_partial if starred else called.bind)(*given, **named)
    except TypeError as error:
        return str(error)
    return None


class Reader(ast.NodeVisitor):
    """Collects in `wrong` what a module refers to in vain."""

    def __init__(self, module: str) -> None:
        self.wrong: list[str] = []
        self.known: dict[str, str] = {}  # local name -> full name, of what the repository may have
        self.module = module

    def read(self, source: ast.Module) -> list[str]:
        own = {n.name: f"{self.module}.{n.name}" for n in inside(source) if isinstance(n, Definitions)}
        self.enter(source, own)
        return self.wrong

    def enter(self, scope: ast.AST, own: dict[str, str]) -> None:
        outer, nodes = self.known, list(inside(scope))
        hidden, imported = {*made(nodes)} - {*own}, imports(nodes)
        self.known = {name: full for name, full in (outer | own | imported).items() if name not in hidden}
        self.generic_visit(scope)
        self.known = outer

    def scope(self, node: Scopes) -> None:
        self.enter(node, {})

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = visit_ClassDef = scope

    def say(self, node: ast.AST, what: str) -> None:
        self.wrong.append(f"line {node.lineno}: {what}")

    def need(self, node: ast.AST, module: str, name: str) -> None:
        if not has(module, name):
            self.say(node, f"{module} has no {name}")

    def full(self, node: ast.AST) -> str:
        """Of what an expression names, if that is known."""
        if isinstance(node, ast.Name):
            return origin(self.known.get(node.id, ""))
        base = self.full(node.value) if isinstance(node, ast.Attribute) else ""
        return origin(f"{base}.{node.attr}") if base in MODULES else ""

    def chosen(self, node: ast.AST) -> tuple[str, ...]:
        """The modules of which an expression is one, by how it is called; in tests, names mean more than that."""
        if self.module.startswith("tests."):
            return ()
        node = node.func if isinstance(node, ast.Call) else node
        if isinstance(node, ast.Attribute) and not ast.unparse(node).startswith("torch."):
            return CHOSEN.get(node.attr, ())
        return CHOSEN.get(node.id, ()) if isinstance(node, ast.Name) and self.full(node) not in MODULES else ()

    def visit_Import(self, node: ast.Import) -> None:
        for name in (a.name for a in node.names):
            if name.split(".")[0] in MODULES and name not in MODULES:
                self.say(node, f"there is no {name}")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level:
            return  # tests/test_layers.py refuses it
        if node.module in MODULES:
            for alias in node.names:
                self.need(node, node.module, alias.name)
        elif node.module.split(".")[0] in MODULES:
            self.say(node, f"there is no {node.module}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        chosen = () if node.attr in OF_VALUES else self.chosen(node.value)
        for module in (m for m in (self.full(node.value), *chosen) if m in MODULES):
            self.need(node, module, node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func).rpartition(".")[2]
        by_string = name in BY_STRING and len(node.args) > 1 and isinstance(node.args[1], ast.Constant)
        if by_string and (module := self.full(node.args[0])) in MODULES:
            self.need(node, module, node.args[1].value)
        target = node.func.value if isinstance(node.func, ast.Subscript) else node.func
        called = [self.full(target)]
        if isinstance(target, ast.Attribute):
            called += [f"{module}.{target.attr}" for module in self.chosen(target.value)]
        for full in called:
            if (found := signature(full)) and (why := misfit(found, node)):
                self.say(node, f"{full}: {why}")
        self.generic_visit(node)


@pytest.mark.parametrize("module", FILES)
def test_names_exist_and_arguments_fit(module: str) -> None:
    assert not Reader(module).read(parsed(module))


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("from tests.converters import rule_checks\nrule_checks.CHECKS['casts']()", "rule_checks has no CHECKS"),
        ("from converters.kernels.rows import no_such", "converters.kernels.rows has no no_such"),
        ("def f():\n    import converters.kernels.no_such", "there is no converters.kernels.no_such"),
        ("from converters.kernels import rows\nrows.MAX_BLOK = 32", "converters.kernels.rows has no MAX_BLOK"),
        ("from converters.rules import fused\nsetattr(fused, 'swigluu', 0)", "converters.rules.fused has no swigluu"),
        ("backend.pow2_scale(x)", "converters.backends.hopper has no pow2_scale"),
        ("get_backend('hopper').quantize_rows(x, y)", "reference.quantize_rows: too many positional arguments"),
        ("from recipes.bench import hopper_ms\n", "recipes.bench has no hopper_ms"),
        ("from recipes import timing\ntiming.events_ms(f)", "events_ms: missing a required argument: 'calls'"),
        ("from recipes.bench_cases import Case\nCase('a', 1, 2, 3, 4, 5)", "Case: too many positional arguments"),
        ("from converters.kernels.rows import _rows_kernel as k\nk[1](*a, STRIDE=1)", "unexpected keyword argument"),
    ],
)
def test_a_reader_sees(source: str, wrong: str) -> None:
    (found,) = Reader("recipes.some").read(ast.parse(source))
    assert wrong in found


@pytest.mark.parametrize(
    "source",
    [
        "from converters.kernels import rows\ndef f(rows):\n    return rows.shape",
        "from converters.kernels import rows\n[rows.shape for rows in x]",
        "import converters.kernels.rows as r\nr.quantize_rows(x, index=None)\nr.__name__",
        "from recipes.bench import torchao_variant\ntorchao_variant(i)",  # bench imports it under this name
        "from converters.kernels.rows import _rows_kernel as k\nk[1](*a, GATHER=1, ONE_BLOCK=1, BLOCK=1, num_warps=4)",
        "import torch\ntorch.ops.titan_moe_fp8.no_such",
    ],
)
def test_a_reader_lets_pass(source: str) -> None:
    assert not Reader("recipes.some").read(ast.parse(source))
