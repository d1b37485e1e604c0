"""Knowledge: its exact bytes, its form in a container, and what of a peer's is refused before it is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from edge_client.errors import PayloadError
from edge_client.knowledge.kinds import (
    ClassTable,
    DraftSet,
    FeatureMaps,
    FeaturePairs,
    Knowledge,
    PublicSamples,
    SampleLogits,
    as_read,
    named_tensors,
    one,
    parse,
    ranges_of,
)
from edge_client.knowledge.schema import Limits, check_entries
from edge_client.wire.container import Entry, build_header, tensor_bytes
from edge_client.wire.tensors import ContainerReader, codec_for, write_container

LIMITS = Limits(num_classes=10, max_rows=1000, max_bytes=2**24)


def class_table(label: str = "feature", rows: int = 10, width: int = 512) -> ClassTable:
    """All classes."""
    return ClassTable(label=label, counts=torch.full((rows,), 40), values=torch.randn(rows, width))


def samples() -> list[Knowledge]:
    """One of each kind."""
    torch.manual_seed(1)
    ids = torch.tensor([0, 3, 7])
    convs = {1: torch.randn(3, 4, 2, 2), 9: torch.randn(3, 8, 1, 1)}
    return [
        class_table(),
        class_table("logit", width=10),
        FeaturePairs(inputs=torch.randn(16, 64, 8, 8), outputs=torch.randn(16, 512)),
        DraftSet(ids=ids, depths=torch.tensor([9]), convs=convs, logits=torch.randn(3, 10)),
        SampleLogits(ids=ids, values=torch.randn(3, 10)),
        FeatureMaps(ids=ids, labels=torch.tensor([1, 9, 0]), logits=torch.randn(3, 10), values=torch.randn(3, 4, 2, 2)),
        PublicSamples(values=torch.randn(5, 3, 4, 4)),
    ]


def written(items: list[Knowledge], path: Path, codec: str = "fp32") -> int:
    """A container with nothing but this knowledge; its length."""
    named = named_tensors(items)
    table = [(name, codec_for(tensor, codec), tuple(tensor.shape)) for name, tensor in named]
    _, length = write_container(path, {}, table, (tensor for _, tensor in named))
    return length


def read(path: Path, limits: Limits = LIMITS, codec: str = "fp32") -> tuple[Knowledge, ...]:
    """What `parse` makes of a container."""
    with ContainerReader(path) as reader:
        entries = reader.header.entries
        return parse(entries, lambda entry: reader.tensor(entry.name), limits, codec=codec, source="update of 'a'")


def float_bytes(items: list[Knowledge]) -> int:
    """Bytes of what is not an id, a class or a count."""
    return sum(4 * tensor.numel() for _, tensor in named_tensors(items) if tensor.is_floating_point())


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "int8"])
def test_every_kind_comes_back_from_a_container(codec: str, tmp_path: Path) -> None:
    """Integers exactly; floats as the codec rounds them: within 1/127 of the largest at worst."""
    items = samples()
    written(items, tmp_path / "k", codec)
    came = {item.kind: item.tensors() for item in read(tmp_path / "k", codec=codec)}
    assert came.keys() == {item.kind for item in items}
    for item in items:
        for name, tensor in item.tensors().items():
            back = came[item.kind][name]
            if not tensor.is_floating_point():
                assert torch.equal(back, tensor)
            else:
                tolerance = 0.0 if codec == "fp32" else float(tensor.abs().max()) / 100
                torch.testing.assert_close(back, tensor, rtol=0, atol=tolerance)


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "int8"])
def test_nbytes_are_the_bytes_on_the_wire(codec: str, tmp_path: Path) -> None:
    """A container is its header and the data; the data is what `nbytes` says."""
    for item in samples():
        length = written([item], tmp_path / "k", codec)
        named = named_tensors([item])
        table = [(name, codec_for(tensor, codec), tuple(tensor.shape)) for name, tensor in named]
        assert length == len(build_header({}, table)) + item.nbytes(codec)


def test_felos_bytes_are_those_of_the_formula(tmp_path: Path) -> None:
    """4 C (F + C) = 20,880 at C = 10, F = 512; 244,800 at C = 100; the rest is at most 1 % and 512 bytes."""
    for num_classes, expected in ((10, 20_880), (100, 244_800)):
        items: list[Knowledge] = [class_table("feature", num_classes), class_table("logit", num_classes, num_classes)]
        assert float_bytes(items) == expected
        assert written(items, tmp_path / "k") - expected <= 0.01 * expected + 512


def test_fedins_bytes_are_those_of_the_formula(tmp_path: Path) -> None:
    """4 B (c h w + F) at B = 16: 294,912 for 32x32 images (64x8x8), 233,472 for 28x28 (64x7x7)."""
    for size, expected in ((8, 294_912), (7, 233_472)):
        pairs = FeaturePairs(inputs=torch.zeros(16, 64, size, size), outputs=torch.zeros(16, 512))
        assert pairs.nbytes() == expected
        assert written([pairs], tmp_path / "k") - expected <= 0.01 * expected + 512


def test_signatures_tell_apart_what_cannot_be_mixed() -> None:
    """Shapes of one sample at both depths; the number of samples does not count."""
    one_, two = (FeaturePairs(inputs=torch.zeros(n, 64, 8, 8), outputs=torch.zeros(n, 512)) for n in (16, 3))
    other = FeaturePairs(inputs=torch.zeros(3, 64, 7, 7), outputs=torch.zeros(3, 512))
    assert one_.signature == two.signature == "64x8x8>512"
    assert other.signature == "64x7x7>512"


def test_targets_by_class() -> None:
    """Classes 0 and 2 of three: zeros and no presence for class 1."""
    table = ClassTable(label="logit", counts=torch.tensor([40, 0, 50]), values=torch.tensor([[1.0], [2.0]]))
    assert table.classes.tolist() == [0, 2]
    values, present = table.targets()
    assert values.tolist() == [[1.0], [0.0], [2.0]]
    assert present.tolist() == [1.0, 0.0, 1.0]
    left = table.only(torch.tensor([False, True, True]))
    assert left is not None
    assert (left.counts.tolist(), left.values.tolist()) == ([0, 0, 50], [[2.0]])
    assert table.only(torch.tensor([False, True, False])) is None


def test_one_finds_a_table_by_type_and_label() -> None:
    """Two class tables differ by their label."""
    items = samples()
    found = one(items, ClassTable, "logit")
    assert found is items[1]
    assert one(items, SampleLogits) is items[4]
    assert one(items[:1], SampleLogits) is None


def test_ids_travel_as_ranges() -> None:
    """0, 1, 2, 7, 9, 10: three runs."""
    assert ranges_of(torch.tensor([0, 1, 2, 7, 9, 10])).tolist() == [[0, 3], [7, 1], [9, 2]]
    assert SampleLogits(ids=torch.arange(1000), values=torch.zeros(1000, 10)).nbytes() == 40_000 + 16


def test_ranges_that_claim_more_than_there_is_are_refused_before_they_are_expanded() -> None:
    """2^40 ids for one row."""
    entries = [
        Entry("knowledge/logits/ranges", "i64", (1, 2), 0, 16),
        Entry("knowledge/logits/values", "fp32", (1, 2), 16, 8),
    ]
    tensors = {"knowledge/logits/ranges": torch.tensor([[0, 2**40]]), "knowledge/logits/values": torch.zeros(1, 2)}
    with pytest.raises(PayloadError, match="are not those of 1 rows"):
        parse(entries, lambda entry: tensors[entry.name], LIMITS, codec="fp32", source="it")


def test_a_kind_travels_once() -> None:
    """Two tables under one name would overwrite each other."""
    with pytest.raises(ValueError, match="each kind of knowledge once"):
        named_tensors([class_table(), class_table()])


def _hostile(**changed: Tensor) -> ClassTable:
    good = {"counts": torch.tensor([0, 40, 0, 0, 50, 0, 0, 0, 0, 0]), "values": torch.ones(2, 10)}
    return ClassTable(label="logit", **(good | changed))


def _drafts(convs: dict[int, Tensor]) -> DraftSet:
    return DraftSet(ids=torch.arange(2), depths=torch.tensor([2]), convs=convs, logits=torch.ones(2, 4))


def _counts(first: int, second: int) -> Tensor:
    return torch.tensor([first, second, 0, 0, 0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("item", "code", "told"),
    [
        (_hostile(counts=torch.full((11,), 40)), "shape", "counts 11 classes, the run has 10"),
        (_hostile(counts=torch.full((9,), 40)), "shape", "counts 9 classes, the run has 10"),
        (_hostile(counts=_counts(40, -1)), "range", "'counts' of its 'class/logit' is outside of 0 to 500"),
        (_hostile(counts=_counts(40, 501)), "range", "outside of 0 to 500"),
        (_hostile(counts=_counts(40, 9)), "range", "has a mean of 9 samples, expected 10 at least"),
        (_hostile(counts=_counts(40, 0)), "shape", "counts 1 classes, and has values of 2"),
        (_hostile(counts=torch.full((10,), 40.0)), "dtype", "class/logit/counts' came as fp32, expected i64"),
        (_hostile(values=torch.full((2, 10), float("nan"))), "not_finite", "beyond 1e+06, or not finite"),
        (_hostile(values=torch.full((2, 10), float("inf"))), "not_finite", "not finite"),
        (_hostile(values=torch.full((2, 10), 2e6)), "range", "beyond 1e+06"),
        (_hostile(values=torch.ones(2, 9)), "shape", "has 9 columns, the run has 10 classes"),
        (_hostile(values=torch.ones(3, 10)), "shape", "counts 2 classes, and has values of 3"),
        (FeaturePairs(inputs=torch.ones(2, 3), outputs=torch.ones(3, 4)), "shape", "have 2 and 3 rows"),
        (SampleLogits(ids=torch.arange(2), values=torch.ones(3, 4)), "range", "are not those of 3 rows"),
        (_hostile(values=torch.ones(2, 5, 2)), "shape", "has shape [2, 5, 2]"),
        (_hostile(values=torch.ones(11, 10)), "shape", "has 11 rows, expected 1 to 10"),
        (_hostile(values=torch.ones(0, 10)), "shape", "has 0 rows"),
        (SampleLogits(ids=torch.tensor([4, 3]), values=torch.ones(2, 4)), "range", "'logits' are not those of 2 rows"),
        (SampleLogits(ids=torch.arange(51), values=torch.ones(51, 4)), "shape", "has 51 rows, expected 1 to 50"),
        (_drafts({}), "names", "its 'drafts' has no conv_1"),
        (_drafts({2: torch.ones(2, 4)}), "names", "its drafts have no 'conv_1'"),
        (
            FeatureMaps(
                ids=torch.arange(1), labels=torch.tensor([10]), logits=torch.ones(1, 10), values=torch.ones(1, 2)
            ),
            "range",
            "'labels' of its 'maps' is outside of 0 to 9",
        ),
        (PublicSamples(values=torch.ones(3, 2)), "names", "brings 'public'; the run's method takes class/"),
        (FeaturePairs(inputs=torch.ones(40, 1000), outputs=torch.ones(40, 9)), "too_large", "at most 100000 are read"),
    ],
)
def test_what_a_peer_must_not_send(item: Knowledge, code: str, told: str, tmp_path: Path) -> None:
    """Each with a code of its own and a line that names device, tensor and what was expected."""
    kinds = ("class/feature", "class/logit", "pairs", "drafts", "logits", "maps")
    limits = Limits(num_classes=10, max_rows=50, max_bytes=100_000, kinds=kinds, min_count=10, max_count=500)
    written([item], tmp_path / "k")
    with pytest.raises(PayloadError) as refused:
        read(tmp_path / "k", limits)
    assert refused.value.code == code
    assert told in refused.value.detail
    assert "update of 'a'" in refused.value.detail


@pytest.mark.parametrize("name", ["knowledge/class/other/values", "knowledge/pairs/conv_1", "knowledge/drafts/conv_0"])
def test_names_that_no_kind_has(name: str) -> None:
    """Unknown tensors are refused, not skipped."""
    entry = Entry(name, "fp32", (1, 1), 0, 4)
    with pytest.raises(PayloadError, match="names: expected a tensor of one of class/feature"):
        check_entries([entry], LIMITS, codec="fp32", source="update of 'a'")


def touched(entry: Entry) -> Tensor:
    """Nothing may be read."""
    raise AssertionError(entry.name)


@pytest.mark.parametrize(("dims", "fits"), [(1, False), (2, True), (5, True), (6, False), (8, False)])
def test_drafts_have_channels_and_three_axes_at_most(dims: int, fits: bool) -> None:
    """Rows, channels, and what can be resized: nothing is read of others."""
    shape = (1,) * dims
    entries = [
        Entry("knowledge/drafts/depths", "i64", (1,), 0, 8),
        Entry("knowledge/drafts/ranges", "i64", (1, 2), 8, 16),
        Entry("knowledge/drafts/logits", "fp32", (1, 10), 24, 40),
        Entry("knowledge/drafts/conv_1", "fp32", shape, 64, 4),
    ]
    if fits:
        assert check_entries(entries, LIMITS, codec="fp32", source="update of 'a'") == {"drafts"}
        return
    with pytest.raises(PayloadError, match="shape: update of 'a': 'knowledge/drafts/conv_1' has shape"):
        parse(entries, touched, LIMITS, codec="fp32", source="update of 'a'")


REFUSED = [("fp32", 1e7, "range"), ("fp32", float("nan"), "not_finite"), ("fp16", 7e4, "not_finite")]


@pytest.mark.parametrize(("codec", "value", "code"), [*REFUSED, ("int8", float("inf"), "not_finite")])
def test_what_a_peer_would_refuse_is_known_before_it_is_sent(codec: str, value: float, code: str) -> None:
    """Also what only the codec makes of it: fp16 ends at 65,504."""
    pairs = FeaturePairs(inputs=torch.full((1, 2), value), outputs=torch.zeros(1, 2))
    with pytest.raises(PayloadError) as refused:
        as_read([pairs], LIMITS, codec=codec, source="this device")
    assert refused.value.code == code
    fine = FeaturePairs(inputs=torch.full((1, 2), 6e4), outputs=torch.zeros(1, 2))
    (read_,) = as_read([fine], LIMITS, codec=codec, source="this device")
    torch.testing.assert_close(read_.tensors()["in"], fine.inputs, rtol=0.01, atol=0)


def test_nothing_is_read_of_what_is_too_large() -> None:
    """A table that announces 4 TB is refused by its numbers alone."""
    shape = (1000, 2**30)
    entries = [
        Entry("knowledge/pairs/in", "fp32", shape, 0, tensor_bytes("fp32", shape)),
        Entry("knowledge/pairs/out", "fp32", (1000, 1), 0, 4000),
    ]
    with pytest.raises(PayloadError, match="too_large"):
        parse(entries, touched, LIMITS, codec="fp32", source="update of 'a'")
