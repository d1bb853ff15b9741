"""Filelists, every check of a clip, mel-spectrograms and their cache."""

import os
from dataclasses import replace
from pathlib import Path

import hypothesis
import librosa
import numpy as np
import pytest
import torch
from conftest import write_tone
from hypothesis import strategies as st

from cli import UserError
from corpus.audio import MelSpectrogram
from corpus.clips import check_samples, load_clips, raise_problems
from data_utils import MelCache, open_mels
from hparams import create_hparams
from text import text_to_sequence


def load_list(hparams, content):
    """The clips of a filelist with this content, and with good samples."""
    path = Path(hparams.data_dir, "list.txt")
    path.write_text(content, newline="", errors="surrogateescape")
    clips = load_clips(str(path), hparams)
    raise_problems(check_samples(clips))
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
    ours = MelSpectrogram(hparams)(torch.from_numpy(samples))
    options = {"n_fft": hparams.filter_length, "win_length": hparams.win_length}
    options |= {"hop_length": hparams.hop_length, "n_mels": 80, "fmin": 0, "fmax": 8000}
    theirs = librosa.feature.melspectrogram(
        y=samples, sr=22050, power=1.0, pad_mode="reflect", **options
    )
    assert ours.shape == (80, len(samples) // hparams.hop_length + 1)
    np.testing.assert_allclose(ours, np.log(np.clip(theirs, 1e-5, None)), atol=1e-4)


# Filelists


def test_filelists_of_other_systems_and_with_speakers_are_read(corpus, hparams, capsys):
    """Absolute paths, a + in its own, line ends of Windows, byte order marks, and a third field."""
    (corpus / "other.txt").write_text(f"{corpus}/9.wav|Dr. Tone\n")
    clips = load_clips(f"{corpus}/train.txt + {corpus}/other.txt", hparams)
    assert len(clips) == 9 and clips[0].path == f"{corpus}/0.wav"
    assert clips[8].path == f"{corpus}/9.wav" and clips[8].location == f"{corpus}/other.txt:1"
    assert clips[8].ids == text_to_sequence("doctor tone", ["basic_cleaners"])
    lines = "\ufeff0.wav|a tone|LJ\r\n\r\n1.wav|another\u2028tone\r\n2.wav|three | Ann \n"
    (corpus / "a+b.txt").write_text(lines, newline="")
    clips = load_clips(f"{corpus}/a+b.txt", hparams)
    assert [clip.text for clip in clips] == ["a tone", "another\u2028tone", "three"]
    assert [clip.location[-2:] for clip in clips] == [":1", ":3", ":4"]
    assert "/a+b.txt: 2 speakers become one voice; " in capsys.readouterr().out


# Checks


COMMENTS = b"LIST" + (12_000).to_bytes(4, "little") + 12_000 * b" "


@pytest.mark.parametrize(("kind", "metadata"), [("WAV", b""), ("WAV", COMMENTS), ("FLAC", b"")])
def test_a_cut_is_noticed(corpus, hparams, kind, metadata):
    path = corpus / "x.wav"
    write_tone(path, 0.1, subtype="PCM_16", format=kind)
    whole = path.read_bytes()
    whole = whole[:36] + metadata + whole[36:]
    path.write_bytes(whole)
    assert len(load_list(hparams, "x.wav|tone")) == 1
    path.write_bytes(whole[:-1000])
    with pytest.raises(UserError, match=r"list\.txt:1: .*/x\.wav: (cut off|not )"):
        load_list(hparams, "x.wav|tone")


@pytest.mark.parametrize("size", [4410 + 44, 0xFFFFFFFF, 0x7FFFF000])
def test_a_wav_may_count_its_header_or_come_from_a_pipe(corpus, hparams, size):
    """Recorders and programs write such sizes into its header, and nothing is missing."""
    path = corpus / "x.wav"
    write_tone(path, 0.1, subtype="PCM_16")
    n_frames, content = load_list(hparams, "x.wav|tone")[0].n_frames, bytearray(path.read_bytes())
    content[40:44] = size.to_bytes(4, "little")
    path.write_bytes(content)
    assert load_list(hparams, "x.wav|tone")[0].n_frames == n_frames


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


# The mel cache


def files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.glob("cache/*")}


def test_only_what_the_cache_lacks_is_computed(corpus, hparams, clips):
    for settings, listed, n_missing in (
        (hparams, clips[1:5], 4),
        (replace(hparams, batching_strategy="RAND"), clips[::-1], 4),
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
