"""What tests of checks/ need: the repository on the path, as it is not installed as a whole."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
