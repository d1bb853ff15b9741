"""The demo corpus: LJSpeech's layout and spread of durations, the same bytes in every run."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from conftest import contents

from scripts import make_demo_corpus as demo


def make(folder: Path) -> str:
    """Returns what the program prints, in a process of its own: what espeak-ng has said changes
    what it says next."""
    options = ["--clips", "40", "--duration_scale", "0.4"]
    return subprocess.check_output([sys.executable, demo.__file__, folder, *options], text=True)


def test_a_half_made_corpus_is_made_whole_with_the_same_bytes_and_a_whole_one_only_once(tmp_path):
    corpus = tmp_path / "new" / "corpus"
    make(corpus)
    whole = contents(corpus)
    assert make(corpus) == f"{corpus}: already there, 40 clips\n"
    (corpus / "metadata.csv").unlink()  # as an interrupted run leaves it
    for i in range(20, 41):
        (corpus / f"wavs/DM001-{i:04d}.wav").unlink()
    make(corpus)
    assert contents(corpus) == whole


def test_every_clip_is_speech_and_lengths_are_spread_as_ljspeechs(tmp_path):
    make(tmp_path)
    rows = [line.split("|") for line in (tmp_path / "metadata.csv").read_text().splitlines()]
    assert len(rows) == 40 and len({text for _, text, _ in rows}) > 35
    seconds = []
    for name, text, _ in rows:
        samples, rate = soundfile.read(tmp_path / f"wavs/{name}.wav")
        seconds.append(len(samples) / rate)
        assert rate == 22050 and 6 < len(text) / seconds[-1] < 20
        assert np.sqrt(np.mean(samples**2)) > 0.06 and np.abs(samples).max() < 1
    frames = np.loadtxt(demo.LENGTHS, int, delimiter=",", skiprows=1)[:, 0]
    for share in (0.1, 0.5, 0.9):
        expected = 0.4 * np.quantile(frames, share) * 256 / 22050
        assert np.quantile(seconds, share) == pytest.approx(expected, rel=0.1)
