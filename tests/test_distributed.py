"""Several processes train one model as one process does."""

import math
import re
from pathlib import Path

import pytest
import torch
from conftest import NO_DROPOUT, Forked, assert_same_run, records

from cli import UserError
from data_utils import (
    MelDataset,
    collate,
    load_data,
    open_mels,
    training_sampler,
    validation_batches,
)
from hparams import create_hparams
from loss_function import Tacotron2Loss
from model import Tacotron2
from speech import load_model
from training import checkpoint
from training.validation import validate

# What happens in rank 1 alone, before its fourth step.
FAULT = """
import os, signal, numpy as np, train
from training import distributed
train_step, n_steps = train.Run.train_step, 0
def fault(run, batch, *arguments):
    global n_steps
    n_steps += 1
    if distributed.RANK == 1 and n_steps == 4:
        {}
    return train_step(run, batch, *arguments)
train.Run.train_step = fault
train.cli.exit_on_user_error(train.main, distributed.first_to_fail, distributed.end)
"""


@pytest.fixture
def settings(settings: str) -> str:
    """Makes epochs of three or four steps, each of two or three batches."""
    return settings.replace("batch_size=3,check_memory=False", "batch_size=1")


def processes(
    n: int, output: Path, settings: str, *options: str, fault: str = ""
) -> tuple[set[int], str, list[str]]:
    """Trains with n processes, which have the variables that torchrun sets. Returns their exit
    statuses, all output, and our error lines."""
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": store.port, "TORCHELASTIC_RUN_ID": "1"}
    shared |= {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_USE_AGENT_STORE": True}
    shared |= {"WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n}
    program = ("-c", FAULT.format(fault)) if fault else ("train.py",)
    program += "-o", output, "--hparams", settings, *options
    ranks = [Forked(*program, RANK=rank, LOCAL_RANK=rank, **shared) for rank in range(n)]
    printed, errors = map("".join, zip(*(rank.communicate() for rank in ranks), strict=True))
    ours = [line for line in errors.splitlines() if line.startswith("error: ")]
    return {rank.returncode for rank in ranks}, printed + errors, ours


def test_a_step_is_that_of_one_process_on_the_union_of_its_batches(tmp_path, settings):
    dropout = "".join(f"{name}={p}," for name, p in NO_DROPOUT.items())
    settings += f"{dropout}epochs=2,guided_attention_weight=3,n_frames_per_step=2,"
    options = "--standalone", "--nproc_per_node=2", "-m", "train", "-o", tmp_path / "run"
    program = "import torch.distributed.run\ntorch.distributed.run.main()"
    torchrun = Forked("-c", program, *options, "--hparams", settings, OMP_NUM_THREADS=1)
    output = torchrun.communicate()
    assert torchrun.returncode == 0, output

    # Each batch by itself: padded as far as its longest clip, and with its own batch norm.
    hparams = create_hparams(settings)
    clips, _ = load_data(hparams)
    dataset = MelDataset(clips, open_mels(clips, hparams))
    torch.manual_seed(hparams.seed)
    model, loss_function = Tacotron2(hparams), Tacotron2Loss(1.0, hparams.guided_attention_sigma)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, weight_decay=hparams.weight_decay)
    sampler = training_sampler(clips, hparams, rank=0, world_size=2)
    logged, n_different = iter(records(tmp_path / "run", "step")), 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step in sampler.steps:
            batches = [collate([dataset[i] for i in sampler.plan[j]], 2) for j in step]
            losses = [loss_function(model(batch), batch) for batch in batches]
            padded = [batch.mel[:, 0].numel() for batch in batches]
            real = [int(batch.mel_lengths.sum()) for batch in batches]
            n_different += len(set(padded)) > 1
            total = sum(x.total * n for x, n in zip(losses, padded, strict=True)) / sum(padded)
            masked, guided = (
                sum(getattr(x, name) * n for x, n in zip(losses, real, strict=True)) / sum(real)
                for name in ("masked", "guided_attention")
            )
            optimizer.zero_grad()
            (total + 3 * guided).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), hparams.grad_clip_thresh)
            optimizer.step()
            record = next(logged)
            expected = {"loss": total, "masked_loss": masked, "guided_attention_loss": guided}
            for name, value in {**expected, "grad_norm": norm}.items():
                assert math.isclose(record[name], value.item(), rel_tol=1e-4), (name, step)
    assert next(logged, None) is None and n_different > 0


def test_a_signal_to_one_stops_all_and_resuming_is_exact(tmp_path, settings, run):
    settings += "epochs=2,epochs_per_validation=1,n_frames_per_step=2,"
    settings += "checkpoint_minutes=1e-9,keep_checkpoints=99"  # every batch is saved
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    statuses, output, _ = processes(3, whole, settings)
    assert statuses == {0} and output.count("epoch 2: validation loss") == 1, output

    fault = "os.kill(os.getpid(), signal.SIGTERM)"
    statuses, output, errors = processes(3, broken, settings, fault=fault)
    assert (statuses, errors) == ({143}, [])
    assert len(re.findall("^SIGTERM: saved .* after 1 epoch and 1 batch", output, re.M)) == 1
    with pytest.raises(UserError, match="by 3 processes within epoch 2, now there are 1; use"):
        run("broken", "", "--resume")
    statuses, output, _ = processes(3, broken, "", "--resume")
    assert statuses == {0}, output
    assert_same_run(whole, broken)

    # Validation is that of one process.
    hparams = create_hparams(settings)
    _, clips = load_data(hparams)
    dataset = MelDataset(clips, open_mels(clips, hparams), 2)
    batches = validation_batches(clips, hparams)
    model = load_model(whole, decoder=hparams.decoder)
    expected, _ = validate(model, dataset, batches, Tacotron2Loss())
    *_, last = records(whole, "validation")
    for name, value in expected.items():
        assert math.isclose(last[name], value, rel_tol=1e-12), name

    # One process goes on from the start of an epoch.
    for path in checkpoint.find_checkpoints(whole):
        progress = checkpoint.load_checkpoint(path)["progress"]
        if (progress["epoch"], progress["batch"]) > (1, 0):
            path.unlink()
    assert run("whole", "", "--resume") == 0
    assert [record["epoch"] for record in records(whole, "validation")] == [0, 1]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "one of the processes has ended, by an error"),
        ("raise train.UserError('a clip is broken; mend it')", "a clip is broken; mend it"),
    ],
)
def test_when_one_process_fails_all_end_with_one_line(tmp_path, settings, fault, error):
    statuses, _, errors = processes(2, tmp_path / "run", settings + "epochs=99", fault=fault)
    assert statuses <= {2, -9} and len(errors) == 1 and errors[0].startswith(f"error: {error}")


def test_all_skip_a_step_that_is_not_finite_in_one(tmp_path, settings):
    settings += "epochs=2"
    fault = "batch.mel.fill_(np.nan)"
    statuses, output, _ = processes(2, tmp_path / "run", settings, fault=fault)
    assert statuses == {0} and output.count("step skipped") == 1, output
    (bad,) = records(tmp_path / "run", "bad_step")
    clips, _ = load_data(create_hparams(settings))
    shares = [training_sampler(clips, create_hparams(settings), rank, 2) for rank in range(2)]
    assert bad["clips"] == [clips[i].location for share in shares for i in list(share)[3]]
    state = checkpoint.load_newest(tmp_path / "run")[1]
    assert all(weight.isfinite().all() for weight in state["state_dict"].values())
