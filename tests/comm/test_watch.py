"""The watch ends before the interpreter does."""

import subprocess
import sys

SCRIPT = """
from torch.distributed import TCPStore
from layerwise.comm import watch
from layerwise.comm.base import Members
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
watch.BEAT_S = 0.0
watch.Watch(store, 0, Members((0, 1), 2), 30.0, server="rank 0", address="here", serves=False)
"""


def test_a_script_ends_cleanly_while_its_watch_talks_to_the_store() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
