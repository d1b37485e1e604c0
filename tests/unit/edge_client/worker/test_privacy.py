"""The gate on a device: what never leaves, the noise and its cost by hand, the ledger."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.config.device_file import ShareSection, load_device_file
from edge_client.errors import InputError, MachineError
from edge_client.knowledge.kinds import ClassTable, DraftSet, FeatureMaps, FeaturePairs, Knowledge, SampleLogits
from edge_client.worker.privacy import Gate, Ledger, epsilon_of, fresh_noise

IDS = torch.arange(2)
PAIRS = FeaturePairs(inputs=torch.ones(2, 3), outputs=torch.ones(2, 3))
MAPS = FeatureMaps(ids=IDS, labels=IDS, logits=torch.ones(2, 3), values=torch.ones(2, 3))
DRAFTS = DraftSet(ids=IDS, depths=IDS, convs={1: torch.ones(2, 3)}, logits=torch.ones(2, 3))
LOGITS = SampleLogits(ids=IDS, values=torch.ones(2, 3))
SAMPLES: list[Knowledge] = [PAIRS, MAPS, DRAFTS, LOGITS]


def gate(path: Path, **share: bool | int | float) -> Gate:
    """Of an owner who wrote this."""
    return Gate(share=ShareSection(**share), ledger=Ledger(path / "ledger"))  # type: ignore[arg-type]


def table(*counts: int, label: str = "feature", width: int = 3) -> ClassTable:
    """Means of ones."""
    there = sum(count > 0 for count in counts)
    return ClassTable(label=label, counts=torch.tensor(counts), values=torch.ones(there, width))


def release(owner: Gate, *items: Knowledge) -> tuple[Knowledge, ...]:
    """With a known generator."""
    return owner.release(items, run="r-1", round=3, noise=torch.Generator().manual_seed(1))


def test_only_classes_with_enough_samples_leave(tmp_path: Path) -> None:
    """Counts 31, 32, 0, 100 with the default of 32: the second and the fourth; the others look absent."""
    (left,) = release(gate(tmp_path), table(31, 32, 0, 100))
    assert isinstance(left, ClassTable)
    assert left.counts.tolist() == [0, 32, 0, 100]
    assert left.values.shape == (2, 3)
    assert release(gate(tmp_path), table(31, 0, 5, 1)) == ()


def test_no_owner_can_go_below_ten(tmp_path: Path) -> None:
    """A section made by hand with 1; a file that says so is refused."""
    (left,) = release(gate(tmp_path, min_count=1), table(9, 10))
    assert isinstance(left, ClassTable)
    assert left.counts.tolist() == [0, 10]
    path = tmp_path / "device.toml"
    path.write_text("share = { min-count = 9 }")
    with pytest.raises(InputError, match=r"share\.min-count: expected 10 to"):
        load_device_file(path)


def test_nothing_of_single_samples_leaves_unless_the_owner_allows_it(tmp_path: Path) -> None:
    """Pairs and maps need `features`, drafts and logits for shared samples need `drafts`; neither is the default."""
    assert release(gate(tmp_path), *SAMPLES) == ()
    assert release(gate(tmp_path, features=True), *SAMPLES) == (PAIRS, MAPS)
    assert release(gate(tmp_path, drafts=True), *SAMPLES) == (DRAFTS, LOGITS)
    assert release(gate(tmp_path, class_statistics=False), table(50)) == ()


@pytest.mark.parametrize(
    ("kinds", "share", "told"),
    [
        ({"class/feature"}, {"class_statistics": False}, "keeps class means (share.class-statistics = false"),
        ({"pairs"}, {}, "keeps features of single samples (share.features = false"),
        ({"maps"}, {}, "keeps features of single samples"),
        ({"drafts"}, {"features": True}, "keeps its model's outputs for shared samples (share.drafts = false"),
        ({"logits", "class/logit"}, {}, "share.drafts = false"),
    ],
)
def test_a_run_that_asks_for_more_is_refused_before_training(
    kinds: set[str], share: dict[str, bool], told: str, tmp_path: Path
) -> None:
    """With a code and the line of device.toml that decides."""
    refused = gate(tmp_path, **share).refusal(kinds)
    assert refused is not None
    assert refused.code == "not_shared"
    assert told in refused.detail


def test_what_is_allowed_is_not_refused(tmp_path: Path) -> None:
    """Class means by default; nothing at all for methods that send none."""
    assert gate(tmp_path).refusal({"class/feature", "class/logit"}) is None
    assert gate(tmp_path).refusal(set()) is None
    assert gate(tmp_path, features=True, drafts=True).refusal({"pairs", "maps", "drafts", "logits"}) is None


SIGMAS = [(10, 1, 0.138), (10, 10, 0.437), (32, 100, 0.432), (100, 10, 0.044), (500, 100, 0.028), (2000, 1, 0.001)]


@pytest.mark.parametrize(("count", "releases", "sigma"), SIGMAS)
def test_the_noise_that_a_budget_buys(count: int, releases: int, sigma: float) -> None:
    """epsilon 8 at delta 1e-5, clip 1: sqrt(rho) from x^2 + 2 sqrt(ln 1e5) x = 8; sigma = (2/n) / sqrt(2 rho)."""
    root = -math.sqrt(math.log(1e5)) + math.sqrt(math.log(1e5) + 8)
    rho = root**2 / releases
    assert epsilon_of(releases * rho) == pytest.approx(8)
    noise = 1 / math.sqrt(2 * rho)
    assert noise * 2 / count == pytest.approx(sigma, abs=6e-4)


def test_noise_has_the_size_that_was_asked_for(tmp_path: Path) -> None:
    """noise 3, clip 2: standard deviation 3 x 2 x 2 / n = .12 at 100 samples, .3 at 40; over 20,000 numbers each."""
    owner = gate(tmp_path, noise=3.0, clip=2.0)
    (left,) = release(owner, table(100, 40, width=20_000))
    assert isinstance(left, ClassTable)
    spread = (left.values - 1).std(dim=1)
    assert spread.tolist() == pytest.approx([0.12, 0.3], rel=0.03)
    assert (left.values - 1).mean(dim=1).tolist() == pytest.approx([0, 0], abs=0.01)


def test_without_noise_values_stay_and_nothing_is_written_down(tmp_path: Path) -> None:
    """And nobody calls it private."""
    owner = gate(tmp_path, clip=1.0)
    given = table(40)
    (left,) = release(owner, given)
    assert isinstance(left, ClassTable)
    assert torch.equal(left.values, given.values)
    assert owner.ledger.releases() == []
    assert owner.describe() == "means of 32 samples or more, clipped to 1, no noise: not differentially private"


def test_the_ledger_adds_up_over_tables_rounds_and_processes(tmp_path: Path) -> None:
    """noise 5: rho 1/50 per table; two tables in each of two rounds: 4/50 = .08; epsilon .08 + 2 sqrt(.08 ln 1e5)."""
    for _ in range(2):
        release(gate(tmp_path, noise=5.0, clip=1.0), table(40, 64), table(40, 64, label="logit"))
    again = gate(tmp_path, noise=5.0, clip=1.0, epsilon=9.0)
    assert again.ledger.spent() == pytest.approx(0.08)
    first = again.ledger.releases()[0]
    assert (first.run, first.round, first.tables, first.noise, first.least) == ("r-1", 3, 2, 5.0, 40)
    assert epsilon_of(0.08) == pytest.approx(0.08 + 2 * math.sqrt(0.08 * math.log(1e5)))
    assert "epsilon 2 of 9 spent (delta 1e-05)" in again.describe()


def test_a_device_stops_before_its_budget_is_passed(tmp_path: Path) -> None:
    """rho .02 a table, epsilon 2: the largest rho with epsilon 2 is .0801: four tables, not six."""
    owner = gate(tmp_path, noise=5.0, clip=1.0, epsilon=2.0)
    kinds = {"class/feature", "class/logit"}
    both = (table(40), table(40, label="logit"))
    for _ in range(2):
        assert owner.refusal(kinds) is None
        assert len(release(owner, *both)) == 2
    refused = owner.refusal(kinds)
    assert refused is not None
    assert refused.code == "privacy_budget"
    assert "one more release would make epsilon 2.47, this device's owner allows 2 in all" in refused.detail
    assert release(owner, *both) == ()  # whoever did not ask gets nothing
    assert epsilon_of(owner.ledger.spent()) <= 2


def test_a_damaged_ledger_lets_nothing_out(tmp_path: Path) -> None:
    """What was spent is unknown: fail, do not begin anew."""
    (tmp_path / "ledger").write_text('{"run": "r-1"')
    with pytest.raises(MachineError, match="is damaged; it says what was spent"):
        release(gate(tmp_path, noise=5.0, clip=1.0), table(40))


def test_noise_is_drawn_from_the_system_and_not_from_the_run() -> None:
    """Two generators never begin alike."""
    assert fresh_noise().initial_seed() != fresh_noise().initial_seed()


def test_noise_without_clipping_is_refused(tmp_path: Path) -> None:
    """Its size would have no meaning."""
    path = tmp_path / "device.toml"
    path.write_text("share = { noise = 1.0 }")
    with pytest.raises(InputError, match=r"share\.noise needs share\.clip"):
        load_device_file(path)


def test_a_bound_without_noise_is_refused(tmp_path: Path) -> None:
    """Nothing would be counted, and everything told: an owner who writes a bound wants one."""
    path = tmp_path / "device.toml"
    path.write_text("share = { clip = 1.0, epsilon = 4.0 }")
    with pytest.raises(InputError, match=r"share\.epsilon needs share\.noise"):
        load_device_file(path)
    path.write_text("share = { clip = 1.0, epsilon = 4.0, noise = 2.0 }")
    assert load_device_file(path).share.epsilon == 4.0


@given(
    counts=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    min_count=st.integers(0, 80),
    noise=st.sampled_from([0.0, 1.0, 30.0]),
    epsilon=st.sampled_from([0.0, 0.5, 3.0]),
    features=st.booleans(),
    drafts=st.booleans(),
    rounds=st.integers(1, 3),
)
@settings(max_examples=300)
def test_whatever_is_asked(
    counts: list[int],
    min_count: int,
    noise: float,
    epsilon: float,
    features: bool,
    drafts: bool,
    rounds: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """No class under the minimum, no row of a sample without permission, no budget passed."""
    share = ShareSection(min_count=min_count, clip=1.0, noise=noise, epsilon=epsilon, features=features, drafts=drafts)
    owner = Gate(share=share, ledger=Ledger(tmp_path_factory.mktemp("g") / "ledger"))
    for _ in range(rounds):
        given_ = [table(*counts)] if any(counts) else []
        for item in release(owner, *given_, *SAMPLES):
            if isinstance(item, ClassTable):
                there = item.counts[item.counts > 0]
                assert int(there.min()) >= max(10, min_count)
                assert len(there) == len(item.values)
            else:
                assert features if item in (PAIRS, MAPS) else drafts
    if epsilon:
        assert epsilon_of(owner.ledger.spent()) <= epsilon


def test_every_key_of_share_is_in_the_file(tmp_path: Path) -> None:
    """What an owner can write comes out as written."""
    path = tmp_path / "device.toml"
    path.write_text(
        "share = { class-statistics = false, min-count = 50, clip = 2.0, noise = 1.5, epsilon = 8.0, features = true, "
        "drafts = true }"
    )
    share = load_device_file(path).share
    assert dataclasses.replace(share, logs="errors") == ShareSection(
        class_statistics=False, min_count=50, clip=2.0, noise=1.5, epsilon=8.0, features=True, drafts=True
    )
