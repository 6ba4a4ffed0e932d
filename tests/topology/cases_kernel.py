"""CPUs, nodes, cpusets and ratings as the kernel writes them, in all their spellings, and garbled.

The base machine "two" has two packages of one node each: CPUs 0-3,8-11, siblings n and n+8, one L3 each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tests.topology.reading import Case, Files

CGROUP2: Final = {"proc/self/cgroup": "0::/slice/job", "proc/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0"}
GPU: Final = {"vendor": "0x10de", "class": "0x030200", "numa_node": "1", "local_cpulist": "2-3,10-11"}


def cpus(numbers: Iterable[int], files: Files) -> dict[str, str | bytes | None]:
    return {f"cpu:cpu{cpu}/{name}": content for cpu in numbers for name, content in files.items()}


def rated(name: str, **ratings: str) -> dict[str, str | bytes | None]:
    return {f"cpu:cpu{cpu[1:]}/{name}": number for cpu, number in ratings.items()}


def ratings(name: str, fast: str, slow: str, fast_cpus: Iterable[int] = (0, 8)) -> dict[str, str | bytes | None]:
    listed = set(fast_cpus)
    return {f"cpu:cpu{cpu}/{name}": fast if cpu in listed else slow for cpu in (0, 1, 2, 3, 8, 9, 10, 11)}


PERF: Final = "acpi_cppc/highest_perf"

CASES: Final = {
    # --- CPUs, cores, packages, caches
    "the files of a second sibling are not read": Case(
        files={f"cpu:cpu{cpu}/{name}": None for cpu in (8, 9, 10, 11) for name in ("topology", "cache")}
    ),
    "an offline CPU is in no set": Case(files={"cpu:online": "0-3,9-11"}),
    "an online CPU without a directory is not there, as in reduced captures": Case(files={"cpu:online": "0-1023"}),
    **{
        f"siblings from {name}: new kernels and old captures": Case(
            files={"cpu:cpu0/topology/thread_siblings_list": None, f"cpu:cpu0/topology/{name}": content}
        )
        for name, content in (("core_cpus_list", "0,8"), ("thread_siblings", "101"), ("core_cpus", "00000101"))
    },
    "a CPU of which nothing is known has no core, package or cache, and a note": Case(
        files={f"cpu:cpu{cpu}/{name}": None for cpu in (0, 8) for name in ("topology", "cache")}
        | cpus((1, 9), {"cache/index3/shared_cpu_list": "1,9"})
    ),
    "a CPU that two sibling lists claim belongs to the first": Case(
        files={"cpu:cpu1/topology/thread_siblings_list": "1,8-9"}
    ),
    "package -1, as in virtual machines, is unknown": Case(
        files=cpus((0, 1, 8, 9), {"topology/physical_package_id": "-1"})
    ),
    "the L3 is found by its level, and its mask serves for the list": Case(
        files=cpus((2, 3, 10, 11), {"cache/index3/level": "2", "cache/index2/level": "3"})
        | {f"cpu:cpu{cpu}/cache/index2/shared_cpu_map": f"{1 << cpu:08x}" for cpu in (2, 3, 10, 11)}
    ),
    **{
        f"the list {text!r} of CPUs 2 and 3 lacks the CPU itself, so the L3 is unknown": Case(
            files=cpus((2, 3, 10, 11), {"cache/index3/shared_cpu_list": text})
        )
        for text in ("0-1,8-9", "")
    },
    "a core across two nodes has no node": Case(files={"node:node0/cpulist": "0-1", "node:node1/cpulist": "2-3,8-11"}),
    "a CPU that two nodes list has no node, with a note": Case(files={"node:node1/cpulist": "1-3,9-11"}),
    "a node across two packages belongs to neither": Case(
        files={"node:node0/cpulist": "0-2,8-10", "node:node1/cpulist": "3,11"}
    ),
    # --- nodes
    "the distance row follows the online ids, not 0, 1, 2": Case(
        files={
            "node:online": "0-1,250",
            "node:node250/distance": "80 81 10",
            "node:node250/cpulist": "",
            "node:node0/distance": "10 21 80",
        }
    ),
    **{
        f"a distance row {row!r} does not fit, so it is unknown": Case(files={"node:node0/distance": row})
        for row in ("10", "10 21 30", "10 -1", "10 x", "")
    },
    "the directory of an offline node is ignored": Case(files={"node:online": "1", "node:node1/distance": "10"}),
    "without an online list the directories count": Case(files={"node:online": None}),
    "old kernels write cpumap only": Case(files={"node:node0/cpulist": None, "node:node0/cpumap": "00000000,00000303"}),
    "no memory is 0, and an unknown size is unknown": Case(
        files={"node:node0/meminfo": "Node 0 MemTotal: 0 kB", "node:node1/meminfo": None}
    ),
    "a kernel without NUMA is one node": Case(files={"sys/devices/system/node": None}),
    "a node of offline CPUs is a memory node, and offline CPUs are on no node": Case(
        files={"node:online": "0-2", "node:node0/cpulist": "0-1,7-9", "node:node2/cpulist": "20-21"}
    ),
    # --- what this process may use, and the host's name
    "the status of the process comes first": Case(
        files={
            "proc/self/status": "Name:\tx\nCpus_allowed:\tf\nCpus_allowed_list:\t0-1,9\nMems_allowed_list:\t1",
            "proc/self/cgroup": "0::/",
            "proc/mounts": "c /cg cgroup2 rw 0 0",
            "cg/cpuset.cpus.effective": "3",
        }
    ),
    "cgroup v1: the cpuset controller's mount and path lead to the lists": Case(
        files={
            "proc/self/cgroup": "9:cpu,cpuacct:/other\n7:cpuset:/job",
            "proc/mounts": "cgroup /cg/cpu cgroup rw,cpu 0 0\ncgroup /cg/cpuset cgroup rw,cpuset 0 0",
            "cg/cpuset/job/cpuset.cpus": "2-3",
            "cg/cpuset/job/cpuset.mems": "1",
            "cg/cpu/other/cpuset.cpus": "0",
        }
    ),
    "cgroup v2: an empty list means that the group above counts": Case(
        files=CGROUP2
        | {
            "sys/fs/cgroup/slice/cpuset.cpus.effective": "0,8",
            "sys/fs/cgroup/cpuset.cpus.effective": "1",
            "sys/fs/cgroup/slice/job/cpuset.mems.effective": "0",
            "sys/fs/cgroup/slice/job/cpuset.cpus.effective": "",
        }
    ),
    "old systems mount cpusets at /dev/cpuset, without a prefix": Case(
        files={
            "proc/self/cpuset": "/dummy",
            "proc/mounts": "none /dev/cpuset cpuset rw 0 0",
            "dev/cpuset/dummy/cpus": "1-2",
            "dev/cpuset/dummy/mems": "0-1",
        }
    ),
    "the kernel escapes blanks and backslashes in the name of a mount": Case(
        files={
            "proc/self/cgroup": "0::/job",
            "proc/mounts": "none /a\\040b\\134c cgroup2 rw 0 0",
            "a b\\c/job/cpuset.cpus.effective": "2-3",
        }
    ),
    **{
        f"a cgroup {text!r} says nothing, so all is allowed": Case(
            files={"proc/self/cgroup": text, "proc/mounts": "x\nc /cg cgroup rw,cpuset 0 0\nc /cg cgroup2 rw 0 0"}
        )
        for text in ("", "garbage", "0::/\0", "::", "7:cpuset:/gone")
    },
    "a cpuset may name CPUs and nodes that are offline": Case(
        files={"proc/self/status": "Cpus_allowed_list:\t1-2,77\nMems_allowed_list:\t1,9"}
    ),
    "the host's name is in /etc": Case(files={"etc/hostname": "file"}),
    "the kernel's name comes before that in /etc": Case(
        files={"etc/hostname": "file", "proc/sys/kernel/hostname": "kernel"}
    ),
    # --- ratings
    "cores above the middle of the range are fast (highest_perf)": Case(files=ratings(PERF, "255", "200")),
    "cores above the middle of the range are fast (cpu_capacity)": Case(files=ratings("cpu_capacity", "1024", "718")),
    "the first rating decides if the second does not differ": Case(
        files=ratings(PERF, "255", "200") | ratings("cpu_capacity", "1024", "1024")
    ),
    "the second rating decides if the first does not differ": Case(
        files=ratings(PERF, "255", "255") | ratings("cpu_capacity", "1024", "512")
    ),
    "cores that differ by 5 percent are alike": Case(files=ratings(PERF, "105", "100")),
    "a rating of 0 says nothing": Case(files=ratings(PERF, "0", "0")),
    "the first rating decides if the second contradicts it": Case(
        files=ratings(PERF, "255", "200") | ratings("cpu_capacity", "512", "1024")
    ),
    "a rating that differs between the threads of a core is ignored": Case(
        files=ratings("cpu_capacity", "1024", "512", (0, 1))
    ),
    "a rating that some cores lack is ignored": Case(
        files=rated(PERF, c0="255", c8="255", c2="200", c10="200", c3="200", c11="200")
    ),
    "a rating that is ignored does not hide the other one": Case(
        files=ratings(PERF, "255", "200") | ratings("cpu_capacity", "1024", "512", (0, 8, 1))
    ),
    "nodes are judged apart: a node of equal cores has no fast ones": Case(
        files=ratings("cpu_capacity", "1024", "512", (0, 1, 8, 9))
    ),
    **{
        f"a rating {text!r} is unknown": Case(files=rated("cpu_capacity", c0=text))
        for text in ("", "-1", "fast", "1024 1024", "9" * 40)
    },
    "a rating that cannot be read is unknown, and the others are kept": Case(
        files=rated("cpu_capacity", c0="1024", c1="512") | {"cpu:cpu2/cpu_capacity/x": ""}
    ),
    # --- errors
    "not a machine: the error names the folder and how to capture one": Case(files={"sys/devices": None}),
    "a tree without a CPU is not a machine": Case(files={"cpu:online": "0-3,8-11", "sys/devices/system/cpu": None}),
    **{
        f"half a list in {name} would make a wrong plan, so the file is named ({kind})": Case(
            devices={"pci0000:16/0000:18:00.0": {"class": "0x030200"}}, files={name: content}
        )
        for name in (
            "cpu:online",
            "cpu:cpu0/topology/thread_siblings_list",
            "cpu:cpu0/cache/index3/shared_cpu_list",
            "node:online",
            "node:node1/cpulist",
            "pci:0000:18:00.0/local_cpulist",
        )
        for kind, content in (("text", "0-x"), ("bytes", b"\xff\x00"))
    },
    "the same holds for the list in the status file": Case(files={"proc/self/status": "Cpus_allowed_list:\t0-x"}),
    "any other garbled value is unknown and not an error": Case(
        devices={"pci0000:16/0000:18:00.0": {"class": "0x030200", "vendor": "nvidia", "numa_node": "¹"}},
        files={
            "cpu:cpu0/topology/physical_package_id": b"\xff",
            "node:node0/meminfo": "MemTotal: x kB",
            "node:node0/distance": b"\x00",
            "nvidia:0000:18:00.0/information": b"\xff:\xfe",
            "pci:0000:18:00.0/max_link_width/x": "a folder in place of a file",
        },
    ),
}
