# The two commands are `make run` and `make test`. They need Rust, a C++ compiler, make and Python 3; what
# else the build uses (CUDA toolkit, CUTLASS, CMake, Ninja, ccache) third_party/bring.py brings from pip
# into an ignored folder, the toolkit only where none is installed.
#
#   make run       one decode step at full size, on a Hopper GPU where there is one, else on the CPU
#   make test      every test, built with CUDA and NCCL; those that need a GPU say so and skip where there is none
#   make lint fmt doc bench bring
#
#   FA3=1          with FlashAttention-3 as a second attention engine (feature fa3): minutes more to compile
#   CUDA=0         the CPU-only form of run, test, lint and doc: no toolkit, quick
#   ARGS="..."     further arguments of run, test and bench

CARGO ?= cargo
PYTHON ?= python3
ARGS ?=

# Compute capability 9.0 of any device. Only `make run` asks; the build never does.
HOPPER := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -cx '9\.0')

ifeq ($(origin CUDA),undefined)
CUDA := 1
run: CUDA := $(if $(filter-out 0,$(HOPPER)),1,0)
endif
FA3 ?= 0
FEATURES = $(if $(filter-out 0,$(CUDA)),--features nccl$(if $(filter-out 0,$(FA3)),$(COMMA)fa3))
COMMA := ,
# What everything is built with: one set, so that everything compiles once.
ALL_FEATURES = $(FEATURES) --features dlpack

# Cargo shows nothing of a running build script; ours writes a line for each finished step to descriptor 9.
# Make's echo would show that; the shell's shows the command alone.
SHOW_PROGRESS = @exec 9>&2; export MUSE_SPARK_PROGRESS=1; set -x;

.PHONY: run test lint fmt doc bench bring bring-for-cuda
.DEFAULT_GOAL := run

run: bring-for-cuda
	@$(if $(FEATURES),,echo "make: no Hopper GPU asked for or found: building for the CPU")
	$(SHOW_PROGRESS) $(CARGO) run $(ALL_FEATURES) --bin muse-spark-layer -- run $(ARGS)

test: bring-for-cuda
	$(SHOW_PROGRESS) $(CARGO) test $(ALL_FEATURES) $(ARGS)

# Clippy never shares its build script run with `cargo test`, so the kernels are left out of it.
lint:
	$(CARGO) fmt --check
	MUSE_SPARK_SKIP_KERNELS=1 $(CARGO) clippy --all-targets $(ALL_FEATURES) -- -D warnings

fmt:
	$(CARGO) fmt

doc: bring-for-cuda
	$(SHOW_PROGRESS) RUSTDOCFLAGS="$(RUSTDOCFLAGS) -D warnings" $(CARGO) doc --no-deps $(ALL_FEATURES)

bench: bring-for-cuda
	$(SHOW_PROGRESS) $(CARGO) run $(ALL_FEATURES) --bin muse-spark-layer -- bench $(ARGS)

bring:
	$(PYTHON) third_party/bring.py

bring-for-cuda:
	@$(if $(FEATURES),$(PYTHON) third_party/bring.py)
	@$(if $(filter-out 0,$(CUDA)),$(if $(filter-out 0,$(FA3)),$(PYTHON) third_party/bring.py fa3))
