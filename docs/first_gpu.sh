#!/usr/bin/env bash
# The first run on a GPU, step by step. Each step takes less than ten minutes. On an H100 all of
# them took 12, added up from separate calls and without four cases of `speed`, which had no time
# left. From the repository, with turnrl, pytest and pytest-timeout installed:
#
#   bash docs/first_gpu.sh                     the steps
#   bash docs/first_gpu.sh STEP [RESULTS]      one step; RESULTS is the folder first-gpu by default
#   bash docs/first_gpu.sh all [RESULTS]       all of them, unless the first one fails
#   bash docs/first_gpu.sh STEP RESULTS cpu    a rehearsal on a CPU, in small shapes
#
# RESULTS gets verdicts.txt, a log for each line of it, and bench-gpu.json, which grows as each part
# finishes. A step that is repeated measures what is missing. The exit code is the number
# of lines that failed. $PYTHON and $TURNRL are the programs, if they are not `python` and `turnrl`:
# TURNRL="python -m turnrl". With $TURNRL_TEST_VLLM_PYTHON, the interpreter of an environment with
# vLLM, the tests start a vLLM server too.
set -u

steps="check speed iteration tests training"
about() {
    case $1 in
        check) echo "the doctor, and an iteration of a tiny policy in 4 bits, with graphs and kernels" ;;
        speed) echo "7B: sampling each way, a minibatch" ;;
        iteration) echo "7B: a whole iteration, its memory as planned and as measured" ;;
        tests) echo "the tests that need a GPU, file by file" ;;
        training) echo "the quickstart in bfloat16 with LoRA" ;;
    esac
}

chosen=${1:-}
case " $steps all " in
    *" ${chosen:-none} "*) ;;
    *)
        [ -z "$chosen" ] || echo "first_gpu.sh: no step '$chosen'. The steps are:" >&2
        for name in $steps; do printf '%-10s %s\n' "$name" "$(about "$name")"; done
        printf '%-10s %s\n' all "all of these, in this order"
        [ -z "$chosen" ]
        exit $((2 * $?))
        ;;
esac
out=${2:-first-gpu}
where=${3:-gpu}
read -ra python <<< "${PYTHON:-python}"
read -ra turnrl <<< "${TURNRL:-turnrl}"
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export TURNRL_DEBUG=1  # a log has the whole traceback
passed=0 failed=0

# try NAME SECONDS CHECK COMMAND...: runs the command, then the check, which says what came of it
# in a line and fails if that is not enough. Prints one line.
try() {
    local name=$1 limit=$2 check=$3 begun=$SECONDS code verdict said
    shift 3
    timeout -k 15 "$limit" "$@" > "$out/$name.log" 2>&1
    code=$?
    said=$("$check" "$name" 2>> "$out/$name.log")
    if [ $? -eq 0 ] && [ $code -eq 0 ]; then
        verdict=PASS
        passed=$((passed + 1))
    else
        verdict=FAIL
        failed=$((failed + 1))
        if [ $code -eq 124 ] || [ $code -eq 137 ]; then
            said="$said (ended after $limit s)"
        elif [ $code -ne 0 ]; then
            said="$said (exit code $code; see $name.log)"
        fi
    fi
    printf '%s  %-20s %4d s  %s\n' "$verdict" "$name" $((SECONDS - begun)) "$said" \
        | tee -a "$out/verdicts.txt"
}

# ----------------------------------------------------------------------------------- checks

# What the doctor says of graphs and kernels; on a GPU all of these have to be in force.
in_force() {
    local missing=0
    for wanted in "CUDA graphs: on" "pages read in place" "torch's varlen kernel"; do
        if grep -qF "$wanted" "$out/$1.log"; then
            printf '%s: yes; ' "$wanted"
        else
            printf '%s: no; ' "$wanted"
            missing=1
        fi
    done
    [ $missing = 0 ] || [ "$where" = cpu ]
}

# The last line of pytest's; tests that were all skipped are no success.
tests_ran() {
    tail -n 1 "$out/$1.log"
    grep -q '[1-9][0-9]* passed' "$out/$1.log"
}

# The best val/exact_match of a run, at least $2.
learnt() {
    "${python[@]}" - "$out/$1" "${2:-0.9}" <<'PYTHON'
import csv, pathlib, sys

files = sorted(pathlib.Path(sys.argv[1]).glob("**/metrics.csv"))
rows = [row for file in files for row in csv.DictReader(file.open())]
values = [float(row["val/exact_match"]) for row in rows if row.get("val/exact_match")]
print(f"val/exact_match {max(values):.3f}" if values else "no validation")
sys.exit(not values or max(values) < float(sys.argv[2]))
PYTHON
}

# An iteration was learned from, whatever came of it.
went_round() {
    learnt "$1" 0 && grep -qE '^iteration +1/1' "$out/$1.log"
}

# The status of each part of a benchmark, and the memory of an iteration beside the plan's.
measured() {
    "${python[@]}" - "$out/bench-gpu.json" "$parts" <<'PYTHON'
import json, pathlib, sys

file, names = pathlib.Path(sys.argv[1]), sys.argv[2].split(",")
parts = json.loads(file.read_text())["parts"] if file.exists() else {}
parts = {name: parts.get(name, {"status": "not there"}) for name in names}
told = [f"{name} {part['status']}" for name, part in parts.items()]
for case in parts.get("iteration", {}).get("cases", {}).values():
    for phase, measured in case.get("memory", {}).items():
        plan, size = case.get("plan"), measured.get("peak_bytes")
        planned = f"{plan[phase][0] / 1e9:.1f}" if isinstance(plan, dict) and phase in plan else "no"
        told.append(f"{phase} {planned} GB planned, {(size or 0) / 1e9:.1f} measured")
print(", ".join(told))
good = ("done", "partial", "skipped")
sys.exit(any(part["status"] not in good for part in parts.values()))
PYTHON
}

# ------------------------------------------------------------------------------------ steps

tiny=()
[ "$where" = cpu ] && tiny=(--tiny)
four_bit=(--model.policy.quantization nf4 --model.policy.lora.r 16)
recipe=(recipes/quickstart.yaml --trainer.accelerator "$where")

check() {
    nvidia-smi > "$out/nvidia-smi.txt" 2>&1 || echo "no nvidia-smi" > "$out/nvidia-smi.txt"
    try doctor 120 in_force "${turnrl[@]}" doctor "${recipe[@]}" "${four_bit[@]}"
    try tiny-4-bit 180 went_round "${turnrl[@]}" fit "${recipe[@]}" "${four_bit[@]}" \
        --trainer.max_epochs 1 --trainer.callbacks null --data.val_limit 16 \
        --data.questions_per_iteration 4 --trainer.logger.class_path CSVLogger \
        --trainer.logger.init_args.save_dir "$out/tiny-4-bit"
}

# gpu NAME SECONDS MINUTES PARTS
gpu() {
    parts=$4
    try "$1" "$2" measured "${turnrl[@]}" bench gpu --parts "$parts" --minutes "$3" --resume \
        --json "$out/bench-gpu.json" ${tiny[@]+"${tiny[@]}"}
}

speed() { gpu speed 540 8 machine,decoding,learning; }

iteration() { gpu iteration 400 5.5 iteration; }

tests() {
    local file
    for file in test_engine_graphs test_engine_gpu test_gpu ${TURNRL_TEST_VLLM_PYTHON:+test_vllm_gpu}; do
        # these look at what a user sees, so without the debugging output
        try "$file" 170 tests_ran env -u TURNRL_DEBUG \
            "${python[@]}" -m pytest -m gpu -q -p no:cacheprovider "tests/$file.py"
    done
}

training() {
    try bfloat16 230 learnt "${turnrl[@]}" fit "${recipe[@]}" --trainer.max_epochs 20 \
        --model.policy.dtype bfloat16 --model.policy.lora.r 16 \
        --model.optimizer.init_args.lr 2e-3 --trainer.logger.class_path CSVLogger \
        --trainer.logger.init_args.save_dir "$out/bfloat16"
}

[ "$chosen" = all ] || steps=$chosen
for name in $steps; do
    "$name"
    if [ "$chosen" = all ] && [ "$name" = check ] && [ $failed -gt 0 ]; then
        echo "the check failed, and so would what comes after it"
        break
    fi
done
echo "$passed of $((passed + failed)) passed; results in $out"
exit $failed
