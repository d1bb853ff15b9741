"""Compile the kernels of decoder/triton.py for NVIDIA GPUs, which need not be there.

    python benchmarks/gpu_kernels.py            # needs Linux and Triton (pip install triton)

Prints, for every kernel that a frame of the full model starts, its registers and shared memory on
each architecture, and what it spills; and how many kernels a frame starts. docs/performance.md says
what came out.
"""

import re
import subprocess
import sys
import tempfile
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


class Launch(NamedTuple):
    """A kernel that is started, with its arguments by name."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]
    label: str


class Compiled(NamedTuple):
    registers: int  # of a thread
    spilled: int  # bytes of a thread
    shared: int  # bytes of a block


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
        del options["warmup"]
        found.append(Launch(kernel, arguments, options, label))
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
        command = [cuobjdump, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack, local = map(
        int, re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", printed).groups()
    )
    return Compiled(registers, stack + local, kernel.metadata.shared)


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
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    newest = 90 if version < (3, 3) else 100
    torch.backends.cuda.matmul.allow_tf32 = args.precision == "tf32"
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    found = launches(args.batch_size, args.characters, dtype)
    kinds = {launch.label: launch for launch in found}
    names = [f"sm_{architecture}" for architecture in ARCHITECTURES]
    print(f"{args.batch_size} clips, {args.characters} characters, {args.precision}")
    print("Registers of a thread, KiB of shared memory of a block:")
    print(f"| kernel | {' | '.join(names)} |\n|---|{'--:|' * len(names)}")
    problems = []
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
        print(f"| {label} | {' | '.join(cells)} |", flush=True)
    print(f"{len(found) / STEPS:g} kernels a frame, forward and backward")
    print("\n".join(problems) or "nothing spills")
    sys.exit(bool(problems))


if __name__ == "__main__":
    exit_on_user_error(main)
