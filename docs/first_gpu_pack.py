"""Packs turnrl, and what a GPU machine without a network lacks for it, into pieces to carry there.

On that machine, in the environment with torch:

    python -m pip list --format freeze > installed.txt

Here, from the repository:

    python docs/first_gpu_pack.py carried --installed installed.txt --python 3.12

The folder `carried` then has `install.sh` and `piece-1.tar`, `piece-2.tar`, ..., each under 64 MB.
Carry them there, and run `bash install.sh` among them. It unpacks the repository into `turnrl`, and
installs what it needs. What is installed there already is left as it is.
"""

from __future__ import annotations

import argparse
import email
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parents[1]
BESIDE = ("pytest>=8.4", "pytest-timeout>=2.4")
"""For the tests that need a GPU."""

INSTALL = """\
#!/usr/bin/env bash
# Unpacks the pieces that lie here, and installs what they hold. $PYTHON is the environment's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
for piece in piece-*.tar; do tar -xf "$piece"; done
tar -xf turnrl.tar.gz
read -ra python <<< "${PYTHON:-python}"
"${python[@]}" -m pip install --no-index --no-deps --force-reinstall wheels/*.whl
"${python[@]}" -m pip check || echo "if a run breaks there, bring these too"
echo "now: cd $PWD/turnrl && bash docs/first_gpu.sh"
"""

Fetch = Callable[[Mapping[str, SpecifierSet]], Iterable[Path]]
"""From names and the versions that will do to a wheel of each."""


class PackError(Exception):
    """Something that whoever packs can mend."""


def installed(text: str) -> dict[str, Version]:
    """What `pip list --format freeze` says, and what `pip freeze` does."""
    found: dict[str, Version] = {}
    for line in text.splitlines():
        name, equals, version = line.strip().partition("==")
        if not equals and " @ " in line:  # of a folder or an address, without its version
            name, version = line.partition(" @ ")[0], "0"
        try:
            found[canonicalize_name(name.partition("[")[0])] = Version(version)
        except InvalidVersion:
            continue
    return found


def cuda_of(there: Mapping[str, Version]) -> str | None:
    """The CUDA version that torch was built for, such as `13.0`, if its packages tell."""
    if tag := re.match(r"cu(\d+)(\d)$", str(there["torch"].local if "torch" in there else "")):
        return f"{tag[1]}.{tag[2]}"
    names = (name for name in sorted(there) if name.startswith("nvidia-cuda-runtime"))
    return next((f"{there[name].major}.{there[name].minor}" for name in names), None)


def requirements(
    wheel: Path, extras: Iterable[str], environment: dict[str, str]
) -> list[Requirement]:
    """What a wheel requires in an environment, with these extras of its own."""
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (n for n in opened.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
        lines = email.message_from_bytes(opened.read(name)).get_all("Requires-Dist", [])
    wanted = [Requirement(line) for line in lines]
    asked = [environment | {"extra": extra} for extra in ("", *extras)]
    return [r for r in wanted if r.marker is None or any(map(r.marker.evaluate, asked))]


def closure(
    roots: Iterable[Requirement],
    there: Mapping[str, Version],
    fetch: Fetch,
    environment: dict[str, str],
) -> tuple[dict[str, Path], list[str]]:
    """Wheels of all that some requirements need, and that is not there.

    Returns:
        The wheels by name; and a sentence for each package there whose version is not asked for.
    """
    roots, versions = list(roots), defaultdict[str, SpecifierSet](SpecifierSet)
    while True:
        wheels: dict[str, Path] = {}
        asked, seen = roots, set[tuple[str, frozenset[str]]]()
        odd: set[str] = set()
        while asked:
            for one in asked:
                name = canonicalize_name(one.name)
                versions[name] &= one.specifier
                if name in there and not one.specifier.contains(there[name], prereleases=True):
                    odd.add(f"{name} {there[name]} is there, and {one} is asked for")
            names = {canonicalize_name(one.name) for one in asked} - {*there, *wheels}
            if names:
                for wheel in fetch({name: versions[name] for name in sorted(names)}):
                    wheels[parse_wheel_filename(wheel.name)[0]] = wheel
            asked, before = [], asked
            for one in before:
                name = canonicalize_name(one.name)
                known = name, frozenset(one.extras)
                if known in seen or (name in there and not one.extras):
                    continue
                seen.add(known)
                read = wheels.get(name)
                if read is None:  # it is there, and perhaps without what an extra of it needs
                    (read,) = fetch({name: SpecifierSet(f"=={there[name].public}")})
                asked += requirements(read, one.extras, environment)
        chosen = {name: parse_wheel_filename(wheel.name)[1] for name, wheel in wheels.items()}
        # a requirement that was read later may rule out what was fetched before
        if all(
            versions[name].contains(version, prereleases=True) for name, version in chosen.items()
        ):
            return wheels, sorted(odd)


def without_other_cards(wheel: Path, cuda: str, folder: Path) -> Path:
    """The wheel of bitsandbytes with its kernels for one version of CUDA alone.

    Raises:
        PackError: If it has none for that one.
    """
    kept = f"libbitsandbytes_cuda{cuda.replace('.', '')}.so"
    with zipfile.ZipFile(wheel) as old:
        others = {
            name
            for name in old.namelist()
            if re.search(r"/libbitsandbytes_(?!cpu)\w+\.so$", name) and not name.endswith(kept)
        }
        if not any(name.endswith(kept) for name in old.namelist()):
            known = ", ".join(sorted(Path(name).name for name in others))
            raise PackError(f"{wheel.name} has no {kept}. Give --cuda for one of {known}.")
        target = folder / wheel.name
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
            for item in old.infolist():
                data = old.read(item)
                if item.filename.endswith(".dist-info/RECORD"):
                    lines = data.decode().splitlines(keepends=True)
                    data = "".join(x for x in lines if x.partition(",")[0] not in others).encode()
                if item.filename not in others:
                    new.writestr(item, data)
    return target


def pieces(files: Mapping[str, Path], limit: int) -> list[dict[str, Path]]:
    """Files divided among as few archives as it takes, the largest first.

    Args:
        files: By their names in the archive.
        limit: The most bytes of an archive.
    Raises:
        PackError: If one file is larger.
    """

    def room(file: Path) -> int:
        return 1024 + -(-file.stat().st_size // 512) * 512  # a header, and whole blocks

    packed: list[tuple[int, dict[str, Path]]] = []
    for name, file in sorted(files.items(), key=lambda item: -room(item[1])):
        if (size := room(file)) + 20_480 > limit:
            raise PackError(
                f"{name} has {size / 1e6:.0f} MB, and a piece holds {limit / 1e6:.0f}. If that "
                "machine has it already, name it in --installed."
            )
        place = next(
            (i for i, (taken, _) in enumerate(packed) if taken + size + 20_480 <= limit), None
        )
        if place is None:
            packed.append((size, {name: file}))
        else:
            taken, held = packed[place]
            packed[place] = taken + size, held | {name: file}
    return [held for _, held in packed]


def pip(*words: str) -> None:
    """Run pip.

    Raises:
        PackError: With the end of what it says.
    """
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
    if done.returncode:
        raise PackError(f"pip {words[0]} failed: {done.stderr.strip()[-600:]}")


def fetcher(python: str, machine: str, folder: Path) -> Fetch:
    """Fetches wheels for a Linux machine from the package index, as pip is set up here."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(5, 35)]
    platforms += [f"manylinux2014_{machine}", f"manylinux2010_{machine}", f"manylinux1_{machine}"]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--quiet"]
    options += [word for one in platforms for word in ("--platform", one)]

    def fetch(names: Mapping[str, SpecifierSet]) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=folder) as new:
            pip("download", *options, "--dest", new, *(f"{n}{v}" for n, v in names.items()))
            for wheel in Path(new).glob("*.whl"):
                yield wheel.replace(folder / wheel.name)

    return fetch


def repository(folder: Path, but: Path) -> Path:
    """An archive of the files that git knows in this repository, or would take, but for those in
    one folder."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tarfile.open(folder / "turnrl.tar.gz", "w:gz") as archive:
        for name in filter(None, listed.split("\0")):
            file = ROOT / name
            if file.is_file() and not file.resolve().is_relative_to(but.resolve()):
                archive.add(file, f"turnrl/{name}")
    return folder / "turnrl.tar.gz"


def pack(args: argparse.Namespace) -> None:
    """Write the pieces and `install.sh`; see the module."""
    there = installed(args.installed.read_text("utf-8")) if args.installed else {}
    there.pop(canonicalize_name("turnrl"), None)
    environment = {
        **{name: str(value) for name, value in default_environment().items()},
        **{"os_name": "posix", "sys_platform": "linux", "platform_system": "Linux"},
        **{"python_version": args.python, "python_full_version": f"{args.python}.0"},
        **{"implementation_name": "cpython", "platform_machine": args.machine},
    }
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        pip("wheel", "--no-deps", "--quiet", "--wheel-dir", str(work), str(ROOT))
        (own,) = work.glob("turnrl-*.whl")
        roots = [*requirements(own, ["gpu"], environment), *map(Requirement, BESIDE)]
        fetch = fetcher(args.python, args.machine, work)
        wheels, odd = closure(roots, there, fetch, environment)
        cuda = args.cuda or cuda_of(there)
        if "bitsandbytes" in wheels and cuda is not None:
            (work / "trimmed").mkdir()
            trimmed = without_other_cards(wheels["bitsandbytes"], cuda, work / "trimmed")
            wheels["bitsandbytes"] = trimmed
        files = {f"wheels/{wheel.name}": wheel for wheel in (own, *wheels.values())}
        packed = pieces(
            files | {"turnrl.tar.gz": repository(work, args.folder)}, args.limit_mb * 10**6
        )
        args.folder.mkdir(parents=True, exist_ok=True)
        for old in args.folder.glob("piece-*.tar"):
            old.unlink()
        for number, held in enumerate(packed, 1):
            with tarfile.open(args.folder / f"piece-{number}.tar", "w") as archive:
                for inside, file in held.items():
                    archive.add(file, inside)
        (args.folder / "install.sh").write_text(INSTALL, "utf-8")
    for line in odd:
        print(line)
    print(f"{len(wheels)} packages and turnrl in {len(packed)} pieces, in {args.folder}")


def main(words: list[str] | None = None) -> int:
    """The command line."""
    what, _, how = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=what, epilog=how, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    parser.add_argument("folder", type=Path, help="where the pieces go")
    parser.add_argument("--installed", type=Path, help="what that machine has, by pip list")
    parser.add_argument("--python", default=here, help="its Python (default: %(default)s)")
    parser.add_argument("--cuda", help="its torch's CUDA, such as 13.0 (default: by --installed)")
    parser.add_argument("--machine", default="x86_64", help="its processor (default: %(default)s)")
    parser.add_argument(
        "--limit-mb", type=int, default=63, help="the most of a piece (default: %(default)s)"
    )
    try:
        pack(parser.parse_args(words))
    except (PackError, OSError) as error:
        print(f"first_gpu_pack: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
