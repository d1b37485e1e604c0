"""The rules of the tree that no reviewer should have to check by hand."""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import import_table
import pytest

ROOT = import_table.ROOT
HOW = "write it with: python tests/architecture/import_table.py"
TREES = {
    path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8"))
    for package in import_table.LAYERS
    for path in sorted((ROOT / package).rglob("*.py"))
}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {"torch.load", "torch.save", "torch.compile", "torch.optim"}
FORBIDDEN_PREFIXES = ("torch.optim", "torch.utils.checkpoint")  # they load dynamo: 68 MB
IO_MODULES = {"asyncio", "io", "os", "pathlib", "select", "shutil", "socket", "sqlite3", "subprocess", "tempfile"}
CLOCKS_AND_THREADS = {"datetime", "multiprocessing", "queue", "signal", "threading", "time"}
LONGEST_FILE, LONGEST_CLASS = 500, 350  # in lines
LONG: list[
    str
] = []  # five longer ones at most, "path" or "path: class"; the docstring of each says why it is one thing
LOADERS = {"exec_module", "load_module", "spec_from_file_location", "run_path", "run_module", "SourceFileLoader"}


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


def imported_themes(path: Path) -> set[str]:
    """The themes of its own package that a module imports; the empty one stands for the leaves."""
    names = [name.split(".") for name in imports_of(TREES[path]) if name.split(".")[0] == path.parts[0]]
    known = import_table.themes(path.parts[0])
    return {parts[1] if len(parts) > 1 and parts[1] in known else "" for parts in names}


# rules: what is wrong with one file; nothing for most


def imports_of_the_coordinator(path: Path, tree: ast.Module) -> Iterator[str]:
    """A device installs no coordinator."""
    if path.parts[0] == "edge_client":
        yield from (name for name in imports_of(tree) if name.split(".")[0] == "coordinator")


def imports_up_the_layers(path: Path, tree: ast.Module) -> Iterator[str]:
    """A theme knows what lies below it and nothing beside it or above: every theme reads without those above."""
    package, *names = path.parts
    if len(names) > 1:
        yield from imported_themes(path) - {"", names[0], *import_table.below(package, names[0])}
    elif path.stem in import_table.LEAVES[package]:  # `__init__` and `__main__` are the doors of the package
        yield from imported_themes(path) - {""}


def imports_of_paho(path: Path, tree: ast.Module) -> Iterator[str]:
    """Whoever needs something of paho takes it from one module, so that nobody loads more of it than is used."""
    if path != Path("edge_client/transport/light_paho.py"):
        yield from (name for name in imports_of(tree) if name.split(".")[0] == "paho")


def knowledge_of_cuda(path: Path, tree: ast.Module) -> Iterator[str]:
    """One module asks torch which accelerator there is and what it does; everybody else asks that one."""
    if path == Path("edge_client/device/accelerator.py"):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (node.attr == "is_cuda" or ast.unparse(node).startswith("torch.cuda")):
            yield ast.unparse(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            yield ast.unparse(node.func)
    yield from (name for name in imports_of(tree) if name.startswith("torch.cuda"))


def code_from_data(path: Path, tree: ast.Module) -> Iterator[str]:
    """No pickle in any form, no eval, no torch.load; and nothing that loads torch's compiler."""
    for name in imports_of(tree):
        if name.split(".")[0] in FORBIDDEN_MODULES or name.startswith(FORBIDDEN_PREFIXES):
            yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            yield node.func.id
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield "allow_pickle"
        if path == Path("coordinator/aggregation/foreign_weights.py") and ast.unparse(node) == "torch.load":
            continue  # a file of weights that the server's owner named, with weights_only
        if isinstance(node, ast.Attribute) and ast.unparse(node) in FORBIDDEN_ATTRIBUTES:
            yield ast.unparse(node)


def code_from_files(path: Path, tree: ast.Module) -> Iterator[str]:
    """A task's file, which its owner named, is the one thing that becomes code; nobody else loads modules by path."""
    if path != Path("edge_client/task/task.py"):
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        yield from (attributes | {name.split(".")[-1] for name in imports_of(tree)}) & LOADERS


def io_in_decisions(path: Path, tree: ast.Module) -> Iterator[str]:
    """What `rounds` decides follows from events alone: no file, socket, clock or thread, and of the store only rows."""
    if not path.is_relative_to("coordinator/rounds"):
        return
    for name in imports_of(tree):
        is_query = name.startswith("coordinator.store.") and not name.startswith("coordinator.store.rows")
        if name.split(".")[0] in IO_MODULES | CLOCKS_AND_THREADS or is_query:
            yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"open", "print"}:
            yield node.func.id


def broad_handlers(path: Path, tree: ast.Module) -> Iterator[str]:
    """`except Exception` hides bugs; `except:` hides the end of the process as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "everything"
            if caught in ("everything", "Exception", "BaseException"):
                yield f"line {node.lineno}: {caught}"


def missing_docstrings(path: Path, tree: ast.Module) -> Iterator[str]:
    """Every module says what it is."""
    if not ast.get_docstring(tree):
        yield "no docstring"


def wrong_public_names(path: Path, tree: ast.Module) -> Iterator[str]:
    """What `__all__` lists is defined or imported there, once; a missing name breaks `import *` and the reader."""
    defined = {name for node in tree.body for name in bound_names(node)}
    if "__all__" not in defined or "__getattr__" in defined:
        return
    (listed,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__")
    names = ast.literal_eval(listed)
    yield from set(names) - defined
    yield from {name for name in names if names.count(name) > 1}


def bound_names(node: ast.stmt) -> Iterator[str]:
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
        yield from (name for child in node.body for name in bound_names(child))


RULES = [
    imports_of_the_coordinator,
    imports_up_the_layers,
    imports_of_paho,
    knowledge_of_cuda,
    code_from_data,
    code_from_files,
    io_in_decisions,
    broad_handlers,
    missing_docstrings,
    wrong_public_names,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_file_has(rule: Callable[[Path, ast.Module], Iterator[str]]) -> None:
    """The rule's docstring tells why."""
    offences = {str(path): sorted(set(rule(path, tree))) for path, tree in TREES.items()}
    assert {path: names for path, names in offences.items() if names} == {}


@pytest.mark.parametrize(
    ("path", "source", "rule"),
    [
        ("edge_client/wire/frames.py", "import coordinator.state", imports_of_the_coordinator),
        ("edge_client/wire/frames.py", "def f():\n    from edge_client.client import daemon", imports_up_the_layers),
        ("edge_client/errors.py", "from edge_client.wire import frames", imports_up_the_layers),
        ("edge_client/transport/mqtt.py", "from paho.mqtt import client", imports_of_paho),
        ("edge_client/worker/plan.py", "free = torch.cuda.mem_get_info()", knowledge_of_cuda),
        ("edge_client/worker/plan.py", "on_gpu = tensor.is_cuda", knowledge_of_cuda),
        ("edge_client/worker/plan.py", "model.cuda()", knowledge_of_cuda),
        ("edge_client/worker/plan.py", "from torch.cuda import amp", knowledge_of_cuda),
        ("coordinator/state.py", "import torch.optim", code_from_data),
        ("coordinator/state.py", "np.load(path, allow_pickle=True)", code_from_data),
        ("coordinator/state.py", "torch.load(path)", code_from_data),
        ("coordinator/state.py", "loader.exec_module(module)", code_from_files),
        ("coordinator/rounds/machine.py", "import time", io_in_decisions),
        ("coordinator/rounds/machine.py", "from coordinator.store.sqlite import SqliteStore", io_in_decisions),
        ("coordinator/rounds/machine.py", "open(path)", io_in_decisions),
        ("coordinator/state.py", "try:\n    f()\nexcept Exception:\n    pass", broad_handlers),
        ("coordinator/state.py", "x = 1", missing_docstrings),
        ("coordinator/state.py", "__all__ = ['x', 'y']\nx = 1", wrong_public_names),
    ],
)
def test_the_rules_find_what_they_forbid(
    path: str,
    source: str,
    rule: Callable[[Path, ast.Module], Iterator[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rule on a file that breaks it."""
    tree = ast.parse(source)
    monkeypatch.setitem(TREES, Path(path), tree)
    assert list(rule(Path(path), tree)) != []


@pytest.mark.parametrize("package", list(import_table.LAYERS))
def test_the_table_lists_what_there_is(package: str) -> None:
    """Every folder with code is a theme of the table; directly in the package lie its leaves, at most 8."""
    folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    assert folders == set(import_table.themes(package))
    direct = {path.stem for path in (ROOT / package).glob("*.py")} - {"__init__", "__main__"}
    assert direct == set(import_table.LEAVES[package])
    assert len(direct) <= 8


@pytest.mark.parametrize("package", list(import_table.LAYERS))
def test_no_themes_import_each_other_in_a_circle(package: str) -> None:
    """Also not through imports inside of functions; `CycleError` names those that do."""
    edges: dict[str, set[str]] = {}
    for path in TREES:
        if path.parts[0] == package and len(path.parts) > 2:
            edges.setdefault(path.parts[1], set()).update(imported_themes(path) - {path.parts[1], ""})
    graphlib.TopologicalSorter(edges).prepare()


@pytest.mark.parametrize("package", list(import_table.LAYERS))
def test_every_folder_says_what_lives_in_it(package: str) -> None:
    """A docstring of two or three sentences and of what the theme may import; no code, except the SDK's own exports."""
    for theme in import_table.themes(package):
        text = " ".join((ast.get_docstring(TREES[Path(package, theme, "__init__.py")]) or "").split())
        about, allowed, _ = text.partition(import_table.sentence(package, theme))
        assert text.endswith(allowed or HOW), f"{package}/{theme}: {HOW}"
        assert 2 <= len(re.findall(r"\.(?:\s|$)", about)) <= 3, f"{package}/{theme}: expected two or three sentences"
    doors = [path for path in TREES if path.name == "__init__.py" and path != Path("edge_client/__init__.py")]
    assert [str(path) for path in doors if len(TREES[path].body) != 1] == [], "code in an __init__"


def test_files_and_classes_are_short() -> None:
    """A file has at most 500 lines, a class at most 350."""
    long: list[str] = []
    for path, tree in TREES.items():
        if len((ROOT / path).read_text(encoding="utf-8").splitlines()) > LONGEST_FILE:
            long.append(str(path))
        classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        long += [f"{path}: {node.name}" for node in classes if (node.end_lineno or 0) - node.lineno >= LONGEST_CLASS]
    assert long == LONG
    assert len(LONG) <= 5


def test_contributing_draws_the_packages() -> None:
    """The two diagrams are those of the table."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for package in import_table.LAYERS:
        assert f"```\n{import_table.diagram(package)}\n```" in text, HOW


def loaded_by(*modules: str) -> set[str]:
    """Modules in a fresh process after these imports."""
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "place",
    ["edge_client/client", "coordinator/rounds", "coordinator/fleet", "coordinator/conductor", "coordinator/server"],
)
def test_daemon_and_coordinator_stay_light(place: str) -> None:
    """Neither torch nor numpy is loaded by their import; a device's daemon may use 28 MB, torch alone takes 150."""
    modules = [".".join(path.with_suffix("").parts) for path in TREES if path.is_relative_to(place)]
    assert loaded_by(*(name.removesuffix(".__init__") for name in modules)) & {"torch", "numpy"} == set()


@pytest.mark.parametrize("module", ["edge_client", "edge_client.cli.main", "coordinator.cli.main"])
def test_packages_and_commands_stay_light(module: str) -> None:
    """The SDK itself and both commands begin without torch and numpy."""
    assert loaded_by(module) & {"torch", "numpy"} == set()


def test_the_daemon_is_lighter_still() -> None:
    """It measures with /proc and trusts with ssl: psutil costs 2 MB, cryptography 8."""
    assert loaded_by("edge_client.client.daemon") & {"psutil", "cryptography", "rich"} == set()


def test_the_version_is_one() -> None:
    """pyproject.toml and the package agree."""
    edge_client = importlib.import_module("edge_client")
    assert f'version = "{edge_client.__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
