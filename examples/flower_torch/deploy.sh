#!/bin/sh
# A SuperLink with TLS and authentication, and NODES SuperNodes, all on this machine:
#   deploy.sh FOLDER NODES
# In earnest, each SuperNode runs on its own machine, with its own private key and ca.crt alone.
# Everything is stopped when this script is (Ctrl-C). Then, in another terminal:
#   FLWR_HOME=FOLDER/flwr flwr run . here --stream --run-config '...'
set -eu
mkdir -p "$1"
folder=$(cd "$1" && pwd) nodes=$2 port=${PORT:-9092}
keys=$folder/keys
export FLWR_HOME="$folder/flwr" FLWR_TELEMETRY_ENABLED=0

pids=
trap 'kill $pids 2>/dev/null || true; wait' EXIT
trap 'exit 0' INT TERM

[ -e "$keys" ] || "$(dirname "$0")/make_keys.sh" "$keys" 127.0.0.1 "$nodes"
mkdir -p "$FLWR_HOME"
cat >"$FLWR_HOME/config.toml" <<EOF
[superlink]
default = "here"

[superlink.here]
address = "127.0.0.1:$port"
root-certificates = "$keys/ca.crt"
EOF

# The database keeps who is registered when the SuperLink starts again.
flower-superlink --host 127.0.0.1 --port "$port" --database "$folder/superlink.db" \
    --ssl-certfile "$keys/server.crt" --ssl-keyfile "$keys/server.key" \
    --ssl-ca-certfile "$keys/ca.crt" --enable-supernode-auth \
    --disable-runtime-dependency-installation >"$folder/superlink.log" 2>&1 &
pids=$!
until flwr ls here >/dev/null 2>&1; do
    kill -0 "$pids" || { cat "$folder/superlink.log"; exit 1; }
    sleep 1
done

node=0
while [ "$node" -lt "$nodes" ]; do
    # A key is registered once; that it is known already is no error here.
    flwr supernode register "$keys/node-$node.pub" here >>"$folder/register.log" 2>&1 || true
    flower-supernode --superlink "127.0.0.1:$port" --root-certificates "$keys/ca.crt" \
        --auth-supernode-private-key "$keys/node-$node" \
        --host 127.0.0.1 --port "$((port + 1 + node))" \
        --node-config "partition-id=$node num-partitions=$nodes dpftrl-state=\"$folder/device-$node\"" \
        >"$folder/node-$node.log" 2>&1 &
    pids="$pids $!"
    node=$((node + 1))
done
echo "$nodes SuperNodes are starting; logs and keys are in $folder"
wait
