#!/bin/sh
# A whole deployment on this machine, for a try:
#   try.sh APP FOLDER NODES RUN_CONFIG
# A SuperLink with TLS and authentication and NODES SuperNodes run APP to its end; then everything is
# stopped. Keys, logs and databases are in FOLDER. Run it again, and the training goes on where it was.
# In earnest each SuperNode runs on its own machine, and systemd restarts what fails: see README.md.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
app=$(cd "$1" && pwd)
mkdir -p "$2"
folder=$(cd "$2" && pwd) nodes=$3 config=$4 port=${PORT:-9092}
keys=$folder/keys
export FLWR_HOME="$folder/flwr" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1

pids=
trap 'kill $pids 2>/dev/null || true; wait' EXIT
trap 'exit 130' INT TERM

[ -e "$keys" ] || "$here/make_keys.sh" "$keys" 127.0.0.1 "$nodes"
mkdir -p "$FLWR_HOME"
sed "s|127.0.0.1:9092|127.0.0.1:$port|; s|/etc/dpftrl/keys|$keys|" \
    "$here/config.toml" >"$FLWR_HOME/config.toml"

flower-superlink --host 127.0.0.1 --port "$port" --database "$folder/superlink.db" \
    --ssl-certfile "$keys/server.crt" --ssl-keyfile "$keys/server.key" \
    --ssl-ca-certfile "$keys/ca.crt" --enable-supernode-auth \
    --disable-runtime-dependency-installation >>"$folder/superlink.log" 2>&1 &
pids=$!
until flwr ls here --limit 1 >/dev/null 2>&1; do
    kill -0 "$pids" || { tail "$folder/superlink.log"; exit 1; }
    sleep 1
done

node=0
while [ "$node" -lt "$nodes" ]; do
    # A key is registered once; that it is known already is no error here.
    flwr supernode register "$keys/node-$node.pub" here >>"$folder/register.log" 2>&1 || true
    # A SuperNode that comes back too early is refused: start it again, as systemd does.
    (
        child=
        trap 'kill $child 2>/dev/null; exit 0' TERM
        while :; do
            flower-supernode --superlink "127.0.0.1:$port" --root-certificates "$keys/ca.crt" \
                --auth-supernode-private-key "$keys/node-$node" \
                --host 127.0.0.1 --port "$((port + 1 + node))" \
                --node-config "partition-id=$node num-partitions=$nodes dpftrl-state=\"$folder/device-$node\"" &
            child=$!
            wait "$child" || true
            sleep 5 &
            child=$!
            wait "$child" || true
        done
    ) >>"$folder/node-$node.log" 2>&1 &
    pids="$pids $!"
    node=$((node + 1))
done
echo "$nodes SuperNodes are starting; logs and keys are in $folder"
sh "$here/run_app.sh" "$app" here "$config" "$folder/flower-run-id"
