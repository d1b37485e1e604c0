"""Any knowledge comes back from a container as it was; any table of a container is whole, or refused by one error."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.errors import PayloadError
from edge_client.knowledge.kinds import ClassTable, DraftSet, FeaturePairs, Knowledge, named_tensors, parse
from edge_client.knowledge.schema import Limits, check_entries
from edge_client.wire.container import CODECS, Entry, tensor_bytes
from edge_client.wire.tensors import ContainerReader, codec_for, write_container

LIMITS = Limits(num_classes=8, max_rows=40, max_bytes=2**20)
FIELDS = ["class/logit/counts", "class/logit/values", "pairs/in", "pairs/out"]
FIELDS += ["drafts/depths", "drafts/ranges", "drafts/logits", "drafts/conv_1", "drafts/conv_007"]
FIELDS += ["logits/ranges", "x", "public/values"]


def _tables(seed: int, classes: set[int], rows: int, shape: list[int]) -> list[Knowledge]:
    rng = torch.Generator().manual_seed(seed)
    counts = torch.zeros(8, dtype=torch.int64)
    counts[torch.tensor(sorted(classes))] = torch.randint(1, 100, (len(classes),), generator=rng)
    convs = {k: torch.randn(rows, *shape, generator=rng) for k in (1, 5)}
    return [
        ClassTable(label="logit", counts=counts, values=torch.randn(len(classes), 8, generator=rng)),
        FeaturePairs(inputs=convs[1], outputs=torch.randn(rows, 3, generator=rng)),
        DraftSet(
            ids=torch.arange(rows),
            depths=torch.tensor([5]),
            convs=convs,
            logits=torch.randn(rows, 4, generator=rng),
        ),
    ]


@given(
    seed=st.integers(0, 1000),
    classes=st.sets(st.integers(0, 7), min_size=1),
    rows=st.integers(1, 40),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
@settings(max_examples=60)
def test_a_round_trip_keeps_every_bit(
    seed: int, classes: set[int], rows: int, shape: list[int], tmp_path_factory: object
) -> None:
    """fp32 rounds nothing."""
    items = _tables(seed, classes, rows, shape)
    named = named_tensors(items)
    table = [(name, codec_for(tensor, "fp32"), tuple(tensor.shape)) for name, tensor in named]
    path = Path(tmp_path_factory.mktemp("k")) / "k"  # type: ignore[attr-defined]
    write_container(path, {}, table, (tensor for _, tensor in named))
    with ContainerReader(path) as reader:
        came = parse(reader.header.entries, lambda entry: reader.tensor(entry.name), LIMITS, codec="fp32", source="it")
    back = dict(named_tensors(came))
    assert all(torch.equal(back[name], tensor) for name, tensor in named)


entries = st.builds(
    lambda name, codec, shape: (name, codec, tuple(shape)),
    st.sampled_from(FIELDS),
    st.sampled_from(CODECS),
    st.lists(st.integers(0, 50), max_size=4),
)


@given(st.lists(entries, max_size=6, unique_by=lambda row: row[0]))
@settings(max_examples=300)
def test_any_table_is_whole_or_refused(rows: list[tuple[str, str, tuple[int, ...]]]) -> None:
    """Only `PayloadError`; what passes has equal numbers of rows in each kind."""
    made = [
        Entry(f"knowledge/{name}", codec, shape, 0, tensor_bytes(codec, shape))
        for name, codec, shape in rows
        if codec != "int8" or len(shape) >= 2
    ]
    try:
        kinds = check_entries(made, LIMITS, codec="fp32", source="it")
    except PayloadError:
        return
    for kind in kinds:
        mine = [entry for entry in made if entry.name.startswith(f"knowledge/{kind}/")]
        assert len({entry.shape[0] for entry in mine if not entry.name.endswith(("counts", "depths", "ranges"))}) == 1
