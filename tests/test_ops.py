"""The small operations that methods share, worked by hand."""

from collections.abc import Callable, Iterator
from math import log

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from raysim import (
    TrainConfig,
    class_means,
    evaluating,
    fit,
    get_weights,
    kl,
    set_weights,
    weighted_mean,
)
from raysim.ops import make_optimizer, single_sample, train
from raysim.sgd import SGD

Batch = tuple[Tensor, Tensor]


def scale(weight: float) -> nn.Linear:
    """x -> weight * x"""
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, weight)
    return module


def squared(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: ((module(x) - y) ** 2).mean()


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


ONE_BATCH = [(column(1, 3), column(0, 0))]


# Weights in and out of modules


def test_weights_are_the_parameters_and_buffers_by_name() -> None:
    weights = get_weights(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    assert list(weights)[:3] == ["0.weight", "0.bias", "1.weight"]
    assert list(weights)[3:] == [
        "1.bias",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
    assert not any(tensor.requires_grad for tensor in weights.values())


def test_setting_weights_copies_them() -> None:
    source, target = scale(2), scale(0)
    set_weights(target, get_weights(source))
    nn.init.zeros_(source.weight)
    assert target.weight.item() == 2
    assert target.weight.requires_grad


def test_setting_weights_keeps_the_parameter_that_an_optimizer_may_hold() -> None:
    module = scale(0)
    parameter = module.weight
    set_weights(module, {"weight": torch.ones(1, 1)})
    assert module.weight is parameter


@pytest.mark.parametrize(
    "weights",
    [{"weight": torch.ones(2, 2)}, {}, {"weight": torch.ones(1, 1), "extra": torch.ones(1)}],
    ids=["shape", "missing", "extra"],
)
def test_weights_of_another_model_are_refused(weights: dict[str, Tensor]) -> None:
    with pytest.raises(RuntimeError, match=r"weight|extra"):
        set_weights(scale(1), weights)


# Means of weights


def test_a_weighted_mean_by_hand() -> None:
    """(1 * [1, 2] + 3 * [5, 10]) / 4 = [4, 8]"""
    mean = weighted_mean([{"w": torch.tensor([1.0, 2])}, {"w": torch.tensor([5.0, 10])}], [1, 3])
    assert mean["w"].tolist() == [4, 8]


def test_each_name_is_averaged_over_those_who_have_it() -> None:
    """Shares 1, 3, 4. a: (1 * 8 + 3 * 0 + 4 * 2) / 8 = 2. b: (3 * 4 + 4 * 11) / 7 = 8. c: 9."""
    nested = [
        {"a": torch.tensor(8.0)},
        {"a": torch.tensor(0.0), "b": torch.tensor(4.0)},
        {"a": torch.tensor(2.0), "b": torch.tensor(11.0), "c": torch.tensor(9.0)},
    ]
    mean = weighted_mean(nested, [1, 3, 4])
    assert list(mean) == ["a", "b", "c"]
    assert_close([mean[name].item() for name in "abc"], [2.0, 8.0, 9.0])


def test_integer_buffers_are_taken_from_the_first_who_has_them() -> None:
    counters = [{}, {"n": torch.tensor(7)}, {"n": torch.tensor(100)}]
    mean = weighted_mean(counters, [1, 1, 1])
    assert mean["n"].item() == 7
    assert mean["n"].dtype == torch.int64


def test_a_mean_shares_no_memory_with_what_was_averaged() -> None:
    one = {"w": torch.ones(2), "n": torch.tensor(1)}
    mean = weighted_mean([one], [1.0])
    mean["w"].zero_()
    mean["n"].zero_()
    assert (one["w"].tolist(), one["n"].item()) == ([1, 1], 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_a_mean_keeps_the_type_of_its_terms(dtype: torch.dtype) -> None:
    terms = [{"w": torch.tensor([1.0], dtype=dtype)}, {"w": torch.tensor([3.0], dtype=dtype)}]
    mean = weighted_mean(terms, [1, 1])["w"]
    assert (mean.dtype, mean.item()) == (dtype, 2)


def test_a_share_for_each_term_is_needed() -> None:
    with pytest.raises(ValueError, match="shorter"):
        weighted_mean([{"w": torch.ones(1)}, {"w": torch.ones(1)}], [1.0])


SHARES = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)
VALUES = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=5)


@settings(deadline=None)
@given(VALUES, SHARES)
def test_the_mean_of_equal_weights_is_themselves(values: list[float], shares: list[float]) -> None:
    weights = {"w": torch.tensor(values)}
    assert_close(weighted_mean([weights] * len(shares), shares), weights)


@settings(deadline=None)
@given(st.data(), SHARES)
def test_a_mean_lies_between_its_terms(data: st.DataObject, shares: list[float]) -> None:
    numbers = st.floats(-1e6, 1e6, width=32)
    values = data.draw(st.lists(numbers, min_size=len(shares), max_size=len(shares)))
    mean = weighted_mean([{"w": torch.tensor(v)} for v in values], shares)["w"].item()
    slack = 1e-5 * max(map(abs, values))
    assert min(values) - slack <= mean <= max(values) + slack


@settings(deadline=None)
@given(SHARES, st.floats(1e-3, 1e3))
def test_only_the_ratio_of_shares_matters(shares: list[float], factor: float) -> None:
    weights = [{"w": torch.tensor(float(i))} for i in range(len(shares))]
    scaled = weighted_mean(weights, [factor * share for share in shares])
    assert_close(weighted_mean(weights, shares), scaled)


# Class means


def test_class_means_by_hand_with_a_class_that_does_not_occur() -> None:
    """Class 0: ([1, 0] + [3, 2]) / 2 = [2, 1]; class 1 does not occur; class 2: [5, 5]."""
    batches = [
        (torch.tensor([[1.0, 0], [5, 5]]), torch.tensor([0, 2])),
        (torch.tensor([[3.0, 2]]), torch.tensor([0])),
    ]
    means, classes = class_means(nn.Identity(), batches)
    assert classes.tolist() == [0, 2]
    assert means.tolist() == [[2, 1], [5, 5]]


def test_class_means_do_not_depend_on_how_samples_are_batched() -> None:
    x, y = torch.randn(10, 4), torch.tensor([3, 0, 3, 1, 0, 3, 1, 1, 0, 3])
    whole = class_means(nn.Identity(), [(x, y)])
    single = class_means(nn.Identity(), zip(x.split(1), y.split(1), strict=True))
    assert_close(whole, single)
    assert whole[1].tolist() == [0, 1, 3]


def test_class_means_are_taken_of_the_features_in_full_precision() -> None:
    batches = [(torch.full((300, 1), 1.0), torch.zeros(300, dtype=torch.int64))]
    means, _ = class_means(lambda x: (2 * x).to(torch.bfloat16), batches)
    assert means.dtype == torch.float32
    assert means.tolist() == [[2]]


def test_class_means_of_nothing_are_an_error() -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        class_means(nn.Identity(), [])


# Evaluation mode


def test_evaluating_switches_modes_and_gradients_off_and_back_on() -> None:
    frozen = nn.BatchNorm1d(2).eval()
    model = nn.Sequential(nn.Dropout(), frozen)
    model.training = True
    with evaluating(model):
        assert not any(child.training for child in model.modules())
        assert not torch.is_grad_enabled()
    assert [model.training, model[0].training, frozen.training] == [True, True, False]
    assert torch.is_grad_enabled()


def test_evaluating_restores_modes_after_a_failure() -> None:
    model, other = nn.Dropout(), nn.Dropout().eval()
    with pytest.raises(KeyError), evaluating(model, other):
        raise KeyError
    assert (model.training, other.training) == (True, False)
    assert torch.is_grad_enabled()


# Batches of one


def test_a_batch_of_one_uses_and_keeps_the_running_statistics() -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(column(1))
    before = {name: tensor.clone() for name, tensor in get_weights(model[1]).items()}
    with single_sample([model], 1):
        assert not model[1].training
        assert model.training
        model(column(1)).sum().backward()
    assert model[1].training
    assert_close(dict(model[1].state_dict()), before)
    assert model[0].weight.grad is not None


def test_larger_batches_update_the_statistics_as_ever() -> None:
    norm = nn.BatchNorm1d(1)
    with single_sample([norm], 2):
        norm(column(1, 3))
    assert norm.running_mean.item() == pytest.approx(0.2)  # 0.9 * 0 + 0.1 * 2


def test_a_frozen_batch_norm_stays_frozen_after_a_batch_of_one() -> None:
    norm = nn.BatchNorm1d(1).eval()
    with single_sample([norm], 1):
        pass
    assert not norm.training


def test_batch_norm_trains_again_after_a_failure() -> None:
    norm = nn.BatchNorm1d(1)
    with pytest.raises(KeyError), single_sample([norm], 1):
        raise KeyError
    assert norm.training


# Distillation


def test_kl_by_hand_is_the_mean_of_a_sample_and_teaches_the_student_only() -> None:
    """Two samples of two classes. The first teacher answers (3/4, 1/4) and its student (1/2, 1/2):
    KL = 3/4 ln(3/2) + 1/4 ln(1/2). The second agree: 0. The mean is half of the first.

    The student's gradient is (softmax student - softmax teacher) / samples."""
    teacher = torch.tensor([[log(3), 0.0], [5.0, 5.0]], requires_grad=True)
    student = torch.tensor([[1.0, 1.0], [2.0, 2.0]], requires_grad=True)
    value = kl(teacher, student)
    value.backward()  # type: ignore[no-untyped-call]
    first = 0.75 * log(1.5) + 0.25 * log(0.5)
    assert value.item() == pytest.approx(first / 2, rel=1e-5)
    assert teacher.grad is None
    assert student.grad is not None
    assert_close(student.grad, torch.tensor([[-0.125, 0.125], [0.0, 0.0]]))


def test_kl_as_htfllib_computes_it_is_divided_by_the_classes_and_teaches_both() -> None:
    """Three classes: a third of the above. The teacher q's gradient at class c is
    q_c (ln(q_c / p_c) - KL) / 3 with p the student: for q = (1/2, 1/4, 1/4), p = 1/3 each,
    KL = 1/2 ln(3/2) + 1/2 ln(3/4)."""
    teacher = torch.tensor([[log(2), 0.0, 0.0]], requires_grad=True)
    student = torch.zeros(1, 3, requires_grad=True)
    value = kl(teacher, student, htfllib=True)
    value.backward()  # type: ignore[no-untyped-call]
    distance = 0.5 * log(1.5) + 0.5 * log(0.75)
    assert value.item() == pytest.approx(distance / 3, rel=1e-5)
    assert student.grad is not None
    assert_close(student.grad, torch.tensor([[1 / 3 - 1 / 2, 1 / 12, 1 / 12]]) / 3)
    assert teacher.grad is not None
    slopes = [0.5 * (log(1.5) - distance), *[0.25 * (log(0.75) - distance)] * 2]
    assert_close(teacher.grad, torch.tensor([slopes]) / 3, rtol=1e-4, atol=1e-6)


# The training loop of a client


def test_one_step_of_sgd_by_hand() -> None:
    """w = 2, x = (1, 3), y = 0. Loss: w^2 (1 + 9) / 2 = 20. Gradient: 2 w (1 + 9) / 2 = 20.
    Step: w <- 2 - 0.05 * 20 = 1."""
    module = scale(2)
    mean = train(squared(module), [module], lambda: ONE_BATCH, TrainConfig(lr=0.05), "cpu")
    assert mean == 20
    assert module.weight.item() == pytest.approx(1)


def test_a_learning_rate_in_the_call_wins_over_the_configured_one() -> None:
    """w <- 2 - 0.1 * 20 = 0"""
    module = scale(2)
    train(squared(module), [module], lambda: ONE_BATCH, TrainConfig(lr=5), "cpu", lr=0.1)
    assert module.weight.item() == pytest.approx(0, abs=1e-6)


def test_weight_decay_and_momentum_reach_sgd() -> None:
    """Step 1: g = 20 + 0.5 * 2 = 21, w = 2 - 0.01 * 21 = 1.79.
    Step 2: g = 10.5 * 1.79 = 18.795, v = 0.9 * 21 + 18.795 = 37.695, w = 1.79 - 0.37695."""
    module = scale(2)
    config = TrainConfig(lr=0.01, epochs=2, momentum=0.9, weight_decay=0.5)
    train(squared(module), [module], lambda: ONE_BATCH, config, "cpu")
    assert module.weight.item() == pytest.approx(1.41305)


def test_the_first_step_of_adam_is_the_learning_rate() -> None:
    module = scale(2)
    config = TrainConfig(lr=0.25, optimizer="adam")
    train(squared(module), [module], lambda: ONE_BATCH, config, "cpu")
    assert module.weight.item() == pytest.approx(1.75)


def test_a_clipped_gradient_has_the_norm_asked_for() -> None:
    """The gradient 20 becomes 1: w <- 2 - 0.05 * 1."""
    module = scale(2)
    train(squared(module), [module], lambda: ONE_BATCH, TrainConfig(lr=0.05, clip=1), "cpu")
    assert module.weight.item() == pytest.approx(1.95)


def test_a_gradient_within_the_clip_is_left_alone() -> None:
    module = scale(2)
    train(squared(module), [module], lambda: ONE_BATCH, TrainConfig(lr=0.05, clip=100), "cpu")
    assert module.weight.item() == pytest.approx(1)


def test_gradients_are_adjusted_after_the_backward_pass_and_before_they_are_clipped() -> None:
    """The gradient 20 becomes -100, and clipping makes that -1: w <- 2 + 0.05 * 1."""
    module, seen = scale(2), []

    def adjust() -> None:
        assert module.weight.grad is not None
        seen.append(module.weight.grad.item())
        module.weight.grad.fill_(-100)

    config = TrainConfig(lr=0.05, clip=1)
    train(squared(module), [module], lambda: ONE_BATCH, config, "cpu", adjust=adjust)
    assert seen == [20]
    assert module.weight.item() == pytest.approx(2.05)


def test_a_client_hands_its_adjustment_to_every_step() -> None:
    ctx = tiny.client_context(tiny.points([(1, 1)] * 4, [0, 1, 0, 1], 2), batch_size=2, epochs=3)
    model, calls = tiny.model([[0, 0], [0, 0]]), []
    ctx.fit(lambda x, y: model(x).sum(), model, adjust=lambda: calls.append(1))
    assert len(calls) == 6


def test_each_module_is_clipped_by_its_own_norm() -> None:
    """Gradients 20 and 0.5; clipping to 1 changes the first only."""
    first, second = scale(2), scale(2)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return squared(first)(x, y) + 0.5 * second.weight.sum()

    train(loss, [first, second], lambda: ONE_BATCH, TrainConfig(lr=1, clip=1), "cpu")
    assert first.weight.item() == pytest.approx(1)
    assert second.weight.item() == pytest.approx(1.5)


def test_the_clip_of_the_call_holds_where_none_is_configured() -> None:
    """The gradient 20 becomes 2; with --train.clip 1 set, 1."""
    for configured, left in ((None, 1.9), (1.0, 1.95)):
        module = scale(2)
        config = TrainConfig(lr=0.05, clip=configured)
        train(squared(module), [module], lambda: ONE_BATCH, config, "cpu", clip=2.0)
        assert module.weight.item() == pytest.approx(left)


def test_each_module_may_have_a_learning_rate_of_its_own() -> None:
    """Gradients 20 and 0.5, twice: 2 - 0.05 * 20 = 1, then 1 - 0.05 * 10 = 0.5; 2 - 2 * 0.5."""
    first, second = scale(2), scale(2)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return squared(first)(x, y) + 0.5 * second.weight.sum()

    config = TrainConfig(lr=7, epochs=2)
    train(loss, [first, second], lambda: ONE_BATCH, config, "cpu", lr=[0.05, 1.0])
    assert first.weight.item() == pytest.approx(0.5)
    assert second.weight.item() == pytest.approx(1)


def test_learning_rates_that_do_not_match_the_modules_are_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        train(squared(scale(2)), [scale(2)], lambda: ONE_BATCH, TrainConfig(), "cpu", lr=[1, 2])


def test_the_mean_loss_weighs_samples_not_batches() -> None:
    """(1 * 1 + 4 * 3) / 4"""
    module = scale(0)
    batches = [(column(1), column(0)), (column(4, 4, 4), column(0, 0, 0))]
    mean = train(
        lambda x, y: x.mean() + 0 * module(x).sum(), [module], lambda: batches, TrainConfig(), "cpu"
    )
    assert mean == 3.25


def test_every_epoch_asks_for_its_own_batches() -> None:
    asked = []

    def batches() -> Iterator[Batch]:
        asked.append(1)
        yield from ONE_BATCH

    module = scale(2)
    train(squared(module), [module], batches, TrainConfig(epochs=3, lr=1e-3), "cpu")
    assert len(asked) == 3


def test_training_on_nothing_changes_nothing() -> None:
    module = scale(2)
    assert train(squared(module), [module], list, TrainConfig(), "cpu") == 0
    assert module.weight.item() == 2


def test_what_is_not_named_is_not_trained() -> None:
    trained, other = scale(1), scale(1)
    loss = lambda x, y: squared(nn.Sequential(trained, other))(x, y)  # noqa: E731
    train(loss, [trained], lambda: ONE_BATCH, TrainConfig(lr=0.01), "cpu")
    assert trained.weight.item() != 1
    assert other.weight.item() == 1


def test_what_is_frozen_is_not_trained() -> None:
    frozen, module = scale(1).requires_grad_(False), scale(1)
    config = TrainConfig(lr=0.01, weight_decay=1)
    model = nn.Sequential(frozen, module)
    train(squared(model), [model], lambda: ONE_BATCH, config, "cpu")
    assert frozen.weight.item() == 1
    assert module.weight.item() != 1
    optimizer = make_optimizer([model], config)
    assert isinstance(optimizer, SGD)
    assert optimizer.parameters == [module.weight]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_names_the_flags_that_may_help(value: float) -> None:
    module = scale(1)
    batches = [(column(1), column(0)), (column(value), column(0)), (column(1), column(0))]
    with pytest.raises(FloatingPointError, match=r"not finite.*--train\.lr.*--train\.clip"):
        train(squared(module), [module], lambda: batches, TrainConfig(), "cpu")


def test_a_batch_of_one_trains_a_model_with_batch_norm() -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    before = model[0].weight.clone()
    train(squared(model), [model], lambda: [(column(1), column(5))], TrainConfig(lr=0.1), "cpu")
    assert not torch.equal(before, model[0].weight)
    assert model[1].num_batches_tracked.item() == 0


def test_bf16_computes_in_bf16_and_keeps_weights_in_fp32() -> None:
    seen = []
    module = scale(2)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        out = module(x)
        seen.append(out.dtype)
        return ((out - y) ** 2).mean()

    train(loss, [module], lambda: ONE_BATCH, TrainConfig(lr=0.05, precision="bf16"), "cpu")
    assert seen == [torch.bfloat16]
    assert module.weight.dtype == torch.float32
    assert module.weight.item() == pytest.approx(1)


# The training loop of a server


def test_fit_takes_one_step_by_hand() -> None:
    """As a client's: loss 20, gradient 20, w <- 2 - 0.05 * 20 = 1."""
    module = scale(2)
    mean = fit(squared(module), module, data=(column(1, 3), column(0, 0)), lr=0.05)
    assert mean == 20
    assert module.weight.item() == pytest.approx(1)


def test_fit_returns_the_loss_of_the_last_epoch() -> None:
    """w is 2, then 1: the second epoch starts with the loss 5."""
    module = scale(2)
    mean = fit(squared(module), module, data=(column(1, 3), column(0, 0)), lr=0.05, epochs=2)
    assert mean == pytest.approx(5)


def test_fit_shows_every_row_once_an_epoch_with_its_own_label() -> None:
    seen: list[Tensor] = []

    def loss(x: Tensor, y: Tensor) -> Tensor:
        assert torch.equal(y, 10 * x)
        seen.append(x)
        return 0 * module(x).sum()

    module = scale(1)
    rows = column(*range(5))
    fit(loss, module, data=(rows, 10 * rows), lr=0.1, epochs=2, batch_size=2)
    assert [len(batch) for batch in seen] == [2, 2, 1, 2, 2, 1]
    assert sorted(torch.cat(seen[:3]).flatten().tolist()) == [0, 1, 2, 3, 4]
    assert sorted(torch.cat(seen[3:]).flatten().tolist()) == [0, 1, 2, 3, 4]


def test_fit_hands_settings_to_the_optimizer_asked_for() -> None:
    """The first step of Adam is the learning rate; weight decay 1 alone moves w by -0.1 * 2."""
    module = scale(2)
    fit(squared(module), module, data=(column(1), column(0)), lr=0.25, optimizer=torch.optim.Adam)
    assert module.weight.item() == pytest.approx(1.75)
    module = scale(2)
    fit(lambda x: 0 * module(x).sum(), module, data=(column(1),), lr=0.1, weight_decay=1.0)
    assert module.weight.item() == pytest.approx(1.8)


def test_fit_trains_several_modules_together() -> None:
    """Output a b x = 1 with x = 1, y = 0: both gradients are 2 a b b = 2, so both 1 - 0.1 * 2."""
    a, b = scale(1), scale(1)
    fit(squared(nn.Sequential(a, b)), a, b, data=(column(1), column(0)), lr=0.1)
    assert (a.weight.item(), b.weight.item()) == (pytest.approx(0.8), pytest.approx(0.8))
