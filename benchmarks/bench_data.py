"""Time data loading: mels, their cache, collation, the loader, and how long training waits.

    python benchmarks/bench_data.py
    python benchmarks/bench_data.py --corpus data/LJSpeech-1.1 --clips 1000

Batches are those of the first epoch with the default settings. The last table shows the share of
an epoch that a training of a given speed waits for its data: between two batches it sleeps for as
long as a step of that speed takes, as the CPU does while a GPU works.
"""

import math
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from timeit import repeat, timeit

import numpy as np
import soundfile
import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error, positive
from clips import Clip
from data_utils import MelDataset, collate, training_sampler
from hparams import HParams, create_hparams
from layers import MelSpectrogram
from loaders import open_loader
from mel_cache import open_mels
from scripts.lengths import ljspeech_lengths
from scripts.prepare_corpus import read_corpus


def write_noise(corpus: Path, n_samples: Iterable[int]) -> None:
    """Write clips of noise, in LJSpeech's layout."""
    rng, rows = np.random.default_rng(0), []
    (corpus / "wavs").mkdir()
    for i, n in enumerate(n_samples):
        soundfile.write(corpus / f"wavs/{i}.wav", rng.uniform(-0.3, 0.3, n), 22050)
        rows.append(f"{i}|{'noise ' * (n // 9384 + 1)}\n")
    (corpus / "metadata.csv").write_text("".join(rows))


def bench_mels(clips: list[Clip], hparams: HParams, repeats: int) -> MelDataset:
    """Time the mels of the clips, their cache, and their collation."""
    threads, spectrogram = torch.get_num_threads(), MelSpectrogram(hparams)
    torch.set_num_threads(1)
    sounds = [torch.from_numpy(soundfile.read(c.path, dtype="float32")[0]) for c in clips[:64]]
    speech = sum(map(len, sounds)) / hparams.sampling_rate
    took = np.median(repeat(lambda: list(map(spectrogram, sounds)), number=1, repeat=repeats))
    torch.set_num_threads(threads)
    print(f"mels, one core: {len(sounds) / took:,.0f} clips/s, {speech / took:,.0f} s of speech/s")
    took = timeit(lambda: open_mels(clips, hparams), number=1)
    print(f"mel cache, all cores: {len(clips) / took:,.0f} clips/s")
    dataset = MelDataset(clips, open_mels(clips, hparams))
    items = [dataset[i] for i in range(hparams.batch_size)]
    took = np.median(repeat(lambda: collate(items), number=1, repeat=10 * repeats))
    print(f"collate: {1e3 * took:.2f} ms for {len(items)} clips")
    return dataset


def walk(loader: DataLoader, speed: float = math.inf) -> tuple[float, float]:
    """Seconds of an epoch of a training of ``speed`` frames/s, and the share that it waits."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    busy, started = 0.0, time.perf_counter()
    for batch in loader:
        received = time.perf_counter()
        batch.to(device)
        time.sleep(batch.gate.numel() / speed)
        busy += time.perf_counter() - received
    seconds = time.perf_counter() - started
    return seconds, 1 - busy / seconds


def main() -> None:
    parser = ArgumentParser(description="Time data loading.")
    add = parser.add_argument
    add("--corpus", type=Path, metavar="DIR", help="corpus of one speaker (default: noise)")
    add("--clips", type=positive, default=600, metavar="N", help="how many (%(default)s)")
    add(
        "--workers",
        type=int,
        nargs="+",
        default=[0, 1, 2],
        metavar="N",
        help="loader processes (%(default)s)",
    )
    add("--repeats", type=positive, default=5, metavar="N", help="epochs per row (%(default)s)")
    speeds = [20_000, 50_000, 100_000]
    add("--frames_per_second", type=positive, nargs="+", default=speeds, metavar="N",
        help="training speeds to simulate, in padded frames (%(default)s)")  # fmt: skip
    args = parser.parse_args()
    if args.clips < HParams.batch_size:
        raise UserError(f"--clips {args.clips}: use {HParams.batch_size} or more, for a batch")
    create_hparams(f"num_workers={min(args.workers)}")  # refuses what cannot be

    with tempfile.TemporaryDirectory() as name:
        if not args.corpus:
            rng = np.random.default_rng(0)
            write_noise(Path(name), rng.choice(ljspeech_lengths(hop_length=1), args.clips))
        hparams = create_hparams(f"mel_cache_dir={name}/cache")
        clips = read_corpus(args.corpus or Path(name), hparams)[: args.clips]
        n_frames = sum(clip.n_frames for clip in clips)
        dataset = bench_mels(clips, hparams, args.repeats)

        print("\nloading, and the share of an epoch that training waits for it at each speed:\n")
        titles = "".join(f" at {speed:,} frames/s |" for speed in args.frames_per_second)
        print(f"| workers | batches/s | frames/s |{titles}")
        print("|--:|--:|--:|" + "--:|" * len(args.frames_per_second))
        for workers in args.workers:
            with open_loader(dataset, training_sampler(clips, hparams), collate, workers) as loader:
                medians = [
                    np.median([walk(loader, speed) for _ in range(args.repeats)], axis=0)
                    for speed in (math.inf, *args.frames_per_second)
                ]
            seconds = medians[0][0]
            row = f"| {workers} | {len(loader) / seconds:,.1f} | {n_frames / seconds:,.0f} |"
            print(row + "".join(f" {share:.1%} |" for _, share in medians[1:]))


if __name__ == "__main__":
    exit_on_user_error(main)
