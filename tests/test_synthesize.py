"""synthesize.py, and loading a trained model by speech.load_model."""

import contextlib
import io
import re
import shutil
from base64 import b64decode
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import soundfile
import torch
from conftest import TINY, build, save_model
from hypothesis import strategies as st

import speech
from cli import UserError
from corpus.clips import check_text, load_clips
from data_utils import MelDataset, collate, open_mels
from hparams import create_hparams
from model import N_READINGS, Tacotron2
from scripts import samples, synthesize
from speech import load_model
from text import text_to_sequence
from text.symbols import symbols


@pytest.fixture
def speak(tmp_path, capsys):
    """Calls synthesize.py, which writes into tmp_path/speech, and returns what it prints."""

    def call(*arguments: str | Path) -> str:
        shutil.rmtree(tmp_path / "speech", ignore_errors=True)
        (tmp_path / "speech").mkdir()  # an empty folder is as good as none
        with contextlib.suppress(SystemExit):
            synthesize.main(["-o", f"{tmp_path}/speech", "-c", *map(str, arguments)])
        return capsys.readouterr().out

    return call


def test_each_line_of_a_file_is_spoken(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(synthesize, "CHUNK", 2)  # texts at a time
    texts = "\ufeffOne tone.\n\n2 tones!\r\nFor $_$.\n"  # no formula, in the picture
    (tmp_path / "texts.txt").write_bytes(texts.encode())
    options = ["-i", f"{tmp_path}/texts.txt", "--hparams", "max_decoder_steps=20"]
    with pytest.raises(SystemExit, match=r"^1$"):
        synthesize.main(["-c", str(trained), "-o", f"{tmp_path}/speech", *options])
    printed = capsys.readouterr().out
    assert printed.count("cut off: it never stopped") == 3
    assert printed.splitlines()[-1] == "never stopped, of 3 texts: 1, 3, 4"
    names = {f"{line}.{kind}" for line in (1, 3, 4) for kind in ("npy", "png", "wav")}
    assert {path.name for path in (tmp_path / "speech").iterdir()} == names
    assert np.load(tmp_path / "speech" / "4.npy").shape == (10, 20)
    samples, rate = soundfile.read(tmp_path / "speech" / "4.wav")
    assert rate == 22050 and len(samples) == 19 * 276


def test_a_page_plays_the_recordings_and_what_each_model_says(corpus, tmp_path):
    models = [tmp_path / "one.pt", tmp_path / "two.pt"]
    for path in models:
        save_model(path, build(), data_dir=str(corpus), max_decoder_steps=20)
    (corpus / "val.txt").write_text("8.wav|Is 1 < 2?\n9.wav|A tone.\n")
    page = tmp_path / "new" / "page.html"
    samples.main([*map(str, models), "-i", f"{corpus}/val.txt", "-o", str(page)])
    text = page.read_text()
    assert "<h2>Is 1 &lt; 2?</h2>" in text and text.count("<img") == 4
    sounds = [b64decode(sound) for sound in re.findall('audio/mpeg;base64,([^"]*)', text)]
    seconds = [soundfile.info(io.BytesIO(sound)).duration for sound in sounds]
    recorded = [soundfile.info(corpus / name).duration for name in ("8.wav", "9.wav")]
    assert len(seconds) == 6 and seconds[::3] == pytest.approx(recorded, abs=0.1)
    with pytest.raises(UserError, match="exists already; give another -o"):
        samples.main([str(models[0]), "-i", f"{corpus}/val.txt", "-o", str(page)])


def test_a_text_without_punctuation_gets_a_full_stop(speak, trained, tmp_path):
    def mel(path: Path, text: str) -> bytes:
        speak(path, text, "--hparams", "max_decoder_steps=20")
        return (tmp_path / "speech" / "1.npy").read_bytes()

    assert mel(trained, "One tone") == mel(trained, "One tone.") != mel(trained, "One tone!")
    assert mel(trained, "One {T OW1 N}") == mel(trained, "One {T OW1 N}.")


def test_without_options_the_voice_of_this_repository_speaks(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/speech").mkdir(parents=True)
    synthesize.main(["Is it? {HH AA1 T} outside."])
    *notes, line = capsys.readouterr().out.splitlines()
    assert "note: the model was not trained on ?; it cannot read them" in notes
    assert 0.5 < float(re.fullmatch(r"runs/speech2/1\.wav: ([\d.]+) s", line)[1]) < 3


def test_the_voice_of_this_repository_reads_sentences():
    texts = "The morning was cold, and the road was long.", "Who would believe such a story?"
    model = load_model(synthesize.VOICE)
    hop_seconds = model.hparams.hop_length / model.hparams.sampling_rate
    for _, spoken in speech.speak(model, [check_text(text, model.hparams) for text in texts]):
        letters = "".join("@" if len(name) > 1 else name for name in spoken.symbols)
        errors = speech.attention_errors(spoken.alignment, letters, hop_seconds)
        assert spoken.stopped and errors == ([], 0, 0)


def test_a_checkpoints_own_alphabet_is_spoken(speak, tmp_path):
    settings = "max_decoder_steps=5,text_cleaners=basic_cleaners,symbols=' !äfü'"
    path = save_model(tmp_path / "german.pt", Tacotron2(create_hparams(TINY + settings)))
    printed = speak(path, "Fu\u0308xf!")  # u with a combining diaeresis is ü
    assert printed.count("has no symbol") == printed.count("'x' (U+0078) has no symbol") == 1


TEXT = "it rained. we stayed in, as j. p. did; was it long? 1 {HH AH0 L OW1}"


def test_a_long_text_is_split_at_sentences_then_commas_then_words():
    for longest, pieces in (
        (40, "it rained.|we stayed in, as j. p. did; was it long?|1 {HH AH0 L OW1}"),
        (28, "it rained.|we stayed in, as j. p. did;|was it long?|1 {HH AH0 L OW1}"),
        (14, "it rained.|we stayed in,|as j. p. did;|was it long?|1|{HH AH0 L OW1}"),
    ):
        assert synthesize.split_text(TEXT, longest) == pieces.split("|")


def test_between_the_pieces_of_a_text_is_a_pause(speak, trained, tmp_path):
    speak(trained, TEXT, "--split", 40, "--hparams", "max_decoder_steps=9")
    pause = round(0.25 * 22050 / 276)  # of 0.25 s, after pieces of 9 frames
    mel = np.load(tmp_path / "speech" / "1.npy")
    assert mel.shape == (10, 3 * 9 + 2 * pause)
    assert (mel[:, 9 : 9 + pause] == np.float32(np.log(1e-5))).all()
    samples, _ = soundfile.read(tmp_path / "speech" / "1.wav")
    assert not samples[8 * 276 : (9 + pause) * 276].any() and samples[: 8 * 276].any()


@hypothesis.given(
    st.lists(st.sampled_from([*"ab .,-?!;", "{HH AH0 L OW1}", "{B}"]), max_size=60).map("".join),
    st.integers(1, 30),
)
def test_splitting_loses_nothing_but_spaces_and_no_piece_parts_phones(text, longest):
    pieces = synthesize.split_text(text, longest)
    whole, joined = (text_to_sequence(part, []) for part in (text, " ".join(pieces)))
    # A dash between words may be where the text is split.
    whole, joined = ([i for i in ids if symbols[i] not in " -"] for ids in (whole, joined))
    assert whole == joined
    if "{" not in text:
        assert all(0 < len(piece) <= longest for piece in pieces)


@pytest.mark.parametrize("cleaners", ["english_cleaners", "english_phones"])
def test_a_text_is_read_as_in_training_whatever_follows_it(cleaners):
    hparams = create_hparams(f"text_cleaners=[{cleaners}]")
    for text in ("It is 6 ft", "10 am at Main St", "A4, e.g", "The US: {AA} C", "1 lb"):
        given = synthesize.Text("1", text, "text 1")
        assert synthesize.symbol_ids(given, hparams, 99, ".", "") == [
            check_text(text, hparams) + text_to_sequence(".", [])
        ]


def test_predicted_mels_are_those_of_validation(speak, corpus, data, tmp_path):
    checkpoint = save_model(tmp_path / "model.pt", build(n_frames_per_step=3))
    filelist = f"{corpus}/val.txt"
    speak(checkpoint, "--teacher_forced", filelist, "--hparams", data, "--seed", 3)
    model = load_model(str(checkpoint), data)
    assert not model.training  # no dropout but the prenet's
    clips = load_clips(filelist, model.hparams)
    clips.sort(key=lambda clip: clip.n_frames)
    dataset = MelDataset(clips, open_mels(clips, model.hparams), 3)
    batch = collate([*dataset], 3)
    torch.manual_seed(3)
    with torch.no_grad():
        mels = sum(model(batch).mel_postnet for _ in range(N_READINGS)) / N_READINGS
    for mel, i in zip(mels, batch.indices, strict=True):
        saved = np.load(tmp_path / "speech" / f"{Path(clips[i].path).stem}.npy")
        assert np.array_equal(saved, mel[:, : clips[i].n_frames - 1])
