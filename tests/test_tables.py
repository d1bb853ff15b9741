"""What prepare_corpus.py reads from lists of any form."""

import csv
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli import UserError
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
        if quoted and "\0" not in text:  # which Python 3.10 cannot write
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
    for separator in ";|\t":
        content = join(NAMES, texts, separator=separator)
        assert read_texts(content * 1000) == [*texts[:2], "Well; yes."] * 1000


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


def test_a_torn_line_is_a_problem_whoever_speaks_in_it():
    content = join([*NAMES, "c0"], [*TEXTS, "Four."], ["ann", "bob ", "ann", "bob"])
    lines, (problem,) = read(content + "c1|torn", speaker="bob")
    assert [line.text for line in lines] == [TEXTS[1], "Four."]
    assert problem.location == "c/metadata.csv:5"


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
        ([["file", *NAMES], ["label", *"372"], ["speaker", *NAMES]], "label or speaker"),
        ([NAMES, ["你好", "今天", "很好"], ["ni3 hao3", "jin1 tian1", "hen3"]], "2 or 3"),
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
