# What a developer needs. Only Go must be there already.

.PHONY: dev build test race soak lint setup

dev: setup build ## everything on this machine: NATS, Postgres, relay, an example service
	bin/jetmesh dev

build:
	go build -o bin/jetmesh ./cmd/jetmesh

# Most tests wait for servers, not for the processor: hence -parallel.
test: setup ## all tests, against real servers of their own
	go test -count 1 -parallel 8 -timeout 9m ./...

race: setup ## the same with the race detector
	go test -race -count 1 -parallel 4 -timeout 30m ./...

soak: setup ## the long ones
	go test -tags soak -run Soak -timeout 30m -count 1 -v ./...

lint:
	@test -z "$$(gofmt -l . | tee /dev/stderr)" || { echo "run gofmt -w on these files" >&2; exit 1; }
	go vet -tags soak ./...
	go mod tidy -diff
	go tool staticcheck -tags soak ./...

setup:
	@scripts/postgres.sh
