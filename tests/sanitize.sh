#!/usr/bin/env bash
# compute-sanitizer over the GPU test binary on small steps and single operations that together launch every kernel, with its
# tails (tests/gpu/sanitized.rs). One line a tool; a tool's whole report is kept where it found something.
#
#   tests/sanitize.sh [-t SECONDS] [BINARY] [TOOL...]
#
# BINARY: the GPU test binary; without it the newest target/debug/deps/gpu-*. TOOL: memcheck initcheck synccheck
# racecheck racecheck-experts; without any, all of them. -t: each tool's limit (default 600). Logs go to $SANITIZE_LOGS (default: a new
# folder under the temporary one). Exit status: 0 clean, 1 a finding or a step that failed, 2 could not run.
set -uo pipefail

limit=600
if [[ ${1:-} == -t ]]; then
  limit=$2
  shift 2
fi
binary=
if [[ $# -gt 0 && $1 != *check* ]]; then
  binary=$1
  shift
fi
tools=("$@")
[[ ${#tools[@]} -gt 0 ]] || tools=(memcheck synccheck racecheck racecheck-experts initcheck)

if [[ -z $binary ]]; then
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  binary=$(find "${CARGO_TARGET_DIR:-$root/target}/debug/deps" -maxdepth 1 -name 'gpu-*' -type f -perm -u+x -printf '%T@ %p\n' 2>/dev/null |
    sort -n | tail -1 | cut -d' ' -f2-)
fi
if [[ ! -x $binary ]]; then
  echo "sanitize: no GPU test binary ('$binary'): cargo test --features cuda --test gpu --no-run" >&2
  exit 2
fi

sanitizer=$(command -v compute-sanitizer || true)
for folder in "${CUDA_HOME:-}" "${CUDA_PATH:-}" /usr/local/cuda; do
  [[ -z $sanitizer && -n $folder && -x $folder/bin/compute-sanitizer ]] && sanitizer=$folder/bin/compute-sanitizer
done
if [[ -z $sanitizer ]]; then
  echo "sanitize: compute-sanitizer is neither on PATH nor under CUDA_HOME or /usr/local/cuda" >&2
  exit 2
fi

# Allocations end where their tensors do.
export MUSE_SPARK_LAYER_NO_BANDS=1
logs=${SANITIZE_LOGS:-$(mktemp -d)}
mkdir -p "$logs"
# The option's name before and since CUDA 12.9.
exclude=--kernel-name-exclude
"$sanitizer" --help 2>&1 | grep -q -e '--kernel-name-exclude' || exclude=--kernel-regex-exclude

# What racecheck cannot follow (docs/testing.md): the experts' rings, a copy engine's refill against the loads of the
# slot's previous contents; a barrier's initialisation against its first use by the thread that initialised it.
# What initcheck cannot: the stores of the tensor copy engine, whose results boundary_stream loads.
explained_race='msl::(expert::(load_shared_?16|load_shared_?2|bulk_load_at|expect_at)|bulk_load|mbar_init|mbar_expect_tx)\('
explained_init='Device Frame: msl::stream_fill\('

# all_explained TOOL LOG: true if there are reports and each is one of these.
all_explained() {
  local reports summed rest
  case $1 in
    racecheck)
      reports=$(grep -acE 'Race reported between|Maximum number of hazards reached' "$2")
      summed=$(sed -n 's/.*RACECHECK SUMMARY: \([0-9]*\) hazard.*/\1/p' "$2")
      rest=$(grep -aE 'Race reported between| access at ' "$2" | grep -avcE "$explained_race") ;;
    initcheck)
      reports=$(grep -ac 'Uninitialized __global__ memory read' "$2")
      summed=$(sed -n 's/.*ERROR SUMMARY: \([0-9]*\) error.*/\1/p' "$2")
      rest=$((reports - $(grep -acE "$explained_init" "$2"))) ;;
    *) return 1 ;;
  esac
  [[ $reports -gt 0 && $reports == "$summed" && $rest -eq 0 ]]
}

# Runs one tool. The kernels that pack the weights once are many times the step's work: racecheck and synccheck leave
# them out; initcheck cannot, since it would not see what they store.
check() {
  local tool=$1 log=$logs/$1.log began=$SECONDS options=() tests=() prints=100 passed summary failed=
  case $tool in
    memcheck) tests=(sanitized::step_dependent sanitized::direct_) ;;
    # Kernel boundaries must be boundaries: racecheck has no notion of dependent launch. By far the slowest on long steps,
    # which it leaves out: every kernel that uses shared memory runs in the others too. The experts' kernels apart, in
    # three steps: their hazards fill the tool's table, and others would not be seen.
    racecheck) tests=(sanitized::step_plain sanitized::direct_ --skip direct_experts --skip prefill_333 --skip prefill_1100
      --skip prefill_2100 --skip verify_long)
      options=("$exclude" kernel_substring=pack_ "$exclude" kernel_substring=expert_gemm "$exclude" kernel_substring=expert_few) ;;
    racecheck-experts) tests=(sanitized::step_plain::name_01 sanitized::step_plain::name_02 sanitized::step_plain::name_03 sanitized::direct_experts)
      options=("$exclude" kernel_substring=pack_) tool=racecheck ;;
    initcheck) tests=(sanitized::step_plain) options=(--show-backtrace device) prints=0 ;;
    # The kernels' barriers are PTX, which the tool does not count by itself.
    synccheck) tests=(sanitized::step_dependent sanitized::direct_) options=("$exclude" kernel_substring=pack_ --num-cuda-barriers 64) ;;
    *)
      echo "sanitize: no tool called $tool" >&2
      return 2
      ;;
  esac
  timeout -k 5 "$limit" "$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit $prints "${options[@]}" \
    "$binary" "${tests[@]}" --nocapture --test-threads 1 >"$log" 2>&1
  local status=$?
  passed=$(sed -n 's/^test result: .* \([0-9]*\) passed.*/\1/p' "$log")
  summary=$(grep -aE 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -1 | sed 's/^=* *//')
  if [[ $status -eq 0 || $status -eq 9 ]] && all_explained "$tool" "$log"; then
    status=0 summary="$summary: 0 beyond those explained"
  fi
  if grep -q 'skipped, no GPU' "$log"; then
    summary="no GPU, nothing was run" failed=2
  elif [[ $status -eq 124 || $status -eq 137 ]]; then
    summary="not finished in $limit s${summary:+; $summary}" failed=1
  elif [[ $status -ne 0 || -z $passed || $passed -eq 0 || $summary != *": 0 "* ]]; then
    failed=1
  fi
  printf '%-17s %-5s %s, %s steps passed, %d s\n' "$1" "${failed:+FAIL}" "${summary:-no summary (exit $status)}" "${passed:-0}" $((SECONDS - began))
  [[ -z $failed ]] || echo "                  $log"
  return "${failed:-0}"
}

worst=0
for tool in "${tools[@]}"; do
  check "$tool"
  result=$?
  [[ $result -le $worst ]] || worst=$result
done
exit "$worst"
