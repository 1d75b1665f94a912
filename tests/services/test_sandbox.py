"""The sandbox, in every tier that this machine has: results of programs, limits, and what programs cannot reach."""

import asyncio
import json
import os
import sys
from contextlib import aclosing
from itertools import pairwise

import psutil
import pytest
from local_services import local_services
from paths import ROOT
from waiting import descendants, until

from ngym.errors import ServiceError
from ngym.sandbox import DockerSandbox, Limits, LocalSandbox, Program, RemoteSandbox, confinement
from ngym.sandbox.docker import request, result
from ngym.sandbox.docker_guest import PRELUDE
from ngym.sandbox.local import TIERS
from ngym.services.base.app import load

pytestmark = pytest.mark.skipif(not confinement.seccomp_supported(), reason="no filter for this machine's processor")


@pytest.fixture(params=TIERS)
async def sandbox(request):
    async with aclosing(LocalSandbox(request.param, slots=2)) as sandbox:
        try:
            await sandbox.start()
        except ServiceError as error:
            pytest.skip(error.detail)
        yield sandbox


async def test_a_program_reads_prints_answers_and_fails_as_it_would_anywhere(sandbox):
    code = "import os, sys\nprint(input(), len(sys.stdin.read()))\nprint('oh', file=sys.stderr)\nos.write(3, b'[1]')"
    ran = await sandbox.run(code, stdin="é\nrest")
    assert (ran.verdict, ran.stdout, ran.stderr, ran.answer, ran.exit_code) == ("ok", "é 4\n", "oh\n", "[1]", 0)
    assert ran.tier == sandbox.tier and ran.cpu_s > 0 and ran.memory_bytes > 1 << 20
    ran = await sandbox.run("def f():\n    return 1 / 0\nprint('before')\nf()")
    assert (ran.verdict, ran.stdout, ran.exit_code) == ("runtime_error", "before\n", 1)
    assert ran.stderr.startswith("Traceback") and "return 1 / 0" in ran.stderr and "guest.py" not in ran.stderr
    assert (await sandbox.run("raise SystemExit(7)")).exit_code == 7
    assert (await sandbox.run("import os; os.abort()")).signal == "SIGABRT"
    assert (await sandbox.run("def")).stderr.rstrip().endswith("SyntaxError: invalid syntax")
    assert (await sandbox.run("if __name__ == '__main__': print('main')")).stdout == "main\n"


async def test_the_usual_libraries_and_threads_work(sandbox):
    code = (
        "import asyncio, collections, heapq, itertools, json, math, random, re, threading, decimal, fractions\n"
        "async def f():\n    await asyncio.sleep(0.001)\n    return 5\n"
        "print(asyncio.run(f()))\n"
        "t = threading.Thread(target=print, args=('thread',)); t.start(); t.join()\n"
    )
    ran = await sandbox.run(code)
    assert (ran.verdict, ran.stdout) == ("ok", "5\nthread\n"), ran.stderr
    pytest.importorskip("numpy")
    ran = await sandbox.run("import numpy as np\nprint(np.linalg.solve(np.eye(2), np.ones(2)).sum())")
    assert (ran.verdict, ran.stdout) == ("ok", "2.0\n"), ran.stderr


ENDLESS = {
    "while True: pass": "time_limit",
    "10 ** 10 ** 10": "time_limit",
    "import time; time.sleep(1000)": "time_limit",
    "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except Exception: pass\nwhile True: pass": "time_limit",
    "import threading\nfor i in range(4): threading.Thread(target=lambda: sum(iter(int, 1))).start()": "time_limit",
    "[0] * 10 ** 12": "memory_limit",
    "x = []\nwhile True: x.append(bytearray(1 << 20))": "memory_limit",
    "while True: print('x' * 1000)": "output_limit",
    "import os\nwhile True: os.write(3, bytes(1000))": "output_limit",
    "import os\nwhile True: os.write(2, bytes(1000))": "output_limit",
}  # fmt: skip


async def test_what_would_never_end_or_takes_too_much_is_ended_for_its_own_reason(sandbox):
    def limits(code: str, verdict: str) -> Limits:
        """Far from all limits but the one that is meant, so that a slow machine changes nothing."""
        cpu_s = 0.3 if verdict == "time_limit" else 60
        return Limits(cpu_s=cpu_s, wall_s=1 if "sleep" in code else 90, memory_mib=128, output_kib=64)

    ended = await asyncio.gather(*(sandbox.run(code, limits=limits(code, end)) for code, end in ENDLESS.items()))
    assert {code: ran.verdict for code, ran in zip(ENDLESS, ended, strict=True)} == ENDLESS
    assert max(len(ran.stdout) for ran in ended) <= 64 << 10
    assert (await sandbox.run("print(1)")).verdict == "ok"


async def test_threads_are_bounded(sandbox):
    code = (
        "import threading, time\nthreading.stack_size(1 << 16)\n"
        "for i in range(5000): threading.Thread(target=time.sleep, args=(50,), daemon=True).start()\ntime.sleep(50)"
    )
    ran = await sandbox.run(code, limits=Limits(threads=20, cpu_s=5, memory_mib=2048))
    assert ran.verdict in ("runtime_error", "memory_limit")
    assert "start new thread" in ran.stderr or "too many threads" in ran.detail


# Each prints something if it gets anywhere.
ATTACKS = {
    "files": "for p in ('/etc/passwd', '/etc/shadow', '/proc/1/environ', '/root/.bashrc', '/proc/self/environ', '{secret}'):\n"
    "    try: print(open(p).read(10))\n    except OSError: pass",
    "writing": "import os\nfor p in ('/tmp/x', '/dev/shm/x', './x', '/var/tmp/x', '{folder}/x'):\n"
    "    try: open(p, 'w').write('x'); print(p)\n    except OSError: pass",
    "links": "import os\nfor f in (os.symlink, os.link):\n    try: f('/etc/passwd', '{folder}/l'); print(f)\n    except OSError: pass",
    "the server's memory": "import os\nfor pid in ({server}, os.getppid()):\n    for n in ('mem', 'maps', 'environ', 'cmdline'):\n"
    "        try: print(open(f'/proc/{{pid}}/{{n}}', 'rb').read(20))\n        except OSError: pass",
    "the environment": "import os\nprint(*(k for k in os.environ if k not in ('LANG', 'LC_CTYPE') and 'NUM_THREADS' not in k), end='')",
    "processes": "import os, subprocess\nfor f in (os.fork, lambda: subprocess.run(['/bin/true']), lambda: os.execv('/bin/sh', ['sh'])):\n"
    "    try: print(f())\n    except OSError: pass",
    "signals": "import os, ctypes, fcntl, signal\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "for pid in ({server}, os.getppid(), -1, 0):\n"
    "    for f in (lambda: os.kill(pid, 9), lambda: os.killpg(pid, 9), lambda: libc.tgkill(pid, pid, 9) and 1 / 0,\n"
    "              lambda: libc.syscall(200, pid, 9) and 1 / 0, lambda: libc.sigqueue(pid, 9, 0) and 1 / 0,\n"
    "              lambda: fcntl.fcntl(0, fcntl.F_SETOWN, pid), lambda: signal.pidfd_send_signal(os.pidfd_open(pid), 9)):\n"
    "        try: f(); print(pid)\n        except (OSError, ZeroDivisionError): pass",
    "its own signals": "import os, signal, threading\n"
    "for s in (signal.SIGKILL, signal.SIGSTOP):\n    try: signal.pthread_kill(threading.get_ident(), s); print(s)\n    except OSError: pass",
    "limits of others": "import resource\nfor pid in ({server}, 1):\n"
    "    try: print(resource.prlimit(pid, resource.RLIMIT_AS))\n    except OSError: pass",
    "its own limits": "import resource\nfor n in ('AS', 'CPU', 'NOFILE', 'FSIZE', 'CORE'):\n    r = getattr(resource, 'RLIMIT_' + n)\n"
    "    try: resource.setrlimit(r, (resource.RLIM_INFINITY,) * 2); print(n)\n    except (OSError, ValueError): pass",
    "the network": "import socket\nfor family, kind in ((socket.AF_INET, socket.SOCK_STREAM), (socket.AF_INET, socket.SOCK_DGRAM),\n"
    "        (socket.AF_INET6, socket.SOCK_STREAM), (socket.AF_UNIX, socket.SOCK_STREAM), (socket.AF_NETLINK, socket.SOCK_RAW)):\n"
    "    try: print(socket.socket(family, kind))\n    except OSError: pass\n"
    "try: print(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))\nexcept OSError: pass",
    "shared memory": "import os, ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "try: print(os.memfd_create('x'))\nexcept OSError: pass\nif libc.shmget(0, 4096, 0o1600) >= 0: print('shm')",
    "privileged calls": "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "for n in (101, 310, 311, 165, 272, 308, 321, 425, 426, 250, 248, 323, 298, 161, 135, 133, 155, 105, 106, 117, 434, 438, 304, 319, 172, 173, 169):\n"
    "    if libc.syscall(n, 0, 0, 0, 0, 0, 0) >= 0: print(n)",
    "a user of its own": "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "if libc.unshare(0x10000000) == 0: print('unshared')\ntry: os.setuid(0); print('root')\nexcept OSError: pass\nif os.geteuid() == 0: print('still root')",
    "other descriptors": "import os\nfor fd in range(4, 200):\n    try: os.fstat(fd); print(fd)\n    except OSError: pass",
    "other people's answers": "import glob, os\nprint(*glob.glob('{folder}/*'), *glob.glob('/**/gold.jsonl', recursive=True), end='')",
    "what is installed": "try:\n    import ngym.files.row_log\n    print('ngym')\nexcept (ImportError, OSError): pass\ntry:\n    import pydantic\n    print('pydantic')\nexcept (ImportError, OSError): pass",
}  # fmt: skip


async def test_no_attack_gets_anywhere(sandbox, tmp_path, monkeypatch):
    monkeypatch.setenv("NGYM_TEST_KEY", "a key of the server")
    secret = tmp_path / "secret"
    secret.write_text("a secret")
    tmp_path.chmod(0o777)
    places = {"secret": secret, "folder": tmp_path, "server": os.getpid()}
    programs = [code.format(**places) for code in ATTACKS.values()]
    ran = await asyncio.gather(*(sandbox.run(code, limits=Limits(cpu_s=10)) for code in programs))
    results = {name: (one.verdict, one.stdout.strip()) for name, one in zip(ATTACKS, ran, strict=True)}
    assert results == dict.fromkeys(ATTACKS, ("ok", "")), [one.stderr for one in ran if one.stderr]
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


async def test_nothing_of_a_run_is_there_in_the_next(sandbox):
    poison = (
        "import builtins, json, sys\nbuiltins.print = None\njson.dumps = None\nsys.modules['math'] = None\nsecret = 'x'"
    )
    assert (await sandbox.run(poison)).verdict == "ok"
    ran = await sandbox.run("import json, math\nprint(json.dumps(math.floor(2.5)), 'secret' in globals())")
    assert ran.stdout == "2 False\n"


async def test_a_zygote_that_dies_is_replaced_and_its_run_made_again(sandbox):
    runs = [asyncio.create_task(sandbox.run("sum(range(20_000_000))\nprint('done')")) for _ in range(2)]

    def zygotes():
        return descendants(
            psutil.Process(),
            lambda each: each.ppid() == os.getpid() and "ngym.sandbox.sandbox_zygote" in " ".join(each.cmdline()),
        )

    await until(lambda: len(zygotes()) == 2)
    for zygote in zygotes():
        zygote.kill()
    assert {run.stdout for run in await asyncio.gather(*runs)} == {"done\n"}


async def test_a_cancelled_run_ends_and_its_place_is_free_again(sandbox):
    runs = [asyncio.create_task(sandbox.run("while True: pass", limits=Limits(cpu_s=3000))) for _ in range(4)]
    await until(lambda: descendants(psutil.Process(), lambda each: each.cpu_times().user > 0.1))
    for run in runs:
        run.cancel()
    await asyncio.wait(runs)
    async with asyncio.timeout(60):
        assert (await sandbox.run("print(1)")).stdout == "1\n"


async def test_closing_ends_what_is_under_way_and_what_waits():
    sandbox = LocalSandbox(slots=1)
    runs = [asyncio.create_task(sandbox.run("while True: pass", limits=Limits(cpu_s=3000))) for _ in range(3)]
    await until(lambda: descendants(psutil.Process(), lambda each: each.cpu_times().user > 0.5))
    await sandbox.aclose()
    assert {run.verdict for run in await asyncio.gather(*runs)} == {"infra_error"}
    assert (await sandbox.run("print(1)")).verdict == "infra_error"


@pytest.mark.soak
async def test_two_thousand_programs_of_which_a_fifth_is_hostile_and_zygotes_that_die(sandbox):
    def one(number: int):
        if number % 5:
            return sandbox.run("print(int(input()) * 2)", stdin=str(number))
        return sandbox.run(list(ENDLESS)[number // 5 % len(ENDLESS)], limits=Limits(cpu_s=0.3, wall_s=1, memory_mib=64))

    runs = [asyncio.create_task(one(number)) for number in range(2000)]
    for done in (200, 600, 1000, 1400):
        while sum(run.done() for run in runs) < done:
            await asyncio.sleep(0.05)
        psutil.Process().children()[0].kill()
    ended = [await run for run in runs]
    good = [(number, ran) for number, ran in enumerate(ended) if number % 5]
    assert [ran.stdout for _, ran in good if ran.verdict != "infra_error"] == [
        f"{2 * number}\n" for number, ran in good if ran.verdict != "infra_error"
    ]
    assert sum(ran.verdict == "infra_error" for _, ran in good) <= 4
    assert not [ran for number, ran in enumerate(ended) if not number % 5 and ran.verdict == "ok"]


async def test_many_at_once_get_their_own_output(sandbox):
    ran = await asyncio.gather(*(sandbox.run("print(int(input()) * 2)", stdin=str(n)) for n in range(64)))
    assert [one.stdout for one in ran] == [f"{2 * n}\n" for n in range(64)]


async def test_files_are_there_for_one_run_where_the_tier_can_confine_them(sandbox):
    code = "import helper, os\nprint(helper.x, open('data/a.txt').read())\nopen('out', 'w').write('y' * 1000)\nprint(sorted(os.listdir()))"
    files = {"helper.py": "x = 5", "data/a.txt": "text"}
    ran = await sandbox.run(code, files=files, limits=Limits(disk_mib=1))
    if sandbox.tier != "namespaces":
        assert (ran.verdict, "need the tier 'namespaces'" in ran.detail) == ("infra_error", True)
        return
    assert (ran.verdict, ran.stdout) == ("ok", "5 text\n['data', 'helper.py', 'out']\n"), ran.stderr
    fill = "n = 0\nwhile True:\n    n += 1\n    open(f'f{n}', 'wb').write(b'x' * {size})"
    for size in (0, 1 << 16):
        ran = await sandbox.run(fill.replace("{size}", str(size)), limits=Limits(disk_mib=2))
        assert (ran.verdict, "No space left" in ran.stderr) == ("runtime_error", True)
    assert (await sandbox.run("import os; print(os.listdir('/box'))")).stdout == "[]\n"


@pytest.mark.parametrize("name", ["../x", "/etc/x", "", "a/../../x", "x\0y"])
def test_a_file_cannot_be_put_elsewhere(name):
    with pytest.raises(ValueError, match="invalid file name"):
        Program(code="", files={name: ""})


async def test_a_tier_that_cannot_be_had_is_an_error_that_says_so_and_runs_nothing():
    # Not every machine lacks a tier; one that loads a module which is not there has none.
    async with aclosing(LocalSandbox("namespaces")) as sandbox:
        sandbox._preload.append("no_such_module")
        with pytest.raises(ServiceError, match="'namespaces' is not available here: ModuleNotFoundError"):
            await sandbox.start()
        ran = await sandbox.run("print(1)")
        assert (ran.verdict, ran.tier, ran.stdout) == ("infra_error", "none", "")
        assert "no_such_module" in ran.detail


async def test_a_sandbox_server_runs_programs_within_its_own_bounds():
    options = {"sandbox": {"most": {"cpu_s": 0.3, "wall_s": 60, "output_kib": 1}}}
    async with local_services(options, sandbox=load(ROOT / "gym_servers/sandbox/app.py").app) as peers:
        async with aclosing(RemoteSandbox(peers.urls["sandbox"][0])) as remote:
            ran, endless, loud = await asyncio.gather(
                remote.run("print(input())", stdin="hello"),
                remote.run("while True: pass", limits=Limits(cpu_s=3000)),
                remote.run("print('x' * 5000)"),
            )
        with pytest.raises(ServiceError, match=r"field 'program\.code'"):
            await peers["sandbox"].post("/run", {"program": {}})
    assert (ran.verdict, ran.stdout, ran.tier.partition(":")[0]) == ("ok", "hello\n", "remote")
    assert (endless.verdict, loud.verdict) == ("time_limit", "output_limit")


async def test_a_sandbox_server_that_is_not_there_is_not_a_verdict():
    async with aclosing(RemoteSandbox("http://127.0.0.1:1")) as remote:
        ran = await remote.run("print(1)")
    assert (ran.verdict, ran.tier) == ("infra_error", "remote")


def test_a_container_gets_no_network_no_rights_and_its_limits():
    limits = Limits(memory_mib=256, threads=5, files=32, disk_mib=8)
    line = DockerSandbox("image:1", runtime="runsc").arguments("name", limits)
    assert line[:5] == ["docker", "run", "--rm", "--interactive", "--init"] and "--read-only" in line
    options = dict(pairwise(line))
    expected = {
        "--network": "none", "--user": "65534:65534", "--cap-drop": "ALL", "--security-opt": "no-new-privileges",
        "--runtime": "runsc", "--pids-limit": "13", "--memory": "336m", "--memory-swap": "336m", "--ulimit": "nofile=32:32",
    }  # fmt: skip
    assert {name: options[name] for name in expected} == expected
    assert line[-5:-1] == ["image:1", "python", "-I", "-c"]
    assert "--runtime" not in DockerSandbox().arguments("name", limits)


@pytest.mark.parametrize(
    ("code", "verdict", "stdout"),
    [
        ("import os, helper\nprint(input(), helper.x)\nos.write(3, b'a')", "ok", "in 5\n"),
        ("1 / 0", "runtime_error", ""),
        ("print('x' * 100_000)", "output_limit", "x" * 4096),
        ("import time; time.sleep(60)", "time_limit", ""),
        ("while True: pass", "time_limit", ""),
        ("bytearray(10 ** 12)", "memory_limit", ""),
    ],
)
async def test_what_runs_inside_a_container_shows_how_a_program_ended(tmp_path, code, verdict, stdout):
    limits = Limits(cpu_s=1, wall_s=3 if "sleep" in code else 60, output_kib=4)
    line = DockerSandbox().arguments("name", limits)
    pipe = asyncio.subprocess.PIPE
    inside = [sys.executable, *line[-3:]]  # what the container would run
    process = await asyncio.create_subprocess_exec(*inside, stdin=pipe, stdout=pipe, cwd=tmp_path)
    output, _ = await process.communicate(request(Program(code=code, stdin="in", files={"helper.py": "x = 5"}), limits))
    ran = result("docker", limits, process.returncode, output.decode())
    assert (ran.verdict, ran.stdout, ran.tier) == (verdict, stdout, "docker"), ran
    assert ran.answer == ("a" if verdict == "ok" else "")


@pytest.mark.parametrize("output", ["", "no json", "{}", json.dumps({"status": []}), "[" * 100_000])
def test_a_container_that_says_nothing_sensible_is_its_programs_failure(output):
    assert result("docker", Limits(), 137, output).verdict == "runtime_error"
    assert "sys.excepthook" in PRELUDE


async def test_docker_that_is_not_there_is_not_a_verdict():
    sandbox = DockerSandbox(command=("no-such-docker",))
    ran = await sandbox.run("print(1)")
    assert (ran.verdict, ran.tier) == ("infra_error", "docker")
    with pytest.raises(ServiceError, match="no-such-docker"):
        await sandbox.start()
    sandbox = DockerSandbox(
        command=(sys.executable, "-c", "import sys; sys.exit('daemon: no'); ", "x"), runtime="runsc"
    )
    with pytest.raises(ServiceError, match="gvisor sandbox: daemon: no"):
        await sandbox.start()
