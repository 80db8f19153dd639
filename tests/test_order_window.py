"""The policy of fetching ahead, without a mount: bounds, fairness, readers that jump, stop, or read something else."""

import itertools
import random
from collections.abc import Iterable, Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fanstore.order.order import Integers
from fanstore.order.window import FILE_BYTES, MILESTONE_FILES, STALL_S, Origin, Stream, Window, repeated

SIZE = 1000
STATED = Origin("stated", "list")


def window(*sequences: Sequence[int], total: int = 20 * SIZE) -> Window:
    made = Window(lambda file: SIZE, total)
    made.streams = [stream(files) for files in sequences]
    return made


def stream(files: Sequence[int], again: bool = False) -> Stream:
    array: Integers = np.array(files, dtype=np.uint32)
    epochs: Iterable[Integers] = repeated(array) if again else [array]
    return Stream(STATED, epochs)


def is_followed(policy: Window) -> bool:
    return policy.streams[0].followed


def read(policy: Window, files: Iterable[int], thread: int, fetched: set[int], now_s: float = 1.0) -> int:
    """Read one file after the other; how many had been fetched."""
    found = 0
    for file in files:
        found += file in fetched
        policy.seen(file, thread, now_s)
        fetched.update(policy.take(now_s))
    return found


def test_the_beginning_is_fetched_before_anybody_reads() -> None:
    policy = window(range(100))
    assert policy.take(0.0) == list(range(20))
    assert policy.take(0.0) == [], "no more than the window"
    assert policy.seen(0, 7, 1.0)
    assert policy.take(1.0) == [20], "as much as was read"


def test_a_reader_finds_everything_but_nothing_is_fetched_twice() -> None:
    policy = window(range(5, 500))
    fetched = set(policy.take(0.0))
    assert read(policy, range(5, 500), 7, fetched) == 495
    assert policy.counts.predicted == policy.counts.seen == policy.streams[0].counts.asked == 495
    policy.drop_finished(1.0)
    assert policy.streams == []


def test_workers_at_different_places_share_the_window() -> None:
    """As a DataLoader with 4 workers and batches of 50: each goes on at its own place."""
    policy = window(range(1000), total=40 * SIZE)
    fetched = set(policy.take(0.0))
    late = [0] * 5
    for step in range(5):
        for sample, worker in itertools.product(range(50), range(4)):
            file = step * 200 + worker * 50 + sample
            late[step] += file not in fetched
            policy.seen(file, 100 + worker, 1.0)
            fetched.update(policy.take(1.0))
            assert policy.held_bytes <= 40 * SIZE
    assert late[0] < 100, "what was fetched before anybody read is in the first batch"
    assert max(late[1:]) < 20, "of 200, where workers begin batches"
    assert is_followed(policy)


def test_workers_of_a_node_that_reads_an_other_share_in_each_epoch() -> None:
    """As with DistributedSampler and workers that are started for each epoch: while the last batches of one epoch are
    still read, a file of them that comes again early in the next one is expected at both places."""
    chance = random.Random(5)
    files, own, batch = 400, 100, 10
    epochs = [chance.sample(range(files), own) for _ in range(40)]
    policy = window(total=300 * SIZE)
    policy.streams = [Stream(STATED, [np.array(epoch, dtype=np.uint32) for epoch in epochs])]
    policy.take(0.0)
    for number, epoch in enumerate(epochs[:-4]):
        batches = [epoch[start : start + batch] for start in range(0, own, batch)]
        queues = [[file for each in batches[worker::2] for file in each][::-1] for worker in range(2)]
        ahead = chance.randrange(2)  # this worker is up to two batches before the other one
        while any(queues):
            lead = len(queues[1 - ahead]) - len(queues[ahead])
            worker = ahead if queues[ahead] and lead < 2 * batch else 1 - ahead
            worker = worker if queues[worker] else 1 - worker
            policy.seen(queues[worker].pop(), 10 * number + worker, 1.0 + number)
            policy.take(1.0 + number)
    counts = policy.counts
    assert counts.predicted == counts.seen == 36 * own
    assert policy.streams[0].counts.asked - counts.taken <= 300, "nothing is fetched twice"


def test_two_programs_with_different_orders_get_equal_shares() -> None:
    policy = window(range(1000), range(5000, 6000))
    first = policy.take(0.0)
    assert sorted(first) == [*range(10), *range(5000, 5010)]
    fetched = set(first)
    for step in range(500):
        read(policy, [step], 1, fetched)
        read(policy, [5000 + step], 2, fetched)
        assert all(stream.held_bytes <= 10 * SIZE for stream in policy.streams)
    assert policy.counts.predicted == 1000


def test_a_program_that_reads_something_else_is_left_alone() -> None:
    policy = window(range(1000))
    fetched = set(policy.take(0.0))
    read(policy, range(30), 1, fetched)
    assert not policy.seen(7777, 1, 2.0) and is_followed(policy), "one miss says nothing"
    assert policy.seen(30, 1, 2.0)
    for file in (7777, 8888):
        assert not policy.seen(file, 1, 3.0)
    assert not is_followed(policy) and policy.held_bytes == 0 and policy.take(3.0) == []
    # Another file of the order says nothing; three that follow each other do.
    assert not policy.seen(31, 1, 4.0) and not policy.seen(32, 1, 4.0)
    assert policy.take(4.0) == []
    assert policy.seen(33, 1, 4.0)
    assert policy.take(4.0) == list(range(34, 54))


def test_another_thread_does_not_end_an_order() -> None:
    policy = window(range(1000))
    fetched = set(policy.take(0.0))
    for step in range(100):
        read(policy, [step], 1, fetched)
        policy.seen(5000 + step, 2, 1.0)
    assert is_followed(policy) and policy.counts.predicted == 100


def test_a_wrong_order_costs_one_window() -> None:
    policy = window(range(100_000))
    fetched = set(policy.take(0.0))
    numbers = random.Random(3)
    wrong = [numbers.randrange(100, 100_000) for _ in range(3000)]
    read(policy, wrong, 1, fetched)
    assert len(fetched) <= 60, "some follow each other by chance"


def test_files_in_the_page_cache_are_passed_over() -> None:
    """They are not seen; every third one is."""
    policy = window(range(30_000), total=100 * SIZE)
    fetched = set(policy.take(0.0))
    seen = range(0, 30_000, 3)
    assert read(policy, seen, 1, fetched) > 0.99 * len(seen)
    assert policy.held_bytes <= 100 * SIZE


def test_a_reader_that_stops_gives_way() -> None:
    policy = window(range(1000), range(5000, 6000))
    fetched = set(policy.take(0.0))
    read(policy, range(3), 1, fetched, 1.0)
    read(policy, range(5000, 5100), 2, fetched, 1.0)
    assert policy.streams[0].held_bytes == 10 * SIZE
    late_s = 2.0 + STALL_S
    read(policy, range(5100, 5103), 2, fetched, late_s)
    policy.give_way(late_s)
    assert policy.streams[0].held_bytes == 0
    policy.take(late_s)
    assert policy.streams[1].held_bytes == 20 * SIZE, "the other one has all of it"
    # It goes on, and is found again.
    for step in range(20):
        read(policy, [3 + step], 1, fetched, late_s + 1)
        read(policy, [5103 + step], 2, fetched, late_s + 1)
    assert is_followed(policy) and policy.streams[0].held_bytes > 0


def test_a_worker_that_starts_later_finds_its_files() -> None:
    """What one has not passed over itself is not given up for it."""
    policy = window(range(1000), total=200 * SIZE)
    fetched = set(policy.take(1.0))
    read(policy, range(100, 190), 1, fetched)
    assert all(policy.seen(file, 2, 1.0) for file in range(80))


def test_a_list_that_nobody_has_begun_yet_is_not_given_up() -> None:
    policy = window(range(1000), total=40 * SIZE)
    fetched = set(policy.take(1000.0))
    read(policy, range(30), 1, fetched, 1000.0)
    policy.streams.append(stream(range(5000, 6000)))
    for step in range(30, 60):
        read(policy, [step], 1, fetched, 1001.0)
        policy.give_way(1001.0)
    assert policy.streams[1].followed and policy.streams[1].held_bytes == 20 * SIZE


def test_the_same_list_again_and_again() -> None:
    policy = Window(lambda file: SIZE, 20 * SIZE)
    policy.streams = [stream(range(50), again=True)]
    fetched = set(policy.take(0.0))
    for epoch in range(5):
        assert read(policy, range(50), 1, fetched) == 50
        assert policy.streams[0].epoch == epoch
    assert policy.counts.predicted == 250


def test_large_files_are_fetched_in_part_and_too_large_ones_not() -> None:
    policy = Window(lambda file: 1 << 40, 3 * FILE_BYTES)
    policy.streams = [stream(range(10))]
    assert policy.take(0.0) == [0, 1, 2]
    policy = Window(lambda file: 1 << 40, FILE_BYTES - 1)
    policy.streams = [stream(range(10))]
    assert policy.take(0.0) == [], "the cache is too small"


def test_files_that_are_read_unseen_move_the_window() -> None:
    """An intercepted program: only the number of files that it has opened is known."""
    policy = window(range(1000))
    fetched = policy.take(0.0)
    for _ in range(200):
        policy.passed(5, 1.0)
        fetched += policy.take(1.0)
        assert policy.held_bytes <= 20 * SIZE
    assert fetched == [*range(1000)]
    policy.passed(5, 1.0)
    policy.drop_finished(1.0)
    assert policy.streams == []


def test_unseen_files_count_for_all_orders_alike() -> None:
    policy = window(range(1000), range(5000, 6000))
    for _ in range(200):
        policy.passed(3, 1.0)
        policy.take(1.0)
    assert [stream.frontier for stream in policy.streams] == [200, 400]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bounds_hold_whatever_is_read(data: st.DataObject) -> None:
    """Random lists with files that come again, random sizes, random readers: never beyond the window, nothing twice."""
    sizes = data.draw(st.lists(st.integers(0, 5000), min_size=1, max_size=60))
    files = st.integers(0, len(sizes) - 1)
    lists = data.draw(st.lists(st.lists(files, min_size=1, max_size=200), min_size=1, max_size=3))
    total = data.draw(st.integers(0, 20_000))
    policy = Window(sizes.__getitem__, total)
    policy.streams = [stream(each, again=data.draw(st.booleans())) for each in lists]
    follow = iter(itertools.chain.from_iterable(lists))
    for number in range(150):
        now_s = number / 10
        for file in policy.take(now_s):
            assert 0 < sizes[file] <= total
        file = next(follow, 0) if data.draw(st.booleans()) else data.draw(files)
        policy.seen(file, data.draw(st.integers(1, 3)), now_s)
        policy.give_way(now_s)
        policy.drop_finished(now_s)
        assert 0 <= policy.held_bytes <= total
        for each in policy.streams:
            assert each.held_bytes == sum(size for _, size in each.held.values())
            assert all(reader.held_bytes >= 0 for reader in each.readers.values())


# --- what is read unseen, from the kernel's page cache ---


def unseen_window(*sequences: Sequence[int], total: int) -> Window:
    policy = window(*sequences, total=total)
    policy.unseen = True
    return policy


def read_unseen(policy: Window, files: Iterable[int], thread: int) -> tuple[int, int]:
    """As a program whose files are in the page cache, but for milestones: how many it has asked for; the others."""
    asked = unseen = 0
    kernel: set[int] = set()
    for file in files:
        kernel.update(given for given in policy.take(1.0) if policy.goes_unseen(given))
        if file in kernel:
            unseen += 1
        else:
            asked += 1
            policy.seen(file, thread, 1.0)
    return asked, unseen


def test_milestones_tell_how_far_a_reader_is() -> None:
    policy = unseen_window(range(5000), total=400 * SIZE)
    asked, unseen = read_unseen(policy, range(5000), 7)
    assert asked <= 5000 / MILESTONE_FILES + 2 and asked + unseen == 5000
    assert (policy.counts.seen, policy.counts.passed) == (asked, unseen)
    policy.drop_finished(1.0)
    assert policy.streams == [], "the last file is a milestone"


def test_milestones_are_close_in_a_small_window() -> None:
    policy = unseen_window(range(1000), total=8 * SIZE)
    asked, unseen = read_unseen(policy, range(1000), 7)
    assert asked + unseen == 1000 and policy.held_bytes == 0 and policy.counts.passed == unseen


def test_unseen_files_stay_within_the_window() -> None:
    policy = unseen_window(range(5000), total=400 * SIZE)
    given = set(policy.take(0.0))
    assert len(given) == 400 and policy.held_bytes == 400 * SIZE
    last = max(file for file in given if not policy.goes_unseen(file))
    assert policy.seen(last, 7, 1.0), "the milestones before it were in the page cache"
    assert policy.held_bytes <= 400 * SIZE
    for _ in range(20):
        given.update(policy.take(1.0))
    assert last + 200 in given and policy.held_bytes <= 400 * SIZE


def test_workers_read_unseen() -> None:
    """Batches of 50 of 4 workers, in turn: the window moves with them, and nothing is counted twice."""
    policy = unseen_window(range(4000), total=800 * SIZE)
    asked = unseen = 0
    kernel: set[int] = set()
    for step in range(20):
        for sample, worker in itertools.product(range(50), range(4)):
            kernel.update(given for given in policy.take(1.0) if policy.goes_unseen(given))
            file = step * 200 + worker * 50 + sample
            unseen += file in kernel
            if file not in kernel:
                asked += 1
                policy.seen(file, 100 + worker, 1.0)
    assert asked < 4000 / 10 and asked + unseen == 4000
    assert policy.counts.seen == asked and unseen - 100 < policy.counts.passed <= unseen
    assert is_followed(policy)


def test_a_file_that_another_reader_has_passed_counts_once() -> None:
    policy = unseen_window(range(400), total=400 * SIZE)
    policy.take(0.0)
    assert policy.goes_unseen(10) and not policy.goes_unseen(MILESTONE_FILES - 1)
    assert policy.seen(MILESTONE_FILES - 1, 1, 1.0)
    assert policy.counts.passed == MILESTONE_FILES - 1
    # Late: they were asked for before they were in the page cache, and another thread is found by them.
    assert [policy.seen(file, 2, 1.0) for file in (8, 9, 10)] == [False, False, True]
    assert policy.counts.passed == MILESTONE_FILES - 2


def test_what_is_read_besides_unseen_files_does_not_end_an_order() -> None:
    """Between two milestones a program may ask for several other files, and is left alone only after many."""
    policy = unseen_window(range(5000), total=400 * SIZE)
    policy.take(0.0)
    assert policy.seen(MILESTONE_FILES - 1, 7, 1.0)
    for other in range(MILESTONE_FILES - 2):
        assert not policy.seen(9000 + other, 7, 1.0)
    assert is_followed(policy) and policy.seen(2 * MILESTONE_FILES - 1, 7, 1.0)
    for other in range(MILESTONE_FILES):
        assert not policy.seen(9000 + other, 7, 1.0)
    assert not is_followed(policy) and policy.held_bytes == 0
