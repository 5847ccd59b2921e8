"""Commands: what a user starts. Only here are environment variables read."""

import os
import sys
from pathlib import Path

# `python -m` puts the current folder first, where a train.py or a data/ of the user's would be taken for ours.
if sys.argv[0] == "-m" and sys.path[0] == os.getcwd() != str(Path(__file__).parents[1]):
    del sys.path[0]
