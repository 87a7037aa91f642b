# make demo   installs what it needs and fine-tunes a real model on this machine's cores
# make test   installs what it needs; style, types, unit tests, and one real run for each promise
# make test TORCH=2.9.1   its tests with another torch, in an environment of its own; TORCH=lowest:
#             with the oldest versions of all that setup.py takes
# make test-all   the whole matrix of each promise, with what can be installed here of the following
# make soak   the long proofs, and whatever measures time; their figures belong into benchmarks/
# make gpu    checks hpc_tune on a machine with one GPU, in 8 minutes and without a network
# make slurm  installs Slurm (root, Debian): jobs
# make launchers  unpacks other MPIs (Debian): ranks started by each
# make browser  installs Chromium (root, Debian): reports as it shows them
# make harness  installs lm-evaluation-harness beside the rest: scores of a merged model
# make nvme   compiles DeepSpeed's library for NVMe (minutes): offload to disk

PYTHON ?= python3
VENV   ?= .venv$(if $(TORCH),-torch-$(TORCH))
PIP     = $(VENV)/bin/python -m pip
BIN     = $(abspath $(VENV))/bin
MODEL   = models/smollm2-135m-instruct
DTYPE   = `python -c 'from hpc_tune.world.device import cpu_has_bf16 as it; print("bf16" if it() else "fp32")'`
PROMPT  = What does `os.path.join(path, *paths)` do?

# Open MPI wants to be told twice that running as root is meant.
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
endif
export PATH := $(BIN):$(PATH)
# DeepSpeed's C++ parts are compiled where they are used, not at its installation.
export DS_BUILD_OPS = 0

.PHONY: demo test test-all lint gpu nvme slurm launchers browser harness soak clean

# Where a worker's process ends, the rest of its file is never run, and pytest would wait for it.
PYTEST = python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 \
	--durations=10 --durations-min=1

demo: $(VENV)/.demo $(MODEL)/config.json
	@echo '== before: $(PROMPT)'
	@python -m hpc_tune generate --model $(MODEL) --prompt '$(PROMPT)' --max-tokens 64
	mpirun -np 2 python -m hpc_tune --config configs/smollm2_135m_lora.yaml model.dtype=$(DTYPE)
	@echo '== after: $(PROMPT)'
	@python -m hpc_tune generate --run runs/smollm2 --prompt '$(PROMPT)' --max-tokens 64

$(MODEL)/config.json: $(VENV)/.demo
	python tools/fetch_smollm2.py $(MODEL)

# A test that hangs in C, where pytest-timeout cannot reach it, ends with the stack of each thread.
# Types are checked with the versions of constraints.txt, which others differ from.
test: $(if $(TORCH),$(VENV)/.test,lint)
	$(PYTEST) -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

# What cannot be had here is skipped, and pytest says so.
test-all: lint
	for part in nvme slurm launchers browser harness; do timeout 1500 $(MAKE) $$part || true; done
	$(PYTEST) -m 'not soak'
	for torch in 2.9.1 2.14.1 lowest; do $(MAKE) test TORCH=$$torch || exit 1; done

lint: $(VENV)/.test
	ruff check .
	ruff format --check .
	mypy

# Nothing is installed for it: such a machine may have no network.
gpu:
	$(firstword $(wildcard $(BIN)/python) $(PYTHON)) tools/gpu_check.py

nvme: $(VENV)/.test
	DS_ACCELERATOR=cpu python -c 'from hpc_tune.engine.zero.settings import load_async_io as load; load("make nvme")'

slurm:
	sh tools/ensure_slurm.sh

launchers: $(VENV)/.test
	sh tools/ensure_launchers.sh $(VENV) .launchers

browser:
	command -v chromium || (apt-get update -q && apt-get install -y -q chromium) >/dev/null

harness: .lm-eval/bin/lm_eval

.lm-eval/bin/lm_eval:
	$(PYTHON) -m venv .lm-eval
	.lm-eval/bin/python -m pip install --quiet --constraint constraints.txt 'lm_eval[hf]'

soak: $(VENV)/.test nvme
	python -m pytest -q -m soak

$(VENV)/.%: setup.py constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
ifeq ($(TORCH),lowest)
	$(PYTHON) tools/lowest.py >$(VENV)/constraints.txt
else
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt >$(VENV)/constraints.txt
endif
	$(PIP) install --quiet --constraint $(VENV)/constraints.txt torch
	$(PIP) install --quiet --constraint $(VENV)/constraints.txt --editable '.[$*]'
	# It is built for some versions of torch; transformers and peft fail with one that is not.
	$(VENV)/bin/python -c 'import torchao.float8' 2>/dev/null || $(PIP) uninstall --quiet --yes torchao
	sh tools/ensure_mpirun.sh $(VENV)
	sh tools/ensure_libaio.sh
	touch $@

clean:
	rm -rf $(VENV) .launchers .lm-eval build *.egg-info
