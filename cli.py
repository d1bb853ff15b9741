"""What all programs share: errors that a user can fix, arguments, and writing files."""

import sys

if sys.platform == "win32":
    print("error: this recipe does not run on Windows; use WSL2", file=sys.stderr)
    sys.exit(2)

import argparse
import atexit
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

from tqdm import tqdm

# A bar is shown on a terminal, not in a log (disable=None), and only by torchrun's rank 0.
_RANK = os.environ["RANK"] if "TORCHELASTIC_RUN_ID" in os.environ else "0"
progress_bar = partial(tqdm, disable=None if _RANK == "0" else True, dynamic_ncols=True)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


class UserError(ValueError):
    """Something that the user can fix. Its one line says where, the value, and the fix."""


def pluralize(n: int, noun: str, plural: str = "s") -> str:
    """Returns a number and its noun, as in "1 epoch" or "2 batches"."""
    return f"{n:,} {noun}{plural if n != 1 else ''}"


def exit_on_user_error(
    main: Callable[[], None],
    reports: Callable[[], bool] = lambda: True,
    end: Callable[[Any], NoReturn] = sys.exit,
) -> None:
    """Runs a program's ``main``. A :class:`UserError` ends it with its message and status 2.

    Args:
        reports: whether this process prints the message.
        end: ends the process with the exit status.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: the next file that is opened would get its number
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115, until the process ends
    # Log files get each line at once. Characters that their encoding lacks are escaped.
    if hasattr(sys.stdout, "reconfigure"):  # not in a notebook
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    message, status = "", 0
    try:
        set_cache_folder()
        main()
    except UserError as error:
        message, status = f"error: {error}", 2
    except SystemExit as ended:
        status = ended.code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at exit
        message, status = "error: output pipe closed", 2
    except OSError as error:
        fixes = dict.fromkeys(DISK_FULL, "free some space")
        fixes |= dict.fromkeys((errno.EISDIR, errno.ENOTDIR), "move what is there")
        fixes |= dict.fromkeys(READ_ONLY, "allow writing, or use another folder")
        fixes[errno.ENAMETOOLONG] = "use a shorter name"
        if not (fix := fixes.get(error.errno)):
            raise
        problem = f"{error.filename or 'output'}: {error.strerror}"
        message, status = f"error: {problem}; {fix}, then run again", 2
    except KeyboardInterrupt:
        message, status = "interrupted", 130
    if message and reports():
        print(message, file=sys.stderr)
    end(status)


def set_cache_folder() -> None:
    """Gives librosa, and numba for what it compiles, a temporary folder if the user's folder for
    caches cannot be written."""
    try:
        make_folder(Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")))
    except UserError:
        os.environ["XDG_CACHE_HOME"] = folder = tempfile.mkdtemp(prefix="caches")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


# Arguments


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, which shows a description as written, takes no abbreviations, reads paths
    by :func:`expand_path`, and raises :class:`UserError`."""

    def __init__(self, **options: Any) -> None:
        as_written = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=as_written, allow_abbrev=False, **options)
        self.register("type", Path, expand_path)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help shows the arguments")


def expand_path(path: str | Path) -> Path:
    """Returns a path, where ~ at the start is the home folder."""
    if path == "":
        raise argparse.ArgumentTypeError("is empty; name a file or a folder")
    return Path(os.path.expanduser(path))


def positive(text: str) -> int:
    """Parses an argument that is a whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: use a whole number, 1 or more")
    return int(text)


def seed(text: str) -> int:
    """Parses an argument that is a seed."""
    if not text.isdecimal() or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"{text}: use a whole number, 0 to {2**31 - 1}")
    return int(text)


# Files


def why_not_utf8(text: str) -> str:
    """Says what is wrong if ``text`` has surrogates, as bytes become that are not UTF-8."""
    if wrong := re.search("[\udc80-\udcff]", text):
        return f"byte {ord(wrong[0]) - 0xDC00:#04x} is not UTF-8 (cp1252?); save as UTF-8"
    if wrong := re.search("[\ud800-\udfff]", text):
        return f"{wrong[0]!r} is half of a character, as where a text was cut; remove it"
    return ""


def make_folder(path: Path, fix: str = "give another folder") -> None:
    """Makes the folder ``path``, unless it exists, and checks that it can be written.

    Raises:
        UserError: it cannot be written; ``fix`` says what to do.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        fix = f"allow writing, or {fix}" if error.errno in READ_ONLY else fix
        raise UserError(f"{path}: cannot be written ({error.strerror}); {fix}") from None


@contextmanager
def replace_file(path: Path, durable: bool = True) -> Iterator[IO[bytes]]:
    """Opens a file to write. It replaces ``path`` once it is complete and, if ``durable``, on the
    disk. Several processes may write the same file at once.
    """
    # Of a long name, a part: with the whole, it would be longer than file systems allow.
    part = path.with_name(f"{path.name[:40]}.{os.urandom(4).hex()}.part")
    try:
        with open(part, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:  # on a full disk it names no file
        error.filename = error.filename or str(path)
        raise
    finally:
        part.unlink(missing_ok=True)
