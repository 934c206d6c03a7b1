# As root. $1: the bundle's name, $2: its size in bytes; TAKE brings the bytes that are missing.
umask 077; set -e; d=CACHE; mkdir -p "$d"; f="$d/$1"; TAKE;
n="$(stat -c %s "$f.part")"; test "$n" = "$2" || { echo "$n of $2 bytes arrived" >&2; exit 1; };
mv -f "$f.part" "$f";
# Removes bundles of other digests, for they are large; but not what another controller uploads now.
find "$d" -maxdepth 1 -type f -name "bundle-*.tar*" -not -name "$1" "(" -name "*.tar" -o -mmin +1440 ")" -exec rm -f {} +
