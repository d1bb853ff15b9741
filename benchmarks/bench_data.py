"""Time what feeds the training: mels, their cache, collation, the loader, and the wait for it.

    python benchmarks/bench_data.py
    python benchmarks/bench_data.py --corpus data/LJSpeech-1.1 --clips 1000

Batches are those of the first epoch with the default settings. The last table shows the share of
an epoch that a training of a given speed waits for its data: between two batches it sleeps for as
long as a step of that speed takes, as the CPU does while a GPU works.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import soundfile
import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error, positive
from clips import Clip, load_clips
from data_utils import MelDataset, collate, make_loader, training_sampler
from hparams import HParams, create_hparams
from layers import MelSpectrogram
from mel_cache import open_mels
from scripts.lengths import ljspeech_lengths
from scripts.prepare_ljspeech import read_corpus


def noise_lines(folder: Path, n: int) -> list[str]:
    """Write ``n`` wavs of noise, as long as LJSpeech's clips; returns their filelist."""
    rng, lines = np.random.default_rng(0), []
    for i, frames in enumerate(rng.choice(ljspeech_lengths(276), n).tolist()):
        soundfile.write(folder / f"{i}.wav", rng.uniform(-0.3, 0.3, frames * 276), 22050)
        lines.append(f"{i}.wav|{'noise ' * (frames // 34 + 1)}\n")
    return lines


def corpus_lines(corpus: Path, n: int) -> list[str]:
    """A filelist of the first ``n`` clips of a corpus in LJSpeech's layout."""
    clips = read_corpus(corpus, HParams())[:n]
    return [f"{Path(clip.path).resolve()}|{clip.text}\n" for clip in clips]


def seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def bench_mels(clips: list[Clip], hparams: HParams, repeats: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    spectrogram = MelSpectrogram(hparams)
    sounds = [torch.from_numpy(soundfile.read(c.path, dtype="float32")[0]) for c in clips[:64]]
    speech = sum(map(len, sounds)) / hparams.sampling_rate
    took = median(seconds(lambda: [spectrogram(s) for s in sounds]) for _ in range(repeats))
    torch.set_num_threads(threads)
    print(f"mels, one core: {len(sounds) / took:,.0f} clips/s, {speech / took:,.0f} s of speech/s")
    took = seconds(lambda: open_mels(clips, hparams))
    n = len(clips)
    print(f"mel cache, all cores: {n / took:,.0f} clips/s ({n:,} in {took:.1f} s)")
    dataset = MelDataset(clips, open_mels(clips, hparams))
    items = [dataset[i] for i in range(hparams.batch_size)]
    took = median(seconds(lambda: collate(items)) for _ in range(10 * repeats))
    print(f"collate: {took * 1e3:.2f} ms for {len(items)} clips")


def walk(loader: DataLoader, device: torch.device, speed: float = math.inf) -> tuple[float, float]:
    """Seconds of an epoch, and of its waits for batches, of a training of ``speed`` frames/s."""
    waited, started = 0.0, time.perf_counter()
    asked = started
    for batch in loader:
        waited += time.perf_counter() - asked
        batch = batch.to(device)
        time.sleep(batch.gate.numel() / speed)
        asked = time.perf_counter()
    return time.perf_counter() - started, waited


def bench_loader(clips: list[Clip], hparams: HParams, args: argparse.Namespace) -> None:
    """Print a row for each way to load: its own speed, and the waits."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    speeds = [f"at {speed:,} frames/s" for speed in args.frames_per_second]
    print("\nloading, and the share of an epoch that a training of each speed waits for it:\n")
    print("|", " | ".join(["mels", "workers", "batches/s", "frames/s", *speeds]), "|")
    print("|---|--:|--:|--:|" + "--:|" * len(speeds))
    n_frames = sum(clip.n_frames for clip in clips)
    for name in ("cached", "computed"):
        hparams = create_hparams(f"cache_mels={name == 'cached'}", base=hparams)
        dataset = MelDataset(clips, open_mels(clips, hparams))
        for workers in args.workers:
            hparams = create_hparams(f"num_workers={workers}", base=hparams)
            loader = make_loader(dataset, training_sampler(clips, hparams), hparams)
            walk(loader, device)  # starts the workers
            took = median(walk(loader, device)[0] for _ in range(args.repeats))
            cells = [name, str(workers), f"{len(loader) / took:,.1f}", f"{n_frames / took:,.0f}"]
            for speed in args.frames_per_second:
                walks = [walk(loader, device, speed) for _ in range(args.repeats)]
                cells.append(f"{median(waited / took for took, waited in walks):.1%}")
            print("|", " | ".join(cells), "|")


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description="Time what feeds the training.")
    add = parser.add_argument
    add("--corpus", type=Path, metavar="DIR", help="in LJSpeech's layout (default: noise)")
    add("--clips", type=positive, default=600, metavar="N", help="of them (default: %(default)s)")
    add("--workers", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="%(default)s")
    add("--repeats", type=positive, default=5, metavar="N", help="epochs (default: %(default)s)")
    speeds = [5_000, 20_000, 50_000, 100_000]
    what = "speeds of training, padded frames per second (default: %(default)s)"
    add("--frames_per_second", type=positive, nargs="+", default=speeds, metavar="N", help=what)
    args = parser.parse_args()
    if args.clips < HParams.batch_size:
        raise UserError(f"--clips {args.clips}: use {HParams.batch_size} or more, for a batch")
    if min(args.workers) < 0:
        raise UserError(f"--workers {min(args.workers)}: use 0 or more")
    return args


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, filelist = Path(name), Path(name, "list.txt")
        corpus = args.corpus
        lines = corpus_lines(corpus, args.clips) if corpus else noise_lines(folder, args.clips)
        filelist.write_text("".join(lines))
        hparams = create_hparams(f"data_dir={folder},mel_cache_dir={folder}/cache")
        clips = load_clips(str(filelist), hparams)
        bench_mels(clips, hparams, args.repeats)
        bench_loader(clips, hparams, args)


if __name__ == "__main__":
    exit_on_user_error(main)
