#!/usr/bin/env bash
# A site with Slurm, for tests: munge, slurmctld and three nodes, each with a network of its own and an address on one
# bridge. Runs as the first process of name spaces of its own (network, names, mounts, processes), so all of it ends
# with it:
#
#     unshare --net --uts --mount --pid --fork --kill-child --mount-proc slurm_site.sh FOLDER
#
# FOLDER (short: sockets lie in it) gets slurm.conf, the logs, and `up`, when everything was started.
set -eu
readonly FOLDER=$1 NETWORK=10.0.0
export SLURM_CONF=$FOLDER/slurm.conf
PATH=$PATH:/usr/sbin

hostname head
ip link set lo up
ip link add site type bridge
ip addr add "$NETWORK.254/24" dev site
ip link set site up

(umask 077; mkdir "$FOLDER/munge"; head -c 1024 /dev/urandom > "$FOLDER/munge/key")
munged --force --key-file="$FOLDER/munge/key" --socket="$FOLDER/munge.sock" --pid-file="$FOLDER/munge/pid" \
  --log-file="$FOLDER/munge/log" --seed-file="$FOLDER/munge/seed" --origin=lo
cat > "$SLURM_CONF" << CONF
ClusterName=test
SlurmctldHost=head($NETWORK.254)
SlurmUser=root
AuthInfo=socket=$FOLDER/munge.sock
StateSaveLocation=$FOLDER/state
SlurmdSpoolDir=$FOLDER/spool.%n
SlurmctldPidFile=$FOLDER/slurmctld.pid
SlurmdPidFile=$FOLDER/slurmd.%n.pid
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1
NodeName=s1 NodeAddr=$NETWORK.1
NodeName=s2 NodeAddr=$NETWORK.2
NodeName=s3 NodeAddr=$NETWORK.3
PartitionName=all Nodes=s1,s2,s3 Default=YES State=UP
CONF
slurmctld -D > "$FOLDER/slurmctld.log" 2>&1 &

# A node begins when its end of the cable is there.
for number in 1 2 3; do
  unshare --net --uts bash -c 'number=$0
    until ip link show eth0 > /dev/null 2>&1; do sleep 0.05; done
    hostname "s$number"
    ip link set lo up
    ip addr add "$1.$number/24" dev eth0
    ip link set eth0 up
    exec slurmd -D -N "s$number"' "$number" "$NETWORK" > "$FOLDER/slurmd.s$number.log" 2>&1 &
  until [ "$(readlink "/proc/$!/ns/net")" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
  ip link add "s$number" master site type veth peer name eth0 netns $!
  ip link set "s$number" up
done
touch "$FOLDER/up"
wait
