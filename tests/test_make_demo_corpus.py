"""The demo corpus: LJSpeech's layout and spread of durations, the same bytes in every run."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from scripts import make_demo_corpus as demo


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def make(folder: Path, clips: int = 40) -> str:
    """What the program prints, in a process of its own: what espeak-ng has said changes what it
    says next."""
    options = ["--clips", str(clips), "--duration_scale", "0.4"]
    done = subprocess.run([sys.executable, demo.__file__, folder, *options], capture_output=True)
    return (done.stdout + done.stderr).decode()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus, not to be changed."""
    folder = tmp_path_factory.mktemp("demo") / "new" / "corpus"
    make(folder)
    return folder


def test_every_clip_is_speech_and_lengths_are_spread_as_ljspeechs(corpus):
    rows = [line.split("|") for line in (corpus / "metadata.csv").read_text().splitlines()]
    assert len(rows) == 40 and all(text == normalised for _, text, normalised in rows)
    assert len({text for _, text, _ in rows}) > 35
    seconds = []
    for name, text, _ in rows:
        with soundfile.SoundFile(corpus / f"wavs/{name}.wav") as file:
            assert (file.subtype, file.channels, file.samplerate) == ("PCM_16", 1, 22050)
            samples = file.read(dtype="int16").astype(int)
        seconds.append(len(samples) / 22050)
        assert text[0].isupper() and text[-1] in ".!?" and 6 < len(text) / seconds[-1] < 20
        assert np.sqrt(np.mean(samples**2)) > 2000 and np.abs(samples).max() < 32767
        assert np.diff(np.flatnonzero(samples)).max() < 50  # no digital silence: it has no log
    frames = np.loadtxt(demo.LENGTHS, int, delimiter=",", skiprows=1)[:, 0]
    for share in (0.1, 0.25, 0.5, 0.75, 0.9):
        expected = 0.4 * np.quantile(frames, share) * 256 / 22050
        assert np.quantile(seconds, share) == pytest.approx(expected, rel=0.1)


def test_a_half_made_corpus_is_made_whole_with_the_same_bytes(corpus, tmp_path):
    shutil.copytree(corpus, tmp_path, dirs_exist_ok=True)
    (tmp_path / "metadata.csv").unlink()  # as an interrupted run leaves it
    for i in range(20, 41):
        (tmp_path / f"wavs/DM001-{i:04d}.wav").unlink()
    make(tmp_path)
    assert contents(tmp_path) == contents(corpus)


def test_a_corpus_is_made_once_and_another_does_not_replace_it(corpus):
    before = contents(corpus)
    assert make(corpus) == f"{corpus}: already there, 40 clips\n"
    assert make(corpus, clips=41).startswith(f"error: {corpus}: has files not made with --clips 41")
    assert contents(corpus) == before
