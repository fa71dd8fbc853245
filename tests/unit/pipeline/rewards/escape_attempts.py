"""Reward functions that attack: each response names one attack. What succeeded comes back as parts.

Imported by confined workers, so it imports the standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

Parts = dict[str, float]


def attack(prompt: str, response: str, answer: str) -> tuple[float, Parts]:
    """`response` names a function of this file; `prompt` is JSON of what it needs. Reward: how much succeeded."""
    parts: Parts = globals()[response](json.loads(prompt or "null"))
    return sum(parts.values()), parts


def honest(_: object) -> Parts:
    return {}


def _succeeded(only: object = None, **attempts: Callable[[], object]) -> Parts:
    """1 for what raised no OSError (and, where it returned a bool, returned True). `only`: names of those to try."""
    parts = {}
    chosen = only if isinstance(only, list) else list(attempts)
    for name, attempt in ((name, attempts[name]) for name in chosen):
        try:
            parts[name] = float(attempt() is not False)
        except (OSError, ValueError):
            parts[name] = 0.0
    return parts


def _call(number: int, *arguments: int | bytes | None) -> bool:
    """A system call by its number on x86_64."""
    return ctypes.CDLL(None, use_errno=True).syscall(number, *arguments) >= 0


def network(needs: dict[str, object]) -> Parts:
    """To a listener of this machine: TCP, a socket with a name, an abstract one; and sockets of other kinds."""

    def connect(family: int, address: object) -> Callable[[], object]:
        def attempt() -> None:
            with socket.socket(family, socket.SOCK_STREAM) as made:
                made.settimeout(2.0)
                made.connect(address)

        return attempt

    return _succeeded(
        needs.get("only"),
        tcp=connect(socket.AF_INET, ("127.0.0.1", needs["port"])),
        named=connect(socket.AF_UNIX, needs["named"]),
        abstract=connect(socket.AF_UNIX, "\0" + str(needs["abstract"])),
        udp=lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9)),
        netlink=lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close(),
        raw=lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close(),
        listening=lambda: socket.create_server(("127.0.0.1", 0)).close(),
        ring=lambda: _call(425, 8, bytes(120)),  # io_uring makes sockets by itself
    )


def other_processes(needs: dict[str, int]) -> Parts:
    """The run's process: traced, read, written, signalled, given other limits."""
    pid = needs["pid"]

    def memory(where: str, mode: int) -> Callable[[], object]:
        return lambda: os.close(os.open(f"/proc/{pid}/{where}", mode))

    def owned_signal(command: int) -> bool:
        """A pipe that sends SIGKILL to another process once there is something to read."""
        import fcntl

        reading, writing = os.pipe()
        fcntl.fcntl(reading, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        fcntl.fcntl(reading, 10, int(signal.SIGKILL))  # F_SETSIG
        fcntl.fcntl(reading, command, pid if command == 8 else struct.pack("ii", 1, pid))
        os.write(writing, b"x")
        return True

    return _succeeded(
        needs.get("only"),
        trace=lambda: _call(101, 16, pid, None, None),  # PTRACE_ATTACH
        seize=lambda: _call(101, 0x4206, pid, None, None),
        read_memory=lambda: _call(310, pid, bytes(16), 1, bytes(16), 1, 0),
        write_memory=lambda: _call(311, pid, bytes(16), 1, bytes(16), 1, 0),
        environment=memory("environ", os.O_RDONLY),
        open_memory=memory("mem", os.O_RDWR),
        descriptors=lambda: os.listdir(f"/proc/{pid}/fd"),
        root=lambda: os.listdir(f"/proc/{pid}/root"),
        command=memory("cmdline", os.O_RDONLY),
        kill=lambda: os.kill(pid, signal.SIGKILL),
        kill_thread=lambda: _call(200, pid, 9),
        kill_in_group=lambda: _call(234, pid, pid, 9),
        queue_signal=lambda: _call(129, pid, 9, struct.pack("iii", 9, 0, -1) + bytes(116)),
        kill_by_descriptor=lambda: signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGKILL),
        kill_all=lambda: needs["own_namespace"] == 0 and os.kill(-1, 0),
        owner=lambda: needs["own_namespace"] == 0 and owned_signal(8),
        owner_of_more=lambda: needs["own_namespace"] == 0 and owned_signal(15),
        limits=lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (8, 8)),
        slow_down=lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
        pin=lambda: os.sched_setaffinity(pid, {0}),
        steal_descriptor=lambda: _call(438, os.pidfd_open(pid), 1, 0),
    )


def secrets(needs: dict[str, object]) -> Parts:
    """The key: in this environment, those of the processes above, and in its file; files of the home folder."""
    found: Parts = {"environment": float(any(str(needs["key"]) in value for value in os.environ.values()))}
    for name in _listed("/proc"):
        if name.isdigit() and name != str(os.getpid()):
            try:
                text = Path(f"/proc/{name}/environ").read_bytes()
                found["process"] = found.get("process", 0.0) + float(str(needs["key"]).encode() in text)
            except OSError:
                continue
    paths = needs["files"]
    assert isinstance(paths, list)
    return found | {f"file {number}": float(_readable(str(path))) for number, path in enumerate(paths)}


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _readable(path: str) -> bool:
    """Whether something that the run keeps there can be read; an empty folder has nothing."""
    try:
        return bool(os.listdir(path) if os.path.isdir(path) else Path(path).read_bytes())
    except OSError:
        return False


def run_directory(needs: dict[str, str]) -> Parts:
    """Read, listed and written, in every way that changes a file, its name, its length or its mode."""
    run, file = Path(needs["run"]), Path(needs["run"]) / "recipe.yaml"
    return _succeeded(
        needs.get("only"),
        read=file.read_bytes,
        write=lambda: file.write_text("x"),
        append=lambda: file.open("a").close(),
        create=lambda: (run / "new").touch(),
        folder=lambda: (run / "folder").mkdir(),
        remove=file.unlink,
        rename=lambda: file.rename(run / "other"),
        move_out=lambda: file.rename(Path(os.environ["HOME"]) / "stolen"),
        link=lambda: os.link(file, Path(os.environ["HOME"]) / "linked"),
        link_into=lambda: os.symlink("/", run / "link"),
        shorten=lambda: os.truncate(file, 0),
        shorten_by_opening=lambda: os.close(os.open(file, os.O_RDONLY | os.O_TRUNC)),
        shorten_without_reading=lambda: os.close(os.open(file, os.O_ACCMODE | os.O_TRUNC)),
        mode=lambda: file.chmod(0o777),
        mode_of_folder=lambda: run.chmod(0),
        owner=lambda: os.chown(file, 1, 1),
        times=lambda: os.utime(file, (0, 0)),
        attribute=lambda: os.setxattr(file, "user.x", b"x"),
        mount=lambda: _call(165, b"none", os.fsencode(run), b"tmpfs", 0, None),
        new_root=lambda: _call(161, os.fsencode(run)),
        handle=lambda: _call(303, -100, os.fsencode(file), bytes(128), bytes(8), 0),
        namespace=lambda: _call(272, 0x10000000),
        beside_it=lambda: (run.parent / "beside").touch(),
    )


def verdicts(needs: dict[str, object]) -> Parts:
    """Forged messages into every descriptor that can be found, here and in other processes, then an honest 0."""
    body = json.dumps(["0" * 32, 1.0, {}, None, ""]).encode()
    junk = [len(body).to_bytes(4, "big") + body, b"\xff\xff\xff\xff", b"{}\n" * 20, b"[" * 5000]
    for descriptor in range(64):
        for piece in junk:
            try:
                os.write(descriptor, piece)
            except OSError:
                break
    return {"foreign": float(_write_into_others(junk))}


def _write_into_others(junk: list[bytes]) -> bool:
    for process in ["1", str(os.getppid())]:
        for number in range(16):
            try:
                descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                continue
            for piece in junk:
                os.write(descriptor, piece)
            return True
    return False


def later_verdicts(needs: dict[str, object]) -> Parts:
    """A thread goes on writing answers after this sample's own one."""
    body = json.dumps(["0" * 32, 1.0, {}, None, ""]).encode()

    def write() -> None:
        for _ in range(50):
            time.sleep(0.02)
            for descriptor in range(3, 16):
                try:
                    os.write(descriptor, len(body).to_bytes(4, "big") + body)
                except OSError:
                    continue

    threading.Thread(target=write, daemon=True).start()
    return {}


def stolen_requests(needs: dict[str, object]) -> Parts:
    """A process that stays behind reads the next request from the socket, and answers it with reward 1."""
    if os.fork() == 0:
        try:
            _answer_the_next_one()
        finally:
            os._exit(0)
    return {"forked": 0.0}


def _answer_the_next_one() -> None:
    import select

    (mine,) = (number for number in range(3, 64) if _is_socket(number))
    time.sleep(0.3)  # until the sample that started this process has its verdict
    os.kill(os.getppid(), signal.SIGSTOP)
    message = b""
    while not message:
        select.select([mine], [], [])
        try:
            message = os.read(mine, 1 << 16)
        except BlockingIOError:
            continue
    body = json.dumps([message[4:36].decode(), 1.0, {}, None, ""]).encode()
    os.write(mine, len(body).to_bytes(4, "big") + body)
    time.sleep(600)


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def fork_bomb(needs: dict[str, object]) -> Parts:
    """Every process becomes two, without end."""
    while True:
        os.fork()


def double_fork(needs: dict[str, object]) -> Parts:
    """A process without a parent, in a session of its own. The verdict comes once it runs under its mark."""
    import fcntl

    read, write = os.pipe()
    runs = fcntl.fcntl(write, fcntl.F_DUPFD_CLOEXEC, 100)
    os.close(write)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for descriptor in range(3, 64):
                try:
                    os.close(descriptor)
                except OSError:
                    continue
            os.execv(sys.executable, [sys.executable, "-c", f"import time; time.sleep(600)  # {needs['mark']}"])
        os._exit(0)
    os.close(runs)
    os.read(read, 1)  # it ends where the other side is closed by execv
    os.close(read)
    return {"forked": 0.0}


def start_a_program(needs: dict[str, object]) -> Parts:
    return {"started": float(subprocess.run(["/bin/true"], check=False).returncode == 0)}


def fill_the_disk(needs: dict[str, object]) -> Parts:
    """16 MiB after 16 MiB, each a file of its own, wherever something can be written."""
    block, number = bytes(2**24), 0
    while True:
        for folder in (os.environ["HOME"], "/tmp", "/dev/shm", "/var/tmp", "/run"):
            try:
                with open(f"{folder}/fill-{number}", "wb") as file:
                    file.write(block)
            except OSError:
                if folder == os.environ["HOME"]:
                    raise
        number += 1


def dig_deep(needs: dict[str, object]) -> Parts:
    """Folder in folder, deeper than any path and any recursion."""
    os.chdir(os.environ["HOME"])
    for _ in range(3000):
        os.mkdir("d")
        os.chdir("d")
    return {}


def many_files(needs: dict[str, object]) -> Parts:
    """Empty files take no space, and yet there is an end to them."""
    for number in range(10**9):
        os.close(os.open(f"{os.environ['HOME']}/{number}", os.O_CREAT | os.O_WRONLY))
    return {}


def limits_of_the_worker(needs: dict[str, object]) -> Parts:
    """Under bubblewrap the worker is process 1, of the same user."""
    return _succeeded(
        limits=lambda: resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (4, 4)),
        slow_down=lambda: os.setpriority(os.PRIO_PROCESS, os.getppid(), 19),
        stop=lambda: os.getppid() != 1 and os.kill(os.getppid(), signal.SIGSTOP),
        ends=lambda: os.getppid() != 1 and os.kill(os.getppid(), signal.SIGKILL),
        first=lambda: os.getppid() == 1 and bool(os.kill(1, signal.SIGSTOP) or os.kill(1, signal.SIGKILL)),
        descriptor=lambda: os.readlink(f"/proc/{os.getppid()}/fd/0"),
        memory=lambda: os.close(os.open(f"/proc/{os.getppid()}/mem", os.O_RDWR)),
        environment=lambda: os.close(os.open(f"/proc/{os.getppid()}/environ", os.O_RDONLY)),
    )


def fill_beside_a_mount(needs: dict[str, object]) -> Parts:
    """In the folders above the user's own, which bubblewrap makes where it lies below /tmp."""
    above = Path.cwd().parent
    for number in range(10**9):
        (above / str(number)).write_bytes(bytes(2**24))
    return {}


def fill_a_file(needs: dict[str, object]) -> Parts:
    with open(os.path.join(os.environ["HOME"], "fill"), "wb") as file:
        while True:
            file.write(bytes(2**24))


def memory_bomb(needs: dict[str, object]) -> Parts:
    held = []
    while True:
        held.append(bytearray(b"x" * 2**24))


def shared_memory_bomb(needs: dict[str, object]) -> Parts:
    """Memory that a limit of private memory does not count."""
    import mmap

    held = []
    while True:
        held.append(mmap.mmap(-1, 2**26))
        for at in range(0, 2**26, 4096):
            held[-1][at] = 1


def thread_bomb(needs: dict[str, object]) -> Parts:
    threading.stack_size(2**16)
    while True:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


def keyring(needs: dict[str, object]) -> Parts:
    return _succeeded(
        add=lambda: _call(248, b"user", b"name", b"text", 4, -3),
        session=lambda: _call(250, 1, None),
        events=lambda: _call(298, bytes(128), 0, -1, -1, 0),
        bpf=lambda: _call(321, 0, bytes(128), 128),
        faults=lambda: _call(323, 1),
        other_numbers=lambda: _call(0x40000000 | 41, 2, 1, 0),  # socket, by its x32 number
        newest=lambda: _call(452, -100, b"/", 0o777, 0),  # fchmodat2
        memory_file=lambda: os.close(os.memfd_create("x")),
        queue=lambda: _call(240, b"x", os.O_CREAT | os.O_RDWR, 0o600, None),
        segment=lambda: _call(29, 0, 4096, 0o1600),
    )


def privileges(needs: dict[str, object]) -> Parts:
    """Capabilities that are left, and whether new ones can be had."""
    status = dict(
        line.split(":\t", 1)
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        if ":\t" in line
    )
    capabilities = {name: float(int(status[name], 16)) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
    return capabilities | {"new ones": 1.0 - float(status["NoNewPrivs"])}


def what_is_left(needs: dict[str, object]) -> Parts:
    """What legitimate code may do."""
    with open(os.path.join(os.environ["HOME"], "own"), "w", encoding="utf-8") as file:
        file.write("x")
    left, right = socket.socketpair()
    left.send(b"x")
    with right:
        received = right.recv(1) == b"x"
    left.close()
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    signal.setitimer(signal.ITIMER_REAL, 0)
    os.kill(os.getpid(), 0)
    beside = Path(__file__).with_name("verifier_examples.py").read_text()
    return {"works": float(received and "def behave" in beside)}
