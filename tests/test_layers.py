"""The layer rule: which package may import what, read from the syntax tree, and what an import really loads.

``violations`` judges the text of one file, lazy imports and literal ``import_module`` calls included. What it cannot
see (an import pulled in by a permitted one) the second half of this file catches, importing in a fresh interpreter.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
STDLIB = sys.stdlib_module_names


class Layer(NamedTuple):
    """May import the top-level packages in ``allowed`` (None: any), but no module at or below a name in ``denied``."""

    allowed: frozenset[str] | None
    denied: frozenset[str]


ABOVE = frozenset(
    {"asyncsched.cli", "asyncsched.plotting", "asyncsched.plotting_fleet", "asyncsched.plotting_runs", "asyncsched.LLM"}
)  # what stands on the layers below

# The first prefix that matches a path decides.
LAYERS = {
    "asyncsched/cli/": Layer(None, frozenset({"matplotlib"})),
    "asyncsched/plotting": Layer(None, frozenset()),
    "asyncsched/": Layer(STDLIB | {"numpy", "asyncsched"}, ABOVE),
    "sim/": Layer(STDLIB | {"numpy", "simpy", "pydantic", "joblib", "asyncsched", "sim"}, ABOVE),
    "executors/": Layer(
        STDLIB | {"numpy", "torch", "transformers", "huggingface_hub", "triton", "asyncsched", "executors"}, ABOVE
    ),
}


def violations(path: str, source: str) -> list[str]:
    """The imports in ``source`` that its layer forbids, each as ``path:line: imports name``.

    ``path`` is relative to the project root, with forward slashes; it decides the layer.
    """
    tree = ast.parse(source)
    layer = next(layer for prefix, layer in LAYERS.items() if path.startswith(prefix))
    package = path.split("/")[:-1]
    lazy_llm = _module_getattr(tree) if path == "asyncsched/__init__.py" else set()
    return [
        f"{path}:{node.lineno}: imports {name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)
        for name in _imported(node, package)
        if not _permitted(name, layer) and not (node in lazy_llm and _at_or_below(name, "executors"))
    ]


def _permitted(name: str, layer: Layer) -> bool:
    inside = layer.allowed is None or name.split(".")[0] in layer.allowed
    return inside and not any(_at_or_below(name, denied) for denied in layer.denied)


def _at_or_below(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def _imported(node: ast.Import | ast.ImportFrom | ast.Call, package: list[str]) -> Iterator[str]:
    """Absolute dotted names that ``node``, found in a module of ``package``, imports."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            base = package[: len(package) - level + 1] if level else []
            yield from (".".join([*base, *([module] if module else []), alias.name]) for alias in names)
        case ast.Call(
            func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            yield name


def _module_getattr(tree: ast.Module) -> set[ast.AST]:
    """All nodes inside the module-level ``__getattr__``: the one place where the core may reach for ``executors``."""
    hooks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "__getattr__"]
    return {node for hook in hooks for node in ast.walk(hook)}


@pytest.mark.parametrize("top", ["asyncsched", "sim", "executors"])
def test_every_file_keeps_to_its_layer(top: str) -> None:
    paths = sorted((ROOT / top).rglob("*.py"))
    assert paths
    found = [line for path in paths for line in violations(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    ("path", "source", "name"),
    [
        ("asyncsched/scheduler.py", "import torch", "torch"),
        ("asyncsched/scheduler.py", "import os, simpy.events as events", "simpy.events"),
        ("asyncsched/scheduler.py", "def plan():\n    from pydantic import BaseModel", "pydantic.BaseModel"),
        ("asyncsched/scheduler.py", "class A:\n    def b(self):\n        import sim.costs", "sim.costs"),
        ("asyncsched/scheduler.py", "if TYPE_CHECKING:\n    import executors", "executors"),
        ("asyncsched/scheduler.py", "try:\n    import torch\nexcept ImportError:\n    pass", "torch"),
        ("asyncsched/scheduler.py", "import importlib\nimportlib.import_module('torch.cuda')", "torch.cuda"),
        ("asyncsched/scheduler.py", "__import__('simpy')", "simpy"),
        ("asyncsched/scheduler.py", "from asyncsched import cli", "asyncsched.cli"),
        ("asyncsched/scheduler.py", "from asyncsched.cli import main", "asyncsched.cli.main"),
        ("asyncsched/scheduler.py", "from . import plotting", "asyncsched.plotting"),
        ("asyncsched/scheduler.py", "from .plotting import draw", "asyncsched.plotting.draw"),
        ("asyncsched/scheduler.py", "def llm():\n    from asyncsched import LLM", "asyncsched.LLM"),
        ("asyncsched/deep/er.py", "from ..cli import main", "asyncsched.cli.main"),
        ("asyncsched/cli/main.py", "def plot():\n    import matplotlib.pyplot", "matplotlib.pyplot"),
        ("sim/engine.py", "def run():\n    import torch", "torch"),
        ("sim/engine.py", "from executors import cuda", "executors.cuda"),
        ("sim/engine.py", "from rich.progress import Progress", "rich.progress.Progress"),
        ("sim/engine.py", "from asyncsched import plotting", "asyncsched.plotting"),
        ("executors/cuda.py", "from sim.costs import Roofline", "sim.costs.Roofline"),
        ("executors/cuda.py", "import simpy", "simpy"),
    ],
)
def test_a_planted_violation_is_found(path: str, source: str, name: str) -> None:
    (found,) = violations(path, source)
    assert found.startswith(f"{path}:")
    assert found.endswith(f": imports {name}")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("asyncsched/scheduler.py", "import os.path\nimport numpy as np\nfrom asyncsched.plan import StepPlan"),
        ("asyncsched/scheduler.py", "from . import plan\nfrom .client import x\nfrom asyncsched import client"),
        ("asyncsched/policy.py", "import importlib\nimportlib.import_module(name)"),
        ("asyncsched/cli/main.py", "import typer\nfrom sim import run\nfrom ..plotting import draw\nimport executors"),
        ("asyncsched/plotting.py", "def draw():\n    import matplotlib.pyplot"),
        (
            "sim/engine.py",
            "import simpy, pydantic, joblib, numpy\nfrom asyncsched.plan import StepPlan\nfrom .costs import x",
        ),
        (
            "executors/cuda.py",
            "import torch, transformers, numpy\nfrom asyncsched.program import Lane\nfrom . import cpu",
        ),
    ],
)
def test_a_permitted_import_is_not_found(path: str, source: str) -> None:
    assert violations(path, source) == []


LAZY_LLM = "def __getattr__(name):\n    from {module} import LLM\n    return LLM"


def test_the_lazy_llm_attribute_is_the_one_exception() -> None:
    init = "asyncsched/__init__.py"
    assert violations(init, LAZY_LLM.format(module="executors")) == []
    assert violations(init, LAZY_LLM.format(module="executors.llm")) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("asyncsched/__init__.py", "from executors import LLM"),
        ("asyncsched/__init__.py", "def load(name):\n    from executors import LLM"),
        ("asyncsched/__init__.py", "class A:\n    def __getattr__(self, name):\n        from executors import LLM"),
        ("asyncsched/__init__.py", LAZY_LLM.format(module="torch")),
        ("asyncsched/__init__.py", LAZY_LLM.format(module="sim")),
        ("asyncsched/engine.py", LAZY_LLM.format(module="executors")),
        ("sim/__init__.py", LAZY_LLM.format(module="executors")),
    ],
)
def test_the_exception_is_no_wider(path: str, source: str) -> None:
    assert len(violations(path, source)) == 1


# Runs in a fresh interpreter: imports argv[1], prints each attempt to import one of the rest. An attempt counts even
# where the package is not installed, so a machine without torch tests the same thing.
WATCH = """
import importlib, sys

class Watch:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in sys.argv[2:]:
            print(name)

sys.meta_path.insert(0, Watch)
importlib.import_module(sys.argv[1])
"""


def attempted(module: str, *watched: str) -> list[str]:
    """Those of the ``watched`` top-level packages that ``import module`` tries to import."""
    command = [sys.executable, "-c", WATCH, module, *watched]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("asyncsched", ["torch", "transformers", "simpy", "pydantic", "matplotlib", "executors", "sim"]),
        ("sim", ["torch", "transformers", "matplotlib", "executors"]),
        ("asyncsched.cli", ["torch", "transformers", "matplotlib", "executors"]),
        ("asyncsched.plotting", ["torch", "transformers", "matplotlib", "executors"]),
    ],
)
def test_an_import_loads_nothing_heavy(module: str, heavy: list[str]) -> None:
    assert attempted(module, *heavy) == []


def test_a_heavy_import_is_noticed() -> None:
    assert attempted("simpy", "simpy", "torch") == ["simpy"]
