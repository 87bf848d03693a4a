"""Attacks beside those of ``attacks.py``: on the helper, on limits, by what is left behind."""

from __future__ import annotations

from attack import Attack, by_call, by_opening

FURTHER = [
    by_opening("the helper's mappings", "/proc/1/smaps"),
    by_call("the helper's mapped files", "list `/proc/1/map_files`", 'os.listdir("/proc/1/map_files")'),
    by_call("another's memory, written", "`process_vm_writev`", "call(311, 1, 0, 0, 0, 0, 0)"),
    by_call("what two processes share", "`kcmp`", "call(312, 1, 1, 0, 0, 0)"),
    Attack(
        "the helper's life",
        "SIGKILL and SIGSTOP to process 1",
        """
said = set()
for number in (signal.SIGKILL, signal.SIGSTOP):
    try:
        os.kill(1, number)
    except OSError as error:
        said.add(errno.errorcode[error.errno])
time.sleep(0.2)
alive = open("/proc/1/stat").read().rpartition(")")[2].split()[0] not in "TZX"
print("refused: it runs on" if alive else "DONE", *sorted(said))
""",
    ),
    by_call(
        "the helper's program", "write `/turnstile/helper`", 'open("/turnstile/helper/__main__.py", "ab").fileno()'
    ),
    by_call("the system's programs", "write `/usr/bin/env`", 'open("/usr/bin/env", "ab").fileno()'),
    by_call("a root that can be written", "`mount(MS_REMOUNT)`", 'call(165, 0, b"/", 0, 0x1020, 0)'),
    by_call("shared mounts", "`mount(MS_SHARED)`", 'call(165, 0, b"/", 0, 0x104000, 0)'),
    by_call("a copy of a mount", "`open_tree(OPEN_TREE_CLONE)`", 'call(428, -100, b"/", 1)'),
    by_call("what a mount covers", "`umount2` of `/tmp`", 'call(166, b"/tmp", 2)'),
    by_call("another root", "`pivot_root`", 'call(155, b"/tmp", b"/tmp")'),
    by_call("a key of another", "`request_key`", 'call(249, b"user", b"stolen", 0, 0)'),
    Attack(
        "keys that are listed",
        "read `/proc/keys`",
        """
try:
    found = [line.split()[-2:] for line in open("/proc/keys")]
    print("DONE" if found else "refused: none is seen", found or "")
except OSError as error:
    print("refused:", errno.errorcode[error.errno])
""",
    ),
    Attack(
        "a set-uid program",
        "run a root's `whoami` with the set-uid bit, and one of one's own",
        """
import shutil, subprocess
shutil.copy("/opt/set-uid/whoami", "/tmp/whoami"); os.chmod("/tmp/whoami", 0o6755)
me = open("/proc/self/status").read().split("Uid:")[1].split()[0]
for program in ("/opt/set-uid/whoami", "/tmp/whoami"):
    ran = subprocess.run([program], capture_output=True, text=True)
    said = (ran.stdout + ran.stderr).strip()
    # Without a name of its own for a uid, whoami tells the number.
    if said not in ("agent", "sandbox") and not said.endswith((me, "ID " + me)):
        print("DONE", program, said); break
else:
    print("refused: it ran as the caller")
""",
    ),
    by_call(
        "a program with capabilities",
        "`setxattr(security.capability)` on a file of one's own",
        '[open("/tmp/able", "w").close(), os.setxattr("/tmp/able", "security.capability", bytes.fromhex('
        '"0100000200200000000000000000000000000000"))]',
    ),
    Attack(
        "a file that nobody can remove",
        "the immutable flag",
        """
import fcntl
fd = os.open("/tmp/stays", os.O_CREAT | os.O_RDWR)
attempt(lambda: fcntl.ioctl(fd, 0x40086602, (0x10).to_bytes(8, "little")))
""",
    ),
    Attack(
        "a false identity",
        "SCM_CREDENTIALS of root",
        """
import struct
ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
false = struct.pack("iII", 1, 0, 0)
attempt(lambda: ends[0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, false)]))
""",
    ),
    Attack(
        "core dumps",
        "raise the limit of core files and crash",
        """
try:
    resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, 1 << 20))
except (OSError, ValueError):
    print("refused: the limit stays 0" if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0 else "DONE")
else:
    print("DONE")
""",
    ),
    Attack(
        "higher limits",
        "`setrlimit` above the hard limit, of files and of file size",
        """
raised = []
for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK):
    hard = resource.getrlimit(which)[1]
    try:
        if hard != resource.RLIM_INFINITY:
            resource.setrlimit(which, (hard + 1, hard + 1)); raised.append(which)
    except (OSError, ValueError):
        pass
print("DONE" if raised else "refused: none is raised", raised or "")
""",
    ),
    Attack(
        "a lower place in the queue of victims",
        "`oom_score_adj` below the helper's",
        """
attempt(lambda: open("/proc/self/oom_score_adj", "wb", 0).write(b"-1000"))
""",
    ),
    by_call(
        "real-time priority", "`sched_setscheduler(SCHED_FIFO)`", "os.sched_setscheduler(0, 1, os.sched_param(1))"
    ),
    by_call("a higher priority", "`setpriority(-20)`", "os.setpriority(os.PRIO_PROCESS, 0, -20)"),
    by_call("the clock, slowly", "`clock_adjtime`, with nothing to change", "call(305, 0, bytes(512))"),
    by_call("the day", "`settimeofday`", "call(164, bytes(16), 0)"),
    by_call("the host's name", "`sethostname`", 'call(170, b"x", 1)'),
    by_call("the machine's end", "`reboot`", "call(169, 0xFEE1DEAD, 672274793, 0x4321FEDC, 0)"),
    by_call("another kernel", "`kexec_load`", "call(246, 0, 0, 0, 0)"),
    by_call("swap", "`swapon`", 'call(167, b"/tmp", 0)'),
    by_call("accounting of processes", "`acct`", 'call(163, b"/tmp/acct")'),
    by_call("ports of the machine", "`iopl`", "call(172, 3)"),
    by_call("the processor's tables", "`modify_ldt`", "call(154, 1, bytes(16), 16)"),
    by_call("every file that is opened", "`fanotify_init`", "call(300, 0, 0)"),
    Attack(
        "watching the tests' files",
        "`inotify_add_watch` on their home, and on the harness's",
        """
watch, seen = call(294, 0), []
for path in (b"/home/tests", b"/home/harness"):
    try:
        call(254, watch, path, 0xFFF)
        # Where homes of others are covered, this is an empty folder that nobody writes.
        seen += [path] if os.listdir(path) or os.access(path, os.W_OK) else []
    except OSError:
        pass
print("DONE" if seen else "refused: nothing is seen", seen or "")
""",
    ),
    Attack(
        "the kernel's addresses",
        "read `/proc/kallsyms`",
        """
try:
    found = [line for line in open("/proc/kallsyms") if line.split()[0].strip("0")]
    print("DONE" if found else "refused: none is seen")
except OSError as error:
    print("refused:", errno.errorcode[error.errno])
""",
    ),
    by_opening("the kernel's memory", "/proc/kcore"),
    by_opening("a setting below `/sys`", "/sys/kernel/mm/transparent_hugepage/enabled", "wb"),
    by_opening("faults in user space by a device", "/dev/userfaultfd"),
    Attack(
        "a daemon",
        "double fork, a session of its own, every descriptor closed, signals ignored",
        """
started, told = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    os.write(told, b"x")
    os.closerange(0, 4096)
    if os.fork() == 0:
        os.setsid()
    os.execvp("python3", ["python3", "-c", "import time; time.sleep(600)", "turnstile-daemon"])
os.read(started, 1)
""",
        after="""
left = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if b"\\0turnstile-daemon" in open(f"/proc/{pid}/cmdline", "rb").read():
            left.append(pid)
    except OSError:
        pass
print("DONE" if left else "refused: stop_all ends it", left or "")
""",
    ),
    Attack(
        "a pair that revives itself",
        "two processes, each of which starts the other when it dies",
        """
if os.fork() == 0:
    os.setsid()
    while True:
        other = os.fork()
        if other:
            os.waitpid(other, 0)
            continue
        os.setsid()
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(0.001)
        if os.fork():
            os._exit(0)
""",
        after="""
own = {os.getpid(), 1}
others = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and int(pid) not in own]
time.sleep(0.2)
lives = [pid for pid in others if os.path.exists(f"/proc/{pid}")]
left = [pid for pid in lives if "(python3)" in open(f"/proc/{pid}/stat").read()]
print("DONE" if left else "refused: stop_all ends it", left or "")
""",
    ),
    Attack(
        "POSIX message queues",
        "`mq_open` until there is no more",
        """
made = 0
try:
    while made < 10_000:
        call(240, b"queue%d" % made, 0o102, 0o600, 0)
        made += 1
    print("DONE", made)
except OSError as error:
    print("bounded:" if made else "refused:", errno.errorcode[error.errno])
""",
        bounded=True,
    ),
]
