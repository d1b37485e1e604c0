"""The rules of the tree that no reviewer should have to check by hand."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path for package in ("edge_client", "coordinator") for path in (ROOT / package).rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
SDK = [path for path in FILES if path.is_relative_to(ROOT / "edge_client")]

# A module may import from its own layer and from those below it (style.md). What is above, it does not know.
LAYERS = [
    {"errors", "params", "records", "durable", "faults", "logs", "files", "run_file"},
    {"models", "wire", "knowledge", "data", "task", "task_files"},
    {"planning", "training", "run_model", "onnx_file", "onnx_probe", "onnx_export", "predictions"},
    {"methods"},
    {"device", "transport", "session", "assignment", "blobs", "identity", "connection", "spool", "workers"}
    | {"allowance", "notes", "apart", "calibration", "rehearsal", "trial", "unit_costs", "fitting"}
    | {"found_data", "owner_file", "status", "supervisor", "systemd", "service_unit", "doctor", "tryout", "privacy"}
    | {"received", "deployed", "deploying"},
    {"daemon", "worker", "leaving", "plan_options", "plan_command", "bench_command", "bench_plot", "infer_command"}
    | {"onnx_infer", "personal", "device_checks", "device_service", "sandbox", "service_commands", "service_install"}
    | {"self_test", "cli", "client", "__main__"},
]
# planning and training need the measured memory of this process, device needs nothing but leaves
LEAVES = {"device"}
LIGHT = [
    "edge_client",
    "edge_client.cli.main",
    "edge_client.client.daemon",
    "edge_client.client.session",
    "coordinator.server.service",
    "coordinator.cli.main",
]
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {("torch", "load"), ("torch", "save"), ("torch", "compile")}
FORBIDDEN_PREFIXES = ("torch.optim", "torch.utils.checkpoint")  # they load dynamo: 68 MB


def short(path: Path) -> str:
    """The name of a case."""
    return str(path.relative_to(ROOT))


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Every module that is named in an import, at any depth, as `package.module` or `package.module.name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(module: str) -> str | None:
    """`edge_client.wire.topics` -> `wire`; None outside of the SDK."""
    names = module.split(".")
    return names[1] if names[0] == "edge_client" and len(names) > 1 else None


def layer_of(part: str) -> int | None:
    return next((i for i, parts in enumerate(LAYERS) if part in parts), None)


@pytest.mark.parametrize("path", SDK, ids=short)
def test_the_sdk_does_not_know_the_coordinator(path: Path) -> None:
    """A device installs no coordinator."""
    assert [name for name in imports_of(TREES[path]) if name.split(".")[0] == "coordinator"] == []


@pytest.mark.parametrize("path", SDK, ids=short)
def test_imports_go_down_the_layers(path: Path) -> None:
    """Nobody knows what is built on it, so every part can be read without the parts above it."""
    relative = path.relative_to(ROOT / "edge_client")
    part = relative.parts[0].removesuffix(".py")
    if part == "__init__":
        return
    mine = layer_of(part)
    assert mine is not None, f"{part} has no layer; add it to LAYERS"
    wanted = {part_of(name) for name in imports_of(TREES[path])} - {None, part} - LEAVES
    too_high = [name for name in wanted if name and (layer := layer_of(name)) is not None and layer > mine]
    assert too_high == []


@pytest.mark.parametrize("path", [path for path in SDK if path.parent.name == "device"], ids=short)
def test_device_stays_a_leaf(path: Path) -> None:
    """Everybody may import it because it imports only itself, errors, records and files."""
    wanted = {part_of(name) for name in imports_of(TREES[path])} - {None}
    assert wanted <= {"device", "errors", "records", "files", "durable", "faults"}


@pytest.mark.parametrize("path", FILES, ids=short)
def test_only_the_mqtt_transport_knows_paho(path: Path) -> None:
    """Another client library would change these two files."""
    if path not in (ROOT / "edge_client/transport/mqtt.py", ROOT / "edge_client/transport/mqtt_client.py"):
        assert [name for name in imports_of(TREES[path]) if name.split(".")[0] == "paho"] == []


@pytest.mark.parametrize("path", FILES, ids=short)
def test_nothing_runs_code_from_data(path: Path) -> None:
    """No pickle in any form, no eval, no torch.load; and nothing that loads torch's compiler."""
    found = [name for name in imports_of(TREES[path]) if name.split(".")[0] in FORBIDDEN_MODULES]
    found += [name for name in imports_of(TREES[path]) if name.startswith(FORBIDDEN_PREFIXES)]
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            found.append(node.func.id)
        if isinstance(node, ast.Call) and any(keyword.arg == "allow_pickle" for keyword in node.keywords):
            (value,) = (keyword.value for keyword in node.keywords if keyword.arg == "allow_pickle")
            if not (isinstance(value, ast.Constant) and value.value is False):
                found.append("allow_pickle")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found += [f"{a}.{b}" for a, b in FORBIDDEN_ATTRIBUTES if (a, b) == (node.value.id, node.attr)]
            found += ["torch.optim"] if (node.value.id, node.attr) == ("torch", "optim") else []
    assert found == []


@pytest.mark.parametrize("path", FILES, ids=short)
def test_only_tasks_are_run_from_files(path: Path) -> None:
    """A task's file, which its owner named, is the one thing that becomes code; nobody else loads modules by path."""
    loaders = {"exec_module", "load_module", "spec_from_file_location", "run_path", "run_module", "SourceFileLoader"}
    attributes = {node.attr for node in ast.walk(TREES[path]) if isinstance(node, ast.Attribute)}
    imported = {name.split(".")[-1] for name in imports_of(TREES[path])}
    if path != ROOT / "edge_client/task/task.py":
        assert (attributes | imported) & loaders == set()


@pytest.mark.parametrize("path", FILES, ids=short)
def test_errors_are_caught_by_name(path: Path) -> None:
    """`except Exception` hides bugs; `except:` hides the end of the process as well."""
    handlers = [node for node in ast.walk(TREES[path]) if isinstance(node, ast.ExceptHandler)]
    names = [ast.unparse(handler.type) if handler.type else "everything" for handler in handlers]
    assert [name for name in names if name in ("everything", "Exception", "BaseException")] == []


@pytest.mark.parametrize("path", FILES, ids=short)
def test_every_module_says_what_it_is(path: Path) -> None:
    """A docstring, unless the file is empty."""
    assert not TREES[path].body or ast.get_docstring(TREES[path])


@pytest.mark.parametrize("path", FILES, ids=short)
def test_public_names_exist(path: Path) -> None:
    """What `__all__` lists is defined or imported there, once; a missing name breaks `import *` and the reader."""
    lists = [
        node.value
        for node in TREES[path].body
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
    ]
    if not lists:
        return
    names = ast.literal_eval(lists[0])
    defined = {name for node in TREES[path].body for name in _names(node)}
    lazy = any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in TREES[path].body)
    assert len(names) == len(set(names))
    assert lazy or set(names) <= defined


def _names(node: ast.stmt) -> Iterator[str]:
    """Names that a top-level statement binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
    elif isinstance(node, ast.Assign):
        yield from (name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, (ast.If, ast.Try)):
        yield from (name for child in node.body for name in _names(child))


def loaded_by(module: str) -> set[str]:
    """Modules in a fresh process after one import."""
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return set(done.stdout.split())


@pytest.mark.parametrize("module", LIGHT)
def test_daemon_and_coordinator_stay_light(module: str) -> None:
    """Neither torch nor numpy is loaded by their import; a device's daemon may use 28 MB, torch alone takes 150."""
    assert loaded_by(module) & {"torch", "numpy"} == set()


def test_the_daemon_is_lighter_still() -> None:
    """It measures with /proc and trusts with ssl: psutil costs 2 MB, cryptography 8."""
    assert loaded_by("edge_client.client.daemon") & {"psutil", "cryptography", "rich"} == set()


def test_the_version_is_one() -> None:
    """pyproject.toml and the package agree."""
    edge_client = importlib.import_module("edge_client")
    assert f'version = "{edge_client.__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
