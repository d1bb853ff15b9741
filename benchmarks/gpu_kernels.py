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
from torch import Tensor

from cli import ArgumentParser, UserError, exit_on_user_error, positive
from decoder.scan import STEPS
from hparams import HParams
from model import Decoder

# Compute capabilities: T4 and RTX 20, A100, RTX 30, RTX 40, H100 and H200, B200; and the KiB of
# shared memory that a block may use.
ARCHITECTURES = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227}
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.bool: "*i1"}


class Launch(NamedTuple):
    """A kernel that is started, with its arguments by name."""

    kernel: Any
    arguments: dict[str, Any]


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
    calls = (call.args for call in start.call_args_list)
    return [
        Launch(kernel, dict(zip(kernel.arg_names, arguments, strict=True)))
        for kernel, *arguments in calls
    ]


def compiled(launch: Launch, architecture: int) -> tuple[int, int, int]:
    """Returns registers and bytes of spills of a thread, and bytes of shared memory of a block."""
    import triton
    from triton.backends import nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            attributes[i,] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constexprs=constants, attrs=attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
    cuobjdump = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack, local = map(
        int, re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage).groups()
    )
    return registers, stack + local, kernel.metadata.shared


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--batch_size", type=positive, default=32, help="(default: %(default)s)")
    add("--characters", type=positive, default=100, help="of a text (default: %(default)s)")
    add("--precision", choices=("fp32", "tf32", "bf16"), default="fp32")
    args = parser.parse_args()
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise UserError(f"Triton cannot be used ({error}); pip install triton, on Linux") from None
    torch.backends.cuda.matmul.allow_tf32 = args.precision == "tf32"
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    found = launches(args.batch_size, args.characters, dtype)
    names = [f"sm_{architecture}" for architecture in ARCHITECTURES]
    print(f"{args.batch_size} clips, {args.characters} characters, {args.precision}")
    print("Registers of a thread, KiB of shared memory of a block:")
    print(f"| kernel | K | {' | '.join(names)} |\n|---|--:|{'--:|' * len(names)}")
    problems = []
    for (name, K), launch in {
        (launch.kernel.__name__, launch.arguments.get("K", "")): launch for launch in found
    }.items():
        cells = []
        for architecture, max_shared in ARCHITECTURES.items():
            if args.precision == "bf16" and architecture < 80:  # has no bfloat16
                cells.append("–")
                continue
            registers, spilled, shared = compiled(launch, architecture)
            cells.append(f"{registers}, {shared / 1024:.0f}")
            if spilled or shared > 1024 * max_shared:
                what = f"{spilled} bytes spilled, {shared / 1024:.0f} KiB of shared memory"
                problems.append(f"{name} on sm_{architecture}: {what}, of {max_shared}")
        print(f"| {name} | {K} | {' | '.join(cells)} |", flush=True)
    print(f"{len(found) / STEPS:g} kernels a frame, forward and backward")
    print("\n".join(problems) or "nothing spills")
    sys.exit(bool(problems))


if __name__ == "__main__":
    exit_on_user_error(main)
