# Runs the script, as the work's user, on logs in a folder of its own that both users may write to.
script="$PWD/rotate.sh"
test -f "$script" || { echo "there is no rotate.sh"; exit 1; }
place=$(mktemp -d) || exit 1
chmod 777 "$place" && cd "$place" || exit 1

fail() { echo "$1"; exit 1; }
put() { # TEXT FILE: a new file, whoever made the one before
    rm -f "$2" && echo "$1" > "$2"
}
is() { # FILE TEXT: the file has exactly this line
    test -f "$1" || fail "$1 is not there ($3)"
    test "$(cat "$1")" = "$2" || fail "$1 has another text ($3)"
}

put one "my app.log"
"$AS_WORK" sh "$script" "my app.log" 2 || fail "status of a rotation"
is "my app.log.1" one first
test -f "my app.log" || fail "the log is not there again"
test -s "my app.log" && fail "the log is not empty again"
put two "my app.log"
"$AS_WORK" sh "$script" "my app.log" 2 || fail "status of a second rotation"
put three "my app.log"
"$AS_WORK" sh "$script" "my app.log" 2 || fail "status of a third rotation"
is "my app.log.1" three third
is "my app.log.2" two third
test -e "my app.log.3" && fail "more than KEEP copies"

"$AS_WORK" sh "$script" "my app.log" 2 || fail "status for an empty log"
is "my app.log.1" three "an empty log"

for n in 1 2 3 4 5 6 7 8 9 10 11 12; do put "copy $n" "b.log.$n"; done
put now b.log
"$AS_WORK" sh "$script" b.log 3 || fail "status with many copies"
is b.log.1 now many
is b.log.2 "copy 1" many
is b.log.3 "copy 2" many
for n in 4 5 6 7 8 9 10 11 12 13; do test -e "b.log.$n" && fail "b.log.$n is left"; done

put x c.log
put y c.log.1
for keep in 0 -1 two "" 1.5; do
    "$AS_WORK" sh "$script" c.log "$keep" 2> error
    test $? -eq 2 || fail "status for KEEP '$keep'"
    test -s error || fail "no line on standard error for KEEP '$keep'"
    is c.log x "KEEP $keep"
    is c.log.1 y "KEEP $keep"
done
"$AS_WORK" sh "$script" no.log 2 2> error
test $? -eq 2 || fail "status for a log that is not there"
test -e no.log && fail "a log that was not there was made"
"$AS_WORK" sh "$script" c.log 2> error
test $? -eq 2 || fail "status for one argument"
"$AS_WORK" sh "$script" c.log 2 3 2> error
test $? -eq 2 || fail "status for three arguments"
is c.log x "wrong arguments"
"$AS_WORK" sh "$script" c.log 10 || fail "status for KEEP 10"
is c.log.2 y "KEEP 10"
exit 0
