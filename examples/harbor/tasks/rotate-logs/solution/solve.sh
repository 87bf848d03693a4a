#!/bin/bash
cat > rotate.sh <<'END'
[ -e "$1" ] || exit 1
rm -f "$1.$2"
number=$2
while [ "$number" -gt 1 ]; do
  before=$((number - 1))
  if [ -e "$1.$before" ]; then mv "$1.$before" "$1.$number"; fi
  number=$before
done
mv "$1" "$1.1"
: > "$1"
END
