"""Files that are whole or not there: atomic writes, one writer at a time, hashes, paths as people read them."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from helpers.errors import DiskFull, LockedRun, WorkbookError
from helpers.params import ROOT

_held: dict[Path, int] = {}  # locks of this process and how often each is nested


def shown(path: str | Path) -> str:
    """A path relative to the repository when it lies in it, so that pages and messages name no machine."""
    path = Path(path)
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def disk_full(error: BaseException) -> bool:
    """Whether `error` says that space ran out; safetensors and torch wrap the system's error in their own."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    text = str(error)
    return "No space left on device" in text or "os error 28" in text or "PytorchStreamWriter failed writing" in text


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Give a temporary path beside `path`, and put it in place when the block ends well; it may be a file or a folder.

    The temporary name keeps the suffix, since numpy and others add one they miss.

    Raises:
        DiskFull: space ran out; what was at `path` before is unchanged and nothing half-made stays.
        WorkbookError: no permission to write there.
    """
    path = Path(path)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
        yield temporary
        if temporary.is_dir():
            _remove(path)  # a folder can only replace an empty one
        else:
            os.umask(umask := os.umask(0))
            temporary.chmod(0o666 & ~umask)  # safetensors leaves 0600, which keeps colleagues on a shared disk out
        os.replace(temporary, path)
    except BaseException as error:
        _remove(temporary)
        if disk_full(error):
            raise DiskFull(
                f"no space left while writing {path.name}",
                where=shown(path),
                do="free some space or set runs_folder to another disk, then run the same command again: finished work is kept",
            ) from error
        if isinstance(error, PermissionError):
            raise WorkbookError(f"not allowed to write {path.name}", where=shown(path), do="choose a folder that is yours") from error
        raise


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file atomically. Raises DiskFull."""
    with atomic(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: str | Path, content: str) -> None:
    """Write a UTF-8 file atomically. Raises DiskFull."""
    write_bytes(path, content.encode())


def write_json(path: str | Path, value: Any) -> None:
    """Write JSON atomically, keys in the order given. Raises DiskFull."""
    write_text(path, json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_lines(path: str | Path, rows: Iterable[Any]) -> None:
    """Write rows as JSON lines."""
    write_text(path, "".join(json.dumps(plain(row), ensure_ascii=False) + "\n" for row in rows))


def plain(value: Any) -> Any:
    """`value` as JSON knows it: arrays and tuples as lists, paths as text, a number that is not finite as None."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted(plain(v) for v in value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Path):
        return shown(value)
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return plain(value.tolist())
    raise TypeError(f"{type(value).__name__} has no form in JSON: {value!r:.80}")


@lru_cache(maxsize=4096)
def _sha256(path: str, size: int, mtime_ns: int) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def file_sha256(path: str | Path, *, cached: bool = False) -> str:
    """SHA-256 of a file in hex; `cached` trusts a hash made in this process for the same size and time."""
    path = Path(path)
    stat = path.stat()
    compute = _sha256 if cached else _sha256.__wrapped__
    return compute(str(path), stat.st_size, stat.st_mtime_ns)


@contextmanager
def lock(path: Path, what: str) -> Iterator[None]:
    """Hold a lock file for the length of the block; nested uses in one process count as one.

    The system drops the lock when the process ends, however it ends, so a crash leaves nothing to clear.

    Args:
        what: what the lock protects, for the message.

    Raises:
        LockedRun: another process holds it.
    """
    path = Path(path).resolve()
    if path in _held:
        _held[path] += 1
        try:
            yield
        finally:
            _held[path] -= 1
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            owner = stream.read().strip() or "unknown"
            raise LockedRun(
                f"{what} is being written by process {owner}", where=shown(path), do="wait until it has finished, or stop it"
            ) from None
        stream.seek(0)
        stream.truncate()
        stream.write(str(os.getpid()))
        stream.flush()
        _held[path] = 1
        try:
            yield
        finally:
            del _held[path]
