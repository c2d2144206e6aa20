"""Children go with their parent, and SIGTERM leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_child_dies_with_its_killed_parent():
    child = (
        "import os, time; from raftune.lifetime import die_with; die_with(os.getppid()); "
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        number = int(process.stdout.readline())
        process.kill()
        wait_until(lambda: not is_running(number))


def test_a_child_of_a_parent_that_is_gone_does_not_start():
    code = "from raftune.lifetime import die_with; die_with(1 << 30); print('started')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "started" not in result.stdout


def test_terminate_unwinds(tmp_path):
    code = f"""
import tempfile, time
from raftune.lifetime import exit_on_terminate
exit_on_terminate()
with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}):
    print("ready", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
