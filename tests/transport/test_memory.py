"""Shared memory that can't be resized, leaves nothing behind, and fails before it is written."""

from __future__ import annotations

import copy
import fcntl
import os
import pickle
import resource
from pathlib import Path

import numpy as np
import pytest

from sidestream.transport.memory import HostMemoryError, Mapping, allocate, attach, share
from sidestream.transport.memory_limit import available_bytes

MIB = 1 << 20


def test_an_allocation_is_mapped_twice_and_is_the_same_memory():
    fd, ours = allocate(3 * MIB)
    theirs = attach(fd, 3 * MIB)
    os.close(fd)
    ours.array(MIB, 4)[:] = [1, 2, 3, 4]
    assert theirs.array(MIB, 4).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("nbytes", [2 * MIB - 4096, 2 * MIB, 5 * MIB + 4096, 5 * MIB + 1])
def test_memory_with_room_for_huge_pages_is_whole_and_the_same_on_both_sides(nbytes, pattern):
    fd, ours = allocate(nbytes)
    theirs = attach(fd, nbytes)
    part = attach(fd, nbytes, part=slice(MIB, None))
    pages_are_there = os.fstat(fd).st_blocks * 512 >= nbytes
    os.close(fd)
    if nbytes >= 2 * MIB:  # the kernel maps them as such at these addresses only
        assert ours.address % (2 * MIB) == theirs.address % (2 * MIB) == 0
    content = pattern(nbytes, 1)
    ours.array(0, nbytes)[:] = content
    assert pages_are_there
    np.testing.assert_array_equal(theirs.array(0, nbytes), content)
    np.testing.assert_array_equal(part.array(0, nbytes - MIB), content[MIB:])
    assert len(theirs.view()) == nbytes
    assert bytes(theirs.view()[-100:]) == content[-100:].tobytes()


def test_a_mapping_needs_no_descriptor(holdings):
    before = holdings()
    mappings = []
    for _ in range(50):
        fd, mapping = allocate(4096)
        os.close(fd)
        mappings.append(mapping)
    assert holdings() == (before[0], before[1] + 50)
    mappings.clear()
    del mapping
    assert holdings() == before


def test_a_view_outlives_its_mapping():
    fd, mapping = allocate(4096)
    os.close(fd)
    view = mapping.array(0, 4096)[100:200]
    view[:] = 7
    del mapping
    assert view.tolist() == [7] * 100


def test_views_of_an_array_refer_to_that_array():
    # A lease hangs on it: numpy must not shorten the chain to the mapping.
    fd, mapping = allocate(4096)
    os.close(fd)
    holder = mapping.array(0, 4096)
    assert holder[10:20].base is holder
    assert holder.view(np.float32).reshape(32, 32)[1:].T.base is holder


def test_a_memfd_can_never_change_its_size():
    fd, _ = allocate(8192)
    for nbytes in (4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)


def test_pages_of_an_allocation_exist_before_anyone_writes():
    fd, _ = allocate(MIB)
    assert os.fstat(fd).st_blocks * 512 == MIB
    os.close(fd)


def test_shared_bytes_cannot_be_written_by_anyone_but_a_private_mapping_can():
    fd = share(b"abc" * 10_000)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(OSError, match="not permitted"):
        Mapping(fd, 30_000)
    mine, other = (attach(fd, 30_000, is_private=True).view() for _ in range(2))
    os.close(fd)
    mine[0] = ord("X")
    assert bytes(mine[:6]) == b"Xbcabc"
    assert bytes(other) == b"abc" * 10_000


@pytest.mark.parametrize("announced", [4096, 16384])
def test_a_memfd_of_another_size_is_refused(announced):
    fd, _ = allocate(8192)
    with pytest.raises(ValueError, match="8192 bytes"):
        attach(fd, announced)
    os.close(fd)


def test_a_memfd_that_could_shrink_is_refused():
    fd = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(ValueError, match="4096 sealed bytes"):
        attach(fd, 4096)
    os.close(fd)


def test_a_process_without_address_space_gets_an_error_and_nothing_stays(fork, holdings):
    def starve():
        before = holdings()
        size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (size + 64 * MIB, -1))
        with pytest.raises(HostMemoryError, match="Cannot allocate memory") as caught:
            allocate(256 * MIB)
        assert caught.value.nbytes == 256 * MIB
        fd, mapping = allocate(MIB)
        os.close(fd)
        del mapping, caught
        return before, holdings()

    before, after = fork(starve).result()
    assert after == before


def test_a_file_size_limit_is_an_error_for_both_ways_to_make_memory(fork, holdings):
    def starve():
        before = holdings()
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, -1))
        for make in (allocate, lambda nbytes: share(bytes(nbytes))):
            with pytest.raises(HostMemoryError, match="File too large"):
                make(2 * MIB)
        return before, holdings()

    before, after = fork(starve).result()
    assert after == before


def test_running_out_of_descriptors_is_an_error(fork):
    def starve():
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        # The limit bounds the numbers, not their count: there is room below and between them.
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, hard))
        kept = []
        with pytest.raises(HostMemoryError, match="Too many open files"):
            kept.extend(iter(lambda: allocate(4096), None))
        return len(kept)

    assert fork(starve).result() >= 15


def test_an_error_about_memory_can_be_sent_and_copied():
    error = HostMemoryError(17, "there is none")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (str(twin), twin.nbytes, twin.reason) == (str(error), 17, "there is none")
        assert isinstance(twin, MemoryError)


def test_more_than_the_machine_has_is_refused_before_a_page_is_touched():
    with pytest.raises(HostMemoryError, match=r"memory limit leaves \d+ bytes"):
        allocate(1 << 50)


# --- limits of control groups ---------------------------------------------------------------------


class FakeMachine:
    """A procfs and a cgroup file system made of plain files."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.mount = root / "cgroup"
        (self.proc / "self").mkdir(parents=True)

    def mounted(self, filesystem: str, options: str, *, root: str = "/") -> None:
        (self.proc / "self" / "mountinfo").write_text(
            "22 1 0:20 / /proc rw - proc proc rw\n"
            f"35 31 0:32 {root} {self.mount} rw,relatime shared:5 - {filesystem} cgroup {options}\n"
        )

    def member_of(self, line: str) -> None:
        (self.proc / "self" / "cgroup").write_text(f"9:name=systemd:/\n{line}\n")

    def group(self, path: str, **files: object) -> None:
        folder = self.mount / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.fixture
def machine(tmp_path):
    return FakeMachine(tmp_path)


def test_the_tightest_group_on_the_way_up_counts(machine):
    machine.mounted("cgroup2", "rw")
    machine.member_of("0::/pod/container")
    machine.group("", memory__current=0)
    machine.group("pod", memory__max=1000, memory__current=900)
    machine.group("pod/container", memory__max=500, memory__current=50)
    assert available_bytes(proc=machine.proc) == 100


def test_pages_of_files_can_be_taken_back_and_do_not_count(machine):
    machine.mounted("cgroup2", "rw")
    machine.member_of("0::/job")
    machine.group(
        "job",
        memory__max=1000,
        memory__current=990,
        memory__stat="anon 90\ninactive_file 600\nactive_file 200\nshmem 100",
    )
    assert available_bytes(proc=machine.proc) == 810


def test_a_full_group_leaves_nothing(machine):
    machine.mounted("cgroup2", "rw")
    machine.member_of("0::/job")
    machine.group("job", memory__max=1000, memory__current=1010)
    assert available_bytes(proc=machine.proc) == 0


def test_the_first_version_of_control_groups_is_read_too(machine):
    machine.mounted("cgroup", "rw,memory")
    machine.member_of("4:cpu,memory:/job")
    machine.group("", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=5)
    machine.group(
        "job",
        memory__limit_in_bytes=1000,
        memory__usage_in_bytes=700,
        memory__stat="inactive_file 1\ntotal_inactive_file 100",
    )
    assert available_bytes(proc=machine.proc) == 400


def test_a_container_that_sees_only_its_own_subtree_is_understood(machine):
    machine.mounted("cgroup", "rw,memory", root="/docker/abc")
    machine.member_of("4:memory:/docker/abc")
    machine.group("", memory__limit_in_bytes=1000, memory__usage_in_bytes=300)
    assert available_bytes(proc=machine.proc) == 700


def test_the_machines_own_memory_is_a_limit(machine):
    (machine.proc / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   3 kB\n")
    assert available_bytes(proc=machine.proc) == 3072


def test_without_files_nothing_is_known(machine):
    assert available_bytes(proc=machine.proc) is None


def test_a_group_without_a_limit_allows_anything(machine):
    machine.mounted("cgroup2", "rw")
    machine.member_of("0::/job")
    machine.group("job", memory__max="max", memory__current=5)
    assert available_bytes(proc=machine.proc) is None


def test_this_machine_says_something():
    assert available_bytes() > 0
