"""kill -9 of a daemon at random moments, while programs write: what was promised is kept (docs/outputs.md).

Several daemons at once, each with its own directories, killed and followed by the next one again and again. What may
stand in ``--output`` follows from what the programs have noted outside of the mount (output_model.py).
"""

import contextlib
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import BOTH_ENGINES, fanstore_command
from mounting import LIMIT_S, Mounted, needs_fuse, prepare
from output_model import UNFINISHED, Model

pytestmark = [needs_fuse, pytest.mark.timeout(300)]

ENGINES = BOTH_ENGINES

#: With both engines, 100 kills.
CHAINS, KILLS = 5, 10
PROGRAMS = 2
PROGRAM = Path(__file__).with_name("output_program.py")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("crash")
    (base / "source" / "w1").mkdir(parents=True)
    (base / "source" / "file").write_bytes(b"of the dataset")
    return prepare(base / "source", base / "data.fan")


class Chain:
    """Daemons one after another, each of which is killed; all of them with the same directories."""

    def __init__(self, prepared: Path, base: Path, engine: str, seed: int) -> None:
        base.mkdir()
        self.base = base
        self.prepared = prepared
        self.engine = engine
        self.seed = seed
        self.chance = random.Random(seed)
        self.output = base / "out"
        self.local = base / "local"
        self.local.mkdir()
        self.models = {f"w{number}": Model() for number in range(PROGRAMS)}
        self.calls = 0
        self.killed_s = 0.0
        self.mounted: Mounted | None = None
        self.programs: list[subprocess.Popen[bytes]] = []

    def run(self) -> None:
        for number in range(KILLS):
            self._live(number)
            self._die()
            self._check(number, recovered=False)
            for journal in self.local.glob("*/outputs.journal"):
                shutil.copy(journal, self.base / f"life-{number}")  # for whoever looks into a failure
            if self.chance.random() < 0.75:
                self._recover()
            else:
                self._start(number + 1000)  # which does it too
                self._die()
            self._check(number, recovered=True)

    def _start(self, number: int) -> Mounted:
        own = self.base / f"life-{number}"
        own.mkdir()
        options = ["--output", str(self.output), "--local", str(self.local)]
        self.mounted = Mounted(self.prepared, self.base / "m", options, own, None, self.engine)
        self.mounted.wait_up()
        return self.mounted

    def _live(self, number: int) -> None:
        """Programs write to a mount, for some time."""
        mounted = self._start(number)
        for name in self.models:
            ledger = mounted.log.parent / name
            arguments = [PROGRAM, mounted.path / name, ledger, self.chance.randrange(1 << 30), LIMIT_S]
            command = [sys.executable, "-S", "-E", *map(str, arguments)]
            self.programs.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        deadline = time.monotonic() + LIMIT_S
        while not all((mounted.log.parent / name).exists() for name in self.models):
            assert time.monotonic() < deadline, mounted.evidence()
            time.sleep(0.002)
        time.sleep(self.chance.random() * 0.4)

    def _die(self) -> None:
        """The daemon is killed; what runs on its mount ends by itself."""
        assert self.mounted is not None
        self.killed_s = time.monotonic()
        self.mounted.process.kill()
        self.mounted.process.wait(LIMIT_S)
        for program in self.programs:
            program.wait(LIMIT_S)
        self.programs.clear()
        assert "Traceback" not in self.mounted.log_text(), self.mounted.log_text()
        assert " WARNING " not in self.mounted.log_text() and " ERROR " not in self.mounted.log_text(), (
            self.mounted.log_text()
        )

    def _recover(self) -> None:
        """``--recover``, which may be killed as well."""
        command = [fanstore_command("mount"), "--recover", "--local", str(self.local)]
        while True:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            if self.chance.random() < 0.4:
                time.sleep(0.1 + self.chance.random() * 0.15)
                process.kill()
                process.communicate(timeout=LIMIT_S)
                continue
            said, _ = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, said
            assert list(self.local.iterdir()) == [], said
            assert not list(self.output.glob(".fanstore*")), said
            return

    def _check(self, number: int, *, recovered: bool) -> None:
        """Programs close files in the native engine before Python hears of it: the last few may be lost that way."""
        wrong = []
        for name, model in self.models.items():
            directory = self.output / name
            if not recovered:
                assert self.mounted is not None
                self.calls += model.read(self.mounted.log.parent / name)
                wrong += [error for when_s, error in model.errors if when_s < self.killed_s]
                wrong += model.check_killed(directory)
            else:
                wrong += model.check_recovered(directory, last=0)
                for path in list(directory.rglob("*" + UNFINISHED)) if directory.exists() else []:
                    path.unlink()
                model.begin_again(directory)
        assert not wrong, f"seed {self.seed}, kill {number}, recovered {recovered}:\n" + "\n".join(wrong)

    def close(self) -> None:
        for program in self.programs:
            program.kill()
            program.wait(LIMIT_S)
        if self.mounted is not None:
            self.mounted.destroy()


def test_random_kills(prepared: Path, tmp_path: Path, engine: str) -> None:
    seed = int(os.environ.get("FANSTORE_CRASH_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"FANSTORE_CRASH_SEED={seed}")
    chains = [Chain(prepared, tmp_path / f"chain-{number}", engine, seed + number) for number in range(CHAINS)]
    try:
        with ThreadPoolExecutor(CHAINS) as pool:
            for future in [pool.submit(chain.run) for chain in chains]:
                future.result()
    finally:
        for chain in chains:
            chain.close()
    assert sum(chain.calls for chain in chains) > CHAINS * KILLS * 20, "hardly anything was done meanwhile"


# --- --fsync local ---

LIVES, SYNCERS = 2, 6


class Syncer(threading.Thread):
    """Writes a file again and again and syncs it each time, renames it or begins a new one, and leaves it open.

    Attributes:
        names: what it is called; two if it is being renamed. synced: what it had at the last sync.
        writing: what is being written over that; None if nothing is. count: syncs. fd: of the file.
    """

    def __init__(self, directory: Path, number: int, seed: int, rounds: int) -> None:
        super().__init__()
        self.directory = directory
        self.chance = random.Random(seed)
        self.rounds = rounds
        self.names = [f"f{number}"]
        self.synced: bytes | None = None
        self.writing: bytes | None = None
        self.count = 0
        self.fd = -1
        self.error: OSError | None = None

    def run(self) -> None:
        try:
            self._open()
            for _ in range(self.rounds):
                self._step()
        except OSError as error:
            self.error = error  # once the daemon was killed

    def _open(self) -> None:
        self.fd = os.open(self.directory / self.names[0], os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def _step(self) -> None:
        self.writing = self.chance.randbytes(3000)
        os.pwrite(self.fd, self.writing, 0)
        (os.fsync if self.chance.random() < 0.5 else os.fdatasync)(self.fd)
        self.synced, self.writing = self.writing, None
        self.count += 1
        old, new = self.names[0], f"{self.names[0].partition('-')[0]}-{self.count}"
        match self.chance.randrange(12):
            case 0:
                self.names = [old, new]
                os.rename(self.directory / old, self.directory / new)
                self.names = [new]
            case 1:
                self.names, self.synced = [new], None
                fd, self.fd = self.fd, -1
                os.close(fd)
                self._open()

    def check(self, output: Path) -> None:
        """After the recovery. What was not being written stands under its name as it was synced, and nothing else."""
        found = {
            path.name: path.read_bytes()
            for name in self.names
            for path in (output / name, output / (name + UNFINISHED))
            if path.exists()
        }
        if self.writing is None and self.synced is not None:
            assert list(found.values()) == [self.synced] and next(iter(found)) in self.names, (self.names, list(found))
        elif self.synced is not None:
            assert set(found.values()) & {self.synced, self.writing}, (self.names, list(found))


def test_kills_after_local_fsyncs(prepared: Path, tmp_path: Path, engine: str) -> None:
    """What fsync has answered for is there after the recovery, although nothing was closed or copied."""
    seed = int(os.environ.get("FANSTORE_CRASH_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"FANSTORE_CRASH_SEED={seed}")
    output, local = tmp_path / "out", tmp_path / "local"
    local.mkdir()
    for life in range(LIVES):
        own = tmp_path / f"life-{life}"
        own.mkdir()
        options = ["--output", str(output), "--fsync", "local", "--local", str(local)]
        mounted = Mounted(prepared, tmp_path / "m", options, own, None, engine)
        mounted.wait_up()
        directory = mounted.path / f"d{life}"
        directory.mkdir()
        # Half of them have ended with a sync when the daemon is killed, the others are in the middle of anything.
        syncers = [Syncer(directory, i, seed + 100 * life + i, 60 if i % 2 else 1 << 30) for i in range(SYNCERS)]
        try:
            for syncer in syncers:
                syncer.start()
            for syncer in syncers[1::2]:
                while syncer.is_alive():  # others close the same files meanwhile, which Python notes
                    with contextlib.suppress(FileNotFoundError):
                        os.close(os.open(directory / syncer.names[0], os.O_RDWR))
            assert [(s.error, s.names) for s in syncers if s.error] == []
        finally:
            mounted.process.kill()
            mounted.process.wait(LIMIT_S)
            for syncer in syncers:
                syncer.join(LIMIT_S)
                with contextlib.suppress(OSError):  # nobody answers, but it is closed
                    os.close(syncer.fd)
            mounted.destroy()
        assert all(syncer.count > 0 for syncer in syncers)
        recover = [fanstore_command("mount"), "--recover", "--local", str(local)]
        done = subprocess.run(recover, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S)
        assert done.returncode == 0 and not list(local.iterdir()), done.stdout
        for syncer in syncers:
            syncer.check(output / directory.name)
