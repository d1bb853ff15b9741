"""Measure everything on a GPU that is worth knowing there, and check that training is exact there.
Makes one report, for "On a GPU" in docs/performance.md.

    bash benchmarks/gpu_report.sh --output gpu_report      # --smoke: tiny, to try it on a CPU
    bash benchmarks/gpu_report.sh --parts Steps Memory     # some parts alone

The checks come first: the tests, and runs that are stopped, killed and resumed. Then five epochs of
training on noise, times and memory of steps, an epoch of LJSpeech by each batching, and the largest
batches that fit. Each part has its own budget, nine minutes in all; what it printed is written to
report.md when it ends, or when its time is over. A part that fails says so and does not stop the
others; a check that does not finish in time counts as failed.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import soundfile
import torch

from cli import ArgumentParser, exit_on_user_error, make_folder
from corpus.lengths import ljspeech_lengths
from training.device import device_name

ROOT = Path(__file__).resolve().parent.parent
BUDGETS = {  # seconds
    "Tests": 110,
    "Stops and kills": 50,
    "Five epochs of the full model": 80,
    "Steps": 110,
    "An epoch of LJSpeech": 110,
    "Memory": 80,
}
CHECKS = "Tests", "Stops and kills"
OVER = "(its time was over)"
STEP = "benchmarks/bench_step.py"
ALL = "--implementations reference scan triton scan+tf32 triton+tf32 scan+bf16 triton+bf16"
STEPS = (
    f"{STEP} --rounds 4 --frames 200 400 {ALL}",
    f"{STEP} --rounds 4 --frames 800 --batch_sizes 16 32 {ALL}",
)
EPOCHS = (
    f"{STEP} --epoch --rounds 3 --batches 4 --implementations reference triton",
    f"{STEP} --epoch --rounds 3 --batches 4 --implementations triton --batchings all",
)
TESTS = "tests/test_decoder_triton.py tests/test_decoder_scan.py tests/test_model.py -k 'not spill'"
SMALL = (
    "symbols_embedding_dim=8,encoder_embedding_dim=8,prenet_dim=8,attention_rnn_dim=12,"
    "attention_dim=6,attention_location_n_filters=4,attention_location_kernel_size=5,"
    "decoder_rnn_dim=10,postnet_embedding_dim=8,n_mel_channels=10"
)
SMOKE = f"{STEP} --implementations reference scan --hparams {SMALL}"


def run(seconds: float, *commands: str) -> str:
    """Returns what programs of this repository print, together within ``seconds``: of the one that
    is not done by then, what it has printed so far.

    Raises:
        RuntimeError: one of them fails.
    """
    printed, end = [], time.monotonic() + seconds
    for command in commands:
        options = {"cwd": ROOT, "text": True, "stdout": subprocess.PIPE, "start_new_session": True}
        arguments = [sys.executable, "-u", *shlex.split(command)]
        process = subprocess.Popen(arguments, **options, stderr=subprocess.STDOUT)
        try:
            output, _ = process.communicate(timeout=max(end - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the programs that it started
            output = process.communicate()[0] + f"\n{OVER}"
        else:
            if process.returncode:
                problem = f"{command} ended with status {process.returncode}"
                raise RuntimeError("\n".join([*printed, f"{problem}:\n{output[-2000:]}"]))
        printed.append(f"`python {command}`\n\n{output}")
    return "\n".join(printed)


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


def training(settings: str, output: Path, seconds: float) -> str:
    """Trains five epochs; returns what it prints, and a table of its times."""
    rows = ["| epoch | seconds | peak GiB | reserved | waiting for data |\n|---|--:|--:|--:|--:|"]
    printed = run(seconds, f"train.py -o {output} --hparams {settings},epochs=5")
    metrics = output / "metrics.jsonl"  # missing if time was over before training began
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    for record in map(json.loads, lines):
        if record["event"] == "epoch":
            seconds, wait = 60 * record["minutes"], record["data_wait"]
            peak, reserved = record["peak_memory_gib"], record.get("peak_reserved_gib", 0)
            memory = f"{peak:.2f} | {reserved:.2f}"
            rows.append(f"| {record['epoch'] + 1} | {seconds:.2f} | {memory} | {wait:.2%} |")
    return printed + "\n" + "\n".join(rows)


def main() -> None:
    parser = ArgumentParser(description="Measure what a GPU can do with this recipe.")
    parser.add_argument("--output", type=Path, default=Path("gpu_report"), help="%(default)s")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on a CPU too")
    names = ", ".join(BUDGETS)
    options = {"nargs": "+", "choices": BUDGETS, "default": [*BUDGETS], "metavar": "NAME"}
    parser.add_argument("--parts", **options, help=f"some of {names} (default: all)")
    args = parser.parse_args()
    make_folder(args.output, "give another --output")
    steps, epochs, tests = STEPS, EPOCHS, TESTS
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        steps = [re.sub(r" \w+\+(tf32|bf16)", "", step) for step in steps]
        tests = tests.replace("not spill", "not spill and not tf32 and not bf16")
    if args.smoke:
        steps = (f"{SMOKE} --rounds 1 --batch_sizes 2 --frames 8",)
        epochs, tests = (f"{SMOKE} --epoch --rounds 1 --batches 1",), "tests/test_decoder_scan.py"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report, failed = [f"# {device_name(device)}, PyTorch {torch.__version__}\n"], []
    with tempfile.TemporaryDirectory() as name:
        settings = write_corpus(Path(name, "corpus"), 40 if args.smoke else 320, args.smoke)
        limit = "--memory_gib 0.5 " if args.smoke else ""
        commands = {
            "Tests": (f"-m pytest -q {tests}",),
            "Stops and kills": ("-m pytest -q tests/test_resume.py -k random_moments",),
            "Steps": steps,
            "An epoch of LJSpeech": epochs,
            "Memory": (f"scripts/find_batch_capacity.py {limit}--hparams {settings},epochs=1",),
        }
        for title in args.parts:
            start, seconds = time.monotonic(), BUDGETS[title]
            try:
                if title in commands:
                    text = run(seconds, *commands[title])
                else:
                    text = training(settings, Path(name, "run"), seconds)
                if title in CHECKS and text.endswith(OVER):
                    raise RuntimeError(text)
            except Exception as error:
                text = f"FAILED: {type(error).__name__}: {error}"
                failed.append(title)
            report.append(f"## {title}\n\n{text}\n\n*{time.monotonic() - start:.0f} s*\n")
            print(report[-1], flush=True)
            (args.output / "report.md").write_text("\n".join(report), encoding="utf-8")
    if failed:
        sys.exit(f"FAILED: {', '.join(failed)}; see above")


if __name__ == "__main__":
    exit_on_user_error(main)
