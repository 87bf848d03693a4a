# Rotates a log file; see README.md.
refuse() {
    echo "rotate.sh: $1" >&2
    exit 2
}

test $# -eq 2 || refuse "usage: sh rotate.sh FILE KEEP"
file=$1
keep=$2
case $keep in
    "" | *[!0-9]*) refuse "KEEP is not a whole number" ;;
esac
test "$keep" -ge 1 || refuse "KEEP is below 1"
test -f "$file" || refuse "there is no file $file"
test -s "$file" || exit 0

n=99
while [ "$n" -ge 1 ]; do
    if [ -e "$file.$n" ]; then
        if [ "$n" -ge "$keep" ]; then
            rm -f "$file.$n"
        else
            mv "$file.$n" "$file.$((n + 1))"
        fi
    fi
    n=$((n - 1))
done
mv "$file" "$file.1"
: > "$file"
