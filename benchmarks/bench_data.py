"""Time what feeds the training: mels, their cache, collation, the loader, and the wait for it.

    python benchmarks/bench_data.py
    python benchmarks/bench_data.py --corpus data/LJSpeech-1.1 --clips 1000

Batches are those of the first epoch with the default settings. The last table has the share of
an epoch that a training of a given speed waits for its data: between two batches it sleeps for
as long as a step of that speed takes, as the CPU does while a GPU works.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile
import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error
from clips import Clip, load_clips
from data_utils import MelDataset, collate, make_loader, training_sampler
from hparams import HParams, create_hparams
from layers import MelSpectrogram
from mel_cache import open_mels
from scripts.plot_batching import ljspeech_lengths
from scripts.prepare_ljspeech import read_corpus


def make_clips(folder: Path, n: int) -> Path:
    """``n`` wavs of noise, as long as LJSpeech's clips are, and their filelist."""
    rng, lines = np.random.default_rng(0), []
    for i, frames in enumerate(rng.choice(ljspeech_lengths(276), n)):
        soundfile.write(folder / f"{i}.wav", rng.uniform(-0.3, 0.3, int(frames) * 276), 22050)
        lines.append(f"{i}.wav|{'noise ' * (int(frames) // 34 + 1)}\n")
    (folder / "list.txt").write_text("".join(lines))
    return folder / "list.txt"


def list_corpus(corpus: Path, folder: Path, n: int) -> Path:
    """A filelist of the first ``n`` clips of a corpus in LJSpeech's layout."""
    clips = list(read_corpus(corpus, HParams()).items())[:n]
    lines = [f"{(corpus / 'wavs' / name).resolve()}.wav|{text}\n" for name, text in clips]
    (folder / "list.txt").write_text("".join(lines))
    return folder / "list.txt"


def seconds(do: Callable[[], object], repeats: int) -> float:
    """Median time of a call."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        do()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def bench_mels(clips: list[Clip], hparams: HParams, repeats: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    spectrogram = MelSpectrogram(hparams)
    some = clips[:64]
    sounds = [torch.from_numpy(soundfile.read(clip.path, dtype="float32")[0]) for clip in some]
    speech = sum(map(len, sounds)) / hparams.sampling_rate
    took = seconds(lambda: [spectrogram(sound) for sound in sounds], repeats)
    torch.set_num_threads(threads)
    print(f"mels, one core: {len(some) / took:,.0f} clips/s, {speech / took:,.0f} s of speech/s")
    started = time.perf_counter()
    open_mels(clips, hparams)
    took = time.perf_counter() - started
    print(
        f"mel cache, all cores: {len(clips) / took:,.0f} clips/s ({len(clips):,} in {took:.1f} s)"
    )
    dataset = MelDataset(clips, open_mels(clips, hparams))
    items = [dataset[i] for i in range(hparams.batch_size)]
    took = seconds(lambda: collate(items), 10 * repeats)
    print(f"collate: {took * 1e3:.2f} ms for {len(items)} clips")


def walk(loader: DataLoader, device: torch.device, frames_per_second: float = 0) -> float:
    """Share of an epoch spent waiting for batches by a training of the given speed."""
    waited, started = 0.0, time.perf_counter()
    asked = started
    for batch in loader:
        waited += time.perf_counter() - asked
        batch = batch.to(device)
        if frames_per_second:
            time.sleep(batch.gate.numel() / frames_per_second)
        asked = time.perf_counter()
    return waited / (time.perf_counter() - started)


def bench_loader(
    clips: list[Clip],
    hparams: HParams,
    workers: int,
    cached: bool,
    args: argparse.Namespace,
    device: torch.device,
) -> None:
    """Prints a row: what the loader gives by itself, and the waits."""
    hparams = create_hparams(f"num_workers={workers},cache_mels={cached}", base=hparams)
    dataset = MelDataset(clips, open_mels(clips, hparams))
    loader = make_loader(dataset, training_sampler(clips, hparams), hparams)
    walk(loader, device)  # starts the workers
    took = seconds(lambda: walk(loader, device), args.repeats)
    real_frames = sum(clip.n_frames for clip in clips)
    cells = ["cached" if cached else "computed", str(workers)]
    cells += [f"{len(loader) / took:,.1f}", f"{real_frames / took:,.0f}"]
    for speed in args.frames_per_second:
        waits = [walk(loader, device, speed) for _ in range(args.repeats)]
        cells.append(f"{statistics.median(waits):.1%}")
    print(f"| {' | '.join(cells)} |")


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description="Time what feeds the training.")
    add = parser.add_argument
    add("--corpus", type=Path, metavar="DIR", help="in LJSpeech's layout (default: noise)")
    add("--clips", type=int, default=600, metavar="N", help="of them (default: %(default)s)")
    add("--workers", type=int, nargs="+", default=[0, 1, 2], metavar="N")
    add("--repeats", type=int, default=5, metavar="N", help="epochs (default: %(default)s)")
    speeds = [5_000, 20_000, 50_000, 100_000]
    what = "speeds of training, padded frames per second (default: %(default)s)"
    add("--frames_per_second", type=int, nargs="+", default=speeds, metavar="N", help=what)
    args = parser.parse_args()
    for name in ("clips", "repeats", "frames_per_second"):
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value < 1:
                raise UserError(f"--{name} {value}: use 1 or more")
    if args.clips < HParams().batch_size:
        raise UserError(f"--clips {args.clips}: use {HParams().batch_size} or more, for a batch")
    if min(args.workers) < 0:
        raise UserError(f"--workers {min(args.workers)}: use 0 or more")
    return args


def main() -> None:
    args = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.corpus:
            filelist = list_corpus(args.corpus, folder, args.clips)
        else:
            filelist = make_clips(folder, args.clips)
        hparams = create_hparams(f"data_dir={folder},mel_cache_dir={folder}/cache")
        clips = load_clips(str(filelist), hparams)
        bench_mels(clips, hparams, args.repeats)

        speeds = [f" at {speed:,} frames/s " for speed in args.frames_per_second]
        print("\nloading, and the share of an epoch that a training of each speed waits for it:\n")
        print("|".join(["", " mels ", " workers ", " batches/s ", " frames/s ", *speeds, ""]))
        print("|---|--:|--:|--:|" + "--:|" * len(speeds))
        for cached in (True, False):
            for workers in args.workers:
                bench_loader(clips, hparams, workers, cached, args, device)


if __name__ == "__main__":
    exit_on_user_error(main)
