"""synthesize.py, and loading a trained model by Tacotron2.from_checkpoint."""

import errno
import io
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import soundfile
import torch
from conftest import TINY
from hypothesis import strategies as st

from cli import UserError
from corpus.clips import load_clips
from corpus.mels import open_mels
from data_utils import MelDataset, collate
from hparams import PRESETS, HParams, create_hparams
from model import Tacotron2
from scripts import synthesize
from speech import load_model
from training.checkpoint import load_checkpoint, save_checkpoint

TRAINED = Path(__file__).parent / "old_run" / "checkpoint_00000003.pt"  # by train.py


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


@pytest.fixture
def stopping(tmp_path) -> Path:
    """A checkpoint whose model stops after its first frame."""
    state = load_checkpoint(TRAINED)
    state["state_dict"]["decoder.gate_layer.linear_layer.bias"].fill_(100)
    save_checkpoint(tmp_path / "stopping.pt", state)
    return tmp_path / "stopping.pt"


def test_each_text_is_spoken(speak, tmp_path):
    printed, status = speak(TRAINED, "One tone.", "2 tones!", "--hparams", "max_decoder_steps=20")
    assert printed.count("cut off: it never stopped") == 2 and status == 1
    assert printed.splitlines()[-1] == "2 of 2 never stopped: 1, 2"
    names = sorted(path.name for path in (tmp_path / "speech").iterdir())
    files = ["1.npy", "1.png", "1.wav", "2.npy", "2.png", "2.wav"]
    assert names == [*files, "texts.txt"]
    assert (tmp_path / "speech" / "texts.txt").read_text() == "1|One tone.\n2|2 tones!\n"
    assert np.load(tmp_path / "speech" / "1.npy").shape == (10, 20)
    samples, rate = soundfile.read(tmp_path / "speech" / "1.wav")
    assert rate == 22050 and len(samples) == 19 * 276
    mel = np.load(tmp_path / "speech" / "1.npy")
    speak(TRAINED, "One tone.", "2 tones!", "--hparams", "max_decoder_steps=20")  # again
    assert np.array_equal(mel, np.load(tmp_path / "speech" / "1.npy"))


def test_a_checkpoints_own_alphabet_is_spoken(speak, tmp_path):
    settings = "max_decoder_steps=5,text_cleaners=basic_cleaners,symbols=' !äfü'"
    hparams, path = create_hparams(TINY + settings), tmp_path / "german.pt"
    state = {"state_dict": Tacotron2(hparams).state_dict(), "hparams": asdict(hparams)}
    save_checkpoint(path, state)
    notes = [line for line in speak(path, "Fu\u0308xf!")[0].splitlines() if "has no symbol" in line]
    (note,) = notes  # u with a combining diaeresis is ü
    assert "'x' (U+0078) has no symbol and is left out" in note
    assert Tacotron2.from_checkpoint(path, symbols=" !äfü").hparams.symbols == " !äfü"
    other = r"^setting symbols: .*german\.pt was trained with other ones; leave it out$"
    for changes in ("symbols=' !äfö'", "symbols=", "symbols=abc"):  # as many, or other numbers
        with pytest.raises(UserError, match=other):
            speak(path, "Äff!", "--hparams", changes)
    with pytest.raises(UserError, match="'zoo' has nothing to speak"):
        speak(path, "zoo")


def test_nvidias_checkpoint_of_weights_alone_is_spoken(speak, tmp_path):
    model, theirs = Tacotron2(HParams()), tmp_path / "theirs.pt"
    torch.nn.init.constant_(model.decoder.gate_layer.linear_layer.bias, 100)  # stops at once
    save_checkpoint(theirs, {"iteration": 1, "state_dict": model.state_dict()})
    printed, status = speak(theirs, "Hm.")
    assert "1.wav: 0.0 s, nothing to hear: it stopped at once" in printed and status == 0
    assert "note: the mels" not in printed  # they are NVIDIA's
    assert np.load(tmp_path / "speech" / "1.npy").shape == (80, 1)
    with pytest.raises(UserError, match=r"theirs\.pt: holds no settings; give them"):
        Tacotron2.from_checkpoint(theirs)


def test_texts_come_from_a_file_or_standard_input(speak, stopping, tmp_path, monkeypatch):
    texts = "\ufefffirst|One tone.\n\nsecond|2 tones!\r\nA third.\n".encode()
    (tmp_path / "texts.txt").write_bytes(texts)
    options = "--format", "flac", "--hparams", "max_decoder_steps=9"
    printed, status = speak(TRAINED, "-i", f"{tmp_path}/texts.txt", *options)
    assert status == 1 and "note: the mels have filter_length=2048, hop_length=276" in printed
    names = [line.partition(":")[0] for line in printed.splitlines()[1:-1]]
    assert names == [f"{tmp_path}/speech/{name}.flac" for name in ("first", "second", "3")]
    assert soundfile.info(names[0]).format == "FLAC"
    listed = tmp_path / "speech" / "texts.txt"
    assert listed.read_text() == "first|One tone.\nsecond|2 tones!\n3|A third.\n"
    for options in ([], ["-i", "-"]):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one tone\n")))
        assert f"{tmp_path}/speech/1.wav" in speak(stopping, *options)[0]


def test_a_long_text_is_split_at_sentences_then_commas_then_words(speak, tmp_path):
    text = "it rained. we stayed in, as j. p. did; was it long? 1 {HH AH0 L OW1}"
    assert synthesize.split_text(text, 100) == [text]
    sentences = ["it rained.", "we stayed in, as j. p. did; was it long?", "1 {HH AH0 L OW1}"]
    assert synthesize.split_text(text, 40) == sentences
    parts = ["it rained.", "we stayed in,", "as j. p. did;", "was it long?", "1 {HH AH0 L OW1}"]
    assert synthesize.split_text(text, 20) == parts
    assert synthesize.split_text("one two three", 7) == ["one two", "three"]
    assert synthesize.split_text("unbroken", 3) == ["unb", "rok", "en"]
    options = "--split", 40, "--hparams", "max_decoder_steps=9"
    speak(TRAINED, "It rained. We stayed in, as J. P. did; was it long? " * 2, *options)
    # Three pieces of 9 frames, and pauses of 0.25 s.
    pause = round(0.25 * 22050 / 276)
    mel = np.load(tmp_path / "speech" / "1.npy")
    assert mel.shape == (10, 4 * 9 + 3 * pause)
    assert (mel[:, 9 : 9 + pause] == np.float32(np.log(1e-5))).all()
    samples, _ = soundfile.read(tmp_path / "speech" / "1.wav")
    assert len(samples) == (mel.shape[1] - 1) * 276
    assert not samples[8 * 276 : (9 + pause) * 276].any() and samples[: 8 * 276].any()


def test_texts_are_spoken_so_many_at_a_time_and_listed_in_order(speak, tmp_path, monkeypatch):
    monkeypatch.setattr(synthesize, "AT_A_TIME", 2)
    texts = "one", "a tone and two tones", "the longest of all", "a", "two tones"
    printed, _ = speak(TRAINED, *texts, "--hparams", "max_decoder_steps=5")
    names = re.findall(r"speech/(\d)\.wav: ", printed)
    assert names == ["1", "2", "3", "4", "5"]


def test_a_text_of_5000_characters_is_spoken(speak, stopping, tmp_path):
    printed, status = speak(stopping, "The tone is long, and it goes on. " * 150)
    assert status == 0 and printed.splitlines()[-1].startswith(f"{tmp_path}/speech/1.wav: ")
    speak(stopping, "tone" * 1250)


@hypothesis.given(st.text("ab .,-?!;", max_size=60), st.integers(1, 30))
def test_splitting_loses_nothing_but_spaces(text, longest):
    pieces = synthesize.split_text(text, longest)
    assert all(0 < len(piece) <= longest for piece in pieces)
    # A dash between words may be where the text is split.
    whole, joined = (re.sub("[ -]", "", part) for part in (text, "".join(pieces)))
    assert whole == joined


# Mels for a vocoder


@pytest.fixture
def predict(settings, corpus, tmp_path, speak):
    """Call synthesize.py with --teacher_forced on val.txt, into tmp_path/speech."""

    def call(*options, checkpoint=TRAINED):
        data = ",".join(s for s in settings.split(",") if "data_dir" in s or "cache_dir" in s)
        lists = ["--teacher_forced", f"{corpus}/val.txt", "--hparams", data]
        return speak(checkpoint, *lists, *options)[0]

    return call


def hifi_gan_frames(samples: int, n_fft: int = 1024, hop: int = 256) -> int:
    """Frames that HiFi-GAN computes of a clip, and compares with those that it makes of the mel."""
    padded = torch.nn.functional.pad(torch.zeros(1, samples), ((n_fft - hop) // 2,) * 2, "reflect")
    window = torch.ones(n_fft)
    return torch.stft(padded, n_fft, hop, window=window, center=False, return_complex=True).size(2)


def test_predicted_mels_have_hifi_gans_number_of_frames(predict, corpus, tmp_path):
    state = load_checkpoint(TRAINED)
    state["hparams"] |= PRESETS["nvidia"]
    for n in range(4):  # lengths around a whole number of hops
        line = (corpus / "val.txt").read_text().splitlines()[n]
        soundfile.write(
            corpus / line.partition("|")[0], 0.3 * np.sin(np.arange(2560 + n - 1)), 22050
        )
    save_checkpoint(tmp_path / "nvidia.pt", state)
    printed = predict(checkpoint=tmp_path / "nvidia.pt")
    assert "mels of 4 clips" in printed
    for line in (corpus / "val.txt").read_text().splitlines():
        name = line.partition("|")[0]
        mel = np.load(tmp_path / "speech" / name.replace("wav", "npy"))
        samples = soundfile.info(corpus / name).frames
        assert mel.dtype == np.float32 and mel.shape == (10, hifi_gan_frames(samples))
        # In training it cuts segments of the clip that end by its last sample.
        assert mel.shape[1] * 256 <= samples


def test_predicted_mels_are_those_of_validation(predict, corpus, settings, tmp_path):
    predict("--seed", 3)
    overrides = ",".join(s for s in settings.split(",") if "data_dir" in s or "cache_dir" in s)
    model = load_model(TRAINED, overrides)
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


def test_a_trained_model_loads_in_one_line():
    model, state = Tacotron2.from_checkpoint(str(TRAINED)), load_checkpoint(TRAINED)
    assert not model.training and model.hparams.prenet_dim == 8
    torch.testing.assert_close(model.state_dict(), state["state_dict"], rtol=0, atol=0)
    # Its own settings go before those given, and changes before both.
    changed = Tacotron2.from_checkpoint(TRAINED, hparams=HParams(), gate_threshold=0.3)
    assert (changed.hparams.prenet_dim, changed.gate_threshold) == (8, 0.3)
    assert Tacotron2.from_checkpoint(TRAINED, "meta").embedding.weight.device.type == "meta"


def test_what_cannot_be_spoken_is_refused(speak, predict, corpus, tmp_path):
    newer, code, text = (tmp_path / name for name in ("newer.pt", "code.pt", "text.pt"))
    torch.save({"state_dict": {}, "hparams": {"gone": 1}}, newer)
    torch.save({"state_dict": {}, "hparams": Path}, code)
    text.write_text("text")
    state, infinite = load_checkpoint(TRAINED), tmp_path / "infinite.pt"
    state["state_dict"]["embedding.weight"][0] = np.inf
    torch.save(state, infinite)
    for checkpoint, words, settings, message in (
        (TRAINED, "...", "", r"text 2: text '\.\.\.' has nothing to speak"),
        (TRAINED, "", "", r"text 2: text '' has nothing to speak"),
        (TRAINED, "fine", "prenet_dim=9", "another model"),
        (TRAINED, "fine", "symbols=abc", r"03\.pt was trained with other ones; leave it out"),
        (TRAINED, "fine", "prenet=9", "unknown setting 'prenet'"),
        (TRAINED, "fine", "gate_threshold=2", "gate_threshold"),
        (newer, "fine", "", r"newer\.pt: has settings .* not know \(gone\)"),
        (code, "fine", "", r"code\.pt: holds Python code"),
        (text, "fine", "", r"text\.pt: not a checkpoint"),
        (infinite, "fine", "", r"infinite\.pt: embedding\.weight has values that are not finite"),
        (TRAINED, "\n", "", r"text 2: text '\\n' has nothing to speak"),
        (TRAINED, "caf\udce9", "", r"text 2: 'caf\\udce9' is not UTF-8"),
    ):
        with pytest.raises(UserError, match=message):
            speak(checkpoint, "fine", words, "--hparams", settings)
    for content, message in (
        (b"a|one\nA|two", r"texts:2: the id 'A' is on .*texts:1 too; use each once"),
        (b"../a|one", r"texts:1: '\.\./a\|one': write id\|text"),
        (b"a|one|two", r"texts:1: .*write id\|text"),
        (b"one\n\xff", r"texts:2: is not UTF-8"),
        (b"\n \n", "has no text"),
        (b"a|one\nb|", r"texts:2: text '' has nothing to speak"),
        (b"a|{HH AH0", r"texts:1: .*this brace is never closed"),
    ):
        (tmp_path / "texts").write_bytes(content)
        with pytest.raises(UserError, match=message):
            speak(TRAINED, "-i", f"{tmp_path}/texts")
    for arguments, message in (
        (["-i", f"{tmp_path}/none"], "none: No such file or directory; give a file of texts"),
        (["one", "-i", "-"], "not two of them"),
        (["one", "--split", "0"], "--split: 0: use a whole number"),
        (["one", "--seed", "9" * 20], "--seed: 9+: use a whole number, 0 to"),
        (["{" + "AA0 " * 60 + "}", "--split", "90"], "split within {phones}"),
    ):
        with pytest.raises(UserError, match=message):
            speak(TRAINED, *arguments)
    (tmp_path / "val.txt").write_text("gone.wav|a tone")
    with pytest.raises(UserError, match=r"val\.txt:1: .*gone\.wav"):
        predict()
    assert not (tmp_path / "speech").exists()


def test_a_folder_that_has_files_is_refused(settings, stopping, corpus, tmp_path, monkeypatch):
    """By its relative name too; an empty one is not."""
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    data = ",".join(s for s in settings.split(",") if "data_dir" in s or "cache_dir" in s)
    for arguments in (["Hm."], ["--teacher_forced", f"{corpus}/val.txt"]):
        command = ["-o", "out", "-c", str(stopping), "--hparams", data, *arguments]
        synthesize.main(command)
        before = {path: path.read_bytes() for path in Path("out").iterdir()}
        with pytest.raises(UserError, match=r"^out: already has files, .*; give another -o$"):
            synthesize.main(command)
        assert before == {path: path.read_bytes() for path in Path("out").iterdir()}
        shutil.rmtree("out")


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


def test_a_full_disk_is_reported(speak, predict, stopping, monkeypatch):
    usage = shutil.disk_usage("/")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
        with pytest.raises(UserError, match=r"GB needed and 0\.00 GB free"):
            predict()

    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left.*texts\.txt"):
        speak(stopping, "One tone.")
