"""Schedules as functions of applied steps, and the rate that belongs to a batch."""

import pytest

from fulcrum.optimizer import LrScaling, Sgd
from fulcrum.schedule import Cosine, MultiStep, OneCycle, Schedule


def factors(schedule: Schedule, epochs: int = 10, steps_per_epoch: int = 10) -> list[float]:
    horizon = {"num_steps": epochs * steps_per_epoch, "steps_per_epoch": steps_per_epoch}
    return [schedule.factor(step, **horizon) for step in range(epochs * steps_per_epoch)]


def test_warm_up_rises_to_the_peak_and_no_schedule_leaves_its_range():
    warm = factors(Schedule(warmup_epochs=1))
    assert warm[:3] == pytest.approx([1 / 11, 2 / 11, 3 / 11])
    assert warm[10:] == [1.0] * 90
    for schedule in (Cosine(warmup_epochs=2), OneCycle(), MultiStep(warmup_epochs=1)):
        assert 0 < min(factors(schedule)) <= max(factors(schedule)) <= 1


def test_each_schedule_has_its_shape():
    cosine, cycle, steps = factors(Cosine()), factors(OneCycle(peak_at=0.25)), factors(MultiStep())
    assert cosine[0] == 1
    assert cosine[50] == pytest.approx(0.5)
    assert max(cycle) == cycle[25] == 1
    assert steps[49:51] == pytest.approx([1, 0.1])
    assert steps[75] == pytest.approx(0.01)


def test_beyond_the_horizon_the_rate_does_not_rise_again():
    assert Cosine().factor(150, num_steps=100, steps_per_epoch=10) == 0


@pytest.mark.parametrize(("scaling", "lr"), [("linear", 0.025), ("sqrt", 0.05), ("none", 0.1)])
def test_the_rate_follows_the_effective_batch(scaling, lr):
    assert Sgd(lr=0.1, lr_batch=256, lr_scaling=LrScaling[scaling]).scaled_lr(64) == pytest.approx(lr)
