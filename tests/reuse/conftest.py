"""Lets these tests use the helpers of tests/actors."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "actors"))
sys.path.insert(0, str(Path(__file__).parent))
