"""Folders and files that survive kills and full disks: locks, atomic writes, free space."""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from cli import UserError


def make_folder(path: Path, fix: str = "give another folder") -> None:
    """Make the folder ``path``, unless it exists, and check that it can be written.

    Raises:
        UserError: it cannot be written; ``fix`` says what to do.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        read_only = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        fix = f"allow writing, or {fix}" if read_only else fix
        raise UserError(f"{path}: cannot be written ({error.strerror}); {fix}") from None


def make_new_folder(path: Path, fix: str = "give another folder") -> None:
    """:func:`make_folder`, of one that has no files yet.

    Raises:
        UserError: it has files, or it cannot be written; ``fix`` says what to do.
    """
    if path.is_dir() and (names := [file.name for file in path.iterdir()]):
        raise UserError(f"{path}: already has files, such as {min(names)}; {fix}")
    make_folder(path, fix)


@contextmanager
def making(folder: Path, fix: str = "give another folder") -> Iterator[None]:
    """:func:`make_folder`; after an error, new folders that are still empty are removed."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        make_folder(folder, fix)
        yield
    except BaseException:
        with suppress(OSError):  # not empty
            for path in new:
                path.rmdir()
        raise


@contextmanager
def locked(
    folder: Path, fix: str = "give another folder", wait: bool = False, unfinished: str = ""
) -> Iterator[None]:
    """Make ``folder`` and lock it until the context or the process ends, even if killed. After an
    error, the lock file is removed if it is new, and so is a new folder that is still empty.

    Args:
        fix: what the user can do instead of waiting.
        wait: wait while another process holds the lock, instead of raising.
        unfinished: pattern of files left by a killed process, which are removed.

    Raises:
        UserError: another process holds the lock, or the folder cannot be written or locked.
    """
    path = folder / "lock"
    with making(folder, fix), _open_locked(path, fix, wait) as file:
        new = not file.seek(0, os.SEEK_END)
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        file.flush()
        for part in folder.glob(unfinished) if unfinished else ():
            part.unlink()
        try:
            yield
        except BaseException:
            if new:
                path.unlink(missing_ok=True)
            raise


def _open_locked(path: Path, fix: str, wait: bool) -> IO[bytes]:
    while True:
        try:
            file = path.open("a+b")
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; remove it, or {fix}") from None
        try:
            # Not a record lock (lockf), which ends when the process closes the file anywhere.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise UserError(
                    f"{path}: cannot be locked ({error.strerror}); use a folder on another disk"
                ) from None
            file.seek(0)
            held = f"{path.parent}: in use by process {file.read().decode() or '(just started)'}"
            if not wait:
                raise UserError(f"{held}; wait for its end, or {fix}") from None
            print(f"{held}; waiting for its end", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            # Loader processes may outlive a killed training, and must not keep its lock.
            os.register_at_fork(after_in_child=file.close)
            return file
        file.close()  # the process that held the lock has removed the file
        path.parent.mkdir(parents=True, exist_ok=True)


@contextmanager
def replacing(path: Path, shared: bool = False) -> Iterator[IO[bytes]]:
    """A file to write; it replaces ``path`` once it is complete and on the disk. If ``shared``,
    several processes may write it at once, and nothing waits for the disk.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part" if shared else f"{path.name}.part")
    try:
        with open(part, "wb") as file:
            yield file
            if not shared:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
        if not shared:
            sync_names(path.parent)
    except OSError as error:  # that of a full disk names no file
        error.filename = error.filename or str(path)
        raise
    finally:
        part.unlink(missing_ok=True)


def sync_names(folder: Path) -> None:
    """Flush a folder's file names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def require_space(path: Path, n_bytes: float, fix: str) -> None:
    """Check that ``n_bytes`` fit on the disk of ``path``, which need not exist yet.

    Raises:
        UserError: they do not; ``fix`` says what to do other than free space.
    """
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if n_bytes > free:
        raise UserError(
            f"{path}: {n_bytes / 1e9:.2f} GB needed and {free / 1e9:.2f} GB free; free some, or "
            f"{fix}"
        )
