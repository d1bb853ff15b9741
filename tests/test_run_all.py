"""run_all.sh as its comments show it: with a stub in place of Python, and on a corpus of tones."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, records

from batching import read_batching
from hparams import create_hparams
from scripts.results import PAPER
from training.arguments import parse_args

STUB = """#!/usr/bin/env bash
[ "$1" != - ] || exit 0  # venv.sh asks whether the packages are there
[ "$1" = train.py ] || exit 0
{ printf '%s|' "$@"; echo; } >> "$CALLS"
[ "$3" != "$FAILING" ] || exit 3
mkdir -p "$3" && touch "$3/checkpoint_00000001.pt"
"""


def start(*arguments: str, **variables: object) -> subprocess.Popen:
    environment = os.environ | {"PYTHON": sys.executable, "CI": ""}
    environment |= {name: str(value) for name, value in variables.items()}
    options = {"env": environment, "cwd": "/", "start_new_session": True, "text": True}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(["bash", ROOT / "scripts/run_all.sh", *arguments], **options)


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Runs run_all.sh with the stub; returns its status, and the arguments of each train.py."""
    stub, log = tmp_path / "stub", tmp_path / "calls"
    stub.write_text(STUB)
    stub.chmod(0o700)
    monkeypatch.setenv("OUTPUT", str(tmp_path / "out"))

    def calls(*arguments: str, **variables: object):
        log.write_text("")
        process = start(*arguments, PYTHON=stub, CALLS=log, **variables)
        process.communicate()
        runs = []
        for line in log.read_text().splitlines():
            monkeypatch.setattr(sys, "argv", line.split("|")[:-1])
            runs.append(parse_args())
        return process.returncode, runs

    return calls


def test_each_experiment_of_the_paper_is_trained_until_one_fails(calls, tmp_path):
    status, runs = calls("--preset", "nvidia", "--hparams", "data_dir='a, b'", SEEDS="0 7")
    assert status == 0
    names = [(seed, name) for seed in (0, 7) for name in PAPER.index]
    for (seed, name), run in zip(names, runs, strict=True):
        hparams = create_hparams(run.hparams, run.preset)
        assert (run.output_dir, run.resume) == (tmp_path / "out" / name / f"seed{seed}", True)
        assert (hparams.seed, hparams.data_dir, hparams.hop_length) == (seed, "a, b", 256)
        assert read_batching(name)._asdict().items() <= vars(hparams).items()
    status, runs = calls(FAILING=tmp_path / "out/SSB-BR/seed0")
    assert (status, len(runs)) == (3, 3)


def test_a_run_that_has_not_begun_starts_from_the_checkpoint_of_its_seed(calls, tmp_path):
    calls(EXPERIMENTS="RAND", SEEDS="0 7")
    first, second = (tmp_path / f"out/RAND/seed{i}/checkpoint_00000001.pt" for i in (0, 7))
    variables = {"START": tmp_path / "out/RAND", "OUTPUT": tmp_path / "common", "SEEDS": "0 7"}
    for experiments, expected in (("SB", [first, second]), ("SB SSB", [None, first, None, second])):
        _, runs = calls(EXPERIMENTS=experiments, **variables)
        assert [run.checkpoint for run in runs] == expected
        assert [run.resume for run in runs] == [not checkpoint for checkpoint in expected]


def test_after_a_kill_the_same_call_completes_it(settings, tmp_path):
    arguments, out = ["--hparams", f"{settings}epochs=1"], tmp_path / "out"
    process = start(*arguments, EXPERIMENTS="RAND SB-DBS", OUTPUT=out)
    while not list(out.glob("SB-DBS/seed0/checkpoint_*.pt")):
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    finished = (out / "RAND/seed0/metrics.jsonl").read_bytes()
    process = start(*arguments, EXPERIMENTS="RAND SB-DBS", OUTPUT=out)
    printed = process.communicate()[0]
    assert process.returncode == 0, printed
    assert (out / "RAND/seed0/metrics.jsonl").read_bytes() == finished
    assert [record["epoch"] for record in records(out / "SB-DBS/seed0", "epoch")] == [0]
    table = (out / "tables.md").read_text()
    assert table in printed and "RAND |" in table and "SB-DBS |" in table
