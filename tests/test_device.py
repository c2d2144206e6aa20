import os
import subprocess
import sys

from raftune.device import current_device, thread_environment


def test_a_pinned_child_has_the_device_key_of_its_parent():
    program = "import torch; from raftune.device import current_device; print(current_device(1).digest)"
    environment = os.environ | thread_environment(1, pinned=True)
    child = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert child.stdout.strip() == current_device(1).digest
