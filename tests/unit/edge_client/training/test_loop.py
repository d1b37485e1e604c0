"""The batch loop and evaluation, against sums by hand and against plain autograd."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn

from edge_client.methods.base import Batch, Job, Outcome, Phase, PlainClient, Term
from edge_client.models import registry
from edge_client.models.contract import Model, from_sequential
from edge_client.records import TrainingPlan
from edge_client.training.evaluate import evaluate
from edge_client.training.loop import Settings, Trained, generator, train
from edge_client.training.seeds import derive


class Memory:
    """Samples in tensors."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.labels = x, y

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.x[indices], self.labels[indices]


def _data(num_samples: int = 24, seed: int = 3) -> Memory:
    rng = torch.Generator().manual_seed(seed)
    return Memory(torch.randn(num_samples, 1, 8, 8, generator=rng), torch.randint(0, 10, (num_samples,), generator=rng))


def _model(name: str = "small-cnn") -> Model:
    torch.manual_seed(1)
    return registry.build(name, input_shape=(1, 8, 8), num_classes=10, options={})


def _job(model: Model, epochs: int = 1) -> Job:
    return Job(
        model=model,
        round=1,
        num_rounds=2,
        epochs=epochs,
        learning_rate=0.1,
        class_counts=(0,) * 10,
        rng=lambda purpose: generator(1, purpose),
    )


def _train(model: Model, data: Memory, client: PlainClient | None = None, epochs: int = 1, **keys: object) -> Trained:
    client = client or PlainClient()
    client.begin(_job(model, epochs))
    settings = {"batch": 8, "microbatch": 8, "learning_rate": 0.1, "seed": 5, **keys}
    return train(model, client, data, Settings(**settings))


def test_one_full_batch_step_is_gradient_descent() -> None:
    """w <- w - lr * d(mean cross entropy)/dw, computed by autograd on the whole data at once."""
    model, reference, data = _model(), _model(), _data(8)
    loss = nn.functional.cross_entropy(reference(data.x), data.labels)
    grads = torch.autograd.grad(loss, list(reference.parameters()))
    trained = _train(model, data)
    assert trained.steps == 1
    assert trained.mean_loss == pytest.approx(loss.item(), rel=1e-5)
    for param, start, grad in zip(model.parameters(), reference.parameters(), grads, strict=True):
        torch.testing.assert_close(param, start - 0.1 * grad, rtol=1e-5, atol=1e-6)


def test_training_is_torch_sgd_over_the_same_batches() -> None:
    """An independent loop with torch.optim over the permutations that the seed gives: 2 epochs of 3 batches."""
    model, reference, data = _model("mlp"), _model("mlp"), _data(20)
    trained = _train(model, data, epochs=2, momentum=0.9, weight_decay=0.01)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for epoch in range(2):
        order = torch.randperm(20, generator=torch.Generator().manual_seed(derive(5, "shuffle", "train", epoch)))
        for start in range(0, 20, 8):
            chosen = order[start : start + 8]
            optimizer.zero_grad()
            nn.functional.cross_entropy(reference(data.x[chosen]), data.labels[chosen]).backward()
            optimizer.step()
    assert trained.steps == 6
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("microbatch", [1, 3, 4, 7])
def test_the_microbatch_changes_nothing_but_rounding(microbatch: int) -> None:
    """Batches of 8 and a last one of 4, cut into pieces of any size."""
    whole, pieces = _model(), _model()
    losses = [
        _train(model, _data(20), epochs=2, microbatch=size).mean_loss
        for model, size in ((whole, 8), (pieces, microbatch))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for a, b in zip(whole.parameters(), pieces.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_equal_seeds_give_equal_bits_and_other_seeds_do_not() -> None:
    """Whatever torch's global generator holds."""
    models = [_model() for _ in range(3)]
    for number, (model, seed) in enumerate(zip(models, (5, 5, 6), strict=True)):
        torch.manual_seed(number)
        _train(model, _data(), seed=seed)
    first, second, third = (nn.utils.parameters_to_vector(model.parameters()) for model in models)
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_max_steps_ends_a_round_and_progress_tells_each_step() -> None:
    """24 samples in batches of 8 for 4 epochs would be 12 steps; 5 are done, and each is told."""
    seen: list[tuple[int, int]] = []
    model, client = _model("mlp"), PlainClient()
    client.begin(_job(model, epochs=4))
    settings = Settings(batch=8, microbatch=8, learning_rate=0.1, seed=5, max_steps=5)
    done = train(model, client, _data(), settings, progress=lambda step, total, loss: seen.append((step, total)))
    assert done.steps == 5
    assert seen == [(step, 5) for step in range(1, 6)]


class Masked(PlainClient):
    """Counts only samples of even classes, and adds a penalty once per step."""

    def terms(self, batch: Batch, phase: Phase) -> Iterator[Term]:
        (ce,) = super().terms(batch, phase)
        yield Term(
            name="even",
            weight=2.0,
            each=ce.each,
            mask=(batch.y % 2 == 0).float(),
            denominator=float((batch.whole_y % 2 == 0).sum()),
        )
        yield Term(name="penalty", weight=0.5, once=self.job.model.get_parameter("head.bias").square().sum())


@pytest.mark.parametrize("microbatch", [8, 3])
def test_masked_means_and_penalties_do_not_depend_on_the_microbatch(microbatch: int) -> None:
    """The mask's sum of the whole batch divides; the penalty counts once: against autograd over the whole batch."""
    model, reference, data = _model("mlp"), _model("mlp"), _data(8)
    even = data.labels % 2 == 0
    loss = 2 * nn.functional.cross_entropy(reference(data.x[even]), data.labels[even])
    loss = loss + 0.5 * reference.get_parameter("head.bias").square().sum()
    grads = torch.autograd.grad(loss, list(reference.parameters()))
    trained = _train(model, data, Masked(), microbatch=microbatch)
    assert trained.mean_loss == pytest.approx(loss.item(), rel=1e-5)
    for param, start, grad in zip(model.parameters(), reference.parameters(), grads, strict=True):
        torch.testing.assert_close(param, start - 0.1 * grad, rtol=1e-5, atol=1e-6)


class Frozen(PlainClient):
    """Trains the head's bias, sees the gradient of the cross entropy apart, takes ones instead, looks at a tap."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}
        self.seen: list[Tensor] = []
        self.rates: list[float] = []

    def phases(self) -> tuple[Phase, ...]:
        return (
            Phase(
                name="head",
                trainable=frozenset({"head.bias"}),
                keep=frozenset({"cross_entropy"}),
                taps=frozenset({"features"}),
            ),
        )

    def adjust(self, name: str, param: Tensor, grad: Tensor, kept: Mapping[str, Tensor]) -> None:
        assert not grad.any()
        self.kept[name] = kept["cross_entropy"].clone()
        grad.fill_(1.0)

    def after_step(self, params: Mapping[str, Tensor], learning_rate: float) -> None:
        self.rates.append(learning_rate)
        params["head.bias"][0] = 7.0

    def observe(self, batch: Batch, taps: Mapping[str, Tensor], phase: Phase) -> None:
        self.seen.append(taps["features"])

    def end(self) -> Outcome:
        return Outcome(scalars={"pieces": float(len(self.seen))})


def test_a_method_sees_and_changes_what_the_contract_promises() -> None:
    """Only the bias moves, by -lr * 1; `kept` is its gradient, mean(softmax - onehot); taps are the features."""
    model, start, data, client = _model("mlp"), _model("mlp"), _data(8), Frozen()
    _train(model, data, client, microbatch=4)
    for name, param in model.named_parameters():
        before = start.get_parameter(name)
        if name == "head.bias":
            torch.testing.assert_close(param[1:], before[1:] - 0.1)
            assert param[0].item() == 7.0
        else:
            assert torch.equal(param, before)
            assert param.requires_grad
            assert param.grad is None
    one_hot = nn.functional.one_hot(data.labels, 10)
    expected = (start(data.x).softmax(dim=1) - one_hot).mean(dim=0)
    torch.testing.assert_close(client.kept["head.bias"], expected.detach(), rtol=1e-5, atol=1e-6)
    assert client.rates == [0.1]
    order = torch.randperm(8, generator=torch.Generator().manual_seed(derive(5, "shuffle", "head", 0)))
    torch.testing.assert_close(torch.cat(client.seen), start.forward_to("block1", data.x[order]).detach())
    assert not any(tap.requires_grad for tap in client.seen)


class Looking(PlainClient):
    """Looks at the outputs of all units."""

    def phases(self) -> tuple[Phase, ...]:
        (phase,) = super().phases()
        return (dataclasses.replace(phase, taps=frozenset(self.job.model.taps)),)

    def observe(self, batch: Batch, taps: Mapping[str, Tensor], phase: Phase) -> None:
        self.seen = dict(taps)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_tap_is_what_its_own_unit_puts_out(inplace: bool) -> None:
    """Units 1 and 3 are one module, which may change its input in place: each is run by hand on a copy.

    The last block's output has three names; a LeakyReLU twice is not one.
    """
    torch.manual_seed(1)
    shared = nn.LeakyReLU(0.5, inplace=inplace)
    model = from_sequential(
        nn.Sequential(nn.Linear(3, 4), shared, nn.Linear(4, 4), shared, nn.Linear(4, 10)), input_shape=(3,)
    )
    data = Memory(torch.randn(8, 3), torch.arange(8))
    order = torch.randperm(8, generator=torch.Generator().manual_seed(derive(5, "shuffle", "train", 0)))
    x, outputs = data.x[order], {}
    for unit in model.order:
        x = outputs[unit] = model.get_submodule(unit)(x.clone()).detach().clone()
    client = Looking()
    _train(model, data, client)
    assert {"stem_out", "block_3_out", "stage_3_out", "features", "logits"} <= client.seen.keys()
    for tap, place in model.taps.items():
        torch.testing.assert_close(client.seen[tap], outputs[place])


class Norm(PlainClient):
    """One phase in the given BatchNorm mode."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def phases(self) -> tuple[Phase, ...]:
        names = frozenset(name for name, _ in self.job.model.named_parameters())
        return (Phase(name="train", trainable=names, batchnorm=self.mode),)


@pytest.mark.parametrize(("mode", "moved"), [("train", True), ("eval", False), ("restore", False)])
def test_batchnorm_buffers_move_in_train_mode_only(mode: str, moved: bool) -> None:
    """`restore` trains with batch statistics and puts the buffers back."""
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    model = from_sequential(layers, input_shape=(1, 8, 8))
    _train(model, _data(), Norm(mode))
    buffers = dict(model.named_buffers())
    assert (int(buffers["1.num_batches_tracked"]) > 0) is moved
    assert bool(buffers["1.running_mean"].any()) is moved


class Wrong(PlainClient):
    """Yields what it is given."""

    def __init__(self, term: Term) -> None:
        self.term = term

    def terms(self, batch: Batch, phase: Phase) -> Iterator[Term]:
        yield self.term


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (Term(name="t"), "either each or once"),
        (Term(name="t", each=torch.ones(3)), r"expected 8 losses, got shape \(3,\)"),
        (Term(name="t", each=torch.ones(8), mask=torch.ones(8)), "no denominator"),
    ],
)
def test_a_term_that_breaks_the_contract_is_named(term: Term, message: str) -> None:
    """A method's author reads this."""
    with pytest.raises(ValueError, match=f"'t'.*{message}"):
        _train(_model("mlp"), _data(8), Wrong(term))


class Constant(nn.Module):
    """Logits that say class 1, with certainty log(3) over two classes: p = (1/4, 3/4)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensor([0.0, math.log(3.0)]).expand(len(x), 2)


@pytest.mark.parametrize("microbatch", [1, 2, 100])
def test_evaluation_counts_by_hand(microbatch: int) -> None:
    """Labels 1,1,0: two right; loss 2 log(4/3) + log 4; confusion rows are the truth: [[0,1],[0,2]]."""
    data = Memory(torch.zeros(3, 1), torch.tensor([1, 1, 0]))
    model = Constant().train()
    result = evaluate(model, model, data, num_classes=2, microbatch=microbatch)
    assert (result.num_samples, result.num_correct) == (3, 2)
    assert result.loss_sum == pytest.approx(2 * math.log(4 / 3) + math.log(4), rel=1e-6)
    assert result.confusion.tolist() == [[0, 1], [0, 2]]
    assert model.training


def test_evaluation_uses_running_statistics_and_changes_nothing() -> None:
    """BatchNorm with mean 0 and variance 1 in its buffers is the identity (up to its epsilon), whatever the batch."""
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    model = from_sequential(layers, input_shape=(1, 8, 8)).train()
    data = _data()
    result = evaluate(model, model, data, num_classes=10, microbatch=5)
    scale = 1 / math.sqrt(1 + 1e-5)
    logits = nn.functional.linear(
        data.x.flatten(1) * scale, model.get_parameter("2.weight"), model.get_parameter("2.bias")
    )
    expected = nn.functional.cross_entropy(logits, data.labels, reduction="sum")
    assert result.loss_sum == pytest.approx(expected.item(), rel=1e-5)
    assert int(model.get_buffer("1.num_batches_tracked")) == 0


def test_seeds_of_different_purposes_differ() -> None:
    """Also where a naive join of the words would be equal."""
    seeds = {derive(1, "a", "b"), derive(1, "ab"), derive(1, "a", 1), derive(1, "a", "1"), derive(11, "a"), derive(1)}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_above_64_classes_evaluation_counts_three_numbers_per_class() -> None:
    """70 classes; the model answers with the sample's own number. Truth 0 0 1 69, answers 0 1 1 2.

    True positives: 0 and 1; false positives: 1 (for a 0) and 2 (for a 69); false negatives: 0 and 69.
    """
    answers, truth = torch.tensor([0, 1, 1, 2]), torch.tensor([0, 0, 1, 69])
    data = Memory(nn.functional.one_hot(answers, 70).float() * 5, truth)
    result = evaluate(nn.Identity(), nn.Identity(), data, num_classes=70, microbatch=3)
    assert (result.num_samples, result.num_correct, tuple(result.confusion.shape)) == (4, 2, (3, 70))
    assert [row.nonzero().flatten().tolist() for row in result.confusion] == [[0, 1], [1, 2], [0, 69]]
    assert result.confusion.sum().item() == 6


def _normed() -> Model:
    """A BatchNorm of one value per channel and sample: it has no statistics of a single sample."""
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, 10))
    return from_sequential(layers, input_shape=(1, 8, 8))


def test_a_piece_of_one_sample_is_dropped_where_the_model_cannot_train_on_it() -> None:
    """9 samples in batches of 4 are 4, 4 and 1: two steps; with microbatch 3 a batch of 4 keeps 3 and means over 3."""
    model = _normed()
    assert model.min_batch == 2
    assert _train(model, _data(9), batch=4, microbatch=4).steps == 2
    model, reference, data = _normed(), _normed(), _data(4)
    order = torch.randperm(4, generator=generator(5, "shuffle", "train", 0))
    trained = _train(model, data, batch=4, microbatch=3)
    reference.train()
    loss = nn.functional.cross_entropy(reference(data.x[order[:3]]), data.labels[order[:3]])
    assert trained.steps == 1
    assert trained.mean_loss == pytest.approx(loss.item(), rel=1e-5)


class TwoPhases(PlainClient):
    """Twice the same; writes down the sizes of the pieces and when another plan came."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def phases(self) -> tuple[Phase, ...]:
        (phase,) = super().phases()
        done = self.seen.count("replan")
        return (phase, dataclasses.replace(phase, name="second"))[done:]

    def terms(self, batch: Batch, phase: Phase) -> Iterator[Term]:
        self.seen.append((phase.name, len(batch.y)))
        yield from super().terms(batch, phase)

    def replan(self, plan: TrainingPlan) -> None:
        self.seen.append("replan")


def test_a_smaller_plan_takes_smaller_pieces_at_once_and_is_in_force_after_the_phase() -> None:
    """Told before the second of three batches of 8: pieces of 4 from then on; the method goes by it after its phase."""
    model, client = _model("mlp"), TwoPhases()
    client.begin(_job(model))
    smaller = TrainingPlan(microbatch=4, budget_bytes=1, predicted_bytes=1)
    plans = iter([None, smaller])
    settings = Settings(batch=8, microbatch=8, learning_rate=0.1, seed=5)
    train(
        model,
        client,
        _data(24),
        settings,
        replan=lambda: next(plans, None),
        in_force=client.seen.append,
    )
    first, second = [("train", 8), *[("train", 4)] * 4], [("second", 4)] * 6
    assert client.seen == [*first, "replan", smaller, *second]


class Beside(PlainClient):
    """Trains a head of its own behind the model's first unit, which stays frozen."""

    def __init__(self, key: str = "extra/own") -> None:
        self.key = key
        torch.manual_seed(2)
        self.own = nn.Linear(64, 10)

    def modules(self) -> Mapping[str, nn.Module]:
        return {self.key: self.own}

    def phases(self) -> tuple[Phase, ...]:
        return (Phase(name="train", trainable=frozenset({f"{self.key}.weight"}), after="stem"),)

    def terms(self, batch: Batch, phase: Phase) -> Iterator[Term]:
        assert not batch.x.requires_grad
        yield Term(name="ce", each=nn.functional.cross_entropy(self.own(batch.x), batch.y, reduction="none"))
        yield Term(name="silent", weight=0.0, once=self.own.weight.sum() + 5.0, reported=False)


def test_modules_beside_the_model_are_trained_by_their_key() -> None:
    """w <- w - lr * gradient for the named weight alone; the model and the other parameter stay; `told` = the loss."""
    model, data, client = _model("mlp"), _data(8), Beside()
    start, reference = {n: v.clone() for n, v in model.state_dict().items()}, Beside().own
    loss = nn.functional.cross_entropy(reference(data.x.flatten(1)), data.labels)
    (grad,) = torch.autograd.grad(loss, [reference.weight])
    trained = _train(model, data, client)
    assert trained.mean_loss == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(client.own.weight, reference.weight - 0.1 * grad)
    assert torch.equal(client.own.bias, reference.bias)
    assert client.own.bias.requires_grad
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())


def test_a_module_that_hides_a_parameter_of_the_model_is_refused() -> None:
    """`head.weight` would be two things."""
    with pytest.raises(ValueError, match=r"'head\.weight' of the module 'head' is one of the model"):
        _train(_model("mlp"), _data(8), Beside("head"))


class Behind(PlainClient):
    """Trains the head behind a frozen first part."""

    def phases(self) -> tuple[Phase, ...]:
        return (Phase(name="train", trainable=frozenset({"head.weight"}), after="norm"),)

    def terms(self, batch: Batch, phase: Phase) -> Iterator[Term]:
        logits = self.job.model.forward_from("head", batch.x)
        yield Term(name="ce", each=nn.functional.cross_entropy(logits, batch.y, reduction="none"))


def test_frozen_units_use_their_running_statistics_and_leave_them() -> None:
    """Mean 1, variance 4: the head is trained on (x - 1) / 2, whatever the batch; no dropout, and no counter moves."""
    layers = nn.Sequential()
    for name, layer in (
        ("flatten", nn.Flatten()),
        ("norm", nn.Sequential(nn.BatchNorm1d(64, eps=1e-12), nn.Dropout(0.5))),
        ("head", nn.Linear(64, 10, bias=False)),
    ):
        layers.add_module(name, layer)
    torch.manual_seed(1)
    model, data = from_sequential(layers, input_shape=(1, 8, 8)), _data(8)
    model.get_buffer("norm.0.running_mean").fill_(1.0)
    model.get_buffer("norm.0.running_var").fill_(4.0)
    weight = model.get_parameter("head.weight").detach().clone().requires_grad_()
    loss = nn.functional.cross_entropy((data.x.flatten(1) - 1) / 2 @ weight.T, data.labels)
    (grad,) = torch.autograd.grad(loss, [weight])
    _train(model, data, Behind())
    torch.testing.assert_close(model.get_parameter("head.weight"), weight - 0.1 * grad, rtol=1e-5, atol=1e-6)
    assert int(model.get_buffer("norm.0.num_batches_tracked")) == 0
    assert bool((model.get_buffer("norm.0.running_mean") == 1.0).all())


def _plan(microbatch: int) -> TrainingPlan:
    return TrainingPlan(microbatch=microbatch, budget_bytes=0, predicted_bytes=0)


class Watching(PlainClient):
    """Two phases; notes what it is told and how large its pieces are."""

    def __init__(self) -> None:
        self.pieces: list[int] = []
        self.plans: list[int] = []

    def phases(self) -> tuple[Phase, ...]:
        (phase,) = super().phases()
        return (phase, Phase(name="again", trainable=phase.trainable))

    def replan(self, plan: TrainingPlan) -> None:
        self.plans.append(plan.microbatch)

    def terms(self, batch: Batch, phase: Phase) -> Iterator[Term]:
        self.pieces.append(len(batch.x))
        yield from super().terms(batch, phase)


def test_a_new_plan_makes_microbatches_smaller_from_the_next_batch_on() -> None:
    """24 samples, batches of 8: whole ones, then from the third on pieces of 4; the method hears it after its phase.

    What is asked before a batch is 6 times; both phases are trained once, also by a method that ignores the plan.
    """
    model, client = _model("mlp"), Watching()
    client.begin(_job(model))
    plans = iter([None, None, _plan(4), None, None, _plan(2)])
    settings = Settings(batch=8, microbatch=8, learning_rate=0.1, seed=5)
    done = train(model, client, _data(), settings, replan=lambda: next(plans))
    assert done.steps == 6
    assert client.pieces == [8, 8, 4, 4, 4, 4, 4, 4, 2, 2, 2, 2]
    assert client.plans == [4]  # the last phase has nothing after it
    with pytest.raises(StopIteration):
        next(plans)


def test_a_new_plan_changes_rounding_only() -> None:
    """The same steps with smaller pieces: a model without BatchNorm agrees to float32."""
    steady, changed = _model("mlp"), _model("mlp")
    _train(steady, _data())
    client = PlainClient()
    client.begin(_job(changed))
    plans = iter([None, _plan(3)])
    settings = Settings(batch=8, microbatch=8, learning_rate=0.1, seed=5)
    assert train(changed, client, _data(), settings, replan=lambda: next(plans, None)).steps == 3
    for one, other in zip(steady.parameters(), changed.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_phases_share_a_bound_on_steps_in_proportion() -> None:
    """Two phases of 3 steps, at most 5: 2 and 3 (floors of 2.5 and 5); at most 1: one each."""
    for most, steps in ((5, 5), (1, 2), (6, 6)):
        client = Watching()
        assert _train(_model("mlp"), _data(), client, max_steps=most).steps == steps
    assert _train(_model("mlp"), _data(0), Watching(), max_steps=1).steps == 0


def test_fractions_of_epochs_are_rounded_up_to_batches() -> None:
    """7/3 epochs of 3 batches are 7 steps, though 7/3 * 3 may be more than 7 in floating point; 1/2 are 2."""

    class Share(PlainClient):
        epochs = 7 / 3

        def phases(self) -> tuple[Phase, ...]:
            (phase,) = super().phases()
            return (Phase(name="train", trainable=phase.trainable, epochs=self.epochs),)

    client = Share()
    assert _train(_model("mlp"), _data(), client).steps == 7
    client.epochs = 0.5
    assert _train(_model("mlp"), _data(), client).steps == 2


def test_buffered_outputs_need_a_folder() -> None:
    """A mistake of the caller."""
    with pytest.raises(ValueError, match="need a folder"):
        _train(_model("mlp"), _data(), buffered=True)


class _Rates(PlainClient):
    """Notes the rate of each step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def after_step(self, params: Mapping[str, Tensor], learning_rate: float) -> None:
        self.rates.append(learning_rate)


def test_a_warm_up_raises_the_rate_step_by_step_to_that_of_the_run() -> None:
    """24 samples in batches of 8, two epochs: step s of 6 has 0.6 * s / 6."""
    client = _Rates()
    _train(_model(), _data(), client, epochs=2, learning_rate=0.6, warm_up=True)
    assert client.rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])


def test_without_a_warm_up_every_step_has_the_same_rate() -> None:
    """What run files of before train with."""
    client = _Rates()
    _train(_model(), _data(), client, learning_rate=0.6)
    assert client.rates == [0.6, 0.6, 0.6]
