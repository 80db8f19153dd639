"""Samplers of fanstore.torch in the real torch: each sample once, equally many, deterministic, elastic, resumable.

torch comes from another environment: FANSTORE_TEST_FRAMEWORKS=/path/to/venv/bin/python, made by environments.py for
scripts/test; it must be of the same Python as this one. What runs there is torch_samplers.py.
"""

import difflib
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asked_process import Ask, asked_process
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mounting import Mount, prepare
from PIL import Image

pytest_plugins = ["mounting"]
PYTHON = os.environ.get("FANSTORE_TEST_FRAMEWORKS", "")
SCRIPT = Path(__file__).parent / "torch_samplers.py"
EXAMPLE = Path(__file__).parent.parent / "examples" / "shuffling" / "images.py"
LIMIT_S = 60.0

pytestmark = pytest.mark.skipif(not PYTHON, reason="frameworks are installed by scripts/test --all")

FRACTIONS = st.sampled_from([0.0, 0.1, 0.5, 1.0])
#: Every kind of sampler, with the options that are its own.
KINDS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "GlobalShuffle": st.just({}),
    "LocalShuffle": st.just({}),
    "PartialLocalShuffle": st.fixed_dictionaries({"fraction": FRACTIONS}),
    "ImportanceExchange": st.fixed_dictionaries(
        {"fraction": FRACTIONS, "pairing": st.booleans(), "lagging": st.booleans()}
    ),
    "LocalityAware": st.fixed_dictionaries({"batch": st.integers(1, 5)}),
    "ShardShuffle": st.fixed_dictionaries({"buffer": st.integers(1, 20), "shards": st.none() | st.integers(1, 9)}),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
some = settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


def environment() -> dict[str, str]:
    """Of a process that finds torch and this clone's FanStore."""
    (packages,) = Path(PYTHON).parent.parent.glob("lib/python*/site-packages")
    return {**os.environ, "PYTHONPATH": str(packages), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """A process with torch: ask(case, **arguments) is what samplers did there."""
    with asked_process(sys.executable, SCRIPT, environment(), tmp_path_factory.mktemp("samplers")) as asked:
        yield asked


def flat(parts: list[list[Any]]) -> list[Any]:
    return [sample for part in parts for sample in part]


def jobs(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    """Arguments of a case: a small job, of even or uneven ownership, also with fewer samples than ranks."""

    @st.composite
    def draw_job(draw: st.DrawFn) -> dict[str, Any]:
        samples, ranks = draw(st.integers(0, 60)), draw(st.integers(1, 7))
        owners = st.lists(st.integers(0, ranks - 1), min_size=samples, max_size=samples)
        common = {
            "seed": draw(st.integers(0, 9)),
            "drop_last": draw(st.booleans()),
            "balance": draw(st.booleans()),
            "ownership": draw(st.none() | owners),
        }
        return {"kind": kind, "samples": samples, "ranks": ranks, "options": {**draw(KINDS[kind]), **common}}

    return draw_job()


@each_kind
@some
@given(data=st.data())
def test_each_sample_once_and_equally_many(ask: Ask, kind: str, data: st.DataObject) -> None:
    job = data.draw(jobs(kind))
    options, samples, ranks = job["options"], job["samples"], job["ranks"]
    epochs = ask("epochs", **job, count=3, batch=4)
    assert ask("epochs", **job, count=3, batch=4) == epochs  # deterministic
    even = options["ownership"] is None or options["balance"]
    for parts in epochs:
        assert len({len(part) for part in parts}) == 1
        times = Counter(flat(parts))
        if options["drop_last"]:
            assert max(times.values(), default=0) <= 1
            if even:
                assert len(parts[0]) == samples // ranks
        else:
            assert sorted(times) == list(range(samples))
            if even:
                assert len(parts[0]) == -(-samples // ranks)
                assert sum(times.values()) - samples < ranks  # padding
        if not even and not options["drop_last"]:  # padded to what the one that owns most reads
            assert len(parts[0]) == max(Counter(options["ownership"]).values(), default=0)


@each_kind
@some
@given(data=st.data())
def test_resumed_with_the_same_ranks(ask: Ask, kind: str, data: st.DataObject) -> None:
    """Stopped twice in one epoch: what is read is what would have been read."""
    job = data.draw(jobs(kind))
    stop = data.draw(st.integers(0, 2))
    whole = ask("epochs", **job, count=stop + 2, batch=3)
    length = len(whole[stop][0])
    first = data.draw(st.integers(0, length))
    positions = [first, data.draw(st.integers(0, length - first))]
    told = ask("resumed", **job, stop=stop, positions=positions, then=[job["ranks"]] * 2)
    for rank in range(job["ranks"]):
        parts = [told["before"][0][rank], told["before"][1][rank], told["left"][rank]]
        assert flat(parts) == whole[stop][rank]
    if job["options"].get("lagging", True):  # without, the losses of this epoch decide, which are not told here
        assert told["next"] == whole[stop + 1]


@each_kind
@some
@given(data=st.data())
def test_resumed_with_other_ranks(ask: Ask, kind: str, data: st.DataObject) -> None:
    """Stopped twice in one epoch, each time with another number of ranks: nothing is left out, nothing read twice."""
    job = data.draw(jobs(kind))
    job["options"] |= {"ownership": None, "drop_last": False}
    then = [data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))]
    positions = [data.draw(st.integers(0, 1 + job["samples"] // job["ranks"])), data.draw(st.integers(0, 4))]
    told = ask("resumed", **job, stop=1, positions=positions, then=then)
    assert len({len(part) for part in told["left"]}) == 1 and len(told["left"]) == then[-1]
    times = Counter(flat([flat(parts) for parts in (*told["before"], told["left"])]))
    assert sorted(times) == list(range(job["samples"]))
    assert sum(times.values()) - job["samples"] < job["ranks"] + sum(then)  # padding
    assert sorted(set(flat(told["next"]))) == list(range(job["samples"]))
    assert len({len(part) for part in told["next"]}) == 1


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("samples", "ranks"), [(100, 4), (101, 4), (3, 8), (7, 1)])
def test_the_numbers_of_distributed_sampler(ask: Ask, samples: int, ranks: int, drop_last: bool) -> None:
    stock, ours = ask("like_distributed_sampler", samples=samples, ranks=ranks, drop_last=drop_last)
    assert ours == stock


@each_kind
def test_fewer_samples_than_ranks_are_shared_evenly(ask: Ask, kind: str) -> None:
    options = {"PartialLocalShuffle": {"fraction": 0.5}, "ImportanceExchange": {"fraction": 0.5},
               "LocalityAware": {"batch": 2}, "ShardShuffle": {"buffer": 2}}.get(kind, {})  # fmt: skip
    for parts in ask("epochs", kind=kind, samples=3, ranks=8, options=options, count=3, batch=1):
        assert [len(part) for part in parts] == [1] * 8
        assert sorted(Counter(flat(parts)).values()) == [2, 3, 3]


def test_local_and_partial_read_what_they_own(ask: Ask) -> None:
    owner = [sample % 3 for sample in range(60)]
    for kind, options in (("LocalShuffle", {}), ("PartialLocalShuffle", {"fraction": 0.2})):
        job = {"kind": kind, "samples": 60, "ranks": 3, "options": {**options, "ownership": owner}}
        for epoch, parts in enumerate(ask("epochs", **job, count=3, batch=4)):
            away = sum(owner[sample] != rank for rank, part in enumerate(parts) for sample in part)
            assert away == 0 if epoch == 0 or kind == "LocalShuffle" else 0 < away <= 12 * epoch


@pytest.mark.parametrize(
    ("call", "arguments", "sentence"),
    [
        ("record", [[0, 1], [0.5]], "there are 1 losses for 2 samples; record the loss of each (reduction='none')"),
        ("record", [[0, 8], [1, 1]], "losses are of samples 0 to 7; other indices were recorded"),
        ("set_epoch", [-1], "'epoch' is -1; it must be 0 or more"),
        ("state_dict", [-1], "'position' is -1; it must be 0 or more"),
        (
            "load_state_dict",
            [{"shuffle": "GlobalShuffle"}],
            "this state has shuffle GlobalShuffle, the sampler ImportanceExchange: make it as in the job that saved it",
        ),
        (
            "load_state_dict",
            [{"shuffle": "ImportanceExchange", "samples": 9}],
            "this state has samples 9, the sampler 8: make it as in the job that saved it",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(ask: Ask, call: str, arguments: list[Any], sentence: str) -> None:
    job = {"kind": "ImportanceExchange", "samples": 8, "ranks": 1, "options": {"fraction": 0.5}}
    assert ask("refused", **job, call=call, arguments=arguments) == sentence


def test_image_folder_of_pls(ask: Ask, tmp_path: Path) -> None:
    root, class_file = tmp_path / "data", tmp_path / "classes"
    for number, name in enumerate(["cat/b.png", "cat/a.PNG", "ant/more/c.png", "ant/z.png"]):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2), number).save(path)
    (root / "ant" / "list.txt").write_text("no image")
    (root / "first.png").write_text("in no class")
    listed = [("ant/z.png", 0, 3), ("ant/more/c.png", 0, 2), ("cat/a.PNG", 1, 1), ("cat/b.png", 1, 0)]
    assert ask("image_folder", root=str(root), class_file=None) == [
        [f"{root}/{name}", [number] * 3, label] for name, label, number in listed
    ]
    class_file.write_text("cat which purrs\n\nant\ndog\n")
    assert [label for _, _, label in ask("image_folder", root=str(root), class_file=str(class_file))] == [1, 1, 0, 0]
    class_file.write_text("cat\n")
    sentence = f"the class of 'ant/z.png' is not in '{class_file}'; add it there"
    assert ask("image_folder", root=str(root), class_file=str(class_file)) == sentence
    sentence = f"'{root}/ant' has no images in directories of classes"
    (root / "ant" / "more" / "c.png").unlink()
    assert ask("image_folder", root=f"{root}/ant", class_file=None) == sentence


def test_one_path_for_each_sample(ask: Ask) -> None:
    job = {"kind": "LocalShuffle", "samples": 8, "ranks": 1, "options": {"files": ["a"] * 7}}
    sentence = "'files' has 7 paths for 8 samples; it must have one for each"
    assert ask("refused", **job, call="set_epoch", arguments=[0]) == sentence


def test_losses_of_ranks_that_cannot_talk_are_refused(ask: Ask) -> None:
    """Rather than let every rank decide by its own."""
    code = """
import fanstore.torch
sampler = fanstore.torch.ImportanceExchangeSampler(range(8), 2, 0, fraction=0.5)
sampler.set_epoch(1)  # nothing recorded: no need to talk
sampler.record([3], [0.5])
sampler.set_epoch(2)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert "UsageError: the losses of 2 ranks are brought together by torch.distributed: call" in result.stderr


def two_ranks(case: str, *arguments: str) -> list[str]:
    """What each of two processes has said that are connected."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), case, str(rank), str(port), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment(), "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=2 * LIMIT_S) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0, 0], said
    return [out for out, _ in said]


def test_two_processes_exchange_by_the_losses_of_both() -> None:
    answers = [json.loads(out) for out in two_ranks("gloo")]
    assert [answer["ranks"] for answer in answers] == [2, 2]
    sent = [0, 0]
    for epoch in range(4):
        parts = [answer["seen"][epoch] for answer in answers]
        important = [part.pop() for part in parts]
        assert sorted(flat(parts)) == list(range(40))
        if epoch:  # by losses of the epoch before: each rank sends 5, and those with the great losses first
            owned = [sum(sample % 5 == 0 for sample in part) for part in parts]
            assert important == [min(5, count) for count in owned]
            sent = [one + other for one, other in zip(sent, important, strict=True)]
    assert min(sent) > 0


def test_the_example_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """Three epochs at once, and in two runs, the first of which ends in the middle of an epoch: the same steps."""
    colours = np.random.RandomState(0).randint(0, 256, (2, 15, 3))
    for number in range(30):
        path = tmp_path / "data" / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), tuple(colours[number % 2, number // 2].tolist())).save(path)

    def run(checkpoint: str, *options: str) -> list[str]:
        line = [sys.executable, str(EXAMPLE), str(tmp_path / "data"), "--checkpoint", str(tmp_path / checkpoint)]
        done = subprocess.run([*line, *options], env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    whole = run("whole")
    assert [line.split(":")[0] for line in whole] == ["epoch 0, step 4", "epoch 1, step 8", "epoch 2, step 12"]
    assert run("parts", "--stop-after", "6")[-1].startswith("epoch 1, step 6: ")
    assert run("parts") == whole[1:]
    assert run("parts") == []  # nothing is left to do


# ---- Stock classes -------------------------------------------------------------------------------------------------


def test_the_stock_classes_without_a_mount(ask: Ask, tmp_path: Path) -> None:
    make_images(tmp_path / "data")
    check_stock(ask("stock", root=str(tmp_path / "data")))
    (tmp_path / "data" / "none").mkdir()
    assert "the class 'none' of" in ask("stock_refused", root=str(tmp_path / "data"))
    assert "has no directories" in ask("stock_refused", root=str(tmp_path / "data" / "none"))


def test_the_stock_classes_on_a_mount(ask: Ask, tmp_path: Path, mount: Mount) -> None:
    """The same batches, out of memory that is shared; the daemon knows each epoch, also of a sampler of our own."""
    make_images(tmp_path / "data")
    mounted = mount(prepare(tmp_path / "data", tmp_path / "d.fan"), "--order", "auto", "--local", str(tmp_path / "ssd"))
    said = ask("stock", root=str(mounted.path))
    check_stock(said)
    assert said["memory"] == ["mmap"]
    assert [order["source"] for order in said["order"]] == ["hooked"] * 3
    assert [order["sampler"] for order in said["order"]] == ["RandomSampler"] * 2 + ["GlobalShuffleSampler"]
    assert "reports its order: GlobalShuffleSampler, 24 samples" in mounted.log_text()


def body(script: Path) -> list[str]:
    """Its lines behind what it says of itself."""
    return script.read_text().split('"""\n', 2)[-1].splitlines()


def test_examples_for_each_way(tmp_path: Path) -> None:
    """Each trains, with a dozen lines that the plain script has not; the stock classes learn exactly the same."""
    make_images(tmp_path / "data")
    scripts = sorted(EXAMPLE.parent.glob("*.py"))
    scripts.remove(EXAMPLE)
    plain = body(EXAMPLE.with_name("plain.py"))
    for script in scripts:
        changed = [line for line in difflib.ndiff(plain, body(script)) if line.startswith("+ ") and line != "+ "]
        assert len(changed) <= 12, script.name
    losses: list[dict[str, list[str]]] = []
    name = ""
    for out in two_ranks("examples", str(tmp_path / "data"), *map(str, scripts)):
        losses.append({})
        for line in out.splitlines():
            if line.startswith("rank "):
                losses[-1][name].append(line)
            else:
                losses[-1][name := line] = []
    for said in losses:
        assert sorted(said) == [script.stem for script in scripts] and len(said) == 7
        for lines in said.values():
            values = [float(line.rpartition(" ")[2]) for line in lines]
            assert len(values) == 2 and 0 < min(values) <= max(values) < 2
        assert said["stock_classes"] == said["plain"] != said["shards"]


def make_images(root: Path) -> None:
    """Files of two classes, deeper ones and others among them."""
    for number in range(24):
        path = root / f"class{number % 2}" / f"{'deeper' if number > 18 else '.'}" / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 3), (number, 255 - number, 7)).save(path)
    (root / "class0" / "notes.txt").write_text("no image")


def check_stock(said: dict[str, Any]) -> None:
    ours, theirs = said["listed"]
    assert ours == theirs and len(ours[0]) == 24
    for case in range(0, 6, 2):
        assert said["batches"][case] == said["batches"][case + 1], "also the random numbers that are left"
    assert said["batches"][0] != said["batches"][4]
