"""A refused call of any program is one line, or one line a problem; its status is 2; and it changes
no byte.

The tables say what is called, in a folder that has what is wrong, and how each line begins, where
``...`` stands for any words.
"""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from conftest import ROOT, build, contents, make_tones, save_model, set_gate

from batching import STRATEGIES
from cli import exit_on_user_error

SCRIPTS = {path.name: path for path in (ROOT / "train.py", *ROOT.glob("scripts/*.py"))}
EXAMPLE = ROOT / "examples" / "speech_enhancement" / "train.py"
PROGRAMS = {
    name: runpy.run_path(str(path))["main"]
    for name, path in {**SCRIPTS, "enhance.py": EXAMPLE}.items()
}

# The folder

TONE = 0.3 * np.sin(np.arange(4410) / 16)
GOOD = ["bar/0", "bar/1", "bar/2", "same/0", "same/1", "twice/1"]
GOOD += ["good/0", "good/1", "comma/0", "half/0"] + [f"table/wavs/{i}" for i in range(5)]
SOUNDS = {f"{name}.wav": TONE for name in GOOD} | {
    "stereo.wav": np.stack([TONE, TONE], 1),
    "short.wav": TONE[:1101],
    "constant.wav": np.full(9000, 0.5),
    "loud.wav": np.sign(TONE) * 3,
    "nan.wav": TONE * np.nan,
    "piped.flac": TONE,
    "table/wavs/0.wav": np.ones((9000, 2)),
    "table/wavs/1.wav": np.zeros(9000),
    "twice/1.flac": TONE,
    "convert/1.wav": TONE * np.nan,
    "convert/3.flac": TONE,
}
BAD_CLIPS = {  # lines of a filelist
    "0.wav|a|b": "'0.wav|a|b' is not path|text; write a path, one |",
    "0.wav|caf\udce9": "byte 0xe9 is not UTF-8",
    "99.wav|ok": "99.wav: no such file; fix its line, or set data_dir",
    "stereo.wav|ok": "stereo.wav: 2 channels; mix it down to mono (scripts/prepare_corpus.py ",
    "rate.wav|ok": "rate.wav: sampling rate 16000 Hz; ... or set sampling_rate=16000,hop",
    "short.wav|ok": "short.wav: 1101 samples, too short for a mel; ... 1103 samples or more",
    "noise.wav|ok": "noise.wav: not a readable sound file",
    "AIFF.wav|ok": "AIFF.wav: is AIFF",
    "piped.flac|ok": "piped.flac: its header has no length; make it again as a file",
    "2.wav|": "text '' has nothing to speak",
    "2.wav|say {QQ}": "'QQ' in braces is not an ARPAbet phone",
    "2.wav|a": "text 'a' is one symbol",
    "2.wav|" + "a " * 300: "text of 599 symbols, above max_text_length=500",
    "loud.wav|ok": "loud.wav: has a sample of 3",
    "nan.wav|ok": "nan.wav: has samples that are not finite",
    "constant.wav|ok": "constant.wav: is silent",
    "./3.wav|ok": "3.wav is on bad.txt:1 too",
    "link.wav|ok": "link.wav is on bad_val.txt:2 too",
}
BAD_ROWS = {  # of a corpus's table
    "0|one|one": "table/wavs/0.wav: 2 channels",
    "1|silent|silent": "table/wavs/1.wav: is silent",
    "../4|up|up": "../4: no such sound here",
    "one column": "1 field, not 3; write as many",
}
FILES = {
    "bad.txt": "\n".join(["3.wav|ok", "", *BAD_CLIPS]),
    "bad_val.txt": "10.wav|ok\n11.wav|ok\nrate.wav|\n",
    "UTF-16.txt": "0.wav|a tone".encode("utf-16"),
    "latin.txt": b"one\n\xff",
    "dots.txt": "one\n...",
    "many.txt": 25 * "99.wav|ok\n",
    "empty.txt": "",
    "lengths.txt": "5.1\n\nsix\n7\n",
    "noise.wav": "this is not sound",
    "a/noise.wav": "this is not sound",  # the first of all wavs
    "old.csv": "kept",
    "full/made_with.txt": "other arguments",
    "filelists/old_train.txt": "0.wav|a tone\n",
    "table/metadata.csv": "\n".join(["4|" + "however long " * 200, *BAD_ROWS]),
    "comma/metadata.csv": "id,text\n0,One, two.",
    "half/m.jsonl": r'{"audio": "0.wav", "text": "One tone.\ud83d"}',
    "bar/1.txt": "This | that",
    "good/1.txt": "Another text",
    "corpora/LJSpeech-1.1/wavs/0.wav": "of an extraction that was stopped",
    "other/LJSpeech-1.1/metadata.csv": "LJ001-0001|one|one\n",
}
TEXTS = ("bar/0", "good/0", "same/0", "same/1", "twice/1", "convert/1", "convert/3")
FILES |= {f"{name}.txt": "A text" for name in TEXTS}
CHECKPOINTS = {
    "no_tensor.pt": {"state_dict": {"weight": 1.0}},
    "other_names.pt": {"state_dict": {"conv.weight": torch.zeros(1)}},
    "numpy.pt": {"state_dict": {"conv.weight": torch.zeros(1)}, "loss": np.float64(1)},
    "other_symbols.pt": {"state_dict": build(symbols="abc ", n_symbols=5).state_dict()},
}
DATA = "training_files=train.txt,validation_files=val.txt,cache_mels=False"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the calls meet. None of them changes it, so it is made once."""
    folder = make_tones(tmp_path_factory.mktemp("refusals"))
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        content = content.encode(errors="surrogateescape") if isinstance(content, str) else content
        (folder / name).write_bytes(content)
    for name, samples in SOUNDS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        kind = "PCM_16" if name.endswith("flac") else "FLOAT"
        soundfile.write(folder / name, samples, 22050, kind)
    soundfile.write(folder / "rate.wav", TONE, 16000)
    soundfile.write(folder / "AIFF.wav", TONE, 22050, format="AIFF")
    (folder / "link.wav").symlink_to(folder / "11.wav")
    cut = (folder / "convert/3.flac").read_bytes()
    (folder / "convert/3.flac").write_bytes(cut[: len(cut) // 2])
    piped = bytearray((folder / "piped.flac").read_bytes())
    piped[21:26] = bytes([piped[21] & 0xF0, 0, 0, 0, 0])  # 36 bits: how many samples it has
    (folder / "piped.flac").write_bytes(piped)
    for name, state in CHECKPOINTS.items():
        torch.save(state, folder / name)
    save_model(folder / "tiny.pt", set_gate(build(), 100))
    save_model(folder / "batch_of_8.pt", build(), batch_size=8)
    save_model(folder / "nan.pt", set_gate(build(), np.nan))
    return folder


# What is called, and how each line begins

BAD_DATA = [f"bad.txt:{n}: {problem}" for n, problem in enumerate(BAD_CLIPS.values(), 3)]
BAD_DATA += ["bad_val.txt:3: rate.wav: sampling rate", "bad_val.txt:3: text '' has nothing"]
BAD_TABLE = [f"table/metadata.csv:{n}: {p}" for n, p in enumerate(BAD_ROWS.values(), 2)]
UNPAIRED = ["bar/1.txt:1: 'This | that' has a |", "bar/2.txt:1: 2.wav: has no text"]
UNREADABLE = [f"convert/{i}.txt:1: convert/{i}." for i in (1, 3)]
BAD_LISTS = "data_dir=.,training_files=bad.txt,validation_files=bad_val.txt"

REFUSED = {
    "export.py -c tiny.pt -o old.csv": "old.csv: exists already; give another -o, or",
    "export.py -c gone.pt -o new": "gone.pt: no such checkpoint; name one",
    "export.py -c no_tensor.pt -o new": "no_tensor.pt: has no 'state_dict' of weights; name a",
    "export.py -c other_names.pt -o new": "other_names.pt: from another model: embedding.weight is",
    "export.py -c numpy.pt -o new": "numpy.pt: holds more than weights (numpy.",
    "export.py -c bad.txt -o new": "bad.txt: not a checkpoint, or damaged",
    "export.py -c nan.pt -o new": "nan.pt: ... has values that are not finite; use another",
    "train.py -o new -c other_symbols.pt": "other_symbols.pt: has no settings in it; name ... "
    "--preset nvidia",
    "train.py -o new -c tiny.pt --preset nvidia": "--preset nvidia: tiny.pt has settings",
    "train.py -o new -c tiny.pt --warm_start --hparams ignore_layers=prenet": "setting "
    "ignore_layers: the model has no 'prenet'; use some of ... decoder.prenet, ",
    "train.py -o new --resume -c tiny.pt": "--resume continues from the newest checkpoint in -o",
    f"train.py -o old.csv/run --hparams {DATA}": "old.csv/run: cannot be written (Not a directory)",
    f"train.py -o new -l logs/x --hparams {BAD_LISTS}": BAD_DATA,
    "evaluate.py -c tiny.pt -o old": "old.csv: exists already; give another -o, or",
    f"evaluate.py -c tiny.pt batch_of_8.pt -o new --hparams {DATA}": "batch_of_8.pt: has "
    "batch_size=8, and tiny.pt has 16; evaluate them apart",
    "synthesize.py -c tiny.pt -o full Hm.": "full: already has files; give another ",
    "synthesize.py -c tiny.pt -o new -i dots.txt": "dots.txt:2: text '...' has nothing to speak",
    "synthesize.py -c tiny.pt -o new -i latin.txt": "latin.txt:2: byte 0xff is not UTF-8",
    "synthesize.py -c tiny.pt -o new -i empty.txt": "no text to speak; give texts as arguments, or",
    "synthesize.py -c tiny.pt -o new --hparams symbols=abc Hm.": "setting symbols: tiny.pt was "
    "trained with others; leave it out",
    "synthesize.py -c tiny.pt -o new --vocoder gone Hm.": "--vocoder gone: no such file; use griff",
    "prepare_corpus.py gone --name x": "gone: no such folder; give the corpus's folder",
    "prepare_corpus.py bar --name a/b": "--name a/b: use letters, digits and . _ - only",
    "prepare_corpus.py bar --name x --trim_db 40": "--trim_db 40.0: needs --convert_to, for",
    "prepare_corpus.py bar --name x --convert_to full": "full: already has files; give another ",
    "prepare_corpus.py bar --name x --convert_to bar/d": "--convert_to bar/d: is in the corpus; ",
    "prepare_corpus.py bar --name old --convert_to d": "filelists/old_train.txt: exists already; ",
    "prepare_corpus.py good --name old": "filelists/old_train.txt: already has 1 lines, which are ",
    "prepare_corpus.py table --name x": BAD_TABLE,
    "prepare_corpus.py comma --name x": "comma/metadata.csv:2: 3 fields, not 2; write as many; put",
    "prepare_corpus.py half --name x": "half/m.jsonl:1: '\\ud83d' is half of a character, as where",
    "prepare_corpus.py bar --name x": UNPAIRED,
    "prepare_corpus.py full --name x": "full: no sound file has a text (not read: made_with.txt)",
    "prepare_corpus.py same --name x": "2 clips, all of one text; add clips of another text",
    "prepare_corpus.py twice --name x --convert_to d": "twice: has several clips named 1; rename",
    "prepare_corpus.py convert --name x --convert_to d": UNREADABLE,
    "prepare_ljspeech.py --data_dir corpora": "corpora/LJSpeech-1.1: has no metadata.csv; remove",
    "prepare_ljspeech.py --data_dir other": "other/LJSpeech-1.1/metadata.csv: lacks LJ... and 10,4",
    "make_demo_corpus.py full": "full: has files not made with --clips 300 --duration_scale 1.0; ",
    "make_demo_corpus.py new --clips 0": "argument --clips: 0: use a whole number, 1 or more",
    "plot_batching.py empty.txt": "empty.txt: has no lengths; write a number a line, or the lines",
    "plot_batching.py lengths.txt": "lengths.txt:3: 'six': give a number above 0, or the lines",
    "enhance.py . -o new --batch_size 2": "a/noise.wav: ...; replace it or take it out",
    "plot_batching.py 2.wav --hparams batch_capacity=9": "argument --hparams: batches here have ",
    "samples.py tiny.pt -o new.html -i latin.txt": "latin.txt:2: byte 0xff is not UTF-8",
    "results.py full": "full: holds no run; name the output of train.py",
}
SETTINGS = {
    "bach_size=3": "--hparams: unknown setting 'bach_size'; did you mean 'batch_size'?",
    "batch_size": "--hparams: 'batch_size' is not name=value",
    "batch_size=3.5": "--hparams: batch_size=3.5 is not valid; use a whole number",
    "batch_size=0": "setting batch_size=0: use a value above 0",
    "lrf=nan": "setting lrf=nan: use a number up to 1e6",
    "batching_strategy=X": f"setting batching_strategy=X: use one of {', '.join(STRATEGIES)}",
    "batch_capacity=9,dynamic_batch_size=False": "setting batch_capacity=9: set dynamic_batch_size",
    "symbols=@gone": "symbols=@gone: No such file or directory; name a file that has",
}
DATA_SETTINGS = {
    "data_dir=gone": "setting data_dir=gone: no such folder; use the corpus's folder",
    "data_dir=full": "setting data_dir=full: has none of the clips, such as full/0.wav",
    "training_files=gone,validation_files=none": "none: No such file",
    "training_files=UTF-16.txt": "UTF-16.txt: is UTF-16; save it as UTF-8",
    "training_files=empty.txt": "empty.txt: has no clips; write lines of path|text",
    "training_files=many.txt": [f"many.txt:{n}: " for n in range(1, 11)],  # ten of each kind
    "training_files=val.txt": [
        f"val.txt:{n}: {7 + n}.wav is on val.txt:{n} too" for n in range(1, 5)
    ],
    "batch_capacity_seconds=0.49": "train.txt:8: 7.wav has 40 frames",
    "batch_size=9": "setting batch_size=9: train.txt has 8 clips",
    "speak_every=1,speak_texts=?": "setting speak_texts: text '?' has nothing to speak",
}
SETTINGS |= {f"{DATA},{value}": line for value, line in DATA_SETTINGS.items()}
for value, line in SETTINGS.items():
    REFUSED[f"train.py -o new -l logs/x --hparams '{value}'"] = line
REFUSED |= {f"{name} --unknown": "...; --help shows the arguments" for name in SCRIPTS}


@pytest.mark.parametrize("command", REFUSED)
def test_a_refused_call_says_so_in_a_line_a_problem_and_changes_no_byte(
    folder, monkeypatch, capsys, command
):
    """A new folder may be left, with the lock of a run that did not begin."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    before = {path: held for path, held in contents(folder).items() if path.name != "lock"}
    with pytest.raises(SystemExit, match=r"^2$"):
        exit_on_user_error(PROGRAMS[sys.argv[0]])
    printed = capsys.readouterr().err.removeprefix("error: ").splitlines()
    wanted = [REFUSED[command]] if isinstance(REFUSED[command], str) else REFUSED[command]
    for line, beginning in zip(sorted(printed), sorted(wanted), strict=True):
        assert re.match(re.escape(beginning).replace(r"\.\.\.", ".*"), line), line
    after = contents(folder)
    assert {path: after[path] for path in before if path.name != "lock"} == before
    assert all(path.is_dir() or path.name == "lock" for path in after.keys() - before.keys())


def test_output_that_cannot_be_written_is_one_line_and_status_2():
    reader, writer = os.pipe()
    os.close(reader)
    python = [sys.executable, "-c", "import cli; cli.exit_on_user_error(lambda: print('x'))"]
    ended = subprocess.run(python, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (2, b"error: output pipe closed\n")
