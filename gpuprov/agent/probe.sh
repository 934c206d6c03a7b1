# What a controller learns of a host in the first round trip; parse_probe (probe.py) reads the answer.
# sh reads this on stdin, so the login shell (fish, csh) need not understand it. $1 is the agent's digest, $2 sudo or `:`;
# the interpreters to try follow. Every argument has passed an allow-list. Root will run the Python found here, so
# another user's own PATH does not count, $system does: PATH may begin with a folder that any process of that user can
# write to.
umask 077
LC_ALL=C; export LC_ALL
digest=$1 sudo=$2; shift 2
[ "$(id -u)" != 0 ] || system=$PATH
echo "gpuprov-probe 1"
echo "system $(uname -s) $(uname -m)"
echo "uid $(id -u)"
echo "cache $HOME/.cache/gpuprov"
echo "agent $(sha256sum "$HOME/.cache/gpuprov/agent-$digest.pyz" 2>/dev/null | cut -c1-64)"
( . /etc/os-release 2>/dev/null &&
  echo "os $ID|$VERSION_ID|$VERSION_CODENAME|$ID_LIKE|$PRETTY_NAME|$UBUNTU_CODENAME|$VARIANT_ID" )
broken=
for python in "$@"; do
  case $python in /*) place=$python;; *) place=/usr/bin/$python;; esac
  path=$(PATH=$system; command -v "$python") || { broken="$broken $place"; continue; }
  version=$("$path" -E -s -S -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null)
  echo "python ${version:-0.0.0} $path"
  case $version in 3.9.*|3.[1-9][0-9]*) broken=; break;; "") broken="$broken $path";; esac
done
# Packages that are installed and whose Python is gone or does not run: to install them again is no work for apt or dnf.
for place in $broken; do
  dpkg -S "$place" 2>/dev/null | cut -d: -f1 | sed 's/^/owner /'
  rpm -q --whatprovides --queryformat 'owner %{NAME}\n' "$place" 2>/dev/null | grep '^owner '
done
if [ "$(id -u)" != 0 ]; then
  said=$("$sudo" -n true 2>&1 </dev/null); code=$?
  echo "sudo $code $(echo "$said" | head -n 4 | tr "\n" " ")"
fi
# local_machine (probe.py) returns the same of the controller.
echo "machine $(head -c 64 /etc/machine-id 2>/dev/null) $(cat /proc/sys/kernel/random/boot_id) $(readlink /proc/self/ns/pid)"
echo "end"
