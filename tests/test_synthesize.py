"""synthesize.py, and loading a trained model by speech.load_model."""

import re
import shutil
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import soundfile
import torch
from conftest import TINY, build, save_model, set_gate
from hypothesis import strategies as st

from cli import UserError
from corpus.clips import load_clips
from corpus.mels import open_mels
from data_utils import MelDataset, collate
from hparams import PRESETS, HParams, create_hparams
from model import Tacotron2
from scripts import synthesize
from speech import load_model
from training.checkpoint import load_checkpoint


@pytest.fixture
def speak(tmp_path, capsys):
    """Call synthesize.py, which writes to tmp_path/speech anew; returns what it prints and its exit
    status."""

    def call(*arguments: str | Path) -> tuple[str, int]:
        status = 0
        shutil.rmtree(tmp_path / "speech", ignore_errors=True)
        try:
            synthesize.main(["-o", f"{tmp_path}/speech", "-c", *map(str, arguments)])
        except SystemExit as ended:
            status = ended.code
        return capsys.readouterr().out, status

    return call


def test_each_text_is_spoken(speak, trained, tmp_path):
    arguments = trained, "One tone.", "2 tones!", "--hparams", "max_decoder_steps=20"
    printed, status = speak(*arguments)
    assert printed.count("cut off: it never stopped") == 2 and status == 1
    assert printed.splitlines()[-1] == "2 of 2 never stopped: 1, 2"
    names = sorted(path.name for path in (tmp_path / "speech").iterdir())
    assert names == ["1.npy", "1.png", "1.wav", "2.npy", "2.png", "2.wav"]
    mel = np.load(tmp_path / "speech" / "1.npy")
    assert mel.shape == (10, 20)
    samples, rate = soundfile.read(tmp_path / "speech" / "1.wav")
    assert rate == 22050 and len(samples) == 19 * 276
    speak(*arguments)  # again
    assert np.array_equal(mel, np.load(tmp_path / "speech" / "1.npy"))


def test_a_checkpoints_own_alphabet_is_spoken(speak, tmp_path):
    settings = "max_decoder_steps=5,text_cleaners=basic_cleaners,symbols=' !äfü'"
    path = save_model(tmp_path / "german.pt", Tacotron2(create_hparams(TINY + settings)))
    printed, _ = speak(path, "Fu\u0308xf!")  # u with a combining diaeresis is ü
    assert printed.count("has no symbol") == printed.count("'x' (U+0078) has no symbol") == 1
    other = r"^setting symbols: .*german\.pt was trained with other ones; leave it out$"
    with pytest.raises(UserError, match=other):
        speak(path, "Äff!", "--hparams", "symbols=' !äfö'")


def test_nvidias_checkpoint_of_weights_alone_is_spoken(speak, tmp_path):
    model, theirs = set_gate(Tacotron2(HParams()), 100), tmp_path / "theirs.pt"
    torch.save({"iteration": 1, "state_dict": model.state_dict()}, theirs)
    printed, status = speak(theirs, "Hm.")
    assert "1.wav: 0.0 s, nothing to hear: it stopped at once" in printed and status == 0
    assert np.load(tmp_path / "speech" / "1.npy").shape == (80, 1)


def test_texts_come_from_the_lines_of_a_file(speak, trained, tmp_path):
    texts = "\ufeffOne tone.\n\n2 tones!\r\nA third.\n".encode()
    (tmp_path / "texts.txt").write_bytes(texts)
    options = "-i", tmp_path / "texts.txt", "--hparams", "max_decoder_steps=9"
    printed, status = speak(trained, *options)
    names = [line.partition(":")[0] for line in printed.splitlines()[:-1]]
    assert status == 1 and names == [f"{tmp_path}/speech/{n}.wav" for n in (1, 3, 4)]


def test_a_long_text_is_split_at_sentences_then_commas_then_words(speak, trained, tmp_path):
    text = "it rained. we stayed in, as j. p. did; was it long? 1 {HH AH0 L OW1}"
    assert synthesize.split_text(text, 100) == [text]
    sentences = ["it rained.", "we stayed in, as j. p. did; was it long?", "1 {HH AH0 L OW1}"]
    assert synthesize.split_text(text, 40) == sentences
    parts = ["it rained.", "we stayed in,", "as j. p. did;", "was it long?", "1 {HH AH0 L OW1}"]
    assert synthesize.split_text(text, 20) == parts
    assert synthesize.split_text("one two three", 7) == ["one two", "three"]
    assert synthesize.split_text("unbroken", 3) == ["unb", "rok", "en"]
    options = "--split", 40, "--hparams", "max_decoder_steps=9"
    speak(trained, "It rained. We stayed in, as J. P. did; was it long? " * 2, *options)
    # Three pieces of 9 frames, and pauses of 0.25 s.
    pause = round(0.25 * 22050 / 276)
    mel = np.load(tmp_path / "speech" / "1.npy")
    assert mel.shape == (10, 4 * 9 + 3 * pause)
    assert (mel[:, 9 : 9 + pause] == np.float32(np.log(1e-5))).all()
    samples, _ = soundfile.read(tmp_path / "speech" / "1.wav")
    assert len(samples) == (mel.shape[1] - 1) * 276
    assert not samples[8 * 276 : (9 + pause) * 276].any() and samples[: 8 * 276].any()


def test_texts_are_spoken_so_many_at_a_time_and_listed_in_order(speak, trained, monkeypatch):
    monkeypatch.setattr(synthesize, "CHUNK", 2)
    texts = "one", "a tone and two tones", "the longest of all", "a", "two tones"
    printed, _ = speak(trained, *texts, "--hparams", "max_decoder_steps=5")
    assert re.findall(r"speech/(\d)\.wav: ", printed) == ["1", "2", "3", "4", "5"]


def test_a_text_of_5000_characters_is_spoken(speak, stopping, tmp_path):
    printed, status = speak(stopping, "The tone is long, and it goes on. " * 150)
    assert status == 0 and printed.splitlines()[-1].startswith(f"{tmp_path}/speech/1.wav: ")


@hypothesis.given(st.text("ab .,-?!;", max_size=60), st.integers(1, 30))
def test_splitting_loses_nothing_but_spaces(text, longest):
    pieces = synthesize.split_text(text, longest)
    assert all(0 < len(piece) <= longest for piece in pieces)
    # A dash between words may be where the text is split.
    whole, joined = (re.sub("[ -]", "", part) for part in (text, "".join(pieces)))
    assert whole == joined


# Mels for a vocoder


@pytest.fixture
def predict(data, corpus, trained, speak):
    """Call synthesize.py with --teacher_forced on val.txt, into tmp_path/speech."""

    def call(*options, checkpoint=trained):
        lists = ["--teacher_forced", f"{corpus}/val.txt", "--hparams", data]
        return speak(checkpoint, *lists, *options)[0]

    return call


def hifi_gan_frames(samples: int, n_fft: int = 1024, hop: int = 256) -> int:
    """Frames that HiFi-GAN computes of a clip, and compares with those that it makes of the mel."""
    padded = torch.nn.functional.pad(torch.zeros(1, samples), ((n_fft - hop) // 2,) * 2, "reflect")
    window = torch.ones(n_fft)
    return torch.stft(padded, n_fft, hop, window=window, center=False, return_complex=True).size(2)


def test_predicted_mels_have_hifi_gans_number_of_frames(predict, corpus, tmp_path):
    for n in range(4):  # lengths around a whole number of hops
        line = (corpus / "val.txt").read_text().splitlines()[n]
        soundfile.write(
            corpus / line.partition("|")[0], 0.3 * np.sin(np.arange(2560 + n - 1)), 22050
        )
    nvidias = save_model(tmp_path / "nvidia.pt", build(), **PRESETS["nvidia"])
    printed = predict(checkpoint=nvidias)
    assert "mels of 4 clips" in printed
    for line in (corpus / "val.txt").read_text().splitlines():
        name = line.partition("|")[0]
        mel = np.load(tmp_path / "speech" / name.replace("wav", "npy"))
        samples = soundfile.info(corpus / name).frames
        assert mel.dtype == np.float32 and mel.shape == (10, hifi_gan_frames(samples))
        # In training it cuts segments of the clip that end by its last sample.
        assert mel.shape[1] * 256 <= samples


def test_predicted_mels_are_those_of_validation(predict, corpus, data, trained, tmp_path):
    predict("--seed", 3)
    model = load_model(trained, data)
    clips = load_clips(f"{corpus}/val.txt", model.hparams)
    clips.sort(key=lambda clip: clip.n_frames)
    dataset = MelDataset(clips, open_mels(clips, model.hparams))
    batch = collate([*dataset])
    torch.manual_seed(3)
    with torch.no_grad():
        mels = model(batch).mel_postnet
    for mel, i in zip(mels, batch.indices, strict=True):
        saved = np.load(tmp_path / "speech" / f"{Path(clips[i].path).stem}.npy")
        assert np.array_equal(saved, mel[:, : clips[i].n_frames - 1])


def test_a_trained_model_loads_in_one_line(trained):
    model = load_model(str(trained))
    assert not model.training and model.hparams.prenet_dim == 8
    weights = load_checkpoint(trained)["state_dict"]
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    changed = load_model(trained, "gate_threshold=0.3", max_decoder_steps=7)
    assert (changed.gate_threshold, changed.max_decoder_steps) == (0.3, 7)


def test_what_cannot_be_loaded_is_refused(trained, tmp_path):
    code, text = tmp_path / "code.pt", tmp_path / "text.pt"
    torch.save({"state_dict": {}, "hparams": Path}, code)
    text.write_text("text")
    infinite = build()
    torch.nn.init.constant_(infinite.embedding.weight, torch.inf)
    for path, changes, message in (
        (trained, "prenet_dim=9", "another model"),
        (code, "", r"code\.pt: holds Python code"),
        (text, "", r"text\.pt: not a checkpoint"),
        (save_model(tmp_path / "inf.pt", infinite), "", r"inf\.pt: embedding\.weight has values"),
    ):
        with pytest.raises(UserError, match=message):
            load_model(path, changes)


def test_what_cannot_be_spoken_is_refused(speak, trained, tmp_path):
    (tmp_path / "texts").write_bytes(b"one\n...")
    (tmp_path / "latin").write_bytes(b"one\n\xff")
    for arguments, message in (
        (["caf\udce9"], r"text 1: 'caf\\udce9' is not UTF-8"),
        (["-i", f"{tmp_path}/texts"], r"texts:2: text '\.\.\.' has nothing to speak"),
        (["-i", f"{tmp_path}/latin"], "latin: .*; give a text file in UTF-8"),
        ([], "no text to speak; give texts"),
    ):
        with pytest.raises(UserError, match=message):
            speak(trained, *arguments)
    assert not (tmp_path / "speech").exists()


def test_a_folder_that_has_files_is_refused(stopping, tmp_path):
    out = tmp_path / "out"
    out.mkdir()  # an empty one is not
    command = ["-o", str(out), "-c", str(stopping), "Hm."]
    synthesize.main(command)
    before = {path: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(UserError, match=r"out: already has files; give another -o$"):
        synthesize.main(command)
    assert before == {path: path.read_bytes() for path in out.iterdir()}


def test_clips_of_one_name_are_refused(predict, corpus):
    other = corpus / "other"
    other.mkdir()
    first = (corpus / "val.txt").read_text().partition("|")[0]
    shutil.copy(corpus / first, other / first)
    with (corpus / "val.txt").open("a") as file:
        file.write(f"other/{first}|a tone\n")
    with pytest.raises(
        UserError, match=rf"val\.txt:\d: .* has a clip of the same name, {first[:-4]}"
    ):
        predict()
