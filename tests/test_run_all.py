"""run_all.py as its users call it: on a corpus of tones, with a tiny model."""

import importlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT

from cli import UserError, exit_on_user_error
from hparams import HParams, create_hparams
from scripts import run_all
from tests.conftest import TINY, WORDS, contents, records, write_tone
from training.logger import RunLogger

NAMES = "RAND BKT-BR SSB-DBS-BR"
CALL = run_all.call


@pytest.fixture(scope="module")
def tones(tmp_path_factory) -> Path:
    """20 tones of 0.1 to 0.5 s in LJSpeech's layout, which are split in 16 and 4."""
    corpus = tmp_path_factory.mktemp("tones")
    (corpus / "wavs").mkdir()
    for i in range(20):
        write_tone(corpus / "wavs" / f"T{i}.wav", 0.1 + 0.4 * (i * 7 % 20) / 19)
    texts = [f"T{i}|{WORDS[i % len(WORDS)]}\n" for i in range(20)]
    (corpus / "metadata.csv").write_text("".join(texts))
    return corpus


def arguments(tones: Path, output: Path, *more: str) -> list[str]:
    overrides = f"{TINY}mel_cache_dir={tones}/cache,batch_size=2,epochs_per_checkpoint=1"
    overrides += ",check_memory=False"
    options = ["--corpus", str(tones), "--output", str(output), "--hparams", overrides]
    return [*options, "--epochs", "2", "--only", NAMES, *more]


def parse(*args: str):
    with patch.object(sys, "argv", ["run_all.sh", *args]):
        return run_all.parse_args()


def call_here(program: str, *args: object, must: bool = False) -> int:
    """In place of run_all.call: in this process, which has imported PyTorch already."""
    print("called", program, *args)
    module = importlib.import_module(program.removesuffix(".py").replace("/", "."))
    argv = [program, *map(str, args)]
    with patch.object(sys, "argv", argv), patch.object(RunLogger, "log_samples"):  # takes longest
        try:
            exit_on_user_error(module.main)
        except SystemExit as end:
            if must and end.code:
                raise
            if isinstance(end.code, str):
                print(end.code)
            return end.code if isinstance(end.code, int) else bool(end.code)
    return 0


def call_train(program: str, *args: object, **options) -> int:
    """In place of run_all.call: of all programs, only train.py gets a process of its own."""
    return (CALL if program == "train.py" else call_here)(program, *args, **options)


@pytest.fixture
def run(capfd):
    """Runs run_all.py; returns what it printed."""

    def run(*args: str, status: int = 0, call=call_here) -> str:
        handler = signal.getsignal(signal.SIGTERM)
        with patch.object(run_all, "call", call):
            ended = call_here("scripts/run_all.py", *args)
        signal.signal(signal.SIGTERM, handler)
        printed = "".join(capfd.readouterr())
        assert ended == status, printed
        return printed

    return run


@pytest.fixture(scope="module")
def series(tones, tmp_path_factory) -> Path:
    """Two epochs of each of NAMES; the folder that they were started in."""
    folder = tmp_path_factory.mktemp("series")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(run_all, "call", call_here)
        assert call_here("scripts/run_all.py", *arguments(tones, Path("out"))) == 0
    return folder


@pytest.fixture
def here(series, tmp_path, monkeypatch) -> Path:
    """A copy of ``series``, which is the current folder."""
    folder = shutil.copytree(series, tmp_path / "here")
    monkeypatch.chdir(folder)
    return folder


def test_every_experiment_is_trained_and_compared(series):
    table = (series / "out/runs.md").read_text()
    for name in NAMES.split():
        folder = series / "out" / name / "seed0"
        settings = run_all.recorded_hparams(folder)
        strategy, *operations = name.split("-")
        assert settings.batching_strategy == strategy
        assert settings.dynamic_batch_size == ("DBS" in operations)
        assert settings.batch_randomization == ("BR" in operations)
        assert (settings.seed, settings.epochs, settings.batch_size) == (0, 2, 2)
        assert (settings.bucket_size < HParams.bucket_size) == (strategy == "BKT")
        assert [record["epoch"] for record in records(folder, "epoch")] == [0, 1]
        assert f"{name} |" in table


def test_runs_of_so_many_hours(tmp_path, tones, run, monkeypatch):
    """Each to an end of its own. They are finished until more hours are asked for."""
    monkeypatch.chdir(tmp_path)
    options = arguments(tones, Path("out"), "--only=RAND SSB-BR")
    epochs = options.index("--epochs")
    del options[epochs : epochs + 2]
    by_time = [*options, "--hparams", "hours=1e-6"]
    assert run(*by_time).count(", seed 0: done") == 2
    for folder in Path("out").glob("*/seed0"):
        assert [record["epochs"] for record in records(folder, "end")] == [1]
    assert re.search(r"RAND \| +1 \| +1/1 \|", Path("out/runs.md").read_text())
    assert run(*by_time).count(", seed 0: finished") == 2
    assert run(*options, "--hparams", "hours=0.002").count(", seed 0: done") == 2
    with pytest.raises(UserError, match="--epochs 5: hours=8 sets the end; leave one out"):
        parse("--epochs", "5", "--hparams", "hours=8")


def test_called_again_it_skips_what_is_finished_and_resumes_the_others(here, tones, run):
    before = (here / "out/BKT-BR/seed0/metrics.jsonl").read_bytes()
    for path in here.glob("out/RAND/seed0/checkpoint_*.pt"):
        path.unlink()  # to free space: its records say that it has finished
    newest = here / "out/BKT-BR/seed0/checkpoint_00000016.pt"
    newest.unlink()
    for path in here.glob("out/SSB-DBS-BR/seed0/checkpoint_*.pt"):
        path.write_bytes(b"damaged")
    lines = (here / "out/SSB-DBS-BR/seed0/metrics.jsonl").read_text().splitlines()
    (here / "out/SSB-DBS-BR/seed0/metrics.jsonl").write_text("\n".join(lines[:9]))
    printed = run(*arguments(tones, Path("out"), f"--only={NAMES} SB"), status=1)
    assert "[1/4] RAND, seed 0: finished\n" in printed
    assert "[2/4] BKT-BR, seed 0: done\n" in printed and newest.exists()
    assert "[3/4] SSB-DBS-BR, seed 0: FAILED with status 2; continuing" in printed
    assert "[4/4] SB, seed 0: done\n" in printed
    assert "FAILED: SSB-DBS-BR, seed 0: see above" in printed.split("called scripts/results")[1]
    after = (here / "out/BKT-BR/seed0/metrics.jsonl").read_bytes()
    losses = [re.findall(rb'"validation".*?"loss": ([\d.]+)', log) for log in (before, after)]
    assert losses[0] == losses[1] != []
    assert run(*arguments(tones, Path("out"), "--only=RAND BKT-BR SB")).count(": finished") == 3


def test_every_run_starts_from_the_checkpoint_of_its_seed(here, run):
    options = ["--start", "out/RAND", "--output", "common", "--only", "RAND SSB-DBS-BR"]
    options += ["--hparams", "learning_rate=5e-4,batch_capacity=200", "--epochs", "3"]
    (here / "common/RAND/seed0").mkdir(parents=True)
    (here / "common/RAND/seed0/metrics.jsonl").touch()  # stopped before its first checkpoint
    printed = run(*options)
    before = vars(create_hparams(base=run_all.recorded_hparams(here / "out/RAND/seed0")))
    for name, capacity in (("RAND", 0), ("SSB-DBS-BR", 200)):  # which only DBS reads
        folder = here / "common" / name / "seed0"
        start = "-c out/RAND/seed0/checkpoint_00000016.pt --h"
        assert f"train.py -o common/{name}/seed0 {start}" in printed
        assert [record["epoch"] for record in records(folder, "epoch")] == [2]
        after = vars(run_all.recorded_hparams(folder))
        assert (after["learning_rate"], after["batch_capacity"]) == (5e-4, capacity)
        changed = {key for key in before if before[key] != after[key]}
        assert changed <= {*run_all.BATCHING, "learning_rate", "epochs", "batch_capacity"}
    assert run(*options).count(": finished") == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_its_training_first(here, tones, run, monkeypatch, number):
    (here / "train.py").write_text(
        "import os, pathlib, signal, time\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "time.sleep(1)  # by then run_all.py waits for it\n"
        f"os.kill(os.getppid(), {int(number)})\n"
        "signal.sigwait([signal.SIGTERM])\n"
        "time.sleep(0.1)  # it saves\n"
        "pathlib.Path('saved').touch()\n"
    )
    monkeypatch.setattr(run_all, "ROOT", here)
    options = arguments(tones, Path("out"), "--only=SB SSB")
    printed = run(*options, status=128 + number, call=call_train)
    assert (here / "saved").exists()  # before run_all.py ended
    assert "run the same command again to continue" in printed and "[2/2]" not in printed


def test_killed_it_cannot_be_called_again_before_its_training_ends(here, tones, run, monkeypatch):
    (here / "train.py").write_text(
        "import pathlib, time\n"
        "pathlib.Path('started').touch()\n"
        "while not pathlib.Path('end').exists():\n"
        "    time.sleep(0.05)\n"
    )
    monkeypatch.setattr(run_all, "ROOT", here)
    options = arguments(tones, Path("out"), "--only=SB SSB")
    killed = multiprocessing.get_context("fork").Process(
        target=run, args=options, kwargs={"call": call_train}
    )
    killed.start()
    while not (here / "started").exists():
        assert killed.is_alive()
        time.sleep(0.05)
    killed.kill()
    killed.join()
    printed = run(*options, status=2)
    assert f"out: in use by process {killed.pid}, or a training" in printed
    (here / "end").touch()
    while "in use" in (printed := run(*options, "--hparams=batch_size=64", status=2)):
        time.sleep(0.05)
    assert "has batch_size=2, and this call batch_size=64" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only=RAND SBB"], "--only: 'RAND SBB': use some of RAND SB-BR "),
        (["--corpus=gone"], "gone: no such folder"),
        (["--hparams=lrf=0.5"], "has lrf=0.1, and this call lrf=0.5; give the same, or another"),
    ],
)
def test_a_refused_call_trains_nothing(here, tones, run, options, message):
    before = contents(here / "out")
    printed = run(*arguments(tones, Path("out"), *options), status=2)
    assert message in printed and "called train.py" not in printed
    assert contents(here / "out") == before


def test_what_no_run_can_start_with_ends_the_series_and_a_full_disk_is_refused(
    here, tones, run, monkeypatch
):
    printed = run(*arguments(tones, Path("new"), "--hparams=batch_size=64"), status=2)
    assert "use at most 16" in printed and printed.count("called train.py") == 1
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000))
    printed = run(*arguments(tones, Path("new")), status=2)
    assert "new: 0.0 GB are free, which is not enough; free some" in printed


def test_without_ljspeech_a_demo_corpus_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with patch.object(run_all, "call") as call:
        overrides = run_all.prepare_data(parse())
        assert [c.args[0] for c in call.call_args_list] == [
            "scripts/make_demo_corpus.py",
            "scripts/prepare_corpus.py",
        ]
        hparams = create_hparams(overrides)
        assert hparams.data_dir == "data/demo13100"
        assert hparams.validation_files == "filelists/demo13100_val.txt"
        run_all.LJSPEECH.mkdir(parents=True)
        assert create_hparams(run_all.prepare_data(parse())).data_dir == "data/LJSpeech-1.1"
        assert call.call_args.args == ("scripts/prepare_ljspeech.py", "--data_dir", Path("data"))


def test_parameters_are_the_papers_on_ljspeechs_lengths():
    lengths = pd.read_csv(ROOT / "filelists/ljspeech_lengths.csv").frames_hop276
    chosen = np.random.default_rng(0).choice(lengths, 10_480, replace=False)
    clips = [SimpleNamespace(n_frames=n) for n in chosen.tolist()]
    with patch.object(run_all, "load_data", lambda _: (clips, [])):
        assert run_all.parameters_like_ssb(parse(), HParams()) == {}
        hparams = HParams(training_files="others.txt")
        found = run_all.parameters_like_ssb(parse(), hparams)
        assert found["BKT"] == {"bucket_size": pytest.approx(1024, rel=0.05)}
        assert found["ATS"] == {"n_bins": pytest.approx(58, rel=0.05)}
        for option in ("--hparams=bucket_size=32,n_bins=7", "--only=RAND SSB-BR"):
            assert run_all.parameters_like_ssb(parse(option), hparams) == {}
        with pytest.raises(UserError, match="cannot pad like SSB here"):
            del clips[20:]
            run_all.parameters_like_ssb(parse(), hparams)


@pytest.mark.parametrize("strategy, unit", [("BKT", 16), ("ATS", 1)])
def test_the_chosen_parameter_is_the_largest_within_the_target(strategy, unit):
    lengths = np.random.default_rng(0).integers(96, 870, 800).tolist()
    largest = run_all.largest_within(0.1, lengths, strategy, 16)
    setting = run_all.PADDING_SETTINGS[strategy]
    zpr = [
        run_all.mean_zpr(lengths, strategy, 16, **{setting: value})
        for value in (largest, largest + unit)
    ]
    assert zpr[0] <= 0.1 < zpr[1]


def test_run_all_sh_works_from_another_folder(tmp_path):
    command = ["bash", os.path.relpath(ROOT / "scripts/run_all.sh", tmp_path), "--only", "X"]
    environment = {**os.environ, "PYTHON": os.path.relpath(sys.executable, ROOT), "CI": ""}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command, **options)
    assert (done.returncode, done.stdout) == (2, "") and "'X': use some of RAND" in done.stderr
