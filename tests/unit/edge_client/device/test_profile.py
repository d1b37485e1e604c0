"""What a device is and what it may use, read from recorded systems (`profile_trees`; README tells their origin)."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_client.device import gpus
from edge_client.device.cgroups import MemoryLimit
from edge_client.device.probe import Memory, System, find_torch, native_bf16, probe
from edge_client.device.profile import derive_budget, measure
from edge_client.device.report import report_system, to_json
from edge_client.errors import InputError, MachineError
from edge_client.records import from_map, to_map

TREES = Path(__file__).parents[3] / "profile_trees"

# name of the tree: kind, cores, unified or separate GPU memory, memory controller, budget. By hand, in bytes:
# 80 % of (MemAvailable - max(128 MB, MemTotal / 10)) with kB = 1024, or what a control group leaves.
EXPECTED = {
    # 0.8 * (5,939,200,000 - 798,720,000)
    "jetson-orin-nano-8gb": ("jetson", 6, "unified", "v2", 4_112_384_000),
    # 0.8 * (61,440,000,000 - 6,553,600,000) = 43.9 GB; the unit leaves 8 GB - (300 - 100) MB, its slice
    # 6 GB (memory.high) - (1,500 - 500) MB; the slice also has CPU time of 4 cores for 12
    "jetson-agx-orin-64gb": ("jetson", 4, "unified", "v2", 5_000_000_000),
    # 0.8 * (5,120,000,000 - 716,800,000); the limits of version 1 are 9223372036854771712: none
    "jetson-xavier-nx-8gb": ("jetson", 6, "unified", "v1", 3_522_560_000),
    # 0.8 * (122,880,000,000 - 13,178,880,000)
    "jetson-thor": ("jetson", 14, "unified", "v2", 87_760_896_000),
    # 0.8 * (239,304,704 - 128,000,000) = 89,043,763.2
    "raspberry-pi-zero-2-w": ("raspberry-pi", 4, "none", "off", 89_043_763),
    # 0.8 * (3,686,400,000 - 397,312,000)
    "raspberry-pi-4": ("raspberry-pi", 4, "none", "v2", 2_631_270_400),
    # 0.8 * (7,936,000,000 - 845,824,000)
    "raspberry-pi-5": ("raspberry-pi", 4, "none", "off", 5_672_140_800),
    # 512 MiB - (200 - 100) MiB; CPU time of 1.5 of 8 cores
    "container-v1": ("container", 2, "none", "v1", 432_013_312),
    # 1 GiB - (300 - 50) MB; half a core
    "container-v2": ("container", 1, "none", "v2", 823_741_824),
    # 0.8 * (51,200,000,000 - 6,553,600,000)
    "gpu-host": ("gpu-host", 16, "unknown", "v2", 35_717_120_000),
    # 0.8 * (8,192,000,000 - 1,638,400,000)
    "plain-host": ("host", 8, "none", "v2", 5_242_880_000),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recorded_system_is_recognised_and_gets_its_budget(name: str) -> None:
    """The figures and how they come about stand beside `EXPECTED`."""
    report = report_system(TREES / name, None)
    found = (report.kind, report.cores, report.gpu_memory, report.memory_controller, report.budget_bytes)
    assert found == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_daemon_says_the_same_as_the_command(name: str) -> None:
    """One code for both; and what it says may travel."""
    report, profile = report_system(TREES / name, None), measure(None, root=TREES / name)
    assert (profile.kind, profile.cores, profile.budget_bytes) == (report.kind, report.cores, report.budget_bytes)
    assert profile.memory_bytes == report.memory_bytes
    assert profile.machine == report.model[:64] != ""
    assert from_map(type(profile), to_map(profile)) == profile


@pytest.mark.parametrize("name", EXPECTED)
def test_every_tree_tells_its_origin(name: str) -> None:
    """What was recorded by others, and what was made up."""
    assert "Invented: " in (TREES / name / "README").read_text()
    assert sorted(path.name for path in TREES.iterdir()) == sorted(EXPECTED)


def test_boards_tell_their_names() -> None:
    """The device tree ends its texts with NUL; the release is that of Jetson Linux."""
    thor = probe(TREES / "jetson-thor")
    assert (thor.model, thor.release) == ("NVIDIA Jetson AGX Thor Developer Kit", "R38.2.0")
    assert thor.accelerators[0].name == "NVIDIA Blackwell GPU of tegra264"
    assert probe(TREES / "raspberry-pi-5").model == "Raspberry Pi 5 Model B Rev 1.0"
    assert probe(TREES / "plain-host").model == "QEMU Standard PC"


def test_swap_and_zram_are_named_and_not_counted() -> None:
    """The budget of the plain host (EXPECTED) has nothing of its 6 GB."""
    report = report_system(TREES / "plain-host", None)
    assert [(swap.name, swap.num_bytes) for swap in report.swaps] == [
        ("zram0", 4_096_000_000),
        ("/swapfile", 2_048_000_000),
    ]
    assert report.reasons[-1] == "swap is never counted: zram0 4.1 GB, /swapfile 2.0 GB"


def test_reasons_tell_every_step() -> None:
    """Free memory, reserve, share, each group on the way up, and which one counts."""
    reasons = report_system(TREES / "jetson-agx-orin-64gb", None).reasons
    assert reasons == (
        "MemAvailable: 61.4 GB of 65.5 GB are available",
        "reserve: 6.6 GB are left to the system (10 % of MemTotal, at least 128 MB)",
        "80 % of the rest, because other programs grow meanwhile: 43.9 GB",
        "cgroup v2 /system.slice/fedfit.service: memory.max allows 8.0 GB, 200 MB are used: 7.8 GB are left",
        "cgroup v2 /system.slice: memory.high allows 6.0 GB, 1.0 GB are used: 5.0 GB are left",
        "the smallest counts: 5.0 GB",
        "the GPU uses the same memory: it is counted once",
    )


@pytest.mark.parametrize("name", ["raspberry-pi-5", "raspberry-pi-zero-2-w"])
def test_a_pi_without_the_memory_controller_is_told_how_to_switch_it_on(name: str) -> None:
    """Off in `/proc/cgroups`, or not even listed there."""
    (note,) = report_system(TREES / name, None).notes
    assert "MemoryMax of systemd" in note
    assert "cgroup_enable=memory in /boot/firmware/cmdline.txt" in note


def test_the_owners_limit_stands_above_all() -> None:
    """Also above what is free, but then with a warning."""
    small, large = (report_system(TREES / "container-v2", limit) for limit in (300_000_000, 900_000_000))
    assert (small.budget_bytes, large.budget_bytes) == (300_000_000, 900_000_000)
    assert small.reasons[-1] == "limits.memory of device.toml stands above all: 300 MB"
    assert "more than the 824 MB that are free" in large.reasons[-1]


def test_a_board_that_is_full_has_no_budget_and_no_debt() -> None:
    """100 MB free, 128 MB reserved; and a group that is over its limit."""
    assert derive_budget(Memory(total_bytes=512_000_000, available_bytes=100_000_000), (), None).num_bytes == 0
    full = MemoryLimit(version=2, group="/a", file="memory.high", limit_bytes=5, used_bytes=9)
    assert derive_budget(Memory(total_bytes=2**34, available_bytes=2**33), (full,), None).num_bytes == 0


# variations of a recorded system


def _copy(name: str, to: Path) -> Path:
    shutil.copytree(TREES / name, to / name)
    return to / name


def _write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_a_limit_above_the_visible_groups_counts_in_version_1(tmp_path: Path) -> None:
    """memory.stat tells 300,000,000 of a parent that the container does not see; 104,857,600 of it are used."""
    root = _copy("container-v1", tmp_path)
    _write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    _write(
        root,
        "sys/fs/cgroup/memory/memory.stat",
        "hierarchical_memory_limit 300000000\ntotal_inactive_file 104857600\n",
    )
    (limit,) = probe(root).groups.memory
    assert (limit.file, limit.headroom_bytes) == ("memory.stat", 195_142_400)
    assert measure(None, root=root).budget_bytes == 195_142_400


@pytest.mark.parametrize(("name", "budget"), [("container-v1", 432_013_312), ("container-v2", 823_741_824)])
def test_without_mountinfo_the_usual_places_are_read(tmp_path: Path, name: str, budget: int) -> None:
    """Some containers hide it; version 1 then has its group inside of the mount, as with a namespace of its own."""
    root = _copy(name, tmp_path)
    (root / "proc/self/mountinfo").unlink()
    if name == "container-v1":
        _write(root, "proc/self/cgroup", "11:memory:/\n4:cpu,cpuacct:/\n")
    assert measure(None, root=root).budget_bytes == budget


def test_a_namespace_that_the_process_is_outside_of_is_read_at_its_top(tmp_path: Path) -> None:
    """`0::/../../init.scope` is how the kernel shows it."""
    root = _copy("container-v2", tmp_path)
    _write(root, "proc/self/cgroup", "0::/../../init.scope\n")
    assert measure(None, root=root).budget_bytes == 823_741_824


def test_without_any_cgroup_only_free_memory_counts(tmp_path: Path) -> None:
    """A kernel without them, or hidden mounts."""
    root = _copy("raspberry-pi-4", tmp_path)
    (root / "proc/self/mountinfo").unlink()
    shutil.rmtree(root / "sys/fs")
    assert (measure(None, root=root).budget_bytes, probe(root).groups.memory_controller) == (2_631_270_400, "hidden")
    (root / "proc/self/cgroup").unlink()
    assert probe(root).groups.memory_controller == "none"


def test_falling_memory_is_seen_at_once(tmp_path: Path) -> None:
    """0.8 * (1,024,000,000 - 397,312,000)."""
    root = _copy("raspberry-pi-4", tmp_path)
    _write(root, "proc/meminfo", "MemTotal: 3880000 kB\nMemAvailable: 1000000 kB\n")
    assert measure(None, root=root).budget_bytes == 501_350_400


def test_a_jetson_in_a_container_stays_a_jetson(tmp_path: Path) -> None:
    """Docker hides the device tree; NVIDIA's images have the release file."""
    root = _copy("container-v2", tmp_path)
    _write(root, "etc/nv_tegra_release", "# R36 (release), REVISION: 4.3, GCID: 1, BOARD: generic\n")
    found = probe(root)
    assert (found.kind, found.container, found.release) == ("jetson", "other", "R36.4.3")
    assert found.accelerators[0].memory == "unified"


def test_a_pi_in_a_container_is_known_by_its_cpuinfo(tmp_path: Path) -> None:
    """Raspberry Pi's kernel writes the model there."""
    root = _copy("container-v2", tmp_path)
    _write(root, "proc/cpuinfo", "processor\t: 0\nRevision\t: d03114\nModel\t\t: Raspberry Pi 4 Model B Rev 1.4\n")
    assert (probe(root).kind, probe(root).model) == ("raspberry-pi", "Raspberry Pi 4 Model B Rev 1.4")


def test_a_containers_gpu_is_one_that_it_was_given(tmp_path: Path) -> None:
    """`/proc/driver/nvidia` shows the host's in every container; the device file only where it may be used."""
    root = _copy("container-v1", tmp_path)
    assert probe(root).accelerators == ()
    _write(root, "dev/nvidia0", "")
    assert (probe(root).kind, probe(root).container) == ("gpu-host", "docker")


def test_cores_without_sysfs_come_from_cpuinfo(tmp_path: Path) -> None:
    """Three are listed, two of them allowed."""
    root = _copy("plain-host", tmp_path)
    shutil.rmtree(root / "sys/devices")
    _write(root, "proc/cpuinfo", "".join(f"processor\t: {n}\nmodel name\t: x\n\n" for n in range(3)))
    _write(root, "proc/self/status", "Cpus_allowed_list:\t0,2-5\n")
    assert probe(root).cores == 2


# NVML, whose Python package is somebody else's: a stand-in with the same functions


NVML = """
class NVMLError(Exception): pass
class NVMLError_NotSupported(NVMLError): pass
def nvmlInit(): {init}
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
class Memory: total, free = 24 * 2**30, 20 * 2**30
def nvmlDeviceGetMemoryInfo(handle): {memory}
"""


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a test puts its pynvml.py."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    yield tmp_path / "pynvml.py"
    sys.modules.pop("pynvml", None)


def _gpu_host() -> System:
    return probe(TREES / "gpu-host", nvml=gpus.ask_nvml)


def test_nvml_tells_the_memory_of_a_discrete_gpu(nvml: Path) -> None:
    """It is no part of the budget: workers train on the CPU's."""
    nvml.write_text(NVML.format(init="pass", memory="return Memory"))
    (gpu,) = _gpu_host().accelerators
    assert (gpu.name, gpu.memory) == ("NVIDIA GeForce RTX 3090", "separate")
    assert (gpu.total_bytes, gpu.free_bytes) == (24 * 2**30, 20 * 2**30)


def test_not_supported_means_that_the_gpu_shares_the_systems_memory(nvml: Path) -> None:
    """GB10 and others; on a Jetson nobody asks, and MemAvailable is the truth there as well."""
    nvml.write_text(NVML.format(init="pass", memory="raise NVMLError_NotSupported('Not Supported')"))
    assert _gpu_host().accelerators[0].memory == "unified"
    report = report_system(TREES / "jetson-thor", None, nvml=gpus.ask_nvml)
    assert (report.gpu_memory, report.budget_bytes, report.notes) == ("unified", 87_760_896_000, ())


@pytest.mark.parametrize(
    ("init", "memory", "told"),
    [
        ("raise NVMLError('Driver Not Loaded')", "pass", "NVML does not answer: Driver Not Loaded"),
        ("pass", "raise NVMLError('Unknown Error')", "NVML answers: Unknown Error"),
    ],
)
def test_an_nvml_that_fails_leaves_a_note(nvml: Path, init: str, memory: str, told: str) -> None:
    """The GPU is there, its memory is not known."""
    nvml.write_text(NVML.format(init=init, memory=memory))
    found = _gpu_host()
    assert (found.kind, found.accelerators[0].memory) == ("gpu-host", "unknown")
    assert found.notes == (f"the GPU's memory is not known: {told}",)


def test_without_the_package_the_note_says_what_to_install(nvml: Path) -> None:
    """nvidia-ml-py is no dependency."""
    nvml.write_text("raise ImportError\n")
    assert "pip install nvidia-ml-py" in _gpu_host().notes[0]


# what is broken, hidden or hostile


def test_a_missing_root_is_the_users_mistake(tmp_path: Path) -> None:
    """Exit 3, and it names what was typed."""
    with pytest.raises(InputError, match=r"got '.*nowhere'"):
        probe(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "MemTotal: many\n",
        "MemTotal: 5 kB\n",
        "MemTotal: 0 kB\nMemAvailable: 0 kB\n",
        "MemTotal: 9999999999999999 kB\nMemAvailable: 1 kB\n",
        "\0" * 5000,
    ],
)
def test_a_meminfo_without_sense_says_what_to_set(tmp_path: Path, text: str) -> None:
    """Some containers hide it; with limits.memory it is not needed."""
    _write(tmp_path, "proc/meminfo", text)
    with pytest.raises(MachineError, match=r"proc/meminfo; set limits\.memory"):
        measure(None, root=tmp_path)
    with pytest.raises(MachineError, match=r"proc/meminfo; set limits\.memory"):
        report_system(tmp_path, None)
    assert measure(123, root=tmp_path).budget_bytes == report_system(tmp_path, 123).budget_bytes == 123


@pytest.mark.parametrize("garbage", ["", "\0\0", "-1", "no number at all \x1b[2J", "9" * 5000, "1 2 3"])
@pytest.mark.parametrize("name", ["container-v1", "container-v2"])
def test_garbage_in_any_file_is_survived(tmp_path: Path, name: str, garbage: str) -> None:
    """One file after the other; meminfo has a test of its own. What is told is printable."""
    root = _copy(name, tmp_path)
    for path in [path for path in root.rglob("*") if path.is_file() and path.name != "meminfo"]:
        good = path.read_bytes()
        path.write_text(garbage)
        profile = measure(None, root=root)
        assert from_map(type(profile), to_map(profile)) == profile
        assert all(note.isprintable() for note in probe(root).notes)
        path.write_bytes(good)


def test_a_limit_without_sense_is_noted(tmp_path: Path) -> None:
    """It is ignored, so a person must know."""
    root = _copy("container-v2", tmp_path)
    _write(root, "sys/fs/cgroup/memory.max", "lots\n")
    (note,) = probe(root).notes
    assert note.endswith("sys/fs/cgroup/memory.max says 'lots', which makes no sense; ignored")


def test_what_is_no_file_does_not_block(tmp_path: Path) -> None:
    """A pipe in a copied tree, and a directory where a file should be."""
    root = _copy("container-v2", tmp_path)
    (root / "sys/fs/cgroup/memory.max").unlink()
    os.mkfifo(root / "sys/fs/cgroup/memory.max")
    (root / "proc/cpuinfo").unlink()
    (root / "proc/cpuinfo").mkdir()
    notes = probe(root).notes
    assert any(note.endswith("memory.max: it is not a file") for note in notes)
    assert any("proc/cpuinfo: it is not a file" in note for note in notes)
    (root / "proc/meminfo").unlink()
    (root / "proc/meminfo").mkdir()
    with pytest.raises(MachineError, match=r"proc/meminfo: it is not a file\); set limits\.memory"):
        measure(None, root=root)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_noted(tmp_path: Path) -> None:
    """Not an error: the others still tell enough."""
    root = _copy("container-v2", tmp_path)
    (root / "sys/fs/cgroup/memory.max").chmod(0)
    assert any("Permission denied" in note for note in probe(root).notes)


def test_nothing_is_read_outside_of_the_root(tmp_path: Path) -> None:
    """A copied tree has absolute links, which lead to this machine; group names with dots would as well."""
    root = _copy("plain-host", tmp_path)
    _write(tmp_path, "secret", "Raspberry Pi from outside")
    (root / "proc/device-tree").mkdir()
    (root / "proc/device-tree/model").symlink_to(tmp_path / "secret")
    _write(root, "proc/self/cgroup", "0::/../../../../secret\n")
    assert (probe(root).kind, probe(root).model) == ("host", "QEMU Standard PC")


def test_this_machine_has_a_profile() -> None:
    """Whatever it is: a budget within its memory, torch found without loading it, and keys as for a recorded one."""
    report = report_system(Path("/"), None)
    assert 0 <= report.budget_bytes <= report.memory_bytes
    assert report.cores >= 1
    build = find_torch()
    assert (build is None) == (importlib.util.find_spec("torch") is None)
    assert report.torch == build
    assert build is None or build.version[0].isdigit()
    assert to_json(report).keys() == to_json(report_system(TREES / "gpu-host", None)).keys()


# lines of /proc/cpuinfo as kernels print them, shortened: EPYC of 2022 and 2021, Xeon of 2023, Graviton 3, Pi 5, Orin
CPU_FLAGS = [
    ("flags\t\t: fpu sse2 avx avx2 avx512f avx512_vnni avx512_bf16 clzero", True),
    ("flags\t\t: fpu sse2 avx avx2 fma sha_ni clzero", False),
    ("flags\t\t: fpu avx512f amx_bf16 avx512_fp16 amx_tile amx_int8", True),
    ("Features\t: fp asimd evtstrm sve asimdfhm svebf16 i8mm bf16 dgh rng", True),
    ("Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp asimddp", False),
    ("Features\t: fp asimd evtstrm aes asimddp uscat ilrcpc flagm paca pacg svebf16x", False),
]


@pytest.mark.parametrize(("line", "expected"), CPU_FLAGS)
def test_a_processor_tells_whether_it_computes_in_bf16(line: str, expected: bool, tmp_path: Path) -> None:
    """Whole words of the flags of all cores: one core without it would hold up the others."""
    (tmp_path / "proc").mkdir()
    assert not native_bf16(tmp_path)
    cpuinfo = tmp_path / "proc/cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: bf16\n{line}\n\nprocessor\t: 1\n{line}\n")
    assert native_bf16(tmp_path) is expected
    cpuinfo.write_text(cpuinfo.read_text() + "\nprocessor\t: 2\nflags\t\t: fpu sse2\n")
    assert not native_bf16(tmp_path)
