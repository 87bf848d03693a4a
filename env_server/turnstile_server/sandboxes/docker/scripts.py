"""The scripts that the fallback runs in a container: POSIX shell and the usual tools, BusyBox's included. Pure
data.

Each gets its arguments as ``$1``, ``$2``, never inside its text. A script that fails says why on stderr and exits
non-zero.
"""

MAX_ERROR_BYTES = 8192

READ = r"""
if [ -d "$1" ]; then echo 'it is a folder' >&2; exit 3; fi
if [ ! -e "$1" ]; then echo 'no such file or directory' >&2; exit 3; fi
if [ ! -f "$1" ]; then echo 'it is not a regular file' >&2; exit 3; fi
if [ ! -r "$1" ]; then echo 'permission denied' >&2; exit 3; fi
exec head -c "$2" -- "$1"
"""

# $2: its mode in octal, or nothing to keep the old one. A new file beside it and a rename, so that no reader sees
# half of it; through a link to where it leads; in place where the folder may not be written to.
WRITE = r"""
set -e
path=$1
if [ -L "$path" ]; then path=$(readlink -f -- "$path"); fi
if [ -d "$path" ]; then echo 'it is a folder' >&2; exit 3; fi
if [ -e "$path" ] && [ ! -f "$path" ]; then echo 'it is not a regular file' >&2; exit 3; fi
mkdir -p -- "$(dirname -- "$path")"
mode=$2
if [ -z "$mode" ] && [ -e "$path" ]; then mode=$(stat -c %a -- "$path"); fi
beside=$(dirname -- "$path")/.turnstile-$$
if (umask 077; : > "$beside") 2> /dev/null; then
  trap 'rm -f -- "$beside"' EXIT
  cat > "$beside"
  chmod "${mode:-644}" "$beside"
  mv -f -- "$beside" "$path"
else
  cat > "$path"
fi
"""

# The entries are checked before anything is unpacked; meanwhile the tar is a file of the user's in /tmp. BusyBox
# lists names as it would unpack them, and only reports on stderr that it has changed some.
UNPACK = r"""
set -e
umask 022
tar=$(mktemp /tmp/turnstile-XXXXXX)
trap 'rm -f -- "$tar" "$tar.names" "$tar.said"' EXIT
cat > "$tar"
tar -tf "$tar" > "$tar.names" 2> "$tar.said" || { echo 'not a whole tar' >&2; exit 3; }
if grep -qi 'removing leading' "$tar.said"; then
  echo "an entry has an absolute path, or one that leads out with '..'" >&2; exit 3
fi
bad=$(grep -E '^/|^\.\.$|^\.\./|/\.\./|/\.\.$' "$tar.names" | head -n 1)
case "$bad" in
  '') ;;
  /*) echo "$bad: an absolute path" >&2; exit 3 ;;
  *) echo "$bad: a path that leads out with '..'" >&2; exit 3 ;;
esac
odd=$(tar -tvf "$tar" | grep -E '^[^-dlh]' | head -n 1)
if [ -n "$odd" ]; then echo "${odd##* }: a device or a pipe" >&2; exit 3; fi
mkdir -p -- "$1"
cd -- "$1"
tar -xof "$tar"
"""

# Pipes, sockets and devices are left out: their names, as patterns that stand for themselves. BusyBox may lack -X.
PACK = r"""
if [ ! -d "$1" ]; then echo 'not a directory' >&2; exit 3; fi
cd -- "$1" || exit 3
odd=$(mktemp /tmp/turnstile-XXXXXX) || exit 3
find . ! -type f ! -type d ! -type l | sed 's/[][*?\\]/\\&/g' > "$odd"
if [ -s "$odd" ]; then tar -cf - -X "$odd" .; else tar -cf - .; fi
code=$?
rm -f -- "$odd"
exit $code
"""

# Repeated, because a process that is being killed may have started another. Root's own are only this shell, the
# container's first process and its child, which it replaces.
STOP_ALL = r"""
alive() {
  for file in /proc/[0-9]*/status; do
    state= uid=
    while read -r name value rest; do
      case $name in State:) state=$value ;; Uid:) uid=$value ;; esac
    done 2> /dev/null < "$file"
    case "$uid:$state" in :* | 0:* | *:Z | *:X) ;; *) return 0 ;; esac
  done
  return 1
}
for round in 1 2 3 4 5 6 7 8 9 10; do
  kill -s KILL -- -1 2> /dev/null
  alive || exit 0
  sleep 0.05 2> /dev/null || sleep 1
done
exit 1
"""
