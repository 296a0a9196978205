# The main entry point. Every target sets up what is missing, reports what it does, and repeats no work.
#
#   PRESET=release|debug|clang|asan|tsan|cuda   the kind of build       (CMakePresets.json)
#   TORCH=2.11.0                          the LibTorch release to fetch (tools/setup.sh)
#   CUDA=0|1                              fetch a LibTorch with CUDA, default: 1 for PRESET=cuda, else 0
#   SEMITONE_LIBTORCH=DIR                 an existing LibTorch: the folder that holds include/ and lib/
#   JOBS=N                                number of jobs that compile and test, default: one per core
#   ALL=1                                 check: clang-tidy reads tests, benchmarks and examples too; about twice as long
#   ALONE=1                               check: it reads each of all these alone; more than ten times as long
#   NPROC=N|auto                          number of processes of mnist-ddp, default: 2
#   SEMITONE_PEER_PYTHON=PYTHON           a Python with torch, for bench-compare; default: bench-peers installs one

PRESET ?= release
TORCH ?= 2.11.0
JOBS ?= $(shell nproc)
NPROC ?= 2
ifneq ($(origin CUDA),command line)  # in the environment it may be the folder of a toolkit
CUDA := $(or $(filter 0 1,$(CUDA)),$(if $(filter cuda,$(PRESET)),1,0))
endif
SUFFIX = $(if $(filter-out 2.11.0,$(TORCH)),-torch$(TORCH))
BUILD = build/$(PRESET)$(SUFFIX)
LIBTORCH = $(or $(SEMITONE_LIBTORCH),$(CURDIR)/.deps/libtorch-$(TORCH)$(if $(filter 1,$(CUDA)),-cuda)/torch)
export TORCH CUDA SEMITONE_LIBTORCH

say = @printf '\033[1m[%s]\033[0m %s\n' "$@"

.DEFAULT_GOAL := help
.PHONY: help setup setup-tests configure build program package mnist mnist-ddp test test-slow test-isa test-arm soak fuzz bench bench-peers bench-compare format check docs bundle gpu-hour clean

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

setup:  ## Install missing packages and LibTorch
	@tools/setup.sh

setup-tests:  ## Install programs that some tests need: shells, compilers of other languages, a browser (tools/setup.sh)
	@TEST_PROGRAMS=1 tools/setup.sh

configure: setup  # ninja configures again by itself when a CMake file changes
	@grep -qsFx 'SEMITONE_LIBTORCH:PATH=$(LIBTORCH)' $(BUILD)/CMakeCache.txt && test -e $(BUILD)/build.ninja || { printf '\033[1m[configure]\033[0m into $(BUILD)\n'; mkdir -p build; \
	  cmake --preset $(PRESET) -B $(BUILD) -DSEMITONE_LIBTORCH=$(LIBTORCH) > $(BUILD).log 2>&1 \
	    || { cat $(BUILD).log; rm -f $(BUILD)/build.ninja; exit 1; }; }

program: configure  ## Build the program ./semitone only
	$(say) "compiling the program semitone with $(JOBS) jobs"
	@cmake --build $(BUILD) -j $(JOBS) --target semitone_cli

build: configure  ## Build everything
	$(say) "compiling with $(JOBS) jobs (about 30 minutes from nothing on 2 cores)"
	@cmake --build $(BUILD) -j $(JOBS)

package: configure  ## Make .deb packages and a .tar.gz of Semitone, into build/release/packages/ (docs/packages.md)
	@grep -q '^SEMITONE_LIBRARY:STRING=BOTH$$' $(BUILD)/CMakeCache.txt || { \
	  echo "[make.package] expected a preset that builds both kinds of libraries, got $(PRESET) — use release or cuda" >&2; exit 1; }
	@cmake --build $(BUILD) -j $(JOBS) --target semitone_cli semitone_pages semitone_c semitone_shared
	@cd $(BUILD) && cpack

mnist: program  ## Train the ConvNet on the real MNIST at O0, O1, O2 and O3
	$(say) "training"
	@$(BUILD)/apps/semitone train --model convnet --opt-level all $(ARGS)

mnist-ddp: program  ## The same in two processes, each with its share of the images
	$(say) "training in $(NPROC) processes"
	@$(BUILD)/apps/semitone train --model convnet --opt-level all --nproc $(NPROC) --batch-size 50 --sync-bn $(ARGS)

test: build  ## Build and run every test
	$(say) "running the tests"
	@cat $(BUILD)/missing_tests.txt
	@ctest --test-dir $(BUILD) --output-on-failure -j $(JOBS) $(ARGS)

test-slow: build  ## Run the tests of packages, and others that take minutes (CONTRIBUTING.md)
	$(say) "running the tests that take minutes"
	@ctest --test-dir $(BUILD) --output-on-failure -j $(JOBS) -C slow -L slow $(ARGS)

test-isa: build  ## Run the numerical tests at every instruction set, from SSE4.1 to this processor's
	$(say) "running the tests of numbers at every instruction set"
	@ctest --test-dir $(BUILD) --output-on-failure -j $(JOBS) -C isa -L isa $(ARGS)

test-arm:  ## Compile for Arm (aarch64), and run the numerical tests in QEMU (tools/arm.sh)
	@JOBS=$(JOBS) tools/arm.sh $(ARGS)

soak: program  ## Train for half an hour, killed every minute: the weights must be those of an undisturbed training
	$(say) "about 30 minutes; ARGS=\"--minutes 10\" for less"
	@tools/soak.py --program $(BUILD)/apps/semitone $(ARGS)

fuzz:  ## Give the parsers of files and messages generated inputs, with clang's libFuzzer (tools/fuzz.py)
	@$(MAKE) -s configure PRESET=fuzz
	$(say) "compiling the fuzzers with $(JOBS) jobs"
	@cmake --build build/fuzz$(SUFFIX) -j $(JOBS) --target semitone_fuzz
	@tools/fuzz.py build/fuzz$(SUFFIX) $(ARGS)

bench: configure  ## Build and run the benchmarks
	$(say) "compiling the benchmarks with $(JOBS) jobs"
	@cmake --build $(BUILD) -j $(JOBS) --target semitone_benchmarks
	@for program in $(BUILD)/benchmarks/*_bench; do echo "== $$program"; $$program $(ARGS) || exit 1; done

bench-peers:  ## Install PyTorch, IPEX and Paddle for comparison
	@benchmarks/peers/install.sh

bench-compare: program bench-peers  ## Compare training speed with PyTorch, IPEX and Paddle, into build/bench/
	$(say) "about an hour for all workloads; nothing else should run on the machine"
	@python3 benchmarks/compare.py --program $(BUILD)/apps/semitone $(ARGS)

format: setup  ## Format the C++ sources
	@tools/setup_check.sh
	@tools/format.sh -i

check:  ## Check format, arrows, pages, and with clang-tidy library, program and public headers; ALL=1: tests and examples too
	@$(MAKE) -s configure PRESET=check
	@cmake build/check$(SUFFIX) > build/check$(SUFFIX).log 2>&1 || { cat build/check$(SUFFIX).log; exit 1; }  # files come and go
	@tools/setup_check.sh
	@tools/check.sh build/check$(SUFFIX) $(JOBS) $(if $(ALONE),--alone,$(if $(ALL),.))

docs:  ## Build the pages and the API reference as a site, into build/docs/
	@tools/setup_docs.sh
	$(say) "the pages by Zensical, the API reference by Doxygen"
	@tools/docs.py

bundle:  ## Pack the sources and all libraries' sources, to build where there is no network, into build/bundle/
	@tools/bundle.py $(ARGS)

gpu-hour:  ## Build, test and measure on a machine with a GPU, in steps with a report (tools/gpu_hour.py)
	@$(MAKE) -s configure PRESET=cuda CUDA=1
	@tools/gpu_hour.py --build $(CURDIR)/build/cuda$(SUFFIX) $(ARGS)

clean:  ## Remove build/ (keeps .deps/)
	@rm -rf build
