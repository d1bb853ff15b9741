"""Programs in processes of their own that start at once: a server, ``python forked.py``, imports
the libraries, which takes seconds, and forks a process for each line that it reads."""

import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("librosa.filters", "matplotlib.figure", "soundfile", "torch._dynamo")
LIBRARIES += ("torch.utils.tensorboard",)


def serve() -> None:
    """Returns at the end of stdin, and in each forked process at the end of its program."""
    for name in LIBRARIES:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leave no zombies
    gc.freeze()  # else the garbage collector of each process would copy all memory
    print("ready", flush=True)
    while line := sys.stdin.readline():
        if not os.fork():
            return run_program(*json.loads(line))


def run_program(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    """Runs ``python ARGUMENTS``. The pipe ``folder``/status gets its pid, then its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with open(f"{folder}/status", "w", buffering=1) as status:
        if pid := os.fork():
            print(pid, file=status)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=status)
            os._exit(0)
    os.setsid()
    os.dup2(os.open(f"{folder}/stdout", os.O_WRONLY), 1)
    os.dup2(os.open(f"{folder}/stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.environ.update(environment)
    from training.logger import RunLogger

    RunLogger.log_samples = lambda *_: None  # takes longest
    sys.argv = arguments
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
    else:
        runpy.run_path(arguments[0], run_name="__main__")


@cache
def server() -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "THP_MEM_ALLOC_ENABLE": "1"}  # train.py's
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, __file__], env=environment, cwd=ROOT, **pipes)
    assert server.stdout.readline() == "ready\n"
    return server


class Forked:
    """Runs ``python ARGUMENTS`` in the project's root and in a session of its own. It logs no
    pictures and no sound."""

    def __init__(self, *arguments: object, **environment: object):
        self.folder = Path(tempfile.mkdtemp())
        for name in ("status", "stdout"):
            os.mkfifo(self.folder / name)
        environment = {name: str(value) for name, value in environment.items()}
        request = [[str(argument) for argument in arguments], environment, str(self.folder)]
        print(json.dumps(request), file=server().stdin, flush=True)
        self.status, self.stdout = ((self.folder / name).open() for name in ("status", "stdout"))
        self.pid = int(self.status.readline())

    def ended(self) -> bool:
        return bool(select.select([self.status], [], [], 0)[0])

    def communicate(self) -> tuple[str, str]:
        """Returns what it prints from here on, and its errors; sets ``returncode``."""
        printed, self.returncode = self.stdout.read(), int(self.status.readline())
        errors = (self.folder / "stderr").read_text()
        shutil.rmtree(self.folder)
        return printed, errors


if __name__ == "__main__":
    serve()
