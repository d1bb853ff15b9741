"""run_all.py as its users call it: on a corpus of tones, with a tiny model."""

import importlib
import io
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest

import data_utils
from cli import UserError, exit_on_user_error
from hparams import HParams, create_hparams, format_overrides
from scripts import plot_batching, prepare_corpus, run_all
from scripts.paper import BATCHING, EXPERIMENTS, experiment_settings
from scripts.plot_batching import ljspeech_lengths, subset
from scripts.runs import difference
from tests.conftest import TINY, WORDS, records, write_tone
from training.logger import RunLogger

ROOT = Path(__file__).resolve().parent.parent


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


def arguments(tones: Path, output: Path, *more: str, **settings) -> list[str]:
    settings = {"batch_size": 2, "epochs_per_checkpoint": 1, "check_memory": False} | settings
    overrides = f"{TINY}mel_cache_dir={tones}/cache,{format_overrides(settings)}"
    return ["--corpus", str(tones), "--output", str(output), "--hparams", overrides, *more]


def parse(*args: str):
    with patch.object(sys, "argv", ["run_all.sh", *args]):
        return run_all.parse_args()


def call_here(program: str, *args: object, jobs=None) -> int:
    """In place of run_all.call: in this process, which has imported PyTorch already."""
    print("called", program, *args)
    module = importlib.import_module(program.removesuffix(".py").replace("/", "."))
    argv = [program, *map(str, args)]
    with patch.object(sys, "argv", argv), patch.object(RunLogger, "log_samples"):  # takes longest
        try:
            exit_on_user_error(module.main)
        except SystemExit as end:
            if isinstance(end.code, int):
                return end.code
            print(end.code)
            return 1
    return 0


def run(*args: str, status: int = 0, call=call_here) -> str:
    """Run run_all.py; what it prints."""
    handler, printed = signal.getsignal(signal.SIGTERM), io.TextIOWrapper(io.BytesIO())
    with patch.object(run_all, "call", call), redirect_stdout(printed), redirect_stderr(printed):
        ended = call_here("scripts/run_all.py", *args)
    printed.seek(0)
    printed = printed.read().partition("\n")[2]  # without "called"
    assert ended == status, printed
    signal.signal(signal.SIGTERM, handler)
    return printed


@pytest.fixture(scope="module")
def series(tones, tmp_path_factory) -> tuple[Path, str]:
    """All ten experiments, two epochs each; their folder and what was printed."""
    output = tmp_path_factory.mktemp("series") / "table2"
    return output, run(*arguments(tones, output, "--epochs", "2"))


def test_ten_experiments_are_trained_and_reported(series):
    output, printed = series
    plans, *calls = printed.split("called train.py -o ")
    for name, call in zip(EXPERIMENTS, calls, strict=True):
        folder = output / name / "seed0"
        settings = json.loads((folder / "hparams.json").read_text())
        expected = experiment_settings(name) | {"seed": 0, "epochs": 2, "batch_size": 2}
        assert expected.items() <= settings.items() and call.startswith(f"{folder} --resume")
        epoch = records(folder, "epoch")[0]
        plan = "{n_batches} {zpr:.2%} {abl:.1f} {total_length}".format(**epoch).replace("%", "")
        assert f"{name} seed 0 0/2 {plan}\n" in re.sub(" +", " ", plans.replace(",", ""))
        assert epoch["n_batches"] < 8 if "DBS" in name else epoch["n_batches"] == 8
    _, val = data_utils.load_data(create_hparams(base=HParams(**settings)))
    start = records(folder, "start")[0]
    assert start["validation_frames"] == sum(clip.n_frames for clip in val)
    for text in ("16 training and 4 validation clips", " decoder steps to go", "GB of disk"):
        assert text in plans
    assert "training left" not in plans and "FAILED" not in printed and "Missing" not in printed
    assert len(re.findall(": done; about .* of training left\n", printed)) == 10
    for name in ("table1", "table2", "table3", "table4", "conclusions"):
        assert (output / "tables" / f"{name}.md").read_text() in printed
    assert len(list((output / "figures").glob("*.png"))) == 7


def test_a_second_call_waits_for_others_and_what_is_finished_stays(series, tones):
    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in output.glob("*/seed0/[!l]*")}

    output, _ = series
    before = times()
    with patch.object(run_all, "locked", wraps=run_all.locked) as locked:
        printed = run(*arguments(tones, output, "--epochs=2"))
    # For another call, and for each training that a killed one may have left.
    waited = [call.args[0] for call in locked.call_args_list if call.kwargs["wait"]]
    assert waited == [output, *sorted(output / name / "seed0" for name in EXPERIMENTS)]
    assert printed.count(": finished, 2 epochs") == 10 and "called train.py" not in printed
    new = ["--epochs=2", "--only=RAND", "--seeds=7000"]
    for message, options in (
        (f"--epochs 1: {output}/RAND/seed0 has 2; give at", arguments(tones, output, "--epochs=1")),
        ("lists other clips than these; give anoth", arguments(tones, output, "--limit=10")),
        ("and this call lrf=0.5; give the same", arguments(tones, output, *new, lrf=0.5)),
        ("and this call n_bins=7; give the same", arguments(tones, output, *new, n_bins=7)),
    ):
        assert message in run(*options, status=2)
    assert times() == before and len(before) > 40


def test_called_again_it_resumes_a_broken_run_and_goes_on_after_a_failed_one(
    series, tones, tmp_path
):
    output = shutil.copytree(series[0], tmp_path / "table2")
    newest = output / "BKT-BR/seed0/checkpoint_00000016.pt"
    newest.unlink()
    for path in (output / "RAND/seed0").glob("checkpoint_*.pt"):
        path.unlink()  # to free space: its records say that it has finished
    for path in (output / "SB-BR/seed0").glob("checkpoint_*.pt"):
        path.write_bytes(b"damaged")
    printed = run(*arguments(tones, output, "--epochs=2", "--only=RAND SB-BR BKT-BR"), status=1)
    assert re.search("^BKT-BR, seed 0 +1/2 ", printed, re.MULTILINE)
    assert re.search(r"of training left\n\[1/3\] RAND, seed 0: finished", printed)
    assert "checkpoint_00000016.pt: not a checkpoint, or damaged" in printed
    assert "[2/3] SB-BR, seed 0: FAILED with status 2; continuing" in printed
    assert "[3/3] BKT-BR, seed 0: done" in printed
    assert "FAILED: SB-BR, seed 0; see above" in printed.split("called scripts/fig")[1]
    validations = [records(folder / "BKT-BR/seed0", "validation") for folder in (output, series[0])]
    assert validations[0][0]["loss"] == validations[1][0]["loss"] and newest.exists()


def test_every_run_starts_from_the_checkpoint_of_its_seed(series, tones, tmp_path):
    start, output = series[0] / "RAND", tmp_path / "common"
    options = ["--start", str(start), "--output", str(output), "--only", "RAND SSB-DBS-BR"]
    options += ["--hparams", "learning_rate=5e-4"]
    printed = run(*options, "--epochs", "3")
    before = json.loads((start / "seed0/hparams.json").read_text())
    for name in ("RAND", "SSB-DBS-BR"):
        folder = output / name / "seed0"
        assert f"train.py -o {folder} -c {start}/seed0/checkpoint_00000016.pt --h" in printed
        assert re.search(rf"^{name}, seed 0 +2/3 ", printed, re.MULTILINE)
        assert [record["epoch"] for record in records(folder, "epoch")] == [2]
        after = json.loads((folder / "hparams.json").read_text())
        assert (experiment_settings(name) | {"learning_rate": 5e-4, "epochs": 3}).items() <= (
            after.items()
        )
        changed = {key for key in before if before[key] != after[key]}
        lists = {"training_files", "validation_files"}
        assert changed <= {*BATCHING, *lists, "learning_rate", "epochs"}
    assert run(*options, "--epochs=3").count(": finished, 3 epochs") == 2
    for capacity in ("--hparams=batch_capacity=80", "--sweep=batch_capacity=80,90"):
        assert parse("--start", str(start), capacity).settings["batch_capacity"] == 80
    for message, more in (
        ("checkpoint_00000016.pt has 2 already; give more", ["--epochs=2"]),
        ("has data and settings of its own; leave out --corpus", [f"--corpus={tones}"]),
        ("RAND/seed7: holds no run; name", ["--seeds=7"]),
    ):
        assert message in run(*options, *more, status=2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_its_training_and_says_how_to_go_on(
    tones, tmp_path, monkeypatch, number
):
    (tmp_path / "train.py").write_text(
        "import os, pathlib, signal, time\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "time.sleep(1)  # by then run_all.py waits for it\n"
        f"os.kill(os.getppid(), {int(number)})\n"
        "signal.sigwait([signal.SIGTERM])\n"
        "time.sleep(0.1)  # it saves\n"
        f"pathlib.Path('{tmp_path}/saved').touch()\n"
    )
    options = arguments(tones, tmp_path / "out", "--only", "RAND SB")
    monkeypatch.setattr(run_all, "ROOT", tmp_path)
    printed = run(*options, status=128 + number, call=run_all.call)
    assert (tmp_path / "saved").exists()  # before run_all.py ended
    assert "stopping; run the same command again to continue" in printed
    assert "[2/2]" not in printed and "tables" not in printed


def test_experiments_that_the_paper_lacks_are_trained_on_a_converted_corpus(
    tones, tmp_path, monkeypatch, capsys
):
    """With the settings that prepare_corpus.py prints for train.py, at another sampling rate."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plot_batching, "draw_all", lambda samples, *_: print(samples[0].tolist()))
    options = "--name", "low", "--sampling_rate", "16000", "--convert_to", "low"
    prepare_corpus.main([str(tones), *options])
    settings = shlex.split(capsys.readouterr().out.splitlines()[-1])[-1]
    settings += f",batch_size=2,mel_cache_dir=cache,{TINY}"
    names = ["RAND-DBS", "ATS-DBS-BR"]
    options = "--output=out", "--epochs=1", f"--only={' '.join(names)}", f"--hparams={settings}"
    printed = run(*options)
    assert "[2/2] ATS-DBS-BR, seed 0: done" in printed and "FAILED" not in printed
    for name, strategy in zip(names, ("RAND", "ATS"), strict=True):
        settings = json.loads(Path(f"out/{name}/seed0/hparams.json").read_text())
        assert settings["dynamic_batch_size"] and settings["batching_strategy"] == strategy
        assert settings["data_dir"] == "low" and settings["sampling_rate"] == 16000
        assert f"\n| {name} | 1 | " in printed
    clips = data_utils.load_data(create_hparams(base=HParams(**settings)))[0]
    assert f"\n{[clip.n_frames for clip in clips]}\n" in printed


def test_a_sweep_trains_each_value_and_compares_them(tones, tmp_path, series):
    output, swept = tmp_path / "out", ("--epochs=2", "--sweep=batch_size=2,4")
    options = [option.replace("batch_size=2,", "", 1) for option in arguments(tones, output)]
    printed = run(*options, *swept)
    plans = re.sub(" +", " ", printed.partition("called")[0].replace(",", ""))
    for size, name in itertools.product((2, 4), ("SSB-BR", "SSB-DBS-BR")):
        folder = output / f"{name},batch_size={size}" / "seed0"
        settings = json.loads((folder / "hparams.json").read_text())
        assert (experiment_settings(name) | {"batch_size": size}).items() <= settings.items()
        epoch = records(folder, "epoch")[0]
        plan = "{n_batches} {zpr:.2%} {abl:.1f} {total_length}".format(**epoch).replace("%", "")
        assert f"{name}batch_size={size} seed 0 0/2 {plan}\n" in plans
        assert re.search(rf"^\| {name} \| {size} \| 1 \| {epoch['n_batches']}.0", printed, re.M)
    assert "GB of disk up to 0.01 GB a run" in plans and "plot_batching" not in printed
    assert (output / "tables/sweep.md").read_text() in printed
    assert [path.name for path in (output / "figures").iterdir()] == ["sweep.png"]
    assert run(*options, *swept).count(": finished, 2 epochs") == 4
    for message, folder, more in (
        ("and this call batch_size=16; give the same", output, []),
        ("is not of this sweep; give another --output", output, ["--sweep=lrf=0.1,0.2"]),
        ("/ATS-BR/seed0: is not of this sweep; give another --output", series[0], swept),
        ("train.txt has 16 clips; use at most 16", output, ["--sweep=batch_size=2,32"]),
    ):
        options = [option.replace(str(output), str(folder)) for option in options]
        assert message in run(*options, *more, status=2)
        options = [option.replace(str(folder), str(output)) for option in options]


def test_a_capacity_is_swept_over_dynamic_experiments_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clips = [SimpleNamespace(n_frames=n) for n in [20, 30, 40, 50] * 40]
    args = parse("--sweep=batch_capacity_seconds=10,2.5", "--seeds=0 1000")
    assert args.output == run_all.ROOT / "runs/sweep_batch_capacity_seconds"
    assert args.settings["batch_capacity_seconds"] == 2.5  # which all clips must fit
    jobs = run_all.make_jobs(args, clips)
    folders = [f"SSB-DBS-BR,batch_capacity_seconds={value}" for value in ("10", "2.5")]
    assert [job.folder.parent.name for job in jobs] == folders * 2
    assert [job.batches.n_batches for job in jobs[:2]] == [8, 35]
    for job in jobs:
        assert create_hparams(job.overrides) == job.hparams


@pytest.mark.parametrize(
    ("options", "only"),
    [
        (["--sweep=batch_size=4,8"], ["SSB-BR", "SSB-DBS-BR"]),
        (["--sweep=n_bins=4,8"], ["ATS-BR", "ATS-DBS-BR"]),
        (["--sweep=learning_rate=1e-3,1e-4", "--only=RAND"], ["RAND"]),
        # With a capacity of its own, DBS does not read the base batch size.
        (["--sweep=batch_size=4,8", "--hparams=batch_capacity=900"], ["SSB-BR"]),
    ],
)
def test_a_sweep_is_of_experiments_that_use_the_setting(options, only):
    assert parse(*options).only == only


def test_interrupted_during_the_imports_it_prints_nothing(tmp_path):
    """Numpy stands for what is being imported."""
    code = "print('importing', flush=True)\nimport time\ntime.sleep(60)"
    (tmp_path / "numpy.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, ROOT / "scripts/run_all.py"]
    process = subprocess.Popen(command, env=environment, **options)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "") and process.returncode == -signal.SIGINT


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--only=RAND SBB", "--only: 'RAND SBB': use some of RAND SB-BR "),
        ("--only=", "use some of RAND"),
        ("--seeds=0 x", "--seeds: invalid seeds value: '0 x'"),
        ("--seeds=-1", "--seeds: invalid seeds value: '-1'"),
        ("--seeds=", "--seeds: invalid seeds value: ''"),
        ("--hparams=seed=1", "--hparams: seed is set by --seeds; leave it out"),
        ("--hparams=data_dir=x", "makes its own lists; leave data_dir out of --hparams"),
        ("--output=a+b", "--output a+b: + joins filelists; use another name"),
        (
            "--sweep=lrf=0.1",
            "--sweep lrf=0.1: has one value; give two or more, or set it by --hpara",
        ),
        ("--sweep=lrf=0.1,0.10", "--sweep lrf=0.1,0.10: has 0.1 twice; keep one"),
        ("--sweep=lrf", "--sweep lrf: lrf= is not valid; use a number"),
        ("--sweep=lfr=0.1,0.2", "lfr=0.1,0.2: unknown setting 'lfr'; did you mean 'lrf'?"),
        ("--sweep=lrf=0.1,-1", "--sweep lrf=0.1,-1: setting lrf=-1.0: use 0 or more"),
        ("--sweep=batch_size=2,4", "--sweep batch_size=2,4: leave batch_size out of --hparams"),
        ("--sweep=seed=1,2", "runs with another seed do not compare; sweep batch_size or the like"),
        ("--sweep=hop_length=64,128", "runs with another hop_length do not compare; sweep batch"),
        ("--sweep=symbols=ab,abc", "runs with another symbols do not compare; sweep batch_size or"),
        ("--sweep=lrf=1,2 --sweep=lrf=3,4", "is not the only --sweep; give one at a time"),
        (
            "--sweep=lrf=1,2 --only=RAND SSB",
            "has no effect on RAND; --only may have SSB-BR SSB SSB",
        ),
        (
            "--sweep=batch_capacity=99,999 --only=SSB",
            "no effect on SSB; --only may have SB-DBS SSB",
        ),
        ("--sweep=batch_capacity=9,999", "above the batch capacity of 9 (and 14 more clips); set "),
        ("--corpus=gone", "gone: no such folder; give the corpus's"),
        ("--hparams=training_files=gone --corpus=", "filelist 'gone': No such file or directory"),
        ("--hparams=batch_size=64", "train.txt has 16 clips; use at most 16"),
        ("--hparams=precision=tf32", "tf32: needs an NVIDIA GPU"),
        ("", "0.20 GB free; free some, or"),
    ],
)
def test_a_refused_call_leaves_nothing(tmp_path, tones, monkeypatch, args, message):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes").write_text("mine")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    # Ten runs of 110 validations, of which TensorBoard shows 8, and small checkpoints.
    free = int(10 * 8 * run_all.SAMPLES_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    before = sorted(tmp_path.rglob("*"))
    for folder in ("new/out", "old"):
        options = arguments(tones, tmp_path / folder, *re.split(" (?=--)", args))
        printed = run(*filter(None, options), status=2)
        *plan, error = (line for line in printed.splitlines() if "given twice" not in line)
        assert message in error and (not plan or "free" in message)
        assert sorted(tmp_path.rglob("*")) == before


def test_without_ljspeech_a_demo_corpus_is_made_in_the_repository(tones, tmp_path):
    call = Mock(side_effect=lambda _, corpus, *options: shutil.copytree(tones, corpus) and 0)
    patches = {"LJSPEECH": tmp_path / "none", "ROOT": tmp_path, "call": call}
    with patch.multiple(run_all, **patches):
        data = run_all.choose_data(parse("--limit=20"))
    demo = tmp_path / "data/demo20"
    assert call.call_args.args == ("scripts/make_demo_corpus.py", demo, "--clips", 20)
    assert data["data_dir"] == str(demo)
    assert len((tmp_path / "runs/table2/filelists/train.txt").read_text().splitlines()) == 16


def test_limited_lists_keep_their_proportion_and_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, n in (("a", 20), ("b", 20), ("val", 10)):
        Path(name).write_text("".join(f"{name}{i:02}.wav|one\n" for i in range(n)))
    lists = "--hparams=training_files=a+b,validation_files=val", "--limit=25"
    data = run_all.choose_data(parse(*lists, "--output=out"))
    assert data["data_dir"] == "" and data["training_files"] == "out/filelists/train.txt"
    train, val = (Path(f"out/filelists/{n}.txt").read_text().split() for n in ("train", "val"))
    assert len(train) == 20 and len(val) == 5
    assert train == sorted(set(train)) != Path("a").read_text().split()
    shutil.copytree("out/filelists", "filelists")
    mine = Path("filelists/val.txt")
    mine.write_text("mine.wav|one\n")
    with pytest.raises(UserError, match=r"filelists/val\.txt: lists other clips than these; give"):
        run_all.choose_data(parse(*lists, "--output=."))
    assert mine.read_text() == "mine.wav|one\n"


def test_lists_of_several_folders_become_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(name).mkdir()
        for part in ("train", "val"):
            Path(f"{part}_{name}").write_text(f"{part}.wav|one\n/{name}.wav|two\n")
    lists = "training_files=train_a+train_b,validation_files=val_a+val_b"
    data = run_all.choose_data(parse(f"--hparams=data_dir=a+b,{lists}", "--output=out"))
    assert data["data_dir"] == ""
    lines = "a/{0}.wav|one /a.wav|two b/{0}.wav|one /b.wav|two"
    for part in ("train", "val"):
        assert Path(f"out/filelists/{part}.txt").read_text().split() == lines.format(part).split()


def test_a_capacity_is_for_the_dynamic_experiments_alone(tmp_path):
    assert parse().settings["mel_cache_dir"] == str(run_all.ROOT / "mel_cache")
    overrides = 'batch_capacity=900,ignore_layers=[a,b],mel_cache_dir="it\'s, here"'
    overrides += r""",symbols=' ab\'"',n_symbols=148"""  # more than it takes
    args = parse("--output", str(tmp_path), "--hparams", overrides)
    jobs = run_all.make_jobs(args, [SimpleNamespace(n_frames=n) for n in [20, 30, 40, 50] * 40])
    assert len(jobs) == 10
    for job in jobs:
        assert job.hparams.batch_capacity == (900 if "DBS" in job.title else 0)
        assert create_hparams(job.overrides) == job.hparams
        assert not difference(vars(job.hparams), vars(jobs[0].hparams), {*BATCHING})
    assert jobs[0].hparams.ignore_layers == ("a", "b")


def test_parameters_are_the_papers_on_ljspeechs_lengths(capsys):
    lengths = subset(ljspeech_lengths(276), 10_480, 0).tolist()
    for overrides, bucket_size, n_bins in (("", 1024, 58), ("bucket_size=32,n_bins=7", 32, 7)):
        args = parse("--hparams", overrides, "--seeds=1 0 1")
        run_all.select_parameters(args, lengths)
        assert args.settings["bucket_size"] == pytest.approx(bucket_size, rel=0.05)
        assert args.settings["n_bins"] == pytest.approx(n_bins, rel=0.05)
        assert args.seeds == [0, 1] and "share plans" in capsys.readouterr().out


def test_run_all_sh_works_from_another_folder(tmp_path):
    command = ["bash", os.path.relpath(ROOT / "scripts/run_all.sh", tmp_path), "--corpus", "gone"]
    python = os.path.relpath(sys.executable, ROOT)  # as venv.sh gives it
    environment = {**os.environ, "PYTHON": python, "CI": ""}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([*command, "--output", "out"], **options)
    assert (done.returncode, done.stdout) == (2, "") and "gone: no such folder" in done.stderr
