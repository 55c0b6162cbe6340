"""Folders of runs: finds them by a user's word, checks that they can be written, numbers and claims
them, and finds their checkpoints.

    runs/NAME/version_N/    metrics.csv, config.yaml, record/, transcripts/, checkpoints/, model/

Every command finds runs with this module, so a word means the same run to all of them.
"""

from __future__ import annotations

import contextlib
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from turnrl.errors import CheckpointError, DataError, RecipeError, TurnRLError, did_you_mean

LATEST = ("best", "last")
"""Checkpoints of a run by name, the preferred one first."""
EXPORTED = ("model", "adapter")
"""Folders of a run that hold the policy exported at its end."""
RUNS = Path("runs")
"""The folder in which runs lie, unless `trainer.logger` names another."""
_MAX_VANISHED = 100
"""How often a folder of runs may vanish while a run begins in it."""
_PARTS = ("record", "checkpoints", "transcripts", *EXPORTED)
_FILES = ("config.yaml", "metrics.csv", "record")
_KEPT = "checkpoints/*.ckpt"
_GIVE = "Give the folder of a run, such as runs/quickstart/version_0."
_RECORD = ("record/*.parquet", "*.parquet")
"""Files of a record. Somebody may have copied them without their run."""
_NEEDS: dict[str, tuple[str, type[TurnRLError], tuple[str, ...]]] = {
    "record": ("record of a run", DataError, _RECORD),
    "figures": ("record of a run", DataError, ("metrics.csv", *_RECORD)),
    "recipe": ("run", RecipeError, ("config.yaml",)),
}


def find_run(word: str | Path, needs: Literal["record", "figures", "recipe"] = "record") -> Path:
    """Find the folder of the run that a word means. All commands find the same run.

    A word may be the folder of a run, or a file or folder inside it. Or it is a folder of runs, or
    the name of one in `runs`. It then means the newest run there: the last one to begin among the
    runs that trained, or among all if none trained. An existing folder overrides a name.

    Args:
        word: `runs/quickstart/version_0`, `runs/quickstart` or `quickstart`, for example.
        needs: What the run has to hold: a `record`, `figures` (a `metrics.csv` or a record), or a
            `recipe` (its `config.yaml`).
    Returns:
        The path of the run's folder, relative if the word is.
    Raises:
        DataError: If there is no run, or it has no record.
        RecipeError: If a recipe is needed, and there is no run, or the run has no recipe.
    """
    noun, error, _ = _NEEDS[needs]
    run = run_at(word)
    if run is None:
        raise error(f"no {noun} at {str(word)!r}.{run_like(word)} {_GIVE}")
    return require(run, needs)


def require(run: Path, needs: str) -> Path:
    """Return a run's folder if it holds what is needed; see `find_run`.

    Raises:
        DataError: If the run has no record.
        RecipeError: If a recipe is needed, and the run has none.
    """
    _, error, patterns = _NEEDS[needs]
    if any(any(run.glob(pattern)) for pattern in patterns):
        return run
    if needs == "recipe":
        raise error(
            f"the run {str(run)!r} has no config.yaml: it was made from Python, or moved without "
            f"it. Give a recipe, and the run after it: RECIPE --ckpt_path {run}"
        )
    why = "record/ is empty" if (run / "record").is_dir() else "there is no record/"
    no_metrics = " and no metrics.csv" if needs == "figures" else ""
    raise error(
        f"the run {str(run)!r} has no record{no_metrics}: {why}. "
        "Wait for its first evaluation, or give another run."
    )


def is_beginning(word: str | Path) -> bool:
    """True if a word means a run that has nothing to show yet, or a folder of runs that holds no
    files yet, so that a run may be about to begin there."""
    run = run_at(word)
    if run is not None:
        return not any(any(run.glob(pattern)) for pattern in _NEEDS["figures"][2])
    homes = [path for path in (Path(word), RUNS / word) if path.is_dir()]
    return any(all(path.is_dir() for path in home.rglob("*")) for home in homes)


def run_at(word: str | Path) -> Path | None:
    """The folder of the run that a word means; None if it means none. See `find_run`."""
    named = RUNS / word
    inner = run_in(named)
    # only a name counts, not a path to something inside a run
    by_name = inner if inner is not None and named in (inner, inner.parent) else None
    return run_in(Path(word)) or by_name


def run_in(path: Path) -> Path | None:
    """The run that contains a path, or else the newest run inside it; None if there is neither."""
    inside = path.parent if path.is_file() else path
    if inside.name in _PARTS and is_run(inside.parent):
        return inside.parent
    return inside if is_run(inside) else next(iter(runs_in(path)), None)


def is_run(folder: Path) -> bool:
    """True if a folder holds files of a run."""
    has_file = any((folder / name).exists() for name in _FILES)
    return has_file or any(any(folder.glob(pattern)) for pattern in (_RECORD[1], _KEPT))


def runs_in(home: Path) -> list[Path]:
    """The runs in a folder of runs: first those that trained, then the others, each newest
    first."""
    runs = filter(is_run, home.glob("*"))
    return sorted(runs, key=lambda run: (_has_trained(run), _began(run)), reverse=True)


def _has_trained(run: Path) -> bool:
    return any(run.glob(_KEPT))


def _began(run: Path) -> float:
    """The time at which a run began. Its recipe is its first file; a run made from Python has no
    recipe, so its other files are looked at."""
    config = run / "config.yaml"
    others = [file for pattern in ("metrics.csv", *_RECORD) for file in run.glob(pattern)]
    files = [config] if config.is_file() else others
    return min((file.stat().st_mtime for file in files), default=0.0)


def run_like(word: str | Path, others: Iterable[str] = ()) -> str:
    """` Did you mean quickstart?` if a run has a similar name, or else all names. For an existing
    folder: the folders of runs in it.

    Args:
        word: A word that means no run.
        others: More names that the user may have meant.
    """
    names = sorted(path.name for path in RUNS.glob("*") if path.is_dir())
    paths = (Path(word), RUNS / word)
    siblings = (path for path in paths[0].parent.glob("*") if path != paths[0])
    beside = [str(path) for path in siblings if path.is_dir()]
    inside = [str(path) for home in paths for path in sorted(home.glob("*")) if runs_in(path)]
    if inside:
        return f" It has folders of runs: {', '.join(inside)}."
    if here := next((path for path in paths if path.is_dir()), None):
        return f" The folder {str(here)!r} holds no run."
    near = did_you_mean(str(word), [*names, *beside, *others])
    return near or (f" There are {', '.join(names)}." if names else "")


def refuse_other_run(folder: Path, checkpoint: str | Path | None) -> None:
    """Refuse to write a run over another one.

    Args:
        folder: Where the run will write.
        checkpoint: The checkpoint that it resumes from; None if it begins anew. A run that resumes
            from the `last.ckpt` of its own folder goes on there.
    Raises:
        RecipeError: If there is a run in the folder.
    """
    own = folder / "checkpoints" / "last.ckpt"
    if is_run(folder) and (checkpoint is None or Path(checkpoint).resolve() != own.resolve()):
        raise RecipeError(
            f"{folder} holds a run already, which this one would overwrite. Leave out the logger's "
            "version, so that each run gets a folder of its own, or give another one. To go on "
            f"with that run, resume from {own}."
        )


def writable_part(folder: Path) -> Path:
    """Find the folder, or the nearest existing folder above it, and try to write there.

    Raises:
        RecipeError: If it cannot be written.
    """
    folder = folder.absolute()
    above = (folder, *folder.parents)
    existing = next(path for path in above if path.exists() or path.is_symlink())
    try:  # permissions are not enough: a file system may be read-only, or take no folders
        with tempfile.TemporaryDirectory(dir=existing, prefix=".turnrl-"):
            return existing
    except OSError as error:
        raise _not_writable(existing, error) from error


def _not_writable(folder: Path, error: OSError) -> RecipeError:
    why = "is a file" if folder.is_file() else f"takes no folder ({error.strerror})"
    if folder.is_symlink() and not folder.exists():
        why = f"is a link to {folder.readlink()}, which is not there"
    return RecipeError(
        f"{folder} {why}. Set trainer.logger.init_args.save_dir to a folder that can be written."
    )


def next_version(home: Path) -> int:
    """The number of the next run in a folder of runs, counted as Lightning's loggers count."""
    names = [path.name.removeprefix("version_") for path in home.glob("version_*") if path.is_dir()]
    return max((int(name) for name in names if name.isdigit()), default=-1) + 1


@contextlib.contextmanager
def claimed(home: Path) -> Iterator[int]:
    """Claim the number of a new run by making its folder, so that no other run takes it. A folder
    that is empty at the end is removed, and so are the folders above that were made for it.

    Args:
        home: The folder of the runs.
    Raises:
        RecipeError: If no folder can be made there.
    """
    made = [folder for folder in (home, *home.parents) if not folder.exists()]
    number, vanished = next_version(home), 0
    while True:
        try:
            home.mkdir(parents=True, exist_ok=True)
            (home / f"version_{number}").mkdir()
            break
        except FileExistsError as error:
            if not home.is_dir():  # a file, or a link that leads nowhere
                raise _not_writable(home, error) from error
            number += 1
        except OSError as error:
            vanished += 1  # another run may have just removed the folder above
            if vanished > _MAX_VANISHED or not isinstance(error, FileNotFoundError):
                raise _not_writable(home, error) from error
    try:
        yield number
    finally:
        with contextlib.suppress(OSError):  # not empty: it has files, or other runs lie beside it
            for folder in (home / f"version_{number}", *made):
                folder.rmdir()


def newest(home: Path, name: str) -> Path:
    """A checkpoint of the newest run that has it; see `runs_in`.

    Args:
        home: The folder of the runs.
        name: `last` or `best`.
    Raises:
        CheckpointError: If no run has it.
    """
    for run in runs_in(home):
        if file := named_in(run, (name,)):
            return file
    raise CheckpointError(
        f"ckpt_path is {name!r}, and no run in {str(home)!r} has a {name}.ckpt (best.ckpt "
        "comes with the first validation: trainer.check_val_every_n_epoch). Give the path of "
        "one, or of a run's folder."
    )


def named_in(folder: Path, names: Iterable[str] = LATEST) -> Path | None:
    """The checkpoint in a folder, or in its `checkpoints`, with the first of the names that exists;
    None if there is none."""
    for name in names:
        for home in (folder / "checkpoints", folder):
            if (file := home / f"{name}.ckpt").is_file():
                return file
    return None


def kept_in(folder: Path, names: Iterable[str] = LATEST) -> Path | None:
    """The checkpoint of `named_in`, or else the newest: a run made from Python may have Lightning's
    own callback, which gives checkpoints other names."""
    files = [*folder.glob(_KEPT), *folder.glob("*.ckpt")]
    last = max(files, key=lambda file: (file.stat().st_mtime_ns, file.name), default=None)
    return named_in(folder, names) or last


def exported_in(folder: Path) -> Path | None:
    """The first of a folder, its `model` and its `adapter` that holds an exported policy; None if
    none does."""
    for path in (folder, *(folder / name for name in EXPORTED)):
        if any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
            return path
    return None


def checkpoint_to_resume(path: str) -> str:
    """The checkpoint that a path means: a file means itself. A run's folder, or its `model` or
    `adapter`, means the run's `last.ckpt`, or else its newest checkpoint.

    Raises:
        CheckpointError: If there is no checkpoint, or the file is not one.
    """
    if "://" in path or zipfile.is_zipfile(path):
        return path
    folder = Path(path)
    if folder.is_file():
        raise CheckpointError(f"{path!r} is not a checkpoint. Give a last.ckpt of a run.")
    if not folder.is_dir():
        near = did_you_mean(path, LATEST) or " Runs keep theirs in their checkpoints/."
        raise CheckpointError(f"no checkpoint at {path!r}.{near}")
    if file := kept_in(folder.parent if folder.name in EXPORTED else folder, ("last",)):
        return checkpoint_to_resume(str(file))
    exported = exported_in(folder)
    if exported is None:
        raise CheckpointError(f"no checkpoint in {path!r}. {runs_with_checkpoints(folder)}")
    whole = (exported / "config.json").is_file()
    step = "Take its model as the policy" if whole else "Begin with its adapter"
    raise CheckpointError(
        f"no checkpoint in {path!r}. {step}: --ckpt_path null --model.policy.model {exported}"
    )


def runs_with_checkpoints(folder: Path) -> str:
    """`Runs in it: runs/quickstart/version_0.`: the next step for a folder that is not a run."""
    runs = sorted({str(file.parents[1]) for file in folder.glob(f"*/{_KEPT}")})
    return f"Runs in it: {', '.join(runs)}." if runs else "Give the folder of a run that has one."
