#!/usr/bin/env bash
# Fuzzes every target (fuzz/targets.rs) with libFuzzer, on the stable compiler.
#
#   fuzz/run.sh [SECONDS] [TARGET...]     SECONDS a target, 120 if not given
#
# Starts from fuzz/seeds; what it learns goes to fuzz/corpus, what makes a fault to fuzz/artifacts (both ignored by git):
# a fault's input, fixed, belongs into fuzz/seeds, from where tests/fuzz_seeds.rs feeds it for ever. Exit status: 0
# nothing found, 1 a fault.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
seconds=120
if [[ ${1:-} =~ ^[0-9]+$ ]]; then
  seconds=$1
  shift
fi
targets=("$@")
[[ ${#targets[@]} -gt 0 ]] || targets=(weights checkpoint config plan capi)

# What `cargo fuzz` asks of the compiler, but the sanitizers, which only a nightly one has. libFuzzer needs its counters.
host=$(rustc -vV | sed -n 's/^host: //p')
RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1" \
  cargo build --locked --target "$host" || exit 1

worst=0
for target in "${targets[@]}"; do
  mkdir -p "corpus/$target" "artifacts/$target"
  log=artifacts/$target.log
  "target/$host/debug/$target" "corpus/$target" "seeds/$target" -artifact_prefix="artifacts/$target/" \
    -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=8192 -print_final_stats=1 >"$log" 2>&1
  status=$?
  runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  printf '%-11s %-5s %s runs in %s s\n' "$target" "$([[ $status -eq 0 ]] && echo ok || echo FAULT)" "${runs:-?}" "$seconds"
  if [[ $status -ne 0 ]]; then
    worst=1
    grep -aE 'panicked|ERROR|allocation|Test unit' "$log" | head -8
  fi
done
exit "$worst"
