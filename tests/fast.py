"""Which tests ``scripts/test --fast`` runs: those for the inner loop, less than two minutes together.

Owns the list: shell patterns for names of tests, without ``tests/``; conftest.py applies it. From below: formats and
the core, nearly whole; real mounts, command lines and outputs, where a module is quick; a few tests of MPI and of jobs
of several nodes. Not here: ordinary users (who need an installation of their own), sanitizers, most faults, Slurm,
browser, frameworks. ``scripts/test --durations=40`` says what is slow.
"""

import fnmatch

FAST = (
    # formats and preparing
    "test_index*",
    "test_manifest.py*",
    "test_tar_headers.py*",
    "test_tar_sources.py*",
    "test_prepared_parts.py*",
    "test_prep_options.py*",
    "test_prep_sources.py*",
    "test_prep_writer.py*",
    "test_verify.py*",
    # the core, and one process of the transport
    "test_control_server.py*",
    "test_core_*",
    "test_sources.py*",
    "test_outputs_copy_batcher.py*",
    "test_outputs_histories.py::test_histories?0?",
    "test_outputs_recovery.py*",
    "test_outputs_replicated_tree.py*",
    "test_outputs_rush.py*",
    "test_outputs_saver.py*",
    "test_outputs_sequencer.py*",
    "test_outputs_tree.py*",
    "test_prefetch_recognised.py::test_the_*found*",
    "test_order_window.py*",
    "test_prefetch_statement.py*",
    "test_transport.py::TestConformance::test_in_process*",
    "test_transport_window.py*",
    "test_native_creates.py*",
    "test_native_output*",
    # the house
    "test_agent.py*",
    "test_architecture.py*",
    "test_fanstore_command.py*",
    "test_hygiene.py*",
    "test_man.py*",
    "test_readme.py*",
    "test_report.py*",
    # real mounts
    "test_engines.py*",
    "test_mount_ahead.py*",
    "test_mount_damage.py*",
    "test_mount_options.py*",
    "test_mount_read.py*",
    "test_mount_readonly.py*",
    "test_mount_translation.py*",
    "test_mountpoint.py*",
    "test_outputs.py::test_resumed_job*",
    "test_outputs.py::test_fsync_means_safe*",
    # real MPI, jobs of several nodes
    "test_transport.py::TestConformance::test_open_mpi?ask_and_tell?",
    "test_transport.py::TestConformance::test_open_mpi?killed?",
    "test_job_life.py::test_command_once_per_rank*",
    "test_job_survival.py::test_death_of_rank_0",
    "test_outputs_job.py::test_what_is_closed_is_seen_everywhere?native-2?",
)
#: The slow ones among them.
SLOW = (
    "test_core_namespace.py::test_a_directory_of_100_000_entries",
    "test_outputs_saver.py::test_all_is_saved?[1-9]?",
    "test_outputs_saver.py::test_errors_of_the_shared_file_system?[1-9]?",
    "test_hygiene.py::test_every_pattern_of_the_fast_tests_finds_some",
    "test_manifest.py::test_arbitrary_json",
    "test_tar_headers.py::test_what_is_written_is_read",
    "test_tar_sources.py::test_flips_in_headers",
)


def is_fast(nodeid: str) -> bool:
    name = nodeid.removeprefix("tests/")
    return _matches(name, FAST) and not _matches(name, SLOW)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
