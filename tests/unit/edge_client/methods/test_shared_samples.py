"""FedMD and DraftFed: targets by hand, alignment, what is answered and when, that it is learnt."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from depth import NUM_CLASSES, SHAPE, Memory, equal, model_of
from knowing import begun, identity_model, run, weights
from linear import linear_model
from torch import Tensor, nn

from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.errors import InputError
from edge_client.knowledge.kinds import DraftSet, PublicSamples, SampleLogits, one
from edge_client.methods.base import Batch, Header, Lesson
from edge_client.methods.cards.draftfed import DraftFedParameters
from edge_client.methods.cards.fedmd import FedMdParameters
from edge_client.methods.draftfed import DraftFedClient, DraftTeacher, align, draft_taps, soft_cross_entropy, targets
from edge_client.methods.fedmd import ConsensusTeacher, FedMdClient, consensus
from edge_client.methods.shared_samples import load_public, outputs, window
from edge_client.models import registry as models
from edge_client.models.contract import from_sequential
from edge_client.models.slicing import parse
from edge_client.models.taps import tapped

PUBLIC = PublicSamples(values=torch.randn(12, *SHAPE, generator=torch.Generator().manual_seed(4)))
LESSON = Lesson(round=1, num_classes=2, seed=1)


def drafts(convs: dict[int, Any], logits: Any = ((0.0, 0.0),)) -> DraftSet:
    """Of the first samples, as many as there are logits."""
    tensors = {number: torch.tensor(value) for number, value in convs.items()}
    ids, depths = torch.arange(len(logits)), torch.tensor([max(convs)])
    return DraftSet(ids=ids, depths=depths, convs=tensors, logits=torch.tensor(logits))


def test_channels_are_cropped_or_padded() -> None:
    """(1,2,3) to 2 channels: (1,2); to 5: (1,2,3,0,0)."""
    draft = torch.tensor([[1.0, 2.0, 3.0]])
    assert align(draft, (2,)).tolist() == [[1.0, 2.0]]
    assert align(draft, (5,)).tolist() == [[1.0, 2.0, 3.0, 0.0, 0.0]]


def test_positions_shrink_by_area_and_grow_bilinearly() -> None:
    """[[1,2],[3,4]] to 1x1: 2.5; rows (0,0,0,8) of 4x4: 2, where bilinear would say 0; one value grows to itself."""
    square = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    assert align(square, (1, 1, 1)).item() == 2.5
    rows = torch.tensor([[[[0.0, 0.0, 0.0, 8.0]] * 4]])
    assert align(rows, (1, 1, 1)).item() == 2.0
    assert align(torch.full((1, 1, 1, 1), 3.0), (1, 2, 2)).tolist() == [[[[3.0, 3.0], [3.0, 3.0]]]]
    grown = torch.nn.functional.interpolate(square, size=(4, 4), mode="bilinear", align_corners=False)
    assert torch.equal(align(square, (1, 4, 4)), grown)


def test_one_axis_grows_while_the_other_shrinks() -> None:
    """2x4 to 4x2: columns become means of two (1.5, 3.5), then rows are interpolated between."""
    draft = torch.tensor([[[[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]]])
    fitted = align(draft, (1, 4, 2))
    assert fitted[0, 0, :, 0].tolist() == [1.5, 2.5, 4.5, 5.5]
    assert fitted[0, 0, 0].tolist() == [1.5, 3.5]


def test_area_at_a_factor_that_is_no_integer() -> None:
    """3 to 2, as torch's area: means of the first and the last two."""
    assert align(torch.tensor([[[1.0, 2.0, 6.0]]]), (1, 2)).tolist() == [[[1.5, 4.0]]]


def test_maps_beside_vectors() -> None:
    """A vector is the same at every position; a map becomes its mean."""
    assert align(torch.tensor([[1.0, 2.0]]), (2, 1, 2)).tolist() == [[[[1.0, 1.0]], [[2.0, 2.0]]]]
    assert align(torch.tensor([[[[1.0, 3.0]], [[5.0, 5.0]]]]), (2,)).tolist() == [[2.0, 5.0]]


def test_first_targets_by_hand() -> None:
    """D1 = (5,6) and (1,2,3): (3,4), loss 4; (3,4,1.5), loss 3.416667; with mask_padding (3,4,3), loss 2.666667."""
    i, j = drafts({1: [[5.0, 6.0]]}), drafts({1: [[1.0, 2.0, 3.0]]})
    for like, masked, expected, loss in (
        (i, False, [3.0, 4.0], 4.0),
        (j, False, [3.0, 4.0, 1.5], 3.416667),
        (j, True, [3.0, 4.0, 3.0], 2.666667),
    ):
        made = targets(like, [i, j], mask_padding=masked)
        assert made.convs[1][0].tolist() == expected
        assert (like.convs[1] - made.convs[1]).square().mean().item() == pytest.approx(loss, abs=1e-6)


def test_last_targets_by_hand() -> None:
    """Depths 2, 3, 4: T2 = mean(1, 3, 5) = 3; mean(2, 6) = 4; 7 alone."""
    one_ = drafts({1: [[0.0]], 2: [[1.0]]})
    two = drafts({1: [[0.0]], 2: [[3.0]], 3: [[2.0]]})
    three = drafts({1: [[0.0]], 2: [[5.0]], 3: [[6.0]], 4: [[7.0]]})
    every = [one_, two, three]
    made = [targets(like, every) for like in every]
    assert [float(t.convs[depth]) for t, depth in zip(made, (2, 3, 4), strict=True)] == [3.0, 4.0, 7.0]
    assert made[0].depths.tolist() == [2, 3, 4]


def test_a_shallower_model_says_nothing_about_deeper_convolutions() -> None:
    """A model of depth 2 has no third convolution; one that claims to is not deeper, and still has one: it counts."""
    shallow, deep = drafts({1: [[0.0]], 2: [[9.0]]}), drafts({1: [[0.0]], 3: [[2.0]]})
    assert float(targets(deep, [shallow, deep]).convs[3]) == 2.0


def test_logit_targets_by_hand() -> None:
    """(1,3), (3,1): (2,2), CE of the first 1.126928; softmax of the mean of (4,0), (0,1) is (.8176, .1824)."""
    a, b = drafts({1: [[0.0]]}, [[1.0, 3.0]]), drafts({1: [[0.0]]}, [[3.0, 1.0]])
    made = targets(a, [a, b])
    assert made.logits.tolist() == [[2.0, 2.0]]
    assert soft_cross_entropy(a.logits, made.logits).item() == pytest.approx(1.126928, abs=1e-6)
    c, d = drafts({1: [[0.0]]}, [[4.0, 0.0]]), drafts({1: [[0.0]]}, [[0.0, 1.0]])
    assert targets(c, [c, d]).logits.softmax(1)[0].tolist() == pytest.approx([0.8176, 0.1824], abs=1e-4)


def test_other_class_counts_keep_their_logits_to_themselves() -> None:
    """K = 2 and K = 3."""
    a, b = drafts({1: [[0.0]]}, [[1.0, 3.0]]), drafts({1: [[0.0]]}, [[3.0, 1.0, 0.0]])
    assert targets(a, [a, b]).logits.tolist() == [[1.0, 3.0]]


SIZES = {
    "resnet50": (18_442, (49,)),
    "resnet101": (22_538, (49, 100)),
    "resnet152": (26_634, (49, 100, 151)),
    "densenet121": (17_418, (120,)),
    "densenet161": (28_042, (120, 160)),
    "densenet169": (20_490, (120, 160, 168)),
    "densenet201": (21_514, (120, 160, 168, 200)),
}


@pytest.mark.parametrize("name", SIZES)
def test_the_sizes_of_the_paper(name: str) -> None:
    """Numbers per sample of 32x32 up, with supplements for shallower ones; bytes 4 times as many."""
    expected, positions = SIZES[name]
    with torch.device("meta"):
        model = models.build(name, input_shape=(3, 32, 32), num_classes=10, options={})
        taps = draft_taps(model)
        assert max(taps) == positions[-1]
        seen, logits = tapped(model.eval(), [taps[k] for k in (1, *positions)], torch.zeros(2, 3, 32, 32))
    assert sum(t[0].numel() for t in seen.values()) + logits[0].numel() == expected
    convs = {k: torch.zeros(128, *seen[taps[k]].shape[1:]) for k in (1, *positions)}
    sent = DraftSet(ids=torch.arange(128), depths=torch.tensor([1]), convs=convs, logits=torch.zeros(128, 10))
    floats = sum(4 * t.numel() for t in sent.tensors().values() if t.is_floating_point())
    assert floats == 4 * 128 * expected
    assert sent.nbytes() - floats <= 0.01 * floats + 512


def test_windows_go_round() -> None:
    """5 samples, 2 a round: 0 1, 2 3, 4 0, 1 2; 0 or too many: all."""
    assert [window(number, 5, 2).tolist() for number in (1, 2, 3, 4)] == [[0, 1], [2, 3], [0, 4], [1, 2]]
    assert window(3, 5, 0).tolist() == window(3, 5, 9).tolist() == [0, 1, 2, 3, 4]


def test_a_model_without_blocks_has_no_drafts() -> None:
    """Refused at once; blocks stand in for convolutions where there are no such taps."""
    with pytest.raises(InputError, match="this model has none; make it three units or more"):
        begun(DraftFedClient(DraftFedParameters()), linear_model([0.0, 0.0]))
    own = from_sequential(nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)]), input_shape=(2,))
    assert draft_taps(own) == {1: "block_1_out", 2: "block_2_out"}


def test_the_consensus_by_hand() -> None:
    """Logits (2,4), (0,2): (1,3), absolute errors of 1 and of (3 + 0) / 2; answers for other samples do not count."""
    ids = torch.tensor([0])
    a, b = (SampleLogits(ids=ids, values=torch.tensor([v])) for v in ([2.0, 4.0], [0.0, 2.0]))
    other = SampleLogits(ids=torch.tensor([1]), values=torch.tensor([[9.0, 9.0]]))
    agreed = consensus(iter([a, b, other]), ids)
    assert agreed is not None
    assert agreed.values.tolist() == [[1.0, 3.0]]
    client = FedMdClient(FedMdParameters())
    model = identity_model()
    model.get_parameter("1.weight").data = torch.eye(2)
    public = PublicSamples(values=torch.tensor([[2.0, 4.0]]))
    begun(client, model, knowledge=(agreed, public))
    learn = client.phases()[0]
    assert learn.data is not None
    x, y = learn.data.batch(torch.tensor([0]))
    (term,) = client.terms(Batch(x=x, y=y, num_whole=1, whole_y=y, first=True), learn)
    assert term.each is not None
    assert term.each.tolist() == [1.0]
    (term,) = client.terms(Batch(x=torch.tensor([[4.0, 3.0]]), y=y, num_whole=1, whole_y=y, first=True), learn)
    assert term.each is not None
    assert term.each.tolist() == [1.5]


CLIENTS: dict[str, Any] = {
    "fedmd": lambda **p: FedMdClient(FedMdParameters(**({"samples": 6} | p))),
    "draftfed": lambda **p: DraftFedClient(DraftFedParameters(**({"draft_batch": 6, "warmup_rounds": 0} | p))),
}


def _answer(name: str, kind: str = "resnet10", seed: int = 1, **more: Any) -> tuple[Any, dict[str, Tensor]]:
    model = model_of(kind, seed=seed)
    outcome = run(CLIENTS[name](), model, Memory(16), classes=NUM_CLASSES, knowledge=[PUBLIC], **more)
    (answer,) = outcome.knowledge
    return answer, weights(model)


@pytest.mark.parametrize("name", CLIENTS)
def test_answers_are_those_of_the_trained_model_in_evaluation_mode(name: str) -> None:
    """Round 2, windows of 6 of 12: samples 6 to 11; the model as it is afterwards, without batch statistics."""
    answer, trained = _answer(name)
    model = model_of("resnet10")
    model.load_state_dict(trained)
    assert answer.ids.tolist() == [6, 7, 8, 9, 10, 11]
    seen, logits = outputs(model, PUBLIC.values[6:], ["conv_1", "conv_9"], 4)
    torch.testing.assert_close(answer.values if name == "fedmd" else answer.logits, logits)
    model.train()
    with torch.no_grad():
        wrong = model(PUBLIC.values[6:])
    assert not torch.allclose(wrong, logits, atol=1e-3)
    if name == "draftfed":
        assert sorted(answer.convs) == [1, 9]
        torch.testing.assert_close(answer.convs[1], seen["conv_1"])
        torch.testing.assert_close(answer.convs[9], seen["conv_9"])


def test_supplements_are_what_shallower_models_need() -> None:
    """Depths 4, 8, 9 and 12 in the fleet: a model of 9 also tells what its convolutions 4 and 8 put out."""
    answer, _ = _answer("draftfed")
    told = DraftSet(ids=answer.ids, depths=torch.tensor([4, 8, 9, 12]), convs=answer.convs, logits=answer.logits)
    model = model_of("resnet10")
    outcome = run(CLIENTS["draftfed"](), model, Memory(16), classes=3, knowledge=[PUBLIC, told])
    found = one(outcome.knowledge, DraftSet)
    assert found is not None
    assert sorted(found.convs) == [1, 4, 8, 9]
    assert found.depths.tolist() == [9]
    seen, _ = outputs(model, PUBLIC.values[found.ids], ["conv_1", "conv_4", "conv_8", "conv_9"], 4)
    for number, draft in found.convs.items():
        torch.testing.assert_close(draft, seen[f"conv_{number}"])


@pytest.mark.parametrize("recompute", [None, "units"])
@pytest.mark.parametrize("name", CLIENTS)
def test_targets_are_learnt_and_can_be_switched_off(name: str, recompute: str | None) -> None:
    """Without targets, or with 0 passes over them: alone; with them another model, down to the stem."""
    told, _ = _answer(name, seed=2)
    off = {"fedmd": {"digest_epochs": 0}, "draftfed": {"draft_epochs": 0}}[name]
    results = {}
    for key, parameters, knowledge in (("alone", {}, []), ("off", off, [told]), ("on", {}, [told])):
        model = model_of("resnet10")
        model.recompute = recompute
        run(CLIENTS[name](**parameters), model, Memory(16), classes=3, knowledge=[PUBLIC, *knowledge], round=3)
        results[key] = weights(model)
    assert equal(results["alone"], results["off"])
    first = next(iter(results["on"]))
    assert not torch.equal(results["alone"][first], results["on"][first])


MIXES = {  # models, and the convolutions that each tells of in the second round
    "resnets": {"resnet50": (1, 49), "resnet101": (1, 49, 100), "resnet152": (1, 49, 100, 151)},
    "densenets": {"densenet121": (1, 120), "densenet161": (1, 120, 160)},
    "mixed": {"small-cnn": (1, 2), "resnet10": (1, 2, 9), "densenet121": (1, 2, 9, 120)},
}


@pytest.mark.parametrize("mix", ["mixed", *(pytest.param(name, marks=pytest.mark.slow) for name in list(MIXES)[:2])])
def test_architectures_exchange_drafts_and_learn_from_their_targets(mix: str) -> None:
    """An eighth of the channels. Round 1: first and last convolution; round 2: what shallower ones need as well.

    In round 3 every model learns towards targets of its own shapes, and becomes another one by it.
    """
    shape, samples = (3, 32, 32), Memory(4)
    samples.x = torch.randn(4, *shape, generator=torch.Generator().manual_seed(2))
    shared = PublicSamples(values=torch.randn(4, *shape, generator=torch.Generator().manual_seed(3)))
    teacher, memory = DraftTeacher(DraftFedParameters(draft_batch=4)), {"public": shared.values}
    samples.labels = torch.arange(4) % 2
    told: dict[str, tuple[DraftSet, ...]] = dict.fromkeys(MIXES[mix], ())
    for number in (1, 2, 3):
        said = []
        for name, positions in MIXES[mix].items():
            torch.manual_seed(1)
            model = models.build(name, input_shape=shape, num_classes=2, options={}, spec=parse("width:1/8"))
            before = weights(model)
            client = DraftFedClient(DraftFedParameters(draft_batch=4))
            keys = {"classes": 2, "round": number, "batch": 4, "learning_rate": 0.01 if number == 3 else 0.0}
            (sent,) = run(client, model, samples, knowledge=(shared, *told[name]), **keys).knowledge
            assert isinstance(sent, DraftSet)
            assert tuple(sent.convs) == (positions if number > 1 else (1, positions[-1]))
            said.append((name, name, sent))
            assert [phase.name for phase in client.phases()] == (["learn", "train"] if number == 3 else ["train"])
            assert number < 3 or not equal(before, weights(model))
        memory = _learn(teacher, memory, *said)
        assert _left_out(teacher, memory, *said) == []
        told = {name: teacher.tell(memory, cut=name, device="", lesson=LESSON) for name in told}
        for (_, name, sent), (aims,) in zip(said, told.values(), strict=True):
            assert {k: aims.convs[k].shape for k in aims.convs} == {k: sent.convs[k].shape for k in aims.convs}, name


@pytest.mark.parametrize("name", CLIENTS)
def test_shared_samples_do_not_move_running_statistics(name: str) -> None:
    """Learning rate 0: the same buffers with targets as without."""
    told, _ = _answer(name, seed=2)
    results = []
    for knowledge in ([PUBLIC], [PUBLIC, told]):
        model = model_of("resnet10")
        run(CLIENTS[name](), model, Memory(16), classes=3, knowledge=knowledge, round=3, learning_rate=0.0)
        results.append(weights(model))
    assert equal(*results)


def test_nobody_learns_from_drafts_of_untrained_models() -> None:
    """warmup_rounds = 1: targets of round 1 come with round 2 and are not learnt; those of round 2 are."""
    told, _ = _answer("draftfed", seed=2)
    for number, phases in ((2, ["train"]), (3, ["learn", "train"])):
        client = begun(
            CLIENTS["draftfed"](warmup_rounds=1), model_of("resnet10"), knowledge=(PUBLIC, told), round=number
        )
        assert [phase.name for phase in client.phases()] == phases


@pytest.mark.parametrize("name", CLIENTS)
def test_both_optimizers_go_on_from_round_to_round(name: str) -> None:
    """Their states are kept apart, with the model; momentum makes them visible."""
    told, _ = _answer(name, kind="mlp", seed=2)
    more = {"classes": 3, "knowledge": (PUBLIC, told)}
    outcome = run(CLIENTS[name](), model_of("mlp"), Memory(16), optimizer="adam", round=3, **more)
    prefixes = {key.partition("/")[0] for key in outcome.state}
    assert prefixes == {"model", "optimizer", "learning"}
    again = begun(CLIENTS[name](), model_of("mlp"), state=outcome.state, round=4, **more)
    learn, local = again.phases()
    assert learn.optimizer_state is not None
    assert local.optimizer_state is not None
    assert set(learn.optimizer_state) == set(local.optimizer_state)
    key = next(iter(learn.optimizer_state))
    assert not torch.equal(learn.optimizer_state[key]["m"], local.optimizer_state[key]["m"])


def _received(*said: tuple[str, str, Any]) -> Any:
    def received() -> Any:
        for device, cut, item in said:
            yield Header(device=device, num_samples=1, slice=cut), (item,)

    return received


def _learn(teacher: Any, memory: Any, *said: tuple[str, str, Any]) -> Any:
    return teacher.learn(memory, _received(*said), LESSON, {})


def _left_out(teacher: Any, memory: Any, *said: tuple[str, str, Any]) -> list[tuple[str, str, str]]:
    found = teacher.left_out(memory, _received(*said), LESSON)
    return [(one.device, one.code, one.detail) for one in found]


def test_the_draft_teacher_tells_every_architecture_its_own_targets() -> None:
    """Two slices of depths 1 and 2; a device with drafts of other samples is left out and named."""
    teacher = DraftTeacher(DraftFedParameters(draft_batch=1))
    shallow, deep = drafts({1: [[1.0, 3.0]]}), drafts({1: [[3.0]], 2: [[5.0]]})
    late = DraftSet(ids=torch.tensor([4]), depths=torch.tensor([1]), convs=shallow.convs, logits=shallow.logits)
    before, said = {"public": torch.zeros(5, 2)}, (("a", "full", deep), ("b", "depth:1", shallow), ("c", "full", late))
    memory = _learn(teacher, before, *said)
    (full,) = teacher.tell(memory, cut="full", device="", lesson=LESSON)
    (half,) = teacher.tell(memory, cut="depth:1", device="", lesson=LESSON)
    assert full.convs[1].tolist() == [[2.0]]
    assert half.convs[1].tolist() == [[2.0, 1.5]]
    assert full.depths.tolist() == half.depths.tolist() == [1, 2]
    assert teacher.tell(memory, cut="width:1/2", device="", lesson=LESSON) == ()
    detail = "its answers are for shared samples 4 to 4 (1), the round's are 0 to 0 (1); left out"
    assert _left_out(teacher, before, *said) == [("c", "other_samples", detail)]


def test_the_depth_of_an_architecture_that_is_away_is_still_told() -> None:
    """Depths 1 and 2 in round 1, 2 alone afterwards: it goes on to tell its first convolution, b may be back."""
    teacher, memory = DraftTeacher(DraftFedParameters(draft_batch=0)), {"public": torch.zeros(1, 2)}
    deep = drafts({1: [[3.0]], 2: [[5.0]]})
    memory = _learn(teacher, memory, ("a", "full", deep), ("b", "depth:1", drafts({1: [[1.0, 3.0]]})))
    for _ in range(2):
        memory = _learn(teacher, memory, ("a", "full", deep))
        (told,) = teacher.tell(memory, cut="full", device="", lesson=LESSON)
        assert told.depths.tolist() == [1, 2]
        assert teacher.tell(memory, cut="depth:1", device="", lesson=LESSON) == ()  # no targets of an earlier round


def test_one_device_cannot_change_the_shapes_of_a_slices_targets() -> None:
    """Two have drafts of 1 and 1 numbers, the first one of 3 and 1: targets are as most can use them, it is named."""
    teacher, before = DraftTeacher(DraftFedParameters(draft_batch=1)), {"public": torch.zeros(5, 2)}
    odd, usual = drafts({1: [[3.0, 3.0, 3.0]], 2: [[5.0]]}), drafts({1: [[3.0]], 2: [[5.0]]})
    said = (("a", "full", odd), ("b", "full", usual), ("c", "full", usual))
    (told,) = teacher.tell(_learn(teacher, before, *said), cut="full", device="", lesson=LESSON)
    assert told.convs[1].tolist() == [[3.0]]
    ((device, code, detail),) = _left_out(teacher, before, *said)
    assert (device, code) == ("a", "signature")
    assert "2 convolutions, (3,) to (1,)" in detail


def test_targets_of_another_model_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Of five convolutions, or of fewer classes: nothing is learnt from them, and the log says so."""
    model = model_of("resnet10")
    client = begun(CLIENTS["draftfed"](), model, knowledge=(PUBLIC, drafts({1: [[3.0]], 5: [[5.0]]})), round=4)
    assert [phase.name for phase in client.phases()] == ["train"]
    assert "targets for 5 convolutions are not of this model" in caplog.text
    fewer = SampleLogits(ids=torch.tensor([0]), values=torch.zeros(1, NUM_CLASSES - 1))
    client = begun(CLIENTS["fedmd"](), model, knowledge=(PUBLIC, fewer), round=4)
    assert [phase.name for phase in client.phases()] == ["train"]
    assert f"the consensus is of {NUM_CLASSES - 1} classes, this model has {NUM_CLASSES}" in caplog.text


def test_targets_for_samples_that_a_device_lacks_are_refused() -> None:
    """Twelve shared samples, a target for number 12: the device says so instead of training on something else."""
    beyond = SampleLogits(ids=torch.tensor([12]), values=torch.zeros(1, NUM_CLASSES))
    client = begun(CLIENTS["fedmd"](), model_of("mlp"), knowledge=(PUBLIC, beyond))
    with pytest.raises(InputError, match="up to number 12, this device has 12"):
        client.phases()


@pytest.mark.parametrize("name", ["fedmd", "draftfed"])
def test_logits_of_other_class_counts_and_an_empty_set_are_named(name: str) -> None:
    """The run has 2 classes, b says 3 numbers; without shared samples there is one line for all devices."""
    teacher: Any = ConsensusTeacher(FedMdParameters(samples=1, public="npz:p"))
    said = [SampleLogits(ids=torch.tensor([0]), values=torch.zeros(1, width)) for width in (2, 3)]
    if name == "draftfed":
        teacher = DraftTeacher(DraftFedParameters(draft_batch=1, public="npz:p"))
        said = [drafts({1: [[1.0]]}, torch.zeros(1, width).tolist()) for width in (2, 3)]  # type: ignore[misc]
    told = (("a", "full", said[0]), ("b", "depth:1", said[1]))
    ((device, code, detail),) = _left_out(teacher, {"public": torch.zeros(5, 2)}, *told)
    assert (device, code) == ("b", "class_count")
    assert detail == "its logits have 3 numbers, the run has 2 classes; they are left out"
    empty = {"public": torch.zeros(0, 2)}
    ((device, code, detail),) = _left_out(teacher, empty)
    assert (device, code) == ("", "no_public")
    assert detail == "the shared samples 'npz:p' are none; devices learn from their own alone"
    assert list(_learn(teacher, empty)) == ["public"]


def test_the_consensus_teacher_has_the_last_rounds_mean() -> None:
    """Before the first round nothing; then the mean of the cohort."""
    teacher = ConsensusTeacher(FedMdParameters(samples=1))
    memory = {"public": torch.zeros(5, 2)}
    assert teacher.tell(memory, cut="full", device="", lesson=LESSON) == ()
    said = [SampleLogits(ids=torch.tensor([0]), values=torch.tensor([[v, 0.0]])) for v in (2.0, 4.0)]
    memory = _learn(teacher, memory, ("a", "full", said[0]), ("b", "depth:1", said[1]))
    (told,) = teacher.tell(memory, cut="full", device="", lesson=LESSON)
    assert told.values.tolist() == [[3.0, 0.0]]


def _run_of(shape: list[int], **method: Any) -> RunFile:
    table = {
        "name": "t",
        "model": {"name": "mlp", "input": shape},
        "classes": ["a", "b"],
        "method": {"name": "draftfed", **method},
    }
    return parse_table(RunFile, table, source="t")


def test_shared_samples_are_read_once_as_the_model_takes_them(tmp_path: Path) -> None:
    """Grey 4x4 images for a model of 3x8x8: repeated and enlarged; labels of other classes do not matter."""
    np.savez(tmp_path / "p.npz", x=np.full((9, 4, 4), 51, dtype=np.uint8), y=np.arange(9))
    values = load_public(f"npz:{tmp_path / 'p.npz'}", _run_of([3, 8, 8]), 5)
    assert values.shape == (5, 3, 8, 8)
    torch.testing.assert_close(values, torch.full((5, 3, 8, 8), 0.2))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "needs shared samples: name them"),
        ("npz:/nowhere.npz", "public: .*does not exist"),
        ("/nowhere.npz", "public: unknown data source '/nowhere.npz'"),
    ],
)
def test_a_run_without_shared_samples_is_refused(text: str, told: str) -> None:
    """None named, not there, no source: before any device is asked."""
    with pytest.raises(InputError, match=told):
        load_public(text, _run_of([1, 4, 4]), 5)


def test_shared_samples_that_cannot_be_the_models_input_are_told_by_their_source(tmp_path: Path) -> None:
    """Five numbers are no image; labels are not read, and not to blame."""
    np.savez(tmp_path / "p.npz", x=np.zeros((3, 5), np.float32), y=np.zeros(3, np.int64))
    with pytest.raises(InputError, match=r"public = 'npz:.*': samples are \[5\], the run's model takes \[1, 4, 4\]"):
        load_public(f"npz:{tmp_path / 'p.npz'}", _run_of([1, 4, 4]), 5)


def test_an_empty_set_of_shared_samples_is_one(tmp_path: Path) -> None:
    """No rows of the shape that the model takes: devices learn from their own samples."""
    np.savez(tmp_path / "e.npz", x=np.zeros((0, 4, 4), dtype=np.uint8), y=np.zeros(0, dtype=np.int64))
    assert load_public(f"npz:{tmp_path / 'e.npz'}", _run_of([1, 4, 4]), 5).shape == (0, 1, 4, 4)


@pytest.mark.parametrize("name", ["fedmd", "draftfed"])
def test_what_was_told_is_read_once(name: str) -> None:
    """From a file every pass over it makes new tensors; shared samples are kept, and would be there twice."""
    passes: list[int] = []

    class Told:
        def __iter__(self) -> Iterator[PublicSamples]:
            passes.append(1)
            yield PUBLIC

    begun(CLIENTS[name](), model_of("resnet10"), knowledge=Told(), classes=NUM_CLASSES)
    assert len(passes) == 1


def test_shared_samples_of_another_shape_are_refused_on_a_device() -> None:
    """A task's model may take something else than what the server could know."""
    wrong = PublicSamples(values=torch.zeros(2, 5))
    with pytest.raises(InputError, match=r"shared samples are \[5\], this device's are \[1, 8, 8\]"):
        begun(CLIENTS["fedmd"](), model_of("mlp"), knowledge=(wrong,))


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.1, 1.0, 0.01), (0.0, 2.0, 0.0)])
def test_the_loss_of_draft_learning_by_hand(weights: tuple[float, float, float]) -> None:
    """x = (1,2): D1 = x, D2 = 2x, logits 2x; targets 0: MSE 5/2 and 20/2, CE of (2,4) against halves 1.126928."""
    scales = (1.0, 1.0, 2.0, 1.0)
    layers = [nn.Linear(2, 2, bias=False) for _ in scales]
    for layer, scale in zip(layers, scales, strict=True):
        layer.weight.data = scale * torch.eye(2)
    model = from_sequential(nn.Sequential(*layers), input_shape=(2,))
    aims = drafts({1: [[0.0, 0.0]], 2: [[0.0, 0.0]]})
    first, last, logit = weights
    client = DraftFedClient(DraftFedParameters(lambda1=first, lambda2=last, lambda3=logit))
    begun(client, model, knowledge=(aims, PublicSamples(values=torch.tensor([[1.0, 2.0]]))), round=4)
    learn = client.phases()[0]
    y = torch.tensor([0])
    (term,) = client.terms(Batch(x=torch.tensor([[1.0, 2.0]]), y=y, num_whole=1, whole_y=y, first=True), learn)
    assert term.each is not None
    assert term.each.item() == pytest.approx(2.5 * first + 10 * last + 1.126928 * logit, abs=1e-5)


def test_each_shared_sample_has_its_own_targets() -> None:
    """Identities: a sample whose targets are itself adds 0 to both, the other, aimed at by 0, (1 + 4) / 2 twice."""
    layers = [nn.Linear(2, 2, bias=False) for _ in range(4)]
    for layer in layers:
        layer.weight.data = torch.eye(2)
    model = from_sequential(nn.Sequential(*layers), input_shape=(2,))
    x, rows = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), [[0.0, 0.0], [3.0, 5.0]]
    client = DraftFedClient(DraftFedParameters(lambda3=0.0))
    begun(client, model, knowledge=(drafts({1: rows, 2: rows}, rows), PublicSamples(values=x)), round=4)
    learn, y = client.phases()[0], torch.tensor([0, 1])
    (term,) = client.terms(Batch(x=x, y=y, num_whole=2, whole_y=y, first=True), learn)
    assert term.each is not None
    assert term.each.tolist() == [5.0, 0.0]


def test_cross_entropy_with_a_soft_target() -> None:
    """Logits (0,0): log 2 whatever the target."""
    assert soft_cross_entropy(torch.zeros(1, 2), torch.tensor([[3.0, 0.0]])).item() == pytest.approx(math.log(2))
