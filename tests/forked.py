"""Programs in processes of their own that start at once: they are forked from a server that has
imported the libraries, which takes seconds."""

import multiprocessing
import os
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SERVER = multiprocessing.get_context("forkserver")
LIBRARIES = ["librosa.filters", "matplotlib.figure", "soundfile", "torch._dynamo"]
SERVER.set_forkserver_preload([*LIBRARIES, "torch.utils.tensorboard"])


def run_program(arguments: list[str], environment: dict[str, str], folder: Path) -> None:
    """Runs ``python ARGUMENTS``, and sends its output to pipe and file in ``folder``."""
    os.setsid()
    os.dup2(os.open(folder / "stdout", os.O_WRONLY), 1)
    os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.stdout = os.fdopen(1, "w")
    os.environ.update(environment)
    os.chdir(ROOT)
    from training.logger import RunLogger

    RunLogger.log_samples = lambda *_: None  # takes longest
    sys.argv = arguments
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
    else:
        runpy.run_path(arguments[0], run_name="__main__")


class Forked:
    """Runs ``python ARGUMENTS`` in the project's root and in a session of its own. It logs no
    pictures and no sound."""

    def __init__(self, *arguments: object, **environment: object):
        self.folder = Path(tempfile.mkdtemp())
        os.mkfifo(self.folder / "stdout")
        environment = {"PYTHONPATH": str(ROOT)} | {k: str(v) for k, v in environment.items()}
        request = [str(argument) for argument in arguments], environment, self.folder
        self.process = SERVER.Process(target=run_program, args=request, daemon=True)
        self.process.start()
        self.pid = self.process.pid
        self.stdout = (self.folder / "stdout").open()

    def communicate(self) -> tuple[str, str]:
        """Returns what it prints from here on, and its errors; sets ``returncode``."""
        printed = self.stdout.read()
        self.process.join()
        self.returncode = self.process.exitcode
        errors = (self.folder / "stderr").read_text()
        shutil.rmtree(self.folder)
        return printed, errors
