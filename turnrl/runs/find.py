"""Find the folder of a run by a user's word.

    runs/NAME/version_N/    metrics.csv, config.yaml, record/, transcripts/, checkpoints/, model/

Every command finds runs with this module, so a word means the same run to all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from turnrl.plugin.errors import DataError, RecipeError, TurnRLError, suggest_name

RUNS = Path("runs")
"""The folder in which runs lie, unless `trainer.logger` names another."""
_PARTS = ("record", "checkpoints", "transcripts", "model", "adapter")
_FILES = ("config.yaml", "metrics.csv", "record")
KEPT = "checkpoints/*.ckpt"
"""Checkpoints of a run."""
_GIVE = "Give the folder of a run, such as runs/quickstart/version_0."
_RECORD = ("record/*.parquet", "*.parquet")
"""Files of a record. Somebody may have copied them without their run."""
_NEEDS: dict[str, tuple[str, type[TurnRLError], tuple[str, ...]]] = {
    "record": ("record of a run", DataError, _RECORD),
    "figures": ("record of a run", DataError, ("metrics.csv", *_RECORD)),
    "recipe": ("run", RecipeError, ("config.yaml",)),
}


def find_run(word: str | Path, needs: Literal["record", "figures", "recipe"] = "record") -> Path:
    """Find the run folder that `word` names, the same for every command.

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
    run = resolve_run(word)
    if run is None:
        raise error(f"no {noun} at {str(word)!r}.{suggest_run(word)} {_GIVE}")
    return require_files(run, needs)


def require_files(run: Path, needs: str) -> Path:
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


def resolve_run(word: str | Path) -> Path | None:
    """The run folder that `word` names, or None. See `find_run`."""
    named = RUNS / word
    inner = find_run_in(named)
    # only a name counts, not a path to something inside a run
    by_name = inner if inner is not None and named in (inner, inner.parent) else None
    return find_run_in(Path(word)) or by_name


def find_run_in(path: Path) -> Path | None:
    """The run that contains a path, or else the newest run inside it; None if there is neither."""
    inside = path.parent if path.is_file() else path
    if inside.name in _PARTS and is_run(inside.parent):
        return inside.parent
    return inside if is_run(inside) else next(iter(list_runs(path)), None)


def is_run(folder: Path) -> bool:
    """True if a folder holds files of a run."""
    has_file = any((folder / name).exists() for name in _FILES)
    return has_file or any(any(folder.glob(pattern)) for pattern in (_RECORD[1], KEPT))


def list_runs(home: Path) -> list[Path]:
    """The runs in a folder of runs: first those that trained, then the others, each newest
    first."""
    runs = filter(is_run, home.glob("*"))
    return sorted(runs, key=lambda run: (_has_trained(run), _start_time(run)), reverse=True)


def _has_trained(run: Path) -> bool:
    return any(run.glob(KEPT))


def _start_time(run: Path) -> float:
    """The time at which a run began. Its recipe is its first file; a run made from Python has no
    recipe, so its other files are looked at."""
    config = run / "config.yaml"
    others = [file for pattern in ("metrics.csv", *_RECORD) for file in run.glob(pattern)]
    files = [config] if config.is_file() else others
    return min((file.stat().st_mtime for file in files), default=0.0)


def suggest_run(word: str | Path, others: Iterable[str] = ()) -> str:
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
    inside = [str(path) for home in paths for path in sorted(home.glob("*")) if list_runs(path)]
    if inside:
        return f" It has folders of runs: {', '.join(inside)}."
    if here := next((path for path in paths if path.is_dir()), None):
        return f" The folder {str(here)!r} holds no run."
    near = suggest_name(str(word), [*names, *beside, *others])
    return near or (f" There are {', '.join(names)}." if names else "")
