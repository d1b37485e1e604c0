"""The page about a run: whole in itself, true to the run, and harmless whatever a device calls itself."""

from __future__ import annotations

import base64
import io
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rows import run_file

from coordinator import plots, report
from edge_client import faults
from edge_client.errors import DiskFullError, InputError
from edge_client.files import parse_table
from edge_client.records import to_map
from edge_client.run_file import RunFile

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EVIL = "<script>alert('x')</script>\"&$x_{"
VOID = {"meta", "img"}


class Page(HTMLParser):
    """Tags with their attributes, and the text; every tag must be closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def images(self) -> list[Image.Image]:
        sources = [attrs["src"] or "" for tag, attrs in self.tags if tag == "img"]
        return [Image.open(io.BytesIO(base64.b64decode(src.removeprefix("data:image/png;base64,")))) for src in sources]


def result(version: int, **changes: Any) -> dict[str, Any]:
    metrics = {"accuracy": 0.5, "balanced_accuracy": 0.4, "macro_f1": 0.3, "loss": 1.5, "recall": [0.25, None]}
    return {"version": version, "num_devices": 1, "num_samples": 10, **metrics, **changes}


def device(name: str, **changes: Any) -> dict[str, Any]:
    sizes = {"peak_bytes": 90 * 10**6, "budget_bytes": 10**8, "predicted_bytes": 95 * 10**6}
    moved = {"bytes_up": 2 * 10**6, "bytes_down": 3 * 10**6}
    return {"id": name, "plan": "full, microbatch 16", "num_samples": 77, **sizes, **moved, **changes}


def shown(**changes: Any) -> dict[str, Any]:
    """A finished run of three rounds whose second version is the best."""
    show = {
        "run": "r-1",
        "state": "finished",
        "reason": "3 rounds",
        "rounds": 3,
        "metric": "macro-f1",
        "best_version": 2,
        "file": to_map(run_file(method={"name": "fedprox", "mu": 0.5}, stop={"rounds": 3})),
        "models": [{"version": 3, "sha256": "ab" * 32}],
        "evaluations": [result(0), result(2, macro_f1=0.8125), result(3)],
        "device_evaluations": [{"version": v, "device": "a", "num_samples": 10, "accuracy": 0.5} for v in (0, 2, 3)],
        "devices": [device("a")],
        "failures": [{"device": "b", "round": 2, "state": "late", "code": "crashed", "detail": "why", "log": ["l"]}],
        "round_rows": [{"number": 1, "attempt": 1, "state": "ABANDONED", "reason": "too few"}],
        "environment": {"fedfit": "0.1.0", "commit": "c0ffee", "memory_bytes": 2 * 10**9},
    }
    return show | changes


def test_the_page_tells_what_the_run_did() -> None:
    """Verdict, tiles, the device's row (5 MB moved in all), failures with reason and log, versions."""
    text = Page(report.render(shown())).text
    assert "Ended after 3 of 3 rounds; reason: 3 rounds." in text
    assert "The best version is the one after round 2 (macro-f1 0.8125)." in text
    for piece in ("full, microbatch 16", "100 MB", "95.0 MB", "90.0 MB", "77", "2.0 MB", "3.0 MB", "5.0 MB"):
        assert piece in text
    for piece in ("crashed", "why", "abandoned, try 1", "too few", "c0ffee", "2.0 GB", "ab" * 32, "nobody has it"):
        assert piece in text


def test_the_plots_are_in_the_page() -> None:
    """Four of them: results, recall, memory, bytes; each a PNG that can be read, and wide enough for any screen."""
    images = Page(report.render(shown())).images()
    assert [image.format for image in images] == ["PNG"] * 4
    for image in images:
        image.load()
        assert image.width >= 1000


def test_nothing_comes_from_elsewhere() -> None:
    """No address but data: in the page, a policy that forbids the rest, and a width for phones."""
    page = Page(report.render(shown()))
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "object")
        for name in ("src", "href", "srcset", "action"):
            assert (attributes.get(name) or "data:").startswith("data:")
    metas = [attributes for tag, attributes in page.tags if tag == "meta"]
    assert any("default-src 'none'" in (m.get("content") or "") for m in metas)
    assert any(m.get("name") == "viewport" for m in metas)
    assert "url(" not in report.render(shown())


def test_what_devices_and_files_say_stays_text() -> None:
    """The same nasty text at every place that is not ours: it is read as it is, and makes no tag."""
    classes = [EVIL, "\N{CJK UNIFIED IDEOGRAPH-88C2}"]
    hostile = shown(
        run=EVIL,
        state=EVIL,
        reason=EVIL,
        metric=EVIL,
        model=EVIL,
        file={**to_map(run_file()), "classes": classes, EVIL: {EVIL: EVIL}},
        evaluations=[result(2, recall=[0.5, 0.5])],
        device_evaluations=[{"version": 2, "device": EVIL, "accuracy": 0.5}],
        devices=[device(EVIL, plan=EVIL, versions={EVIL: EVIL}, profile={"machine": EVIL}, num_samples=EVIL)],
        failures=[dict.fromkeys(("device", "round", "state", "code", "detail"), EVIL) | {"log": [EVIL]}],
        round_rows=[{"number": EVIL, "attempt": EVIL, "state": "ABANDONED", "reason": EVIL}],
        environment={EVIL: EVIL},
        models=[{"version": 2, "sha256": EVIL}],
    )
    page = Page(report.render(hostile))
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in Page(report.render(shown())).tags}
    assert page.text.count(EVIL) >= 20


def test_what_is_not_known_is_left_out() -> None:
    """An answer without anything, a run that waits, one that was never judged, one whose best version is not named."""
    Page(report.render({}))
    nothing = dict.fromkeys(("models", "evaluations", "device_evaluations", "devices", "failures", "round_rows"), ())
    text = Page(report.render(shown(state="queued", reason="", best_version=None, **nothing))).text
    assert "Waits after 0 of 3 rounds. No version was judged." in text
    assert "none" in text
    newest = Page(report.render(shown(best_version=None))).text
    assert "the one after round 3" in newest
    bare = [{"id": "a"}]
    Page(report.render(shown(devices=bare, environment={}, file={}, evaluations=[result(0, recall=[])])))


def test_a_peak_above_the_budget_is_marked() -> None:
    """Only the device that used 101 MB of 100 MB."""
    page = Page(report.render(shown(devices=[device("a"), device("b", peak_bytes=101 * 10**6, inside_budget=False)])))
    assert [attributes for _, attributes in page.tags].count({"class": "over"}) == 1


def test_large_fleets_are_cut_in_the_plots_only() -> None:
    """Of 60 devices and 60 classes the plots show 40, and say so; the tables have all."""
    names = [f"d-{number}" for number in range(60)]
    file = {**to_map(run_file()), "classes": [f"c-{number}" for number in range(60)]}
    judged = [result(2, recall=[number / 60 for number in range(60)])]
    page = Page(report.render(shown(devices=[device(n) for n in names], file=file, evaluations=judged)))
    assert page.text.count("40 of 60") == 3
    assert all(name in page.text for name in [*names, "c-59"])
    assert plots.MAX_BARS == 40


def test_the_run_file_can_be_typed_again() -> None:
    """The block is TOML that gives the same run, the method's and the model's own keys included."""
    file = run_file(
        method={"name": "fedprox", "mu": 0.5},
        model={"name": "mlp", "input": [1, 2, 2], "hidden": [4]},
        stop={"rounds": 3, "patience": 2},
        devices={"where": ["line=a"]},
    )
    text = Page(report.render({"file": to_map(file)})).text
    block = re.search(r"name = .*", text[text.index("Run file") :], re.DOTALL)
    assert block is not None
    assert parse_table(RunFile, tomllib.loads(block[0]), source="report") == file


def test_a_report_is_written_whole_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk leaves the report of yesterday; the next one replaces it."""
    path = tmp_path / "r-1.html"
    path.write_text("yesterday")
    monkeypatch.setattr(faults, "_faults", [faults._parse("enospc:report.sync")])
    with pytest.raises(DiskFullError, match="cannot write"):
        report.write_report(shown(), path)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("r-1.html", "yesterday")]
    report.write_report(shown(), path)
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_what_is_no_plain_file_is_not_replaced_by_a_report(tmp_path: Path) -> None:
    """A report is renamed into its place: a pipe, a device or a link (`--out /dev/stdout`) would be gone."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("pipe", "link", "dangling"):
        with pytest.raises(InputError, match=rf"{name}: expected a new file or a plain one"):
            report.write_report(shown(), tmp_path / name)
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "link", "pipe"]
