"""The shape of the code base: who may import whom, and budgets that keep files and functions readable.

``MAY_IMPORT`` is the layering of ``docs/architecture.md`` in data. A name on the left is a module or a
package directly under ``headrace``; packages that do not exist yet cost nothing.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.config.names import FIELDS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_SETTINGS = 80

CONTRACT = frozenset({"types", "protocols", "errors", "timekeeping", "wire"})
PURE = frozenset({"algos", "data"})
WORKERS = frozenset({"engines", "envs", "scoring", "trainers", "weights", "models", "serve", "observe"})
TOP = frozenset(
    {
        "__init__",
        "__main__",
        "api",
        "build",
        "roles",
        "model_paths",
        "teaching",
        "cli",
        "cli_common",
        "demo",
        "doctor",
        "bench",
        "evaluation",
        "memory",
        "replay",
    }
)

MAY_IMPORT: dict[str, frozenset[str]] = {
    "types": frozenset(),
    "errors": frozenset(),
    "timekeeping": frozenset(),
    "protocols": frozenset({"types", "errors"}),
    "wire": frozenset({"types", "errors"}),
    "config": frozenset({"types", "errors", "algos"}),
    "run_directory": frozenset({"config", "errors"}),
    "algos": CONTRACT,
    "data": CONTRACT | {"algos"},
    **dict.fromkeys(WORKERS, CONTRACT | PURE),
    "kernels": frozenset({"errors"}),
    "engines": CONTRACT | PURE | {"models", "kernels"},
    # Kernels are leaves: they move weights, merge attention, read logits and add gradients.
    "models": CONTRACT | PURE | {"kernels"},
    "weights": CONTRACT | PURE | {"kernels"},
    "trainers": CONTRACT | PURE | {"models", "kernels"},
    "runtime": CONTRACT | PURE,
    "plan": CONTRACT | PURE | {"config", "runtime"},
    # The launcher owns the shared memory its workers pass weights through.
    "launch": CONTRACT | PURE | {"config", "runtime", "weights"},
}
# A launched process builds its own worker, but only once it runs: a launcher starts without any of them.
MAY_IMPORT_INSIDE_FUNCTIONS = {"launch": frozenset({"build"}) | WORKERS}

WITHOUT_TORCH = (
    "runtime",
    "data",
    "config",
    "observe",
    "launch",
    "plan",
    "algos.advantages",
    "engines.scripted",
)
OPTIONAL = frozenset({"datasets", "peft", "reasoning_gym", "trl", "vllm"})
PICKLING = frozenset({"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"})


@dataclass(frozen=True)
class Import:
    """One imported module, absolute, and where it stands."""

    target: str
    line: int
    inside_function: bool


def sources(root: Path = SOURCE) -> list[Path]:
    return sorted((root / "headrace").rglob("*.py"))


def module_name(path: Path, root: Path = SOURCE) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str:
    """The first name under ``headrace``: ``headrace.runtime.buffer`` is in ``runtime``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(path: Path, root: Path = SOURCE) -> Iterator[Import]:
    """Every import of a file, wherever it stands; ``from a import b`` and, after ``import headrace``,
    ``headrace.b`` count as imports of ``a.b`` and ``headrace.b``."""
    package = module_name(path, root).split(".")
    if path.name != "__init__.py":
        package = package[:-1]

    def visit(node: ast.AST, inside: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, inside)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                source = ".".join([*base, *filter(None, [child.module])])
                for alias in child.names:
                    yield Import(f"{source}.{alias.name}", child.lineno, inside)
            elif isinstance(child, ast.Attribute) and ast.unparse(child.value) == "headrace":
                yield Import(f"headrace.{child.attr}", child.lineno, inside)
            is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from visit(child, inside or is_function)

    yield from visit(ast.parse(path.read_text()), False)


def violations(root: Path = SOURCE) -> list[str]:
    """Imports between layers that the table does not allow, as ``file:line: message``."""
    found = []
    for path in sources(root):
        layer = layer_of(module_name(path, root))
        if layer in TOP:
            continue
        if layer not in MAY_IMPORT:
            found.append(f"{path.relative_to(root)}:1: the layer {layer} is not in MAY_IMPORT")
            continue
        for item in imports_of(path, root):
            package, _, name = item.target.partition(".")
            # The package itself is loaded in any case, and its version and path pull in nothing.
            if package != "headrace" or not name or name.startswith("__"):
                continue
            other = layer_of(item.target)
            allowed = MAY_IMPORT[layer] | {layer}
            if item.inside_function:
                allowed |= MAY_IMPORT_INSIDE_FUNCTIONS.get(layer, frozenset())
            if other not in allowed:
                found.append(f"{path.relative_to(root)}:{item.line}: {layer} may not import {other}")
    return found


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))


def calls(tree: ast.AST) -> Iterator[tuple[str, int]]:
    return ((ast.unparse(n.func), n.lineno) for n in ast.walk(tree) if isinstance(n, ast.Call))


def exported(tree: ast.Module) -> list[str] | None:
    """The names in a module's ``__all__``, or None when it has none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return None


def export_order(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest, as the linter sorts them too."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2), name


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_layers_import_only_what_they_may():
    assert violations() == []


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("runtime/loop.py", "from headrace.engines.scripted import X", "runtime may not import engines"),
        ("runtime/loop.py", "from ..trainers import optim", "runtime may not import trainers"),
        ("runtime/loop.py", "from headrace import config", "runtime may not import config"),
        ("runtime/loop.py", "from headrace import train", "runtime may not import train"),
        ("runtime/loop.py", "import headrace\nheadrace.train()", "runtime may not import train"),
        ("runtime/loop.py", "def f():\n    import headrace.build", "runtime may not import build"),
        ("runtime/deep/loop.py", "from ...weights import x", "runtime may not import weights"),
        ("engines/__init__.py", "from ..envs import x", "engines may not import envs"),
        ("observe/a.py", "class A:\n    async def f(self):\n        from headrace import models", "models"),
        ("types.py", "import headrace.errors", "types may not import errors"),
        ("launch/a.py", "import headrace.build", "launch may not import build"),
        ("novel/a.py", "", "the layer novel is not in MAY_IMPORT"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path, file, text, complaint):
    path = tmp_path / "headrace" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    (found,) = violations(tmp_path)
    assert complaint in found


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("engines/a.py", "from headrace.models import loading\nfrom . import b\nimport numpy"),
        ("runtime/a.py", "from headrace.data.samples import x\nfrom headrace import __version__"),
        ("launch/a.py", "def f():\n    from headrace import build\n    from headrace.weights import x"),
        ("launch/a.py", "import headrace\nroot = headrace.__file__"),
        ("build.py", "import headrace.engines, headrace.trainers"),
        ("bench/overlap.py", "import headrace.cli"),
        ("__init__.py", "from headrace.api import train"),
    ],
)
def test_an_allowed_import_is_not_complained_about(tmp_path, file, text):
    path = tmp_path / "headrace" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert violations(tmp_path) == []


def test_every_layer_of_the_table_is_known():
    names = set(MAY_IMPORT) | TOP
    assert {name for allowed in MAY_IMPORT.values() for name in allowed} <= names
    assert {"runtime", "engines", "trainers", "config"} <= {layer_of(module_name(p)) for p in sources()}


@pytest.mark.parametrize("area", WITHOUT_TORCH)
def test_the_control_plane_starts_without_torch(area):
    prefix = f"headrace.{area}"
    names = (module_name(path) for path in sources())
    # The entry point of a package runs when it is imported.
    modules = [
        name
        for name in names
        if (name == prefix or name.startswith(f"{prefix}.")) and not name.endswith("__main__")
    ]
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    found = {'torch', 'transformers'} & sys.modules.keys()\n"
        "    assert not found, f'{name} imports {found}'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=SOURCE,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_data_and_runtime_never_touch_torch_even_inside_functions():
    found = [
        f"{relative(path)}:{item.line}: {item.target}"
        for path in sources()
        if layer_of(module_name(path)) in {"data", "runtime"} or path.name == "advantages.py"
        for item in imports_of(path)
        if item.target.split(".")[0] in {"torch", "transformers"}
    ]
    assert found == []


def test_optional_packages_are_imported_only_inside_functions():
    found = [
        f"{relative(path)}:{item.line}: {item.target}"
        for path in sources()
        for item in imports_of(path)
        if item.target.split(".")[0] in OPTIONAL and not item.inside_function
    ]
    assert found == []


def test_nothing_is_pickled():
    found = []
    for path in sources():
        found += [
            f"{relative(path)}:{item.line}: {item.target}"
            for item in imports_of(path)
            if item.target.split(".")[0] in PICKLING
        ]
        found += [
            f"{relative(path)}:{line}: {name}"
            for name, line in calls(ast.parse(path.read_text()))
            if name in {"torch.load", "torch.save"}
        ]
    assert found == []


def test_no_hasattr_and_no_global_state():
    found = []
    for path in sources():
        tree = ast.parse(path.read_text())
        found += [f"{relative(path)}:{line}: {name}" for name, line in calls(tree) if name == "hasattr"]
        found += [f"{relative(path)}:{n.lineno}: global" for n in ast.walk(tree) if isinstance(n, ast.Global)]
    assert found == []


def test_files_stay_readable():
    lengths = {relative(path): len(path.read_text().splitlines()) for path in sources()}
    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_functions_stay_readable():
    lengths = {
        f"{relative(path)}:{function.lineno} {function.name}": function.end_lineno - function.lineno + 1
        for path in sources()
        for function in functions(ast.parse(path.read_text()))
        if function.end_lineno is not None
    }
    assert {name: n for name, n in lengths.items() if n > MAX_FUNCTION_LINES} == {}


def test_settings_stay_countable():
    assert len(FIELDS) <= MAX_SETTINGS


def test_every_module_says_what_it_is_for():
    modules = {relative(path): ast.parse(path.read_text()) for path in sources()}
    assert [name for name, tree in modules.items() if tree.body and not ast.get_docstring(tree)] == []


def test_sources_are_ascii():
    found = [
        f"{relative(path)}:{number}"
        for path in sources()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if not line.isascii()
    ]
    assert found == []


def test_exports_are_listed_in_order():
    found = []
    for path in sources():
        tree = ast.parse(path.read_text())
        names = exported(tree)
        has_names = any(isinstance(n, (ast.ImportFrom, ast.FunctionDef, ast.ClassDef)) for n in tree.body)
        if path.name == "__init__.py" and has_names and names is None:
            found.append(f"{relative(path)}: no __all__")
        if names is not None and (names != sorted(set(names), key=export_order)):
            found.append(f"{relative(path)}: __all__ is not sorted")
    assert found == []


def test_the_reading_order_exists():
    page = (ROOT / "docs" / "architecture.md").read_text()
    stages = re.findall(r"`([a-z_/]+)`", page.partition("## Reading order")[2])
    assert len(stages) > 10
    assert [name for name in stages if not (SOURCE / "headrace" / f"{name}.py").exists()] == []


def test_test_files_have_unique_names():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
