"""Commands as a user that this machine does not know, who may read everything and write nothing but what is theirs."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest


def as_user(user: int) -> list[str]:
    """The beginning of a command that runs as another user.

    Reading stays allowed, because the interpreter of these tests may lie in a home that is closed to others.
    """
    capability = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *capability, "--"]


def _may_change_users() -> bool:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return False
    return subprocess.run([*as_user(12345), "true"], capture_output=True).returncode == 0


needs_other_users = pytest.mark.skipif(not _may_change_users(), reason="needs root and setpriv to act as another user")
