# The commands of the README. `make help` lists them; ARGS passes arguments on.
.PHONY: help serve test bench

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

serve: ## Install what is missing, build, and run the server
	@scripts/setup.sh
	@cargo build --release --locked -p ebbtide
	@exec cargo run --quiet --release --locked -p ebbtide -- serve $(ARGS)

test: ## Install what is missing, then check the format, lint, and run every test
	@scripts/test.sh

bench: ## Measure pushing and popping; WHAT=retention measures deletion
	@scripts/setup.sh
	@cargo build --release --locked -p ebbtide
	@exec cargo run --quiet --release --locked -p ebbtide -- bench $(or $(WHAT),push-pop) $(ARGS)
