"""A program that reads a dataset in the ways of Python and its libraries, and says what it has got.

Run by test_preload.py through the mount and with the preloaded library: it must say the same. Arguments: MOUNTPOINT,
and "plain" for what needs nothing but Python itself.
"""

import hashlib
import io
import mmap
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path


def digest(data: bytes | mmap.mmap | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def all_files(root: str) -> list[str]:
    return sorted(os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names)


def read_everything(root: str) -> None:
    for path in all_files(root):
        with open(path, "rb") as file:
            data = file.read()
        about = os.stat(path)
        print(path, digest(data), about.st_size, about.st_ino, about.st_mtime_ns, oct(about.st_mode), about.st_nlink)
        with open(path, "rb", buffering=0) as raw:
            raw.seek(-min(len(data), 100), os.SEEK_END)
            print(digest(raw.read()), raw.tell(), raw.isatty(), raw.seekable())
        fd = os.open(path, os.O_RDONLY)
        print(digest(os.pread(fd, 5000, 1000)), os.get_inheritable(fd))
        os.close(fd)
        if data:
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
                print(digest(memory), file.read(3), file.tell())


def list_everything(root: str) -> None:
    for folder, folders, names in os.walk(root):
        folders.sort()
        print(folder, folders, sorted(names))
    with os.scandir(root) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            about = entry.stat(follow_symlinks=False)
            print(entry.name, entry.is_file(), entry.is_dir(), entry.is_symlink(), about.st_size, about.st_ino)
    print(sorted(map(str, Path(root).glob("**/*.txt"))), os.path.realpath(os.path.join(root, "link")))


def use_libraries(root: str) -> None:
    import numpy as np
    from PIL import Image

    array = os.path.join(root, "array.npy")
    print(np.load(array).sum(), np.load(array, mmap_mode="r")[3:].sum(), np.fromfile(array, np.uint8).sum())
    with Image.open(os.path.join(root, "picture.png")) as image:
        print(image.size, digest(image.convert("RGB").tobytes()))
    with tempfile.TemporaryDirectory() as aside:
        copy = os.path.join(aside, "copy")
        shutil.copy2(os.path.join(root, "a", "two"), copy)
        print(digest(Path(copy).read_bytes()), os.stat(copy).st_mtime_ns)


def use_processes(root: str) -> None:
    two = os.path.join(root, "a", "two")
    with open(two, "rb") as file:
        file.seek(207_000 - 1_000)
        print(subprocess.run(["wc", "-c"], stdin=file, capture_output=True, check=True).stdout)
    print(subprocess.run(["sha256sum"], stdin=open(two, "rb"), capture_output=True, check=True).stdout)  # noqa: SIM115
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map(read_and_digest, all_files(root)))
    with open(two, "rb", buffering=0) as file:
        file.seek(10)
        pid = os.fork()
        if pid == 0:
            os._exit(0 if file.read(90) and file.tell() == 100 else 1)
        print(os.waitpid(pid, 0)[1], file.tell())


def read_and_digest(path: str) -> str:
    with open(path, "rb") as file:
        return digest(file.read())


def use_threads(root: str) -> None:
    paths = all_files(root)
    found: dict[int, list[str]] = {}

    def work(number: int) -> None:
        found[number] = [read_and_digest(path) for path in paths]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(len({tuple(each) for each in found.values()}), found[0])


def make_mistakes(root: str) -> None:
    wishes = [
        ("missing", os.O_RDONLY),
        ("a", os.O_RDONLY),
        ("a/two", os.O_WRONLY),
        ("a/two/x", os.O_RDONLY),
        ("a/two/", os.O_RDONLY),
        ("a/two", os.O_RDONLY | os.O_CREAT | os.O_EXCL),
        ("n" * 300, os.O_RDONLY),
        ("link", os.O_RDONLY | os.O_NOFOLLOW),
    ]
    for name, flags in wishes:
        try:
            fd = os.open(os.path.join(root, name), flags)
        except OSError as error:
            print(name[:10], flags, error.strerror)
        else:
            print(name, flags, "opened")
            os.close(fd)
    with open(os.path.join(root, "a", "two"), "rb") as file:
        for call in (file.fileno, lambda: file.write(b"x"), lambda: os.truncate(file.fileno(), 0)):
            try:
                print(type(call()))
            except (OSError, io.UnsupportedOperation) as error:
                print(error)


if __name__ == "__main__":
    point = sys.argv[1]
    parts = (read_everything, list_everything, use_processes, use_threads, make_mistakes)
    for part in parts if "plain" in sys.argv else (*parts, use_libraries):
        print(f"--- {part.__name__}", flush=True)
        part(point)
