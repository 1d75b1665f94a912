"""Reading and writing rows in real files: tolerated and reported problems, and crashes."""

from __future__ import annotations

import asyncio
import fcntl
import gzip
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import zstandard
from waiting import PATIENCE_S

from ngym.errors import UsageError
from ngym.files import row_log
from ngym.files.atomic import FileLocked, WriteFailed, whole_folder, write_whole
from ngym.files.jsonl import check_lines, expand_paths, read
from ngym.files.row_log import COMMIT_ROWS, RowLog
from ngym.schema import Json


def key(row: Json) -> int:
    return int(row["n"])


def line(n: int, size: int = 0) -> bytes:
    return orjson.dumps({"n": n, "text": "x" * size})


def open_log(path: Path) -> tuple[RowLog, list[int]]:
    log = RowLog(path, key)
    return log, [found.row["n"] for found in log.rows()]


def numbers(path: Path) -> list[int]:
    return [found.row["n"] for found in read(path)]


def test_a_bom_crlf_and_empty_lines_are_tolerated(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 1}\r\n\r\n  \n{"n": 2}\n\n{"n": 3}')
    assert [(found.number, found.row["n"]) for found in read(path)] == [(1, 1), (4, 2), (6, 3)]


PACKED = {
    "in.jsonl.gz": gzip.compress,
    "in.jsonl.zst": zstandard.compress,
    "frames.jsonl.zst": lambda data: zstandard.compress(data[:100]) + zstandard.compress(data[100:]),
    "members.jsonl.gz": lambda data: gzip.compress(data[:100]) + gzip.compress(data[100:]),
}


@pytest.mark.parametrize("name", PACKED)
def test_a_compressed_file_reads_like_a_plain_one(name: str, tmp_path: Path) -> None:
    data = b"".join(line(n, 2000 * (n % 7)) + b"\n" for n in range(500))
    (tmp_path / "in.jsonl").write_bytes(data)
    packed = tmp_path / name
    packed.write_bytes(PACKED[name](data))
    assert list(read(packed)) == list(read(tmp_path / "in.jsonl"))
    for damaged in (packed.read_bytes()[:-9], packed.read_bytes()[:60], b"x" * 90, b'{"n": 1}'):
        packed.write_bytes(damaged)
        with pytest.raises(UsageError, match=f"{name}: cannot be read: [A-Za-z]"):
            list(read(packed))
    packed.write_bytes(b"")
    assert list(read(packed)) == []


def test_paths_and_patterns_are_files_each_once(tmp_path: Path) -> None:
    for name in ("a/1.jsonl", "a/2.jsonl", "b/1.jsonl", "b/[1].jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "a" / "2.jsonl")

    def names(*inputs: str) -> list[str]:
        return [str(path.relative_to(tmp_path)) for path in expand_paths(str(tmp_path / one) for one in inputs)]

    assert names("*/1.jsonl", "link", "a/*") == ["a/1.jsonl", "b/1.jsonl", "link"]
    assert names("b/[1].jsonl") == ["b/[1].jsonl"], "a file of this name comes before the pattern"
    with pytest.raises(UsageError, match=r"\*\.json: no file matches \(--input\)"):
        names("*.json")
    with pytest.raises(UsageError, match=r"a: no such file \(--input\), it is a folder"):
        names("a")


def test_bad_lines_of_several_files_have_their_file(tmp_path: Path) -> None:
    files = [tmp_path / "1.jsonl", tmp_path / "2.jsonl"]
    files[0].write_bytes(b'{"n": 1}\n{"m": 1}\n')
    files[1].write_bytes(b'{"m": 1}\n[]\n')
    with pytest.raises(UsageError) as caught:
        list(check_lines(files, lambda row: None if "n" in row else "no n"))
    assert str(caught.value).splitlines() == [
        f"{files[0]}:2: no n (and 1 more lines like it)",
        f"{files[1]}:2: not a JSON object but list: '[]'",
    ]


def test_all_bad_lines_are_reported_together(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": \n[1, 2]\n{"n": NaN}\n{"m": 1}\n"\xff"\n')
    with pytest.raises(UsageError) as caught:
        list(check_lines(path, lambda row: None if "n" in row else "no n"))
    assert str(caught.value).splitlines() == [
        f"{path}:2: not JSON: unexpected end of data (column 6); the line begins '{{\"n\":'",
        f"{path}:3: not a JSON object but list: '[1, 2]'",
        f"{path}:4: not JSON: unexpected character, expected a JSON value (column 7); the line begins '{{\"n\": NaN}}'",
        f"{path}:5: no n",
        f"{path}:6: not JSON: str is not valid UTF-8: surrogates not allowed; the line begins '\"\ufffd\"'",
    ]


def test_a_problem_of_many_lines_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"n": 1}\n{"m": 1}\n?\n' + b'{"m": 2}\n' * 1000)
    with pytest.raises(UsageError) as caught:
        list(check_lines(path, lambda row: None if "n" in row else "no n"))
    first, second = str(caught.value).splitlines()
    assert first == f"{path}:2: no n (and 1,000 more lines like it)" and second.startswith(f"{path}:3: not JSON")


def test_of_many_problems_the_first_twenty_are_named(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(b"?%d\n" % number for number in range(1000)))
    with pytest.raises(UsageError) as caught:
        list(check_lines(path, lambda row: None))
    lines = str(caught.value).splitlines()
    assert len(lines) == 21 and lines[-1] == f"... and 980 more lines of {path}"


def test_only_the_lines_that_are_used_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2}\n?\n')
    assert [found.row["n"] for found in check_lines(path, lambda row: None, limit=2)] == [1, 2]


def test_a_line_that_is_too_long_is_not_read_whole_and_those_after_it_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ngym.files.jsonl.MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "in.jsonl"
    path.write_bytes(line(1) + b"\n" + line(2, 3 << 20) + b"\n" + line(3) + b"\n" + line(4, 1 << 20))
    found = [(each.number, each.row.get("n"), each.problem, each.complete) for each in read(path)]
    long = "longer than 1 MiB"
    assert found == [(1, 1, None, True), (2, None, long, True), (3, 3, None, True), (4, None, long, False)]
    starts = [each.start for each in read(path)]
    assert [path.read_bytes()[start:].startswith(line(n)[:8]) for n, start in enumerate(starts, 1)] == [True] * 4


def test_utf_16_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"n": 1}\n', encoding="utf-16")
    with pytest.raises(UsageError, match="looks like UTF-16"):
        list(check_lines(path, lambda row: None))


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"in\.jsonl: cannot be read: No such file or directory"):
        list(read(tmp_path / "in.jsonl"))


def test_a_large_file_is_streamed(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        for n in range(120):
            file.write(line(n, 1 << 20) + b"\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(1 for _ in check_lines(path, lambda row: None)) == 120
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mb < 60


async def test_an_appended_row_is_on_the_disk_when_append_returns(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    log, _ = open_log(path)

    async def append(n: int) -> None:
        await log.append(line(n))
        assert n in numbers(path)

    await asyncio.gather(*(append(n) for n in range(150)))
    await log.flush()
    log.close()
    assert numbers(path) == list(range(150))


async def test_many_rows_share_a_commit_and_a_single_one_does_not_wait_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits: list[int] = []
    monkeypatch.setattr(row_log, "_sync", lambda fd: (commits.append(fd), os.fsync(fd)))
    log, _ = open_log(tmp_path / "out.jsonl")
    await log.append(line(0))
    first = len(commits)
    assert first >= 1
    for batch in range(20):
        await asyncio.gather(*(log.append(line(n)) for n in range(COMMIT_ROWS)))
        assert len(numbers(tmp_path / "out.jsonl")) == 1 + (batch + 1) * COMMIT_ROWS
    assert len(commits) - first <= 20 * 4, "the rows were written one by one"
    await log.flush()
    log.close()


async def test_flush_writes_what_no_one_waits_for_any_more(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    log, _ = open_log(path)
    waiting = [asyncio.create_task(log.append(line(n))) for n in range(5)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await log.flush()
    log.close()
    assert numbers(path) == [0, 1, 2, 3, 4]


def test_a_log_without_rows_leaves_no_file(tmp_path: Path) -> None:
    log, _ = open_log(tmp_path / "out.jsonl")
    log.close()
    assert list(tmp_path.iterdir()) == []


def read_torn(path: Path, rows: list[bytes], offset: int) -> list[int]:
    """The rows of a file whose last line was cut after `offset` bytes; the file is checked to be whole again."""
    path.write_bytes(b"".join(row + b"\n" for row in rows[:-1]) + (rows[-1] + b"\n")[:offset])
    log, found = open_log(path)
    log.close()
    assert not path.exists() or numbers(path) == found
    assert not path.exists() or path.read_bytes().endswith(b"\n")
    return found


def test_a_torn_last_line_is_dropped_wherever_it_is_torn(tmp_path: Path) -> None:
    rows = [line(0, 40), line(1, 40), line(2, 700)]
    length = len(rows[-1])
    for offset in [*range(40), *range(40, length - 5, 37), *range(length - 5, length)]:
        assert read_torn(tmp_path / "out.jsonl", rows, offset) == [0, 1], offset
    assert read_torn(tmp_path / "out.jsonl", rows, length) == [0, 1, 2], "only the newline is missing: the row is whole"
    assert read_torn(tmp_path / "out.jsonl", rows, length + 1) == [0, 1, 2]


@pytest.mark.soak
def test_a_torn_last_line_is_dropped_at_each_of_4096_bytes(tmp_path: Path) -> None:
    rows = [line(0, 40), line(1, 4096)]
    for offset in range(len(rows[-1])):
        assert read_torn(tmp_path / "out.jsonl", rows, offset) == [0], offset


@pytest.mark.parametrize(
    ("middle", "reason"),
    [
        (b'{"n": 1, "te', "not JSON: unexpected end of data"),
        (b"[1]", "not a JSON object but list"),
        (b'{"other": 1}', "not a row that was written here"),
        (b"\0\0\0\0", "not JSON"),
    ],
)
def test_a_bad_line_in_the_middle_is_refused_with_its_place(tmp_path: Path, middle: bytes, reason: str) -> None:
    path = tmp_path / "out.jsonl"
    content = line(0) + b"\n" + middle + b"\n" + line(2) + b"\n"
    path.write_bytes(content)
    log = RowLog(path, key)
    with pytest.raises(UsageError) as caught:
        list(log.rows())
    log.close()
    assert f"{path}:2 (byte {len(line(0)) + 1}): {reason}" in str(caught.value)
    assert "--overwrite" in str(caught.value)
    assert path.read_bytes() == content, "a file that is refused is not touched"


async def test_a_row_that_appears_twice_is_cut_out_and_the_lock_stays(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"".join(line(n) + b"\r\n" for n in (0, 1, 0, 2, 1)) + b'{"n": 7')
    log, found = open_log(path)
    assert (found, log.duplicates, numbers(path)) == ([0, 1, 2], 2, [0, 1, 2])
    with pytest.raises(FileLocked):
        RowLog(path, key)
    await log.append(line(3))
    await log.flush()
    log.close()
    assert numbers(path) == [0, 1, 2, 3]


@pytest.mark.parametrize("first_dropped", [0, 1, 2, 3])
def test_rows_behind_one_that_appears_twice_have_the_positions_of_the_repaired_file(
    tmp_path: Path, first_dropped: int
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"".join(line(n) + b"\n" for n in (0, 1, 0, 2, 1, 3)) + b'{"n": 7')
    log = RowLog(path, key)
    starts = {each.row["n"]: log.start_of(each) for each in log.rows()}
    content = path.read_bytes()
    assert [orjson.loads(content[start:].partition(b"\n")[0])["n"] for start in starts.values()] == [0, 1, 2, 3]
    log.cut(starts[first_dropped])
    log.close()
    assert (numbers(path) if first_dropped else []) == list(range(first_dropped))


@pytest.mark.process
def test_a_second_writer_gets_the_first_ones_pid(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    script = (
        "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.flock(file, fcntl.LOCK_EX); print('locked', flush=True)"
        "; sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
        with pytest.raises(FileLocked, match=f"is being written by process {holder.pid};"):
            RowLog(path, key)
        holder.communicate()
    RowLog(path, key).close()


async def test_a_file_that_is_deleted_while_it_is_written_takes_no_more_rows(tmp_path: Path) -> None:
    """The rows would go to a file without a name, and be lost with the process."""
    path = tmp_path / "out.jsonl"
    log, _ = open_log(path)
    await log.append(line(0))
    path.unlink()
    with pytest.raises(WriteFailed, match=r"out\.jsonl was deleted while it was written, and its rows are gone"):
        await log.append(line(1))
    log.close()


def test_a_link_to_a_file_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "there")
    write_whole(tmp_path / "link", b"first")
    write_whole(tmp_path / "link", b"second")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there").read_bytes() == b"second"


@pytest.mark.parametrize("where", ["folder", "file"])
def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path, where: str) -> None:
    path = tmp_path / "none" / "out.jsonl" if where == "folder" else tmp_path
    with pytest.raises(UsageError, match="cannot be opened for writing: "):
        RowLog(path, key)


FULL = """
import asyncio, resource, signal, sys
from pathlib import Path
from ngym.files.row_log import DiskFull, RowLog

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
grows = sys.argv[2] == "grows"
stalls = []

def on_stall(reason):
    stalls.append(reason)
    if grows and len(stalls) == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

async def main():
    log = RowLog(Path(sys.argv[1]), lambda row: row["n"], on_stall=on_stall, retry_s=0.05, give_up_s=3600 if grows else 0.3)
    try:
        for n in range(40):
            await log.append(b'{"n": %d, "text": "%s"}' % (n, b"x" * 1000))
            print(n, flush=True)
        await log.flush()
    except DiskFull as error:
        print(error)
    log.close()
    print(stalls[0], stalls[-1])

asyncio.run(main())
"""


@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.process
def test_a_full_disk_is_waited_out_and_tears_no_row(tmp_path: Path, grows: bool) -> None:
    """A file size limit stands for the full disk: the kernel writes a part of the row, then refuses."""
    path = tmp_path / "out.jsonl"
    command = [sys.executable, "-c", FULL, str(path), "grows" if grows else "stays"]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout.splitlines()
    acknowledged = [int(word) for word in lines if word.isdigit()]
    assert path.read_bytes().endswith(b"}\n"), "no torn row was left"
    assert numbers(path) == acknowledged == list(range(40 if grows else 19))
    assert lines[-1].startswith(f"{path}: File too large")
    assert grows == lines[-1].endswith(" None")
    assert grows or any("File too large for 0 s; make room, then run again with --resume" in text for text in lines)


WRITER = """
import asyncio, sys
from pathlib import Path
from ngym.files.row_log import RowLog

async def main():
    log = RowLog(Path(sys.argv[1]), lambda row: row["n"])
    first = sum(1 for _ in log.rows())
    async def append(n):
        await log.append(b'{"n": %d, "text": "%s"}' % (n, b"x" * (n * 7919 % 30000)))
        print(n, flush=True)
    async with asyncio.TaskGroup() as group:
        for n in range(first, first + 100_000):
            group.create_task(append(n))
            await asyncio.sleep(0)

asyncio.run(main())
"""


@pytest.mark.process
def test_rows_that_were_acknowledged_survive_kill_9(tmp_path: Path) -> None:
    path, draw = tmp_path / "out.jsonl", random.Random(4)
    acknowledged: set[int] = set()
    for _ in range(6):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for _ in range(draw.randrange(1, 300)):
                acknowledged.add(int(writer.stdout.readline()))
            writer.send_signal(signal.SIGKILL)
            lines = writer.stdout.read().split(b"\n")[:-1]
        acknowledged |= {int(word) for word in lines}
        log, found = open_log(path)
        log.close()
        assert acknowledged <= set(found)
        assert len(found) == len(set(found)) and found == list(range(len(found)))


def test_a_small_file_is_replaced_entirely_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_whole(path, b"one")
    write_whole(path, b"two")
    (tmp_path / "folder").mkdir()
    with pytest.raises(WriteFailed, match="folder: cannot be written: Is a directory"):
        write_whole(tmp_path / "folder", b"three")
    assert path.read_bytes() == b"two" and sorted(tmp_path.iterdir()) == [tmp_path / "folder", path]


def test_an_open_log_is_locked_by_the_kernel(tmp_path: Path) -> None:
    """The lock ends with the process, however it ends: nothing has to be cleaned up by hand."""
    log, _ = open_log(tmp_path / "out.jsonl")
    with (tmp_path / "out.jsonl").open("rb") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    log.close()


def test_a_save_that_breaks_off_leaves_the_old_folder(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    with whole_folder(folder) as aside:
        (aside / "weights").write_text("old")
    with pytest.raises(KeyboardInterrupt), whole_folder(folder) as aside:
        (aside / "weights").write_text("half of the n")
        raise KeyboardInterrupt
    assert (folder / "weights").read_text() == "old"
    with whole_folder(folder) as aside:
        assert not list(aside.iterdir())
        (aside / "weights").write_text("new")
    assert (folder / "weights").read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["policy"]
