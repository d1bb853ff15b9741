"""What prepare_corpus.py reads from lists of any form, and what it refuses before it writes."""

import csv
import io
import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from cli import UserError
from corpus.audio import check_header
from corpus.clips import check_samples, load_clips
from hparams import HParams
from scripts import prepare_corpus

NAMES = ["c0", "c1", "c2"]
TEXTS = ["The first clip is here.", "A second one comes now.", "The third of them follows."]
STYLES = ["A calm voice talks in a room.", "She speaks fast and happily too.", "A dull tone: slow."]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder c, where each clip has an empty file."""
    monkeypatch.chdir(tmp_path)
    Path("c").mkdir()
    for name in NAMES:
        Path(f"c/{name}.wav").touch()


def read(content, table="metadata.csv", **options):
    Path("c", table).write_text(content, "utf-8")
    return prepare_corpus.read_corpus(Path("c"), table=table, **options)


def read_texts(content, table="metadata.csv", **options):
    lines, problems = read(content, table, **options)
    assert not problems
    return [line.text for line in lines]


def join(*columns, separator="|"):
    return "".join(f"{separator.join(row)}\n" for row in zip(*columns, strict=True))


# Lines


@given(
    st.lists(st.text("a1é \"',;|\t{}[]:\\\x85\0L", max_size=9), min_size=1),
    st.sampled_from("|\t,;"),
    st.booleans(),
    st.booleans(),
)
def test_every_line_is_a_clip_or_a_problem(texts, separator, has_header, quoted):
    """Whatever quotes, separators and lengths; and a clip's text is in its own line."""
    file = io.StringIO()
    writer = csv.writer(file, delimiter=separator, lineterminator="\n")
    if has_header:
        writer.writerow(["file", "text"])
    for i, text in enumerate(texts):
        fields = [NAMES[i % 3], text.replace("L", 140_000 * "x")]
        if quoted:
            writer.writerow(fields)
        else:
            file.write(separator.join(fields) + "\n")
    content = file.getvalue()
    try:
        lines, problems = read(content)
    except UserError as error:
        assert not has_header and "by --text_column" in str(error)
        lines, problems = read(content, text_column="2")
    refused = {problem.location for problem in problems}
    numbers = range(1 + has_header, len(texts) + 1 + has_header)
    assert {f"c/metadata.csv:{n}" for n in numbers} == refused | {line.location for line in lines}
    for line in lines:
        whole = content.split("\n")[int(line.location.partition(":")[2]) - 1]
        kept, whole = ("".join(text.replace('"', "").split()) for text in (line.text, whole))
        assert kept in whole
        assert line.location in refused or not {*line.text} & {*"|\0"}


def test_a_quote_that_does_not_close_stays_in_its_line():
    texts = ['"I do not know', 'what you mean," he said.', '"Well; yes."']
    for separator, last in ((";", "Well; yes."), ("|", '"Well; yes."')):
        content = join(NAMES, texts, separator=separator)
        assert read_texts(content * 1000) == [*texts[:2], last] * 1000


@given(st.permutations(["audio", "text", "seconds", "a"]), st.lists(st.sampled_from("bcd")))
def test_json_is_read_by_key(order, others):
    """Whatever other keys a line has, in any order. What is no text or number is empty."""
    content = ""
    for i, text in enumerate(["A text.", 5, None, float("nan"), ["a"], {"b": 1}, True]):
        item = {"audio": NAMES[i % 3], "text": text, "seconds": 0.5, "a": "Some other words."}
        item = {key: item[key] for key in order} | dict.fromkeys(others[i::7], "more words")
        content += json.dumps(item) + "\n"
    content += '{"audio": "c0"}\n'
    assert read_texts(content, "a.jsonl") == ["A text.", "5", *[""] * 6]
    lines, (problem,) = read(content + '{"audio": "c0", "te\n', "a.jsonl")
    assert len(lines) == 8 and str(problem).startswith("c/a.jsonl:9: is not a JSON object; ")


def test_the_lines_of_a_speaker(capsys):
    content = join([*NAMES, "c0"], [*TEXTS, "Four."], ["ann", "bob ", "ann", "bob"])
    assert read_texts(content, speaker="bob") == [TEXTS[1], "Four."]
    lines, (problem,) = read(content + "c1|torn", speaker="bob")
    assert len(lines) == 2 and problem.location == "c/metadata.csv:5"
    read_texts(content.replace(" \n", "\n"))
    assert "field 3 has 2 values, such as 'bob'; if each is a speaker" in capsys.readouterr().out


# Columns


@given(
    st.permutations(range(3)),
    st.sampled_from(["text", "Sentence", "transcript", "transcription", "normalized_text"]),
    st.sampled_from("|\t,;"),
)
def test_the_header_says_which_column_has_the_texts(order, name, separator):
    """Even if another has more words."""
    columns = [["file", *NAMES], [name, *"372"], ["text_description", *STYLES]]
    assert read_texts(join(*(columns[i] for i in order), separator=separator)) == [*"372"]


NORMALISED = [text.lower().strip(".") for text in TEXTS]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ([NAMES, TEXTS, NORMALISED], NORMALISED),
        ([["normalized_text", *NORMALISED], ["id", *NAMES], ["text", *TEXTS]], NORMALISED),
        ([NAMES, ["ann", "bob", "ann"], TEXTS], TEXTS),
        ([NAMES, TEXTS, STYLES], "2 or 3"),
        ([NAMES, [*"372"], ["0.5", "0.7", "0.6"]], "2 or 3"),
        ([["file", *NAMES], ["label", *"372"], ["speaker", *NAMES]], "label or speaker"),
        ([["id", *NAMES], ["text", *TEXTS], ["transcript", *STYLES]], "text or transcript"),
        (
            [NAMES, ["你好", "今天", "很好"], ["ni3 hao3", "jin1 tian1", "hen3"]],
            "2 or 3",
        ),
    ],
)
def test_one_text_is_read_or_two_columns_are_named(columns, expected):
    content = join(*columns)
    if isinstance(expected, list):
        assert read_texts(content) == expected
        return
    for options in ({}, {"text_column": "another"}):
        with pytest.raises(UserError, match=f"^c/metadata.csv:1: .* in field {expected}; choose "):
            read(content, **options)
    first, _, second = expected.split()
    assert read_texts(content, text_column=first) == columns[1][-3:]
    assert read_texts(content, text_column=second) == columns[2][-3:]


@pytest.mark.parametrize("start", ["0 6615", "1", "0.0 1.5 2"])
def test_texts_that_begin_with_numbers_are_noted(start, capsys):
    read(join(NAMES, [f"{start} {text}" for text in TEXTS]))
    noted = f"note: c: 3 texts begin with numbers, such as {start} that are read aloud; "
    assert noted in capsys.readouterr().out
    read(join(NAMES, [f"{start} Hello.", *TEXTS[1:]]))
    assert "begin with numbers" not in capsys.readouterr().out


# Sounds


def write_clips(names=NAMES, channels=(1,), rate=22050, subtype="PCM_16"):
    for i, name in enumerate(names):
        tone = 0.3 * np.sin(np.arange(0.3 * rate) / (20 + i))
        soundfile.write(f"c/{name}.wav", np.outer(tone, channels), rate, subtype)
    Path("c/metadata.csv").write_text(join(names, TEXTS))


@given(st.integers(0, 60), st.sampled_from([0, 34, 900]))
def test_a_wav_is_cut_if_more_than_its_header_is_missing(n_missing, n_comments):
    write_clips()
    content = bytearray(Path("c/c0.wav").read_bytes())
    comments = b"LIST" + struct.pack("<I", n_comments) + bytes(n_comments)
    content[36:36] = comments if n_comments else b""
    start = content.index(b"data") + 8
    content[start - 4 : start] = struct.pack("<I", len(content) - start + n_missing)
    Path("c/c0.wav").write_bytes(content)
    if n_missing <= start:
        assert check_header("c/c0.wav")[0].frames == (len(content) - start) // 2
    else:
        with pytest.raises(UserError, match="cut off: its header says"):
            check_header("c/c0.wav")


@pytest.mark.parametrize("channels", [(1, -1), (1, -0.95), (0.5, -0.6, 0.1), (0, 0)])
def test_what_conversion_would_silence_is_refused_before_anything_is_written(channels):
    write_clips(channels=channels)
    with pytest.raises(UserError) as error:
        prepare_corpus.main(["c", "--name", "x", "--convert_to", "d"])
    problem = "cancel each other out; keep one" if any(channels) else "is silent"
    lines = str(error.value).splitlines()
    assert len(lines) == 3 and all(problem in line for line in lines)
    assert os.listdir() == ["c"]


@pytest.mark.parametrize("channels", [(1, 0), (1, 0, 0, 0, 0, 0), (0.6, -0.2), (1, 1)])
def test_other_channels_are_mixed(channels):
    write_clips(channels=channels)
    prepare_corpus.main(["c", "--name", "x", "--convert_to", "d"])
    assert len(os.listdir("d/wavs")) == 3


def test_names_may_be_as_long_as_file_systems_allow():
    names = [83 * "長" + f"a{i}" for i in range(3)]  # 251 bytes, and 4 of .wav
    write_clips(names)
    prepare_corpus.main(["c", "--name", "x", "--convert_to", "d"])
    assert sorted(os.listdir("d/wavs")) == [f"{name}.wav" for name in names]


@pytest.mark.parametrize("inodes", [iter(range(10**6)), None])
def test_inode_numbers_refuse_nothing(inodes, monkeypatch):
    """As on some mounts, they change at each look, or are all 0. Links are told by their paths."""
    write_clips()
    stat = os.stat

    def stat_anew(path, *args, **options):
        values = stat(path, *args, **options)
        numbers = {"st_mtime_ns": values.st_mtime_ns}
        return os.stat_result((values[0], next(inodes) if inodes else 0, *values[2:10]), numbers)

    monkeypatch.setattr(os, "stat", stat_anew)
    os.symlink("c0.wav", "c/link.wav")
    hparams = HParams(data_dir="c")
    Path("list.txt").write_text(join([f"{name}.wav" for name in NAMES], TEXTS))
    clips = load_clips("list.txt", hparams)
    assert len(clips) == 3 and not check_samples(clips, hparams)
    Path("list.txt").write_text("c0.wav|a tone\nlink.wav|a tone\n")
    with pytest.raises(UserError, match=r"link\.wav is on list\.txt:1 too; keep one"):
        load_clips("list.txt", hparams)
