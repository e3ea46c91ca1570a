"""The shape of the tree: who may import whom, and that nothing but workers loads torch."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBS, SERVICES, KERNELS = ROOT / "libs", ROOT / "services", ROOT / "kernels"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SERVICE_NAMES = ("gateway", "tokenizer", "router", "prefill", "decode", "kvstore", "metrics", "batch")
LIGHT = (
    "baton.cli.main",
    "baton.placement",
    "baton.engine",
    "baton.protocol",
    "baton.bus.directory",
    "baton.kvcache",
    "baton.text",
    "baton.worker",
    "baton.models.gguf",
    "baton.models.catalogue",
    "baton.runner.create",
    "baton.runner.mock",
)
PURE = ("baton.engine", "baton.placement", "baton.protocol")
IMPURE = {"asyncio", "nats", "time", "torch", "baton.bus"}


def _loaded(*modules: str) -> set[str]:
    """All modules in a fresh interpreter once these are imported."""
    code = "".join(f"import {module}\n" for module in modules) + "import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    """(module name, file) of every module below a source root."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def _imports(module: str, path: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it, but not what is only for type checkers."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (
                resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module
            )
            assert base is not None
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def test_every_service_has_its_entry_point() -> None:
    declared = PROJECT["entry-points"]["baton.services"]
    assert declared == {name: f"baton_services.{name}.main:serve" for name in SERVICE_NAMES}


@pytest.mark.parametrize("name", SERVICE_NAMES)
def test_a_service_loads_neither_torch_nor_tracing(name: str) -> None:
    loaded = _loaded(f"baton_services.{name}.main")
    assert "torch" not in loaded
    assert not [one for one in loaded if _within(one, "opentelemetry", "transformers")]


@pytest.mark.parametrize("name", ["prefill", "decode", "tokenizer", "router"])
def test_what_must_be_back_soon_loads_no_http(name: str) -> None:
    assert "aiohttp" not in _loaded(f"baton_services.{name}.main")


def test_what_is_light_loads_no_torch() -> None:
    assert "torch" not in _loaded(*LIGHT)


def test_the_mock_engine_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from baton.config.load import load\n"
        "from baton.runner.create import create\n"
        "create(load(None, {'BATON_WORKER_ENGINE': 'mock', 'BATON_MODEL_NAME': 'mock'}, {}))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_imports_point_one_way() -> None:
    wrong = []
    for module, path in (*_files(LIBS), *_files(KERNELS), *_files(SERVICES)):
        own_service = ".".join(module.split(".")[:2])
        for imported in _imports(module, path):
            if _within(module, "baton_kernels"):
                ok = not _within(imported, "baton", "baton_services")
            elif _within(module, "baton"):
                ok = not _within(imported, "baton_services")
            else:
                ok = not _within(imported, "baton_services") or _within(imported, own_service)
            if not ok:
                wrong.append(f"{module} imports {imported}")
    assert not wrong


def test_only_runner_models_and_kernels_name_torch() -> None:
    allowed = ("baton.runner", "baton.models", "baton_kernels")
    wrong = [
        f"{module} imports {imported}"
        for module, path in (*_files(LIBS), *_files(SERVICES))
        for imported in _imports(module, path)
        if _within(imported, "torch") and not _within(module, *allowed)
    ]
    assert not wrong


def test_what_is_pure_stays_pure() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, path in _files(LIBS)
        if _within(module, *PURE)
        for imported in _imports(module, path)
        if _within(imported, *IMPURE)
    ]
    assert not wrong


def test_no_circles_between_packages() -> None:
    graph: dict[str, set[str]] = {}
    for module, path in _files(LIBS):
        package = ".".join(module.split(".")[:2])
        for imported in _imports(module, path):
            other = ".".join(imported.split(".")[:2])
            if _within(imported, "baton") and other != package and (LIBS / other.replace(".", "/")).is_dir():
                graph.setdefault(package, set()).add(other)
    settled: set[str] = set()
    while free := {
        name for name in {*graph}.union(*graph.values()) - settled if graph.get(name, set()) <= settled
    }:
        settled |= free
    circle = {name: sorted(graph[name] - settled) for name in graph.keys() - settled}
    assert not circle
