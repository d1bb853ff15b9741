"""run_all.sh as its comments show it: with a stub in place of Python, and on a corpus of tones."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from batching import Batching, read_batching
from hparams import create_hparams
from scripts.results import PAPER
from tests.conftest import records
from training.arguments import parse_args

STUB = """#!/usr/bin/env bash
[ "$1" != - ] || exit 0  # venv.sh asks whether the packages are there
printf '%s|' "$@" >> "$CALLS"
echo >> "$CALLS"
[ "$1" = train.py ] || exit 0
[ "$3" != "$FAILING" ] || exit 3
mkdir -p "$3"
touch "$3/checkpoint_00000001.pt"
"""


def start(*arguments: str, **variables: object) -> subprocess.Popen:
    variables = {name: str(value) for name, value in variables.items()}
    environment = os.environ | {"PYTHON": sys.executable, "CI": ""} | variables
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = ["bash", ROOT / "scripts/run_all.sh", *arguments]
    return subprocess.Popen(command, cwd="/", env=environment, start_new_session=True, **pipes)


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """``calls(*arguments, **variables)``: the status of run_all.sh with a stub of Python, the
    options of its calls of train.py, and the call of results.py."""
    stub, log = tmp_path / "stub", tmp_path / "calls"
    stub.write_text(STUB)
    stub.chmod(0o700)

    def calls(*arguments: str, **variables: object):
        log.write_text("")
        variables = {"OUTPUT": tmp_path / "out", "FAILING": "", **variables}
        process = start(*arguments, PYTHON=stub, CALLS=log, **variables)
        process.communicate()
        lines = [line.split("|")[:-1] for line in log.read_text().splitlines()]
        options = []
        for line in lines:
            if line[0] == "train.py":
                monkeypatch.setattr(sys, "argv", line)
                options.append(parse_args())
        return process.returncode, options, lines[-1]

    return calls


def test_each_experiment_of_the_paper_is_trained_with_the_arguments(calls, tmp_path):
    out = tmp_path / "out"
    status, runs, results = calls("--preset", "nvidia", "--hparams", "data_dir='a, b'", SEEDS="0 7")
    assert (status, results) == (
        0,
        ["scripts/results.py", str(out), "--figure", f"{out}/figure4.png"],
    )
    names = [(seed, name) for seed in (0, 7) for name in PAPER.index]
    for (seed, name), run in zip(names, runs, strict=True):
        hparams = create_hparams(run.hparams, run.preset)
        assert (run.output_dir, run.resume) == (out / name / f"seed{seed}", True)
        assert (hparams.seed, hparams.data_dir, hparams.hop_length) == (seed, "a, b", 256)
        settings = (getattr(hparams, setting) for setting in Batching._fields)
        assert Batching(*settings) == read_batching(name)


def test_the_first_run_that_fails_ends_it_with_its_status(calls, tmp_path):
    status, runs, _ = calls(FAILING=tmp_path / "out/SSB-BR/seed0")
    assert (status, len(runs)) == (3, 3)


def test_a_run_that_has_not_begun_starts_from_the_checkpoint_of_its_seed(calls, tmp_path):
    calls(EXPERIMENTS="RAND", SEEDS="0 7")
    first, second = (tmp_path / f"out/RAND/seed{i}/checkpoint_00000001.pt" for i in (0, 7))
    variables = {"START": tmp_path / "out/RAND", "OUTPUT": tmp_path / "common", "SEEDS": "0 7"}
    for experiments, expected in (("SB", [first, second]), ("SB SSB", [None, first, None, second])):
        _, runs, _ = calls(EXPERIMENTS=experiments, **variables)
        assert [run.checkpoint for run in runs] == expected
        assert [run.resume for run in runs] == [not checkpoint for checkpoint in expected]


def test_after_a_kill_the_same_call_completes_it(settings, tmp_path):
    overrides, out = f"{settings}epochs=1", tmp_path / "out"
    variables = {"EXPERIMENTS": "RAND SB-DBS", "OUTPUT": out}
    process = start("--hparams", overrides, **variables)
    while not list(out.glob("SB-DBS/seed0/checkpoint_*.pt")):
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    first = (out / "RAND/seed0/metrics.jsonl").read_bytes()
    process = start("--hparams", overrides, **variables)
    printed = process.communicate()[0]
    assert process.returncode == 0, printed
    assert (out / "RAND/seed0/metrics.jsonl").read_bytes() == first
    assert [record["epoch"] for record in records(out / "SB-DBS/seed0", "epoch")] == [0]
    table = (out / "tables.md").read_text()
    assert table in printed and "RAND |" in table and "SB-DBS |" in table
