"""plot_batching.py and bench_batching.py: numbers, files, messages."""

import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import soundfile
from matplotlib.figure import Figure
from matplotlib.text import Text

from batching import STRATEGIES, batch_statistics, plan_batches, solve_randomness
from benchmarks import bench_batching
from cli import UserError
from hparams import HParams
from scripts import lengths, plot_batching

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = np.random.default_rng(7).integers(96, 870, 200)


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """``call(main, *arguments)``: what a script prints, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def call(main, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["program", *map(str, arguments)])
        main()
        return capsys.readouterr().out

    return call


def test_the_scripts_start_quickly_from_any_folder(tmp_path):
    for script, slow in (("scripts/plot", "torch"), ("benchmarks/bench", "torch|matplotlib")):
        command = [sys.executable, "-X", "importtime", ROOT / f"{script}_batching.py", "--help"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert "usage: " in done.stdout and re.search(slow, done.stderr) is None


def test_the_table_and_the_pictures_are_of_the_plans(call, monkeypatch):
    texts = {}

    def savefig(figure: Figure, path: Path, **_: object) -> None:
        texts[path.stem] = {text.get_text() for text in figure.findobj(Text)}

    monkeypatch.setattr(Figure, "savefig", savefig)
    np.savetxt("lengths.txt", LENGTHS, "%d")
    settings = {"batch_size": 8, "lrf": 0.2, "bucket_size": 64, "n_bins": 5}
    options = [f"--{name}={value}" for name, value in settings.items()]
    out = call(plot_batching.main, "lengths.txt", *options, "--seeds=3", "--unit=tokens")
    assert "ABL (tokens)" in out and "| SSB-DBS | LRF 0.2 |" in out

    rows = [line for line in out.splitlines() if line.startswith("|")][2:]
    for line, (dynamic, strategy) in zip(rows, product((False, True), STRATEGIES), strict=True):
        settings["dynamic_batch_size"] = dynamic
        plans = [plan_batches(LENGTHS, strategy, seed=seed, **settings) for seed in range(3)]
        epochs = [batch_statistics(LENGTHS, plan) for plan in plans]
        batches, zpr, of_data, abl, total, largest, _ = np.transpose(epochs)
        if not dynamic and strategy == "RAND":
            random = np.mean(total), np.mean(of_data) + 1
        saved = np.mean(total) / random[0], (np.mean(of_data) + 1) / random[1]
        saved = ", ".join(f"{100 * (1 - share):.1f} %" for share in saved)
        assert line.endswith(f" | {np.mean(largest):,.0f} | {saved} |")
        assert line.startswith(f"| {strategy}{'-DBS' * dynamic} | ")
        percent = (100 * zpr, 2), (100 * of_data, 2)
        for values, digits in ((batches, 1), *percent, (abl, 1), (total, 0)):
            mean, sd = np.mean(values), np.std(values, ddof=1)
            assert f" | {mean:,.{digits}f} ± {sd:,.{digits}f} |" in line

    assert "48 clips at random; batches of 4, buckets of 12, 4 bins, LRF 0.2" in texts["strategies"]
    example = lengths.subset(LENGTHS, 48, 0)
    for name, content in (("figure1", "batches of 8"), ("figure3", "base batch size 8")):
        plan = plan_batches(example, "SSB", 8, name == "figure3", False, lrf=0.15)  # the paper's
        epoch = batch_statistics(example, plan)
        text = f"ZPR {epoch.zpr:.1%}, ABL {epoch.abl:.0f}, {epoch.n_batches} batches"
        assert {text, f"48 clips at random; {content}, LRF 0.15"} <= texts[name]


@pytest.mark.filterwarnings("error")
def test_clips_of_one_length_are_drawn_without_a_warning(call):
    Path("a.txt").write_text("5\n" * 50)
    options = ["--seeds=2", "--lrf=0", "--batch_size=60", "--output_dir=new/here"]
    out = call(plot_batching.main, "a.txt", *options)
    paths = map(Path, re.findall(r"wrote (new/here/\S+)", out))
    assert [path.read_bytes()[:4] for path in paths] == [b"\x89PNG"] * 5


def test_the_documented_tables_and_numbers_come_out(call, monkeypatch, capsys):
    def snippet_output(file: str) -> str:
        """What the Python code in a Markdown file prints."""
        monkeypatch.chdir(ROOT)
        exec((ROOT / file).read_text().split("```python")[1].split("```")[0], {})
        return capsys.readouterr().out

    monkeypatch.setattr(plot_batching, "draw_all", lambda *_: None)
    out = call(plot_batching.main, "--train_size=10480", "--paper")
    assert "no lengths given; using LJSpeech's" in out and "become frames of 276" in out
    documented = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    rows = [line for line in out.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 2 * len(STRATEGIES) and set(rows) <= set(documented.splitlines())
    for printed in snippet_output("docs/results.md").splitlines()[-3:]:
        row = r"^\| {} \| {} \| {} \| .* \| {} \| .* \| {} \|$".format(*printed.split())
        assert re.search(row, documented, re.MULTILINE)
    out = snippet_output("filelists/README.md")
    zpr, abl = np.array(re.findall(r"zpr=([\d.]+),.* abl=([\d.]+),", out), float).T
    assert 100 * zpr == pytest.approx([32.02, 6.22, 0.16, 6.62], abs=0.3)
    assert abl == pytest.approx([773.8, 556.2, 526.4, 557.7], abs=4)


def test_frames_of_one_hop_become_frames_of_another(monkeypatch, tmp_path):
    n_samples = np.random.default_rng(3).integers(20_000, 220_000, 500)
    np.savetxt(tmp_path / "lengths.csv", n_samples // 256 + 1, "%d")
    monkeypatch.setattr(lengths, "LJSPEECH_LENGTHS", tmp_path / "lengths.csv")
    assert (lengths.ljspeech_lengths(256) == n_samples // 256 + 1).all()
    error = lengths.ljspeech_lengths(276) - (n_samples // 276 + 1)
    assert np.abs(error).max() <= 1 and abs(error.mean()) < 0.1


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_ignores_the_lists_that_are_made_by_default_and_no_other(tmp_path):
    made = {HParams.training_files, HParams.validation_files}
    made |= set(re.findall(r"filelists/\w+\.txt", (ROOT / "scripts/demo.sh").read_text()))
    others = ["filelists/mine.txt", "filelists/mine_train.txt", "filelists/ljspeech_lengths.csv"]
    others += [f"filelists/ljspeech_{part}_ids.txt" for part in ("train", "val")]
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    command = ["git", "-C", tmp_path, "check-ignore", *made, *others]
    ignored = subprocess.check_output(command, text=True).splitlines()
    assert len(made) == 4 and set(ignored) == made


@pytest.mark.parametrize(
    ("text", "given", "wanted", "column"),
    [
        ("\ufeff5\r\n 7 \r\n\r\n6\r\n", None, [5, 7, 6], "1"),
        ('id,frames,letters\n"a, 1",5,50\na-2,7,70\n', None, [5, 7], "frames"),
        ("id,frames,letters\na-1,5,50\na,7,7\n", "letters", [50, 7], "letters"),
        ("a-1,5\na-2,7\n", None, [5, 7], "2"),
        ("1,5\n2,7\n", "2", [5, 7], "2"),
        ("id,Mel_Frames_hop256,n\n1,750,9\n2,471,8\n", None, [750, 471], "Mel_Frames_hop256"),
        ("id,frames,length_s\n1,750,8.5\n2,471,5.5\n", None, [750, 471], "frames"),
        ("utt-1 750\nutt-2 471\n", None, [750, 471], "2"),
        ("path\tduration[ms]\na b.mp3\t750\nc.mp3\t471\n", None, [750, 471], "duration[ms]"),
        ('{"samples": 750, "text": "a 1"}\n\n{"samples": 471}\n', None, [750, 471], "samples"),
    ],
)
def test_which_column_is_read(tmp_path, capsys, text, given, wanted, column):
    path = tmp_path / "lengths.csv"
    path.write_text(text, encoding="utf-8")
    assert lengths.read_lengths(path, given).tolist() == wanted
    assert capsys.readouterr().out == f"{path}: {len(wanted)} lengths, from column {column}\n"


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("utt-1 5.284\nutt-2 12\nutt-3 .001\n", "2"),  # Kaldi's utt2dur
        ("5.284\n12.0\n0.001\n", "1"),
        ("id,length_s\na,5.284\nb,12\nc,0.001\n", "length_s"),
        # manifests of NeMo and Hugging Face
        (
            '{"audio_filepath": "a", "offset": 0, "duration": 5.284}\n'
            '{"audio_filepath": "b", "offset": 3, "duration": 12}\n'
            '{"audio_filepath": "c", "offset": 0, "duration": 0.001}\n',
            "duration",
        ),
        ('{"data": [{"duration": 5.284}, {"duration": 12}, {"duration": 0.001}]}', "duration"),
        ('[{"duration": 5.284},\n{"duration": 12},\n{"duration": 0.001}]', "duration"),
    ],
)
def test_seconds_become_frames_of_10_ms(tmp_path, capsys, text, column):
    path = tmp_path / "lengths"
    path.write_text(text)
    assert lengths.read_lengths(path).tolist() == [528, 1200, 1]
    unit = "seconds, as frames of 10 ms"
    assert capsys.readouterr().out == f"{path}: 3 lengths, from column {column}, {unit}\n"


def test_lengths_of_a_folder_are_those_of_its_audio(tmp_path):
    (tmp_path / "in").mkdir()
    clips = {"b.wav": (8000, 1), "in/c.flac": (16000, 2.5), "a.ogg": (8000, 0.5)}
    for name, (rate, seconds) in clips.items():
        soundfile.write(tmp_path / name, np.zeros(int(rate * seconds)), rate)
    (tmp_path / "text.txt").write_text("5")
    assert lengths.read_lengths(tmp_path).tolist() == [50, 100, 250]
    (tmp_path / "d.wav").write_text("no audio")
    with pytest.raises(UserError, match=r"d.wav: cannot be read as audio \(.*\); remove it$"):
        lengths.read_lengths(tmp_path)


@pytest.mark.parametrize(
    ("clips", "said"),
    [
        (LENGTHS, "Recommended: SSB with DBS and BR, lrf=0.1"),
        (np.full(100, 70), "Recommended: RAND, random batches. They are only 0.0% padding"),
        (
            np.append(LENGTHS, 9000),
            # What it costs comes before what it saves.
            r"An epoch has \d\d% fewer updates, \d+ instead of \d+: .* split_long\(\) cuts such "
            r"clips, or give capacity=.* It should save \d\d% of an epoch's time",
        ),
    ],
)
def test_what_is_recommended(call, monkeypatch, clips, said):
    monkeypatch.setattr(plot_batching, "draw_all", lambda *_: None)
    np.savetxt("lengths.txt", clips, "%d")
    assert re.search(said, call(plot_batching.main, "lengths.txt", "--seeds=2", "--batch_size=4"))


def test_a_wanted_padding_chooses_the_parameters(call, monkeypatch):
    monkeypatch.setattr(plot_batching, "draw_all", lambda *_: None)
    np.savetxt("lengths.txt", LENGTHS, "%d")
    options = "--seeds=2", "--batch_size=8", "--target_zpr=0.1"
    out = call(plot_batching.main, "lengths.txt", *options)
    for strategy, setting in (("SSB", "LRF {}"), ("BKT", "bucket size {}"), ("ATS", "{} bins")):
        value = solve_randomness(LENGTHS, strategy, 0.1, batch_size=8, dynamic_batch_size=True)
        assert f"| {strategy} | {setting.format(f'{value:g}')} | " in out
    assert 9 < float(re.search(r"Its batches are ([\d.]+)% padding", out)[1]) < 11


def test_every_wrong_line_is_named_up_to_twenty(tmp_path):
    wrong = ["six", "7.5", "6.", "0", "-7", '""', "9" * 5000, str(10**30), "5,000", '"1\n2"']
    path = tmp_path / "lengths.csv"
    path.write_text("frames\n" + "".join(f"5\n\n{length}\n" for length in wrong) + "x\n" * 2000)
    with pytest.raises(UserError, match=r"2,010 of 2,020 lines are wrong$") as caught:
        lengths.read_lengths(path)
    numbers = [int(number) for number in re.findall(r"csv:(\d+): ", str(caught.value))]
    assert numbers == [*range(4, 30, 3), *range(32, 43)]  # the tenth has two lines


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("n_frames\n", "", "lengths.csv: has no lengths; give one"),
        ("7.5\n5\n6\n", "", "lengths.csv:1: '7.5': give 1 column, with"),
        ("-\n5\n6.\n", "", "lengths.csv:3: '6.': give 1 column, with"),
        ("id,n\n1,5\n2,6\n", "", "lengths may be in any of the columns id, n; give --column"),
        ("id,frames,n_samples\n1,5,9\n", "", "columns frames, n_samples; give --column"),
        ("id,text\na,b\n", "", "lengths.csv: has no column of whole numbers; give one of id"),
        ("id,n\na,5\n", "--column=m", "lengths.csv: has no column 'm'; give one of id, n"),
        ("5\n" * 47, "", "47 clips: the figures need 48 or more"),
        ("5\n" * 50, "--train_size=51", "--train_size 51: use 1 to 50"),
        ("5\n" * 50, "--seeds=1", "--seeds 1: use 2 or more"),
        ("5\n" * 50, "--lrf=inf", "--lrf=inf: use 0 to 1e6"),
        ("5\n" * 50, "--output_dir=lengths.csv/x", "lengths.csv/x: cannot be written (Not a dir"),
        ("5\n", "--hop_length=256", "--hop_length 256: LENGTHS are in frames already"),
        ("", "missing", "missing: No such file or directory; give a file of lengths or a folder"),
        ('{"duration": 5}\n{"duration": 6\n', "", "CSV or JSON (line 2 is no JSON object)"),
        ("-5\n" * 50, "", "has no column of whole numbers; write one length a line"),
        ("", "binary", "binary: cannot be read as text, CSV or JSON ("),
        ('{"duration": 5}\n[6]\n', "", "CSV or JSON (number 2 is no JSON object)"),
        ('{"duration": 5}\n{"n": 6}\n', "", "lengths.csv:2: ',6': give 2 columns, with seconds"),
        ("a 5.5\nb 0.0\n", "", "lengths.csv:2: 'b,0.0': give 2 columns, with seconds, above 0, in"),
        ("", "empty", "empty: has no audio (.aiff, .flac, .mp3, "),
        ("5\n6\n" * 50, "--target_zpr=0.5", "--target_zpr=0.5: SSB gives 0.0"),
    ],
)
def test_bad_lengths_and_options_are_refused(call, text, options, message):
    Path("binary").write_bytes(b"\xff\xfe\x00\n")
    Path("lengths.csv").write_text(text)
    Path("empty").mkdir()
    given = ["lengths.csv"] if text else []
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        call(plot_batching.main, *given, *options.split())
    assert "\n" not in str(caught.value)


def test_the_bench_times_every_strategy_beside_the_plain_version(call):
    out = call(bench_batching.main, "--sizes", 50, 300, "--repeats=1")
    rows = re.findall(r"^\| (\d+) \| (\S+) \| [\d.]+ \| [\d.]+ \| [\d.]+ \|$", out, re.M)
    kinds = [f"{strategy}{dbs}-BR" for strategy in STRATEGIES for dbs in ("", "-DBS")]
    assert rows == [(n, kind) for n in ("50", "300") for kind in kinds]
    row = r"^\| SSB-BR \| {} \| ([\d.]+), .* \| ([\d.]+), .* \| ([\d.]+), .* \|$"
    in_turn, by_length = (
        [float(ratio) for ratio in re.search(row.format(how), out, re.M).groups()]
        for how in ("in turn", "by length")
    )
    assert min(in_turn) > 1.1 and 1 <= min(by_length) <= max(by_length) < 1.02
    weights = {  # of a frame, by tenth
        (strategy, loss): [float(cell) for cell in cells.split("|")]
        for strategy, loss, cells in re.findall(r"^\| (\S+) \| (\w+ed) \| (.*) \|$", out, re.M)
    }
    assert len(weights) == 6 and all(len(tenths) == 10 for tenths in weights.values())
    assert weights["SSB", "padded"][0] > 2 > 0.8 > weights["SSB", "padded"][-1]
    for kind in (("RAND", "padded"), ("SSB-DBS", "padded")):
        assert weights[kind] == pytest.approx([1] * 10, abs=0.03)
    assert re.search(r"45\d batches instead of 46\d, and [01]\.\d% fewer decoder steps\.$", out)


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_plain_version_batches_as_the_plans_do(dynamic):
    clips = lengths.ljspeech_lengths(276)[:3000]
    batches = bench_batching.plain(clips, dynamic, seed=1)
    assert sorted(np.concatenate(batches)) == list(range(3000))
    counts = [len(plan_batches(clips, dynamic_batch_size=dynamic, epoch=e)) for e in range(5)]
    assert min(counts) - 2 <= len(batches) <= max(counts) + 2
