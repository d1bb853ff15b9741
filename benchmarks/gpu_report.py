"""Measure everything on a GPU that is worth knowing there, in at most nine minutes.

    bash benchmarks/gpu_report.sh --output gpu_report      # --smoke: tiny, to try it on a CPU

Writes report.md and report.json after each part. A part that fails says so and does not stop the
others: times and memory of steps; an epoch of LJSpeech by each batching; five epochs of training on
noise, repeated bit for bit, with a stop and a resume in between; the tests; and the largest batches
that fit.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from benchmarks.bench_step import Shape, epoch_shapes, noise_batch, open_pool, take_step
from benchmarks.soak import MODEL, write_noise
from cli import ArgumentParser, exit_on_user_error
from corpus.lengths import ljspeech_lengths
from decoder import check_fast_path
from hparams import create_hparams
from model import Tacotron2
from training.checkpoint import load_newest
from training.device import choose_device, device_name, synchronize

ROOT = Path(__file__).resolve().parent.parent
Rows = list[dict[str, Any]]
GPU = torch.cuda.is_available()
IMPLEMENTATIONS = ("nvidia", "scan", *["triton"] * GPU)
PRECISIONS = ("", *["+tf32"] * GPU, "+bf16")
PAPER_MINUTES = {  # of an epoch, in the paper's Table 2
    "RAND": 32.82, "SB": 21.67, "SSB": 23.06, "BKT-BR": 22.70, "ATS-BR": 22.68,
    "SB-DBS": 17.58, "SSB-DBS": 19.39, "SSB-DBS-BR": 19.28,
}  # fmt: skip


def call(*command: object, seconds: float) -> str:
    """What a program of this repository prints."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr[-500:]}")
    return done.stdout


def tests(smoke: bool) -> Rows:
    files = ["tests/test_decoder_triton.py", "tests/test_decoder_scan.py", "tests/test_model.py"]
    printed = call("-m", "pytest", "-v", *(files[1:2] if smoke else files), seconds=150)
    return [{"tests": printed.strip().splitlines()[-1]}]


def checks(smoke: bool) -> Rows:
    """How long the fast path is checked before training, with and without compiling."""
    hparams = create_hparams(MODEL if smoke else "")
    device = choose_device(hparams)
    model = Tacotron2(hparams).to(device)
    batch, rows = noise_batch(hparams, [20, 15], [10, 10]).to(device), []
    for name in ("first", "second"):
        start = time.perf_counter()
        notes = "; ".join(check_fast_path(model, batch))
        synchronize(device)
        row = {"check": name, "s": time.perf_counter() - start}
        rows.append(row | {"decoder": model.decoder.implementation, "notes": notes})
    return rows


def timed(name: str, shapes: list[Shape], rounds: int, smoke: bool, update: bool) -> Rows:
    """Medians of ``rounds`` steps of each shape, after one that warms up. The smallest come first,
    so that the peak of all so far is a shape's own."""
    rows: Rows = [{}] * len(shapes)
    sizes = [len(frames) * max(frames) for _, frames in shapes]
    with open_pool(name, MODEL if smoke else "", update) as pool:
        for i in sorted(range(len(shapes)), key=lambda i: sizes[i]):
            taken = [take_step(pool, shapes[i]) for _ in range(rounds + 1)][1:]
            rows[i] = {"code": name, "B": len(shapes[i][1]), "frames": max(shapes[i][1])}
            if None in taken:
                rows[i]["ms"] = "out of memory"
                continue
            forward, backward, both, _ = 1e3 * np.median(taken, axis=0)
            rows[i] |= {"forward ms": forward, "backward ms": backward, "ms": both}
            rows[i]["peak GiB"] = taken[-1][3]
    return rows


def steps(smoke: bool) -> Rows:
    sizes, frames = ((2, 3), (8, 16)) if smoke else ((16, 32, 64, 98), (200, 400, 800))
    shapes = [([max(T // 4, 1)] * B, [T] * B) for B, T in product(sizes, frames)]
    rows, nvidias = [], {}
    for precision, implementation in product(PRECISIONS, IMPLEMENTATIONS):
        rounds = 2 if implementation == "nvidia" else 4
        for row in timed(implementation + precision, shapes, rounds, smoke, update=False):
            if row["ms"] != "out of memory":
                base = nvidias.setdefault((row["B"], row["frames"]), row["ms"])
                row["times as fast"] = base / row["ms"]
            rows.append(row)
    return rows


def epochs(smoke: bool) -> Rows:
    """Minutes of an epoch of LJSpeech, by batches of all sizes, and what it saves against RAND."""
    rows = []
    for implementation in IMPLEMENTATIONS:
        names = ["RAND", "SSB-DBS-BR"]
        if implementation == IMPLEMENTATIONS[-1]:  # BR changes the order alone
            names = ["RAND", "SB", "SSB", "BKT-BR", "ATS-BR", "SB-DBS", "SSB-DBS", "SSB-DBS-BR"]
        plans = []
        for name in names:
            strategy, dynamic = name.split("-")[0], "DBS" in name
            shapes, share, _ = epoch_shapes(strategy, dynamic, 10_480, 2 if smoke else 12)
            if smoke:
                shapes = [([n // 50 + 1 for n in c], [n // 50 + 1 for n in f]) for c, f in shapes]
            plans.append((name, shapes, share))
        every = [shape for _, shapes, _ in plans for shape in shapes]
        taken = iter(timed(implementation, every, 1, smoke, update=True))
        minutes = {}
        for name, shapes, share in plans:
            steps_taken = [next(taken)["ms"] for _ in shapes]
            fits = "out of memory" not in steps_taken
            minutes[name] = sum(steps_taken) / share / 60e3 if fits else math.nan
        for name, time_taken in minutes.items():
            saved = 100 * (1 - time_taken / minutes["RAND"])
            paper = 100 * (1 - PAPER_MINUTES[name] / PAPER_MINUTES["RAND"])
            row = {"code": implementation, "batching": name, "min/epoch": time_taken}
            rows.append(row | {"saved %": saved, "the paper's %": paper})
    return rows


def corpus(folder: Path, n_clips: int, smoke: bool) -> str:
    """Noise of LJSpeech's lengths, and the settings to train on it."""
    lengths = ljspeech_lengths(256)
    n_samples = 256 * np.random.default_rng(0).choice(lengths, n_clips) // (20 if smoke else 1)
    folder.mkdir()
    write_noise(folder, n_samples.tolist())
    rows = (folder / "metadata.csv").read_text().splitlines()
    lines = ["wavs/{}.wav|{}\n".format(*row.split("|")) for row in rows]
    (folder / "train.txt").write_text("".join(lines[16:]))
    (folder / "val.txt").write_text("".join(lines[:16]))
    settings = f"data_dir={folder},training_files={folder}/train.txt"
    settings += f",validation_files={folder}/val.txt,mel_cache_dir={folder}/cache"
    return settings + (f",{MODEL},batch_size=4" if smoke else "")


def capacity(smoke: bool) -> Rows:
    with tempfile.TemporaryDirectory() as name:
        settings = corpus(Path(name, "corpus"), 40 if smoke else 1000, smoke)
        options = ["--tolerance", 0.1, *(["--memory_gib", 0.5] if smoke else [])]
        program = "scripts/find_batch_capacity.py", "--hparams", settings
        printed = call(*program, *options, seconds=120)
    return [{"largest batch capacity": printed.strip().splitlines()[-1]}]


def training(smoke: bool) -> Rows:
    """Five epochs thrice: as it comes, deterministic, and deterministic with a stop halfway."""
    rows, weights = [], {}
    with tempfile.TemporaryDirectory() as name:
        settings = corpus(Path(name, "corpus"), 40 if smoke else 320, smoke) + ",epochs=5"
        for run in ("plain", "deterministic", "stopped"):
            folder = Path(name, run)
            options = f"{settings},deterministic={run != 'plain'}"
            command = ["train.py", "-o", folder, "--hparams", options]
            if run == "stopped":
                stop_halfway(command, folder)
                command = ["train.py", "-o", folder, "--resume"]
            call(*command, seconds=120)
            _, state = load_newest(folder)
            weights[run] = state["state_dict"]
            lines = (folder / "metrics.jsonl").read_text().splitlines()
            records = [json.loads(line) for line in lines]
            start = next(record for record in records if record["event"] == "start")
            ended = [record for record in records if record["event"] == "epoch"]
            used = ("device", "threads", "decoder", "precision", "torch")
            rows.append(
                {
                    "run": run,
                    "used": ", ".join(f"{name}={start[name]}" for name in used),
                    "s/epoch": 60 * float(np.median([epoch["minutes"] for epoch in ended])),
                    "peak GiB": max(epoch["peak_memory_gib"] for epoch in ended),
                    "% of time waiting for data": 100
                    * float(np.mean([epoch["data_wait"] for epoch in ended])),
                }
            )
    same = all(
        torch.equal(tensor, weights["stopped"][key])
        for key, tensor in weights["deterministic"].items()
    )
    rows.append({"run": "deterministic and stopped end with the same weights", "used": str(same)})
    return rows


def stop_halfway(command: list[object], folder: Path) -> None:
    """Start a training, and end it by SIGTERM in its third epoch."""
    log = subprocess.DEVNULL
    process = subprocess.Popen(
        [sys.executable, *map(str, command)], cwd=ROOT, stdout=log, stderr=log
    )
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_text().count('"event": "epoch"') >= 2:
            break
        time.sleep(0.05)
    process.terminate()
    process.wait()


def markdown(rows: Rows) -> str:
    head = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[f"{row.get(k, '')}" for k in head] for row in rows]
    for line, row in zip(cells, rows, strict=True):
        for i, key in enumerate(head):
            if isinstance(row.get(key), float):
                line[i] = f"{row[key]:,.2f}"
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


PARTS: dict[str, Callable[[bool], Rows]] = {
    "Steps, each beside NVIDIA's loop in fp32": steps,
    "An epoch of LJSpeech": epochs,
    "Five epochs of the full model": training,
    "The check of the fast path": checks,
    "Tests": tests,
    "Memory": capacity,
}


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("gpu_report"), help="%(default)s")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on a CPU too")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if GPU else "cpu")
    title = f"{device_name(device)}, PyTorch {torch.__version__}"
    texts, results, failed = [f"# {title}\n"], {"machine": title, "smoke": args.smoke}, []
    os.environ.pop("TRITON_INTERPRET", None)
    for name, part in PARTS.items():
        start = time.monotonic()
        try:
            rows = part(args.smoke)
        except Exception as error:
            traceback.print_exc()
            rows = [{"failed": f"{type(error).__name__}: {error}".replace("\n", " ")[:300]}]
            failed.append(name)
        seconds = time.monotonic() - start
        results[name] = {"seconds": seconds, "rows": rows}
        texts.append(f"## {name}\n\n{markdown(rows)}\n\n*{seconds:.0f} s*\n")
        print(texts[-1], flush=True)
        (args.output / "report.md").write_text("\n".join(texts), encoding="utf-8")
        (args.output / "report.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    if failed:
        sys.exit(f"FAILED: {', '.join(failed)}; see above")


if __name__ == "__main__":
    exit_on_user_error(main)
