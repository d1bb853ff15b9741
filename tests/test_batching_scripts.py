"""plot_batching.py and bench_batching.py: numbers, files, messages."""

import json
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import soundfile
from matplotlib.figure import Figure
from matplotlib.text import Text

from batching import STRATEGIES, BatchStatistics, batch_statistics, plan_batches
from benchmarks import bench_batching
from cli import UserError, exit_on_user_error
from hparams import HParams
from scripts import lengths, plot_batching

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = np.random.default_rng(7).integers(96, 870, 200)
FIFTY = "5\n" * 50


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a script's main() in this process: its status, output, and error."""

    def run(script, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, arguments)])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                exit_on_user_error(script.main)
                status = 0
            except SystemExit as stopped:
                status = stopped.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def get_lengths(monkeypatch):
    """The lengths that plot_batching.py takes from its arguments."""

    def get(*arguments: object) -> list[int]:
        monkeypatch.setattr(sys, "argv", ["plot_batching.py", *map(str, arguments)])
        return plot_batching.get_lengths(plot_batching.parse_args()).tolist()

    return get


@pytest.mark.parametrize(
    ("script", "avoided"),
    [("scripts/plot_batching.py", ["torch"]), ("benchmarks/bench_batching.py", ["torch", "matpl"])],
)
def test_the_scripts_start_quickly_from_any_folder(tmp_path, script, avoided):
    command = [sys.executable, "-X", "importtime", ROOT / script, "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "usage: " in done.stdout and [name for name in avoided if name in done.stderr] == []


# plot_batching.py


def test_the_table_is_the_statistics_of_the_plans_and_the_figures_are_drawn(run, tmp_path):
    path = write(tmp_path / "lengths.txt", "\n".join(map(str, LENGTHS)))
    settings = {"batch_size": 8, "lrf": 0.2, "bucket_size": 64, "n_bins": 5}
    options = [f"--{name}={value}" for name, value in settings.items()]
    options += ["--seeds=3", "--paper", "--unit=tokens", f"--json={tmp_path / 'table.json'}"]
    output = tmp_path / "new" / "figures"
    status, out, err = run(plot_batching, path, *options, "--output_dir", output)
    assert (status, err) == (0, "") and "note: " not in out
    assert f"{path}: 200 lengths, from column 1\n" in out and "ABL (tokens)" in out
    assert "| SSB-DBS | LRF 0.2 |" in out and "449, 6.62, 557.68" in out
    for name in ("figure1", "figure2", "figure3", "strategies"):
        assert (output / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"wrote {output / name}.png (" in out

    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    printed = [line for line in out.splitlines() if line.startswith("|")][2:]
    kinds = [(strategy, dynamic) for dynamic in (False, True) for strategy in STRATEGIES]
    for (strategy, dynamic), row, line in zip(kinds, rows, printed, strict=True):
        settings |= {"strategy": strategy, "dynamic_batch_size": dynamic}
        plans = [plan_batches(LENGTHS, seed=seed, **settings) for seed in range(3)]
        epochs = np.array([batch_statistics(LENGTHS, plan) for plan in plans])
        for name, values in zip(BatchStatistics._fields, epochs.T, strict=True):
            expected = {"mean": np.mean(values), "sd": np.std(values, ddof=1)}
            assert row[name] == pytest.approx(expected), (row["batching"], name)
        assert row["batching"] == strategy + "-DBS" * dynamic
        zpr, abl = 100 * row["zpr"]["mean"], row["abl"]["mean"]
        assert line.startswith(f"| {row['batching']} | {row['parameter']} |")
        assert f" | {zpr:.2f} ± " in line and f" | {abl:.1f} ± " in line


def test_the_pictures_are_drawn_with_the_lrf_given_and_say_with_what(monkeypatch, tmp_path):
    texts, lrfs = {}, []

    def savefig(figure: Figure, path: Path, **options: object) -> None:
        texts[path.stem] = {text.get_text() for text in figure.findobj(Text)}

    def plan(*arguments: object, **settings: object) -> object:
        lrfs.extend([settings["lrf"]] if settings["strategy"] == "SSB" else [])
        return plan_batches(*arguments, **settings)

    monkeypatch.setattr(Figure, "savefig", savefig)
    monkeypatch.setattr(plot_batching, "plan_batches", plan)
    monkeypatch.setattr(plot_batching, "draw_parameters", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["x", "--lrf=0.37", f"--output_dir={tmp_path}"])
    plot_batching.draw_all(LENGTHS, plot_batching.parse_args())
    assert lrfs == [0.37] * 4
    what = "48 clips at random; batches of 4, LRF 0.37, buckets of 12, 4 bins"
    assert "48 clips at random; batches of 8, LRF 0.37" in texts["figure1"]
    assert "48 clips at random; base batch size 8, LRF 0.37" in texts["figure3"]
    assert {what, "SSB: semi-sorted, LRF 0.37"} <= texts["strategies"]


@pytest.mark.parametrize("options", [(), ("--lrf=0", "--batch_size=60", "--paper")])
def test_clips_of_one_length_are_drawn_without_a_warning(run, tmp_path, options):
    path = write(tmp_path / "lengths.txt", FIFTY)
    status, out, err = run(plot_batching, path, "--seeds=1", "--output_dir", tmp_path, *options)
    assert (status, err) == (0, "")
    assert "note: all lengths are equal: nothing is padded, whatever the batching\n" in out
    what = "the table's parameters, in fixed batches"
    assert f"wrote {tmp_path}/figure2.png ({what})\n" in out


def test_parameters_that_make_a_strategy_random_are_noted(monkeypatch):
    for options, strategies in (
        ("", ["BKT", "ATS"]),
        ("--bucket_size=199 --n_bins=12", []),
        ("--bucket_size=200 --n_bins=13", ["BKT", "ATS"]),
        ("--bucket_size=150 --n_bins=9 --train_size=150", ["BKT"]),
        ("--bucket_size=149 --n_bins=10 --train_size=150", ["ATS"]),
    ):
        monkeypatch.setattr(sys, "argv", ["plot_batching.py", *options.split()])
        notes = plot_batching.notes(LENGTHS, plot_batching.parse_args())
        assert [note.split()[0] for note in notes] == strategies


# LJSpeech's lengths


def run_snippet(file: str) -> dict:
    """Run the Python code in a Markdown file; its names."""
    names = {}
    text = (ROOT / file).read_text(encoding="utf-8")
    exec(text.split("```python")[1].split("```")[0], names)
    return names


def test_without_a_source_the_documented_tables_come_out(monkeypatch, capsys, get_lengths):
    frames = np.loadtxt(lengths.LJSPEECH_LENGTHS, int, delimiter=",", skiprows=1)[:, 0]
    assert get_lengths("--hop_length", 256) == frames.tolist() and capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["plot_batching.py", "--train_size", "10480", "--paper"])
    args = plot_batching.parse_args()
    of_276 = plot_batching.get_lengths(args)
    out = capsys.readouterr().out
    assert out.startswith("no lengths given: these are LJSpeech's\n")
    assert "frames of 256 samples become frames of 276: right to one frame\n" in out
    assert len(of_276) == 13_100 and (min(of_276), max(of_276)) == (89, 807)
    assert sum(of_276) == pytest.approx(sum(frames) * 256 / 276, rel=1e-3)
    documented = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").splitlines()
    rows = list(plot_batching.markdown(plot_batching.table(of_276, args), args))
    assert len(rows) == 12 and [row for row in rows if row not in documented] == []

    count_over = run_snippet("docs/results.md")["count_over"]
    for line in capsys.readouterr().out.splitlines()[-3:]:
        name, within, over, padded, capacity = line.split()
        row = next(row for row in documented if row.startswith(f"| {name} | {within} | {over} | "))
        assert f" | {padded} | " in row and row.endswith(f" | {capacity} |")
    assert count_over([5, 5, 5, 5], 10) == 2  # 5 5 5 | 5
    assert count_over([1, 2, 9, 9, 3, 3, 3, 4], 10) == 3  # 1 2 9 | 9 3 | 3 3 4
    assert count_over([4, 4], 100) == 1


def test_the_snippet_of_the_filelists_gives_the_papers_numbers(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    run_snippet("filelists/README.md")
    printed = capsys.readouterr().out.splitlines()
    paper = [("RAND", 32.02, 773.8), ("SSB", 6.22, 556.2), ("SB", 0.16, 526.4)]
    paper.append(("SSB", 6.62, 557.7))
    for line, (strategy, zpr, abl) in zip(printed, paper, strict=True):
        assert line.startswith(f"{strategy} BatchStatistics(")
        values = dict(re.findall(r"(\w+)=([0-9.]+)", line))
        assert 100 * float(values["zpr"]) == pytest.approx(zpr, abs=0.3)
        assert float(values["abl"]) == pytest.approx(abl, abs=4)


def test_git_ignores_the_lists_that_are_made_by_default_and_no_other(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("needs git")
    made = [HParams.training_files, HParams.validation_files]
    made += re.findall(r"filelists/\w+\.txt", (ROOT / "scripts" / "demo.sh").read_text())
    others = ["filelists/mine.txt", "filelists/mine_train.txt", "filelists/ljspeech_lengths.csv"]
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    command = ["git", "check-ignore", *made, *others]
    ignored = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    assert len(set(made)) == 4 and set(ignored.splitlines()) == set(made)


# Lengths from files


def test_a_train_size_is_another_random_part_for_every_seed():
    parts = [lengths.subset(LENGTHS, 150, seed).tolist() for seed in (0, 1, 0)]
    assert parts[0] == parts[2] != parts[1]
    assert [len(part) for part in parts] == [150] * 3
    assert lengths.subset(LENGTHS, None, 3) is LENGTHS


@pytest.mark.parametrize(
    ("text", "arguments", "wanted", "column"),
    [
        ("5\n7\n6\n", [], [5, 7, 6], "1"),
        ("n_frames\r\n5\r\n\r\n7\r\n", [], [5, 7], "n_frames"),
        ("\ufeff5\n 7 \n", [], [5, 7], "1"),
        ("id,frames,letters\na-1,5,50\na-2,7,70\n", [], [5, 7], "frames"),
        ("id,frames,letters\na-1,5,50\na,7,7\n", ["--column", "letters"], [50, 7], "letters"),
        ("a-1,5\na-2,7\n", [], [5, 7], "2"),
        ('name,frames\n"a, b",5\n', [], [5], "frames"),
        ("id,frames\n1,750\n2,471\n", [], [750, 471], "frames"),
        ("id,Mel_Frames_hop256,n\n1,750,9\n2,471,8\n", [], [750, 471], "Mel_Frames_hop256"),
        ("id,frames,length_s\n1,750,8.5\n2,471,5.5\n", [], [750, 471], "frames"),
        ("id,n\na,750\nb,471\n", [], [750, 471], "n"),
        ("id,n\n1,750\n2,471\n", ["--column", "n"], [750, 471], "n"),
    ],
)
def test_lengths_come_from_the_column_named_for_them_or_the_only_one_and_it_is_said(
    get_lengths, tmp_path, capsys, text, arguments, wanted, column
):
    path = write(tmp_path / "lengths.csv", text)
    assert get_lengths(path, *arguments) == wanted
    assert capsys.readouterr().out == f"{path}: {len(wanted)} lengths, from column {column}\n"


def test_every_wrong_line_is_named_up_to_twenty(tmp_path):
    text = 'id,frames\n1,5\n2,six\n3\n4,0\n\n"a\nb",7.5\n6,7,8\n7,9\n'
    path = write(tmp_path / "lengths.csv", text)
    with pytest.raises(UserError) as caught:
        lengths.read_lengths(path)
    problems = [(3, "'six'"), (4, "has 1 col"), (5, "'0'"), (8, "'7.5'"), (9, "has 3 col")]
    for line, (number, problem) in zip(str(caught.value).splitlines(), problems, strict=True):
        assert line.startswith(f"{path}:{number}: {problem}")

    write(path, "5\n" + "x\n" * 2000)
    with pytest.raises(UserError) as caught:
        lengths.read_lengths(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 21 and lines[19].startswith(f"{path}:21: ")
    assert lines[20] == f"{path}: 2,000 of 2,001 lines are wrong"


def test_frames_of_one_hop_become_frames_of_another(get_lengths, tmp_path):
    n_samples = np.random.default_rng(3).integers(20_000, 220_000, 500)
    path = write(tmp_path / "lengths.txt", "\n".join(map(str, n_samples // 256 + 1)))
    rescaled = np.array(get_lengths(path, "--hop_from", 256, "--hop_to", 276))
    error = rescaled - (n_samples // 276 + 1)
    assert np.abs(error).max() <= 1 and abs(error.mean()) < 0.1
    assert get_lengths(path, "--hop_from", 256, "--hop_to", 256) == get_lengths(path)


def test_lengths_of_a_corpus_and_of_filelists_are_their_frames(get_lengths, tmp_path):
    (tmp_path / "wavs").mkdir()
    for name, n in {"a": 22_080, "b": 22_079, "c": 30_000}.items():
        soundfile.write(tmp_path / "wavs" / f"{name}.wav", np.zeros(n), 22_050)
    assert get_lengths("--corpus", tmp_path) == [81, 80, 109]
    assert get_lengths("--corpus", tmp_path, "--hop_length", 256) == [87, 87, 118]

    first = write(tmp_path / "first.txt", "wavs/c.wav|One.\nwavs/a.wav|Two.\n")
    second = write(tmp_path / "second.txt", "wavs/b.wav|Three.\n")
    both = ["--filelist", f"{first}+{second}", "--data_dir", tmp_path]
    assert get_lengths(*both) == [109, 81, 80]
    assert get_lengths(*both, "--hop_length", 256) == [118, 87, 87]


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("", "", "{path}: has no lengths; give one whole number a line"),
        ("n_frames\n", "", "{path}: has no lengths; give one whole number a line"),
        ("5\nsix\n7\n", "", "{path}:2: 'six' is not a length; use a whole number from 1 to"),
        ("5\n\n7.5\n", "", "{path}:3: '7.5' is not"),
        ("7.5\n5\n6\n", "", "{path}:1: '7.5' is not"),
        ("-\n5\n6.\n", "", "{path}:3: '6.' is not"),
        ("5\n" + 5000 * "9" + "\n", "", "{path}:2: '" + 5000 * "9" + "' is not"),
        ("5\n0\n", "", "{path}:2: '0' is not"),
        ("5\n-7\n", "", "{path}:2: '-7' is not"),
        (f"5\n{10**30}\n", "", f"{{path}}:2: '{10**30}' is not"),
        ("id,n\na,5\nb,\n", "", "{path}:3: '' is not"),
        ("id,n\na,5\n", "--column=id", "{path}:2: 'a' is not"),
        ("id,n\n1,5\n2,6\n", "", "{path}: lengths may be in any of the columns id, n; give --col"),
        ("id,frames,n_samples\n1,5,9\n", "", "any of the columns frames, n_samples; give --column"),
        ("1,5\n2,6\n", "", "columns 1, 2; put a line of names above, and give --column"),
        ("5,000\n7,100\n", "", "columns 1, 2; put a line of names above, and give --column"),
        ("id,text\na,b\n", "", "{path}: has no column of whole numbers; give one length a line"),
        ("id,n\na,5\n", "--column=m", "{path}: has no column 'm'; its header is 'id,n'"),
        ("5\n", "--column=n", "{path}: has no column 'n'; its header is ''"),
        ("5\n" * 47, "", "47 clips: the figures need 48 or more"),
        (FIFTY, "--train_size=51", "--train_size 51: use 1 to 50, all clips"),
        (FIFTY, "--seeds=0", "--seeds 0: use 1 or more"),
        (FIFTY, "--batch_size=0", "--batch_size=0: use a whole number, 1 or more"),
        (FIFTY, "--lrf=-1", "--lrf=-1.0: use 0 to 1e6"),
        (FIFTY, "--lrf=inf", "--lrf inf: use 1000 or less; SSB is RAND long before"),
        (FIFTY, "--output_dir={path}/x", "{path}/x: cannot be written (Not a dir"),
        (FIFTY, "--json={path}/x --output_dir={path.parent}", "{path}/x: cannot be written"),
        ("5\n", "--hop_from=256", "--hop_from and --hop_to: give both or neither"),
        ("5\n", "--hop_from=0 --hop_to=9", "--hop_from 0 --hop_to 9: use 1 sample or more"),
        ("5\n", "--hop_length=256", "--hop_length 256: does not apply to these lengths"),
        ("5\n", "--data_dir=a", "--data_dir a: does not apply to these lengths; leave it out"),
        ("5\n", "--corpus=a", "--corpus: not allowed with argument LENGTHS"),
        (None, "--hop_length=0", "--hop_length 0: use 1 sample or more"),
        (None, "--column=n", "--column n: does not apply to these lengths; leave it out"),
        (None, "missing", "missing: cannot be read as text or CSV (No such file or directory)"),
        (None, "binary", "binary: cannot be read as text or CSV ("),
        (None, "--corpus=wavs", "wavs: has no wavs/*.wav; give the folder that holds wavs/"),
        (None, "--corpus=.", "wavs/a.wav: not a readable sound file; replace or remove it"),
        (None, "--filelist=missing", "filelist 'missing': "),
    ],
)
def test_bad_lengths_and_options_are_refused(run, monkeypatch, tmp_path, text, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("wavs").mkdir()
    write(Path("wavs/a.wav"), "no sound")
    Path("binary").write_bytes(b"\xff\xfe\x00\n")
    path = write(tmp_path / "lengths.csv", text or "")
    lengths_given = [path] if text is not None else []
    status, _, err = run(plot_batching, *lengths_given, *arguments.format(path=path).split())
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1
    assert message.format(path=path) in err


# bench_batching.py


def test_the_bench_times_every_strategy_beside_the_plain_version(run, tmp_path):
    path = tmp_path / "new" / "bench.json"
    status, out, err = run(bench_batching, "--sizes", 50, 300, "--repeats=1", "--json", path)
    assert (status, err) == (0, "")
    numbers = json.loads(path.read_text())
    assert {"python", "numpy", "machine", "rows"} == set(numbers)
    kinds = [s + dbs + "-BR" for s in STRATEGIES for dbs in ("", "-DBS")]
    wanted = [(n, kind) for n in (50, 300) for kind in kinds]
    for row, (n, kind) in zip(numbers["rows"], wanted, strict=True):
        assert (row["n_lengths"], row["batching"]) == (n, kind)
        assert row["median_seconds"] == pytest.approx(np.median(row["seconds"]))
        ratio = np.median(row["reference_seconds"]) / np.median(row["seconds"])
        assert row["ratio"] == pytest.approx(ratio) and row["reference_median_seconds"] > 0
        assert f"| {n} | {kind} |" in out


def test_the_plain_version_batches_as_the_plans_do():
    clips = lengths.ljspeech_lengths(276)[:3000]
    for dynamic in (False, True):
        batches = bench_batching.plain(clips, dynamic, seed=1)
        assert sorted(i for batch in batches for i in batch) == list(range(3000))
        plans = [plan_batches(clips, dynamic_batch_size=dynamic, epoch=e) for e in range(5)]
        counts = [len(plan) for plan in plans]
        assert min(counts) - 2 <= len(batches) <= max(counts) + 2
        limit = 16 * max(clips) if dynamic else np.inf
        assert max(len(batch) * clips[batch].max() for batch in batches) <= limit


def test_the_bench_refuses_bad_options(run, tmp_path):
    file = write(tmp_path / "file", "")
    for arguments, message in (
        (["--sizes", 0], "--sizes 0: use 1 or more"),
        (["--column", "n"], "--column n: goes with --lengths only; leave it out"),
        (["--json", file / "new" / "bench.json"], f"{file / 'new'}: cannot be written ("),
    ):
        status, out, err = run(bench_batching, *arguments)
        assert (status, out) == (2, "") and err.startswith(f"error: {message}")
        assert err.count("\n") == 1
