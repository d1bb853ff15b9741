"""plot_batching.py and bench_batching.py: numbers, files, messages."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from matplotlib.figure import Figure
from matplotlib.text import Text

from batching import STRATEGIES, BatchStatistics, batch_statistics, plan_batches
from hparams import HParams
from scripts import plot_batching
from scripts.bench_batching import plain

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = np.random.default_rng(7).integers(96, 870, 200)


def run(script: str, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, f"scripts/{script}.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def get_lengths(monkeypatch):
    """The lengths that plot_batching.py takes from its arguments."""

    def get(*arguments: object) -> list[int]:
        monkeypatch.setattr(sys, "argv", ["plot_batching.py", *map(str, arguments)])
        return plot_batching.get_lengths(plot_batching.parse_args()).tolist()

    return get


@pytest.fixture
def refusal(monkeypatch, capsys):
    """What plot_batching.py says of arguments that it refuses, with status 2 and in one line."""

    def refuse(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["plot_batching.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            plot_batching.exit_on_user_error(plot_batching.main)
        said = capsys.readouterr().err
        assert stopped.value.code == 2 and said.count("\n") == 1
        return said.strip()

    return refuse


# plot_batching.py


def test_the_table_is_the_statistics_of_the_plans_and_the_figures_are_drawn(tmp_path):
    path = write(tmp_path / "lengths.txt", "\n".join(map(str, LENGTHS)))
    settings = {"batch_size": 8, "lrf": 0.2, "bucket_size": 64, "n_bins": 5}
    options = [word for name, value in settings.items() for word in (f"--{name}", value)]
    output = tmp_path / "new" / "figures"
    done = run(
        "plot_batching", path, *options, "--seeds", 3, "--paper", "--unit", "tokens",
        "--output_dir", output, "--json", tmp_path / "table.json",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")

    numbers = json.loads((tmp_path / "table.json").read_text())
    rows = numbers["rows"]
    kinds = [(strategy, dynamic) for dynamic in (False, True) for strategy in STRATEGIES]
    printed = [line for line in done.stdout.splitlines() if line.startswith("|")][2:]
    assert len(printed) == 10 + 2 + 3
    for (strategy, dynamic), row, line in zip(kinds, rows, printed[:10], strict=True):
        found = [
            batch_statistics(
                LENGTHS,
                plan_batches(LENGTHS, strategy, dynamic_batch_size=dynamic, seed=seed, **settings),
            )
            for seed in range(3)
        ]
        for name, values in zip(BatchStatistics._fields, zip(*found, strict=True), strict=True):
            assert row[name]["mean"] == pytest.approx(np.mean(values)), (row["batching"], name)
            assert row[name]["sd"] == pytest.approx(np.std(values, ddof=1))
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        assert cells[0] == row["batching"] == strategy + "-DBS" * dynamic
        means = [float(cell.split("±")[0].replace(",", "")) for cell in cells[2:6]]
        _, zpr, _, abl, total, *_ = np.mean(found, axis=0)
        n_batches = np.mean([s.n_batches for s in found])
        assert means == pytest.approx([n_batches, 100 * zpr, abl, total], abs=0.5, rel=1e-3)
    assert "| SSB-DBS | LRF 0.2 |" in done.stdout and "449, 6.62, 557.68" in done.stdout
    assert "ABL (tokens)" in done.stdout
    by_name = {row["batching"]: row for row in rows}
    for row, line in zip(numbers["capacities"], printed[12:], strict=True):
        assert line.startswith(f"| {row['batching']} | {row['within']:.1f} | {row['over']:.1f} |")
        assert row["within"] == pytest.approx(by_name[row["batching"]]["n_batches"]["mean"])
        assert row["padded"] <= row["capacity"] == 8 * max(LENGTHS)
        assert row["over"] <= row["within"]

    for name in ("figure1", "figure2", "figure3", "strategies"):
        assert (output / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"wrote {output / name}.png (" in done.stdout
    what = "48 clips at random; batches of 4, LRF 0.2, buckets of 12, 4 bins"
    assert f"wrote {output}/strategies.png ({what})\n" in done.stdout
    assert f"{path}: 200 lengths, from column 1\n" in done.stdout


def test_the_pictures_are_drawn_with_the_lrf_given_and_say_with_what(monkeypatch, tmp_path):
    texts = {}

    def savefig(figure: Figure, path: Path, **options: object) -> None:
        texts[path.stem] = [text.get_text() for text in figure.findobj(Text)]

    plans = []
    monkeypatch.setattr(Figure, "savefig", savefig)
    monkeypatch.setattr(
        plot_batching, "plan_batches", lambda *a, **b: plans.append(b) or plan_batches(*a, **b)
    )
    monkeypatch.setattr(sys, "argv", ["x", "--lrf", "0.37", "--output_dir", str(tmp_path)])
    args = plot_batching.parse_args()
    monkeypatch.setattr(plot_batching, "draw_parameters", lambda *_: None)
    plot_batching.draw_all(LENGTHS, args)
    used = [plan["lrf"] for plan in plans if plan["strategy"] == "SSB"]
    assert used == [0.37] * 4
    assert "48 clips at random; batches of 8, LRF 0.37" in texts["figure1"]
    assert "48 clips at random; base batch size 8, LRF 0.37" in texts["figure3"]
    what = "48 clips at random; batches of 4, LRF 0.37, buckets of 12, 4 bins"
    assert {what, "SSB: semi-sorted, LRF 0.37"} <= set(texts["strategies"])


@pytest.mark.parametrize("options", [(), ("--lrf", 0, "--batch_size", 60, "--paper")])
def test_clips_of_one_length_are_drawn_without_a_warning(tmp_path, options):
    path = write(tmp_path / "lengths.txt", "5\n" * 50)
    done = run("plot_batching", path, "--seeds", 1, "--output_dir", tmp_path, *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert "note: all lengths are equal: nothing is padded, whatever the batching\n" in done.stdout
    assert (tmp_path / "figure2.png").read_bytes().startswith(b"\x89PNG")


# LJSpeech's lengths


def test_without_a_source_the_documented_table_comes_out(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plot_batching.py", "--train_size", "10480", "--paper"])
    args = plot_batching.parse_args()
    lengths = plot_batching.get_lengths(args)
    said = capsys.readouterr().out
    assert said.startswith("no lengths given: these are LJSpeech's\n")
    assert "frames of 256 samples become frames of 276: right to one frame\n" in said
    assert len(lengths) == 13_100 and (min(lengths), max(lengths)) == (89, 807)
    documented = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").splitlines()
    rows = list(plot_batching.markdown(plot_batching.table(lengths, args), args))
    rows += plot_batching.capacity_markdown(plot_batching.capacity_rows(lengths, args))
    assert len(rows) == 12 + 5
    assert [row for row in rows if row not in documented] == []


def test_ljspeechs_lengths_are_of_the_hop_asked_for(get_lengths):
    of_276, of_256 = get_lengths(), get_lengths("--hop_length", 256)
    frames = np.loadtxt(plot_batching.LJSPEECH_LENGTHS, int, delimiter=",", skiprows=1)[:, 0]
    assert of_256 == frames.tolist()
    assert sum(of_276) == pytest.approx(sum(of_256) * 256 / 276, rel=1e-3)


def test_the_snippet_of_the_filelists_gives_the_papers_numbers(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    snippet = (ROOT / "filelists" / "README.md").read_text(encoding="utf-8").split("```python")[1]
    exec(snippet.split("```")[0], {})
    printed = capsys.readouterr().out.splitlines()
    paper = [
        ("RAND", 32.02, 773.8),
        ("SSB", 6.22, 556.2),
        ("SB", 0.16, 526.4),
        ("SSB", 6.62, 557.7),
    ]
    for line, (strategy, zpr, abl) in zip(printed, paper, strict=True):
        assert line.startswith(f"{strategy} BatchStatistics(")
        found = dict(re.findall(r"(\w+)=([0-9.]+)", line))
        assert 100 * float(found["zpr"]) == pytest.approx(zpr, abs=0.3)
        assert float(found["abl"]) == pytest.approx(abl, abs=4)


def test_git_ignores_the_lists_that_are_made_by_default_and_no_other(tmp_path):
    made = [HParams.training_files, HParams.validation_files]
    made += re.findall(r"filelists/\w+\.txt", (ROOT / "scripts" / "demo.sh").read_text())
    others = ["filelists/mine.txt", "filelists/mine_train.txt", "filelists/ljspeech_lengths.csv"]
    if shutil.which("git") is None:
        pytest.skip("needs git")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    done = subprocess.run(
        ["git", "check-ignore", *made, *others], cwd=tmp_path, capture_output=True, text=True
    )
    assert len(set(made)) == 4 and set(done.stdout.splitlines()) == set(made)


# Lengths from files


def test_overshooting_batches_end_with_the_clip_that_exceeds_the_capacity():
    assert plot_batching.count_overshooting([5, 5, 5, 5], 10) == 2  # 5 5 5 | 5
    assert (
        plot_batching.count_overshooting([1, 2, 9, 9, 3, 3, 3, 4], 10) == 3
    )  # 1 2 9 | 9 3 | 3 3 4
    assert plot_batching.count_overshooting([4, 4], 100) == 1


def test_a_train_size_is_another_random_part_for_every_seed():
    parts = [plot_batching.subset(LENGTHS, 150, seed).tolist() for seed in (0, 1, 0)]
    assert parts[0] == parts[2] != parts[1]
    assert [len(part) for part in parts] == [150] * 3
    assert plot_batching.subset(LENGTHS, None, 3) is LENGTHS


@pytest.mark.parametrize(
    ("text", "arguments", "wanted", "column"),
    [
        ("5\n7\n6\n", [], [5, 7, 6], "1"),
        ("n_frames\r\n5\r\n\r\n7\r\n", [], [5, 7], "'n_frames'"),
        ("\ufeff5\n 7 \n", [], [5, 7], "1"),
        ("id,frames,letters\na-1,5,50\na-2,7,70\n", [], [5, 7], "'frames'"),
        ("id,frames,letters\na-1,5,50\na,7,7\n", ["--column", "letters"], [50, 7], "'letters'"),
        ("a-1,5\na-2,7\n", [], [5, 7], "2"),
        ('name,frames\n"a, b",5\n', [], [5], "'frames'"),
        ("id,frames\n1,750\n2,471\n", [], [750, 471], "'frames'"),
        ("id,Mel_Frames_hop256,n\n1,750,9\n2,471,8\n", [], [750, 471], "'Mel_Frames_hop256'"),
        ("id,frames,length_s\n1,750,8.5\n2,471,5.5\n", [], [750, 471], "'frames'"),
        ("id,n\na,750\nb,471\n", [], [750, 471], "'n'"),
        ("id,n\n1,750\n2,471\n", ["--column", "n"], [750, 471], "'n'"),
    ],
)
def test_lengths_come_from_the_column_named_for_them_or_the_only_one_and_it_is_said(
    get_lengths, tmp_path, capsys, text, arguments, wanted, column
):
    path = write(tmp_path / "lengths.csv", text)
    assert get_lengths(path, *arguments) == wanted
    assert capsys.readouterr().out == f"{path}: {len(wanted)} lengths, from column {column}\n"


def test_every_wrong_line_is_named(tmp_path):
    text = 'id,frames\n1,5\n2,six\n3\n4,0\n\n"a\nb",7.5\n6,7,8\n7,9\n'
    path = write(tmp_path / "lengths.csv", text)
    with pytest.raises(plot_batching.UserError) as caught:
        plot_batching.read_lengths(path)
    assert str(caught.value).splitlines() == [
        f"{path}:3: 'six' is not a whole number; give a length",
        f"{path}:4: has 1 columns, and the first line 2; mend or quote it",
        f"{path}:5: length 0; use 1 to 1000000000000, or leave it out",
        f"{path}:7: '7.5' is not a whole number; give a length",
        f"{path}:9: has 3 columns, and the first line 2; mend or quote it",
    ]


def test_of_many_wrong_lines_twenty_are_named_and_all_are_counted(tmp_path):
    path = write(tmp_path / "lengths.txt", "5\n" + "x\n" * 2000)
    with pytest.raises(plot_batching.UserError) as caught:
        plot_batching.read_lengths(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 21 and lines[19].startswith(f"{path}:21: ")
    assert lines[20] == f"{path}: 2,000 of 2,001 lines are wrong"


def test_frames_of_one_hop_become_frames_of_another(get_lengths, tmp_path):
    n_samples = np.random.default_rng(3).integers(20_000, 220_000, 500)
    path = write(tmp_path / "lengths.txt", "\n".join(map(str, n_samples // 256 + 1)))
    lengths = np.array(get_lengths(path, "--hop_from", 256, "--hop_to", 276))
    error = lengths - (n_samples // 276 + 1)
    assert np.abs(error).max() <= 1 and abs(error.mean()) < 0.1
    assert get_lengths(path, "--hop_from", 256, "--hop_to", 256) == get_lengths(path)


def test_lengths_of_a_corpus_and_of_filelists_are_their_frames(get_lengths, tmp_path):
    (tmp_path / "wavs").mkdir()
    samples = {"a": 22_080, "b": 22_079, "c": 30_000}
    for name, n in samples.items():
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
        ("", [], "{path}: has no lengths; give one whole number a line"),
        ("n_frames\n", [], "{path}: has no lengths; give one whole number a line"),
        ("5\nsix\n7\n", [], "{path}:2: 'six' is not a whole number; give a length"),
        ("5\n\n7.5\n", [], "{path}:3: '7.5' is not a whole number; give a length"),
        ("7.5\n5\n6\n", [], "{path}:1: '7.5' is not a whole number; give a length"),
        ("-\n5\n6.\n", [], "{path}:3: '6.' is not a whole number; give a length"),
        (
            "5\n" + 5000 * "9" + "\n",
            [],
            "{path}:2: '" + 5000 * "9" + "' is not a whole number; give a length",
        ),
        ("id,n\na,5\nb,\n", [], "{path}:3: '' is not a whole number; give a length"),
        (
            "id,n\n1,5\n2,6\n",
            [],
            "{path}: lengths may be in any of the columns id, n; give --column",
        ),
        (
            "id,frames,n_samples\n1,5,9\n",
            [],
            "{path}: lengths may be in any of the columns frames, n_samples; give --column",
        ),
        (
            "1,5\n2,6\n",
            [],
            "{path}: lengths may be in any of the columns 1, 2; put a line of "
            "names above, and give --column",
        ),
        (
            "5,000\n7,100\n",
            [],
            "{path}: lengths may be in any of the columns 1, 2; put a line of "
            "names above, and give --column",
        ),
        ("id,text\na,b\n", [], "{path}: has no column of whole numbers; give one length a line"),
        ("5\n0\n", [], "{path}:2: length 0; use 1 to 1000000000000, or leave it out"),
        ("5\n-7\n", [], "{path}:2: length -7; use 1 to 1000000000000, or leave it out"),
        (
            f"5\n{10**30}\n",
            [],
            f"{{path}}:2: length {10**30}; use 1 to 1000000000000, or leave it out",
        ),
        (
            "id,n\na,5\n",
            ["--column", "frames"],
            "{path}: has no column 'frames'; the header names id, n",
        ),
        ("5\n", ["--column", "n"], "{path}: has no column 'n'; it has no header"),
        ("id,n\na,5\n", ["--column", "id"], "{path}:2: 'a' is not a whole number; give a length"),
        ("5\n" * 47, [], "47 clips: the figures need 48 or more"),
        ("5\n" * 50, ["--train_size", 51], "--train_size 51: use 1 to 50, all clips"),
        ("5\n" * 50, ["--seeds", 0], "--seeds 0: use 1 or more"),
        ("5\n" * 50, ["--batch_size", 0], "--batch_size=0: use a whole number, 1 or more"),
        ("5\n" * 50, ["--lrf", -1], "--lrf=-1.0: use 0 to 1e6; 1000 is as good as RAND"),
        ("5\n" * 50, ["--lrf", "inf"], "--lrf inf: use 1000 or less; SSB is RAND long before"),
        ("5\n", ["--hop_from", 256], "--hop_from and --hop_to: give both or neither"),
        ("5\n", ["--hop_from", 0], "--hop_from 0: use 1 sample or more"),
        (
            "5\n",
            ["--hop_length", 256],
            "--hop_length 256: goes with --corpus or --filelist only; leave it out",
        ),
        ("5\n", ["--data_dir", "a"], "--data_dir a: goes with --filelist only; leave it out"),
        (
            "5\n",
            ["--corpus", "a"],
            "give one of LENGTHS, --corpus and --filelist, not several",
        ),
    ],
)
def test_bad_lengths_and_options_are_refused(refusal, tmp_path, text, arguments, message):
    path = write(tmp_path / "lengths.csv", text)
    assert refusal(path, *arguments) == "error: " + message.format(path=path)


def test_bad_files_are_refused(refusal, tmp_path):
    missing, binary = tmp_path / "missing.csv", tmp_path / "binary"
    assert refusal(missing) == (
        f"error: {missing}: cannot be read as text or CSV (No such file or directory)"
    )
    binary.write_bytes(b"\xff\xfe\x00\n")
    assert refusal(binary).startswith(f"error: {binary}: cannot be read as text or CSV (")
    assert refusal("--corpus", tmp_path) == (
        f"error: {tmp_path}: has no wavs/*.wav; give the folder that holds wavs/"
    )
    (tmp_path / "wavs").mkdir()
    wav = write(tmp_path / "wavs" / "a.wav", "no sound")
    assert refusal("--corpus", tmp_path) == (
        f"error: {wav}: not a readable sound file; replace or remove it"
    )
    assert refusal("--filelist", missing).startswith(f"error: filelist '{missing}': ")
    lengths = write(tmp_path / "lengths.txt", "5\n6\n" * 30)
    assert refusal(lengths, "--seeds", 1, "--json", tmp_path / "no" / "such.json", "--output_dir",
                   tmp_path) == (
        f"error: {tmp_path / 'no' / 'such.json'}: cannot be written (No such file or directory)"
    )  # fmt: skip


# bench_batching.py


def test_the_bench_times_every_strategy_beside_the_reference(tmp_path):
    path = tmp_path / "bench.json"
    done = run("bench_batching", "--sizes", 50, 300, "--repeats", 1, "--json", path)
    assert (done.returncode, done.stderr) == (0, "")
    numbers = json.loads(path.read_text())
    assert {"python", "numpy", "machine", "rows"} == set(numbers)
    kinds = [s + dbs + "-BR" for s in STRATEGIES for dbs in ("", "-DBS")]
    rows = numbers["rows"]
    assert [(row["n_lengths"], row["batching"]) for row in rows] == [
        (n, kind) for n in (50, 300) for kind in kinds
    ]
    for row in rows:
        assert row["median_seconds"] == pytest.approx(np.median(row["seconds"]))
        ratio = np.median(row["reference_seconds"]) / np.median(row["seconds"])
        assert row["ratio"] == pytest.approx(ratio) and row["reference_median_seconds"] > 0
        assert f"| {row['n_lengths']} | {row['batching']} |" in done.stdout


def test_the_reference_batches_as_the_plans_do():
    lengths = plot_batching.ljspeech_lengths(276)[:3000]
    for dynamic in (False, True):
        batches = plain(lengths, dynamic, seed=1)
        assert sorted(i for batch in batches for i in batch) == list(range(3000))
        plans = [plan_batches(lengths, dynamic_batch_size=dynamic, epoch=e) for e in range(5)]
        counts = [len(plan) for plan in plans]
        assert min(counts) - 2 <= len(batches) <= max(counts) + 2
        limit = 16 * max(lengths) if dynamic else np.inf
        assert max(len(batch) * lengths[batch].max() for batch in batches) <= limit


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", 0], "--sizes 0: use 1 or more"),
        (["--column", "n"], "--column n: goes with --lengths only; leave it out"),
        (
            ["--json", "no/such.json"],
            "--json no/such.json: there is no such folder; create it first",
        ),
    ],
)
def test_the_bench_refuses_bad_options(arguments, message):
    done = run("bench_batching", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {message}\n")
