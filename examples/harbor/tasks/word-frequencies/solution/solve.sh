#!/bin/bash
cat > frequencies.awk <<'END'
{
  line = tolower($0)
  gsub(/[^a-z]+/, " ", line)
  count = split(line, words, " ")
  for (i = 1; i <= count; i++) seen[words[i]]++
}
END {
  for (word in seen) print seen[word], word | "sort -k1,1nr -k2,2"
}
END
