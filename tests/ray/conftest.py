"""Lets these tests use the helpers of tests/actors; workers at the niceness of the program."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("RAY_worker_niceness", "0")
sys.path.insert(0, str(Path(__file__).parent.parent / "actors"))
sys.path.insert(0, str(Path(__file__).parent))
