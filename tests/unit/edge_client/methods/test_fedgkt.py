"""FedGKT: the distillation by hand, what is told of which samples, how both sides learn from each other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from depth import NUM_CLASSES, SHAPE, Memory, equal, model_of
from knowing import batch_of, begun, identity_model, loss_of, run, weights
from linear import linear_model

from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.errors import InputError
from edge_client.knowledge.kinds import FeatureMaps, SampleLogits
from edge_client.methods.base import Header, Lesson, PlainClient
from edge_client.methods.cards.fedgkt import FedGktParameters
from edge_client.methods.fedgkt import FedGktClient, GktTeacher, distillation, samples_within
from edge_client.models.taps import tapped


def client(**parameters: Any) -> FedGktClient:
    """FedGKT with these parameters."""
    return FedGktClient(FedGktParameters(**parameters))


def test_the_distillation_by_hand() -> None:
    """T = 3, student (0,0), teacher (3,0): 9 KL((.731059, .268941) || (.5, .5)) = 9 x .110944 = .9985; equal: 0."""
    student, teacher = torch.zeros(1, 2), torch.tensor([[3.0, 0.0]])
    assert distillation(teacher, student, 3.0).item() == pytest.approx(0.9985, abs=1e-4)
    assert distillation(teacher, teacher, 3.0).item() == pytest.approx(0, abs=1e-6)


def test_a_byte_budget_says_how_many_samples_are_told() -> None:
    """4 (2 x 8 x 8 + 3) + 8 = 532 bytes a sample: 3 in 1,600; one at least."""
    assert samples_within(1_600, (2, 8, 8), 3) == 3
    assert samples_within(3 * 532 - 1, (2, 8, 8), 3) == 2  # the label counts, too
    assert samples_within(10, (2, 8, 8), 3) == 1


def _told(round_: int, **more: Any) -> FeatureMaps:
    outcome = run(client(max_bytes=8 * 532), model_of("resnet10"), Memory(20), classes=3, round=round_, **more)
    (maps,) = outcome.knowledge
    assert isinstance(maps, FeatureMaps)
    assert maps.nbytes() <= 8 * 532 + 32  # and the ranges of its ids
    return maps


def test_samples_are_told_in_turn_by_the_trained_model_in_evaluation_mode() -> None:
    """20 samples, 8 a round: 0 to 7, 8 to 15, then 16 to 19 and 0 to 3; maps of the stem, labels, logits."""
    assert [_told(number).ids.tolist() for number in (1, 2, 3)] == [
        [*range(8)],
        [*range(8, 16)],
        [0, 1, 2, 3, 16, 17, 18, 19],
    ]
    model, data = model_of("resnet10"), Memory(20)
    (maps,) = run(client(max_bytes=8 * 532), model, data, classes=3, round=1).knowledge
    assert isinstance(maps, FeatureMaps)
    with torch.no_grad():
        seen, logits = tapped(model.eval(), ["stem_out"], data.x[:8])
        training, _ = tapped(model.train(), ["stem_out"], data.x[:8])
    torch.testing.assert_close(maps.values, seen["stem_out"])
    torch.testing.assert_close(maps.logits, logits)
    assert maps.labels.tolist() == data.labels[:8].tolist()
    assert not torch.allclose(maps.values, training["stem_out"], atol=1e-3)


def test_answers_are_used_for_their_own_samples_and_kept() -> None:
    """Off, or without answers: alone, bit for bit; with answers for four samples another model."""
    data, answers = Memory(16), SampleLogits(ids=torch.arange(4), values=10 * torch.eye(4, 3))
    results = {}
    for key, used, knowledge in (
        ("alone", PlainClient(), ()),
        ("first", client(), ()),
        ("off", client(alpha=0), (answers,)),
        ("on", client(), (answers,)),
    ):
        model = model_of("mlp")
        outcome = run(used, model, data, classes=3, knowledge=knowledge)
        results[key] = weights(model)
    assert equal(results["alone"], results["first"])
    assert equal(results["alone"], results["off"])
    assert not equal(results["alone"], results["on"])
    assert outcome.state["answers/known"].tolist() == [1.0] * 4 + [0.0] * 12
    again = client()
    begun(again, model_of("mlp"), state=outcome.state, data=data, classes=3)
    assert torch.equal(again._answers["logits"], outcome.state["answers/logits"])


def test_a_sample_without_an_answer_is_pulled_nowhere() -> None:
    """T = 3; logits are the samples: (0, 0) with the answer (3, 0) has KD .9985; (ln 3, 0) has none: CE ln 4 alone."""
    model = identity_model()
    model.get_parameter("1.weight").data = torch.eye(2)
    answers = SampleLogits(ids=torch.tensor([0]), values=torch.tensor([[3.0, 0.0]]))
    used = begun(client(alpha=0.5, temperature=3.0), model, knowledge=(answers,), data=Memory(2))
    loss = loss_of(used, batch_of([[0.0, 0.0], [math.log(3), 0.0]], [0, 1]))
    assert loss == pytest.approx((math.log(2) + math.log(4)) / 2 + 0.5 * 0.998499 / 2, abs=1e-5)


def test_a_sample_gets_the_answer_of_its_own_position() -> None:
    """Answers that agree with what the model says already change the gradient little; shifted by one they do not."""
    data = Memory(16)
    model = model_of("mlp")
    with torch.no_grad():
        own = model(data.x)
    moved = []
    for values in (own, own.roll(1, 0)):
        trained = model_of("mlp")
        answers = SampleLogits(ids=torch.arange(16), values=values)
        run(client(alpha=50.0), trained, data, classes=3, knowledge=(answers,), learning_rate=0.01, batch=16)
        plain = model_of("mlp")
        run(PlainClient(), plain, data, classes=3, learning_rate=0.01, batch=16)
        other = weights(plain)
        moved.append(sum(float((value - other[name]).abs().sum()) for name, value in weights(trained).items()))
    assert moved[0] < 1e-3 < moved[1]


def _run_of(**more: Any) -> RunFile:
    model = {"name": "resnet10", "input": list(SHAPE), "base-width": 2, "small-stem": True}
    table = {"name": "t", "model": model, "classes": ["a", "b", "c"], "method": {"name": "fedgkt"}, **more}
    return parse_table(RunFile, table, source="t")


def _received(*said: tuple[str, FeatureMaps]) -> Any:
    def received() -> Any:
        for device, item in said:
            yield Header(device=device, num_samples=1), (item,)

    return received


def _learn(teacher: GktTeacher, memory: Any, round_: int, *said: tuple[str, FeatureMaps], **more: Any) -> Any:
    lesson = Lesson(round=round_, num_classes=3, seed=1, run=_run_of(**more))
    return teacher.learn(memory, _received(*said), lesson, {})


def test_the_server_learns_and_answers_each_device_for_its_own_samples() -> None:
    """Eight rounds over the same maps: its answers become right; its part goes on from round to round."""
    data, model = Memory(16), model_of("resnet10")
    (maps,) = run(client(), model, data, classes=3, round=1).knowledge
    assert isinstance(maps, FeatureMaps)
    teacher = GktTeacher(FedGktParameters(server_lr=0.01, server_epochs=10, alpha=0.0))
    memory: Any = {}
    losses = []
    for number in range(1, 9):
        memory = _learn(teacher, memory, number, ("a", maps))
        lesson = Lesson(round=number + 1, num_classes=3, seed=1)
        (told,) = teacher.tell(memory, cut="full", device="a", lesson=lesson)
        assert torch.equal(told.ids, maps.ids)
        losses.append(torch.nn.functional.cross_entropy(told.values, maps.labels).item())
        assert teacher.tell(memory, cut="full", device="b", lesson=lesson) == ()
    assert losses[-1] < 0.5 * losses[0]
    assert any(name.startswith("net/2x8x8/stage1") for name in memory)


def test_the_server_answers_in_evaluation_mode() -> None:
    """b has three of a's samples: with BatchNorms that train, answers would depend on those that stand beside."""
    (maps,) = run(client(), model_of("resnet10"), Memory(16), classes=3, round=1).knowledge
    assert isinstance(maps, FeatureMaps)
    some = FeatureMaps(ids=maps.ids[:3], labels=maps.labels[:3], logits=maps.logits[:3], values=maps.values[:3])
    teacher = GktTeacher(FedGktParameters(server_lr=0.01))
    memory = _learn(teacher, {}, 1, ("a", maps), ("b", some))
    lesson = Lesson(round=2, num_classes=3, seed=1)
    (a,), (b,) = (teacher.tell(memory, cut="full", device=device, lesson=lesson) for device in ("a", "b"))
    torch.testing.assert_close(a.values[:3], b.values, rtol=1e-4, atol=1e-5)


def test_the_server_learns_from_the_devices_logits() -> None:
    """Logits of a device that say (4,0,-4) of every sample: with a weight on them the server's answers come nearer."""
    (maps,) = run(client(), model_of("resnet10"), Memory(16), classes=3, round=1).knowledge
    assert isinstance(maps, FeatureMaps)
    said = torch.tensor([[4.0, 0.0, -4.0]]).expand(16, 3)
    maps = FeatureMaps(ids=maps.ids, labels=maps.labels, logits=said, values=maps.values)
    far = {}
    for alpha in (0.0, 10.0):
        teacher = GktTeacher(FedGktParameters(server_lr=0.01, server_epochs=20, alpha=alpha))
        memory = _learn(teacher, {}, 1, ("a", maps))
        (told,) = teacher.tell(memory, cut="full", device="a", lesson=Lesson(round=2, num_classes=3, seed=1))
        far[alpha] = float(distillation(said, told.values, 3.0).mean())
    assert far[10.0] < 0.2 * far[0.0]


def test_answers_that_are_not_for_this_device_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Sample 99 of 16: nothing is known, as before the first answers, and the log says so."""
    odd = SampleLogits(ids=torch.tensor([99]), values=torch.zeros(1, 3))
    begun(client(), model_of("mlp"), classes=3, knowledge=(odd,), data=Memory(16))
    assert "answers up to sample 99, of 3 classes, are not for this device's 16 of 3" in caplog.text


def test_the_same_maps_give_the_same_bits() -> None:
    """Whatever torch's global generator did; another seed of the run would not."""
    (maps,) = run(client(), model_of("resnet10"), Memory(16), classes=3, round=1).knowledge
    assert isinstance(maps, FeatureMaps)
    first = _learn(GktTeacher(FedGktParameters()), {}, 1, ("a", maps))
    torch.manual_seed(77)
    assert equal(dict(first), dict(_learn(GktTeacher(FedGktParameters()), {}, 1, ("a", maps))))


def test_maps_of_a_shape_that_no_slice_has_get_no_answer() -> None:
    """Features of an unknown signature: left out; with a slice of that width there is a model for them."""
    maps = FeatureMaps(
        ids=torch.arange(4),
        labels=torch.zeros(4, dtype=torch.int64),
        logits=torch.zeros(4, 3),
        values=torch.zeros(4, 1, 8, 8),
    )
    assert _learn(GktTeacher(FedGktParameters()), {}, 1, ("a", maps)) == {}
    teacher, lesson = GktTeacher(FedGktParameters()), Lesson(round=1, num_classes=3, seed=1, run=_run_of())
    (found,) = teacher.left_out({}, _received(("a", maps)), lesson)
    assert (found.device, found.code) == ("a", "signature")
    assert found.detail == "its maps are 1x8x8, the run's slices have 2x8x8; left out"
    memory = _learn(GktTeacher(FedGktParameters()), {}, 1, ("a", maps), slices=["full", "width:1/2"])
    assert any(name.startswith("net/1x8x8/") for name in memory)


def test_what_cannot_be_divided_is_refused() -> None:
    """A model of one unit; a task, whose model the server does not build."""
    with pytest.raises(InputError, match="take one with two or more"):
        begun(client(), linear_model([0.0, 0.0]), classes=NUM_CLASSES)
    task = parse_table(
        RunFile, {"name": "t", "task": "t", "classes": ["a", "b"], "method": {"name": "fedgkt"}}, source="t"
    )
    with pytest.raises(InputError, match="use a built-in model instead of a task"):
        GktTeacher(FedGktParameters()).begin(task)
