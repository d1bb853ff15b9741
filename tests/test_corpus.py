"""Filelists, every check of a clip, mel-spectrograms and their cache."""

import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import hypothesis
import librosa
import numpy as np
import pytest
import soundfile
import torch
from conftest import write_tone
from hypothesis import strategies as st

from cli import UserError
from corpus.audio import MelSpectrogram
from corpus.clips import (
    Problem,
    check_samples,
    load_clips,
    map_in_threads,
    raise_problems,
    report_unknown_characters,
    write_lines,
)
from data_utils import MelCache, load_data, open_mels
from hparams import create_hparams
from text import text_to_sequence


def load_list(hparams, content):
    """The clips of a filelist with this content, and with good samples."""
    path = Path(hparams.data_dir, "list.txt")
    path.write_text(content, newline="", errors="surrogateescape")
    clips = load_clips(str(path), hparams)
    raise_problems(check_samples(clips, hparams))
    return clips


# Mels


@pytest.mark.parametrize("preset", ["nvidia", "paper"])
def test_mels_are_librosas(preset):
    """Of a hum, loud and low, then noise that fades away: every level and frequency occurs, and
    nothing above the hum, where rounding errors would show."""
    seconds = np.arange(15_000) / 22050
    hum = 0.9 * np.sin(2 * np.pi * (100 + 20 * seconds) * seconds)
    noise = np.random.default_rng(0).standard_normal(15_000) * np.geomspace(0.1, 1e-5, 15_000)
    samples = np.concatenate([hum, noise]).astype(np.float32)
    hparams = create_hparams(preset=preset)
    spectrogram = MelSpectrogram(hparams)
    ours = spectrogram(torch.from_numpy(samples))
    theirs = librosa.feature.melspectrogram(
        y=samples,
        sr=hparams.sampling_rate,
        n_fft=hparams.filter_length,
        hop_length=hparams.hop_length,
        win_length=hparams.win_length,
        power=1.0,
        pad_mode="reflect",
        n_mels=hparams.n_mel_channels,
        fmin=hparams.mel_fmin,
        fmax=hparams.mel_fmax,
    )
    assert ours.shape == (80, len(samples) // hparams.hop_length + 1)
    np.testing.assert_allclose(ours, np.log(np.clip(theirs, 1e-5, None)), atol=1e-4)
    waves = torch.from_numpy(samples).reshape(3, 10_000)
    torch.testing.assert_close(spectrogram(waves)[1], spectrogram(waves[1]))


# Filelists


def test_what_a_filelist_may_have(corpus, hparams, capsys):
    """Absolute paths, a + in its own, line ends of Windows and of old Macs, byte order marks, and a
    third field, whose speakers are counted."""
    (corpus / "other.txt").write_text(f"{corpus}/9.wav|Dr. Tone\n")
    clips = load_clips(f"{corpus}/train.txt + {corpus}/other.txt", hparams)
    assert len(clips) == 9 and clips[0].path == f"{corpus}/0.wav"
    assert clips[8].location == f"{corpus}/other.txt:1"
    assert clips[8].ids == text_to_sequence("doctor tone", ["basic_cleaners"])
    lines = "\ufeff0.wav|a tone|LJ\r\n\r\n1.wav|another\u2028tone\r\n2.wav|three | LJ \n"
    clips = load_list(hparams, lines)
    assert "note" not in capsys.readouterr().out
    assert [clip.text for clip in clips] == ["a tone", "another\u2028tone", "three"]
    assert [clip.location[-2:] for clip in clips] == [":1", ":3", ":4"]
    (corpus / "a+b.txt").write_text("0.wav|a tone|ann\r\ufeff1.wav|a tone|bob\r")
    assert len(load_clips(f"{corpus}/a+b.txt", hparams)) == 2
    assert "/a+b.txt: 2 speakers become one voice; " in capsys.readouterr().out
    with pytest.raises(UserError, match=r"^\S+/list\.txt:3: '2\.wav\|so\|cut' .* one \\|, and"):
        load_list(hparams, "0.wav|whole\n1.wav|whole\n2.wav|so|cut")
    (corpus / "list.txt").write_text("0.wav|a tone", "utf-16")
    with pytest.raises(UserError, match=r"^\S+/list\.txt: is UTF-16; save it as UTF-8$"):
        load_clips(f"{corpus}/list.txt", hparams)


def test_a_filelist_is_never_replaced(tmp_path):
    file, lines = tmp_path / "new/list.txt", ["0.wav|ü", "1.wav|b"]
    write_lines(file, lines)
    before = file.stat().st_mtime_ns
    write_lines(file, lines)
    with pytest.raises(UserError, match=r"/list\.txt: already has 2 lines, which are not the 1 "):
        write_lines(file, lines[1:])
    assert file.read_text("utf-8") == "0.wav|ü\n1.wav|b\n" and file.stat().st_mtime_ns == before


def test_characters_that_are_not_read_as_written_are_noted(hparams, capsys):
    hparams = replace(hparams, text_cleaners=("english_cleaners",))
    texts = ["plain", "so [sic", "1984", "[sic", "Straße", "süß"]
    report_unknown_characters([(f"F:{n}", text) for n, text in enumerate(texts, 1)], hparams)
    left_out, misread = capsys.readouterr().out.splitlines()
    assert left_out.startswith("note: F:2: '[' (U+005B) has no symbol and is left out (in 2 texts)")
    assert misread.startswith("note: F:5: 'ß' is read as 'ss', 'ü' is read as 'u' (in 2 texts),")


# Checks


@pytest.mark.parametrize("cache", [True, False])
def test_everything_that_is_wrong_with_clips_is_in_one_report(corpus, hparams, cache):
    """Lists, texts, headers and samples, of both sets."""
    bad_lines = {
        "0.wav": "'0.wav' is not path|text",
        "0.wav|caf\udce9": "byte 0xe9 is not UTF-8",
        "99.wav|ok": "99.wav: no such file",
        "stereo.wav|ok": "stereo.wav: 2 channels",
        "rate.wav|ok": "rate.wav: sampling rate 16000 Hz",
        "short.wav|ok": "short.wav: 1101 samples, too short for a mel",
        "noise.wav|ok": "noise.wav: not a readable sound file",
        "AIFF.wav|ok": "AIFF.wav: is AIFF",
        "2.wav|": "text '' has nothing to speak",
        "2.wav|say {QQ}": "'QQ' in braces is not an ARPAbet phone",
        "2.wav|a": "text 'a' is one symbol",
        "2.wav|" + "a " * 300: "text of 599 symbols, above max_text_length=500",
        "loud.wav|ok": "loud.wav: has a sample of 3",
        "nan.wav|ok": "nan.wav: has samples that are not finite",
        "constant.wav|ok": "constant.wav: is silent",
        "./3.wav|ok": "3.wav is on train.txt:1 too",
        "10.wav|ok": "10.wav is on val.txt:1 too",
        "link.wav|ok": "link.wav is on val.txt:2 too",
    }
    tone, _ = soundfile.read(corpus / "0.wav")
    sounds = {
        "stereo": np.stack([tone, tone], 1),
        "short": tone[:1101],
        "constant": np.full(9000, 0.5),
        "loud": np.sign(tone) * 3,
        "nan": tone * np.nan,
    }
    for name, samples in sounds.items():
        soundfile.write(corpus / f"{name}.wav", samples, 22050, subtype="FLOAT")
    soundfile.write(corpus / "AIFF.wav", tone, 22050, format="AIFF")
    soundfile.write(corpus / "rate.wav", tone, 16000)
    (corpus / "noise.wav").write_bytes(b"this is not sound")
    (corpus / "link.wav").symlink_to(corpus / "11.wav")
    lines = "\n".join(["3.wav|ok", "", *bad_lines])
    (corpus / "train.txt").write_text(lines, errors="surrogateescape")
    (corpus / "val.txt").write_text("10.wav|ok\n11.wav|ok\nrate.wav|\n")
    expected = {f"train.txt:{n}: {problem}" for n, problem in enumerate(bad_lines.values(), 3)}
    expected |= {"val.txt:3: rate.wav: sampling rate", "val.txt:3: text '' has nothing"}
    with pytest.raises(UserError) as error:
        load_data(replace(hparams, cache_mels=cache))
    lines = str(error.value).replace(f"{corpus}/", "").split("\n")
    for line, start in zip(sorted(lines), sorted(expected), strict=True):
        assert line.startswith(start)
    assert not list(corpus.glob("cache/*.*"))


def test_ten_problems_of_each_kind_are_listed():
    short = [Problem(f"m.csv:{i}", "short", f"x{i}: {i} samples") for i in range(25)]
    others = [Problem(f"m.csv:{i}", "text", f"{i}.wav: text") for i in range(3)]
    with pytest.raises(UserError) as error:
        raise_problems([*short[::-1], *others], "fix them")
    lines = [*map(str, short[:9]), f"{short[9]} (15 more lines like it)", *map(str, others)]
    assert sorted(str(error.value).split("\n")) == sorted([*lines, "fix them"])


COMMENTS = b"INFO" + 300 * (b"ICMT" + (40).to_bytes(4, "little") + b"once more " * 4)
COMMENTS = b"LIST" + len(COMMENTS).to_bytes(4, "little") + COMMENTS


@pytest.mark.parametrize(("kind", "metadata"), [("WAV", b""), ("WAV", COMMENTS), ("FLAC", b"")])
def test_a_cut_is_noticed(corpus, hparams, kind, metadata):
    path = corpus / "x.wav"
    write_tone(path, 0.1, subtype="PCM_16", format=kind)
    whole = path.read_bytes()
    whole = whole[:36] + metadata + whole[36:]
    path.write_bytes(whole)
    assert len(load_list(hparams, "x.wav|tone")) == 1
    path.write_bytes(whole[:-1000])
    with pytest.raises(
        UserError, match=r"list\.txt:1: .*/x\.wav: (cut off|not .* readable|not as)"
    ):
        load_list(hparams, "x.wav|tone")


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFF000, 0])
def test_a_wav_that_was_written_to_a_pipe_is_read_to_its_end(corpus, hparams, size):
    """Programs write the first two sizes into its header. Nothing can be read of the last."""
    path = corpus / "x.wav"
    write_tone(path, 0.1, subtype="PCM_16")
    n_frames, content = load_list(hparams, "x.wav|tone")[0].n_frames, bytearray(path.read_bytes())
    start = content.index(b"data") + 4
    content[start : start + 4] = size.to_bytes(4, "little")
    path.write_bytes(content)
    if size:
        assert load_list(hparams, "x.wav|tone")[0].n_frames == n_frames
        return
    with pytest.raises(UserError, match=r"x\.wav: its header has no length; make it again as a"):
        load_list(hparams, "x.wav|tone")


def test_a_flac_without_a_length_is_refused(corpus, hparams):
    write_tone(corpus / "x.flac", 0.1, subtype="PCM_16")
    content = bytearray((corpus / "x.flac").read_bytes())
    content[21:26] = bytes([content[21] & 0xF0, 0, 0, 0, 0])  # 36 bits: its samples
    (corpus / "x.flac").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.flac: its header has no length; make it again as a"):
        load_list(hparams, "x.flac|tone")


PARTS = ["0.wav", "1.wav", "|", "\n", "\r\n", "\0", "tone", "..", "/", "{", "}"]
LISTS = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)
LISTS |= st.binary(max_size=200).map(lambda content: content.decode("utf-8", "surrogateescape"))


@pytest.mark.parametrize("lists", [LISTS, st.just("broken.wav|tone")])
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(data=st.data())
def test_any_list_and_wav_is_read_or_refused(corpus, hparams, lists, data):
    """The wav is cut anywhere, with bytes of it changed: never an error that is not ours."""
    content = bytearray((corpus / "3.wav").read_bytes())
    for offset in data.draw(st.lists(st.integers(0, 60), max_size=4)):
        content[offset] = data.draw(st.integers(0, 255))
    (corpus / "broken.wav").write_bytes(content[: data.draw(st.integers(0, len(content)))])
    hparams = replace(hparams, cache_mels=False)
    try:
        clips = load_list(hparams, data.draw(lists))
    except UserError as error:
        assert all(f"{corpus}/list.txt" in line for line in str(error).split("\n"))
    else:
        mels = open_mels(clips, hparams)
        for clip in clips:
            assert clip.ids and mels(clip).shape == (clip.n_frames, 10)
            assert np.isfinite(mels(clip)).all()


# Threads and the mel cache


def test_threads_keep_the_order_and_end_early_after_an_error_or_ctrl_c():
    assert map_in_threads(lambda i: i * i, range(1000), "squares") == [i * i for i in range(1000)]
    begun = []

    def interrupt(i):
        begun.append(i)
        time.sleep(0.001)
        if i == 200:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        map_in_threads(interrupt, range(5000), "interrupted")
    assert 200 < len(begun) < 5000


def files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.glob("cache/*")}


def test_only_what_the_cache_lacks_is_computed(corpus, hparams, clips):
    for settings, listed, n_missing in (
        (hparams, clips[1:5], 4),
        (hparams, clips[:4], 1),
        (hparams, clips[::-1], 3),
        (replace(hparams, batching_strategy="RAND"), clips, 0),
        (replace(hparams, mel_fmax=7000.0), clips, 8),
    ):
        before = files(corpus)
        mels, fresh = (open_mels(listed, replace(settings, cache_mels=c)) for c in (True, False))
        for clip in listed:
            np.testing.assert_array_equal(mels(clip), fresh(clip))
        assert before.items() <= files(corpus).items()
        assert len(files(corpus)) == len(before) + n_missing
    write_tone(corpus / "0.wav", 0.1)
    os.utime(corpus / "0.wav", (0, 0))
    before, changed = files(corpus), load_clips(hparams.training_files, hparams)
    open_mels(changed, hparams)
    assert len(files(corpus)) == len(before) + 1 and before.items() <= files(corpus).items()


def test_a_damaged_mel_is_computed_again(hparams, clips):
    mels = open_mels(clips, hparams)
    expected, path = mels(clips[0]), MelCache(hparams).path(clips[0])
    content = path.read_bytes()
    for damaged in (b"", b"damaged", content[:-100], content + content):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"^{path}: changed or removed .*; run again"):
            mels(clips[0])
        np.testing.assert_array_equal(open_mels(clips, hparams)(clips[0]), expected)
        assert path.read_bytes() == content


def test_runs_may_fill_the_cache_at_once(corpus, hparams):
    clips = load_clips(f"{corpus}/train.txt+{corpus}/val.txt", hparams)
    fork = multiprocessing.get_context("fork")
    runs = [fork.Process(target=open_mels, args=(clips, hparams)) for _ in range(3)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
        assert run.exitcode == 0
    assert not MelCache(hparams).missing(clips) and len(files(corpus)) == len(clips)
