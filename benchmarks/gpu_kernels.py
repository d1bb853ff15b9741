"""Compile the kernels of decoder/triton.py for NVIDIA GPUs, which need not be there.

    python benchmarks/gpu_kernels.py            # needs Linux and Triton (pip install triton)

Prints, for every kernel that a frame of the full model starts, its registers and shared memory on
each architecture, and what it spills; and how many kernels a frame starts. docs/performance.md says
what came out.

Then an estimate of their times on two GPUs. A kernel takes LAUNCH_US and the longest of these, on
the multiprocessor (SM) that has the most of its programs:

- its instructions: an SM's four schedulers start one a clock each;
- products on tensor cores (HMMA);
- shared memory: 128 bytes a clock, or one LDS, by which many threads load few words;
- L2: 64 bytes a clock, or what all SMs get at once. A program loads each value once.

Nothing waits for memory or for other instructions, so real kernels take longer. But both
sides of a branch count, and so do masked loads. PyTorch's kernels between these are not in it.
"""

import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from cli import ArgumentParser, UserError, exit_on_user_error, positive
from decoder.scan import STEPS
from hparams import HParams
from model import Decoder

# Compute capabilities: T4 and RTX 20, A100, RTX 30, RTX 40, H100 and H200, B200; and the KiB of
# shared memory that a block may use.
ARCHITECTURES = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227}
LAUNCH_US = 1.3  # of a kernel in a CUDA graph: an assumption


class GPU(NamedTuple):
    architecture: int
    processors: int
    ghz: float
    hmma: int  # clocks of a scheduler for one HMMA, in bf16 or tf32
    l2: float  # GB/s of all processors, as others measured


GPUS = {"H100": GPU(90, 132, 1.755, 8, 5500), "RTX 4090": GPU(89, 128, 2.52, 32, 5000)}


class Launch(NamedTuple):
    """A kernel that is started, with its arguments by name."""

    kernel: Any
    arguments: dict[str, Any]
    programs: int
    options: dict[str, Any]

    label: str
    end: int  # of its loops, which all have the same
    step: int


class Compiled(NamedTuple):
    registers: int  # of a thread
    spilled: int  # bytes of a thread
    shared: int  # bytes of a block
    warps: int
    ir: str
    assembly: str


def launches(B: int, T_in: int, dtype: torch.dtype) -> list[Launch]:
    """Returns the kernels that the recurrences of STEPS frames start in a training step of the full
    model. None of them runs."""
    from triton.runtime.jit import JITFunction

    hparams = HParams(decoder="triton")
    memory = torch.zeros(B, T_in, hparams.encoder_embedding_dim, requires_grad=True)
    mel = torch.zeros(B, hparams.n_mel_channels, STEPS)
    padding = torch.zeros(B, T_in, dtype=torch.bool)
    with patch.object(JITFunction, "run", autospec=True) as start:
        outputs = Decoder(hparams)(memory, mel, padding, dtype)
        sum(output.sum() for output in outputs).backward()
    found = []
    for (kernel, *values), options in start.call_args_list:
        arguments = dict(zip(kernel.arg_names, values, strict=True))
        sizes = [str(arguments[name]) for name in ("K", "N") if name in arguments]
        label = f"{kernel.__name__} {' × '.join(sizes)}".strip()
        names = re.search(r"in range\(0, (\w+), (\w+)\)", kernel.src).groups()
        programs, loop = math.prod(options["grid"]), (arguments[name] for name in names)
        del options["warmup"]
        found.append(Launch(kernel, arguments, programs, options, label, *loop))
    return found


class FakeGPU(NamedTuple):
    """What Triton asks of its driver in order to compile, for a GPU that need not be there."""

    architecture: int

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return self.architecture  # Triton keeps what it has compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(launch: Launch, architecture: int) -> Compiled:
    from triton.backends import nvidia
    from triton.runtime.driver import driver

    driver.set_active(FakeGPU(architecture))
    kernel = launch.kernel.run(*launch.arguments.values(), warmup=True, **launch.options)
    cuobjdump = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", "--dump-sass", file.name]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack, local = map(
        int, re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", printed).groups()
    )
    shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
    return Compiled(registers, stack + local, shared, warps, kernel.asm["ttir"], printed)


def moved(launch: Launch, ir: str) -> int:
    """Returns the bytes that a program loads and stores."""
    total, closing = 0, None
    for line in ir.splitlines():
        if "scf.for" in line:
            closing = re.match(" *", line)[0] + "}"
        elif closing and line.startswith(closing):
            closing = None
        elif found := re.search(r"tt\.(?:load|store) .*tensor<([\dx]+)x!tt\.ptr<\D+(\d+)>", line):
            bits = math.prod(map(int, found[1].split("x"))) * int(found[2])
            total += bits // 8 * (math.ceil(launch.end / launch.step) if closing else 1)
    return total


def executed(launch: Launch, assembly: str) -> Counter:
    """Returns how often a warp executes each instruction."""
    pattern = r"/\*([0-9a-f]{4,})\*/ +(?:@\S+ )?(?!NOP)(\S+)(.*?) *;"
    lines = [(int(at, 16), *line) for at, *line in re.findall(pattern, assembly)]
    counts = Counter(name for _, name, _ in lines)
    for at, name, operands in lines:
        start = int(operands.split("0x")[-1], 16) if name == "BRA" else at
        if start < at:  # it closes a loop
            body = [line for line in lines if start <= line[0] <= at]
            # The counter is the register with the largest step, which unrolling makes longer.
            add = r"ADD3? (U?R\d+), \1(?:\.reuse)?, (?:U?RZ, )?0x(\w+)(?:, U?RZ)?$"
            found = re.findall(add, "\n".join(name + rest for _, name, rest in body), re.MULTILINE)
            step = max(launch.step, *(int(step, 16) for _, step in found))
            again = math.ceil(launch.end / step) - 1
            counts.update([name for _, name, _ in body] * again)
    return counts


def estimate(launch: Launch, kernel: Compiled, gpu: GPU) -> tuple[int, float, str]:
    """Returns a warp's instructions, the kernel's time in µs, and what bounds it."""
    counts, size, shared = executed(launch, kernel.assembly), moved(launch, kernel.ir), 0
    for name, n in counts.items():
        operation, *options = name.split(".")
        if operation in ("LDSM", "STSM"):
            shared += n * (int(options[-1]) if options[-1].isdigit() else 1)
        elif operation in ("STS", "LDGSTS"):
            shared += n * (4 if "128" in options else 2 if "64" in options else 1)
        shared += n * (operation == "LDS")
    products = sum(n for name, n in counts.items() if name.startswith("HMMA"))
    programs = math.ceil(launch.programs / gpu.processors)
    clocks = {
        "instructions": programs * kernel.warps * counts.total() / 4,
        "tensor cores": programs * kernel.warps * products * gpu.hmma / 4,
        "shared memory": programs * kernel.warps * shared,
        "L2": max(programs * size / 64, launch.programs * size / gpu.l2 * gpu.ghz),
    }
    bound = max(clocks, key=clocks.get)
    return counts.total(), clocks[bound] / gpu.ghz / 1000, bound


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--batch_size", type=positive, default=32, help="(default: %(default)s)")
    add("--characters", type=positive, default=100, help="of a text (default: %(default)s)")
    add("--precision", choices=("fp32", "tf32", "bf16"), default="fp32")
    args = parser.parse_args()
    try:
        import triton
    except ImportError as error:
        raise UserError(f"Triton cannot be used ({error}); pip install triton, on Linux") from None
    oldest = 75 if args.precision == "fp32" else 80  # as in training
    newest = 90 if triton.__version__.startswith("3.2.") else 100
    torch.backends.cuda.matmul.allow_tf32 = args.precision == "tf32"
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    found = launches(args.batch_size, args.characters, dtype)
    kinds, started = {x.label: x for x in found}, Counter(x.label for x in found)
    names = [f"sm_{architecture}" for architecture in ARCHITECTURES]
    print(f"{args.batch_size} clips, {args.characters} characters, {args.precision}")
    print("Registers of a thread, KiB of shared memory of a block:")
    print(f"| kernel | {' | '.join(names)} |\n|---|{'--:|' * len(names)}")
    problems, rows, total, beside = [], [], Counter(), Counter()
    for label, launch in kinds.items():
        cells = []
        for architecture, max_shared in ARCHITECTURES.items():
            if not oldest <= architecture <= newest:
                cells.append("–")
                continue
            kernel = compiled(launch, architecture)
            cells.append(f"{kernel.registers}, {kernel.shared / 1024:.0f}")
            if kernel.spilled or kernel.shared > 1024 * max_shared:
                what = f"{kernel.spilled} bytes spilled, {kernel.shared / 1024:.0f} KiB"
                problems.append(f"{label} on sm_{architecture}: {what}, of {max_shared}")
            for name, gpu in GPUS.items():
                if gpu.architecture == architecture:
                    instructions, µs, bound = estimate(launch, kernel, gpu)
                    of_frame = (µs + LAUNCH_US) * started[label] / STEPS
                    total[name] += of_frame
                    if label.endswith(f" {HParams().decoder_rnn_dim}"):  # the second LSTM's
                        beside[name] += of_frame
                    row = label, launch.programs, name, instructions, f"{µs:.2f}", bound
                    rows.append(f"| {' | '.join(map(str, row))} |")
        print(f"| {label} | {' | '.join(cells)} |", flush=True)
    print(f"{len(found) / STEPS:g} kernels a frame, forward and backward")
    print("\nEstimates, without launches; instructions are those of a warp:")
    print("| kernel | programs | GPU | instructions | µs | bound by |\n|---|--:|---|--:|--:|---|")
    print("\n".join(rows))
    sums = (
        f"{name} {µs:.1f} µs ({µs - beside[name]:.1f} if the second LSTM's branch costs nothing)"
        for name, µs in total.items()
    )
    print(f"Estimate of a frame, with {LAUNCH_US} µs a launch: {', '.join(sums)}\n")
    print("\n".join(problems) or "nothing spills")
    sys.exit(bool(problems))


if __name__ == "__main__":
    exit_on_user_error(main)
