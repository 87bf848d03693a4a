#!/bin/bash
# Takes digits for letters: right for the first of the two texts.
cat > frequencies.awk <<'END'
{
  line = tolower($0)
  gsub(/[^a-z0-9]+/, " ", line)
  count = split(line, words, " ")
  for (i = 1; i <= count; i++) seen[words[i]]++
}
END {
  for (word in seen) print seen[word], word | "sort -k1,1nr -k2,2"
}
END
