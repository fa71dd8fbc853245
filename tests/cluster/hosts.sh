#!/bin/bash
# Hosts on one machine. Each has its own network, host name, process ids, IPC, /dev/shm, /tmp and /etc/hosts; the other
# files are those of the machine. Needs root.
#
#   hosts.sh up N [SHARED [KEEP…]]   start h1…hN; SHARED is the directory that a cluster would share. What lies below
#                                    /tmp or /var/tmp is hidden from the hosts, but for SHARED and each KEEP
#   hosts.sh in HOST COMMAND…        run a command there, in this directory
#   hosts.sh cut HOST | mend HOST    take its cable out, put it back; its connections hang
#   hosts.sh shape HOST RATE|off     limit both directions of its link, e.g. 50mbit
#   hosts.sh freeze HOST | thaw HOST stop all its processes, let them go on; its kernel goes on acknowledging packets
#   hosts.sh bindfs HOST             SHARED is seen there through FUSE, which keeps attributes and names for 30 s
#   hosts.sh crash HOST              power off: every process of it dies at once      hosts.sh reboot HOST
#   hosts.sh down                    all gone; may be called at any time, also after a crash of the caller
#   hosts.sh guard                   wait for the end of standard input, then `down`
#
# Several sets of hosts may be up at once, each with a name and a network of its own:
#   EK_RIG   name (ek); namespaces are EK_RIG-h1 …, the state lies in /run/EK_RIG     EK_NET   10.77.EK_NET.N (0)
set -eu
RIG=${EK_RIG:-ek}
NET=10.77.${EK_NET:-0}
S=/run/$RIG
SELF=$(readlink -f "$0")
FABRIC=$RIG-fabric

number_of() { cat "$S/$1.number"; }
holder() { cat "$S/$1.pid"; }

# The processes of a host, as this machine numbers them.
processes() {
  local wanted found
  wanted=$(readlink "/proc/$(holder "$1")/ns/pid") || return 0
  for found in /proc/[0-9]*; do
    if [ "$(readlink "$found/ns/pid" 2>/dev/null)" = "$wanted" ]; then echo "${found#/proc/}"; fi
  done
}

# The nsenter processes that wait for those of a host. They are not of the host, and stop themselves when it is frozen.
waiters() {
  local pid parent
  for pid in $(processes "$1"); do
    parent=$(awk '/^PPid:/ {print $2}' "/proc/$pid/status" 2>/dev/null) || continue
    if [ "$(cat "/proc/$parent/comm" 2>/dev/null)" = nsenter ]; then echo "$parent"; fi
  done
}

# Kill a host. A stopped nsenter would never reap its child, and the host would never be gone.
switch_off() {
  local waiting pid
  waiting=$(waiters "$1")
  kill -9 "$(holder "$1")" 2>/dev/null || true
  for pid in $waiting; do kill -CONT "$pid" 2>/dev/null || true; done
}

# Process ids repeat: only a process that is in the host's network is its holder.
holds() {
  [ "$(readlink "/proc/$2/ns/net" 2>/dev/null)" = "net:[$(stat -L -c %i "/run/netns/$RIG-$1" 2>/dev/null)]" ]
}

forget_network() {
  ip netns del "$RIG-$1" 2>/dev/null || true
  ip -n "$FABRIC" link del "$1" 2>/dev/null || true
}

boot() { # HOST
  local h=$1 ns=$RIG-$1 outer n
  n=$(number_of "$h")
  forget_network "$h"
  ip netns add "$ns"
  ip -n "$FABRIC" link add "$h" type veth peer name eth0 netns "$ns"
  ip -n "$FABRIC" link set "$h" master br0 up
  ip -n "$ns" addr add "$NET.$n/24" dev eth0
  ip -n "$ns" link set lo up
  ip -n "$ns" link set eth0 up
  # The holder is process 1 of the host. It is bash, which reaps orphans; when it dies, the kernel kills the rest.
  rm -f "$S/$h.pid" "$S/$h.up"
  nsenter --net="/run/netns/$ns" unshare --pid --fork --kill-child --mount --uts --ipc --mount-proc \
    "$SELF" hold "$h" </dev/null >>"$S/$h.log" 2>&1 &
  outer=$!
  for _ in $(seq 400); do
    [ -e "$S/$h.up" ] && break
    kill -0 "$outer" 2>/dev/null || { cat "$S/$h.log" >&2; exit 1; }
    sleep 0.02
  done
  [ -e "$S/$h.up" ] || { echo "host $h did not start within 8 s; see $S/$h.log" >&2; exit 1; }
  pgrep -P "$outer" >"$S/$h.pid"
}

hold() { # HOST, as process 1 of it
  local path n=0
  mount --make-rprivate /
  mount -t tmpfs -o size=4g shm /dev/shm
  mkdir -p "$S/kept"
  mount -t tmpfs -o size=1m kept "$S/kept"
  while read -r path; do
    n=$((n + 1))
    mkdir "$S/kept/$n"
    mount --bind "$path" "$S/kept/$n"
  done <"$S/keep"
  mount -t tmpfs -o mode=1777 tmp /tmp
  mount -t tmpfs -o mode=1777 tmp /var/tmp
  n=0
  while read -r path; do
    n=$((n + 1))
    mkdir -p "$path"
    mount --move "$S/kept/$n" "$path"
  done <"$S/keep"
  mount --bind "$S/hosts" /etc/hosts
  hostname "$1"
  touch "$S/$1.up"
  while :; do sleep 3600 & wait; done
}

case $1 in
up)
  "$SELF" down
  mkdir -p "$S"
  shared=$(readlink -f "${3:-/var/tmp/$RIG-shared}")
  mkdir -p "$shared"
  echo "$shared" >"$S/shared"
  : >"$S/keep"
  for path in "$shared" "${@:4}"; do
    case $(readlink -f "$path") in /tmp/* | /var/tmp/*) readlink -f "$path" >>"$S/keep" ;; esac
  done
  ip netns add "$FABRIC"
  ip -n "$FABRIC" link add br0 type bridge
  ip -n "$FABRIC" link set br0 up
  { echo "127.0.0.1 localhost"; for i in $(seq "$2"); do echo "$NET.$i h$i"; done; } >"$S/hosts"
  for i in $(seq "$2"); do echo "$i" >"$S/h$i.number"; boot "h$i"; done ;;
hold) hold "$2" ;;
in)
  h=$2; shift 2
  exec nsenter -t "$(holder "$h")" -n -m -u -i -p --wd="$PWD" "$@" ;;
cut) ip -n "$FABRIC" link set "$2" down ;;
mend) ip -n "$FABRIC" link set "$2" up ;;
shape)
  for place in "$FABRIC $2" "$RIG-$2 eth0"; do
    read -r ns device <<<"$place"
    tc -n "$ns" qdisc del dev "$device" root 2>/dev/null || true
    [ "$3" = off ] || tc -n "$ns" qdisc add dev "$device" root tbf rate "$3" burst 256kb latency 100ms
  done ;;
freeze)
  # kill -1 spares process 1 and the caller; twice, since a process may have been forked meanwhile.
  for _ in 1 2; do nsenter -t "$(holder "$2")" -p -m bash -c 'kill -STOP -1' 2>/dev/null || true; done ;;
thaw)
  waiting=$(waiters "$2")
  nsenter -t "$(holder "$2")" -p -m bash -c 'kill -CONT -1' 2>/dev/null || true
  for pid in $waiting; do kill -CONT "$pid" 2>/dev/null || true; done ;;
bindfs)
  shared=$(cat "$S/shared")
  "$SELF" in "$2" bindfs -o attr_timeout=30,entry_timeout=30,negative_timeout=30,nonempty "$shared" "$shared" ;;
processes) processes "$2" ;;
crash)
  "$SELF" cut "$2"
  switch_off "$2"
  while kill -0 "$(holder "$2")" 2>/dev/null; do sleep 0.02; done
  rm -f "$S/$2.pid"
  forget_network "$2" ;;
reboot) boot "$2" ;;
guard)
  cat >/dev/null
  "$SELF" down ;;
down)
  [ -d "$S" ] || exit 0
  for file in "$S"/*.number; do
    [ -e "$file" ] || continue
    h=$(basename "$file" .number)
    if [ -s "$S/$h.pid" ] && holds "$h" "$(holder "$h")"; then switch_off "$h"; fi
    forget_network "$h"
  done
  ip netns del "$FABRIC" 2>/dev/null || true
  rm -rf "$S" ;;
*) sed -n '2,/^set/p' "$SELF" | sed '$d' >&2; exit 2 ;;
esac
