"""What preflight says of the host, beside what it should be: versions, packages, memory, limits, the PCIe settings."""

import importlib.metadata
import importlib.util
import os
import resource
import shutil
import subprocess
from pathlib import Path

import torch

from hymoe.engine.preflight.report import Line
from hymoe.kernels.launch import EXTENSION, INSTALL

GB = 10**9
OLDEST_TORCH = (2, 11)  # as setup.py says
# The real job: 31.6 B parameters of 6 bytes in a state, the host's copy of which is written while training goes on.
STATE_BYTES, EXPORT_BYTES = 190 * GB, 63 * GB
HMM = (
    "cards without NVLink: P2P transfers hang or crawl on some drivers while HMM is on; put `options nvidia_uvm "
    "uvm_disable_hmm=1` in /etc/modprobe.d and reboot"
)
IOMMU = (
    "cards without NVLink: an IOMMU that translates sends P2P through the host, where it hangs or crawls; "
    "amd_iommu=off or intel_iommu=off on the kernel's command line (or iommu=pt), and ACS off in the BIOS"
)
SHM = "in a container: --shm-size=8g or --ipc=host; NCCL_SHM_DISABLE=1 shows whether shared memory is the cause"


def software_lines(is_cuda: bool) -> list[Line]:
    """Versions and packages."""
    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    wanted = ".".join(map(str, OLDEST_TORCH))
    has_driver = Path("/proc/driver/nvidia/version").exists()
    lines = [
        Line(
            section="software",
            name="torch",
            found=torch.__version__,
            should=f">= {wanted}",
            state="ok" if numbers >= OLDEST_TORCH else "bad",
        ),
        Line(section="software", name="triton", found=_version("triton")),
        Line(section="software", name="CUDA of torch", found=torch.version.cuda or "none"),
    ]
    if has_driver and not is_cuda:
        lines.append(
            Line(
                section="software",
                name="GPUs",
                found="NVIDIA's driver is loaded, torch uses no GPU",
                should="a GPU for each rank",
                state="bad",
                remedy="nvidia-smi says whether the driver works; a torch with +cpu in its version has no CUDA",
            )
        )
    if is_cuda:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        driver = _nvidia_smi("--query-gpu=driver_version")
        lines.append(Line(section="software", name="NCCL", found=nccl))
        lines.append(
            Line(
                section="software",
                name="driver",
                found=driver[0][0] if driver else "unknown: nvidia-smi does not run",
            )
        )
    return lines + [_package_line(module, is_cuda) for module in INSTALL]


def _package_line(module: str, is_cuda: bool) -> Line:
    install = f"pip install --no-build-isolation '{INSTALL[module]}'"
    name = INSTALL[module].split(">=")[0]
    missing = [m for m in (module, EXTENSION[module]) if importlib.util.find_spec(m) is None]
    if not missing:
        return Line(section="software", name=name, found=_version(name), state="ok")
    found = f"{missing[0]} is not installed"
    if not is_cuda:
        return Line(section="software", name=name, found=found)
    return Line(
        section="software",
        name=name,
        found=found,
        should=INSTALL[module],
        state="warn",
        remedy=f"our Triton kernels run instead; {install}",
    )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def host_lines(folder: Path, is_cuda: bool) -> list[Line]:
    """Memory, shared memory, limits, disk; on a machine without GPUs nothing is expected of most."""
    page = os.sysconf("SC_PAGE_SIZE")
    ram = page * os.sysconf("SC_PHYS_PAGES")
    free_ram = page * os.sysconf("SC_AVPHYS_PAGES")
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    disk = shutil.disk_usage(folder)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    states_bytes = STATE_BYTES * 13 // 10
    disk_bytes = STATE_BYTES + EXPORT_BYTES
    return [
        _expect(
            is_cuda, "host memory", f"{ram / GB:,.0f} GB, {free_ram / GB:,.0f} GB unused",
            f">= {states_bytes / GB:,.0f} GB for a 30B run", ram >= states_bytes, "warn",
            "a state is copied to the host before it is written; with less memory saves may not fit", ram / GB,
        ),
        _expect(
            is_cuda, "/dev/shm", f"{shm.free / GB:,.2f} GB free" if shm else "absent", ">= 1 GB",
            shm is not None and shm.free >= GB, "bad" if shm is None or shm.free < GB // 8 else "warn", SHM,
            shm.free / GB if shm else 0.0,
        ),
        _expect(
            is_cuda, "ulimit -l (memlock)", _limit(locked, "bytes"), "unlimited",
            locked == resource.RLIM_INFINITY, "warn",
            "in a container: --ulimit memlock=-1; matters to networks with RDMA",
        ),
        _expect(
            is_cuda, "ulimit -n (nofile)", _limit(files, "files"), ">= 4,096",
            files == resource.RLIM_INFINITY or files >= 4096, "warn", "ulimit -n 65536",
        ),
        _expect(
            is_cuda, f"disk of {folder}", f"{disk.free / GB:,.0f} GB free",
            f">= {disk_bytes / GB:,.0f} GB: a state and an export of a 30B run", disk.free >= disk_bytes, "warn",
            "each state that run.keep_last keeps takes as much again", disk.free / GB,
        ),
    ]  # fmt: skip


def _expect(
    is_cuda: bool, name: str, found: str, should: str, holds: bool, otherwise: str, remedy: str,
    value: float | None = None,
) -> Line:  # fmt: skip
    """A line of the host; info only where no GPU is at stake."""
    if not is_cuda:
        return Line(section="host", name=name, found=found, value=value)
    state, said = ("ok", "") if holds else (otherwise, remedy)
    return Line(
        section="host", name=name, found=found, should=should, state=state, remedy=said, value=value
    )


def _limit(value: int, unit: str) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,} {unit}"


def pcie_lines(root: Path = Path("/")) -> list[Line]:
    """Settings of the host on which transfers between cards without NVLink depend.

    Args:
        root: of /proc and /sys; for tests.
    """
    lines = []
    hmm = root / "sys/module/nvidia_uvm/parameters/uvm_disable_hmm"
    if hmm.exists():
        is_off = hmm.read_text().strip() in ("Y", "1")
        lines.append(
            Line(
                section="host",
                name="uvm_disable_hmm",
                found="1" if is_off else "0",
                should="1",
                state="ok" if is_off else "warn",
                remedy="" if is_off else HMM,
            )
        )
    units = root / "sys/class/iommu"
    count = len(list(units.iterdir())) if units.is_dir() else 0
    options = [
        word for word in (root / "proc/cmdline").read_text().split() if "iommu" in word.lower()
    ]
    is_translating = count > 0 and "iommu=pt" not in options
    said = f"{count} in use" if count else "off"
    lines.append(
        Line(
            section="host",
            name="IOMMU",
            found=f"{said}{', ' if options else ''}{' '.join(options)}",
            should="off, or iommu=pt",
            state="warn" if is_translating else "ok",
            remedy=IOMMU if is_translating else "",
        )
    )
    return lines


def holders(uuid: str) -> list[str]:
    """Processes that hold memory of a card, as nvidia-smi names them; none where it does not run."""
    rows = _nvidia_smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
    ours = str(os.getpid())
    return [
        f"{name} (pid {pid}, {memory})"
        for card, pid, name, memory in rows
        if uuid in card and pid != ours and _parent(pid) != ours
    ]


def _parent(pid: str) -> str:
    """Of a process; its own id where it cannot be seen from here."""
    file = Path("/proc") / pid / "stat"
    return file.read_text().rpartition(")")[2].split()[1] if file.exists() else pid


def pcie_widths() -> dict[str, tuple[str, str]]:
    """Card's uuid -> lanes in use, lanes that card and slot could use."""
    rows = _nvidia_smi("--query-gpu=uuid,pcie.link.width.current,pcie.link.width.max")
    return {uuid: (now, most) for uuid, now, most in rows}


def _nvidia_smi(query: str) -> list[list[str]]:
    """Rows of a query; none where nvidia-smi is absent, fails or hangs, as it does on a broken driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return []
    fields = query.count(",") + 1
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == fields]
