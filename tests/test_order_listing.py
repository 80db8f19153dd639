"""List orders: how programs number the files of a directory. The frameworks' own lists: test_order_frameworks.py."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fanstore.order import listing
from fanstore.order.order import Samples

#: A walk of a directory: what its files are called, and where they are.
WALK = [
    "top.jpg",
    "b/2.jpg",
    "b/10.JPG",
    "b/1.txt",
    "a/z.png",
    "a/sub/deep/1.png",
    "a/sub-2/1.png",
    "a-b/x.gif",
    ".h/x.jpg",
]


@pytest.mark.parametrize(
    ("list_order", "expected"),
    [
        (listing.image_folder, [".h/x.jpg", "a/z.png", "a/sub-2/1.png", "a/sub/deep/1.png", "b/10.JPG", "b/2.jpg"]),
        (listing.keras_flow, [".h/x.jpg", "a/z.png", "a/sub-2/1.png", "a/sub/deep/1.png", "b/10.JPG", "b/2.jpg"]),
        (listing.keras_dataset, ["a/z.png", "a/sub-2/1.png", "a/sub/deep/1.png", "a-b/x.gif", "b/10.JPG", "b/2.jpg"]),
        (
            listing.timm_folder,
            [".h/x.jpg", "a/sub-2/1.png", "a/sub/deep/1.png", "a/z.png", "b/2.jpg", "b/10.JPG", "top.jpg"],
        ),
        (listing.sorted_paths, sorted(WALK)),
        (listing.readdir, WALK),
    ],
)
def test_lists(list_order: Callable[[Sequence[str]], Samples], expected: list[str]) -> None:
    assert [WALK[number] for number in list_order(WALK)] == expected


def test_a_walk_has_files_before_directories() -> None:
    paths = ["b/deep/1", "b/2", "3", "a/4"]
    assert [paths[number] for number in listing.readdir(paths)] == ["3", "b/2", "b/deep/1", "a/4"]


def test_what_has_no_extension() -> None:
    """Dots at the beginning of a name begin no extension for timm; torchvision asks only how a name ends."""
    paths = ["c/.jpg", "c/..jpg", "c/a.jpg", "c/.a.jpg", "c/jpg"]
    assert [paths[number] for number in listing.timm_folder(paths)] == ["c/.a.jpg", "c/a.jpg"]
    assert len(listing.image_folder(paths)) == 4


def test_what_is_equal_by_natural_key_stays_as_it_was() -> None:
    paths = ["x1.jpg", "x01.jpg", "X1.jpg", "x001.jpg"]
    assert listing.timm_folder(paths).tolist() == [0, 1, 2, 3]
    assert listing.timm_folder(paths[::-1]).tolist() == [0, 1, 2, 3]


@settings(deadline=None)
@given(st.lists(st.from_regex(r"([a-c]{1,2}/){0,2}[a-z0-9]{1,3}\.(jpg|png|txt)", fullmatch=True), unique=True))
def test_every_list_is_of_different_files(paths: list[str]) -> None:
    for name, list_order in listing.LISTINGS.items():
        numbers = list_order(paths).tolist()
        assert len(set(numbers)) == len(numbers), name
        assert set(numbers) <= set(range(len(paths)))
        if name in ("sorted", "readdir"):
            assert len(numbers) == len(paths)
