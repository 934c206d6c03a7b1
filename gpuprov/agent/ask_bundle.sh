# As root. $1: the bundle's name, $2: its size in bytes.
# Prints how many bytes are stored; a file that is too long counts as none.
f="CACHE/$1"; for p in "$f" "$f.part"; do
if test -f "$p"; then n="$(stat -c %s "$p")";
if test "$n" -le "$2"; then if test "$p" = "$f"; then echo "whole $n"; else echo "part $n"; fi; exit 0; fi;
rm -f "$p"; fi; done; echo "part 0"
