"""What a failing rank leaves behind before it goes: one small file, whole or not there."""

import json
import os
import signal
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import DataError, PacelineError, user_line
from paceline.store.disk import write_text

END_OF_TALK = "\x1e"
FIRST_FAILURE = "first-failure.json"
