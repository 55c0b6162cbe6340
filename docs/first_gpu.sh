#!/usr/bin/env bash
# The first run on a GPU, in under 25 minutes: the tests for GPUs, the quickstart to 0.9 in float32
# and in bfloat16 with LoRA, the benchmark, and a 1.5B policy that is killed and resumed.
#
#   bash docs/first_gpu.sh RESULTS        from the repository, with turnrl and its dev extra installed
#   bash docs/first_gpu.sh RESULTS cpu    a rehearsal on a CPU, in small shapes
#
# RESULTS gets a log for each step, bench-gpu.json, train.json and verdicts.txt. A step that fails
# stops no other. The exit code is the number of steps that failed. $PYTHON and $TURNRL name the
# programs, if they are not `python` and `turnrl`.
set -u

out=${1:?"usage: bash docs/first_gpu.sh RESULTS [cpu]"}
where=${2:-gpu}
python=${PYTHON:-python}
turnrl=${TURNRL:-turnrl}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export TURNRL_DEBUG=1  # a log has the whole traceback
: > "$out/verdicts.txt"
failed=0

# step NAME SECONDS CHECK COMMAND...: runs the command, then the check, which says what came of it
# in a line and fails if that is not enough. Prints one line.
step() {
    local name=$1 limit=$2 check=$3 begun=$SECONDS code verdict said
    shift 3
    timeout -k 15 "$limit" "$@" > "$out/$name.log" 2>&1
    code=$?
    said=$("$check" "$name" 2>> "$out/$name.log")
    if [ $? -eq 0 ] && [ $code -eq 0 ]; then
        verdict=PASS
    else
        verdict=FAIL
        failed=$((failed + 1))
        if [ $code -eq 124 ] || [ $code -eq 137 ]; then
            said="$said (ended after $limit s)"
        elif [ $code -ne 0 ]; then
            said="$said (exit code $code; see $name.log)"
        fi
    fi
    printf '%s  %-16s %4d s  %s\n' "$verdict" "$name" $((SECONDS - begun)) "$said" \
        | tee -a "$out/verdicts.txt"
}

# The last line of pytest's; tests that were all skipped are no success.
tests_ran() {
    tail -n 1 "$out/$1.log"
    grep -q '[1-9][0-9]* passed' "$out/$1.log"
}

# The best val/exact_match of a run, at least 0.9.
learnt() {
    "$python" - "$out/$1" <<'PYTHON'
import csv, pathlib, sys

files = sorted(pathlib.Path(sys.argv[1]).glob("**/metrics.csv"))
rows = [row for file in files for row in csv.DictReader(file.open())]
values = [float(row["val/exact_match"]) for row in rows if row.get("val/exact_match")]
print(f"val/exact_match {max(values):.3f}" if values else "no validation")
sys.exit(not values or max(values) < 0.9)
PYTHON
}

# What each part of a benchmark came to.
parts_done() {
    "$python" - "$out/$1.json" <<'PYTHON'
import json, pathlib, sys

file = pathlib.Path(sys.argv[1])
parts = json.loads(file.read_text())["parts"] if file.exists() else {}
print(", ".join(f"{name} {part['status']}" for name, part in parts.items()) or "no results")
sys.exit(not parts or any(part["status"] in ("error", "waiting") for part in parts.values()))
PYTHON
}

# The same, where every case counts.
all_done() {
    parts_done "$1" && ! grep -qE '"status": "(error|partial|skipped)"' "$out/$1.json"
}

quickstart() {
    local name=$1
    shift
    step "$name" 160 learnt "$turnrl" fit recipes/quickstart.yaml \
        --trainer.accelerator "$where" --trainer.max_epochs 20 --data.val_limit 256 \
        --trainer.logger.init_args.save_dir "$out/$name" "$@"
}

nvidia-smi > "$out/nvidia-smi.txt" 2>&1 || echo "no nvidia-smi" > "$out/nvidia-smi.txt"
tiny=()
[ "$where" = cpu ] && tiny=(--tiny)

step tests 270 tests_ran "$python" -m pytest -m gpu -q tests
quickstart float32
quickstart bfloat16 --model.policy.dtype bfloat16 --model.policy.lora.r 16 \
    --model.optimizer.init_args.lr 2e-3
step bench-gpu 525 parts_done "$turnrl" bench gpu --minutes 8 --resume \
    --json "$out/bench-gpu.json" ${tiny[@]+"${tiny[@]}"}
step train 285 all_done "$turnrl" bench gpu --parts train --minutes 4 --resume \
    --json "$out/train.json" ${tiny[@]+"${tiny[@]}"}

echo "$((5 - failed)) of 5 passed; results in $out"
exit $failed
