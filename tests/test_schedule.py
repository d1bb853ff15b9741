"""The laws of the learning rate and of a run's end, and runs that follow them."""

import itertools
import re
from types import SimpleNamespace

import pytest
from conftest import NO_DROPOUT, assert_same_run, contents, records
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from torch.optim.optimizer import register_optimizer_step_post_hook as after_each_step

import train
from cli import UserError
from hparams import HParams
from training.schedule import Fall, learning_rate, plan_epochs, plan_hours

shares = st.floats(0, 1)
positive = st.floats(1e-3, 1e3)


@given(positive, st.integers(1, 300), shares, st.lists(st.integers(1, 9), min_size=1))
def test_it_is_constant_then_falls_on_a_line_and_ends_at_0(highest, epochs, share, n_batches):
    """This holds for any number of batches in each epoch. Without a share it is constant."""
    fall = plan_epochs(HParams(epochs=epochs, learning_rate_decay=share))
    assert fall.start == pytest.approx(epochs * (1 - share)) and fall.end == epochs
    positions = [
        epoch + (batch + 1) / n
        for epoch, n in zip(range(epochs), itertools.cycle(n_batches), strict=False)
        for batch in range(n)
    ]
    rates = [learning_rate(highest, fall, position) for position in positions]
    assert rates[-1] == (0 if fall.start < epochs else highest)
    for position, rate in zip(positions, rates, strict=True):
        if position <= fall.start:
            assert rate == highest
        else:
            left = (epochs - position) / (epochs - fall.start)
            assert rate == pytest.approx(highest * left, abs=1e-9 * highest) and rate <= highest


@given(
    seconds=st.floats(1, 1e4),
    n_epochs=st.floats(0.2, 60),
    share=shares,
    noise=st.floats(0, 0.05),
    random=st.randoms(use_true_random=False),
)
def test_a_run_ends_within_an_epoch_of_its_deadline(seconds, n_epochs, share, noise, random):
    """This holds on a steady machine, on which the times of epochs vary by up to 5 %; if they vary
    by more than that, it ends further off. The learning rate falls, unless no time is left."""
    limit = min(seconds * n_epochs, 1e6)
    hparams = HParams(hours=limit / 3600, learning_rate_decay=share)
    total, n, fall = 0.0, 0, Fall()
    while n < fall.end:
        total, n = total + seconds * random.uniform(1 - noise, 1 + noise), n + 1
        if fall == Fall():
            fall, decided_at = plan_hours(n, limit - total, total / n, hparams), total
    assert abs(total - limit) <= seconds * (1.02 + 2 * noise * n_epochs)
    assert fall.start < fall.end or not share or decided_at >= limit


# Runs

TEN_EPOCHS = "hours=0.0278,learning_rate_decay=0.3,epochs_per_validation=4,epochs_per_checkpoint=4,"


def test_a_run_of_hours_is_the_same_run_however_often_it_is_killed(
    tmp_path, settings, run, monkeypatch, capsys
):
    """By the clock, here a mock, every epoch takes ten seconds. The optimizer uses the learning
    rate that is logged, which is 0 at the end. TensorBoard has each step once."""
    seconds = property(lambda run: 10.0 * (run.progress.epoch + (run.progress.batch > 0)))
    monkeypatch.setattr(train.Run, "seconds", seconds)
    # TensorBoard reads files by name: by their second, and then 10 before 9.
    clock = SimpleNamespace(time=map(float, itertools.count(10**9)).__next__)
    monkeypatch.setattr(event_file_writer, "time", clock)
    used = []
    with after_each_step(lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"])):
        assert run("whole", settings + TEN_EPOCHS) == 0
    printed = capsys.readouterr().out
    assert re.search(r"epoch 1: about 9 more epochs; training ends about \S+ \d\d:\d\d\n", printed)
    assert "epoch 7: 3 more epochs, over which the learning rate falls to 0; training " in printed
    steps = itertools.count(1)

    def kill_every_third_time(*_) -> None:
        if next(steps) % 3 == 0:
            raise KeyboardInterrupt  # which nothing here handles

    with after_each_step(kill_every_third_time):
        for _ in range(60):
            try:
                run("broken", f"{settings}{TEN_EPOCHS}checkpoint_minutes=1e-9", "--resume")
                break
            except KeyboardInterrupt:
                pass
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert_same_run(whole, broken)
    steps = records(whole, "step")
    assert [step["learning_rate"] for step in steps] == used and used[-1] == 0
    assert min(step["epoch"] for step in steps if step["learning_rate"] < 1e-3) == 7
    (end,) = records(whole, "end")
    assert (end["epoch"], end["epochs"], end["hours"]) == (6, 10, 0.0278)
    curve = EventAccumulator(str(broken)).Reload().Scalars("training/loss")
    assert [scalar.step for scalar in curve] == [step["step"] for step in steps]


def test_a_run_may_become_longer_until_its_learning_rate_falls(tmp_path, settings, run):
    """With a constant learning rate it always may."""

    def stop_in(epoch: int):
        """Kills a run after the first step of an ``epoch`` is saved."""

        def hook(*_) -> None:
            if epoch - 1 in [record["epoch"] for record in records(output, "step")]:
                raise KeyboardInterrupt

        return after_each_step(hook)

    settings += "epochs_per_validation=9,"
    output = tmp_path / "run"
    with stop_in(3), pytest.raises(KeyboardInterrupt):
        run("run", settings + "learning_rate_decay=0.5,epochs=8,checkpoint_minutes=1e-9")
    before = contents(output)
    for change in ("epochs=3", "epochs=5"):
        with pytest.raises(UserError, match=f"{change}: comes too late, since by now the learning"):
            run("run", change, "--resume")
    assert contents(output) == before
    with stop_in(6), pytest.raises(KeyboardInterrupt):
        run("run", "epochs=6", "--resume")
    for change in ("epochs=12", "hours=1"):
        with pytest.raises(UserError, match=f"{change}: comes too late"):
            run("run", change, "--resume")
    assert run("run", "", "--resume") == 0
    with pytest.raises(UserError, match="epochs=8: comes too late"):
        run("run", "epochs=8", "--resume")
    rates = [record["learning_rate"] for record in records(output, "step")]
    assert rates[-1] == 0 and set(rates[: len(rates) // 2]) == {1e-3}

    for epochs in (1, 3, 2, 4):
        assert run("constant", f"{settings}epochs={epochs}", "--resume") == 0
    assert len(records(tmp_path / "constant", "epoch")) == 4


def test_dropout_but_the_prenets_can_end_where_the_learning_rate_begins_to_fall(
    tmp_path, settings, run
):
    settings += "epochs=2,dynamic_batch_size=False,"
    rates = {name: p for name, p in NO_DROPOUT.items() if "prenet" not in name}
    losses = {}
    for name, changes in {
        "without": "".join(f"{name}={p}," for name, p in rates.items()) + "learning_rate_decay=1",
        "falls from the start": "dropout_in_fall=False,learning_rate_decay=1",
        "falls later": "dropout_in_fall=False,learning_rate_decay=0.5",
        "goes on": "learning_rate_decay=0.5",
    }.items():
        run(name, settings + changes)
        losses[name] = [record["loss"] for record in records(tmp_path / name, "step")]
    assert losses["falls from the start"] == losses["without"]
    assert losses["falls later"][:3] == losses["goes on"][:3]
    assert losses["falls later"][3] != losses["goes on"][3]


def test_several_processes_follow_the_clock_of_the_first(settings, run, monkeypatch, tmp_path):
    """By the first one's clock, here a mock, an epoch took a third of the time."""
    monkeypatch.setattr(train.Run, "seconds", property(lambda run: 30.0))
    gather = lambda value: [10.0 if isinstance(value, float) else value]  # noqa: E731
    monkeypatch.setattr(train.distributed, "gather", gather)
    assert run("run", settings + "hours=0.0083333,learning_rate_decay=1") == 0
    assert len(records(tmp_path / "run", "epoch")) == 3
