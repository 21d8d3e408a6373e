# Every target does its own set-up: a virtual environment in .venv with the versions of requirements/development.txt (hashes checked)
# and torch $(TORCH). Set-up is done once, again when the lock file changes, and from the start when it was interrupted.
#
#   make train       train the default model on this machine (ARGS="--steps 50" hands options on)
#   make quick       after every edit, in a minute: checks and the most telling tests
#   make test        checks and tests          make check   lint, format, types, architecture
#   make soak        the long sweeps (hours)   make bench   speed against plain PyTorch
#                    PART=faults: one part by name, with its duration in `make soak-parts`
#                    MESHWRIGHT_SOAK=2/8: the second of eight parts, added to the tables of the others in bench/results
#   make systems     the tests of export, import, recordings and checkpoints with the other systems installed, in .venv/systems
#   make bench-cluster  regret on emulated clusters (Linux, root)
#   make docs        write the command pages   make gpu-check   a CUDA device in six parts: speed, memory, NCCL, faults
#   make site        the documentation as a site in build/site, in English and Chinese, with search, without a network
#                    SITE_URL=https://...: the public address, for canonical links and the site map
#   make lock        renew the lock file       make clean   remove what was built, .venv too
#   make release     build sdist and wheel in dist/, check and try them with both ends of the range of torch; publishes nothing
#
# PYTHON=python3.12 chooses the interpreter. Which registry or mirror pip asks is pip's own configuration.

# With this variable set, each process of the tests would compile every module that it imports.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
TORCH  ?= 2.13.0
ARGS   ?=
# Both ends of the range of torch that is supported (pyproject.toml).
TORCH_RANGE ?= 2.11.0 $(TORCH)

LOCK   := requirements/development.txt
BIN    := .venv/bin
READY  := .venv/ready-$(shell { echo $(TORCH) "$(PYTHON)" "$(CURDIR)"; cat $(LOCK); } | cksum | cut -d' ' -f1)
PIP    := $(BIN)/python -m pip --disable-pip-version-check -qq
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Whole files of tests at the same time; how many, tests/conftest.py says.
SIDES  := -n auto --dist loadfile

# One file for each part: plans on ranks against one device, golden plans, schedules, estimates, checkpoints, models, messages.
QUICK := $(addprefix tests/,unit/test_architecture.py ranks/test_plans.py unit/test_golden.py unit/test_schedules.py \
         unit/test_cost_in_flight.py mesh/test_checkpoint.py mesh/test_models.py unit/test_i18n.py)

SITE_LOCK  := requirements/site.txt
SITE_READY := .venv/site/ready-$(shell { echo "$(PYTHON)" "$(CURDIR)"; cat $(SITE_LOCK); } | cksum | cut -d' ' -f1)

SYSTEM_PIP := .venv/systems/bin/python -m pip --disable-pip-version-check -qq install
# What other systems take part in, whole: round trips, their parsers, their loops recorded, their checkpoints, their pages.
SYSTEMS := $(addprefix tests/,unit/test_interop.py mesh/test_interop_parsers.py mesh/test_checkpoint_engines.py \
           ranks/test_interop_script.py ranks/test_recording_engines.py ranks/test_checkpoint_systems.py ranks/test_coming_from.py)

.PHONY: train quick test check lint soak soak-parts bench bench-cluster docs site gpu-check lock release setup clean systems
.SILENT:

# Exit code 75: stopped by Ctrl-C with everything saved, which make would report as an error.
train: $(READY)
	$(BIN)/meshwright train $(ARGS) || [ $$? -eq 75 ]

# Lint and types run beside the tests: without a cache, mypy takes more than a minute of one core.
test: $(READY)
	$(MAKE) --no-print-directory lint & lint=$$!; \
	$(PYTEST) $(SIDES) $(ARGS); tests=$$?; \
	wait $$lint || { echo "lint, format or types failed: run make lint" >&2; exit 1; }; exit $$tests

quick: lint
	$(PYTEST) $(SIDES) $(QUICK) $(ARGS)

check: lint
	$(PYTEST) tests/unit/test_architecture.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet . || { echo "some files are not formatted: run $(BIN)/ruff format ."; exit 1; }
	$(BIN)/mypy

# `make soak PART=` lists the parts too.
ifeq ($(origin PART),undefined)
soak: $(READY)
	$(PYTEST) -m soak $(ARGS)
else ifeq ($(PART),)
soak: soak-parts
else
soak: $(READY)
	files=$$($(BIN)/python tests/soak_parts.py '$(PART)') && $(PYTEST) -m soak $$files $(ARGS)
endif

soak-parts:
	$(PYTHON) tests/soak_parts.py

# A path file shows the packages of .venv to the other environment. DeepSpeed is built from source, without kernels. Megatron-Core asks
# for an older numpy, but runs with that of .venv.
systems: $(READY)
	$(PYTHON) -m venv --clear .venv/systems
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > "$$(echo .venv/systems/lib/python*/site-packages)/venv.pth"
	$(SYSTEM_PIP) wheel && DS_BUILD_OPS=0 $(SYSTEM_PIP) --no-build-isolation -r requirements/systems.in && $(SYSTEM_PIP) --no-deps megatron-core==0.15.0 nemo-automodel==0.7.0
	for command in torchrun=torch.distributed.run meshwright=meshwright.__main__; do \
	  file=.venv/systems/bin/$${command%=*} && printf '#!%s\nimport sys\nfrom %s import main\nsys.exit(main())\n' \
	    "$(CURDIR)/.venv/systems/bin/python" "$${command#*=}" > $$file && chmod +x $$file; \
	done
	OMP_NUM_THREADS=1 .venv/systems/bin/python -m pytest -m 'soak or not soak' -rs $(SYSTEMS) $(ARGS)

bench-cluster: $(READY)
	$(BIN)/python -m bench.cluster $(ARGS)

bench: $(READY)
	$(BIN)/python -m bench $(ARGS)

docs: $(READY)
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/refresh.py
	$(BIN)/python docs/page_check.py --pictures
	$(PYTEST) tests/unit/test_docs.py

# In an environment of its own: the site is built from the pages as they are, so it needs neither torch nor this package.
site: $(SITE_READY)
	SITE_URL=$(SITE_URL) .venv/site/bin/python docs/build_site.py build/site
	echo "to read it: $(PYTHON) -m http.server -d build/site"

$(SITE_READY):
	$(PYTHON) -m venv --clear .venv/site
	.venv/site/bin/python -m pip --disable-pip-version-check -qq install --require-hashes --no-deps -r $(SITE_LOCK)
	touch $@

gpu-check: $(READY)
	$(BIN)/python -m bench.gpu_check $(ARGS)

setup: $(READY)

$(READY):
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed, this is {v[0]}.{v[1]}; name another: make PYTHON=python3.12")'
	exec requirements/set_up.sh "$(PYTHON)" "$(LOCK)" "$(TORCH)" "$@"

# In an environment of its own, because the tool that writes the lock file is no part of it. No address of a registry is written.
lock:
	tool=$$(mktemp -d) && trap 'rm -rf "$$tool"' EXIT && $(PYTHON) -m venv "$$tool" && "$$tool/bin/python" -m pip -qq install pip-tools && \
	"$$tool/bin/pip-compile" --quiet --upgrade --generate-hashes --allow-unsafe --strip-extras --no-emit-index-url --no-emit-find-links \
	  --no-emit-trusted-host --no-emit-options --no-header --no-annotate -o $(LOCK) requirements/development.in && \
	"$$tool/bin/pip-compile" --quiet --upgrade --generate-hashes --allow-unsafe --strip-extras --no-emit-index-url --no-emit-find-links \
	  --no-emit-trusted-host --no-emit-options --no-header --no-annotate -o $(SITE_LOCK) requirements/site.in && \
	"$$tool/bin/python" -m pip download -qq --no-deps --dest "$$tool/files" -r requirements/on_torch.in && \
	for file in "$$tool"/files/*.whl; do \
	  printf '%s \\\n    %s\n' "$$(basename "$$file" | cut -d- -f1,2 | sed s/-/==/)" "$$("$$tool/bin/python" -m pip hash "$$file" | grep -o -- '--hash=.*')" >> $(LOCK); \
	done

# Each wheel is tried as a user installs it: in an environment of its own, from an empty folder, without this source tree.
release:
	tool=$$(mktemp -d) && trap 'rm -rf "$$tool"' EXIT && rm -rf dist && $(PYTHON) -m venv "$$tool/build" && \
	"$$tool/build/bin/python" -m pip -qq install build twine && "$$tool/build/bin/python" -m build --outdir dist . > "$$tool/log" || \
	{ cat "$$tool/log" >&2; exit 1; }; \
	"$$tool/build/bin/python" -m twine check --strict dist/* && mkdir "$$tool/empty" && \
	for torch in $(TORCH_RANGE); do \
	  echo "torch $$torch" && rm -rf "$$tool/user" && $(PYTHON) -m venv "$$tool/user" && \
	  "$$tool/user/bin/python" -m pip -qq install torch==$$torch dist/*.whl && "$$tool/user/bin/python" -m pip -qq check && \
	  (cd "$$tool/empty" && rm -rf runs && "$$tool/user/bin/meshwright" --version && \
	   "$$tool/user/bin/meshwright" train --steps 3 --cluster local:2 --plan dp2 > "$$tool/log" 2>&1 || { cat "$$tool/log" >&2; exit 1; }) || exit 1; \
	done && ls -l dist

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache src/*.egg-info
	find src tests bench docs examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
