"""A directory of compiled kernels: atomic entries, one builder per key, damage detected.

    <root>/<name>/{kernel.o,kernel.ptx,kernel.cubin,meta.json}    one entry, placed by one rename
    <root>/locks/<name>                                           flock of whoever builds it

A process that dies while writing leaves a directory that is no entry (its name starts with a dot);
the operating system drops its lock. An entry whose digests disagree with meta.json is built again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger("cute_kernels.compile")

FILES = ("kernel.o", "kernel.ptx", "kernel.cubin")


@dataclasses.dataclass(frozen=True)
class Entry:
    """Files of one compiled kernel. ``path``: where the object lies, None when in memory only."""

    files: dict[str, bytes]
    meta: dict[str, object]
    path: Path | None = None


class DiskCache:
    """``root`` None: every lookup misses and every store is dropped (memory only)."""

    def __init__(self, root: Path | None) -> None:
        self.root = root
        self.writable = root is not None
        if root is not None:
            self._open(root)

    def _open(self, root: Path) -> None:
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if root.stat().st_mode & stat.S_IWOTH:
                self._refuse(root, "others may write to it, and its files are executed", read=False)
                return
            with tempfile.TemporaryFile(dir=root):
                pass
        except OSError as error:
            self._refuse(root, str(error), read=root.is_dir())

    def _refuse(self, root: Path, why: str, read: bool) -> None:
        """One warning; from then on compiled kernels live in memory only."""
        logger.warning(
            "kernel cache %s is not used for writing (%s): kernels are kept in memory only",
            root,
            why,
        )
        self.writable = False
        if not read:
            self.root = None

    def find(self, name: str) -> Entry | None:
        """The entry, or None when it is absent or damaged. Never raises for what it finds."""
        if self.root is None:
            return None
        path = self.root / name
        try:
            meta = json.loads((path / "meta.json").read_bytes())
            files = {f: (path / f).read_bytes() for f in FILES}
            intact = all(meta["sha256"][f] == _digest(data) for f, data in files.items())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("kernel cache entry %s is unreadable (%s): built again", path, error)
            return None
        if not intact:
            logger.warning("kernel cache entry %s is damaged: built again", path)
            return None
        return Entry(files, meta, path / "kernel.o")

    @contextlib.contextmanager
    def builder(self, name: str) -> Iterator[None]:
        """Held by the one process that builds ``name``; others wait here, then find the entry."""
        if self.root is None or not self.writable:
            yield
            return
        try:
            import fcntl

            (self.root / "locks").mkdir(mode=0o700, exist_ok=True)
            handle = open(self.root / "locks" / name, "a")  # noqa: SIM115 (closed below)
        except (ImportError, OSError) as error:
            self._refuse(self.root, str(error), read=True)
            yield
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            handle.close()  # drops the lock

    def store(self, name: str, files: dict[str, bytes], meta: dict[str, object]) -> Entry:
        """Put an entry into place, replacing a damaged one. The caller holds `builder(name)`."""
        meta = {**meta, "sha256": {f: _digest(files[f]) for f in FILES}}
        if self.root is None or not self.writable:
            return Entry(files, meta)
        temporary = None
        try:
            for left_over in self.root.glob(
                f".{name}.*"
            ):  # of a builder that died: we hold its lock now
                shutil.rmtree(left_over, ignore_errors=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=self.root))
            for f in FILES:
                (temporary / f).write_bytes(files[f])
            (temporary / "meta.json").write_text(json.dumps(meta, indent=1))
            final = self.root / name
            if final.exists():
                final.rename(Path(tempfile.mkdtemp(prefix=f".{name}.", dir=self.root)) / "damaged")
            temporary.rename(final)
        except OSError as error:
            self._refuse(self.root, str(error), read=True)
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            return Entry(files, meta)
        for left_over in self.root.glob(f".{name}.*"):
            shutil.rmtree(left_over, ignore_errors=True)
        return Entry(files, meta, final / "kernel.o")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
