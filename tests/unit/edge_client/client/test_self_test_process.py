"""The process that tests a deployed model: its job, its end, its result."""

from __future__ import annotations

import json
import select
import sys
from pathlib import Path

import pytest
from rows import digest

from edge_client.client.self_test_process import SelfTest, write_job
from edge_client.wire.messages import Deploy

DEPLOY = Deploy(
    deployment="d1", run="r-1", version=3, input=(1, 2, 2), classes_sha256=digest("c"), sha256=digest("m"), length=3
)


def _result(folder: Path, code: str) -> tuple[int, str]:
    """How a test ends that runs `code`; its arguments are the job and the result."""
    write_job(folder, folder / "model", DEPLOY, 10**9)
    test = SelfTest(folder, (sys.executable, "-c", f"import sys\n{code}"))
    assert select.select([test.fd], [], [], 20)[0] == [test.fd]
    return test.result()


def test_the_job_is_written_into_an_empty_folder(tmp_path: Path) -> None:
    """What an earlier test left is gone."""
    folder = tmp_path / "test"
    folder.mkdir()
    (folder / "result.json").write_text('{"error": "of another model"}')
    assert _result(folder, "") == (0, "")
    job = json.loads((folder / "job.json").read_text())
    assert (job["file"], job["budget_bytes"], job["deploy"]["run"]) == (str(folder / "model"), 10**9, "r-1")


@pytest.mark.parametrize(
    ("result", "error"),
    [('{"error": "it differs"}', "it differs"), ("{", ""), ("[]", ""), ('{"error": 5}', ""), ('{"difference": 1}', "")],
)
def test_the_error_of_a_test_is_read_if_it_makes_sense(tmp_path: Path, result: str, error: str) -> None:
    """The exit code counts in any case."""
    assert _result(tmp_path / "test", f"open(sys.argv[2], 'w').write({result!r}); sys.exit(3)") == (3, error)


def test_a_long_error_is_cut_to_what_a_message_takes(tmp_path: Path) -> None:
    """1,500 characters of 5,000."""
    code = "import json; json.dump({'error': 'x' * 5000}, open(sys.argv[2], 'w')); sys.exit(3)"
    assert _result(tmp_path / "test", code) == (3, "x" * 1500)
