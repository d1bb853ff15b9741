"""run_all.py as its users call it: on a corpus of tones, with a model that is tiny."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli import UserError
from scripts import run_all
from scripts.paper import EXPERIMENTS, experiment_settings
from tests.conftest import TINY, WORDS, write_tone

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = f"{TINY}batch_size=2,epochs_per_checkpoint=1,"
TIMED = ("minutes", "percent", "speed", "memory")  # columns that differ between equal runs


@pytest.fixture(scope="module")
def tones(tmp_path_factory) -> Path:
    """A corpus in LJSpeech's layout: 20 tones of 0.1 to 0.5 s."""
    corpus = tmp_path_factory.mktemp("tones")
    (corpus / "wavs").mkdir()
    lines = []
    for i in range(20):
        write_tone(corpus / "wavs" / f"T{i}.wav", 0.1 + 0.4 * (i * 7 % 20) / 19)
        lines.append(f"T{i}|{WORDS[i % len(WORDS)]}\n")
    (corpus / "metadata.csv").write_text("".join(lines))
    return corpus


def arguments(tones: Path, output: Path, *more: str) -> list[str]:
    settings = f"{SETTINGS}mel_cache_dir={tones}/cache"
    return ["--corpus", str(tones), "--output", str(output), "--hparams", settings, *more]


def start(*args, folder: Path = ROOT, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, ROOT / "scripts" / "run_all.py", *args],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True, **options,
    )  # fmt: skip


def finish(process: subprocess.Popen, status: int = 0) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == status, output
    assert "Traceback" not in output
    return output


def wait_for(path: Path, text: bytes = b"") -> None:
    deadline = time.monotonic() + 280
    while time.monotonic() < deadline:
        if path.exists() and text in path.read_bytes():
            return
        time.sleep(0.01)
    pytest.fail(f"{path} never held {text!r}")


def figures(output: Path) -> dict[str, list[dict[str, str]]]:
    """Every table of a series, less the columns that depend on the clock."""
    found = {}
    for path in sorted((output / "tables").glob("*.csv")):
        with open(path, newline="") as file:
            found[path.name] = [
                {k: v for k, v in row.items() if not k.startswith(TIMED)}
                for row in csv.DictReader(file)
            ]
    assert len(found) == 4
    return found


@pytest.fixture(scope="module")
def series(tones, tmp_path_factory) -> tuple[Path, str]:
    """All ten experiments, two epochs each; their folder and what was printed."""
    output = tmp_path_factory.mktemp("series") / "table2"
    return output, finish(start(*arguments(tones, output, "--epochs", "2")))


def test_ten_experiments_are_trained_and_reported(series):
    output, printed = series
    assert "Missing" not in printed and "FAILED" not in printed
    calls = [line for line in printed.splitlines() if line.startswith("python train.py -o ")]
    for name, line in zip(EXPERIMENTS, calls, strict=True):
        folder = output / name / "seed0"
        assert f" {folder} --resume" in line
        settings = json.loads((folder / "hparams.json").read_text())
        expected = {**experiment_settings(name), "seed": 0, "epochs": 2, "batch_size": 2}
        assert {key: settings[key] for key in expected} == expected
    assert printed.index(" to go, by the epochs") < printed.index("python train.py")
    assert "GB of disk" in printed and "16 training and 4 validation clips" in printed
    for i in (1, 2, 3, 4):
        assert (output / "tables" / f"table{i}.md").read_text() in printed
    assert (output / "tables" / "conclusions.md").read_text() in printed
    assert len(list((output / "figures").glob("*.png"))) == 3  # plot_batching.py needs 48 clips
    rows = {row["experiment"]: row for row in figures(output)["table2.csv"]}
    assert "VL3 and VLavg are left out: with 3 validations or fewer (here 1)" in printed
    assert float(rows["SB"]["zpr"]) < float(rows["RAND"]["zpr"])
    assert float(rows["SB-DBS"]["n_batches"]) < float(rows["SB"]["n_batches"]) == 8


def test_a_finished_series_is_only_reported(series, tones):
    output, _ = series
    records = {path: path.read_bytes() for path in output.glob("*/*/metrics.jsonl")}
    printed = finish(start(*arguments(tones, output, "--epochs", "2")))
    assert printed.count(": finished, 2 epochs") == 10 and "python train.py" not in printed
    assert {path: path.read_bytes() for path in output.glob("*/*/metrics.jsonl")} == records


def test_killed_in_the_fourth_run_and_called_again_the_tables_are_equal(series, tones, tmp_path):
    whole, killed = series[0], tmp_path / "killed"
    shutil.copytree(whole, killed, ignore=shutil.ignore_patterns("BKT-BR", "tables", "figures"))
    options = arguments(tones, killed, "--epochs", "2")
    process = start(*options)
    wait_for(killed / "BKT-BR" / "seed0" / "checkpoint_00000008.pt")  # of one epoch
    for pid in re.findall(r"\d+", (killed / "lock").read_text()):  # run_all.py's and train.py's
        os.kill(int(pid), signal.SIGKILL)
    process.communicate()
    printed = finish(start(*options))
    assert printed.count(": finished, 2 epochs") == 9 and printed.count(": done in") == 1
    assert figures(killed) == figures(whole)


def test_a_second_call_waits_for_what_a_killed_one_left_training(tones, tmp_path):
    """In another folder than the program's, from which all paths start."""
    shutil.copytree(tones, tmp_path / "tones")
    for name, lines in (("train", range(16)), ("val", range(16, 20))):
        text = "".join(f"wavs/T{i}.wav|{WORDS[i % len(WORDS)]}\n" for i in lines)
        (tmp_path / f"{name}.txt").write_text(text)
    options = ["--train", "train.txt", "--val", "val.txt", "--output", "out", "--only", "RAND"]
    options += ["--hparams", f"{SETTINGS}data_dir=tones,mel_cache_dir=mels", "--epochs", "4"]
    process = start(*options, folder=tmp_path)
    wait_for(tmp_path / "out" / "RAND" / "seed0" / "metrics.jsonl", b'"step"')
    process.kill()  # train.py goes on
    printed = finish(start(*options, folder=tmp_path))
    assert f"in use by process {process.pid} (run_all.sh) and " in printed
    assert "(train.py); waiting for its end" in printed
    records = (tmp_path / "out" / "RAND" / "seed0" / "metrics.jsonl").read_text().splitlines()
    assert len(records) == 1 + 4 * (8 + 1) + 2 == len(set(records))  # of one start
    assert f"python {ROOT}/train.py -o out/RAND/seed0 --resume" in process.communicate()[0]
    assert (tmp_path / "out" / "tables" / "table3.md").is_file()
    assert (tmp_path / "out" / "RAND" / "seed0" / "checkpoint_00000032.pt").is_file()
    assert len(list((tmp_path / "mels").iterdir())) == 1


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_it_ends_its_training_and_says_how_to_go_on(tones, tmp_path, number, status):
    options = arguments(tones, tmp_path / "out", "--epochs", "5000", "--only", "RAND SB")
    process = start(*options)
    wait_for(tmp_path / "out" / "RAND" / "seed0" / "metrics.jsonl", b'"epoch"')
    process.send_signal(number)
    printed = finish(process, status)  # communicate() ends when train.py has closed the pipe
    assert "SB/seed0" not in printed.split("GB free")[1]
    if number == signal.SIGINT:
        assert "stopped; the same command goes on from here" in printed


def test_a_failed_run_is_reported_and_the_rest_go_on(series, tones, tmp_path):
    output = shutil.copytree(series[0], tmp_path / "table2")
    for path in (output / "SB-BR" / "seed0").glob("checkpoint_*.pt"):
        path.write_bytes(b"damaged")
    shutil.rmtree(output / "SSB-BR")
    process = start(*arguments(tones, output, "--epochs", "2", "--only", "SB-BR SSB-BR"))
    printed = finish(process, 1)
    assert "checkpoint_00000016.pt: not a checkpoint, or damaged" in printed
    assert "[1/2] SB-BR, seed 0: FAILED with status 2; going on" in printed
    assert "[2/2] SSB-BR, seed 0: done in" in printed
    assert "SB-BR, seed 0: FAILED with status 2, see above" in printed


def test_a_corpus_and_an_output_start_from_the_folder_where_one_stands(
    monkeypatch, tones, tmp_path
):
    shutil.copytree(tones, tmp_path / "tones")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["x", "--corpus", "tones", "--output", "other"])
    args = run_all.parse_args()
    assert run_all.choose_data(args, run_all.create_hparams())["data_dir"] == "tones"
    assert len((tmp_path / "other/filelists/train.txt").read_text().splitlines()) == 16


def test_run_all_sh_starts_the_program_in_the_folder_where_one_stands(tmp_path):
    (tmp_path / "root" / "scripts").mkdir(parents=True)
    script = shutil.copy(ROOT / "scripts" / "run_all.sh", tmp_path / "root" / "scripts")
    venv = "test -f scripts/run_all.py; ln -sf $(command -v python3) python; PYTHON=./python"
    (tmp_path / "root/scripts/venv.sh").write_text(venv)
    program = "import os, sys; print(os.getcwd(), *sys.argv[1:])"
    (tmp_path / "root/scripts/run_all.py").write_text(program)
    for folder in (tmp_path, tmp_path / "root", tmp_path / "root" / "scripts"):
        command = ["bash", os.path.relpath(script, folder), "--only", "RAND SB"]
        done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        assert done.stdout == f"{folder} --only RAND SB\n"


def test_paths_that_are_not_given_stay_with_the_program(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["run_all.sh"])
    args = run_all.parse_args()
    assert args.output == Path("runs/table2") and args.hparams == ""
    monkeypatch.chdir(tmp_path)
    args = run_all.parse_args()
    assert args.output == ROOT / "runs" / "table2"
    assert run_all.create_hparams(args.hparams).mel_cache_dir == str(ROOT / "mel_cache")


def test_interrupted_amid_the_imports_it_says_nothing(tmp_path):
    """Numpy stands for what is being imported."""
    (tmp_path / "numpy.py").write_text(
        "print('importing', flush=True)\nimport time\ntime.sleep(60)"
    )
    command = [sys.executable, ROOT / "scripts" / "run_all.py"]
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "") and process.returncode == -signal.SIGINT


def refused(monkeypatch, *args: str) -> str:
    monkeypatch.setattr(sys, "argv", ["run_all.sh", *args])
    with pytest.raises(UserError) as error:
        run_all.main()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--only", "RAND SBB"], "--only SBB: no such experiment; use RAND, SB-BR, "),
        (["--only", "RAND RAND"], "name one or more, each once"),
        (["--only", ""], "name one or more, each once"),
        (["--seeds", "0 x"], "--seeds 0 x: use whole numbers with blanks between"),
        (["--seeds", "0 0"], "--seeds '0 0': name one or more, each once"),
        (["--seeds=-1"], "setting seed=-1: use 0 or more"),
        (["--epochs", "0"], "setting epochs=0: use a value above 0"),
        (["--limit", "3"], "--limit 3: use 10 clips or more"),
        (["--train", "a.txt"], "--train and --val: give both"),
        (["--train", "a", "--val", "b", "--corpus", "c"], "--corpus c: give it or --train"),
        (["--preset", "ljspeech"], "--preset ljspeech: unknown; use one of paper, nvidia"),
        (["--hparams", "seed=1"], "--hparams: seed is for run_all.sh to set; use --seeds"),
        (["--hparams", "batch_sizes=1"], "unknown setting 'batch_sizes'"),
        (["--hparams", "data_dir=x"], "data_dir goes with --train and --val; use --corpus"),
        (["--epoch", "x"], "--help shows the arguments"),
        (["--output", "a+b"], "--output a+b: has a + or a quote in it; use another name"),
    ],
)
def test_a_bad_argument_is_refused_before_anything_is_written(monkeypatch, tmp_path, args, message):
    assert message in refused(monkeypatch, "--output", str(tmp_path / "out"), *args)
    assert not (tmp_path / "out").exists()


def test_bad_data_is_refused_in_one_line(monkeypatch, tmp_path, tones):
    out = ["--output", str(tmp_path / "out")]
    gone = tmp_path / "gone"
    message = refused(monkeypatch, "--corpus", str(gone), *out)
    assert f"{gone}/metadata.csv: no such file; give the folder that holds it and wavs/" in message
    message = refused(monkeypatch, "--train", str(gone), "--val", str(gone), *out)
    assert f"filelist '{gone}': No such file or directory; " in message
    message = refused(monkeypatch, "--train", str(gone), "--val", str(gone), "--limit", "10", *out)
    assert f"filelist '{gone}': No such file or directory; " in message
    message = refused(monkeypatch, *arguments(tones, tmp_path / "out", "--limit", "21"))
    assert "--limit 21: there are 20 clips; use at most that" in message
    assert not (tmp_path / "out").exists()


def test_an_output_of_other_settings_is_refused(monkeypatch, series, tones):
    output, _ = series
    message = refused(monkeypatch, *arguments(tones, output, "--epochs", "1"))
    assert f"--epochs 1: {output} has a run of 2; give at least that, or another" in message
    files = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.name != "lock"}
    for more in ("lrf=0.5", "learning_rate=0.1", "epochs_per_validation=1"):
        options = arguments(tones, output, "--epochs", "2", "--only", "RAND", "--seeds", "7000")
        options[options.index("--hparams") + 1] += f",{more}"
        message = refused(monkeypatch, *options)
        assert "/seed0: has " in message
        assert f"and this call {more}; give the same settings, or another --output" in message
    message = refused(monkeypatch, *arguments(tones, output, "--limit", "10"))
    assert "train.txt: lists other clips than these; give another --output" in message
    found = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.name != "lock"}
    assert found == files


def test_a_full_disk_is_refused(monkeypatch, tmp_path, tones):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1))
    message = refused(monkeypatch, *arguments(tones, tmp_path / "out", "--epochs", "1"))
    assert f"{tmp_path / 'out'}: 0.0 GB free, " in message and "GB needed" in message
    assert not (tmp_path / "out" / "RAND").exists()


def test_limited_lists_keep_their_proportion_and_order(tmp_path, monkeypatch):
    for name, n in (("train", 40), ("val", 10)):
        (tmp_path / name).write_text("".join(f"{name}{i}.wav|one\n" for i in range(n)))
    monkeypatch.setattr(
        sys, "argv",
        ["x", "--train", f"{tmp_path}/train", "--val", f"{tmp_path}/val", "--limit", "25",
         "--output", str(tmp_path / "out")],
    )  # fmt: skip
    args = run_all.parse_args()
    data = run_all.choose_data(args, run_all.create_hparams())
    assert data.pop("data_dir") == ""
    kept = {key: Path(path).read_text().splitlines() for key, path in data.items()}
    assert [len(lines) for lines in kept.values()] == [20, 5]
    numbers = [int(line.split(".")[0][5:]) for line in kept["training_files"]]
    assert numbers == sorted(set(numbers)) != list(range(20))
    assert run_all.choose_data(args, run_all.create_hparams()) == {**data, "data_dir": ""}


def test_a_refused_call_leaves_nothing_that_blocks_the_next(monkeypatch, tmp_path, tones):
    options = arguments(tones, tmp_path / "out", "--limit", "10", "--only", "BKT-BR")
    i = options.index("--hparams") + 1
    options[i] = options[i].replace("batch_size=2", "batch_size=64")
    assert "train.txt has 8 clips; use at most 8" in refused(monkeypatch, *options)
    assert not (tmp_path / "out").exists()
    options[3] = str(tmp_path / "new" / "out")
    refused(monkeypatch, *options)
    assert not (tmp_path / "new").exists()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "notes").write_text("mine")
    options[3] = str(tmp_path / "new")
    refused(monkeypatch, *options)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["notes"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1))
    assert "GB free" in refused(monkeypatch, *arguments(tones, tmp_path / "out", "--limit", "12"))


def test_a_capacity_is_for_the_dynamic_experiments(monkeypatch, tones, tmp_path):
    settings = "batch_capacity=500,text_cleaners=[basic_cleaners],ignore_layers=[a,b]"
    monkeypatch.setattr(sys, "argv", ["x", "--corpus", str(tones), "--hparams", settings])
    args = run_all.parse_args()
    data = {"data_dir": "it's, here", "training_files": "t", "validation_files": "v"}
    jobs = run_all.make_jobs(args, data, [20, 30, 40, 50] * 40)
    assert len(jobs) == 10
    for job in jobs:
        expected = 500 if "DBS" in job.experiment else 0
        assert job.hparams.batch_capacity == expected
        assert job.hparams.ignore_layers == ("a", "b") and job.hparams.data_dir == "it's, here"


def test_seeds_that_share_plans_are_noted(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x", "--seeds", "0 1", "--epochs", "10"])
    run_all.parse_args()
    assert "note: --seeds 0 1 are closer than 10 epochs" in capsys.readouterr().out


def test_a_measurement_that_is_killed_is_reported(monkeypatch, tmp_path, tones):
    """As Linux does where memory is short."""
    monkeypatch.setattr(run_all, "send_measure", kill_itself)
    message = refused(monkeypatch, *arguments(tones, tmp_path / "out", "--epochs", "1"))
    assert "a batch of 2 clips of 40 frames does not fit the memory; set a smaller" in message


def kill_itself(*args) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_parameters_are_the_papers_on_ljspeechs_lengths():
    from scripts.plot_batching import ljspeech_lengths, subset

    lengths = subset(ljspeech_lengths(276), 10_480, 0).tolist()
    found = run_all.select_parameters(lengths, run_all.create_hparams(), list(EXPERIMENTS), {})
    assert found["BKT"] == pytest.approx(1024, rel=0.05) and found["BKT"] % 16 == 0
    assert found["ATS"] == pytest.approx(58, rel=0.05)
    given = {"bucket_size": 32}
    assert set(
        run_all.select_parameters(lengths, run_all.create_hparams(), list(EXPERIMENTS), given)
    ) == {"ATS"}
