# make demo   installs what it needs and fine-tunes a real model on this machine's cores
# make test   installs what it needs and passes the tests
# make soak   the long proofs; their figures belong into benchmarks/
# make slurm  installs Slurm (root, Debian): with it make test tries jobs with a memory limit
# make launchers  unpacks other MPIs (Debian): with them make test starts ranks by each
# make browser  installs Chromium (root, Debian): with it make test looks at reports as it shows them
# make nvme   compiles DeepSpeed's library for NVMe (minutes): with it make test tries offload to disk

PYTHON ?= python3
VENV   ?= .venv
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

.PHONY: demo test lint nvme slurm launchers browser soak clean

demo: $(VENV)/.demo $(MODEL)/config.json
	@echo '== before: $(PROMPT)'
	@python -m hpc_tune generate --model $(MODEL) --prompt '$(PROMPT)' --max-tokens 64
	mpirun -np 2 python -m hpc_tune --config configs/smollm2_135m_lora.yaml model.dtype=$(DTYPE)
	@echo '== after: $(PROMPT)'
	@python -m hpc_tune generate --run runs/smollm2 --prompt '$(PROMPT)' --max-tokens 64

$(MODEL)/config.json: $(VENV)/.demo
	python tools/fetch_smollm2.py $(MODEL)

test: lint
	python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder tests

lint: $(VENV)/.test
	ruff check .
	ruff format --check .
	mypy

nvme: $(VENV)/.test
	DS_ACCELERATOR=cpu python -c 'from hpc_tune.engine.async_io import load_async_io as load; load("make nvme")'

slurm:
	sh tools/ensure_slurm.sh

launchers: $(VENV)/.test
	sh tools/ensure_launchers.sh $(VENV) .launchers

browser:
	command -v chromium || (apt-get update -q && apt-get install -y -q chromium) >/dev/null

soak: $(VENV)/.test nvme
	python -m pytest -q tests -m soak

$(VENV)/.%: setup.py constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable '.[$*]'
	sh tools/ensure_mpirun.sh $(VENV)
	sh tools/ensure_libaio.sh
	touch $@

clean:
	rm -rf $(VENV) .launchers build *.egg-info
