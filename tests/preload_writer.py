"""A program that writes under the mount point in the ways of Python, its libraries and shells, and says what it got.

Run by test_preload_unmounted.py through the mount, beside it and without one: it must say the same, and leave the same
in ``--output``. Arguments: MOUNTPOINT, and a directory elsewhere.
"""

import errno
import fcntl
import hashlib
import json
import logging
import mmap
import multiprocessing
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

DAY_NS = 1_600_000_000_123_456_789


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def describe(path: str | int) -> tuple[str, int, int, int]:
    """What stat says, but for times and blocks."""
    about = os.stat(path, follow_symlinks=False) if isinstance(path, str) else os.fstat(path)
    size = about.st_size if not stat.S_ISDIR(about.st_mode) else 0
    assert about.st_uid == os.geteuid() and about.st_atime_ns == about.st_mtime_ns
    return oct(about.st_mode), about.st_nlink, size, about.st_ino


def say(what: str, call: Callable[..., object], *arguments: object) -> None:
    try:
        print(what, call(*arguments))
    except OSError as error:
        print(what, errno.errorcode[error.errno or 0])


def open_and_close(path: str, flags: int) -> None:
    os.close(os.open(path, flags, 0o640))


def tell_tree(top: str) -> None:
    for folder, folders, names in os.walk(top):
        folders.sort()
        print(folder, [(name, describe(os.path.join(folder, name))) for name in (*folders, *sorted(names))])


def write_files(aside: str) -> None:
    with open("new", "w") as file:
        print(file.write("hello\n"), describe(file.fileno()), describe("new"), os.get_inheritable(file.fileno()))
    with open("new", "a+") as file:
        file.write("more\n")
        file.seek(0)
        print(file.read())
    with open("new", "r+b", buffering=0) as raw:
        print(raw.seek(3), raw.write(b"LO"), raw.truncate(8), raw.seek(0), raw.readall())
    with open("new", "rb") as read, open("copy", "wb") as copy:
        print(os.sendfile(copy.fileno(), read.fileno(), 0, 5), os.fstat(copy.fileno()).st_size)
        print(os.copy_file_range(read.fileno(), copy.fileno(), 100, 0), copy.tell())
    with open("new", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 10)
        os.pwrite(file.fileno(), b"sparse", 1 << 20)
        print(os.lseek(file.fileno(), 0, os.SEEK_END), describe(file.fileno()))
        os.ftruncate(file.fileno(), 100)
    os.truncate("new", 50)
    print(digest(Path("new").read_bytes()), describe("new"))
    for flags in (os.O_EXCL, os.O_TRUNC, os.O_APPEND, os.O_DIRECTORY, os.O_TMPFILE & ~os.O_DIRECTORY):
        say(f"open {flags}", open_and_close, "new", os.O_RDWR | os.O_CREAT | flags)
    say("tmpfile", lambda: os.open(".", os.O_RDWR | os.O_TMPFILE, 0o600))
    say("path", lambda: describe(os.open("copy", os.O_PATH)))
    for umask, mode in ((0o077, 0o666), (0o002, 0o664), (0, 0o777), (0o022, 0o444)):
        before = os.umask(umask)
        os.close(os.open(f"mode-{mode:o}", os.O_WRONLY | os.O_CREAT, mode))
        os.mkdir(f"folder-{mode:o}", mode)
        os.umask(before)
        print(describe(f"mode-{mode:o}"), describe(f"folder-{mode:o}"))
    shutil.copy2("small.txt", "kept")
    shutil.copytree("a", "copied", symlinks=True)
    shutil.move("kept", aside)
    shutil.move(os.path.join(aside, "kept"), "back")
    print(os.stat("back").st_mtime_ns == os.stat("small.txt").st_mtime_ns)
    tell_tree(".")


def change_names(aside: str) -> None:
    os.makedirs("x/y/z", exist_ok=True)
    os.makedirs("x/y/z", exist_ok=True)
    Path("x/y/one").write_text("1")
    Path("x/two").write_text("22")
    for source, target in (
        ("x/y/one", "x/two"),
        ("x/two", "x/y/z/three"),
        ("x", "x/y/inside"),
        ("x/y/z", "moved"),
        ("moved", "x"),
        ("x/y", "moved"),
        ("nothing", "else"),
        ("moved/z", "small.txt"),
        ("small.txt", "large.txt"),
        ("moved", os.path.join(aside, "moved")),
        (os.path.join(aside, "nothing"), "moved"),
        ("moved/", "again/"),
        ("again/three/", "four"),
        ("again", "a"),
    ):
        say(f"rename {os.path.basename(source)} {target[-10:]}", os.rename, source, target)
    os.symlink("again/three", "to-three")
    os.symlink("nowhere/at/all", "to-nothing")
    os.symlink("again", "folder")
    print(os.readlink("to-three"), Path("to-three").read_text(), describe("to-three"), os.path.realpath("folder/three"))
    Path("to-made").symlink_to("made")
    Path("to-made").write_text("through a link")
    print(Path("made").read_text(), os.listdir("folder"), os.path.exists("to-nothing"), os.path.lexists("to-nothing"))
    say("link", lambda: os.link("made", "hard"))
    say("fifo", lambda: os.mkfifo("fifo"))
    say("mknod", lambda: os.mknod("node", 0o600 | stat.S_IFREG))
    for call in (os.unlink, os.rmdir):
        for name in ("again", "folder", "made", "nothing", "small.txt", "a", "x", "again/", "made/", ".", "x/.."):
            say(f"{call.__name__} {name}", call, name)
    os.chmod("x" if os.path.isdir("x") else "again", 0o750)
    os.mkdir("times")
    for name in ("times", "again/three"):
        os.utime(name, ns=(1, DAY_NS))
        print(name, os.stat(name).st_mtime_ns)
    os.utime("to-nothing", ns=(1, DAY_NS), follow_symlinks=False)
    os.setxattr("again/three", "user.note", b"kept")
    print(os.getxattr("again/three", "user.note"), os.listxattr("again/three"), os.lstat("to-nothing").st_mtime_ns)
    say("no such", lambda: os.getxattr("again/three", "user.other"))
    say("there", lambda: os.setxattr("again/three", "user.note", b"x", os.XATTR_CREATE))
    say("other", lambda: os.setxattr("again/three", "trusted.note", b"x"))
    say("removed", lambda: os.removexattr("again/three", "user.other"))
    say("owner", lambda: os.chown("again/three", os.geteuid(), -1))
    folder = os.open("again", os.O_RDONLY | os.O_DIRECTORY)
    fd = os.open("in", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=folder)
    os.mkdir("sub", dir_fd=folder)
    os.rename("in", "out", src_dir_fd=folder, dst_dir_fd=folder)
    os.fchmod(fd, 0o640)
    os.utime(fd, ns=(1, DAY_NS))
    print(describe(fd), sorted(os.listdir(folder)), os.readlink(f"/proc/self/fd/{folder}"), describe(folder))
    os.fchdir(folder)
    print(os.getcwd(), os.listdir("."), os.path.exists("../small.txt"), Path("../again/out").exists())
    os.chdir("sub")
    Path("relative").write_text("x")
    print(os.getcwd(), os.stat("..").st_ino == os.fstat(folder).st_ino, os.listdir(".."))
    os.chdir("../..")
    os.close(folder)
    os.close(fd)
    shutil.rmtree("again/sub")
    say("not empty", lambda: os.rmdir("again"))
    shutil.rmtree("again")
    tell_tree(".")


def keep_open(aside: str) -> None:
    """What has lost its name, or changed its place, while it is open."""
    with open("gone", "w+b") as file:
        file.write(b"x" * 1000)
        file.flush()
        os.unlink("gone")
        file.seek(0)
        print(file.read(4), os.fstat(file.fileno()).st_nlink, os.fstat(file.fileno()).st_size, os.path.exists("gone"))
        file.write(b"more")
        os.fsync(file.fileno())
        os.fchmod(file.fileno(), 0o600)
    with open("first", "w") as file:
        file.write("first")
        file.flush()
        os.rename("first", "second")
        file.write(" more")
    Path("third").write_text("third")
    with open("second") as old:
        os.replace("third", "second")
        print(old.read(), Path("second").read_text())
    with open("map", "w+b") as file:
        file.truncate(10_000)
        with mmap.mmap(file.fileno(), 0) as memory:
            memory[5000:5005] = b"in it"
            print(os.pread(file.fileno(), 5, 5000))
            memory.flush()
    array = np.lib.format.open_memmap("map.npy", mode="w+", dtype=np.int32, shape=(100,))
    array[:] = np.arange(100)
    array.flush()
    del array
    print(np.load("map.npy").sum(), np.load("map.npy", mmap_mode="r")[5])


def use_libraries(aside: str) -> None:
    np.save("saved.npy", np.arange(1000))
    np.savez("saved.npz", one=np.arange(10), two=np.ones(5))
    print(np.load("saved.npz")["two"].sum())
    with open("state.tmp", "w") as file:
        json.dump({"epoch": 7}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace("state.tmp", "state.json")
    print(json.load(open("state.json")))  # noqa: SIM115
    with tempfile.NamedTemporaryFile("wb", dir=".", delete=False) as temporary:
        temporary.write(b"checkpoint")
    os.rename(temporary.name, "checkpoint")
    with tempfile.TemporaryDirectory(dir=".") as folder, tempfile.TemporaryFile(dir=folder) as nameless:
        nameless.write(b"x" * 100)
        print(nameless.tell())
    handler = logging.FileHandler("train.log")
    logger = logging.getLogger("train")
    logger.addHandler(handler)
    for step in range(3):
        logger.warning("step %d", step)
    handler.close()
    with open("events", "ab") as events:
        for step in range(3):
            events.write(step.to_bytes(8, "little") * 10)
            events.flush()
            print(os.stat("events").st_size)
    for mode in ("DELETE", "WAL"):
        connection = sqlite3.connect(f"{mode}.db")
        print(connection.execute(f"PRAGMA journal_mode={mode}").fetchall())
        with connection:
            connection.execute("CREATE TABLE t (n)")
            connection.executemany("INSERT INTO t VALUES (?)", [(n,) for n in range(100)])
        other = sqlite3.connect(f"{mode}.db", timeout=0)
        connection.execute("BEGIN IMMEDIATE")
        try:
            other.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            print(error)
        connection.rollback()
        print(other.execute("SELECT sum(n) FROM t").fetchall())
        other.close()
        connection.close()
    print(sorted(os.listdir(".")))


def append_line(number: int) -> None:
    with open("together", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(f"line {number}\n")


def use_processes(aside: str) -> None:
    with open("said", "wb") as file:
        file.write(b"before\n")
        file.flush()
        print(subprocess.run(["echo", "from a child"], stdout=file, check=True).returncode)
        file.seek(0, os.SEEK_END)
        file.write(b"after\n")
    print(Path("said").read_text())
    with open("forked", "wb", buffering=0) as raw:
        raw.write(b"parent ")
        if os.fork() == 0:
            raw.write(b"child ")
            os._exit(0)
        os.wait()
        raw.write(b"again")
    print(Path("forked").read_text())
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.map(append_line, range(4))
    print(sorted(Path("together").read_text().splitlines()))
    os.unlink("together")
    with open("locked", "w") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        code = "import fcntl; fcntl.lockf(open('locked', 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        tried = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        print(tried.returncode, tried.stderr.splitlines()[-1])
    killed = subprocess.Popen([sys.executable, "-c", "import os\nos.write(os.open('killed', 65), b'x' * 99); input()"],
                              stdin=subprocess.PIPE)  # fmt: skip
    while not os.path.exists("killed") or os.stat("killed").st_size < 99:
        time.sleep(0.01)
    killed.kill()
    print(killed.wait(), describe("killed")[2])


SHELL = """
exec 2>&1; export LC_ALL=C
echo one > one; echo two >> one; cat one; cat < one > two; tee three four < one; : > empty; cp -r copied again
cp -p small.txt five; mv five six; mkdir -p p/q/r; touch p/q/r/s; printf '%s\\n' x y > 'a name'; cat <<END > here
$(date -d @0 +%Y) $(wc -c < one)
END
(cd p/q && pwd && echo in > ../there && ls -R .. && rm -r r); rmdir p; rm -rf p; ls -d p
sed -i s/one/ONE/ one; cat one; dd if=/dev/zero of=zeros bs=1000 count=5 conv=fsync status=none; truncate -s 7 zeros
find . -newer small.txt -name 'o*' -print | sort; du --apparent-size -b two; stat -c '%n %s %a %F' one zeros 'a name'
tar cf all.tar --mtime=@0 a one two && tar tf all.tar && mkdir un && tar xf all.tar -C un && cmp un/a/one a/one
rsync -a --exclude=un ./a/ synced/ && diff -r a synced && echo synced; install -m 755 small.txt tool
echo x > small.txt; rm -f small.txt; mv small.txt y; mkdir a; echo x > a/b/new && cat a/b/new; ln one hard
exec 5> five; echo through >&5; exec 5>&-; cat five; exec 6<> six; read line <&6; echo "$line"; echo again >&6; cat six
sort -o sorted two; yes | head -5000 > many; wc many; test -w one -a -w a/one && echo writable; sync one; chmod 400 two
for i in 1 2 3; do echo $i > loop.$i & done; wait; cat loop.*; rm loop.?; ls
"""


def use_shell(aside: str) -> None:
    result = subprocess.run(["bash", "-c", SHELL], capture_output=True, text=True, check=False)
    print(result.returncode, result.stdout, result.stderr)


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    os.umask(0o022)
    for part in (write_files, change_names, keep_open, use_libraries, use_processes, use_shell):
        print(f"--- {part.__name__}", flush=True)
        part(sys.argv[2])
