"""The memory that a server may use, by the machine and its control groups."""

import os

from loraplex.core.host_memory import host_memory

GIB = 1 << 30


def limits(root, own="", **files):
    """Write the files of control groups below a folder that stands for the root."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_max", ".max")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_machine(tmp_path):
    of_machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host_memory(tmp_path) == of_machine
    assert 0 < host_memory() <= of_machine


def test_the_least_limit_of_all_groups_above(tmp_path):
    root = limits(
        tmp_path, "0::/a/b\n", a__b__memory_max="max\n", a__memory_max="3145728\n", memory_max="max"
    )
    assert host_memory(root) == 3 << 20


def test_a_container_that_sees_only_its_own_group(tmp_path):
    """Its place in the tree of the host is not there."""
    root = limits(tmp_path, "0::/../other\n", memory_max="2097152\n")
    assert host_memory(root) == 2 << 20


def test_control_groups_of_version_1(tmp_path):
    root = limits(tmp_path, "9:memory:/x\n", memory__memory_max="")
    (root / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("1048576\n")
    assert host_memory(root) == 1 << 20


def test_no_limit_beyond_the_machine(tmp_path):
    root = limits(tmp_path, memory__memory_max="")
    (root / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert host_memory(root) == host_memory(tmp_path / "nothing")
