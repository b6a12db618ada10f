#!/bin/sh
# Keys of a deployment: make_keys.sh FOLDER HOST NODES
# A certificate authority and a certificate for the SuperLink at HOST (a name or an IP address), and
# a key pair for each of NODES SuperNodes. ca.key and the nodes' private keys are secrets.
set -eu
folder=$1 host=$2 nodes=$3
umask 077
mkdir -p "$folder"
cd "$folder"

case $host in
*[!0-9.]*) name=DNS:$host ;;
*) name=IP:$host ;;
esac

openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -sha256 \
    -subj "/CN=dpftrl deployment CA" -keyout ca.key -out ca.crt 2>/dev/null
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes \
    -subj "/CN=$host" -keyout server.key -out server.csr 2>/dev/null
printf 'subjectAltName=%s,IP:127.0.0.1,DNS:localhost\n' "$name" >server.ext
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 825 -sha256 \
    -extfile server.ext -out server.crt 2>/dev/null
rm server.csr server.ext

node=0
while [ "$node" -lt "$nodes" ]; do
    ssh-keygen -q -t ecdsa -b 384 -N "" -C "node $node" -f "node-$node"
    node=$((node + 1))
done
