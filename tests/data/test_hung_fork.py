"""A forked child that hangs before it runs any code, as can happen in Python 3.11, is killed and forked again."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, sys, time
from paceline.data import fork_with_retry

fork_with_retry.START_TIMEOUTS = (0.3, 0.3, 0.3)
hangs = [int(sys.argv[1])]

def hang():
    while hangs[0] > 0:
        time.sleep(1)

os.register_at_fork(after_in_child=hang, after_in_parent=lambda: hangs.__setitem__(0, hangs[0] - 1))

def say(word):
    print(word, flush=True)
    os._exit(3) if word == "ends" else None

process = fork_with_retry.STARTED_FORK.Process(target=say, args=(sys.argv[2],))
process.start()
process.join(20)
print("exit code", process.exitcode, "forked", int(sys.argv[1]) - hangs[0])
assert not [pid for pid in os.listdir("/proc") if pid.isdecimal() and is_child(pid)]
"""
IS_CHILD = """
def is_child(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1] == str(os.getpid())
    except OSError:
        return False
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
@pytest.mark.parametrize(("hangs", "word", "code"), [(0, "here", 0), (1, "here", 0), (3, "here", 0), (1, "ends", 3)])
def test_a_child_that_does_not_begin_is_forked_again(hangs: int, word: str, code: int) -> None:
    """After as many tries as there are patiences the last child is left to itself."""
    script = SCRIPT.replace("hangs = [", IS_CHILD + "\nhangs = [", 1)
    done = subprocess.run([sys.executable, "-c", script, str(hangs), word], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [word, f"exit code {code} forked {hangs + 1}"]
