# Enters an image for `--root` (chroot.py), in namespaces of its own.
# $1: the root; $2: the agent; $3: the bundle, or nothing; $4: where its resolv.conf leads, or nothing; $5: the
# builder's own Python; $6: what it runs; then the image's Pythons.
# Of the builder's devices it gets those that every program may use, so that nothing there is done to its disks or GPUs.
# What is the kernel's, or the builder's, is read-only or a copy: programs of the image run as root, and a sysctl of
# theirs, a module, a chmod of /dev/null or a new resolv.conf would be the builder's.
# Debian's maintainer scripts ask invoke-rc.d to start what they have installed.
set -eu
put() { mount --bind "$1" "$2"; mount -o remount,bind,ro "$2"; }
root=$1 agent=$2 bundle=$3 resolver=$4 builder=$5 change_root=$6; shift 6
# It would lead to the builder's docker.
unset DOCKER_HOST
mount --rbind "$root" "$root"
cd "$root"
mount -t proc proc proc
for place in sys sysrq-trigger irq bus fs; do
    if [ -e "proc/$place" ]; then put "proc/$place" "proc/$place"; fi
done
put /sys sys
mount -t tmpfs -o mode=0755 tmpfs dev
for node in null zero full random urandom tty; do : > "dev/$node"; put "/dev/$node" "dev/$node"; done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
ln -s /proc/self/fd/0 dev/stdin; ln -s /proc/self/fd/1 dev/stdout; ln -s /proc/self/fd/2 dev/stderr
mount -t tmpfs -o mode=0755 tmpfs run
mkdir run/lock
cp "$agent" run/gpuprov-agent.pyz
if [ -n "$bundle" ]; then : > run/gpuprov.bundle; put "$bundle" run/gpuprov.bundle; fi
if [ -n "$resolver" ] && [ -e /etc/resolv.conf ]; then
    case $resolver in run/*) mkdir -p "${resolver%/*}"; : > "$resolver" ;; esac
    cp /etc/resolv.conf run/gpuprov-resolv.conf
    mount --bind run/gpuprov-resolv.conf "$resolver"
fi
if [ -f usr/sbin/invoke-rc.d ] && [ ! -L usr/sbin/invoke-rc.d ]; then
    printf '#!/bin/sh\nexit 0\n' > run/start-nothing
    chmod 755 run/start-nothing
    mount --bind run/start-nothing usr/sbin/invoke-rc.d
fi
exec "$builder" -I -c "$change_root" "$@"
