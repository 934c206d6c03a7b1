# A Slurm of Debian's packages with two nodes on a copy of this machine in memory: test_slurm.py unshares namespaces first.
# $1: an empty folder; $2: well.xml and ill.xml, reports of nvidia-smi; $3: the clone; $4: its Python.
set -e
mount -t tmpfs none "$1"
mkdir "$1/up" "$1/work" "$1/root"
mount -t overlay -o "lowerdir=/,upperdir=$1/up,workdir=$1/work" none "$1/root"
mount -t proc none "$1/root/proc"
mount --rbind /sys "$1/root/sys"
for folder in dev run tmp; do mount -t tmpfs none "$1/root/$folder"; done
for node in null:3 zero:5 random:8 urandom:9; do mknod -m 666 "$1/root/dev/${node%:*}" c 1 "${node#*:}"; done
mkdir "$1/root/dev/shm" "$1/root/run/munge"
printf '#!/bin/sh\nexit 101\n' > "$1/root/usr/sbin/policy-rc.d"
chmod 755 "$1/root/usr/sbin/policy-rc.d"
cp "$2"/*.xml "$1/root/run/"
hostname gpu1
cat > "$1/root/run/health" <<EOF
#!/bin/sh
cd "$3" && exec "$4" -m gpuprov health --for slurm >> /run/health.log 2>&1
EOF
cat > "$1/root/usr/local/sbin/nvidia-smi" <<'EOF'
#!/bin/sh
cat /run/now.xml
EOF
chmod 755 "$1/root/run/health" "$1/root/usr/local/sbin/nvidia-smi"
cat > "$1/root/run/slurm.conf" <<'EOF'
ClusterName=test
SlurmctldHost=gpu1(127.0.0.1)
SlurmctldPort=17000
SlurmUser=root
SlurmdUser=root
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd.%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.%n.pid
SlurmctldLogFile=/run/slurmctld.log
SlurmdLogFile=/run/slurmd.%n.log
HealthCheckProgram=/run/health
HealthCheckInterval=3
HealthCheckNodeState=ANY
ReturnToService=2
NodeName=gpu1 NodeAddr=127.0.0.1 Port=17001
NodeName=gpu2 NodeAddr=127.0.0.1 Port=17002
PartitionName=all Nodes=ALL Default=YES
EOF
chroot "$1/root" bash -e <<'EOF'
export DEBIAN_FRONTEND=noninteractive
apt-get -qq install -y --no-install-recommends slurmctld slurmd slurm-client munge > /run/apt.log 2>&1 || { cat /run/apt.log; exit 1; }
echo "127.0.0.1 localhost gpu1 gpu2" > /etc/hosts
mkdir -p /etc/slurm /run/slurmctld
cp /run/slurm.conf /etc/slurm/
cp /run/well.xml /run/now.xml
chown munge /run/munge
su -s /bin/sh munge -c /usr/sbin/munged
state() { scontrol show node "$1" --oneliner | grep -oE ' State=\S+|Reason=.*' | tr '\n' ' '; echo; }
until_both() { for try in $(seq 100); do [ "$(sinfo -h -N -o %T | sort -u)" = "$1" ] && return; sleep 1; done; sinfo -N -l; cat /run/*.log; exit 1; }
slurmctld
for try in $(seq 100); do scontrol ping | grep -q UP && break; sleep 0.2; done
slurmd -N gpu1
slurmd -N gpu2
until_both idle
echo "well: $(state gpu1)"
cp /run/ill.xml /run/now.xml
until_both drained
echo "ill: $(state gpu1)"
echo "ill: $(state gpu2)"
cp /run/well.xml /run/now.xml
until_both idle
echo "again: $(state gpu1)"
scontrol update nodename=gpu1 state=drain reason="a fan is to be replaced"
/run/health
echo "an administrator's: $(state gpu1)"
sed 's/^/log: /' /run/health.log
EOF
