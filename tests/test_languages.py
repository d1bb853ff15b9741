"""A language other than English, from its texts to its speech."""

import os
import shlex
import shutil
from pathlib import Path

import pytest
import soundfile
from conftest import TINY, write_tone

from cli import UserError
from corpus.clips import load_clips, report_unknown_characters
from data_utils import load_data
from hparams import create_hparams
from scripts import prepare_corpus, synthesize
from scripts.make_demo_corpus import Engine

SYMBOLS = Path("filelists/x_symbols.txt")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def prepare(corpus="c", name="x"):
    prepare_corpus.main([corpus, "--name", name, "--text_cleaners", "basic_cleaners"])


def settings_in(printed):
    """Those of the last command printed."""
    return shlex.split(printed.splitlines()[-1])[-1]


def write_texts(*texts):
    """A corpus of tones, in the folder ``c``."""
    Path("c/wavs").mkdir(parents=True)
    for i in range(len(texts)):
        write_tone(Path(f"c/wavs/C-{i}.wav"), 0.1)
    lines = "".join(f"C-{i}|{text}\n" for i, text in enumerate(texts))
    Path("c/metadata.csv").write_text(lines, encoding="utf-8")


def test_german_is_prepared_trained_and_spoken(run, capsys):
    texts = "Grüß Gott!", "Öl, süß.", "Wo ist Jörg?", "Über Äpfel", "Die Tür", "Käse"
    engine = Engine("de")
    Path("de").mkdir()
    for i, text in enumerate(texts):
        soundfile.write(f"de/{i}.flac", engine.say(text, 200), 22050)
    lines = "".join(f"{i}|{text}\n" for i, text in enumerate(texts))
    Path("de/metadata.csv").write_text(lines, encoding="utf-8")

    prepare("de", "de")
    settings = settings_in(capsys.readouterr().out)
    assert settings.endswith("text_cleaners=basic_cleaners,symbols=@filelists/de_symbols.txt")
    symbols = Path("filelists/de_symbols.txt").read_text(encoding="utf-8")
    assert symbols == " !,.?bdefgijkloprstwßäöü\n"
    assert run("run", f"{TINY}{settings},batch_size=2,epochs=1") == 0
    assert "has no symbol" not in capsys.readouterr().out
    shutil.rmtree("filelists")
    arguments = ["-o", "speech", "SÜßE Grüße", "--hparams", "max_decoder_steps=5"]
    with pytest.raises(SystemExit):  # status 1: after one epoch, it never stops
        synthesize.main(["-c", "run/checkpoint_best.pt", *arguments])
    assert "has no symbol" not in capsys.readouterr().out
    assert len(soundfile.read("speech/1.wav")[0])


def test_the_alphabet_of_a_corpus_has_all_that_its_texts_have(capsys):
    """What is rare or cannot be a symbol is named."""
    write_texts("Ёж @ дом_", "ежа 12", "Е\u0308ж ежа дом", "дом_ ж", "ежа, «ё» @ е, жж")
    prepare()
    assert SYMBOLS.read_text(encoding="utf-8") == " ,12«»адежмоё@\n"
    printed = capsys.readouterr().out
    assert "note: c/metadata.csv:2: the text has digits; spell numbers out\n" in printed
    assert "'1' (U+0031)" not in printed
    assert "note: c/metadata.csv:1: 'м' (U+043C) is used 3 times in all texts; is it" in printed
    assert "'ж' (U" not in printed
    hparams = create_hparams(settings_in(printed))
    clips = load_clips(f"{hparams.training_files}+{hparams.validation_files}", hparams)
    lengths = {clip.text: len(clip.ids) for clip in clips}
    assert (hparams.n_symbols, lengths["ежа 12"], lengths["Ёж @ дом_"]) == (15, 6, 8)

    written = SYMBOLS.stat().st_mtime_ns
    prepare()
    assert SYMBOLS.stat().st_mtime_ns == written
    SYMBOLS.write_text("абв")
    with pytest.raises(
        UserError, match=r"x_symbols\.txt: already has 3 symbols, .* 14 \(1 in both"
    ):
        prepare()


def test_letters_written_in_ascii_and_digits_left_out_are_noted(capsys):
    write_texts("Plain", "Straße über Äpfel", "Käse", "1984")
    prepare_corpus.main(["c", "--name", "x"])
    note = "note: c/metadata.csv:2: english_cleaners write 'ß' as 'ss' (in 2 texts); for a language"
    hparams = create_hparams(settings_in(printed := capsys.readouterr().out))
    assert printed.splitlines()[1].startswith(note) and printed.count("note: ") == 1
    load_data(hparams)  # as training does
    assert "english_cleaners write 'ß' as 'ss' (in 2 texts)" in capsys.readouterr().out
    hparams = create_hparams("text_cleaners=basic_cleaners,symbols=' abcß'")
    report_unknown_characters([("F:1", "ab ß"), ("F:2", "a 1984"), ("F:3", "5 b")], hparams)
    assert capsys.readouterr().out == (
        "note: F:2: digits '1489' have no symbol and are left out (in 2 texts); spell numbers out\n"
    )


def test_many_rare_characters_are_counted(capsys):
    write_texts("".join(map(chr, range(0x4E00, 0x4E20))), "abc")
    prepare()
    printed = capsys.readouterr().out
    assert printed.count("is used 1 time in all texts") == 20
    assert "note: 15 more characters are used less than 5 times" in printed


def test_texts_that_no_alphabet_helps_are_refused_and_nothing_is_written():
    write_texts("дом {B}", "...", "дом", "дом", "дом }")
    with pytest.raises(UserError) as error:
        prepare()
    lines = str(error.value).splitlines()
    for line, n, problem in zip(
        lines,
        (1, 2, 5),
        ("'{B}' at character 5 of the text: braces", "text '...' has nothing", "'}' at character"),
        strict=True,
    ):
        assert line.startswith(f"c/metadata.csv:{n}: {problem}")
    assert os.listdir() == ["c"]
