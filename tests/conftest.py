"""What the whole run shares."""

from __future__ import annotations

import os
import sys

_STATUS = 0


def pytest_sessionfinish(session, exitstatus):
    global _STATUS
    _STATUS = int(exitstatus)


def pytest_unconfigure(config):
    """Leave as soon as all is told; a worker of several is told to leave by the process that started it.

    Python's last collections walk over everything that compilers and exporters left behind, again and again while some
    of it comes back to life: minutes after the last test.
    """
    if hasattr(config, "workerinput"):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_STATUS)
