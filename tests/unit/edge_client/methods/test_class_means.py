"""Felo, FedHe and FedProto: the terms by hand, what is sent, how the server joins it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from depth import NUM_CLASSES, Memory, equal, model_of
from knowing import batch_of, begun, identity_model, loss_of, run, table, weights
from linear import linear_model
from rows import run_file
from torch import Tensor
from torch.nn import functional

from edge_client.errors import InputError
from edge_client.knowledge.kinds import ClassTable, one
from edge_client.methods.base import Header, Lesson, PlainClient
from edge_client.methods.cards.fedhe import FedHeParameters
from edge_client.methods.cards.fedproto import FedProtoParameters
from edge_client.methods.cards.felo import FeloParameters
from edge_client.methods.class_means import TAPS, ClassMeans, ClassMemory, ClassTeacher, fold_tables
from edge_client.methods.fedhe import FedHeClient
from edge_client.methods.fedproto import FedProtoClient, nearest
from edge_client.methods.felo import FeloClient
from edge_client.models.contract import Model
from edge_client.models.taps import tapped

FELO, FEDHE, FEDPROTO = FeloParameters(), FedHeParameters(), FedProtoParameters()


def _means(memory: dict[str, ClassMemory], num_classes: int, **how: bool) -> dict[str, ClassTable]:
    made = {group: kept.means(group.partition("/")[0], num_classes, **how) for group, kept in memory.items()}
    return {group: table for group, table in made.items() if table is not None}


def _joined(tables: list[tuple[str, ClassTable]], **how: bool) -> ClassTable:
    (joined,) = _means(fold_tables({}, tables, round=1), 3, **how).values()
    return joined


def test_the_server_takes_the_mean_over_the_devices_that_have_a_class() -> None:
    """Class 0: (2,0) of 2 samples, (4,2) of 6: uniform (3,1), by count (3.5,1.5); class 1: (0,6); class 2: absent."""
    a = ClassTable(label="logit", counts=torch.tensor([2, 0, 0]), values=torch.tensor([[2.0, 0.0]]))
    b = ClassTable(label="logit", counts=torch.tensor([6, 3, 0]), values=torch.tensor([[4.0, 2.0], [0.0, 6.0]]))
    uniform, counted = _joined([("a", a), ("b", b)]), _joined([("a", a), ("b", b)], by_count=True)
    assert uniform.values.tolist() == [[3.0, 1.0], [0.0, 6.0]]
    assert counted.values.tolist() == [[3.5, 1.5], [0.0, 6.0]]
    assert uniform.counts.tolist() == [2, 1, 0]


def test_what_a_device_said_stays_until_it_says_something_new() -> None:
    """Round 1: a 1, b 3, mean 2; round 2: a alone says 5: (5 + 3) / 2 = 4; with a max_age of 0 rounds after: 5."""
    first = [("a", table("logit", [[1.0], None])), ("b", table("logit", [[3.0], [7.0]]))]
    memory = fold_tables({}, first, round=1)
    targets = _means(memory, 2)
    assert targets["logit/1"].values.tolist() == [[2.0], [7.0]]
    again = [("a", table("logit", [[5.0], None]))]
    memory = fold_tables(memory, again, round=2)
    targets = _means(memory, 2)
    assert targets["logit/1"].values.tolist() == [[4.0], [7.0]]
    assert memory["logit/1"].rounds.tolist().count(1) == 2
    targets = _means(fold_tables(memory, again, round=4, max_age=2), 2)
    assert targets["logit/1"].values.tolist() == [[5.0]]  # b's of round 1 are older than two rounds
    assert targets["logit/1"].counts.tolist() == [1, 0]
    targets = _means(fold_tables(memory, again, round=3, max_age=2), 2)
    assert targets["logit/1"].values.tolist() == [[4.0], [7.0]]  # two rounds old: still there


def test_features_of_different_widths_are_different_tables() -> None:
    """A device with 2 features and one with 3: neither counts for the other; their logits do."""
    received = [
        ("a", table("feature", [[1.0, 2.0]])),
        ("a", table("logit", [[1.0]])),
        ("b", table("feature", [[3.0, 4.0, 5.0]])),
        ("b", table("logit", [[3.0]])),
    ]
    targets = _means(fold_tables({}, received, round=1), 1)
    assert targets["feature/2"].values.tolist() == [[1.0, 2.0]]
    assert targets["feature/3"].values.tolist() == [[3.0, 4.0, 5.0]]
    assert targets["logit/1"].values.tolist() == [[2.0]]


def test_the_order_of_devices_changes_no_bit() -> None:
    """Rows are sorted by device before they are added up."""
    tables = [(name, table("logit", [[0.1 * k], [1 / (k + 1)]])) for k, name in enumerate("abcdefg")]
    one_way, other = (_means(fold_tables({}, t, round=1), 2)["logit/1"] for t in (tables, tables[::-1]))
    assert torch.equal(one_way.values, other.values)


def test_memory_survives_as_tensors() -> None:
    """What is written into the server's state makes the same memory again."""
    memory = fold_tables({}, [("a", table("logit", [[1.0], [2.0]]))], round=3)
    again = ClassMemory(**memory["logit/1"].tensors())
    assert again.means("logit", 2).values.tolist() == [[1.0], [2.0]]  # type: ignore[union-attr]


FELO_MSE, FELO_CE = 2.5, math.log(2)
FELO_KL = 0.880797 * math.log(0.880797 / 0.5) + 0.119203 * math.log(0.119203 / 0.5)  # 0.327813


@pytest.mark.parametrize(("reduction", "kl"), [("batchmean", FELO_KL), ("mean", FELO_KL / 2)])
def test_felos_loss_by_hand(reduction: str, kl: float) -> None:
    """Logit (0,0) to (3,1), feature (1,3) to (0,1), label 0: CE .693147 + .5 (2.5 + KL .327813) = 2.107054."""
    knowledge = (table("feature", [[0.0, 1.0], None]), table("logit", [[3.0, 1.0], None]))
    client = FeloClient(FeloParameters(kl_reduction=reduction))
    begun(client, identity_model(), knowledge=knowledge)
    loss = loss_of(client, batch_of([[1.0, 3.0]], [0]))
    assert loss == pytest.approx(FELO_CE + 0.5 * (FELO_MSE + kl), abs=1e-6)
    if reduction == "batchmean":
        assert loss == pytest.approx(2.107054, abs=1e-6)


def test_felo_divides_by_the_samples_that_have_a_target() -> None:
    """Two samples, the second's class has no target: terms of the first alone, divided by 1; CE by 2."""
    knowledge = (table("feature", [[0.0, 1.0], None]), table("logit", [[3.0, 1.0], None]))
    client = begun(FeloClient(FELO), identity_model(), knowledge=knowledge)
    loss = loss_of(client, batch_of([[1.0, 3.0], [9.0, 9.0]], [0, 1]))
    assert loss == pytest.approx(FELO_CE + 0.5 * (FELO_MSE + FELO_KL), abs=1e-6)
    alone = loss_of(client, batch_of([[9.0, 9.0]], [1]))
    assert alone == pytest.approx(FELO_CE)


@pytest.mark.parametrize(("client", "distance"), [(FeloClient(FELO), FELO_KL), (FedHeClient(FEDHE), 5.0)])
def test_logits_of_a_class_without_a_target_are_pulled_nowhere(client: Any, distance: float) -> None:
    """Logits are the features: (0, 0) of class 0 with target (3, 1), (ln 3, 0) of class 1 with none: its CE is ln 4.

    A target of zeros instead would add KL((.5, .5) || (.75, .25)), or (ln 3)^2 / 2.
    """
    model = identity_model()
    model.get_parameter("1.weight").data = torch.eye(2)
    begun(client, model, knowledge=(table("logit", [[3.0, 1.0], None]),))
    loss = loss_of(client, batch_of([[0.0, 0.0], [math.log(3), 0.0]], [0, 1]))
    assert loss == pytest.approx((math.log(2) + math.log(4)) / 2 + 0.5 * distance, abs=1e-6)


def test_felo_with_features_only() -> None:
    """Logits may be absent, as the class means of a synthetic table may be: that term is 0."""
    client = begun(FeloClient(FELO), identity_model(), knowledge=(table("feature", [[0.0, 1.0], None]),))
    assert loss_of(client, batch_of([[1.0, 3.0]], [0])) == pytest.approx(FELO_CE + 0.5 * FELO_MSE, abs=1e-6)


def test_felos_feature_term_leaves_the_classifier_alone() -> None:
    """The gradient of MSE(s, s_y) ends below the classifier; that of KL does not."""
    for label, touches in (("feature", False), ("logit", True)):
        model = identity_model()
        target = table(label, [[0.0, 1.0], [5.0, 0.0]])
        client = begun(FeloClient(FeloParameters(alpha=1000.0)), model, knowledge=(target,))
        plain = begun(PlainClient(), identity_model())
        grads = []
        for one_ in (client, plain):
            (term,) = one_.terms(batch_of([[1.0, 3.0]], [0]), one_.phases()[0])
            assert term.each is not None
            grads.append(torch.autograd.grad(term.each.sum(), one_.job.model.get_parameter("1.weight"))[0])  # type: ignore[attr-defined]
        assert torch.allclose(*grads) != touches


def test_fedhes_loss_by_hand() -> None:
    """Logits 0, target (3,1) for class 0 only: MSE (9 + 1)/2 = 5, over the one sample with a target; CE log 2."""
    client = begun(FedHeClient(FEDHE), identity_model(), knowledge=(table("logit", [[3.0, 1.0], None]),))
    loss = loss_of(client, batch_of([[1.0, 3.0], [9.0, 9.0]], [0, 1]))
    assert loss == pytest.approx(FELO_CE + 0.5 * 5.0, abs=1e-6)


def test_fedprotos_loss_by_hand() -> None:
    """Features (1,1), (2,0), prototype (0,0) for the first class only: MSE = (1 + 0)/2 = .5; CE log 2."""
    client = begun(FedProtoClient(FEDPROTO), identity_model(), knowledge=(table("feature", [[0.0, 0.0], None]),))
    loss = loss_of(client, batch_of([[1.0, 1.0], [2.0, 0.0]], [0, 1]))
    assert loss == pytest.approx(FELO_CE + 0.5, abs=1e-6)


def test_fedproto_answers_with_the_nearest_prototype_of_its_own_classes() -> None:
    """Feature (1,0): the prototype (1,0) of class 2 is nearest, but the device has classes 0 and 1 only."""
    prototypes = table("feature", [[3.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    client = FedProtoClient(FEDPROTO)
    begun(client, identity_model(num_classes=3), classes=3, knowledge=(prototypes,), class_counts=(5, 5, 0))
    assert client.predict(torch.tensor([[1.0, 0.0], [2.9, 0.0]])).argmax(dim=1).tolist() == [1, 0]
    everything = nearest(torch.tensor([[1.0, 0.0]]), prototypes.values, torch.tensor([True, True, True]))
    assert everything.tolist() == [[-4.0, -1.0, 0.0]]
    classifier = FedProtoClient(FedProtoParameters(inference="classifier"))
    begun(classifier, identity_model(num_classes=3), classes=3, knowledge=(prototypes,))
    assert classifier.predict(torch.ones(1, 2)).tolist() == [[0.0, 0.0, 0.0]]


def test_before_anything_came_the_classifier_answers() -> None:
    """The first round, and a device that has none of the classes with a prototype."""
    for knowledge, counts in (((), (5, 5)), ((table("feature", [[0.0, 0.0], None]),), (0, 5))):
        client = begun(FedProtoClient(FEDPROTO), identity_model(), knowledge=knowledge, class_counts=counts)
        assert client.predict(torch.ones(1, 2)).tolist() == [[0.0, 0.0]]


def _replayed(model: Model, data: Memory, epochs: int) -> dict[str, Tensor]:
    """Class sums over the last epoch of plain training, replayed: features and logits before each step."""
    seen: dict[str, list[Tensor]] = {"features": [], "logits": [], "labels": []}

    class Watching(PlainClient):
        def terms(self, batch, phase):  # type: ignore[no-untyped-def]
            taps, logits = tapped(self.job.model, ["features"], batch.x)
            if number[0] >= (epochs - 1) * 3:  # 20 samples in batches of 8 are 3 steps
                seen["features"].append(taps["features"].detach().flatten(1))
                seen["logits"].append(logits.detach())
                seen["labels"].append(batch.y)
            number[0] += 1
            from edge_client.methods.base import Term

            yield Term(name="ce", each=functional.cross_entropy(logits, batch.y, reduction="none"))

    number = [0]
    run(Watching(), model, data, classes=NUM_CLASSES, epochs=epochs)
    return {name: torch.cat(values) for name, values in seen.items()}


SENT = {"felo": ("feature", "logit"), "fedhe": ("logit",), "fedproto": ("feature",)}


@pytest.mark.parametrize(
    ("method", "kind"), [("felo", "mlp"), ("felo", "resnet10"), ("fedhe", "resnet10"), ("fedproto", "resnet10")]
)
def test_class_means_are_those_of_the_last_epoch_in_training_mode(method: str, kind: str) -> None:
    """Two epochs replayed step by step: the means of what was seen in the second, not of the first, nor afterwards."""
    data = Memory()
    reference = _replayed(model_of(kind), data, epochs=2)
    outcome = run(CLIENTS[method](), model_of(kind), data, classes=NUM_CLASSES, epochs=2)
    assert len(outcome.knowledge) == len(SENT[method])
    for label, name in ((label, TAPS[label]) for label in SENT[method]):
        found = one(outcome.knowledge, ClassTable, label)
        assert found is not None
        assert found.counts.tolist() == torch.bincount(data.labels, minlength=NUM_CLASSES).tolist()
        for row, number in zip(found.values, found.classes, strict=True):
            mean = reference[name][reference["labels"] == number].mean(dim=0)
            torch.testing.assert_close(row, mean, rtol=1e-4, atol=1e-5)


def test_a_class_that_a_device_lacks_is_not_sent() -> None:
    """No row, no zeros that would be a false target."""
    data = Memory()
    data.labels = torch.where(data.labels == 1, 0, data.labels)
    outcome = run(FedHeClient(FEDHE), model_of("mlp"), data, classes=NUM_CLASSES)
    (found,) = outcome.knowledge
    assert isinstance(found, ClassTable)
    assert int(found.counts[1]) == 0
    assert found.values.shape == (2, NUM_CLASSES)


def test_clipping_bounds_what_a_sample_adds() -> None:
    """Rows (3,4) and (0,1), bound 1: (.6,.8) and (0,1), mean (.3,.9)."""
    means = ClassMeans(1, clip_norm=1.0)
    means.add(torch.tensor([0, 0]), torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    made = means.table("feature")
    assert made is not None
    torch.testing.assert_close(made.values, torch.tensor([[0.3, 0.9]]))


CLIENTS = {
    "felo": lambda: FeloClient(FELO),
    "fedhe": lambda: FedHeClient(FEDHE),
    "fedproto": lambda: FedProtoClient(FEDPROTO),
}
OFF = {
    "felo": lambda: FeloClient(FeloParameters(alpha=0)),
    "fedhe": lambda: FedHeClient(FedHeParameters(alpha=0)),
    "fedproto": lambda: FedProtoClient(FedProtoParameters(ld=0)),
}


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("microbatch", [8, 3])
def test_knowledge_is_used_and_can_be_switched_off(name: str, microbatch: int) -> None:
    """Without targets, or switched off: FedAvg's weights bit for bit; with targets others, down to the stem."""
    data = Memory()
    knowledge = run(FeloClient(FELO), model_of("mlp", seed=2), data, classes=NUM_CLASSES).knowledge
    results = {}
    for key, client, given in (
        ("plain", PlainClient(), ()),
        ("first", CLIENTS[name](), ()),
        ("off", OFF[name](), knowledge),
        ("on", CLIENTS[name](), knowledge),
    ):
        model = model_of("mlp")
        run(client, model, data, knowledge=given, classes=NUM_CLASSES, microbatch=microbatch)
        results[key] = weights(model)
    assert equal(results["plain"], results["first"])
    assert equal(results["plain"], results["off"])
    first = next(iter(results["on"]))
    assert not torch.equal(results["plain"][first], results["on"][first])


@pytest.mark.parametrize("name", ["felo", "fedhe", "fedproto"])
def test_microbatches_change_nothing_but_rounding(name: str) -> None:
    """Masked means divide by the whole batch's mask, here with a class that has no target."""
    data = Memory()
    given = tuple(
        found.only(torch.tensor([True, False, True]))
        for found in run(FeloClient(FELO), model_of("mlp", seed=2), data, classes=NUM_CLASSES).knowledge
        if isinstance(found, ClassTable)
    )
    results = []
    for microbatch in (8, 3):
        model = model_of("mlp")
        run(
            CLIENTS[name](),
            model,
            data,
            knowledge=[k for k in given if k is not None],
            classes=NUM_CLASSES,
            microbatch=microbatch,
        )
        results.append(weights(model))
    for key, value in results[0].items():
        torch.testing.assert_close(value, results[1][key], rtol=1e-4, atol=1e-6)


def test_targets_of_another_width_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Features of an unknown signature: cross entropy alone, and a line in the log."""
    client = begun(FeloClient(FELO), identity_model(), knowledge=(table("feature", [[0.0], [1.0]]),))
    assert loss_of(client, batch_of([[1.0, 3.0]], [0])) == pytest.approx(FELO_CE)
    assert "targets for 'feature' have 1 numbers, this model puts out 2; they are left out" in caplog.text


Said = tuple[str, str, ClassTable]


def _received(*said: Said) -> Any:
    def received() -> Any:
        for device, cut, told in said:
            yield Header(device=device, num_samples=1, slice=cut), (told,)

    return received


def _taught(teacher: ClassTeacher, memory: Any, *said: Said) -> Any:
    return teacher.learn(memory, _received(*said), Lesson(round=1, num_classes=2, seed=1), {})


def test_a_slice_is_told_the_features_of_its_own_width() -> None:
    """Slices of width 2 and 3: each its own features; a slice that nobody trained yet: logits alone."""
    teacher = ClassTeacher()
    logits = table("logit", [[1.0, 2.0], None])
    memory = _taught(
        teacher,
        {},
        ("a", "full", table("feature", [[1.0, 2.0, 3.0], None])),
        ("b", "width:1/2", table("feature", [[4.0, 5.0], None])),
        ("b", "width:1/2", logits),
    )
    lesson = Lesson(round=2, num_classes=2, seed=1)
    told = {
        cut: {t.kind: t.values.tolist() for t in teacher.tell(memory, cut=cut, device="", lesson=lesson)}
        for cut in ("full", "width:1/2", "width:1/4")
    }
    assert told["full"] == {"class/feature": [[1.0, 2.0, 3.0]], "class/logit": [[1.0, 2.0]]}
    assert told["width:1/2"] == {"class/feature": [[4.0, 5.0]], "class/logit": [[1.0, 2.0]]}
    assert told["width:1/4"] == {"class/logit": [[1.0, 2.0]]}


def test_one_device_cannot_change_the_width_of_a_slice() -> None:
    """Two devices say 2 numbers, one says 3: it is left out, and named."""
    teacher = ClassTeacher()
    said: list[Said] = [
        ("a", "full", table("feature", [[9.0, 9.0, 9.0]] * 2)),
        ("b", "full", table("feature", [[1.0, 1.0]] * 2)),
        ("c", "full", table("feature", [[3.0, 3.0]] * 2)),
    ]
    memory = _taught(teacher, {}, *said)
    (told,) = teacher.tell(memory, cut="full", device="", lesson=Lesson(round=2, num_classes=2, seed=1))
    assert told.values.tolist() == [[2.0, 2.0]] * 2
    (found,) = teacher.left_out({}, _received(*said), Lesson(round=1, num_classes=2, seed=1))
    assert (found.device, found.code) == ("a", "signature")
    assert "its features have 3 numbers, those of slice 'full' have 2" in found.detail


def test_a_class_that_a_device_tells_nothing_of_is_named() -> None:
    """a has class 0 alone, of features and logits; b both. A class counts as told if any table has it."""
    said: list[Said] = [
        ("a", "full", table("logit", [[1.0, 2.0], None])),
        ("a", "full", table("feature", [[1.0], None])),
        ("b", "full", table("logit", [[1.0, 2.0], [3.0, 4.0]])),
        ("b", "full", table("feature", [[1.0], None])),
    ]
    file = run_file(classes=["ok", "dent"])
    (found,) = ClassTeacher().left_out({}, _received(*said), Lesson(round=1, num_classes=2, seed=1, run=file))
    assert (found.device, found.code) == ("a", "missing_class")
    assert found.detail == "tells nothing of 1 of 2 classes, having no or too few samples: 'dent'"


@pytest.mark.parametrize("name", ["felo", "fedproto"])
def test_a_model_of_one_unit_has_no_features(name: str) -> None:
    """It is refused at once, with what would work."""
    with pytest.raises(InputError, match=f"method '{name}' exchanges what the model's classifier gets"):
        begun(CLIENTS[name](), linear_model([0.0, 0.0]))


@pytest.mark.parametrize("name", ["fedhe", "fedproto"])
def test_models_stay_on_the_device(name: str) -> None:
    """What the next round begins with is what the last one ended with, whatever the server's model is."""
    data = Memory()
    model = model_of("mlp")
    outcome = run(CLIENTS[name](), model, data, classes=NUM_CLASSES)
    other = model_of("mlp", seed=7)
    begun(CLIENTS[name](), other, state=outcome.state, classes=NUM_CLASSES)
    assert equal(weights(other), weights(model))
