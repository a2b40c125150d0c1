"""A file system with the rules of a mounted bucket, over a local folder. Needs mfusepy and libfuse.

    python bucket.py KIND FOLDER MOUNT_POINT

KIND is

- `objects` (mountpoint-s3): files are written once, from the start to the end; nothing is renamed or changed;
- `prefixes` (gcsfuse, goofys): files can be changed, folders can't be renamed;
- `cached` (rclone with `--vfs-cache-mode full`, SkyPilot's MOUNT_CACHED): a folder is renamed file by file, and a
  listing takes `LISTING` seconds.

All refuse O_DIRECT and links. With direct_io the kernel refuses shared memory maps, too.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

import mfusepy

LISTING = 0.05  # seconds
WRITING = os.O_WRONLY | os.O_RDWR


class Bucket(mfusepy.Operations):
    """Enforces the rules of a kind of bucket, and passes calls on to a local folder."""

    use_ns = True

    def __init__(self, kind: str, folder: str) -> None:
        self.kind, self.folder = kind, folder
        self.ends: dict[int, int] = {}  # descriptor of a new file -> written bytes

    def place(self, path: str) -> str:
        return self.folder + path

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self.place(path))
        names = ("st_gid", "st_mode", "st_nlink", "st_size", "st_uid")
        times = {f"st_{name}": getattr(found, f"st_{name}_ns") for name in ("atime", "ctime", "mtime")}
        return {name: getattr(found, name) for name in names} | times

    def readdir(self, path: str, fh: int) -> list[str]:
        if self.kind == "cached":
            time.sleep(LISTING)
        return [".", "..", *os.listdir(self.place(path))]

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self.place(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self.place(path))
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self.place(path))
        return 0

    def chmod(self, path: str, mode: int) -> int:
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        return 0

    def utimens(self, path: str, times: Any = None) -> int:
        return 0

    def rename(self, old: str, new: str) -> int:
        is_folder = os.path.isdir(self.place(old))
        if self.kind == "objects" or (self.kind == "prefixes" and is_folder):
            raise mfusepy.FuseOSError(errno.ENOSYS)
        if is_folder:
            self._rename_files(Path(self.place(old)), Path(self.place(new)))
        else:
            os.replace(self.place(old), self.place(new))
        return 0

    def _rename_files(self, old: Path, new: Path) -> None:
        new.mkdir()
        for path in sorted(old.iterdir()):
            if path.is_dir():
                self._rename_files(path, new / path.name)
            else:
                path.rename(new / path.name)
        old.rmdir()

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        descriptor = os.open(self.place(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)
        self.ends[descriptor] = 0
        return descriptor

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise mfusepy.FuseOSError(errno.EINVAL)
        if self.kind == "objects" and flags & WRITING:
            raise mfusepy.FuseOSError(errno.EPERM)
        return os.open(self.place(path), flags & ~os.O_APPEND)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        if self.kind == "objects" and offset != self.ends.get(fh):
            raise mfusepy.FuseOSError(errno.EINVAL)
        self.ends[fh] = offset + len(data)
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        if self.kind == "objects":
            raise mfusepy.FuseOSError(errno.EPERM)
        os.truncate(self.place(path), length)
        return 0

    def flush(self, path: str, fh: int) -> int:
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        return 0

    def release(self, path: str, fh: int) -> int:
        self.ends.pop(fh, None)
        os.close(fh)
        return 0


if __name__ == "__main__":
    mfusepy.FUSE(Bucket(sys.argv[1], sys.argv[2]), sys.argv[3], foreground=True, direct_io=True)
