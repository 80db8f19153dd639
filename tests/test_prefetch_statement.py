"""What users state of an order: lists of paths and specifications, to files of a dataset. Nothing is mounted."""

import itertools
from pathlib import Path

import pytest
from conftest import MakePrepared
from mounting import command

from fanstore.errors import UsageError
from fanstore.format.index import Index
from fanstore.order import TorchDistributedSampler
from fanstore.prefetch.specification import KINDS, LISTS, MODES, Specification, parse_order
from fanstore.prefetch.statement import LISTS as LIST_MAKERS
from fanstore.prefetch.statement import MAKERS, PathList, specified


@pytest.fixture
def index(tmp_path: Path, make_prepared: MakePrepared) -> Index:
    tree = tmp_path / "tree"
    for name in ("train/b/2.jpg", "train/b/10.jpg", "train/a/1.jpg", "train/notes.txt", "val/a/1.jpg", "odd name"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    (tree / "link").symlink_to("odd name")
    (tree / "hard").hardlink_to(tree / "odd name")
    prepared = make_prepared(tree)
    return Index.from_buffer((prepared / "index.fsx").read_bytes())


def names(index: Index, files: object) -> list[str]:
    return [index.path(int(file)).decode() for file in files]  # type: ignore[attr-defined]


def test_lines_may_come_in_any_pieces(index: Index) -> None:
    text = b"train/a/1.jpg\n\n/mnt/data//val/./a/1.jpg\r\nodd name\n./train/b/2.jpg"
    wanted = [
        "train/a/1.jpg",
        "val/a/1.jpg",
        index.path(index.inode[index.resolve(b"odd name")]).decode(),
        "train/b/2.jpg",
    ]
    for size in (1, 7, len(text)):
        lines = PathList(index, [b"/mnt/data"])
        found = [file for start in range(0, len(text), size) for file in lines.feed(text[start : start + size])]
        assert names(index, [*found, *lines.feed(b"", end=True)]) == wanted
        assert lines.bad == 0


def test_bad_lines_are_counted_and_told(index: Index) -> None:
    lines = PathList(index, [b"/mnt/data"])
    text = b"nothing\n/etc/passwd\ntrain\nlink\n../tree/odd name\nval/a/1.jpg\n\xff\xfe\n"
    assert names(index, lines.feed(text)) == ["val/a/1.jpg"]
    assert lines.bad == 6
    assert lines.describe() == (
        "6 lines name no file of the dataset: 'nothing' is not in the dataset; '/etc/passwd' is not below the mount "
        "point; 'train' is not a regular file; ..."
    )


def test_a_specification_is_what_the_framework_does(index: Index) -> None:
    """Two nodes with two ranks each: four streams, together the epochs of the sampler, which is tested elsewhere."""
    spec = parse_order("torch-distributed:seed=3,root=train,ranks-per-node=2,epoch=1", "/")
    assert isinstance(spec, Specification)
    listed = ["train/a/1.jpg", "train/b/10.jpg", "train/b/2.jpg"]  # as ImageFolder: classes, then names sorted
    order = TorchDistributedSampler(3, 4, 3)
    for own, (origin, epochs) in enumerate(specified(spec, index, 0, 2)):
        assert (origin.source, origin.sampler, origin.seed) == ("stated", "torch-distributed", 3)
        for epoch, files in zip((1, 2), epochs, strict=False):
            assert names(index, files) == [listed[sample] for sample in order.samples(epoch, own)]
    ranks = [names(index, next(epochs)) for rank in range(2) for _, epochs in specified(spec, index, rank, 2)]
    assert ranks == [[listed[sample] for sample in order.samples(1, rank)] for rank in range(4)]


def test_every_name_and_every_list_has_a_meaning(index: Index) -> None:
    assert set(KINDS) == set(MAKERS)
    assert set(LISTS) == set(LIST_MAKERS)
    for name, listing in itertools.product(KINDS, LISTS):
        spec = parse_order(f"{name}:root=train,list={listing}", "/")
        assert isinstance(spec, Specification)
        ((_, epochs),) = specified(spec, index, 0, 1)
        assert 3 <= len(next(epochs)) <= 4


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("no-such-file", "is neither auto, hook, locality nor off, nor a file, nor one of torch-distributed, "),
        ("torch-distributed:sed=1", "'sed=1' is not one of seed=..., "),
        ("torch-distributed:seed=1,seed=2", "'seed=2' is not one of"),
        ("torch-distributed:seed", "'seed' is not one of"),
        ("torch-distributed:", "'' is not one of"),
        ("torch-distributed:seed=-1", "'seed' must be a number from 0 to 4294967295, not '-1'"),
        ("torch-random:ranks-per-node=0", "'ranks-per-node' must be a number from 1"),
        ("numpy:epochs=all", "'epochs' must be one of same, permuted, shuffled, not 'all'"),
        ("sequential:list=imagefolders", "'list' must be one of imagefolder, "),
    ],
)
def test_what_means_nothing_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_order(text, str(tmp_path))
    assert sentence in str(caught.value)
    result = command("mount", tmp_path / "d.fan", tmp_path / "m", "--order", text)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and sentence in result.stderr
    assert not (tmp_path / "m").exists()


def test_words_and_files(tmp_path: Path) -> None:
    assert [parse_order(word, "/") for word in MODES] == ["auto", "hook", "locality", "off"]
    (tmp_path / "list").write_text("")
    assert parse_order("list", str(tmp_path)) == tmp_path / "list"


def test_a_root_or_a_list_without_files_is_refused(index: Index) -> None:
    for values, sentence in (
        ({"root": "nowhere"}, "no directory 'nowhere'"),
        ({"root": "val/a"}, "has no file of val/a"),
    ):
        with pytest.raises(UsageError, match=sentence):
            specified(Specification("torch-random", values), index, 0, 1)
