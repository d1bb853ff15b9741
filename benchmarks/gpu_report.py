"""Check that training is exact on a GPU, and measure what is worth knowing there. Makes one
report, for "On a GPU" in docs/performance.md.

    bash benchmarks/gpu_report.sh --output gpu_report      # --smoke: tiny, to try it on a CPU
    bash benchmarks/gpu_report.sh --only tests steps       # these parts alone

Each part has its own time, ten minutes altogether. The programs print into report.md as they run.
A part that fails or takes too long says so and does not stop the others.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import soundfile
import torch

from cli import ArgumentParser, exit_on_user_error, make_folder
from corpus.lengths import ljspeech_lengths
from training.device import device_name

ROOT = Path(__file__).resolve().parent.parent
STEP = "benchmarks/bench_step.py"
ALL = "--implementations scan triton scan+tf32 triton+tf32 scan+bf16 triton+bf16"
# In this order: seconds, and programs. CORPUS: settings of a corpus of noise; RUN: a new folder.
PARTS = {
    "tests": (120, ["-m pytest -x -q tests/test_decoder_triton.py tests/test_device.py"]),
    "training": (90, ["train.py -o RUN --hparams CORPUS,epochs=5"]),
    "steps": (
        140,
        [
            f"{STEP} --rounds 3 --frames 400 --implementations reference triton",
            f"{STEP} --rounds 3 --frames 400 --batch_sizes 16 32 64 {ALL}",
        ],
    ),
    "epoch": (
        100,
        [f"{STEP} --epoch --rounds 3 --batches 4 --implementations triton --batchings all"],
    ),
    "memory": (50, ["scripts/find_batch_capacity.py --hparams CORPUS"]),
    "kills": (80, ["benchmarks/soak.py --runs 4"]),
}
SMALL = (
    "symbols_embedding_dim=8,encoder_embedding_dim=8,prenet_dim=8,attention_rnn_dim=12,"
    "attention_dim=6,attention_location_n_filters=4,attention_location_kernel_size=5,"
    "decoder_rnn_dim=10,postnet_embedding_dim=8,n_mel_channels=10"
)
TINY_STEP = f"{STEP} --implementations reference scan --hparams {SMALL} --rounds 1"
SMOKE = {
    "tests": (120, ["-m pytest -x -q tests/test_device.py"]),
    "training": PARTS["training"],
    "steps": (60, [f"{TINY_STEP} --batch_sizes 2 --frames 8"]),
    "epoch": (60, [f"{TINY_STEP} --epoch --batches 1"]),
    "memory": (100, ["scripts/find_batch_capacity.py --memory_gib 0.5 --hparams CORPUS"]),
    "kills": (200, ["benchmarks/soak.py --runs 1"]),
}


def run(command: str, end: float, report: TextIO) -> None:
    """Runs a program of this repository, which prints into ``report``, until the time ``end``.

    Raises:
        RuntimeError: it fails or takes too long.
    """
    report.write(f"`python {command}`\n\n")
    report.flush()
    program = subprocess.Popen(
        [sys.executable, *shlex.split(command)],
        cwd=ROOT,
        stdout=report,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    try:
        status = program.wait(max(end - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{command} was ended: the part's time is over") from None
    finally:
        if program.poll() is None:  # with the programs that it started
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()
    if status:
        raise RuntimeError(f"{command} ended with status {status}")


def write_corpus(folder: Path, n_clips: int, smoke: bool) -> str:
    """Writes noise of LJSpeech's lengths; returns the settings to train on it."""
    rng, lines = np.random.default_rng(0), []
    folder.mkdir()
    for i, length in enumerate(rng.choice(ljspeech_lengths(256), n_clips)):
        samples = rng.uniform(-0.3, 0.3, 256 * length // (20 if smoke else 1))
        soundfile.write(folder / f"{i}.wav", samples, 22050)
        lines.append(f"{i}.wav|{'noise ' * (length // 37 + 1)}\n")
    (folder / "train.txt").write_text("".join(lines[16:]))
    (folder / "val.txt").write_text("".join(lines[:16]))
    settings = f"data_dir={folder},training_files={folder}/train.txt"
    settings += f",validation_files={folder}/val.txt,mel_cache_dir={folder}/cache"
    return f"{settings},{SMALL},batch_size=4" if smoke else settings


def epochs_table(output: Path) -> str:
    """Returns a table of the epochs of a run."""
    rows = ["| epoch | seconds | peak GiB | waiting for data |\n|---|--:|--:|--:|"]
    for record in map(json.loads, (output / "metrics.jsonl").read_text().splitlines()):
        if record["event"] == "epoch":
            seconds, wait = 60 * record["minutes"], record["data_wait"]
            peak = record["peak_memory_gib"]
            rows.append(f"| {record['epoch'] + 1} | {seconds:.2f} | {peak:.2f} | {wait:.2%} |")
    return "\n".join(rows)


def main() -> None:
    parser = ArgumentParser(description="Measure what a GPU can do with this recipe.")
    parser.add_argument("--output", type=Path, default=Path("gpu_report"), help="%(default)s")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on a CPU too")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts")
    args = parser.parse_args()
    make_folder(args.output, "give another --output")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    failed = []
    with (
        (args.output / "report.md").open("w", encoding="utf-8") as report,
        tempfile.TemporaryDirectory() as name,
    ):
        report.write(f"# {device_name(device)}, PyTorch {torch.__version__}\n\n")
        folder = Path(name)
        corpus = write_corpus(folder / "corpus", 40 if args.smoke else 320, args.smoke)
        for title in args.only:
            seconds, commands = (SMOKE if args.smoke else PARTS)[title]
            print(f"{title}: up to {seconds} s", flush=True)
            report.write(f"## {title}\n\n")
            start = time.monotonic()
            try:
                for command in commands:
                    command = command.replace("CORPUS", corpus).replace("RUN", f"{folder}/run")
                    run(command, start + seconds, report)
                if title == "training":
                    report.write(f"\n{epochs_table(folder / 'run')}\n")
            except Exception as error:
                problem = f"FAILED: {type(error).__name__}: {error}"
                print(problem, flush=True)
                report.write(f"\n{problem}\n")
                failed.append(title)
            report.write(f"\n*{time.monotonic() - start:.0f} s*\n\n")
            report.flush()
    print(f"{args.output}/report.md")
    if failed:
        sys.exit(f"FAILED: {', '.join(failed)}; see {args.output}/report.md")


if __name__ == "__main__":
    exit_on_user_error(main)
