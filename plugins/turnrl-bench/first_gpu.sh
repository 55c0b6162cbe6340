#!/usr/bin/env bash
# The first run on a new card. From the repository, with turnrl, pytest and pytest-timeout installed:
#
#   bash plugins/turnrl-bench/first_gpu.sh [STEP...]
#
# Without a STEP, all of them run in this order. Each takes less than ten minutes:
#
#   doctor      which kernels are in force
#   four-bit    an iteration of a tiny policy in 4 bits
#   sampling    7B: tokens per second, each way
#   minibatch   7B: a minibatch, part by part
#   iteration   7B: a whole iteration, and its memory
#   tests       the tests that need a GPU
#   training    the quickstart in bfloat16 with LoRA
#
# The folder first-gpu ($RESULTS) gets a log for each step. The exit code is the number of steps that
# failed. $PYTHON and $TURNRL are the programs. WHERE=cpu rehearses the steps on a CPU, in small
# shapes. With $TURNRL_TEST_VLLM_PYTHON, the interpreter of an environment with vLLM, the tests start
# a vLLM server too.
set -u

out=${RESULTS:-first-gpu} where=${WHERE:-gpu} failed=0
read -ra python <<< "${PYTHON:-python}"
read -ra turnrl <<< "${TURNRL:-turnrl}"
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1

tiny=()
[ "$where" = cpu ] && tiny=(--tiny true)
recipe=(recipes/quickstart.yaml --trainer.accelerator "$where")
four_bit=(--model.policy.quantization nf4 --model.policy.lora.r 16)
bench=("${python[@]}" plugins/turnrl-bench/gpu.py)

command_of() {
    case $1 in
        doctor) command=("${turnrl[@]}" doctor "${recipe[@]}" "${four_bit[@]}") ;;
        four-bit)
            command=("${turnrl[@]}" fit "${recipe[@]}" "${four_bit[@]}" --trainer.max_epochs 1
                --trainer.callbacks null --data.val_limit 16 --data.questions_per_iteration 4
                --trainer.logger.class_path CSVLogger --trainer.logger.init_args.save_dir "$out/4-bit")
            ;;
        sampling | minibatch | iteration) command=("${bench[@]}" "$1" ${tiny[@]+"${tiny[@]}"}) ;;
        tests) command=("${python[@]}" -m pytest -m gpu -q -p no:cacheprovider tests) ;;
        training)
            command=("${turnrl[@]}" fit "${recipe[@]}" --trainer.max_epochs 20
                --model.policy.dtype bfloat16 --model.policy.lora.r 16
                --model.optimizer.init_args.lr 2e-3 --trainer.logger.class_path CSVLogger
                --trainer.logger.init_args.save_dir "$out/bfloat16")
            ;;
        *)
            echo "first_gpu.sh: no step '$1'" >&2
            exit 2
            ;;
    esac
}

[ $# -gt 0 ] || set -- doctor four-bit sampling minibatch iteration tests training
for step in "$@"; do
    command_of "$step"
    begun=$SECONDS verdict=PASS
    timeout -k 15 570 "${command[@]}" > "$out/$step.log" 2>&1 || { verdict=FAIL; failed=$((failed + 1)); }
    printf '%s  %-10s %4d s\n' "$verdict" "$step" $((SECONDS - begun))
    tail -n 20 "$out/$step.log"
done
exit $failed
