"""run_all.py as its users call it: on a corpus of tones, with a tiny model."""

import contextlib
import importlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import checkpoint
from cli import UserError
from scripts import run_all
from scripts.paper import EXPERIMENTS, experiment_settings
from scripts.plot_batching import ljspeech_lengths, subset
from scripts.runs import read_metrics
from tests.conftest import TINY, WORDS, write_tone

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = [sys.executable, str(ROOT / "scripts" / "run_all.py")]
TIMED = {"duration", "minutes", "frames_per_second", "data_wait", "peak_memory_gib"}


@pytest.fixture(scope="module")
def tones(tmp_path_factory) -> Path:
    """20 tones of 0.1 to 0.5 s in LJSpeech's layout, and filelists of 16 and 4."""
    corpus = tmp_path_factory.mktemp("tones")
    (corpus / "wavs").mkdir()
    texts = {f"T{i}": WORDS[i % len(WORDS)] for i in range(20)}
    for i, name in enumerate(texts):
        write_tone(corpus / "wavs" / f"{name}.wav", 0.1 + 0.4 * (i * 7 % 20) / 19)
    (corpus / "metadata.csv").write_text("".join(f"{n}|{text}\n" for n, text in texts.items()))
    lines = [f"wavs/{name}.wav|{text}\n" for name, text in texts.items()]
    (corpus / "train.txt").write_text("".join(lines[:16]))
    (corpus / "val.txt").write_text("".join(lines[16:]))
    return corpus


def hparams(**settings) -> str:
    settings = {"batch_size": 2, "epochs_per_checkpoint": 1} | settings
    return TINY + ",".join(f"{name}={value}" for name, value in settings.items())


def arguments(tones: Path, output: Path, *more: str, **settings) -> list[str]:
    settings = hparams(**{"mel_cache_dir": tones / "cache"} | settings)
    return ["--corpus", str(tones), "--output", str(output), "--hparams", settings, *more]


def parse(monkeypatch, *args: str):
    monkeypatch.setattr(sys, "argv", ["run_all.sh", *args])
    return run_all.parse_args()


def run_main(main, *args: object) -> int:
    """Run a program in this process, which has imported PyTorch already; its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program", *map(str, args)])
        try:
            main()
        except UserError as error:
            print(error)
            return 2
        except KeyboardInterrupt:
            return 130
        except SystemExit as end:
            return end.code
    return 0


def call_here(program: str, *args: object, while_running=lambda: None) -> int:
    """In place of run_all.call."""
    print("called", program, *args)
    module = importlib.import_module(program.removesuffix(".py").replace("/", "."))
    status = run_main(module.main, *args)
    while_running()
    while_running()
    return status


def run(*args: str, status: int = 0, call=call_here) -> str:
    """Run run_all.py in this process; what it prints."""
    handler = signal.getsignal(signal.SIGTERM)
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(printed),
    ):
        patch.setattr(run_all, "call", call)
        assert run_main(run_all.main, *args) == status, printed.getvalue()
    signal.signal(signal.SIGTERM, handler)
    return printed.getvalue()


def files_in(output: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.name != "lock"}


def records(output: Path) -> dict[Path, list[dict]]:
    """What the runs of a series recorded, except for what depends on the clock."""
    return {
        path.relative_to(output): [
            {name: value for name, value in record.items() if name not in TIMED}
            for record in read_metrics(path)
            if record["event"] != "start"
        ]
        for path in sorted(output.glob("*/*/metrics.jsonl"))
    }


# A series


@pytest.fixture(scope="module")
def series(tones, tmp_path_factory) -> tuple[Path, str]:
    """All ten experiments, two epochs each; their folder and what was printed."""
    output = tmp_path_factory.mktemp("series") / "table2"
    return output, run(*arguments(tones, output, "--epochs", "2"))


def test_ten_experiments_are_trained_and_reported(series):
    output, printed = series
    calls = [line for line in printed.splitlines() if line.startswith("called train.py -o ")]
    plans = printed[: printed.index("called train.py")]
    rows = [line.split() for line in plans.replace(",", "").splitlines()]
    n_batches = {}
    for name, line in zip(EXPERIMENTS, calls, strict=True):
        folder = output / name / "seed0"
        assert f" {folder} --resume" in line
        settings = json.loads((folder / "hparams.json").read_text())
        expected = {**experiment_settings(name), "seed": 0, "epochs": 2, "batch_size": 2}
        assert {key: settings[key] for key in expected} == expected
        epoch = next(r for r in read_metrics(folder / "metrics.jsonl") if r["event"] == "epoch")
        n_batches[name] = epoch["n_batches"]
        plan = f"{n_batches[name]} {100 * epoch['zpr']:.2f} {epoch['abl']:.1f}"
        assert [name, "0", "0/2", *plan.split(), str(epoch["total_length"])] in rows
    assert n_batches["SB-DBS"] < n_batches["SB"] == 8
    for text in ("16 training and 4 validation clips", " decoder steps to go", "GB of disk needed"):
        assert text in plans
    # The time left is printed once after the first epoch, and after each run.
    assert "training left" not in plans and "FAILED" not in printed and "Missing" not in printed
    assert len(re.findall("^about .* of training left$", printed, re.MULTILINE)) == 1
    assert len(re.findall(": done in .* of training left$", printed, re.MULTILINE)) == 10
    for name in ("table1", "table2", "table3", "table4", "conclusions"):
        assert (output / "tables" / f"{name}.md").read_text() in printed
    assert len(list((output / "figures").glob("*.png"))) == 3  # plot_batching.py needs 48 clips


def test_a_finished_series_is_only_reported(series, tones):
    output, _ = series
    before = files_in(output)
    printed = run(*arguments(tones, output, "--epochs", "2"))
    assert printed.count(": finished, 2 epochs") == 10 and "called train.py" not in printed
    changed = {path for path, mtime in files_in(output).items() if before[path] != mtime}
    assert {path.relative_to(output).parts[0] for path in changed} <= {"tables", "figures"}


def test_killed_in_the_fourth_run_and_called_again_the_records_are_equal(
    series, tones, tmp_path, monkeypatch
):
    class Killed(BaseException):
        pass

    def save_and_die(folder, step, *more):
        save(folder, step, *more)
        if step:
            raise Killed

    whole, killed, save = series[0], tmp_path / "killed", checkpoint.save
    shutil.copytree(whole, killed, ignore=shutil.ignore_patterns("BKT-BR", "tables", "figures"))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(checkpoint, "save", save_and_die)
        run(*arguments(tones, killed, "--epochs", "2"))
    assert checkpoint.checkpoints(killed / "BKT-BR/seed0")[0].name == "checkpoint_00000008.pt"
    printed = run(*arguments(tones, killed, "--epochs", "2"))
    assert printed.count(": finished, 2 epochs") == 9 and printed.count(": done in") == 1
    assert re.search(r"^BKT-BR +0 +1/2 ", printed, re.MULTILINE)
    assert "of training left\n[1/10] RAND" in printed  # known from the other runs
    assert records(killed) == records(whole)


def test_a_failed_run_is_reported_and_the_rest_go_on(series, tones, tmp_path):
    output = shutil.copytree(series[0], tmp_path / "table2")
    for path in (output / "SB-BR" / "seed0").glob("checkpoint_*.pt"):
        path.write_bytes(b"damaged")
    shutil.rmtree(output / "SSB-BR")
    options = arguments(tones, output, "--epochs", "2", "--only", "SB-BR SSB-BR")
    printed = run(*options, status=1)
    assert "checkpoint_00000016.pt: not a checkpoint, or damaged" in printed
    assert "[1/2] SB-BR, seed 0: FAILED with status 2; continuing" in printed
    assert "[2/2] SSB-BR, seed 0: done in" in printed
    assert (
        "SB-BR, seed 0: FAILED with status 2, see above" in printed.split("called scripts/fig")[1]
    )


def test_a_second_call_waits_for_the_first_and_for_what_it_left_training(tones, tmp_path):
    """In real processes, and in another folder than the program's, where all paths start."""
    shutil.copytree(tones, tmp_path / "tones", ignore=shutil.ignore_patterns("cache"))
    command = [*PROGRAM, "--train", "tones/train.txt", "--val", "tones/val.txt", "--only", "RAND"]
    command += ["--hparams", hparams(data_dir="tones", mel_cache_dir="mels")]
    command += ["--output", "out", "--epochs", "2"]
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "text": True}
    folder, waiting = tmp_path / "out/RAND/seed0", "in use by process {}; waiting for its end\n"
    first = subprocess.Popen(command, **options)
    deadline = time.monotonic() + 280
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_bytes():
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.001)
    train = int((folder / "lock").read_text())
    os.kill(train, signal.SIGSTOP)
    second = subprocess.Popen(command, **options)
    assert second.stdout.readline() == "out: " + waiting.format(first.pid)
    first.kill()  # which leaves train.py
    assert second.stdout.readline() == "out/RAND/seed0: " + waiting.format(train)
    os.kill(train, signal.SIGCONT)
    printed, _ = second.communicate(timeout=300)
    assert second.returncode == 0 and "RAND, seed 0: finished, 2 epochs" in printed, printed
    assert f"python {ROOT}/train.py -o out/RAND/seed0 --resume" in first.communicate()[0]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 2 * (8 + 1) + 1 == len(set(lines))  # of one start
    assert (folder / "checkpoint_00000016.pt").is_file()
    assert (tmp_path / "out" / "tables" / "table3.md").is_file()
    assert len(list((tmp_path / "mels").glob("*.mels"))) == 1


INTERRUPTING = """
import os, pathlib, signal, sys, time

def save(*_):
    time.sleep(0.2)
    pathlib.Path("saved").touch()
    sys.exit(143)

signal.signal(signal.SIGTERM, save)
while not pathlib.Path("seen").exists():
    time.sleep(0.01)
os.kill(os.getppid(), int(sys.argv[1]))
time.sleep(60)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_it_ends_its_training_and_says_how_to_go_on(
    tones, tmp_path, monkeypatch, number, status
):
    """By a train.py that takes a while to save. It waits for what is called while it runs."""
    call = run_all.call

    def call_interrupting(program, *_, while_running):
        monkeypatch.setattr(run_all, "ROOT", tmp_path)
        monkeypatch.chdir(tmp_path)
        Path(program).write_text(INTERRUPTING)
        return call(program, int(number), while_running=Path("seen").touch)

    options = arguments(tones, tmp_path / "out", "--only", "RAND SB")
    printed = run(*options, status=status, call=call_interrupting)
    assert (tmp_path / "saved").exists()  # before run_all.py ended
    assert "[1/2] RAND, seed 0: stopped; run the same command again to continue" in printed
    assert "[2/2]" not in printed and "tables" not in printed


def test_interrupted_during_the_imports_it_prints_nothing(tmp_path):
    """Numpy stands for what is being imported."""
    code = "print('importing', flush=True)\nimport time\ntime.sleep(60)"
    (tmp_path / "numpy.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(PROGRAM, env=environment, **options)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "") and process.returncode == -signal.SIGINT


# What is refused


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--only", "RAND SBB"], "--only SBB: no such experiment; use RAND, SB-BR, "),
        (["--only", "RAND RAND"], "--only 'RAND RAND': give at least one, and each only once"),
        (["--only", ""], "give at least one, and each only once"),
        (["--seeds", "0 x"], "--seeds: invalid whole_numbers value: '0 x'"),
        (["--seeds", "0 0"], "--seeds '0 0': give at least one, and each only once"),
        (["--seeds=-1"], "setting seed=-1: use 0 or more"),
        (["--epochs", "0"], "setting epochs=0: use a value above 0"),
        (["--limit", "3"], "--limit 3: use 10 clips or more"),
        (["--train", "a.txt"], "--train and --val: give both"),
        (["--train", "a", "--val", "b", "--corpus", "c"], "--corpus c: give it or --train"),
        (["--preset", "ljspeech"], "--preset ljspeech: unknown; use one of paper, nvidia"),
        (["--hparams", "seed=1"], "--hparams: seed is set by run_all.sh; use --seeds"),
        (["--hparams", "batch_sizes=1"], "unknown setting 'batch_sizes'"),
        (["--hparams", "data_dir=x"], "data_dir goes with --train and --val; use --corpus"),
        (["--epoch", "x"], "--help shows the arguments"),
        (["--output", "a+b"], "--output a+b: has a + or a quote in it; use another name"),
        (["--corpus", "gone"], "gone/metadata.csv: no such file; give the folder that holds it"),
        (["--train", "gone", "--val", "gone"], "filelist 'gone': No such file or directory; "),
        (["--train", "gone", "--val", "gone", "--limit", "10"], "filelist 'gone': No such file"),
    ],
)
def test_a_bad_argument_is_refused_before_anything_is_written(tmp_path, args, message):
    printed = run("--output", str(tmp_path / "new" / "out"), *args, status=2)
    assert message in printed and printed.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("output", ["out", "new/out", "old"])
def test_a_refused_call_leaves_nothing_that_blocks_the_next(tmp_path, tones, monkeypatch, output):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes").write_text("mine")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1))
    before, output = sorted(tmp_path.rglob("*")), tmp_path / output
    for message, options in (
        ("there are 20 clips; use at most that", arguments(tones, output, "--limit", "21")),
        ("train.txt has 16 clips; use at most 16", arguments(tones, output, batch_size=64)),
        ("tf32: needs an NVIDIA GPU", arguments(tones, output, precision="tf32")),
        ("0.00 GB free; free some, or", arguments(tones, output)),
    ):
        assert message in run(*options, status=2)
        assert sorted(tmp_path.rglob("*")) == before


def test_the_disk_needs_room_for_checkpoints_logs_and_mels_that_are_not_cached(
    series, tones, tmp_path, monkeypatch
):
    n_bytes = []
    monkeypatch.setattr(run_all, "require_space", lambda path, n, fix: n_bytes.append(n))
    for cache in (tones, tmp_path):
        options = arguments(tones, tmp_path / "out", "--only", "SB", mel_cache_dir=cache / "cache")
        run(*options, "--epochs", "4", status=1, call=lambda *_, **options: 1)
    assert n_bytes[0] == 4 * 12 * 7813 + 4 * (500 * 8 + 1e5)  # 7,813 parameters
    n_frames = [(wav.stat().st_size - 44) // 2 // 276 + 1 for wav in tones.glob("wavs/*")]
    assert n_bytes[1] - n_bytes[0] == 4 * 10 * sum(n_frames)


def test_an_output_of_other_settings_is_refused(series, tones):
    output, _ = series
    before = files_in(output)
    message = f"--epochs 1: {output} has a run of 2; give at least that, or another --output"
    assert message in run(*arguments(tones, output, "--epochs", "1"), status=2)
    for name, value in (("lrf", 0.5), ("learning_rate", 0.1), ("epochs_per_validation", 1)):
        more = ["--epochs", "2", "--only", "RAND", "--seeds", "7000"]
        printed = run(*arguments(tones, output, *more, **{name: value}), status=2)
        assert "/seed0: has " in printed
        assert f"and this call {name}={value}; give the same settings, or another" in printed
    message = "train.txt: lists other clips than these; give another --output"
    assert message in run(*arguments(tones, output, "--limit", "10"), status=2)
    assert files_in(output) == before


# What is trained


def test_given_paths_start_from_the_current_folder_and_others_from_the_programs(
    monkeypatch, tones, tmp_path
):
    args = parse(monkeypatch)
    assert args.output == Path("runs/table2") and args.hparams == ""
    monkeypatch.chdir(tmp_path)
    args = parse(monkeypatch)
    assert args.output == ROOT / "runs" / "table2"
    assert run_all.create_hparams(args.hparams).mel_cache_dir == str(ROOT / "mel_cache")
    shutil.copytree(tones, tmp_path / "tones")
    args = parse(monkeypatch, "--corpus", "tones", "--output", "other")
    assert run_all.choose_data(args, run_all.create_hparams()).data_dir == "tones"
    assert len((tmp_path / "other/filelists/train.txt").read_text().splitlines()) == 16


def test_without_ljspeech_a_demo_corpus_is_made(monkeypatch, tones, tmp_path):
    def make_corpus(program: str, corpus: Path, option: str, n: int) -> int:
        assert (program, option, n) == ("scripts/make_demo_corpus.py", "--clips", 20)
        shutil.copytree(tones, corpus)
        return 0

    monkeypatch.setattr(run_all, "LJSPEECH", tmp_path / "none")
    monkeypatch.setattr(run_all, "ROOT", tmp_path)
    monkeypatch.setattr(run_all, "call", make_corpus)
    args = parse(monkeypatch, "--limit", "20", "--output", str(tmp_path / "out"))
    base = run_all.choose_data(args, run_all.create_hparams())
    assert base.data_dir == str(tmp_path / "data/demo20")


def test_run_all_sh_starts_the_program_in_the_current_folder(tmp_path):
    scripts = tmp_path / "root" / "scripts"
    scripts.mkdir(parents=True)
    script = shutil.copy(ROOT / "scripts" / "run_all.sh", scripts)
    venv = "test -f scripts/run_all.py; ln -sf $(command -v python3) python; PYTHON=./python"
    (scripts / "venv.sh").write_text(venv)
    program = "import os, sys; print(os.getcwd(), *sys.argv[1:])"
    (scripts / "run_all.py").write_text(program)
    for folder in (tmp_path, tmp_path / "root", scripts):
        command = ["bash", os.path.relpath(script, folder), "--only", "RAND SB"]
        done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        assert done.stdout == f"{folder} --only RAND SB\n"


def test_limited_lists_keep_their_proportion_and_order(tmp_path, monkeypatch):
    for name, n in (("train", 40), ("val", 10)):
        (tmp_path / name).write_text("".join(f"{name}{i}.wav|one\n" for i in range(n)))
    options = ["--train", f"{tmp_path}/train", "--val", f"{tmp_path}/val", "--limit", "25"]
    args = parse(monkeypatch, *options, "--output", str(tmp_path / "out"))
    base = run_all.choose_data(args, run_all.create_hparams())
    assert base.data_dir == "" and len(Path(base.validation_files).read_text().splitlines()) == 5
    lines = Path(base.training_files).read_text().splitlines()
    numbers = [int(line.split(".")[0][5:]) for line in lines]
    assert numbers == sorted(set(numbers)) != list(range(20)) and len(numbers) == 20
    assert run_all.choose_data(args, run_all.create_hparams()) == base


def test_a_capacity_is_for_the_dynamic_experiments(monkeypatch, tones):
    settings = "batch_capacity=900,text_cleaners=[basic_cleaners],ignore_layers=[a,b]"
    args = parse(monkeypatch, "--corpus", str(tones), "--hparams", settings)
    base = run_all.create_hparams(settings + ',data_dir="it\'s, here"')
    clips = [SimpleNamespace(n_frames=n) for n in [20, 30, 40, 50] * 40]
    jobs = run_all.make_jobs(args, base, clips)
    assert len(jobs) == 10
    for job in jobs:
        assert job.hparams.batch_capacity == (900 if "DBS" in job.experiment else 0)
        assert job.hparams.ignore_layers == ("a", "b") and job.hparams.data_dir == "it's, here"


def test_seeds_that_share_plans_are_noted(monkeypatch, capsys):
    parse(monkeypatch, "--seeds", "0 1", "--epochs", "10")
    assert "note: --seeds 0 1 are closer than 10 epochs" in capsys.readouterr().out


def test_parameters_are_the_papers_on_ljspeechs_lengths(monkeypatch):
    lengths = subset(ljspeech_lengths(276), 10_480, 0).tolist()
    base = run_all.create_hparams("bucket_size=1,n_bins=1")
    selected = run_all.select_parameters(parse(monkeypatch), base, lengths)
    assert selected.bucket_size == pytest.approx(1024, rel=0.05) and selected.bucket_size % 16 == 0
    assert selected.n_bins == pytest.approx(58, rel=0.05)
    args = parse(monkeypatch, "--hparams", "bucket_size=32,n_bins=7")
    assert run_all.select_parameters(args, base, lengths) == base
