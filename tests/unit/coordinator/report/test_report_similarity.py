"""The page's part on similarity, the bytes against FedAvg, and plots as files."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import line, write_run
from page import Page
from PIL import Image
from rows import run_file
from test_report import EVIL, RUN

from coordinator.cli import main as cli
from coordinator.report import run_page as report
from coordinator.report.similarity import _decoded
from coordinator.results.run_folders import read_run
from coordinator.results.run_record import RoundRecord, RunRecord
from coordinator.results.similarity_record import Compared, Comparison, Means, Picture, Similarity, Stage, text_of
from coordinator.store.rows import SERVER
from edge_client.errors import InputError

MAPS, PLANES = "similarity of the devices' stages after round", "t-SNE of features after round"
MEAN = "mean similarity of two devices in each stage"
NEITHER = "Not compared, and no features drawn:"
SERVED = run_file(evaluate={"on": "npz:/srv/test.npz"})


def compared(round_: int, names: tuple[str, ...] = ("a", "b")) -> Comparison:
    devices = tuple(Compared(device=name, slice="full") for name in names)
    rows = tuple(tuple(1.0 if i == j else 0.25 for i in range(len(names))) for j in range(len(names)))
    stages = (Stage(name="stem", cka=rows), Stage(name="stage 1", cka=tuple((None,) * len(names) for _ in names)))
    return Comparison(round=round_, num_samples=30, seconds=1.25, devices=devices, stages=stages)


def picture(name: str, *, count: int = 30, width: int = 4) -> Picture:
    values = np.random.default_rng(1).normal(size=(count, width)).astype("<f2")
    return Picture(name=name, slice="full", width=width, features=base64.b64encode(values.tobytes()).decode())


def similarity(**changes: Any) -> Similarity:
    means = (Means(round=1, stages={"stem": 0.5}), Means(round=10, stages={"stem": 0.25, "stage 1": 0.125}))
    whole = Similarity(first=compared(1), last=compared(10), means=means, labels=(0, 1) * 15, pictures=(picture("a"),))
    return replace(whole, **changes)


def page_of(found: Similarity, **changes: Any) -> Page:
    record = RunRecord(**{"name": "r-1", "file": SERVED, "similarity": found} | changes)
    return Page(report.render(record))


@pytest.fixture(scope="module")
def whole() -> Page:
    """The page about two rounds that were compared."""
    return page_of(similarity(pictures=(picture(SERVER), picture("a"))))


def test_a_run_that_was_compared_has_its_figures(whole: Page) -> None:
    """Heat maps of the newest and of the first round, the means between them as a plot and a table, one t-SNE."""
    assert list(whole.images()) == [f"{MAPS} 10", f"{MAPS} 1", MEAN, f"{PLANES} 10"]
    for image in whole.images().values():
        image.load()
        assert image.width >= 1000
    for piece in ("How alike the devices' models are, after round 10", "took the coordinator 1.2 s", "30 test samples"):
        assert piece in whole.text
    assert "roundstemstage 110.5000-100.25000.1250" in whole.text


def test_one_round_has_no_curve_and_few_samples_no_picture() -> None:
    """Nothing to draw a line through; 8 samples have no neighbourhoods."""
    page = page_of(similarity(first=compared(10), means=(Means(round=10, stages={"stem": 0.25}),), labels=(0,) * 8))
    assert list(page.images()) == [f"{MAPS} 10"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"file": run_file()}, f"{NEITHER} the coordinator has no test data to compare them on"),
        ({"file": run_file(method="fedper")}, f"{NEITHER} the models of fedper never leave the devices"),
        ({"file": run_file(evaluate={"similarity": 0})}, f"{NEITHER} switched off by evaluate.similarity = 0."),
        ({}, f"{NEITHER} no round has been compared yet."),
        ({"found": Similarity(problem="round 1: gone")}, f"{NEITHER} round 1: gone."),
        ({"found": similarity(last=compared(10, ("a",)))}, "Not compared: one device trained in round 10."),
        ({"found": similarity(last=compared(10, ()))}, "Not compared: a device of fedavg has several models."),
        ({"file": run_file(method={"name": "fedavg", "old": 1})}, f"{NEITHER} method 'fedavg' has no parameters"),
    ],
)
def test_a_page_without_the_figure_says_why(changes: dict[str, Any], expected: str) -> None:
    """No test data, models that never leave devices, switched off, too early, failed, too few, another version's."""
    assert expected in page_of(**{"found": Similarity()} | changes).text


def test_a_newer_comparison_that_failed_is_told(whole: Page) -> None:
    """Below the figures that are there."""
    text = page_of(similarity(problem="round 20: crashed")).text
    assert "The newest comparison could not be made: round 20: crashed." in text
    assert "could not be made" not in whole.text


def test_names_stay_text() -> None:
    """Devices, slices and stages of a run whose words are not ours."""
    devices = (Compared(device=EVIL, slice=EVIL), Compared(device="b", slice=EVIL))
    stage = Stage(name=EVIL, cka=((1.0, 0.5), (0.5, 1.0)))
    last = replace(compared(10), devices=devices, stages=(stage,))
    means = tuple(Means(round=number, stages={EVIL: 0.5}) for number in (1, 10))
    file = run_file(classes=[EVIL, "b"], evaluate={"on": "npz:/srv/test.npz"})
    hostile = similarity(last=last, means=means, problem=EVIL, pictures=(replace(picture(EVIL), slice=EVIL),))
    page = page_of(hostile, file=file)
    assert "script" not in {tag for tag, _ in page.tags}
    assert page.text.count(EVIL) >= 2


def test_features_that_nobody_wrote_are_refused() -> None:
    """Too few numbers, no base64, not finite: an error, not a picture of something else."""
    nan = base64.b64encode(np.full((30, 4), np.nan, "<f2").tobytes()).decode()
    for text in ("AAAA", "?", nan):
        with pytest.raises(InputError, match="expected 30 x 4 features of 'a'"):
            _decoded(replace(picture("a"), features=text), 30)


def test_more_classes_than_colours_are_grey() -> None:
    """Of 14 classes the ten with the most samples have a colour: all but 10 to 13, which have one sample each."""
    labels = (*(number % 10 for number in range(26)), 10, 11, 12, 13)
    file = run_file(classes=[f"c{number}" for number in range(14)], evaluate={"on": "npz:/srv/test.npz"})
    assert f"{PLANES} 10" in page_of(similarity(labels=labels), file=file).images()


def test_bytes_are_held_against_those_of_fedavg() -> None:
    """3 + 2 trainings of a model of 100 bytes: 2 x 5 x 100 = 1,000; the run moved 10 + 20 + 30 + 40 = 100: 10 %."""
    rounds = [
        RoundRecord(number=1, bytes_up=10, bytes_down=20, num_updates=3),
        RoundRecord(number=2, bytes_up=30, bytes_down=40, num_updates=2),
    ]
    page = Page(report.render(replace(RUN, rounds=rounds, devices=[], whole_model_bytes=100)))
    assert "10 %of what FedAvg would move" in page.text
    assert "10.0 % of the 1.0 kB that FedAvg of the whole model would have sent" in page.text
    assert "5 trainings that counted x 2 x 100 B" in page.text
    unknown = Page(report.render(replace(RUN, rounds=rounds, devices=[])))
    assert "the size of the whole model is not known yet" in unknown.text
    assert "of what FedAvg would move" not in unknown.text


def test_a_simulations_similarity_is_in_its_folder(tmp_path: Path) -> None:
    """Read with the run; a file that somebody broke is named."""
    folder = write_run(tmp_path / "sim", [line(1, 0.5)])
    assert read_run(folder).similarity == Similarity()
    (folder / "similarity.json").write_text(text_of(similarity()))
    assert read_run(folder).similarity == similarity()
    (folder / "similarity.json").write_text('{"first": 1}')
    with pytest.raises(InputError, match=r"similarity\.json.*expected a map"):
        read_run(folder)


def test_plots_are_written_as_files_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page's own pictures, byte for byte, under names that say what they show; the page stays whole in itself."""
    folder = write_run(tmp_path / "sim", [line(1, 0.5), line(2, 0.75)])
    (folder / "similarity.json").write_text(text_of(similarity()))
    out, plots = tmp_path / "page.html", tmp_path / "plots/here"
    assert cli.main(["run", "report", str(folder), "--out", str(out), "--plots", str(plots)]) == 0
    made = sorted(path.name for path in plots.iterdir())
    assert capsys.readouterr().out.split() == [str(out), *(str(plots / name) for name in _in_page_order(made, out))]
    assert {"bytes-moved-in-each-round-and-so-far.png", "t-sne-of-features-after-round-10.png"} <= set(made)
    assert "similarity-of-the-devices-stages-after-round-10.png" in made
    page = Page(out.read_text(encoding="utf-8"))
    assert len(made) == len(page.images())
    for path in plots.iterdir():
        with Image.open(io.BytesIO(path.read_bytes())) as image:
            assert image.format == "PNG"


def _in_page_order(names: list[str], page: Path) -> list[str]:
    images = list(Page(page.read_text(encoding="utf-8")).images())
    return sorted(names, key=lambda name: [_slug(alt) for alt in images].index(name))


def _slug(alt: str) -> str:
    plain = "".join(c if c.isalnum() else " " for c in alt.lower().replace("'", ""))
    return f"{'-'.join(plain.split())}.png"
