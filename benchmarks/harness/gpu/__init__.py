"""Measurements of GPUs that `gpu.py`, `gpu_proof.py` and the tests share.

References and fakes are those of the tests, whose folders this puts on the path.
"""

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[3] / "tests"
sys.path += [str(one) for one in (_TESTS, _TESTS / "support") if str(one) not in sys.path]
