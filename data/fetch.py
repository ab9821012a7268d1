"""Brings the packages that hold real data into a folder, without installing them.

Registries are reached through their own clients (npm, apt-get with dpkg-deb, pip), which check what they
download. What arrives is complete or absent: files are unpacked beside their place and moved in at the end.
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

TRIES = 3  # registries reset a connection now and then


def cache_folder() -> Path:
    """Where fetched sets are kept: $WORLDTOKENS_CACHE, or else ~/.cache/worldtokens. May not exist yet."""
    named = os.environ.get("WORLDTOKENS_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "worldtokens"


def cached(name: str, fill: Callable[[Path], None]) -> Path:
    """The folder `name` in the cache; where it is absent, `fill(folder)` makes it first.

    Safe to call from several processes: each fills a folder of its own, the first to finish is kept.
    """
    place = cache_folder() / name
    if place.is_dir():
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=place.parent))
    except OSError as error:
        raise InputError(
            f"{place}: {error.strerror}; expected a folder that can be written. "
            "Set WORLDTOKENS_CACHE to one that can."
        ) from error
    try:
        fill(work)
        work.chmod(0o755)
        try:
            work.rename(place)
        except OSError:
            if not place.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return place


def _run(command: Sequence[str], folder: Path, what: str, way_out: str) -> None:
    """Runs a client, up to `TRIES` times; its last words go into the error."""
    if shutil.which(command[0]) is None:
        raise InputError(f"{what}: needs the program {command[0]!r}, which is not on this machine. {way_out}")
    said = ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(3)
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode == 0:
            return
        said = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
    raise InputError(f"{what}: `{' '.join(command)}` failed {TRIES} times: {said or 'no message'}. {way_out}")


def _untar(archive: Path, folder: Path, keep: Sequence[str]) -> None:
    """Unpacks an npm tarball without its leading folder; only what lies under `keep`, where given."""
    with tarfile.open(archive) as tar:
        for member in tar:
            member.name = member.name.partition("/")[2]
            wanted = not keep or any(
                member.name == path or member.name.startswith(path + "/") for path in keep
            )
            if member.name and wanted:
                tar.extract(member, folder, filter="data")


def npm(package: str, folder: Path, keep: Sequence[str] = ()) -> None:
    """Unpacks an npm package ("name@version") into `folder`; of its files only those under the paths `keep`."""
    with tempfile.TemporaryDirectory() as work:
        _run(["npm", "pack", "--silent", package], Path(work), package, "Install Node.js, which brings npm.")
        (archive,) = Path(work).glob("*.tgz")
        folder.mkdir(parents=True, exist_ok=True)
        _untar(archive, folder, keep)


def deb(package: str, folder: Path) -> None:
    """Unpacks a Debian package into `folder` (`usr/share/...`)."""
    way_out = (
        "This set comes as a Debian package: on Debian or Ubuntu run `apt-get update` as root once and try again; "
        f"elsewhere fetch {package} from packages.debian.org and unpack it, then give the folder's path."
    )
    with tempfile.TemporaryDirectory() as work:
        for program in ("apt-get", "dpkg-deb"):
            if shutil.which(program) is None:
                raise InputError(
                    f"{package}: needs the program {program!r}, which is not on this machine. {way_out}"
                )
        _run(["apt-get", "download", "-q", package], Path(work), package, way_out)
        (archive,) = Path(work).glob("*.deb")
        folder.mkdir(parents=True, exist_ok=True)
        _run(["dpkg-deb", "-x", str(archive), str(folder)], Path(work), package, way_out)


def wheel(package: str, folder: Path) -> None:
    """Unpacks a PyPI package ("name==version"), wheel or source archive, into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", ".", package]
    with tempfile.TemporaryDirectory() as work:
        _run(
            command, Path(work), package, "Check that pip reaches its index: `pip download " + package + "`."
        )
        (archive,) = Path(work).iterdir()
        folder.mkdir(parents=True, exist_ok=True)
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as file:
                file.extractall(folder)
        else:
            _untar(archive, folder, ())
