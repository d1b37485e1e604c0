"""A child process that answers jobs of the aggregator as a test wishes: `python -m answering_child`.

`ANSWERS` in its environment maps a job's name to its answer as it travels; {"write": TEXT} writes a file at the job's
`out` and answers with its hash. A job without an answer fails. Every job is added to the file `JOBS`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any


def _answer(job: dict[str, Any], answers: dict[str, Any]) -> dict[str, Any]:
    answer = answers.get(job["job"], {"ok": False, "code": "input", "detail": "no"})
    if "write" not in answer:
        return {"ok": True, **answer}
    data = answer["write"].encode()
    Path(job["out"]).write_bytes(data)
    written = {"sha256": hashlib.sha256(data).hexdigest(), "length": len(data)}
    return {"ok": True, **written, **{key: value for key, value in answer.items() if key != "write"}}


if __name__ == "__main__":
    for line in sys.stdin:
        job = json.loads(line)
        with Path(os.environ["JOBS"]).open("a", encoding="utf-8") as jobs:
            jobs.write(line)
        print(json.dumps({"id": job["id"], **_answer(job, json.loads(os.environ["ANSWERS"]))}), flush=True)
