# The eight newest agents stay, and what killed commands left counts as one. Folders are unpacked agents. A host that
# lacks a program for this, such as xargs, keeps all.
{ ( cd "$d" && ls -1tAp | grep -E "^[.]?agent-.*[^/]$" | tail -n +9 | xargs rm -f ) 2>/dev/null || :; }
