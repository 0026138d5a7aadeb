"""The emulated cluster's nodes: network namespaces joined by rate-limited cables, and a CPU limit for each rank.

Used by benchmarks.emulate, which says what is emulated. Needs Linux, root, `ip` and `tc`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x4000000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE, MS_NOSUID = 0x1000, 0x4000, 0x40000, 2
PR_SET_PDEATHSIG = 1
MTU = 1500
TICK = """
import ctypes, os, signal, time
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.sched_setaffinity(0, {{{core}}})
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
print("ready", flush=True)
while True:
    time.sleep(0.001)
"""
libc = ctypes.CDLL(None, use_errno=True)


class EmulationError(RuntimeError):
    """The cluster cannot be set up."""


def check(status: int, what: str) -> None:
    if status != 0:
        raise EmulationError(f"{what}: {os.strerror(ctypes.get_errno())} (are you root?)")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    kind_bytes, more = (text.encode() if text else None for text in (kind, options))
    check(libc.mount(source.encode(), target.encode(), kind_bytes, ctypes.c_ulong(flags), more), f"mount {target}")


def new_pids() -> None:
    """The calling process's next child is process 1 of a private PID namespace."""
    check(libc.unshare(CLONE_NEWPID), "unshare")


def separate() -> None:
    """Gives the calling process mount and network namespaces of its own, and a /proc of its PID namespace.

    It dies with its parent.
    """
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    check(libc.unshare(CLONE_NEWNS | CLONE_NEWNET), "unshare")
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc", MS_NOSUID)


def apart(act: Callable[[], int]) -> int:
    """What `act` returns, in namespaces of its own: all processes that it starts end with this one."""
    new_pids()
    child = os.fork()
    if child == 0:
        code = 2
        try:
            separate()
            code = act()
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Cluster:
    """Builds the nodes. Must run in a network namespace of its own, which becomes the switch."""

    def __init__(self, nodes: int, rate: float | None) -> None:
        self.nodes, self.rate = nodes, rate
        self.home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self.spaces: list[int] = []  # one open namespace descriptor for each node

    def address(self, node: int) -> str:
        return f"10.77.{node // 250}.{node % 250 + 1}"

    def enter(self, node: int) -> None:
        """Moves the calling process into a node."""
        check(libc.unshare(CLONE_NEWUTS), "unshare")
        socket.sethostname(f"node{node}")
        check(libc.setns(self.spaces[node], CLONE_NEWNET), "setns")

    def call(self, command: str, node: int | None = None) -> None:
        """Runs `ip` or `tc`, in a node's namespace or the switch's."""
        before = None if node is None else (lambda: libc.setns(self.spaces[node], CLONE_NEWNET))
        done = subprocess.run(command.split(), preexec_fn=before, text=True, capture_output=True)
        if done.returncode:
            raise EmulationError(f"{command}: {done.stderr.strip() or done.stdout.strip()}")

    def shape(self, device: str, rate: float, node: int | None = None) -> None:
        """Limits what leaves `device` to `rate` bits per second.

        A packet of the stack is a 'GSO' packet of up to 64 KB, which the token bucket must send whole, and a full
        bucket goes out at infinite speed. So packets are cut to about 150 us of line time (4 to 64 KB) and the bucket
        is little more than one packet: small messages are not flattered. The queue is deep: no loss (which would cost
        a TCP time-out of 200 ms), as on a flow-controlled fabric.
        """
        packet = 4096
        while packet < 65536 and packet * 2 <= rate / 8 * 150e-6:
            packet *= 2
        burst = max(packet + 2048 + MTU, int(rate / 8 * 100e-6))
        if node is not None:
            self.call(f"ip link set dev {device} gso_max_size {packet}", node)
        self.call(f"tc qdisc replace dev {device} root tbf rate {int(rate)}bit burst {burst}b limit {32 << 20}b", node)

    def build(self) -> None:
        self.call("ip link set lo up")
        self.call("ip link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0")
        self.call(f"ip link set br0 mtu {MTU} up")
        for node in range(self.nodes):
            check(libc.unshare(CLONE_NEWNET), "unshare")
            self.spaces.append(os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
            settings()
            check(libc.setns(self.home, CLONE_NEWNET), "setns")
            self.call(f"ip link add sw{node} mtu {MTU} type veth peer name up{node} mtu {MTU}")
            self.call(f"ip link set up{node} netns /proc/{os.getpid()}/fd/{self.spaces[node]}")
            self.call(f"ip link set sw{node} master br0 up")
            self.call("ip link set lo up", node)
            self.call(f"ip link set up{node} name eth0", node)
            self.call(f"ip addr add {self.address(node)}/16 dev eth0", node)
            self.call("ip link set eth0 up", node)
            if self.rate:
                self.shape("eth0", self.rate, node)
                self.shape(f"sw{node}", self.rate)
        with tempfile.NamedTemporaryFile("w", prefix="emulate-hosts-") as hosts:  # seen inside only
            hosts.write("127.0.0.1 localhost\n")
            for i in range(self.nodes):
                hosts.write(f"{self.address(i)} node{i}\n::ffff:{self.address(i)} node{i}\n")
            hosts.flush()
            Path(hosts.name).chmod(0o644)
            mount(hosts.name, "/etc/hosts", None, MS_BIND)

    def set_link(self, node: int, up: bool) -> None:
        self.call(f"ip link set sw{node} {'up' if up else 'down'}")


def settings() -> None:
    """TCP as it should be in the namespace that the process is in, whatever the machine's defaults are."""
    for key, value in {
        "ipv6/conf/all/disable_ipv6": "1",
        "ipv4/tcp_congestion_control": "reno",  # bbr was 7 to 13 % slower here, and cubic is not allowed everywhere
        "ipv4/tcp_slow_start_after_idle": "0",
        "ipv4/tcp_no_metrics_save": "1",
    }.items():
        with contextlib.suppress(OSError):  # a kernel without IPv6, for one
            Path(f"/proc/sys/net/{key}").write_text(value)


@contextlib.contextmanager
def ticks() -> Iterator[None]:
    """On every core something that wakes up each millisecond, for 3 % of its time.

    The kernel looks at what a rank has left of its quota when its clock ticks, every 4 ms as a rule, or when another
    process comes.
    """
    processes = []
    try:
        for core in os.sched_getaffinity(0):
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", TICK.format(core=core)], stdout=subprocess.PIPE, start_new_session=True
                )
            )
            if not processes[-1].stdout.readline():
                raise EmulationError("--cpu-quota: no real-time process can be had (are you root?)")
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def quotas(cores: Sequence[float]) -> Iterator[list[Path]]:
    """A cgroup (v1 or v2) with a hard limit of CPU cores for each rank; no groups where there is no limit.

    A rank of half a core computes for 1 ms in 2, as evenly as the kernel can.
    """
    if not cores:
        yield []
        return
    old = Path("/sys/fs/cgroup/cpu").is_dir()
    top = Path("/sys/fs/cgroup/cpu" if old else "/sys/fs/cgroup") / f"emulate-{os.getpid()}"
    groups = [top / f"rank{rank}" for rank in range(len(cores))]
    try:
        try:
            top.mkdir()
            if not old:
                (top / "cgroup.subtree_control").write_text("+cpu")
            for group, limit in zip(groups, cores, strict=True):
                group.mkdir()
                period = round(1000 / min(limit, 1.0))  # us; the kernel takes no quota below 1000
                quota = round(limit * period)
                old_limits = {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": quota}
                for name, value in (old_limits if old else {"cpu.max": f"{quota} {period}"}).items():
                    (group / name).write_text(str(value))
        except OSError as error:
            raise EmulationError(f"--cpu-quota: {error}") from error
        with ticks():
            yield groups
    finally:
        for group in (*groups, top):
            for _ in range(50):  # busy until its last process is gone
                try:
                    group.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.05)
