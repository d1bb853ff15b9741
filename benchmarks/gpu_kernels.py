"""Compile the kernels of decoder_triton for NVIDIA GPUs, which need not be there.

python benchmarks/gpu_kernels.py            # needs Linux and Triton (pip install triton)

Prints, for every kernel that a frame of the full model starts, its registers and shared memory on
each architecture, what it spills, and the operations and bytes of a frame; and how many kernels a
frame starts.
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
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cli import ArgumentParser, UserError, exit_on_user_error, positive
from decoder.scan import STEPS
from hparams import HParams
from model import Decoder

# Compute capabilities: T4 and RTX 20, A100, RTX 30, RTX 40, H100 and H200, B200; and the KiB of
# shared memory that a block may use.
ARCHITECTURES = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227}
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.bool: "*i1"}
NO_KERNEL = "empty", "new_empty", "detach", "alias", "device", "_unsafe_view"
FLOPS = {  # of a launch, from its arguments
    "lstm_step": lambda a: 8 * a["B"] * a["H"] * a["K"],
    "cell_backward": lambda a: 2 * a["B"] * a["H"] * a["K"],
    "accumulate": lambda a: 2 * a["B"] * a["N"] * a["K"],
    "project": lambda a: 2 * a["B"] * a["N"] * a["K"],
    "score": lambda a: 2 * len(a["keys"]) * a["T_in"] * a["A"] * (2 * a["W"] + 1),
    "attention": lambda a: 2 * len(a["memory"]) * a["T_in"] * a["E"],
    "attention_gradient": lambda a: 2 * len(a["memory"]) * a["T_in"] * a["E"],
    "score_gradient": lambda a: 2 * len(a["slopes"]) * a["T_in"] * (a["A"] + 2 * a["W"]),
}


class Launch(NamedTuple):
    """A kernel that is started, with its arguments by name."""

    kernel: Any
    arguments: dict[str, Any]
    n_programs: int

    @property
    def n_bytes(self) -> int:
        """The size of the tensors that it reads or writes."""
        tensors = (x for x in self.arguments.values() if isinstance(x, Tensor))
        return sum(x.numel() * x.itemsize for x in tensors)

    @property
    def n_loaded(self) -> int:
        """The bytes that its programs load: of a product, each a block of both factors."""
        a = self.arguments
        if "weight" not in a:
            return self.n_bytes
        columns = 4 * a["UNITS"] if "UNITS" in a else a["COLUMNS"]
        return self.n_programs * a["K"] * (4 * a["ROWS"] + columns * a["weight"].itemsize)


class Operations(TorchDispatchMode):
    """Counts PyTorch's operations that start kernels, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.overloadpacket.__name__
        if not (function.is_view or name.startswith(NO_KERNEL)):
            self.counts[name] += 1
        return function(*arguments, **(options or {}))


def launches(
    B: int, T_in: int, dtype: torch.dtype, T_out: int = STEPS
) -> tuple[list[Launch], Counter]:
    """The kernels and PyTorch's operations that the recurrences of ``T_out`` frames start in a
    training step of the full model."""
    from triton.runtime.jit import JITFunction

    hparams = HParams(decoder="triton")
    memory = torch.zeros(B, T_in, hparams.encoder_embedding_dim, requires_grad=True)
    mel = torch.zeros(B, hparams.n_mel_channels, T_out)
    padding = torch.zeros(B, T_in, dtype=torch.bool)
    # The first runs nothing.
    with patch.object(JITFunction, "run", autospec=True) as start, Operations() as operations:
        outputs = Decoder(hparams)(memory, mel, padding, dtype)
        sum(output.sum() for output in outputs).backward()
    found = []
    for call in start.call_args_list:
        kernel, *arguments = call.args
        named = dict(zip(kernel.arg_names, arguments, strict=True))
        found.append(Launch(kernel, named, math.prod(call.kwargs["grid"])))
    return found, operations.counts


def compiled(launch: Launch, architecture: int) -> tuple[int, int, int]:
    """Registers a thread, bytes of spills a thread, and bytes of shared memory a block."""
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
    sizes = args.batch_size, args.characters, dtype
    found, once = launches(*sizes)
    others = launches(*sizes, 2 * STEPS)[1] - once  # of STEPS frames more
    copies = others.pop("_foreach_copy_")
    names = [f"sm_{architecture}" for architecture in ARCHITECTURES]
    print(f"{args.batch_size} clips, {args.characters} characters, {args.precision}")
    print("Registers of a thread, KiB of shared memory of a block:")
    print(f"| kernel | K | Mflop | MB | MB loaded | programs | {' | '.join(names)} |")
    print(f"|---|--:|--:|--:|--:|--:|{'--:|' * len(names)}")
    problems = []
    for (name, K), launch in {
        (launch.kernel.__name__, launch.arguments.get("K", "")): launch for launch in found
    }.items():
        cells = []
        for architecture, most in ARCHITECTURES.items():
            if args.precision == "bf16" and architecture < 80:  # has no bfloat16
                cells.append("–")
                continue
            registers, spilled, shared = compiled(launch, architecture)
            cells.append(f"{registers}, {shared / 1024:.0f}")
            if spilled or shared > 1024 * most:
                what = f"{spilled} bytes spilled, {shared / 1024:.0f} KiB of shared memory"
                problems.append(f"{name} on sm_{architecture}: {what}, of {most}")
        numbers = f"{FLOPS[name](launch.arguments) / 1e6:.1f} | {launch.n_bytes / 1e6:.1f}"
        numbers += f" | {launch.n_loaded / 1e6:.1f} | {launch.n_programs}"
        print(f"| {name} | {K} | {numbers} | {' | '.join(cells)} |", flush=True)
    flops = sum(FLOPS[launch.kernel.__name__](launch.arguments) for launch in found) / STEPS
    n_bytes, n_loaded = (
        sum(sizes) / STEPS / 1e6
        for sizes in zip(*((launch.n_bytes, launch.n_loaded) for launch in found), strict=True)
    )
    print(
        f"{len(found) / STEPS:g} kernels a frame, {flops / 1e6:.0f} Mflop, {n_bytes:.0f} MB, "
        f"{n_loaded:.0f} MB loaded; and for each {STEPS} frames {others.total()} of PyTorch's "
        f"operations in the graphs, and {copies} copies outside\n"
        + ("\n".join(problems) or "nothing spills")
    )
    sys.exit(bool(problems))


if __name__ == "__main__":
    exit_on_user_error(main)
