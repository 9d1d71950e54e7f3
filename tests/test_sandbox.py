"What hostile source tries in the sandbox, written for the worst case: no lint has looked at it."
import os, platform, signal, socket, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trace_nb.core.environment import Episode, as_message, call_tool, finish, replay
from trace_nb.core.policy import load_policy
from trace_nb.core.rollout import rollout
from trace_nb.core.trajectory import InputError
from trace_nb.synthesize import sandbox
from trace_nb.synthesize.sandbox import EnvironmentFault, sandboxed

SOURCE = '''
import random, sys
os, ctypes = sys.modules["os"], sys.modules["ctypes"]
libc = ctypes.CDLL(None, use_errno=True)

class Till:
    "Put the right amount into the till."
    capability, domain, max_turns, policy_text = "tool_calling_precision", "phone", 5, "Put in what is asked for."

    def reset(self, seed=0, **row):
        self._wanted, self._amount = random.Random(f"till-{seed}").randrange(1, 100), 0
        return f"Please put {self._wanted} into the till."

    def put(self, amount: int) -> str:
        """
        Put an amount into the till.

        Args:
            amount: The amount.
        """
        self._amount += amount
        return "done"

    def attack(self) -> str:
        "Do what an environment must not do."
        return str(self._attack())

    def _attack(self):
        return "nothing"

    def _reply(self, text): return None
    def _parts(self): return {"right": float(self._amount == self._wanted)}
    def get_reward(self): return self._parts()["right"]
    def _oracle(self): return [{"name": "put", "arguments": {"amount": self._wanted}}, "Done."]
'''


def hostile(attack: str) -> str:
    "The source with lines of attack; the last one is returned when it is an expression."
    return SOURCE.replace('return "nothing"', attack.strip().replace("\n", "\n        "))


def fault_of(name):
    try: found = sandbox.self_test(name)
    except EnvironmentFault as e: return str(e)
    return f"open: {found}" if found else None


FAULTS = {name: fault_of(name) if sys.platform == "linux" else "not Linux" for name in sandbox.MECHANISMS}
NONE = pytest.param(None, marks=pytest.mark.skip(reason=f"no sandbox on this machine: {FAULTS}"))


@pytest.fixture(params=[name for name, fault in FAULTS.items() if fault is None] or [NONE])
def mechanism(request, monkeypatch):
    "Every mechanism that there is."
    monkeypatch.setattr(sandbox, "mechanism", lambda: request.param)
    return request.param


def attacked(attack, **limits):
    "An instance after `reset`, with the attack in it."
    environment = sandboxed(hostile(attack), "Till", **limits)()
    environment.reset(seed=0)
    return environment


def tried(environment): return call_tool(environment, "attack", {})


# Refusal: on any machine.

@pytest.mark.parametrize("found, words", [(EnvironmentFault("the kernel refuses landlock"), "the kernel refuses landlock"), (["network"], "leaves open: network")])
def test_refuses_where_nothing_isolates(monkeypatch, found, words):
    def self_test(name):
        if isinstance(found, Exception): raise found
        return found
    monkeypatch.setattr(sandbox, "self_test", self_test)
    sandbox.mechanism.cache_clear()
    with pytest.raises(InputError) as refusal: sandboxed(SOURCE, "Till")
    sandbox.mechanism.cache_clear()
    text = str(refusal.value)
    assert words in text and "was not run" in text and "install bubblewrap" in text and "\n" not in text


def test_refuses_other_systems(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    sandbox.mechanism.cache_clear()
    with pytest.raises(InputError, match="darwin is not Linux"): sandboxed(SOURCE, "Till")
    monkeypatch.undo(); sandbox.mechanism.cache_clear()


# What the kernel must refuse.

SHUT = "Operation not permitted"
ATTACKS = {
    "read the user list": ('return open("/etc/passwd").read()', SHUT),
    "read the home folder": ('return os.listdir(os.path.expanduser("~"))', SHUT),
    "read the variables of the parent": ('return open(f"/proc/{os.getppid()}/environ", "rb").read()', SHUT),
    "read its own memory": ('return open("/proc/self/maps").read()', SHUT),
    "read through C": ('return libc.open(b"/etc/passwd", 0), os.strerror(ctypes.get_errno())', SHUT),
    "change the folder": ('return os.chdir("/")', SHUT),
    "a link": ('return os.symlink("/etc/passwd", "/tmp/trace_nb_link")', SHUT),
    "delete": ('return os.unlink("/tmp/trace_nb_no_such_file")', SHUT),
    "fork": ("return os.fork()", SHUT),
    "a thread": ('import _thread\nreturn _thread.start_new_thread(print, ())', "can't start new thread"),
    "a program": ('return os.execv("/bin/sh", ["sh", "-c", "echo hello"])', SHUT),
    "a program beside it": ('return os.posix_spawn("/bin/true", ["true"], {})', SHUT),
    "a shell": ('return os.system("true")', str(127 << 8)),
    "kill the parent": ("return os.kill(os.getppid(), 9)", SHUT),
    "kill everything": ("return os.kill(-1, 9)", SHUT),
    "a module from disk": ("import http.client", "No module named 'http'"),
    "raise its limits": ('resource = sys.modules["resource"]\nreturn resource.setrlimit(resource.RLIMIT_AS, (-1, -1))', "not allowed to raise maximum limit"),
    "another filter": ("return libc.prctl(22, 2, 0), os.strerror(ctypes.get_errno())", SHUT),
    "a random seed of the machine": ("return os.urandom(8)", SHUT),
    "sleep": ('return __import__("time").sleep(100)', SHUT),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attack(mechanism, name):
    attack, answer = ATTACKS[name]
    environment = attacked(attack)
    text = tried(environment)
    assert answer in text, text
    assert environment.put(amount=1) == "done"      # it is the attack that failed, not the worker


def test_the_same_attacks_work_outside(tmp_path):
    "Otherwise the tests above would prove nothing."
    program = SOURCE.replace("sys.modules[\"ctypes\"]", "__import__('ctypes')")
    attacks = "\n".join(["class Free(Till):", "    def fork(self):", "        if os.fork() == 0: os._exit(0)", "        return os.wait() and 'forked'",
                         "    def read(self): return len(open('/etc/passwd').read())", "    def signal(self): return os.kill(os.getppid(), 0)"])
    lines = "free = Free(); print(free.fork(), free.read() > 0, free.signal(), libc.open(b'/etc/passwd', 0) > 0)"
    found = subprocess.run([sys.executable, "-c", "\n".join([program, attacks, lines])], capture_output=True, text=True)
    assert found.stdout.split() == ["forked", "True", "None", "True"], found.stderr


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are those of x86_64")
def test_system_calls_by_number(mechanism):
    "memfd_create, io_uring_setup, bpf, unshare, pidfd_open, process_vm_readv, ptrace, keyctl, userfaultfd, open of x32, openat2, clone3."
    numbers = [319, 425, 321, 272, 434, 310, 101, 250, 323, 2 | 0x40000000, 437, 435]
    text = tried(attacked(f"return [(libc.syscall(n, 0, 0, 0, 0, 0), ctypes.get_errno()) for n in {numbers}]"))
    assert text == str([(-1, 1)] * len(numbers))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="machine code for x86_64")
def test_another_architecture_kills(mechanism):
    "getpid by the 32-bit gate: the filter sees another architecture."
    environment = attacked('mmap = libc.mmap; mmap.restype = ctypes.c_void_p\npage = mmap(None, 4096, 7, 0x22, -1, 0)\n'
                           'ctypes.memmove(page, b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3", 8)\nreturn ctypes.CFUNCTYPE(ctypes.c_int)(page)()')
    assert "the worker died" in tried(environment)


def test_write_nowhere(mechanism, tmp_path):
    tmp_path.chmod(0o777)
    environment = attacked(f'''
told = []
for folder in ("{tmp_path}", ".", "/", "/tmp", "/var/tmp", "/dev/shm", os.path.expanduser("~")):
    try: told.append(open(folder + "/trace_nb_was_here", "w"))
    except PermissionError: pass
return told''')
    assert tried(environment) == "[]" and not list(tmp_path.iterdir())
    assert not any((Path(p)/"trace_nb_was_here").exists() for p in ("/", "/tmp", "/var/tmp", "/dev/shm", Path.home()))


def test_loopback(mechanism):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        connect = f'address = (2).to_bytes(2, "little") + ({listener.getsockname()[1]}).to_bytes(4 - 2, "big") + bytes([127, 0, 0, 1]) + bytes(8)\n'
        attack = connect + "return libc.connect(libc.socket(2, 1, 0), address, 16), libc.socket(1, 1, 0)"
        assert tried(attacked(attack)) == "(-1, -1)"
        with pytest.raises(BlockingIOError): listener.accept()


def test_environment_variables(mechanism, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    text = tried(attacked("return dict(os.environ)"))
    assert "PYTHONHASHSEED" in text and "secret" not in text and "PATH" not in text


def test_inherited_files(mechanism, tmp_path):
    with open(tmp_path/"secret", "w+") as file:
        file.write("secret"); file.flush(); os.set_inheritable(file.fileno(), True)
        text = tried(attacked(f'return [n for n in range(3, 100) if libc.read(n, ctypes.create_string_buffer(9), 9) >= 0]'))
    assert text == "[]"


# What the parent must survive.

CALL = {"name": "attack", "arguments": {}}


@pytest.mark.parametrize("attack, words", [
    ("while True: pass", "no answer within 1 seconds"),
    ("import re\nreturn re.match('(a+)+b', 'a' * 99)", "no answer within 1 seconds"),
    ("sys.exit(0)", "SystemExit"),
    ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ("os._exit(0)", "the worker died"),
    ("ctypes.string_at(0)", "the worker died"),
    ("os.write(1, b'hello\\n')", "nonsense"),
    ("os.write(1, b'[999, \"value\", \"done\"]\\n')", "nonsense"),
    ("os.write(1, b'[' * 200000 + b'\\n')", "nonsense"),
    ("while True: os.write(1, b'x' * 60000)", "an answer of over 1,048,576 bytes"),
    ("return 'x' * 2_000_000", "an answer of over 1,048,576 bytes"),
])
def test_lost_episode(mechanism, attack, words):
    cls = sandboxed(hostile(attack), "Till", seconds=1.)
    episode, begun = Episode(cls, seed=0), time.monotonic()
    for i, step in enumerate([CALL, *episode.environment._oracle()]): episode.step(as_message(step, i))
    assert time.monotonic() - begun < 4
    lost = finish(episode, "0", 0, "steps")
    assert words in lost.messages[3]["content"] and words in lost.metadata["fault"]
    assert (lost.termination, lost.reward, lost.success) == ("environment_error", 0., False)
    assert replay(cls, 0).reward == 1.              # the next episode finds a worker


def test_deaf_worker(mechanism):
    "It answers once more than it was asked, then reads no more: a long request must not block."
    environment = attacked("os.write(1, b'[4, \"value\", \"nothing\"]\\n')\nwhile True: pass", seconds=1.)
    begun = time.monotonic()
    tried(environment)
    with pytest.raises(EnvironmentFault): environment._reply("a" * 500_000)
    assert time.monotonic() - begun < 4


def test_memory(mechanism):
    environment = attacked("held = [bytearray(2**20) for _ in range(2**14)]\nreturn len(held)")
    assert tried(environment) == "Error: "            # MemoryError has no text
    status = Path(f"/proc/{environment._worker.process.pid}/status").read_text() if mechanism == "landlock" else "VmPeak: 0 kB"
    assert int(status.split("VmPeak:")[1].split()[0]) <= 2**18
    assert environment.put(amount=1) == "done"


def test_long_texts_are_cut(mechanism):
    text = tried(attacked("return 'x' * 500_000"))
    assert len(text) < 20_050 and text.endswith("(500,000 characters)")


def test_printing_disturbs_nothing(mechanism):
    assert tried(attacked("print('[1, 2]\\n' * 1000); print('e', file=sys.stderr); return 'printed'")) == "printed"


@pytest.mark.parametrize("old, new, termination", [
    ("self._wanted, self._amount =", "raise ValueError('no stock')\n        self._wanted, self._amount =", "environment_error"),
    ("return self._parts()[\"right\"]", "return float('nan')", "environment_error"),
    ("return self._parts()[\"right\"]", "return 'much'", "environment_error"),
    ("def _reply(self, text): return None", "def _reply(self, text): return 5", "environment_error"),
    ("def _reply(self, text): return None", "def _reply(self, text): return None", "done"),
])
def test_rollout_records_the_fault(mechanism, old, new, termination):
    cls = sandboxed(SOURCE.replace(old, new), "Till")
    (trajectory,) = rollout(load_policy("oracle"), cls, seeds=[0])
    assert trajectory.termination == termination


@pytest.mark.parametrize("source, words", [
    ("x = (", "SyntaxError"), ("import socket", "No module named 'socket'"), ("class Other: pass", "no attribute 'Till'"), ("while True: pass", "no answer"),
    (SOURCE.replace('"phone", 5', '"phone", "five"'), "max_turns must be int"),
    (SOURCE.replace("amount: int", "amount: os.stat_result"), "is not the type of a JSON value"),
])
def test_source_that_cannot_be_loaded(mechanism, monkeypatch, source, words):
    monkeypatch.setattr(sandbox, "START", 1.)
    with pytest.raises(EnvironmentFault, match=words): sandboxed(source, "Till")


# Whom it must obey.

def test_reward_is_out_of_reach_of_arguments(mechanism):
    environment = sandboxed(SOURCE, "Till")(); environment.reset(seed=0)
    wanted = environment._oracle()[0]["arguments"]["amount"]
    tries = [("get_reward", {}), ("_parts", {}), ("reset", {"seed": 1}), ("__init__", {}), ("_ask", {"operation": "reward"}), ("_worker", {}), ("put.__globals__", {}),
             ("put", {"self": {"_amount": wanted}}), ("put", {"amount": {"__class__": "int"}}), ("put", {"amount": "1", "_amount": wanted}), ("put", {"amount": [wanted]})]
    for name, arguments in tries:
        assert call_tool(environment, name, arguments).startswith("Error"), (name, arguments)
        assert environment.get_reward() == 0.
    environment._oracle().clear()
    assert environment.put(amount=wanted) == "done" and environment.get_reward() == 1.


def test_same_trajectories_as_without(mechanism):
    names = {}
    exec(SOURCE.replace("sys.modules[\"ctypes\"]", "__import__('ctypes')"), names)
    seeds = range(5)
    inside, outside = rollout(load_policy("oracle"), sandboxed(SOURCE, "Till"), seeds, group_size=2), rollout(load_policy("oracle"), names["Till"], seeds, group_size=2)
    assert [t.to_dict() for t in inside] == [t.to_dict() for t in outside] and all(t.success for t in inside)


def test_used_from_another_thread(mechanism):
    "The worker outlives the thread that asked for it."
    with ThreadPoolExecutor(1) as pool: environment = pool.submit(lambda: attacked("return 1")).result()
    time.sleep(.1)
    assert tried(environment) == "1" and environment._worker.life == 1


def test_forgotten_instances_are_dropped(mechanism):
    cls = sandboxed(hostile("import gc\nreturn sum(isinstance(o, Till) for o in gc.get_objects())"), "Till")
    for seed in range(20):
        environment = cls(); environment.reset(seed=seed)
    assert int(tried(environment)) <= 2


def test_dies_with_its_parent(mechanism, tmp_path):
    "The parent is killed while the worker is in an endless loop."
    program = "\n".join(["import sys, threading; from trace_nb.synthesize import sandbox", f"sandbox.mechanism = lambda: {mechanism!r}",
                         "environment = sandbox.sandboxed(sys.stdin.read(), 'Till', seconds=60)(); environment.reset(seed=0)",
                         "print(environment._worker.process.pid, flush=True); environment.attack()"])
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    parent.stdin.write(hostile("while True: pass")); parent.stdin.close()
    worker = int(parent.stdout.readline())
    time.sleep(.3)
    assert running(worker)
    parent.send_signal(signal.SIGKILL); parent.wait(); parent.stdout.close()
    deadline = time.monotonic() + 5
    while running(worker) and time.monotonic() < deadline: time.sleep(.05)
    assert not running(worker)


def running(process):
    try: return Path(f"/proc/{process}/stat").read_text().rsplit(")")[-1].split()[0] not in "ZX"
    except FileNotFoundError: return False


# The second lock on files holds without the first.

@pytest.mark.skipif(FAULTS["landlock"] is not None, reason=f"no landlock on this machine: {FAULTS['landlock']}")
def test_landlock_alone():
    program = "\n".join(["import ctypes; from trace_nb.synthesize.sandbox import _landlock", "libc = ctypes.CDLL(None)", "libc.prctl(38, *map(ctypes.c_ulong, (1, 0, 0, 0)))",
                         "open('/etc/passwd').close()", "_landlock(libc, lambda result, what: result)", "open('/etc/passwd')"])
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "PermissionError: [Errno 13]" in found.stderr


@pytest.mark.skipif(FAULTS["bubblewrap"] is not None, reason=f"no bubblewrap on this machine: {FAULTS['bubblewrap']}")
def test_bubblewrap_alone():
    package = str(Path(sandbox.__file__).parents[1])
    command = [*sandbox._bubblewrap(package), str(Path(sys.executable).resolve()), "-S", "-c", "import os; print(os.path.exists('/etc/passwd'), os.getpid() < 9)"]
    found = subprocess.run(command, capture_output=True, text=True, env={})
    assert found.stdout.split() == ["False", "True"], found.stderr
