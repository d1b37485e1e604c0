"""All durable writes, read from the source: each is in a list of the tests that make its disk fail."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import test_disk_faults as runs
import test_disk_faults_of_commands as commands

ROOT = Path(__file__).parents[2]

# what a call with `point=` writes, by its name; an Incoming or adopt without a sync has no such step
STEPS = {
    "write_bytes": ("write", "sync", "rename"),
    "write": ("write", "sync", "rename"),  # BlobStore
    "_write": ("write", "sync", "rename"),  # Spool
    "publish": ("sync", "rename"),
    "adopt": ("sync", "rename"),
    "adopt_all": ("sync", "rename"),
    "Incoming": ("chunk", "sync", "rename"),
    "fetch": ("chunk", "rename"),  # ClientTransfers: parts are not synced
}


HANDED_ON = ("point", "self._point")  # a caller's point


def _points_in(tree: ast.AST) -> Iterator[str]:
    """Every point of a file at which a disk may fail."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        if name == "transaction":
            yield f"store.{ast.literal_eval(call.args[0])}.commit"
        elif name == "point" and isinstance(call.args[0], ast.Constant):
            point = str(call.args[0].value)
            yield from (point,) if point.endswith((".write", ".sync", ".rename")) else ()
        elif "point" in keywords and ast.unparse(keywords["point"]) not in HANDED_ON:
            given = keywords["point"]
            names = (given.body, given.orelse) if isinstance(given, ast.IfExp) else (given,)
            synced = not ("sync" in keywords and isinstance(keywords["sync"], ast.Constant))
            steps = [step for step in STEPS[name] if synced or step != "sync"]
            yield from (f"{ast.literal_eval(text)}.{step}" for text in names for step in steps)


def test_every_durable_write_is_in_a_list() -> None:
    """A new one fails here until a test makes its disk fail; a list that names what no longer exists fails as well."""
    files = [path for package in ("edge_client", "coordinator") for path in (ROOT / package).rglob("*.py")]
    written = {point for path in files for point in _points_in(ast.parse(path.read_text(encoding="utf-8")))}
    rounds = (
        *runs.COORDINATOR.values(),
        *runs.SMALL_UPDATES.values(),
        *runs.DAEMON.values(),
        *runs.WORKER.values(),
        runs.TOO_FEW,
        runs.CUTTING,
    )
    typed = (commands.ADDING, commands.STARTING_A_RUN, commands.SIMULATED, commands.JOINING, commands.INSTALLING)
    exported = (commands.EXPORTED, commands.QUANTIZED, commands.LEDGER)
    deployed = (commands.DEPLOYED, commands.DEPLOYING, commands.DEPLOYED_HERE, commands.PAGE)
    others = (*commands.STARTING.values(), *commands.WRITTEN.values(), *typed, *exported, *deployed)
    tested = {point.partition(":")[0] for points in (*rounds, *others) for point in points}
    elsewhere = {"aggregator.check", "aggregator.fold.middle", "turn.commit"}  # no writes of their own
    assert sorted(written - tested) == []
    assert sorted(tested - written - elsewhere) == []


def test_only_one_module_makes_files_permanent() -> None:
    """Renames and syncs are in `durable.py`, where the points are.

    A damaged state file is only moved aside, and the status is for people: it may get lost, and so may the notes of a
    worker and its daemon. Cost rows, rehearsals, found units and copies of data can be made again. A restored folder is
    synced file by file and gets its name as a whole.
    """
    found = {
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for package in ("edge_client", "coordinator")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("fsync", "fdatasync", "rename", "replace")
        if ast.unparse(node.value) in ("os", "shutil") and path.name != "durable.py"
    }
    names = (
        "data/npz_writer",
        "planning/rows",
        "measuring/rehearsed",
        "models/found_units/adoption",
        "client/spool",
        "client/status",
        "worker/live_files",
        "worker/state_folder",
    )
    unsafe = {f"edge_client/{name}.py: os.replace" for name in names}
    assert found == unsafe | {"coordinator/store/archive.py: os.fsync", "coordinator/store/backup.py: os.rename"}
