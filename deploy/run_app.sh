#!/bin/sh
# Keep a Flower app running until its training is over:
#   run_app.sh APP SUPERLINK RUN_CONFIG STATE_FILE
# Submits APP to the SuperLink (a name in Flower's config.toml), shows its log, and exits with 0 if it
# completed and with 1 if it must be submitted again. If this script was ended before the app, it finds
# the app by the id in STATE_FILE and goes on with it, instead of submitting a second one.
set -eu
app=$1 superlink=$2 config=$3 state=$4

# The status of the run: "running", "finished:completed", ...; nothing if the SuperLink does not say.
status() {
    flwr ls "$superlink" --run-id "$1" --format json 2>/dev/null |
        sed -n 's/.*"status": *"\([^"]*\)".*/\1/p' | head -n 1
}

is_up() { flwr ls "$superlink" --limit 1 >/dev/null 2>&1; }

wait_for_superlink() { until is_up; do sleep 2; done; }

wait_for_superlink
id=$(cat "$state" 2>/dev/null || true)
case $(test -z "$id" || status "$id") in
pending | starting | running) echo "run $id is still there" ;;
*)
    answer=$(flwr run "$app" "$superlink" --run-config "$config" --format json) || {
        echo "$answer"
        exit 1
    }
    id=$(echo "$answer" | sed -n 's/.*"run-id": *"\{0,1\}\([0-9]*\).*/\1/p' | head -n 1)
    echo "$id" >"$state.new"
    mv "$state.new" "$state"
    echo "submitted as run $id"
    ;;
esac

while :; do
    flwr log "$id" "$superlink" --stream || true # ends with the run, or with the SuperLink
    wait_for_superlink
    case $(status "$id") in
    finished:completed)
        rm -f "$state"
        echo "run $id completed"
        exit 0
        ;;
    pending | starting | running) sleep 5 ;;
    *)
        rm -f "$state"
        echo "run $id ended early, or is unknown: $(status "$id")" >&2
        exit 1
        ;;
    esac
done
