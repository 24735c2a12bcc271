"""Training that is killed and resumed ends in the bytes of training that was not (scripts/kills.py, a few kills of it)."""

import subprocess
import sys

import pytest

from helpers.params import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_killed_training_resumes_to_the_same_bytes(optimizer):
    """SIGKILL at random steps and between them, in forks of a process of its own (an import and a second a run)."""
    command = [sys.executable, str(ROOT / "scripts" / "kills.py"), "--kills", "4", "--seed", "7", "--optimizer", optimizer]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 kills" in done.stdout and "DIFFERENT" not in done.stdout and "model.safetensors" in done.stdout
