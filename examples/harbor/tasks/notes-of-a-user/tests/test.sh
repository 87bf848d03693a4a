#!/bin/bash
# 1 where every check passes, else 0.
check() {
  [ "$(id -u)" -ne 0 ] || return 1
  [ "$(cat notes/birds.md)" = "$(printf '# birds\n\nThey fly.')" ] || return 1
  [ "$(cat notes/fish.md)" = "$(printf '# fish\n\nThey swim.')" ] || return 1
  [ "$(cat notes/cats.md)" = "$(printf '# cats\n\nThey sleep.\nThey hunt.')" ]
}
if check; then echo 1.0 > /logs/verifier/reward.txt; else echo 0.0 > /logs/verifier/reward.txt; fi
