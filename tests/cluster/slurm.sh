#!/bin/bash
# A real Slurm over hosts.sh: slurmctld on h1, slurmd on the others.   slurm.sh up | down | restart HOST | CLIENT…
#   hosts.sh up 4; slurm.sh up; slurm.sh sinfo; slurm.sh srun -N2 hostname; slurm.sh down; hosts.sh down
# Which hosts: EK_RIG, as for hosts.sh. EK_SLURMD_TIMEOUT: seconds of silence after which a node counts as down (10).
set -eu
HERE=$(dirname "$(readlink -f "$0")")
HOSTS=$HERE/hosts.sh
S=/run/${EK_RIG:-ek}
D=$(cat "$S/shared")/slurm
export SLURM_CONF=$D/slurm.conf
daemon() { "$HOSTS" in "$1" nice -n 19 setsid "${@:2}" </dev/null >>"$D/log/$1.out" 2>&1 & }
case $1 in
up)
  mkdir -p "$D/state" "$D/log" "$D/spool"
  nodes=$(cd "$S" && ls ./*.pid | sed 's:./::; s:.pid::' | grep -v '^h1$' | paste -sd,)
  cat >"$SLURM_CONF" <<CONF
ClusterName=ek
SlurmctldHost=h1
AuthType=auth/none
CredType=cred/none
# begin time of a requeued job: now + cred_expire (120 s unless told)
AuthInfo=cred_expire=15
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool/%n
SlurmctldPidFile=$D/slurmctld.pid
SlurmdPidFile=$D/slurmd-%n.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_min_interval=0
ReturnToService=2
SlurmdTimeout=${EK_SLURMD_TIMEOUT:-10}
KillWait=5
NodeName=$nodes CPUs=8
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
CONF
  daemon h1 slurmctld -D
  for node in ${nodes//,/ }; do daemon "$node" slurmd -D; done
  for _ in $(seq 600); do
    state=$("$HOSTS" in h1 sinfo -h -N -o %T 2>/dev/null) && [ -n "$state" ] && ! grep -qvx idle <<<"$state" && exit 0
    sleep 0.1
  done
  echo "Slurm is not up after 60 s: ${state:-no answer}; see $D/log" >&2
  exit 1 ;;
restart) daemon "$2" slurmd -D ;;
down) "$HOSTS" in h1 scontrol shutdown || true ;;
*) exec "$HOSTS" in h1 "$@" ;;
esac
