"""Train a small Conv-TasNet to remove noise from speech, with one batching strategy.

    export PYTHONPATH=.  # the root of this repository, which has batching.py
    train=examples/speech_enhancement/train.py
    python $train WAVS -o sorted.json --strategy SB --batch_size 4         # 4 clips a batch
    python $train WAVS -o bucket.json --strategy BKT --batch_seconds 8     # 8 s a batch

After Gonzalez et al., "On batching variable size inputs for training end-to-end speech enhancement
systems" (2023); section numbers are theirs. Shapes: B batch, T samples, K frames, C channels.
"""

import argparse
import glob
import json
import math
import resource
import sys
import time
from pathlib import Path

import numpy as np
import soundfile
import torch
from numpy import ndarray
from scipy.signal import resample_poly, welch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from batching import EpochBatchSampler, batch_statistics

SAMPLING_RATE = 8000  # Hz


def stop(message: str) -> None:
    """Ends the program with one line and the status of a wrong argument."""
    print(message, file=sys.stderr)
    raise SystemExit(2)


def read_clips(folder: Path) -> list[ndarray]:
    """Returns the wavs and flacs below ``folder``, sorted by name, (T,) each, equally loud."""
    # glob leaves out what is hidden, and follows links.
    files = glob.glob("**", root_dir=folder, recursive=True)
    paths = sorted(folder / file for file in files if file.lower().endswith((".wav", ".flac")))
    clips = []
    if len(paths) < 16:
        stop(f"{folder}: has {len(paths)} wavs and flacs; give a folder with at least 16")
    for path in paths:
        try:
            samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
        except (OSError, ValueError, soundfile.LibsndfileError) as error:  # ValueError: no length
            stop(f"{path}: {error}; replace it or take it out")
        if not np.isfinite(samples).all() or not samples.mean(1).any():
            stop(f"{path}: has no sound; take it out")
        clips.append(resample(samples.mean(1), SAMPLING_RATE, rate))
    return clips


def resample(samples: ndarray, up: int, down: int) -> ndarray:
    """Returns (T * up / down,) samples with an RMS of 0.1."""
    samples = resample_poly(samples, up, down).astype(np.float32)
    return samples * np.float32(0.1 / np.sqrt(np.square(samples).mean() + 1e-12))


def shaped_noise(magnitudes: ndarray, rng: np.random.Generator) -> ndarray:
    """Returns a minute of noise with these magnitudes (129,) from 0 Hz to half the rate."""
    spectrum = np.fft.rfft(rng.standard_normal(60 * SAMPLING_RATE))
    bins = np.linspace(0, len(magnitudes) - 1, len(spectrum))
    return np.fft.irfft(spectrum * np.interp(bins, np.arange(len(magnitudes)), magnitudes))


def split_long(lengths: list[int], longest: int) -> ndarray:
    """Cuts clips longer than ``longest`` into equal pieces (Sec. 4). Returns the clip, start and
    end of each piece, (n_pieces, 3); a short clip is one piece."""
    pieces = []
    for clip, length in enumerate(lengths):
        n = math.ceil(length / longest)
        pieces += [(clip, i * length // n, (i + 1) * length // n) for i in range(n)]
    return np.array(pieces)


class Mixtures(Dataset):
    """Pairs of a mixture and its speech, (T,) each: of whole clips, or of pieces of long ones.

    Args:
        longest: a piece's number of samples at most, or None; longer ones are split (Sec. 4).
        mismatched: makes the voice lower and slower, and the noise pink, in four bursts a second.
    """

    def __init__(self, clips: list, seed: int, longest: int | None = None, mismatched=False):
        self.seed, self.mismatched, rng = seed, mismatched, np.random.default_rng(seed)
        if mismatched:
            self.clips = [resample(clip, 6, 5) for clip in clips]
            pink = shaped_noise(1 / np.sqrt(np.arange(1, 130)), rng)
            self.noise = pink * np.sin(4 * np.pi * np.arange(len(pink)) / SAMPLING_RATE) ** 4
        else:
            _, power = welch(np.concatenate(clips), nperseg=256)  # (129,)
            self.clips, self.noise = clips, shaped_noise(np.sqrt(power), rng)
        lengths = [len(clip) for clip in self.clips]
        self.pieces = split_long(lengths, longest or max(lengths))  # clip, start, end
        self.lengths = self.pieces[:, 2] - self.pieces[:, 1]
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Mixes every clip with new noise, which does not depend on the batching."""
        self.mixtures = [self.make(i, epoch) for i in range(len(self.clips))]

    def make(self, i: int, epoch: int) -> ndarray:
        """Returns (T,) clip ``i`` in speech-shaped noise or in babble of eight other clips."""
        rng, speech = np.random.default_rng((self.seed, epoch, i)), self.clips[i]
        if self.mismatched or rng.random() < 0.5:
            recordings = [self.noise]
        else:
            others = np.delete(np.arange(len(self.clips)), i)
            talkers = rng.choice(others, min(8, len(others)), replace=False)
            recordings = [self.clips[talker] for talker in talkers]
        # Each starts at a random point and repeats.
        rolled = (np.roll(recording, rng.integers(len(recording))) for recording in recordings)
        noise = sum(np.resize(recording, len(speech)) for recording in rolled)
        snr = rng.uniform(-5, 10)  # dB (Sec. 4)
        gain = np.linalg.norm(speech) / (np.linalg.norm(noise) + 1e-6) * 10 ** (-snr / 20)
        return (speech + gain * noise).astype(np.float32)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        clip, start, end = self.pieces[i]
        pair = self.mixtures[clip], self.clips[clip]
        return tuple(torch.from_numpy(signal[start:end]) for signal in pair)


def collate(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mixtures (B, T) and speech (B, T), padded with zeros, and lengths (B,)."""
    mixtures, speech = zip(*pairs, strict=True)
    lengths = torch.tensor([len(signal) for signal in speech])
    return pad_sequence(mixtures, batch_first=True), pad_sequence(speech, batch_first=True), lengths


class CumulativeNorm(nn.Module):
    """cLN: normalises each frame by the mean and variance of all frames up to it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels, 1))
        self.bias = nn.Parameter(torch.zeros(channels, 1))

    def forward(self, x: Tensor) -> Tensor:  # (B, C, K) → (B, C, K)
        count = torch.arange(1, x.shape[2] + 1) * x.shape[1]
        mean = x.sum(1, keepdim=True).cumsum(2) / count  # (B, 1, K)
        power = x.square().sum(1, keepdim=True).cumsum(2) / count
        scale = (power - mean.square()).clamp(min=0).add(1e-5).rsqrt()
        return torch.addcmul(self.bias, torch.addcmul(-mean * scale, x, scale), self.gain)


class Depthwise(nn.Module):
    """A causal convolution of three frames in each channel, written by hand, since nn.Conv1d
    compiles a kernel for every new number of frames on a CPU."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.weights = nn.Parameter(torch.empty(3, channels, 1).uniform_(-(3**-0.5), 3**-0.5))
        self.bias = nn.Parameter(torch.zeros(channels, 1))

    def forward(self, x: Tensor) -> Tensor:  # (B, C, K) → (B, C, K)
        past, total = nn.functional.pad(x, (2 * self.dilation, 0)), self.bias
        for i, weight in enumerate(self.weights):
            total = torch.addcmul(total, past.narrow(2, i * self.dilation, x.shape[2]), weight)
        return total


class ConvTasNet(nn.Module):
    """A causal Conv-TasNet with one output (Sec. 3). Letters are the paper's: N filters of L
    samples, B channels, H inside a block, X blocks with P = 3."""

    def __init__(self, N: int = 64, L: int = 64, B: int = 32, H: int = 64, X: int = 5) -> None:
        super().__init__()
        self.hop = L // 2
        self.encoder = nn.Conv1d(1, N, L, self.hop, bias=False)
        self.bottleneck = nn.Sequential(CumulativeNorm(N), nn.Conv1d(N, B, 1))
        self.blocks = nn.ModuleList()
        for x in range(X):
            widen = [nn.Conv1d(B, H, 1), nn.PReLU(), CumulativeNorm(H)]
            convolve = [Depthwise(H, 2**x), nn.PReLU(), CumulativeNorm(H)]
            self.blocks.append(nn.Sequential(*widen, *convolve, nn.Conv1d(H, 2 * B, 1)))
        self.mask = nn.Sequential(nn.PReLU(), nn.Conv1d(B, N, 1), nn.Sigmoid())
        self.decoder = nn.ConvTranspose1d(N, 1, L, self.hop, bias=False)

    def forward(self, mixture: Tensor) -> Tensor:  # (B, T) → (B, T)
        # Every sample lies in two windows, whatever padding follows.
        n_samples, hop = mixture.shape[1], self.hop
        padded = nn.functional.pad(mixture, (hop, 2 * hop - n_samples % hop))
        encoded = self.encoder(padded[:, None]).relu()  # (B, N, K)
        x, total = self.bottleneck(encoded), 0.0
        for block in self.blocks:
            residual, skip = block(x).chunk(2, dim=1)
            x, total = x + residual, total + skip
        return self.decoder(encoded * self.mask(total))[:, 0, hop : hop + n_samples]


def masked_snr(estimate: Tensor, speech: Tensor, lengths: Tensor) -> Tensor:
    """Returns the SNR in dB of each estimate (B, T), without padding (Fig. 1): (B,)."""
    mask = torch.arange(speech.shape[1]) < lengths[:, None]
    signal, error = ((x * mask).square().sum(1) for x in (speech, estimate - speech))
    return 10 * torch.log10((signal + 1e-3) / (error + 1e-3))  # a pause has no signal


@torch.no_grad()
def snr_improvement(model: nn.Module, clips: list, mismatched: bool) -> float:
    """Returns by how many dB outputs are better than mixtures: always the same four of a clip."""
    data, gains = Mixtures(clips, seed=2**31, mismatched=mismatched), []
    for epoch in range(4):
        data.set_epoch(epoch)
        for pair in data:
            mixture, speech, lengths = collate([pair])
            after = masked_snr(model(mixture), speech, lengths)
            gains.append(float(after - masked_snr(mixture, speech, lengths)))
    return float(np.mean(gains))


def peak_memory() -> float:
    """Returns the process's peak so far, in megabytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def train(args: argparse.Namespace) -> dict:
    """Trains and evaluates a model; returns everything that the table needs."""
    clips = read_clips(args.wavs)
    held_out, training = clips[::8], [clip for i, clip in enumerate(clips) if i % 8]
    # A capacity is a number of samples. A mixture that would not fit into a batch is split.
    capacity = args.batch_seconds and round(args.batch_seconds * SAMPLING_RATE)
    data = Mixtures(training, seed=args.seed, longest=capacity)
    sampler = EpochBatchSampler(
        data.lengths,
        seed=1000 * args.seed,  # an epoch's plan depends on seed + epoch
        strategy=args.strategy,
        dynamic_batch_size=capacity is not None,
        batch_size=args.batch_size or 1,
        capacity=capacity,
        bucket_edges="uniform",  # BKT: ten buckets, with limits at equal distances (Sec. 4)
    )
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)

    torch.manual_seed(args.seed)
    model = ConvTasNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)  # Sec. 3
    model(torch.zeros(1, 800)).sum().backward()  # loads libraries, which are not counted
    before, seconds, cpu_seconds, losses, plans = peak_memory(), 0.0, 0.0, [], []
    for epoch in range(args.epochs):
        data.set_epoch(epoch)
        total, start, cpu_start = 0.0, time.perf_counter(), time.process_time()
        for mixture, speech, lengths in loader:  # in every iteration the next epoch
            loss = -masked_snr(model(mixture), speech, lengths).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=5.0)  # Sec. 3
            optimizer.step()
            total += loss.item() * len(lengths)
        losses.append(total / len(data))
        seconds += time.perf_counter() - start
        cpu_seconds += time.process_time() - cpu_start
        plans.append(batch_statistics(data.lengths, sampler.plan))

    return {
        **{name: value for name, value in vars(args).items() if name not in ("wavs", "output")},
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "memory_mb": peak_memory() - before,
        "zpr": float(np.mean([plan.zpr_of_data for plan in plans])),  # eq. 1
        "batches": float(np.mean([plan.n_batches for plan in plans])),
        "largest_batch_seconds": max(plan.max_padded_length for plan in plans) / SAMPLING_RATE,
        "losses": losses,
        "matched": snr_improvement(model, held_out, mismatched=False),
        "mismatched": snr_improvement(model, held_out, mismatched=True),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a small Conv-TasNet to remove noise.")
    parser.register("type", Path, lambda path: Path(path).expanduser())
    add = parser.add_argument
    add("wavs", type=Path, help="folder of wavs of any sampling rate, and of folders with wavs")
    add("-o", "--output", type=Path, required=True, help="result file (json)")
    add("--strategy", choices=("RAND", "SB", "BKT"), default="RAND", help="default RAND")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--batch_size", type=int, help="fixed: clips in a batch")
    size.add_argument("--batch_seconds", type=float, help="dynamic: seconds in a padded batch")
    add("--seed", type=int, default=0, help="seed of weights, mixtures and batches (default 0)")
    add("--epochs", type=int, default=8, help="default 8")
    args = parser.parse_args(argv)
    size = args.batch_seconds if args.batch_size is None else args.batch_size
    if not 0.1 <= size < 1e6 or args.epochs < 1 or args.seed < 0:
        stop("use 1 or more for --batch_size and --epochs, 0.1 for --batch_seconds, 0 for --seed")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    result = train(args)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{args.output}: ΔSNR {result['matched']:.2f} dB, {result['seconds']:.0f} s")


if __name__ == "__main__":
    main()
